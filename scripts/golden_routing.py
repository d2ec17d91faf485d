"""Golden routing of a mixture-of-experts fixture: which experts every token of its text.txt chooses, in float32.

    python scripts/golden_routing.py tests/data/fixtures/moe OUT

Writes OUT/routing.safetensors: experts.N (int64) and weights.N (float32), [tokens, experts per token], most probable
first, for every block N. Prints the smallest difference between the logit of the last expert taken and the first left.
"""

import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

import hf_scores


@torch.no_grad()
def main(checkpoint, out):
    model, tokenizer = hf_scores.load(checkpoint, torch.float32)
    tensors, margins = {}, []

    def keep(_module, _inputs, output):
        logits, weights, experts = output
        tensors[f"experts.{len(margins)}"] = experts.contiguous()
        tensors[f"weights.{len(margins)}"] = weights.contiguous()
        ordered = logits.sort(-1, descending=True).values
        taken = experts.shape[1]
        margins.append((ordered[:, taken - 1] - ordered[:, taken]).min().item())

    for block in model.model.layers:
        block.mlp.gate.register_forward_hook(keep)
    text = (checkpoint / "text.txt").read_bytes().decode()
    model(torch.tensor([hf_scores.encode(tokenizer, text)]), use_cache=False)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    save_file(tensors, out / "routing.safetensors", metadata=versions)
    print("smallest margins:", ", ".join(f"{margin:.1e}" for margin in margins))


main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
