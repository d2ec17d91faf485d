//! Row by row: one pass for the mean square, one for the result.

use rayon::prelude::*;

use crate::host::math::{dot, round_all};
use crate::host::simd::per_instruction_set;
use crate::precision::Precision;

/// Elements per task.
const GRAIN: usize = 1 << 14;

/// `x` `[rows, weight.len()]`; returns the same shape.
pub fn norm(x: &[f32], weight: &[f32], eps: f32, to: Precision) -> Vec<f32> {
    let grain = GRAIN.div_ceil(weight.len()) * weight.len();
    let mut y = vec![0.0; x.len()];
    y.par_chunks_mut(grain)
        .zip(x.par_chunks(grain))
        .for_each(|(y, x)| block(x, weight, eps, y, to));
    y
}

per_instruction_set! {
    fn block(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32], to: Precision) = block_body;
}

#[inline(always)]
fn block_body<const LEVEL: u8>(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32], to: Precision) {
    for (x, y) in x.chunks_exact(weight.len()).zip(y.chunks_exact_mut(weight.len())) {
        let scale = inverse_rms::<LEVEL>(x, eps);
        for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
            *y = x * scale * (1.0 + w);
        }
    }
    round_all(y, to);
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(crate) fn inverse_rms<const LEVEL: u8>(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot::<LEVEL>(x, x) / x.len() as f32 + eps).sqrt()
}
