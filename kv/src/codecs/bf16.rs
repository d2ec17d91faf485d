//! `bf16`: K as the bf16 row itself, V as FP16.
//!
//! ```text
//! K word = bf16(x), unchanged        V word = FP16_rne(x)
//! ```
//!
//! bf16 has 8 significant bits and FP16 has 11, so FP16 keeps V exactly for magnitudes in [2^-14, 65504]; below, the
//! absolute error is at most 2^-25, and |v| >= 65520 becomes infinity. `bf16@bf16v` stores V as bf16, as some engines do.

use crate::arith::f16_scale;
use crate::codec::{CodecSpec, HostCodec, TensorCodec};
use crate::layout::{Layout, Plane};
use crate::registry::{Side, Variant};
use crate::tensor_ops::{decode_f16, encode_f16_signed, encode_minifloat, is_nan, pow2, with_sign_bit};
use burn::tensor::{Int, Tensor, backend::Backend};
use perplexity_kernels::numeric::{bf16_to_f32, f16_to_f32, f32_to_bf16};

/// The variants of this file.
pub const VARIANTS: &[Variant] = &[
    Variant {
        name: "bf16",
        recorded: "bf16",
        k: Side::Bf16(Bf16),
        v: Side::F16(F16),
    },
    Variant {
        name: "bf16@bf16v",
        recorded: "bf16@bf16v",
        k: Side::Bf16(Bf16),
        v: Side::Bf16(Bf16),
    },
];

/// The bf16 word of each value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bf16;

/// The FP16 word of each value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct F16;

fn words(head_dim: usize) -> Layout {
    Layout(vec![Plane::new("values", head_dim, 16)])
}

impl CodecSpec for Bf16 {
    fn supports(&self, _head_dim: usize) -> bool {
        true
    }
    fn layout(&self, head_dim: usize) -> Layout {
        words(head_dim)
    }
}

impl HostCodec for Bf16 {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        entries
            .iter_mut()
            .zip(rows)
            .for_each(|(word, value)| *word = f32_to_bf16(*value));
    }
    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        rows.iter_mut()
            .zip(entries)
            .for_each(|(value, word)| *value = bf16_to_f32(*word));
    }
}

impl<B: Backend> TensorCodec<B> for Bf16 {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let nan = is_nan(&rows);
        let code = encode_minifloat(rows.clone().abs().mask_fill(nan.clone(), 0.0), 7, -126, 127, 0x7F80);
        with_sign_bit(code, &rows, 1 << 15).mask_fill(nan, 0x7FC0)
    }
    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let exponent = (entries.clone() / 128).remainder_scalar(256);
        let fraction = entries.clone().remainder_scalar(128).float();
        let normal = exponent.clone().greater_elem(0);
        let significand = fraction.clone().mask_where(normal, fraction.clone() + 128.0);
        let unit = pow2(exponent.clone().clamp(1, 254) - 134);
        let special = exponent.equal_elem(255);
        let magnitude = (significand * unit)
            .mask_fill(special.clone(), f32::INFINITY)
            .mask_fill(special.bool_and(fraction.greater_elem(0.0)), f32::NAN);
        magnitude
            .clone()
            .mask_where(entries.greater_equal_elem(1 << 15), -magnitude)
    }
}

impl CodecSpec for F16 {
    fn supports(&self, _head_dim: usize) -> bool {
        true
    }
    fn layout(&self, head_dim: usize) -> Layout {
        words(head_dim)
    }
}

impl HostCodec for F16 {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        entries
            .iter_mut()
            .zip(rows)
            .for_each(|(word, value)| *word = f16_scale(*value).0);
    }
    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        rows.iter_mut()
            .zip(entries)
            .for_each(|(value, word)| *value = f16_to_f32(*word));
    }
}

impl<B: Backend> TensorCodec<B> for F16 {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        encode_f16_signed(rows)
    }
    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        decode_f16(entries)
    }
}
