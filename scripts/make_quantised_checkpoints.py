#!/usr/bin/env python3
"""Quantised test checkpoints from a bf16 one, with the values and words that a reader has to find.

Needs NumPy only; every format is written out from its definition.

| checkpoint | declaration | stored |
|---|---|---|
| fp8_block | config.json, quant_method fp8 | every projection FP8 with a scale per 128x128 block, f32 or bf16 |
| fp8_row | config.json, compressed-tensors | FP8 with a scale per row, down_proj per tensor with a fixed input scale |
| nvfp4_modelopt | hf_quant_config.json | NVFP4 with multipliers, o_proj FP8 per tensor, output head NVFP4 |
| nvfp4_compressed | config.json, compressed-tensors | feed-forward below layer 3 NVFP4 with divisors, rest FP8 rows |

golden.json of each tells, by logical parameter: SHA-256 of the decoded f32 values (little-endian, C order), some of the
values, SHA-256 of the code bytes and of the scale words in the order of the parameter's rows, and the scales of weight
and activation as an artifact stores them.

    python scripts/make_quantised_checkpoints.py --source tests/data/fixtures/dense --out tests/data/quantised
"""

import argparse
import hashlib
import json
import shutil
import struct
from pathlib import Path

import numpy as np

RESOURCES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
DTYPES = {"BF16": "<u2", "F32": "<f4", "F8_E4M3": "u1", "U8": "u1"}

# ---- words ----------------------------------------------------------------------------------------------------------


def e4m3_values():
    """Values of the words 0x00..0x7E: m * 2^-9 for exponent 0, else (1 + m/8) * 2^(e-7)."""
    words = np.arange(0x7F)
    exponent, fraction = words >> 3, words & 7
    return np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))


E4M3 = e4m3_values()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(values, magnitudes):
    """Words of the nearest magnitudes with the sign in the bit above; a tie goes to the even word."""
    target = np.minimum(np.abs(values), magnitudes[-1])
    upper = np.clip(np.searchsorted(magnitudes, target), 1, len(magnitudes) - 1)
    lower = upper - 1
    below, above = target - magnitudes[lower], magnitudes[upper] - target
    take_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    sign_bit = 128 if len(magnitudes) > 8 else 8
    return np.where(take_upper, upper, lower).astype(np.uint8) | (np.signbit(values) * sign_bit).astype(np.uint8)


def e4m3(words):
    return E4M3[words & 0x7F] * np.where(words & 0x80, -1.0, 1.0)


def e2m1(words):
    return E2M1[words & 7] * np.where(words & 8, -1.0, 1.0)


