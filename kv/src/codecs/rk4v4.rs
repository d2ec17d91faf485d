//! `rk4v4`: four-bit keys and values. The name denotes several codecs, hence the lineages.
//!
//! | variant | K | V |
//! |---|---|---|
//! | `rk4v4` = `rk4v4@b` | Hadamard-256, Lloyd-Max per 64 with least-squares scale | INT4 per 32, not rotated |
//! | `rk4v4@a` | Hadamard-64, INT4 per 64 | Hadamard-64, INT4 per 64 |
//! | `rk4v4@c` | Hadamard-64, mid-rise INT4 per 64 | the same |
//!
//! ```text
//! Lloyd-Max:  rms of the 64 values, m = number of bnd <= |y| / rms, c = +-mag[m]
//!             S = FP16(<y, c> / <c, c>)                                     decode: c * S
//! mid-rise:   s = FP16(max|y| / 15), code = clamp(floor(0.5 y / s), -8, 7)  decode: (2 code + 1) * s
//! ```
//!
//! `mag` are INT8 images of the 16-level Lloyd-Max quantiser of N(0, 1), `bnd` its decision thresholds.

use crate::arith::{NAN_SCALE, absmax, butterfly_sum, code_factor, f16_scale};
use crate::basis::Basis;
use crate::codec::{CodecSpec, HostCodec, TensorCodec};
use crate::codecs::{int8::int4, rk8v4};
use crate::layout::{Layout, Plane};
use crate::registry::{Side, Variant};
use crate::tensor_ops::{self, code_factor as tensor_code_factor, decode_f16, encode_f16, lookup, split_entries};
use burn::tensor::{Int, Tensor, backend::Backend};
use perplexity_kernels::numeric::f16_to_f32;

/// The variants of this file.
pub const VARIANTS: &[Variant] = &[
    Variant {
        name: "rk4v4@b",
        recorded: "rotated-lloyd4g64-v4g32",
        k: Side::Lloyd4(Lloyd4),
        v: rk8v4::VALUES_B,
    },
    Variant {
        name: "rk4v4@a",
        recorded: "rk4v4@a",
        k: Side::Absmax(int4(Basis::Hadamard64, GROUP)),
        v: rk8v4::VALUES_A,
    },
    Variant {
        name: "rk4v4@c",
        recorded: "rk4v4@c",
        k: Side::MidRise4(MidRise4),
        v: Side::MidRise4(MidRise4),
    },
];

/// Values that share a scale.
const GROUP: usize = 64;
/// Decision thresholds in units of the RMS.
const BOUNDS: [f32; 7] = [0.25825, 0.52245, 0.79960, 1.09930, 1.43715, 1.84355, 2.40080];
/// Values of the 16 codes; bit 3 is the sign.
const CODE_LEVELS: [f32; 16] = [
    6.0, 18.0, 31.0, 44.0, 58.0, 75.0, 96.0, 127.0, -6.0, -18.0, -31.0, -44.0, -58.0, -75.0, -96.0, -127.0,
];

/// Lloyd-Max codes, a least-squares FP16 scale per 64 values, Hadamard-256 basis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lloyd4;

/// Mid-rise INT4 (no zero level), an FP16 scale per 64 values, Hadamard-64 basis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MidRise4;

fn four_bits_per_value(head_dim: usize) -> Layout {
    Layout(vec![
        Plane::new("codes", head_dim, 4),
        Plane::new("scales", head_dim / GROUP, 16),
    ])
}

/// Sum over 64 products `a_i b_i`: pairs (i, i + 32) first, each operation rounded, then a butterfly over 32 lanes.
fn pair_dot(a: &[f32], b: &[f32]) -> f32 {
    butterfly_sum::<32>(std::array::from_fn(|i| a[i] * b[i] + a[i + 32] * b[i + 32]))
}

impl CodecSpec for Lloyd4 {
    fn basis(&self) -> Basis {
        Basis::Hadamard256
    }
    fn layout(&self, head_dim: usize) -> Layout {
        four_bits_per_value(head_dim)
    }
}

impl HostCodec for Lloyd4 {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        let (codes, scales) = entries.split_at_mut(rows.len());
        for ((y, codes), word) in rows.chunks_exact(GROUP).zip(codes.chunks_exact_mut(GROUP)).zip(scales) {
            let rms = (pair_dot(y, y) / GROUP as f32).sqrt();
            if rms == 0.0 || !rms.is_finite() {
                codes
                    .iter_mut()
                    .zip(y)
                    .for_each(|(code, value)| *code = u16::from(*value < 0.0) << 3);
                *word = if rms == 0.0 { 0 } else { NAN_SCALE };
                continue;
            }
            let factor = 1.0 / rms;
            let mut levels = [0f32; GROUP];
            for ((code, level), value) in codes.iter_mut().zip(&mut levels).zip(y) {
                let a = (value * factor).abs();
                let m: u16 = BOUNDS.iter().map(|bound| u16::from(*bound <= a)).sum();
                *code = u16::from(*value < 0.0) << 3 | m;
                *level = CODE_LEVELS[usize::from(*code)];
            }
            *word = f16_scale(pair_dot(y, &levels) / pair_dot(&levels, &levels)).0;
        }
    }

    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        let (codes, scales) = entries.split_at(rows.len());
        for ((y, codes), word) in rows.chunks_exact_mut(GROUP).zip(codes.chunks_exact(GROUP)).zip(scales) {
            let scale = f16_to_f32(*word);
            y.iter_mut()
                .zip(codes)
                .for_each(|(value, code)| *value = CODE_LEVELS[usize::from(*code)] * scale);
        }
    }
}

