//! `kivi4`, `kivi2`: keys quantised per channel over a group of tokens, values per token.
//!
//! Reference: Z. Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024
//! (arXiv:2402.02750). Keys have outlier channels that persist over tokens, so each channel of 32 consecutive tokens has
//! its own range; values have none, so each token does, in groups of 32 channels.
//!
//! ```text
//! over a group x:  z = FP16(min x), s = FP16((max x - min x) / (2^b - 1)), code = clamp(rne((x - z) / s), 0, 2^b - 1)
//! decode:          code * s + z
//! ```
//!
//! An incomplete group of tokens and at least the newest 96 keys are read as 16-bit rows, as are the newest 128 values, so
//! that a full residual holds 128 tokens as in the paper's setting (group 32, residual 128). Not rotated.

use crate::arith::{NAN_SCALE, f16_scale, rne};
use crate::codec::{CodecSpec, ExactCopy, HostCodec, TensorCodec, Window};
use crate::layout::{Layout, Plane};
use crate::registry::{Side, Variant};
use crate::tensor_ops::{self, decode_f16, encode_f16, encode_f16_signed};
use burn::tensor::{Int, Tensor, backend::Backend};
use perplexity_kernels::numeric::f16_to_f32;

/// The variants of this file.
pub const VARIANTS: &[Variant] = &[
    Variant {
        name: "kivi4",
        recorded: "kivi4",
        k: Side::KiviK(KiviK { bits: 4 }),
        v: Side::KiviV(KiviV { bits: 4 }),
    },
    Variant {
        name: "kivi2",
        recorded: "kivi2",
        k: Side::KiviK(KiviK { bits: 2 }),
        v: Side::KiviV(KiviV { bits: 2 }),
    },
];

/// Tokens (keys) or channels (values) that share a range.
const GROUP: usize = 32;
/// Tokens kept at 16 bits when the residual is full.
const RESIDUAL: usize = 128;

/// Keys: one range per channel and 32 tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KiviK {
    /// Bits of a code.
    pub bits: u32,
}

/// Values: one range per token and 32 channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KiviV {
    /// Bits of a code.
    pub bits: u32,
}

/// Scale and zero words of a group, and the codes of its members.
fn encode_group(x: impl Iterator<Item = f32> + Clone, bits: u32, mut code: impl FnMut(usize, u16)) -> (u16, u16) {
    let top = ((1 << bits) - 1) as f32;
    let (low, high) = x.clone().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), x| {
        (low.min(x), high.max(x))
    });
    let nan = x.clone().any(f32::is_nan);
    // Adding zero turns -0 into +0, so that equal ranges have equal words.
    let (zero_word, zero) = f16_scale(low + 0.0);
    let (scale_word, scale) = f16_scale(if nan { f32::NAN } else { (high - low) / top });
    let factor = if scale > 0.0 && scale.is_finite() {
        1.0 / scale
    } else {
        0.0
    };
    for (i, x) in x.enumerate() {
        code(
            i,
            if factor == 0.0 {
                0
            } else {
                rne(((x - zero) * factor).clamp(0.0, top)) as u16
            },
        );
    }
    if nan {
        (NAN_SCALE, NAN_SCALE)
    } else {
        (scale_word, zero_word)
    }
}

impl CodecSpec for KiviK {
    fn block_tokens(&self) -> usize {
        GROUP
    }
    fn window(&self) -> Option<Window> {
        Some(Window {
            sinks: 0,
            recent: RESIDUAL - GROUP,
            copy: ExactCopy::Bf16,
        })
    }
    fn supports(&self, _head_dim: usize) -> bool {
        true
    }
    fn layout(&self, head_dim: usize) -> Layout {
        Layout(vec![
            Plane::new("codes", GROUP * head_dim, self.bits),
            Plane::new("scales", head_dim, 16),
            Plane::new("zeros", head_dim, 16),
        ])
    }
}

impl HostCodec for KiviK {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        let dim = rows.len() / GROUP;
        let (codes, ranges) = entries.split_at_mut(rows.len());
        let (scales, zeros) = ranges.split_at_mut(dim);
        for channel in 0..dim {
            let x = rows.iter().skip(channel).step_by(dim).copied();
            let put = |token: usize, code| codes[token * dim + channel] = code;
            (scales[channel], zeros[channel]) = encode_group(x, self.bits, put);
        }
    }

    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        let dim = rows.len() / GROUP;
        let (codes, ranges) = entries.split_at(rows.len());
        let (scales, zeros) = ranges.split_at(dim);
        for (row, codes) in rows.chunks_exact_mut(dim).zip(codes.chunks_exact(dim)) {
            for (channel, (value, code)) in row.iter_mut().zip(codes).enumerate() {
                *value = f32::from(*code) * f16_to_f32(scales[channel]) + f16_to_f32(zeros[channel]);
            }
        }
    }
}

