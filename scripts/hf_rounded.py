"""Hugging Face's own model with every operation correctly rounded: evaluated in f64 from the values it reads, its result rounded
once to the type that PyTorch gives it.

    with hf_rounded.operations(model): model(...)

Only the operations are replaced, below the model's code; which there are, and in which order, is transformers' own. The gated delta
rule is one operation here: its chunked form is a way to compute the recurrence, which f64 gives to its last rounding.
"""

import contextlib
import sys
from unittest import mock

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map
from transformers.models.qwen3_5.modeling_qwen3_5 import l2norm

ARITHMETIC = set(
    "_softmax add bmm convolution cos cumsum div exp index_add mean mm mul neg pow reciprocal rsqrt rsub sigmoid silu sin "
    "softplus sqrt sub sum".split()
)
# Operations that move, compare or convert values, and integer ones; a conversion rounds once as it is.
EXACT = set(
    "_local_scalar_dense _to_copy _unsafe_view abs alias all aminmax arange argsort bitwise_and bitwise_not bitwise_xor cat "
    "clamp_min clone constant_pad_nd copy_ cummax detach embedding empty eq expand fill_ floor_divide full gather ge greater gt "
    "histc index index_put_ index_select is_same_size item le lift_fresh lt masked_fill masked_select max min ne new_full "
    "new_zeros nonzero one_hot ones permute permute_copy relu remainder repeat scalar_tensor scatter scatter_ select sign slice "
    "split split_with_sizes squeeze stack t transpose tril triu unbind unsqueeze view where zero_ zeros zeros_like".split()
)


def nearest(x, dtype):
    """f64 values rounded once; PyTorch's own conversion to bfloat16 passes through float32."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    bits = x.contiguous().view(torch.int64)
    rounded = (bits + ((1 << 44) - 1) + ((bits >> 45) & 1)) & ~((1 << 45) - 1)
    return torch.where(x.isfinite(), rounded.view(torch.float64), x).to(dtype)


def _topk(x, k, dim=-1):
    """PyTorch leaves the order of equal values open; here the lowest index comes first."""
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def _wide(x):
    """An operand in f64. PyTorch reads a Python number as float32, whatever of the two types it is combined with."""
    if isinstance(x, float):
        return float(numpy.float32(x))
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


class _Rounded(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation.overloadpacket.__name__
        if name == "topk":
            return _topk(*args, **kwargs)
        in_place = name.endswith("_") and name[:-1] in ARITHMETIC
        if not in_place and name not in ARITHMETIC:
            assert name in EXACT, f"is {name} arithmetic?"
            return operation(*args, **kwargs)
        wide_kwargs = {key: torch.float64 if key == "dtype" else _wide(value) for key, value in kwargs.items()}
        if in_place:
            packet = getattr(torch.ops.aten, name[:-1])
            return args[0].copy_(nearest(packet(*tree_map(_wide, args), **wide_kwargs), args[0].dtype))
        result = operation(*args, **kwargs)
        if not result.is_floating_point():
            return result
        return nearest(operation(*tree_map(_wide, args), **wide_kwargs), result.dtype)


def _gated_delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=False, **_):
    q, k = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q = q * q.shape[-1] ** -0.5
    groups = value.shape[2] // query.shape[2]
    with _disable_current_modes():
        q, k = (x.repeat_interleave(groups, dim=2).double() for x in (q, k))
        v, beta, decay = value.double(), beta.double(), g.double().exp()
        state = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=torch.float64)
        out = torch.empty_like(v)
        for t in range(v.shape[1]):
            state *= decay[:, t, :, None, None]
            u = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ state)[:, :, 0])
            state += k[:, t, :, :, None] * u[:, :, None]
            out[:, t] = (q[:, t, :, None] @ state)[:, :, 0]
        return nearest(out, value.dtype), None


class _LowestFirst(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket.__name__ == "topk":
            return _topk(*args, **(kwargs or {}))
        return operation(*args, **(kwargs or {}))


@contextlib.contextmanager
def lowest_first():
    """Operations inside are PyTorch's own; of equal values topk takes the one of the lowest index first."""
    with torch.no_grad(), _LowestFirst():
        yield


@contextlib.contextmanager
def operations(model):
    """Every operation of `model` inside is correctly rounded."""
    module = sys.modules[type(model).__module__]
    with mock.patch.object(module, "torch_chunk_gated_delta_rule", _gated_delta_rule), torch.no_grad(), _Rounded():
        yield
