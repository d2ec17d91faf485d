#!/bin/sh
# Builds the program for a CUDA card as one stripped, compressed binary, or runs it on the machine that has the card.
#
#   scripts/device_score.sh build              here: target-device/burn-perplexity.xz
#   scripts/device_score.sh run demo           there: the demo with every KV format on the card, against the CPU
#   scripts/device_score.sh run -- ARGUMENTS   there: the program with these arguments
#
# Tables go to standard output in Markdown; docs/performance.md keeps the ones worth keeping.
set -eu
cd "$(dirname "$0")/.."
. scripts/device_common.sh
program=target-device/burn-perplexity

# figure REPORT KEY: a number of a report by its path.
figure() {
    python3 -c 'import json, sys
value = json.load(open(sys.argv[1] + "/report.json"))
for key in sys.argv[2].split("."): value = value[key]
print(value)' "$1" "$2"
}

case "${1:-} ${2:-}" in
"build "*)
    # As a workspace, as the tests are built.
    cargo test --locked --workspace --features "${FEATURES:-burn-perplexity/cuda}" --no-run --test program
    pack "${CARGO_TARGET_DIR:-target}/debug/burn-perplexity" "$program"
    ;;
"run demo")
    libraries
    unpack "$program"
    work=$(mktemp -d)
    "$program" --device flex --log-level warning --save-top-tokens "$work/cpu.bin" --output "$work/cpu" > /dev/null
    echo "CPU, bf16: $(figure "$work/cpu" overall.perplexity)"
    for start in first second; do
        before=$(date +%s.%N)
        "$program" --device cuda:0 --log-level warning --output "$work/$start" > /dev/null
        after=$(date +%s.%N)
        echo "$start start: $(python3 -c "print(f'{$after - $before:.2f}')") s, loading $(figure "$work/$start" timing.load_seconds) s"
    done
    echo '| `--kv-dtype` | CPU | card | relative | mean KL from the CPU |'
    echo '|---|---:|---:|---:|---:|'
    for kv in bf16 int8 fp8 kivi4 k8v4 rk8v4 rk6v4-e8 rk4v4 nvfp4 nvfp4@single turbo4 rk4v4-e8 kivi2 k4v2 turbo3 vq2 \
        rk2v4-e8 turbo2; do
        "$program" --device flex --kv-dtype "$kv" --log-level warning --save-top-tokens "$work/$kv.bin" \
            --output "$work/cpu-$kv" > /dev/null
        "$program" --device cuda:0 --kv-dtype "$kv" --log-level warning --kl-reference "$work/$kv.bin" \
            --output "$work/card-$kv" > /dev/null
        python3 - "$kv" "$work/cpu-$kv/report.json" "$work/card-$kv/report.json" << 'TABLE'
import json, sys
cpu, card = (json.load(open(path)) for path in sys.argv[2:])
a, b = (report["overall"]["perplexity"] for report in (cpu, card))
kl = card["kl_divergence"]["mean_kl"]
print(f"| `{sys.argv[1]}` | {a:.5f} | {b:.5f} | {b / a - 1:+.1e} | {kl:.2e} |")
TABLE
    done
    rm -rf "$work"
    ;;
"run --")
    shift 2
    libraries
    unpack "$program"
    exec "$program" "$@"
    ;;
*) usage "$0" ;;
esac
