"""Golden values of the lossless route: Hugging Face's bfloat16 model with every operation correctly rounded (hf_rounded.py).

    python scripts/golden_lossless.py blocks tests/data/fixtures/dense OUT.safetensors
    python scripts/golden_lossless.py final tests/data/fixtures/flash_next OUT.safetensors
    python scripts/golden_lossless.py texts > OUT.json

`blocks` writes the input of every block for the fixture's text.txt, and the output of the last one (layer_lossless.N). `final` writes what
the output head reads (hidden_lossless), and the same of the float32 model as it is but for equal values in topk, of which the lowest index
comes first (hidden_f32). `texts` scores the four demo texts; logits are float32 as in the route, or bfloat16 as in Hugging Face's model.
"""

import json
import math
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

import hf_rounded
import hf_scores

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__}


def blocks(checkpoint, out):
    model, tokenizer = hf_scores.load(checkpoint, torch.bfloat16)
    tensors = {}
    for index, block in enumerate(model.model.layers):
        def record(block, args, output, index=index):
            tensors[f"layer_lossless.{index}"] = args[0][0].clone()
            tensors[f"layer_lossless.{index + 1}"] = output[0].clone()
        block.register_forward_hook(record)
    ids = torch.tensor([hf_scores.encode(tokenizer, (checkpoint / "text.txt").read_bytes().decode())])
    with hf_rounded.operations(model):
        model.model(ids, use_cache=False)
    save_file(tensors, out, metadata=VERSIONS)


def final(checkpoint, out):
    tensors = {}
    for name, dtype, operations in [
        ("hidden_lossless", torch.bfloat16, hf_rounded.operations),
        ("hidden_f32", torch.float32, lambda _: hf_rounded.lowest_first()),
    ]:
        model, tokenizer = hf_scores.load(checkpoint, dtype)
        ids = torch.tensor([hf_scores.encode(tokenizer, (checkpoint / "text.txt").read_bytes().decode())])
        with operations(model):
            tensors[name] = model.model(ids, use_cache=False).last_hidden_state[0].clone()
    save_file(tensors, out, metadata=VERSIONS)


def texts():
    golden = json.loads((ROOT / "tests/data/golden/golden.json").read_text())
    model, tokenizer = hf_scores.load(ROOT / "tests/data/demo_hf", torch.bfloat16)
    head = model.get_output_embeddings().weight.double()
    results = []
    for stream in golden["streams"]:
        text = (ROOT / "tests/data/golden" / stream["file"]).read_bytes().decode()
        ids = torch.tensor(hf_scores.encode(tokenizer, text))
        sums = {"float32": 0.0, "bfloat16": 0.0}
        for begin, end, target in hf_scores.windows(len(ids), golden["context"], golden["stride"]):
            with hf_rounded.operations(model):
                hidden = model.model(ids[None, begin : end - 1], use_cache=False).last_hidden_state[0]
            logits = hidden[target - begin - 1 :].double() @ head.T
            for name in sums:
                rounded = hf_rounded.nearest(logits, getattr(torch, name))
                sums[name] += hf_scores.target_logprobs(rounded, ids[target:end], golden["valid_rows"]).sum().item()
        perplexity = {f"{name}_logits_ppl": math.exp(-total / (len(ids) - 1)) for name, total in sums.items()}
        results.append({"id": stream["id"], **perplexity})
    json.dump({**VERSIONS, "streams": results}, sys.stdout, indent=1)


if sys.argv[1] == "blocks":
    blocks(pathlib.Path(sys.argv[2]), sys.argv[3])
elif sys.argv[1] == "final":
    final(pathlib.Path(sys.argv[2]), sys.argv[3])
else:
    texts()
