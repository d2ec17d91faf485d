#!/bin/sh
# Builds the tests for a CUDA card as stripped, compressed binaries, or runs them on the machine that has the card.
#
#   scripts/device_test.sh build [NAME...]   here: target-device/NAME.xz
#   scripts/device_test.sh run [NAME...]     there, in a copy of the tree with target-device/
#
# Names: cube_kernels (every kernel against its reference), coded_rows and kv_device (the KV cache's kernels against the host's
# codecs), precise_device (the operations in f64 against the host's), forward_device (the model against Hugging Face and the CPU),
# flash_next_device (Qwen3.8-Flash-Next against the CPU).
set -eu
cd "$(dirname "$0")/.."
. scripts/device_common.sh
FEATURES=${FEATURES:-burn-perplexity/cuda}
export DEVICE_TESTS=cuda
action=${1:-}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- cube_kernels coded_rows kv_device precise_device forward_device flash_next_device
for name in "$@"; do
    case "$name" in
    cube_kernels | coded_rows | precise_device) tests=cuda:: ;;
    kv_device) tests=cuda ;;
    forward_device | flash_next_device) tests= ;;
    *) usage "$0" ;;
    esac
    case "$action" in
    build)
        # As a workspace, so that every dependency is compiled once for all tests.
        binary=$(cargo test --locked --workspace --features "$FEATURES" \
            --test "$name" --no-run --message-format=json | sed -n "s/.*\"executable\":\"\([^\"]*$name[^\"]*\)\".*/\1/p" | tail -n 1)
        pack "$binary" "target-device/$name"
        ;;
    run)
        libraries
        unpack "target-device/$name"
        # Where the tests find tests/data, as cargo would set it.
        CARGO_MANIFEST_DIR=$PWD/model "target-device/$name" $tests --test-threads=1 --nocapture || status=$?
        ;;
    *) usage "$0" ;;
    esac
done
exit "${status:-0}"
