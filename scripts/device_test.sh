#!/bin/sh
# Builds the kernel tests for a CUDA card as one stripped binary, or runs it on the machine that has the card.
#
#   scripts/device_test.sh build   here: target-device/cube_kernels
#   scripts/device_test.sh run     there, in a copy of the tree with target-device/
set -eu
cd "$(dirname "$0")/.."
case "${1:-}" in
build)
    mkdir -p target-device
    binary=$(cargo test -p perplexity-kernels --features "${FEATURES:-cuda}" --test cube_kernels --no-run \
        --message-format=json | sed -n 's/.*"executable":"\([^"]*cube_kernels[^"]*\)".*/\1/p' | tail -n 1)
    strip -o target-device/cube_kernels "$binary"
    ls -l target-device/cube_kernels
    ;;
run)
    export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}:$(python3 -c 'import nvidia, os
print(":".join(os.path.join(p, d, "lib") for p in nvidia.__path__ for d in os.listdir(p)))' 2>/dev/null || true)"
    target-device/cube_kernels cuda:: --test-threads=1
    ;;
*)
    sed -n '2,6p' "$0"
    exit 2
    ;;
esac
