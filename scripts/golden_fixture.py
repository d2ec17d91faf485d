"""Golden values of a fixture: logits, hidden states and sums for its text.txt.

    python scripts/golden_fixture.py tests/data/fixtures/dense OUT

The model is loaded in the number type it is scored in. Casting a loaded model would round its rotary frequencies too.

Writes OUT/golden.safetensors (input_ids, hidden_f32.N: the input of block N, the last one after the final norm;
layer_bf16_eager.N: the input of block N in bfloat16, the last one the output of the last block; logits_f32,
logits_bf16_eager) and OUT/golden.json (total negative log-likelihoods over the public rows and over all).
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

import hf_scores


def residual_stream(model, tensors):
    """Records the input of every block and the output of the last one during the next run."""
    for index, block in enumerate(model.model.layers):
        def record(block, args, output, index=index):
            tensors[f"layer_bf16_eager.{index}"] = args[0][0].clone()
            tensors[f"layer_bf16_eager.{index + 1}"] = output[0].clone()
        block.register_forward_hook(record)


def main(checkpoint, out):
    text = (checkpoint / "text.txt").read_bytes().decode()
    sums, tensors = {}, {}
    for name, dtype in [("f32", torch.float32), ("bf16_eager", torch.bfloat16)]:
        model, tokenizer = hf_scores.load(checkpoint, dtype)
        ids = torch.tensor([hf_scores.encode(tokenizer, text)])
        if dtype == torch.bfloat16:
            residual_stream(model, tensors)
        with torch.no_grad():
            output = model(ids, use_cache=False, output_hidden_states=True)
        logits = output.logits[0]
        for kind, rows in [("public", hf_scores.public_rows(tokenizer)), ("all", logits.shape[1])]:
            logprobs = hf_scores.target_logprobs(logits[:-1], ids[0, 1:], rows)
            sums[f"{name}_{kind}_total_nll"] = -logprobs.sum().item()
        tensors[f"logits_{name}"] = logits.contiguous()
        if name == "f32":
            tensors["input_ids"] = ids
            for layer, hidden in enumerate(output.hidden_states):
                tensors[f"hidden_f32.{layer}"] = hidden[0].contiguous()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "golden.safetensors", metadata=versions)
    golden = {"tokens": ids.shape[1], "public_tokens": hf_scores.public_rows(tokenizer), "rows": logits.shape[1], **sums}
    (out / "golden.json").write_text(json.dumps(golden, indent=1))


main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
