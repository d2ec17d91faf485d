#!/bin/sh
# Builds the benchmark of the 27B layer stack as one stripped binary, or runs it on the machine that has the card.
#
#   scripts/device_bench.sh build              here: target-device/device_bench
#   scripts/device_bench.sh run [TABLE...]     there; tables: operations, packed, stack, long (all)
#
# Tables go to standard output in Markdown; docs/performance.md keeps the ones worth keeping.
set -eu
cd "$(dirname "$0")/.."
case "${1:-}" in
build)
    mkdir -p target-device
    binary=$(cargo build -p perplexity-kernels --features "${FEATURES:-cuda}" --example device_bench \
        --message-format=json | sed -n 's/.*"executable":"\([^"]*device_bench[^"]*\)".*/\1/p' | tail -n 1)
    strip -o target-device/device_bench "$binary"
    ls -l target-device/device_bench
    ;;
run)
    shift
    target-device/device_bench "$@"
    ;;
*)
    sed -n '2,7p' "$0"
    exit 2
    ;;
esac