impl<B: Backend> TensorCodec<B> for Lloyd4 {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let [tokens, heads, dim] = rows.dims();
        let groups = tokens * heads * dim / GROUP;
        let y: Tensor<B, 2> = rows.reshape([groups, GROUP]);
        let rms = (tensor_ops::pair_dot(y.clone(), y.clone()) / GROUP as f32).sqrt();
        let finite = rms.clone().is_finite();
        let usable = rms.clone().greater_elem(0.0).bool_and(finite.clone());
        let factor = tensor_ops::reciprocal(rms).mask_fill(usable.clone().bool_not(), 0.0);
        let m = tensor_ops::count_at_least(tensor_ops::scaled(y.clone(), factor).abs(), &BOUNDS);
        let codes = m + y.clone().lower_elem(0.0).int() * 8;
        let levels = lookup(codes.clone(), &CODE_LEVELS);
        let scale = tensor_ops::pair_dot(y, levels.clone()) / tensor_ops::pair_dot(levels.clone(), levels);
        let scale = encode_f16(scale)
            .mask_fill(usable.bool_not(), 0)
            .mask_fill(finite.bool_not(), i64::from(NAN_SCALE));
        Tensor::cat(
            vec![
                codes.reshape([tokens, heads, dim]),
                scale.reshape([tokens, heads, dim / GROUP]),
            ],
            2,
        )
    }

    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let [tokens, heads, count] = entries.dims();
        let dim = count * GROUP / (GROUP + 1);
        let [codes, scales] = split_entries(entries, [dim, dim / GROUP]);
        let levels = lookup(codes, &CODE_LEVELS).reshape([tokens, heads, dim / GROUP, GROUP]);
        (levels * decode_f16(scales).unsqueeze_dim(3)).reshape([tokens, heads, dim])
    }
}

impl CodecSpec for MidRise4 {
    fn basis(&self) -> Basis {
        Basis::Hadamard64
    }
    fn layout(&self, head_dim: usize) -> Layout {
        four_bits_per_value(head_dim)
    }
}

impl HostCodec for MidRise4 {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        let (codes, scales) = entries.split_at_mut(rows.len());
        for ((y, codes), word) in rows.chunks_exact(GROUP).zip(codes.chunks_exact_mut(GROUP)).zip(scales) {
            let (stored, scale) = f16_scale(absmax(y) / 15.0);
            *word = stored;
            let factor = code_factor(scale);
            for (code, value) in codes.iter_mut().zip(y) {
                let level = if factor == 0.0 {
                    0.0
                } else {
                    (0.5 * value * factor).floor().clamp(-8.0, 7.0)
                };
                *code = (level as i32 & 15) as u16;
            }
        }
    }

    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        let (codes, scales) = entries.split_at(rows.len());
        for ((y, codes), word) in rows.chunks_exact_mut(GROUP).zip(codes.chunks_exact(GROUP)).zip(scales) {
            let scale = f16_to_f32(*word);
            for (value, code) in y.iter_mut().zip(codes) {
                *value = f32::from(2 * ((*code << 12) as i16 >> 12) + 1) * scale;
            }
        }
    }
}

impl<B: Backend> TensorCodec<B> for MidRise4 {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let [tokens, heads, dim] = rows.dims();
        let groups = rows.reshape([tokens, heads, dim / GROUP, GROUP]);
        let scales = encode_f16(tensor_ops::absmax(groups.clone()) / 15.0);
        let factor = tensor_code_factor(decode_f16(scales.clone())).unsqueeze_dim(3);
        let codes = tensor_ops::scaled(groups * 0.5, factor)
            .floor()
            .clamp(-8.0, 7.0)
            .int()
            .remainder_scalar(16);
        Tensor::cat(vec![codes.reshape([tokens, heads, dim]), scales], 2)
    }

    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let [tokens, heads, count] = entries.dims();
        let dim = count * GROUP / (GROUP + 1);
        let [codes, scales] = split_entries(entries, [dim, dim / GROUP]);
        let codes = (codes + 8).remainder_scalar(16) - 8;
        let values = (codes * 2 + 1).float().reshape([tokens, heads, dim / GROUP, GROUP]);
        (values * decode_f16(scales).unsqueeze_dim(3)).reshape([tokens, heads, dim])
    }
}
