//! `k4v2`: K as 4-bit Lloyd-Max codes with one FP16 scale per row, V exactly as `vq2` stores it, and its exact window.
//!
//! ```text
//! L   = 4 12 21 30 40 52 66 87                magnitudes, units of 1/32 of a unit-variance coordinate
//! thr = 8 16.5 25.5 35 46 59 76.5             m = number of thr strictly below A = |y| * (32 / sigma)
//! code = y < 0 ? 7 - m : 8 + m,  c = +-L[m]   S = FP16(|y|^2 / <c, y>)             decode: S * c
//! ```
//!
//! Hadamard-256 basis. Values beyond 2.72 sigma saturate, which makes the worst row heavier than with group scales.

use crate::arith::{NAN_SCALE, sum_of_squares, unbiased_scale, word_dot};
use crate::basis::Basis;
use crate::codec::{CodecSpec, HEAD_DIM, HostCodec, TensorCodec, Window};
use crate::codecs::vq2;
use crate::layout::{Layout, Plane};
use crate::registry::{Side, Variant};
use crate::tensor_ops::{self, decode_f16, lookup, split_entries};
use burn::tensor::{Int, Tensor, backend::Backend};
use perplexity_kernels::numeric::f16_to_f32;

/// The variants of this file.
pub const VARIANTS: &[Variant] = &[Variant {
    name: "k4v2",
    recorded: "k4v2",
    k: Side::Lloyd4Row(Lloyd4Row),
    v: Side::Vq2(vq2::Vq2),
}];

/// Decision thresholds between the levels, in units of 1/32 of a unit-variance coordinate.
const THRESHOLDS: [f32; 7] = [8.0, 16.5, 25.5, 35.0, 46.0, 59.0, 76.5];
/// Units per unit-variance coordinate.
const UNIT: f32 = 32.0;
/// Values of the 16 codes, in units.
const CODE_LEVELS: [f32; 16] = [
    -87.0, -66.0, -52.0, -40.0, -30.0, -21.0, -12.0, -4.0, 4.0, 12.0, 21.0, 30.0, 40.0, 52.0, 66.0, 87.0,
];
/// Code of every value of a zero row.
const ZERO_ROW_CODE: u16 = 7;

/// 4-bit Lloyd-Max codes, one FP16 scale per row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lloyd4Row;

impl CodecSpec for Lloyd4Row {
    fn basis(&self) -> Basis {
        Basis::Hadamard256
    }
    fn window(&self) -> Option<Window> {
        Some(vq2::WINDOW)
    }
    fn layout(&self, head_dim: usize) -> Layout {
        Layout(vec![Plane::new("codes", head_dim, 4), Plane::new("scale", 1, 16)])
    }
}

impl HostCodec for Lloyd4Row {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        let (codes, scale) = entries.split_at_mut(HEAD_DIM);
        let energy = sum_of_squares(rows);
        let sigma = (energy / HEAD_DIM as f32).sqrt();
        if sigma == 0.0 || !sigma.is_finite() {
            codes.fill(ZERO_ROW_CODE);
            scale[0] = if sigma == 0.0 { 0 } else { NAN_SCALE };
            return;
        }
        let unit = UNIT / sigma;
        let mut levels = [0f32; HEAD_DIM];
        for ((code, level), y) in codes.iter_mut().zip(&mut levels).zip(rows) {
            let a = y.abs() * unit;
            let m: u16 = THRESHOLDS.iter().map(|threshold| u16::from(*threshold < a)).sum();
            *code = if *y < 0.0 { 7 - m } else { 8 + m };
            *level = CODE_LEVELS[usize::from(*code)];
        }
        scale[0] = unbiased_scale(energy, word_dot(rows, &levels));
    }

    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        let (codes, scale) = entries.split_at(HEAD_DIM);
        let scale = f16_to_f32(scale[0]);
        rows.iter_mut()
            .zip(codes)
            .for_each(|(value, code)| *value = scale * CODE_LEVELS[usize::from(*code)]);
    }
}

impl<B: Backend> TensorCodec<B> for Lloyd4Row {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let [tokens, heads, dim] = rows.dims();
        let rows: Tensor<B, 2> = rows.reshape([tokens * heads, dim]);
        let energy = tensor_ops::sum_of_squares(rows.clone());
        let sigma = (energy.clone() / HEAD_DIM as f32).sqrt();
        let finite = energy.clone().is_finite();
        let usable = sigma.clone().greater_elem(0.0).bool_and(finite.clone());
        let unit = (tensor_ops::reciprocal(sigma) * UNIT).mask_fill(usable.clone().bool_not(), 0.0);
        let a = tensor_ops::scaled(rows.clone().abs(), unit);
        let m = tensor_ops::count_above(a, &THRESHOLDS);
        let negative = rows.clone().lower_elem(0.0);
        let codes = (m.clone() + 8).mask_where(negative, -m + 7);
        let projection = tensor_ops::word_dot(rows, lookup(codes.clone(), &CODE_LEVELS));
        let scale = tensor_ops::unbiased_scale(energy, projection) * usable.clone().int();
        let codes = codes.mask_fill(
            usable.bool_not().expand([tokens * heads, dim]),
            i64::from(ZERO_ROW_CODE),
        );
        let scale = scale.mask_fill(finite.bool_not(), i64::from(NAN_SCALE));
        Tensor::cat(vec![codes, scale], 1).reshape([tokens, heads, dim + 1])
    }

    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let dim = entries.dims()[2] - 1;
        let [codes, scale] = split_entries(entries, [dim, 1]);
        lookup(codes, &CODE_LEVELS) * decode_f16(scale)
    }
}
