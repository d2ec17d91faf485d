#!/bin/sh
# Measures the program on a CUDA card with models of published geometries and random weights, beside PyTorch and Hugging Face
# transformers in the same run.
#
#   scripts/device_score.sh build          here: target-device/burn-perplexity.xz
#   scripts/device_bench.sh run [NAME...]  there
#
# Names: peer (products, attention, delta rule and transformers' own pass; what follows is also given as a ratio to the latter),
# nvfp4 (27B, NVFP4 and FP8 mix, 19 GiB), bf16 (27B, 50 GiB, route lossless too), moe (35B-A3B in 4 and 5 bits, 20 GiB).
# Artifacts are made in $WORK, by default a new temporary directory, one after the other, and deleted. Tables go to standard
# output in Markdown; docs/performance.md keeps the ones worth keeping.
set -eu
cd "$(dirname "$0")/.."
. scripts/device_common.sh
program=target-device/burn-perplexity

# bench ARTIFACT OPTIONS: rows of the speed table.
bench() {
    "$program" bench "$@" --device cuda:0 --log-level warning --json > "$work/bench.json"
    python3 - "$work/bench.json" "$work/peer.md" << 'TABLE'
import json, os, re, sys
bench, peer = json.load(open(sys.argv[1])), None
if os.path.exists(sys.argv[2]):
    # The last table is the peer's pass; | windows x tokens | ms | tokens/s |
    peer = float(re.findall(r"^\| 4 x 4096 \|[^|]*\| (\d+) \|", open(sys.argv[2]).read(), re.M)[-1])
for speed in bench["speeds"]:
    prefilled = speed["prefilled_tokens_per_second"]
    of_peer = f"{prefilled / peer:.2f}" if peer and "35b" not in bench["model"] else ""
    print(
        f"| {bench['model']} | {bench['activations']} | {speed.get('weight_residency', '')} | {speed['kv_dtype']} "
        f"| {speed['batch']} x {speed['context']:,} | {speed['seconds']:.3f} | {prefilled:,.0f} "
        f"| {speed['scored_tokens_per_second']:,.0f} | {of_peer} |",
        flush=True,
    )
TABLE
}

# operations ARTIFACT OPTIONS: the program's own table of a pass.
operations() {
    echo '```'
    "$program" bench "$@" --device cuda:0 --log-level warning --runs 1
    echo '```'
}

header() {
    echo
    echo '| model | activations | weights | KV | windows | s | prefilled tokens/s | scored tokens/s | of Hugging Face |'
    echo '|---|---|---|---|---|---:|---:|---:|---:|'
}

# made PRESET RECIPE: the artifact.
made() {
    "$program" synth --preset "$1" --recipe "$2" --tokenizer tests/data/demo_hf --log-level warning "$work/$1.ninfer"
}

# start ARTIFACT WHICH: seconds from launch until windows are scored.
start() {
    "$program" "$1" --text README.md --context 512 --stride 256 --device cuda:0 --log-level warning --output "$work/start" > "$work/start.log"
    python3 -c 'import json, sys
timing = json.load(open(sys.argv[1] + "/start/report.json"))["timing"]
seconds, load = timing["total_seconds"] - timing["score_seconds"], timing["load_seconds"]
print(f"{sys.argv[2]} start: {seconds:.1f} s until scoring, {load:.1f} of them loading")' "$work" "$2"
    rm -r "$work/start"
}

# lossless ARTIFACT: tokens per second of the second batch of four windows.
lossless() {
    "$program" "$1" --text eval/corpora/open-1m/data/english_long_form/00.txt --chunks 8 --batch 4 --lossless --device cuda:0 --log-level warning \
        --output "$work/lossless" > /dev/null
    python3 -c 'import json, sys
windows = json.load(open(sys.argv[1] + "/lossless/report.json"))["streams"][0]["windows"][4:8]
seconds = sum(window["seconds"] for window in windows)
print(f"Route lossless, 4 x 4,096: {seconds:.2f} s, {4 * 4095 / seconds:,.0f} prefilled and {4 * 2048 / seconds:,.0f} scored tokens/s")' "$work"
    rm -r "$work/lossless"
}

[ "${1:-}" = run ] || usage "$0"
shift
[ $# -gt 0 ] || set -- peer nvfp4 bf16 moe
libraries
unpack "$program"
work=${WORK:-$(mktemp -d)}
windows='--context 4096 --batch 4'
for name in "$@"; do
    case "$name" in
    peer) python3 scripts/device_peer.py | tee "$work/peer.md" ;;
    nvfp4)
        made qwen3.8-27b qwen3_8_27b_nvfp4
        artifact=$work/qwen3.8-27b.ninfer
        start "$artifact" first
        start "$artifact" second
        header
        bench "$artifact" $windows --a16-activations
        bench "$artifact" $windows
        bench "$artifact" $windows --a16-activations --memory-budget 45GiB
        bench "$artifact" $windows --kv-dtype int8 --kv-dtype fp8 --kv-dtype nvfp4 --kv-dtype k8v4 --kv-dtype rk8v4
        bench "$artifact" --context 65536 --runs 3 --a16-activations --kv-dtype bf16 --kv-dtype int8
        operations "$artifact" $windows
        ;;
    bf16)
        made qwen3.8-27b bf16
        header
        bench "$work/qwen3.8-27b.ninfer" $windows
        bench "$work/qwen3.8-27b.ninfer" --context 65536 --runs 3
        lossless "$work/qwen3.8-27b.ninfer"
        ;;
    moe)
        made qwen3.6-35b-a3b qwen3_6_35b_a3b
        header
        bench "$work/qwen3.6-35b-a3b.ninfer" $windows
        bench "$work/qwen3.6-35b-a3b.ninfer" $windows --memory-budget 40GiB
        ;;
    *) usage "$0" ;;
    esac
    rm -f "$work"/*.ninfer*
done
[ -n "${WORK:-}" ] || rm -r "$work"
