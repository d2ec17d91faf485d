#!/usr/bin/env python3
"""Activations in the narrow formats, worked out from the definitions, as the literals of custom_kernels/tests/vectors/mod.rs.

Python only. Every step is one float32 operation: computed in float64, whose rounding to float32 is the correct one for
products and quotients of float32 numbers. Codes are found by searching the format's values.

    python scripts/activation_vectors.py > custom_kernels/tests/vectors/mod.rs
"""

import struct


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


E4M3 = [m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def nearest(values, x):
    """The value of the list nearest to x, a tie to the even index, saturating; keeps the sign."""
    size = min(abs(x), values[-1])
    best = min(range(len(values)), key=lambda i: (abs(values[i] - size), i % 2))
    return -values[best] if x < 0 else values[best]


def fp8(row):
    scale = f32(max(map(abs, row)) / 448)
    inverse = f32(1 / scale)
    return [f32(nearest(E4M3, f32(x * inverse)) * scale) for x in row]


def nvfp4_engine(row, d):
    out = []
    for at in range(0, len(row), 16):
        group = row[at : at + 16]
        s = nearest(E4M3, f32(f32(d * max(map(abs, group))) / 6))
        out += [f32(nearest(E2M1, f32(f32(x * d) / s)) * s / d) if s else 0.0 for x in group]
    return out


def nvfp4_modelopt(row, d):
    g = f32(1 / d)
    out = []
    for at in range(0, len(row), 16):
        group = row[at : at + 16]
        s = nearest(E4M3, f32(max(map(abs, group)) / f32(6 * g)))
        step = f32(s * g)
        out += [f32(nearest(E2M1, f32(x / step)) * step) if step else 0.0 for x in group]
    return out


def int8(row):
    out = []
    for at in range(0, len(row), 64):
        group = row[at : at + 64]
        s = f32(max(map(abs, group)) / 127)
        # Python rounds ties to even.
        out += [f32(max(-127, min(127, round(f32(x / s)))) * s) if s else 0.0 for x in group]
    return out


def bf16(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16))[0]


# A row of bfloat16 values in which ties, tiny groups and saturation occur, from a small linear congruential generator.
def sample(count):
    state, row = 20231, []
    for i in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        row.append(bf16((state / 2**30 - 1) * 2.0 ** (i // 16 % 3 * 5 - 8)))
    return row


def main():
    row = sample(48)
    # Codes halfway between two E2M1 values under a scale of exactly 1, and a group that the scale loses.
    row[0:16] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0]
    row += [2.0**-13 * (1 - i % 3) for i in range(16)]
    print("//! Bits of float32 values; printed by `scripts/activation_vectors.py`.\n")
    for name, values in [
        ("ROW", row),
        ("FP8", fp8(row)),
        ("NVFP4_ENGINE_1", nvfp4_engine(row, 1.0)),
        ("NVFP4_ENGINE", nvfp4_engine(row, f32(123.4))),
        ("NVFP4_MODELOPT", nvfp4_modelopt(row, f32(123.4))),
        ("INT8", int8(row)),
    ]:
        words = [struct.unpack("<I", struct.pack("<f", x))[0] for x in values]
        print(f"pub(crate) const {name}: [u32; {len(words)}] = [")
        for at in range(0, len(words), 8):
            print("    " + ", ".join(f"0x{word:08x}" for word in words[at : at + 8]) + ",")
        print("];")


if __name__ == "__main__":
    main()