def to_bf16(values):
    bits = np.asarray(values, "<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def from_bf16(words):
    return (words.astype("<u4") << 16).view("<f4")


def once(values):
    """An exact f64 value rounded to f32."""
    return np.asarray(values, np.float64).astype("<f4")


# ---- safetensors ----------------------------------------------------------------------------------------------------


def read_safetensors(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = np.frombuffer(data[8 + length + begin : 8 + length + end], DTYPES[entry["dtype"]])
        tensors[name] = (entry["dtype"], raw.reshape(entry["shape"]))
    return tensors


def write_safetensors(path, tensors):
    header, blobs, offset = {}, [], 0
    for name in sorted(tensors):
        dtype, array = tensors[name]
        blob = np.ascontiguousarray(array).astype(DTYPES[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


# ---- quantisation ---------------------------------------------------------------------------------------------------


class Quantized:
    """Tensors of one weight, its decoded values, and its words as rows that can be selected."""

    def __init__(self, tensors, values, codes, scales, **facts):
        self.tensors, self.values, self.codes, self.scales, self.facts = tensors, values, codes, scales, facts


def fp8_block(weight, scale_dtype):
    rows, columns = weight.shape
    tiles = (-(-rows // 128), -(-columns // 128))
    padded = np.zeros((tiles[0] * 128, tiles[1] * 128))
    padded[:rows, :columns] = np.abs(weight)
    largest = padded.reshape(tiles[0], 128, tiles[1], 128).max((1, 3))
    scale = once(largest / 448)
    stored = scale if scale_dtype == "F32" else to_bf16(scale)
    scale = scale if scale_dtype == "F32" else from_bf16(stored)
    spread = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:rows, :columns].astype(np.float64)
    codes = nearest(weight / spread, E4M3)
    values = once(e4m3(codes) * spread)
    tensors = {"weight": ("F8_E4M3", codes), "weight_scale_inv": (scale_dtype, stored)}
    return Quantized(tensors, values, codes, None, policy="AllowA8")


def fp8_row(weight, scale_dtype, per_tensor=False, input_scale=None, scalar=(1,)):
    rows = weight.shape[0]
    largest = np.abs(weight).max(1, keepdims=True)
    if per_tensor:
        largest[:] = largest.max()
    scale = once(largest / 448)
    stored = scale if scale_dtype == "F32" else to_bf16(scale)
    scale = scale if scale_dtype == "F32" else from_bf16(stored)
    codes = nearest(weight / scale, E4M3)
    values = once(e4m3(codes) * scale.astype(np.float64))
    kept = stored[:1].reshape(scalar) if per_tensor else stored
    tensors = {"weight": ("F8_E4M3", codes), "weight_scale": (scale_dtype, kept)}
    if input_scale is not None:
        tensors["input_scale"] = ("F32", np.full(scalar, input_scale, "<f4"))
    return Quantized(tensors, values, codes, to_bf16(scale), policy="AllowA8")


def nvfp4_words(weight, divisor):
    """Codes `[N, K]` and scale words `[N, K/16]` for a matrix divisor."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // 16, 16)
    scales = nearest(np.abs(groups).max(2) * divisor / 6, E4M3)
    scales[scales == 0] = 1
    codes = nearest(groups * divisor / e4m3(scales)[:, :, None], E2M1)
    return codes, scales


def packed(codes):
    flat = codes.reshape(len(codes), -1)
    return flat[:, 0::2] | flat[:, 1::2] << 4


def nvfp4_compressed(weight, divisor, activation_divisor):
    """Matrix and activation scales are divisors."""
    divisor = np.float32(divisor)
    codes, scales = nvfp4_words(weight, np.float64(divisor))
    values = once(e2m1(codes) * e4m3(scales)[:, :, None] / np.float64(divisor)).reshape(weight.shape)
    tensors = {
        "weight_packed": ("U8", packed(codes)),
        "weight_scale": ("F8_E4M3", scales),
        "weight_global_scale": ("F32", np.array([divisor])),
    }
    facts = {"policy": "A16Only", "weight_divisor": float(divisor)}
    if activation_divisor is not None:
        tensors["input_global_scale"] = ("F32", np.array([activation_divisor], "<f4"))
        facts |= {"policy": "AllowA4", "activation_divisor": float(np.float32(activation_divisor))}
    return Quantized(tensors, values, packed(codes), scales, **facts)


def nvfp4_modelopt(weight, multiplier, input_scale):
    """Matrix and activation scales are multipliers; an artifact stores their reciprocals."""
    multiplier, input_scale = np.float32(multiplier), np.float32(input_scale)
    codes, scales = nvfp4_words(weight, 1 / np.float64(multiplier))
    values = once(e2m1(codes) * e4m3(scales)[:, :, None] * np.float64(multiplier)).reshape(weight.shape)
    tensors = {
        "weight": ("U8", packed(codes)),
        "weight_scale": ("F8_E4M3", scales),
        "weight_scale_2": ("F32", multiplier.reshape(())),
        "input_scale": ("F32", input_scale.reshape(())),
    }
    facts = {
        "policy": "AllowA4",
        "weight_divisor": float(np.float32(1 / multiplier)),
        "activation_divisor": float(np.float32(1 / input_scale)),
    }
    return Quantized(tensors, values, packed(codes), scales, **facts)


# ---- logical parameters ---------------------------------------------------------------------------------------------


def parameters_of(module, config):
    """The logical parameters in a projection and the rows of each."""
    if module == "lm_head":
        return {"text/output_head": slice(None)}
    layer, mixer, projection = module.removeprefix("model.layers.").split(".")
    block = f"text/layers/{layer}"
    plain = {
        "k_proj": "attention/key",
        "v_proj": "attention/value",
        "o_proj": "attention/output",
        "in_proj_z": "gdn/z",
        "out_proj": "gdn/output",
        "gate_proj": "mlp/gate",
        "up_proj": "mlp/up",
        "down_proj": "mlp/down",
    }
    if projection in plain:
        return {f"{block}/{plain[projection]}": slice(None)}
    if projection == "q_proj":
        # Head by head: head_dim query rows, then head_dim gate rows.
        head_dim = config["head_dim"]
        rows = np.arange(2 * config["num_attention_heads"] * head_dim)
        is_gate = rows // head_dim % 2 == 1
        return {f"{block}/attention/query": rows[~is_gate], f"{block}/attention/gate": rows[is_gate]}
    assert projection == "in_proj_qkv", module
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return {
        f"{block}/gdn/query": slice(0, keys),
        f"{block}/gdn/key": slice(keys, 2 * keys),
        f"{block}/gdn/value": slice(2 * keys, None),
    }


def sha256(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def golden_entry(quantized, rows):
    values = quantized.values[rows]
    flat = values.reshape(-1)
    at = np.linspace(0, len(flat) - 1, 5).astype(int)
    entry = {
        "shape": list(values.shape),
        "values_sha256": sha256(values.astype("<f4")),
        "samples": [[int(index), float(flat[index])] for index in at],
        **quantized.facts,
    }
    if quantized.scales is not None:
        entry["codes_sha256"] = sha256(quantized.codes[rows])
        entry["scales_sha256"] = sha256(quantized.scales[rows])
    return entry


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def is_projection(name):
    small = ("in_proj_a", "in_proj_b", "conv1d", "embed_tokens", "norm")
    return name.endswith(".weight") and not any(part in name for part in small)


class Checkpoint:
    def __init__(self, source, out):
        self.source, self.out = source, out
        self.config = json.loads((source / "config.json").read_text())
        self.tensors = read_safetensors(source / "model.safetensors")
        self.golden = {}

    def modules(self):
        return sorted(name.removesuffix(".weight") for name in self.tensors if is_projection(name))

    def weight(self, module):
        return from_bf16(self.tensors[f"{module}.weight"][1]).astype(np.float64)

    def replace(self, module, quantized):
        del self.tensors[f"{module}.weight"]
        for ending, tensor in quantized.tensors.items():
            self.tensors[f"{module}.{ending}"] = tensor
        for parameter, rows in parameters_of(module, self.config).items():
            self.golden[parameter] = golden_entry(quantized, rows)

    def add(self, name, value):
        self.tensors[name] = ("F32", np.array([value], "<f4"))

    def write(self, quant_file=None):
        self.out.mkdir(parents=True, exist_ok=True)
        for name in RESOURCES:
            shutil.copyfile(self.source / name, self.out / name)
        write_safetensors(self.out / "model.safetensors", self.tensors)
        (self.out / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        if quant_file is not None:
            (self.out / "hf_quant_config.json").write_text(json.dumps(quant_file, indent=2) + "\n")
        lines = [f"{json.dumps(name)}: {json.dumps(self.golden[name])}" for name in sorted(self.golden)]
        (self.out / "golden.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def layer_of(module):
    return int(module.split(".")[2]) if module.startswith("model.layers.") else None


def make_fp8_block(checkpoint):
    for module in checkpoint.modules():
        if module != "lm_head":
            scales = "BF16" if layer_of(module) >= 2 else "F32"
            checkpoint.replace(module, fp8_block(checkpoint.weight(module), scales))
    kept = ["lm_head", "model.embed_tokens"]
    for layer, kind in enumerate(checkpoint.config["layer_types"]):
        if kind == "linear_attention":
            kept += [f"model.layers.{layer}.linear_attn.{name}" for name in ("conv1d", "in_proj_a", "in_proj_b")]
    checkpoint.config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": kept,
    }
    checkpoint.write()


def compressed_group(targets, weights, inputs, layout):
    return {"format": layout, "input_activations": inputs, "targets": targets, "weights": weights}


def floats(bits, strategy, **more):
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}


IGNORED = ["re:.*linear_attn.conv1d", "re:.*in_proj_(a|b)$"]
TOKEN_INPUT = floats(8, "token") | {"dynamic": True}


def make_fp8_row(checkpoint):
    for module in checkpoint.modules():
        weight = checkpoint.weight(module)
        if module == "lm_head":
            continue
        if module.endswith("down_proj"):
            checkpoint.replace(module, fp8_row(weight, "F32", per_tensor=True, input_scale=0.03125))
        else:
            checkpoint.replace(module, fp8_row(weight, "BF16" if layer_of(module) >= 2 else "F32"))
    for layer, kind in enumerate(checkpoint.config["layer_types"]):
        if kind == "full_attention":
            checkpoint.add(f"model.layers.{layer}.self_attn.k_scale", 0.125)
            checkpoint.add(f"model.layers.{layer}.self_attn.v_scale", 0.25)
    checkpoint.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": compressed_group(["Linear"], floats(8, "channel"), TOKEN_INPUT, "float-quantized"),
            "group_1": compressed_group(
                ["re:.*down_proj"], floats(8, "tensor"), floats(8, "tensor"), "float-quantized"
            ),
        },
        "ignore": ["lm_head", *IGNORED],
        "kv_cache_scheme": floats(8, "tensor"),
    }
    checkpoint.write()


def largest(*weights):
    return max(float(np.abs(weight).max()) for weight in weights)


def make_nvfp4_modelopt(checkpoint):
    """`weight_scale_2` is max / (6 * 448); one for q, k, v of a block, for gate, up, and for qkv, z of block 0."""
    layers = {}
    for module in checkpoint.modules():
        weight = checkpoint.weight(module)
        if module.endswith("o_proj"):
            checkpoint.replace(module, fp8_row(weight, "F32", per_tensor=True, input_scale=0.0625, scalar=()))
            layers[module] = {"quant_algo": "FP8"}
            continue
        together = [weight]
        block, _, projection = module.rpartition(".")
        for group in (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"], ["in_proj_qkv", "in_proj_z"]):
            if projection in group and not (projection.startswith("in_proj") and layer_of(module) != 0):
                together = [from_bf16(SOURCE[f"{block}.{name}.weight"][1]) for name in group]
        multiplier = largest(*together) / (6 * 448)
        # One scale per input: what a block's mixer, its output, its feed-forward and its product read.
        input_scale = {"out_proj": 0.003, "down_proj": 0.0017, "lm_head": 0.011}.get(projection or module, 0.0071)
        checkpoint.replace(module, nvfp4_modelopt(weight, multiplier, input_scale))
        layers[module] = {"quant_algo": "NVFP4", "group_size": 16}
    for layer, kind in enumerate(checkpoint.config["layer_types"]):
        if kind == "full_attention":
            checkpoint.add(f"model.layers.{layer}.self_attn.k_proj.k_scale", 0.125)
            checkpoint.add(f"model.layers.{layer}.self_attn.v_proj.v_scale", 1.0)
    quantization = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": [*(f"model.layers.*.linear_attn.in_proj_{name}" for name in "ab"), "*conv1d*"],
        "quantized_layers": layers,
    }
    checkpoint.write({"producer": {"name": "modelopt", "version": "0.37.0"}, "quantization": quantization})


def make_nvfp4_compressed(checkpoint):
    """Gate and up share a divisor in blocks 0 and 1, and an activation divisor in blocks 0 and 2."""
    for module in checkpoint.modules():
        weight = checkpoint.weight(module)
        layer = layer_of(module)
        if ".mlp." not in module or layer >= 3:
            checkpoint.replace(module, fp8_row(weight, "BF16"))
            continue
        block, _, projection = module.rpartition(".")
        together = [weight]
        if projection != "down_proj" and layer < 2:
            together = [from_bf16(SOURCE[f"{block}.{name}.weight"][1]) for name in ("gate_proj", "up_proj")]
        activation = {"down_proj": 211.0, "up_proj": 97.5 if layer == 1 else 96.25}.get(projection, 96.25)
        checkpoint.replace(module, nvfp4_compressed(weight, 6 * 448 / largest(*together), activation))
    group = {"group_size": 16}
    checkpoint.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": compressed_group(
                [r"re:.*layers\.[0-2]\.mlp\.(gate|up|down)_proj$"],
                floats(4, "tensor_group", **group),
                floats(4, "tensor_group", **group) | {"dynamic": "local"},
                "nvfp4-pack-quantized",
            ),
            "group_1": compressed_group(["Linear"], floats(8, "channel"), TOKEN_INPUT, "float-quantized"),
        },
        "ignore": IGNORED,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }
    checkpoint.write()


SOURCE = {}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path("tests/data/fixtures/dense"))
    parser.add_argument("--out", type=Path, default=Path("tests/data/quantised"))
    arguments = parser.parse_args()
    SOURCE.update(read_safetensors(arguments.source / "model.safetensors"))
    makers = [make_fp8_block, make_fp8_row, make_nvfp4_modelopt, make_nvfp4_compressed]
    for make in makers:
        make(Checkpoint(arguments.source, arguments.out / make.__name__.removeprefix("make_")))


if __name__ == "__main__":
    main()
