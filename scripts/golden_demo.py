"""Golden perplexities of the demo: tests/data/demo_hf on the four demo texts, in float32 and in bf16.

    python scripts/golden_demo.py > golden.json
"""

import json
import math
import pathlib
import sys

import torch
import transformers

import hf_scores

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "tests/data/demo_hf"
CORPUS = ROOT / "eval/corpora/open-1m"
CONTEXT, STRIDE = 1024, 512
# Enough values at the start of each stream to find where a difference begins.
FIRST = 16


def main():
    manifest = json.loads((CORPUS / "manifest.json").read_text())
    streams = {stream["id"]: stream for stream in manifest["streams"]}
    results = [{} for _ in manifest["modes"]["demo"]]
    for name, dtype in [("f32", torch.float32), ("bf16", torch.bfloat16)]:
        model, tokenizer = hf_scores.load(CHECKPOINT, dtype)
        rows = hf_scores.public_rows(tokenizer)
        for id_, result in zip(manifest["modes"]["demo"], results):
            text = (CORPUS / streams[id_]["path"]).read_bytes().decode()
            ids = hf_scores.encode(tokenizer, text)
            logprobs, windows = hf_scores.score(model, ids, CONTEXT, STRIDE, rows)
            nll = -logprobs.sum().item()
            mean = nll / (len(ids) - 1)
            result.update(id=id_, tokens=len(ids), windows=windows, first_ids=ids[:FIRST])
            result.update({f"{name}_total_nll": nll, f"{name}_mean_nll": mean, f"{name}_ppl": math.exp(mean)})
            result[f"{name}_first_logprobs"] = logprobs[:FIRST].tolist()
    golden = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "context": CONTEXT,
        "stride": STRIDE,
        "valid_rows": rows,
        "streams": results,
    }
    json.dump(golden, sys.stdout, indent=1)


main()