/// Scale words, zero words and codes of groups along dimension `along` of `x`; the first two keep that dimension at 1.
fn store_groups<B: Backend>(x: Tensor<B, 4>, along: usize, bits: u32) -> [Tensor<B, 4, Int>; 3] {
    let top = ((1 << bits) - 1) as f32;
    let nan = tensor_ops::is_nan(&x);
    let clean = x.mask_fill(nan.clone(), 0.0);
    let nan = nan.int().max_dim(along).greater_elem(0);
    let (low, high) = (clean.clone().min_dim(along), clean.clone().max_dim(along));
    let zero = encode_f16_signed(low.clone() + 0.0);
    let scale = encode_f16(((high - low) / top).mask_fill(nan.clone(), f32::NAN));
    let value = decode_f16(scale.clone());
    let usable = value.clone().greater_elem(0.0).bool_and(value.clone().is_finite());
    let factor = tensor_ops::reciprocal(value).mask_fill(usable.bool_not(), 0.0);
    let unused = factor.clone().equal_elem(0.0).expand(clean.dims());
    let codes = (clean - decode_f16(zero.clone())) * factor;
    let codes = tensor_ops::rne(tensor_ops::clamp(codes.mask_fill(unused, 0.0), 0.0, top)).int();
    [scale, zero.mask_fill(nan, i64::from(NAN_SCALE)), codes]
}

impl<B: Backend> TensorCodec<B> for KiviK {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let [tokens, heads, dim] = rows.dims();
        let blocks = tokens / GROUP;
        let x = rows.reshape([blocks, GROUP, heads, dim]).swap_dims(1, 2);
        let parts = store_groups(x, 2, self.bits).map(|part| {
            let length = part.dims()[2] * dim;
            part.reshape([blocks, heads, length])
        });
        let [scales, zeros, codes] = parts;
        Tensor::cat(vec![codes, scales, zeros], 2)
    }

    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let [blocks, heads, count] = entries.dims();
        let dim = count / (GROUP + 2);
        let plane = |first: usize, rows: usize| -> Tensor<B, 4, Int> {
            entries
                .clone()
                .narrow(2, first * dim, rows * dim)
                .reshape([blocks, heads, rows, dim])
        };
        let scales = decode_f16(plane(GROUP, 1));
        let values = plane(0, GROUP).float() * scales + decode_f16(plane(GROUP + 1, 1));
        values.swap_dims(1, 2).reshape([blocks * GROUP, heads, dim])
    }
}

impl CodecSpec for KiviV {
    fn window(&self) -> Option<Window> {
        Some(Window {
            sinks: 0,
            recent: RESIDUAL,
            copy: ExactCopy::Bf16,
        })
    }
    fn supports(&self, head_dim: usize) -> bool {
        head_dim.is_multiple_of(GROUP)
    }
    fn head_dims(&self) -> String {
        format!("multiples of {GROUP}")
    }
    fn layout(&self, head_dim: usize) -> Layout {
        Layout(vec![
            Plane::new("codes", head_dim, self.bits),
            Plane::new("scales", head_dim / GROUP, 16),
            Plane::new("zeros", head_dim / GROUP, 16),
        ])
    }
}

impl HostCodec for KiviV {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        let (codes, ranges) = entries.split_at_mut(rows.len());
        let (scales, zeros) = ranges.split_at_mut(rows.len() / GROUP);
        for (group, (x, codes)) in rows.chunks_exact(GROUP).zip(codes.chunks_exact_mut(GROUP)).enumerate() {
            (scales[group], zeros[group]) = encode_group(x.iter().copied(), self.bits, |i, code| codes[i] = code);
        }
    }

    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        let (codes, ranges) = entries.split_at(rows.len());
        let (scales, zeros) = ranges.split_at(rows.len() / GROUP);
        for (i, (value, code)) in rows.iter_mut().zip(codes).enumerate() {
            *value = f32::from(*code) * f16_to_f32(scales[i / GROUP]) + f16_to_f32(zeros[i / GROUP]);
        }
    }
}

impl<B: Backend> TensorCodec<B> for KiviV {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let [tokens, heads, dim] = rows.dims();
        let x = rows.reshape([tokens, heads, dim / GROUP, GROUP]);
        let [scales, zeros, codes] = store_groups(x, 3, self.bits);
        let groups = [tokens, heads, dim / GROUP];
        Tensor::cat(
            vec![
                codes.reshape([tokens, heads, dim]),
                scales.reshape(groups),
                zeros.reshape(groups),
            ],
            2,
        )
    }

    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let [tokens, heads, count] = entries.dims();
        let groups = count / (GROUP + 2);
        let codes = entries
            .clone()
            .narrow(2, 0, groups * GROUP)
            .float()
            .reshape([tokens, heads, groups, GROUP]);
        let plane = |first: usize| decode_f16(entries.clone().narrow(2, first, groups)).unsqueeze_dim::<4>(3);
        (codes * plane(groups * GROUP) + plane(groups * (GROUP + 1))).reshape([tokens, heads, groups * GROUP])
    }
}
