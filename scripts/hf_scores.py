"""Log-probabilities from Hugging Face transformers on a CPU, as the golden values define them.

Eager attention and experts and the plain PyTorch Gated DeltaNet, no cache. The softmax runs over the ids that the tokenizer can
produce; rows of the head beyond them take no part. Sums are in float64.
"""

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM


def load(checkpoint, dtype):
    """Model in `dtype` and tokenizer of a checkpoint directory.

    The tokenizer is read from tokenizer.json alone: transformers' own classes may add tokens that the file lacks.
    """
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval(), Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def encode(tokenizer, text):
    """Token ids of a whole text, nothing added in front or behind."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def public_rows(tokenizer):
    """Ids that the tokenizer can produce, from 0."""
    return tokenizer.get_vocab_size(with_added_tokens=True)


def windows(tokens, context, stride):
    """Sliding windows (input_begin, input_end, target_begin); every token but the first is a target once."""
    begin, end, target = 0, min(tokens, context), 1
    yield begin, end, target
    while end < tokens:
        target = end
        end = min(tokens, target + stride)
        yield max(0, end - context), end, target


def target_logprobs(logits, targets, rows):
    """log softmax over the first `rows` logits, at `targets`; float64."""
    logits = logits[:, :rows].double()
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


@torch.no_grad()
def score(model, ids, context, stride, rows):
    """Log-probabilities of ids[1:], float64, and the number of windows."""
    ids = torch.tensor(ids)
    parts = []
    for begin, end, target in windows(len(ids), context, stride):
        logits = model(ids[None, begin : end - 1], use_cache=False).logits[0]
        parts.append(target_logprobs(logits[target - begin - 1 :], ids[target:end], rows))
    return torch.cat(parts), len(parts)
