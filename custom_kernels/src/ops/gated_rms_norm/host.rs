//! Row by row, in place.

use rayon::prelude::*;

use crate::host::math::{round_all, silu};
use crate::host::simd::per_instruction_set;
use crate::ops::offset_rms_norm::host::inverse_rms;
use crate::precision::Precision;

/// Elements per task.
const GRAIN: usize = 1 << 14;

/// `x` and `z` `[rows, weight.len()]`.
pub fn norm(x: &mut [f32], weight: &[f32], z: &[f32], eps: f32, to: Precision) {
    let grain = GRAIN.div_ceil(weight.len()) * weight.len();
    x.par_chunks_mut(grain)
        .zip(z.par_chunks(grain))
        .for_each(|(x, z)| block(x, weight, z, eps, to));
}

per_instruction_set! {
    fn block(x: &mut [f32], weight: &[f32], z: &[f32], eps: f32, to: Precision) = block_body;
}

#[inline(always)]
fn block_body<const LEVEL: u8>(x: &mut [f32], weight: &[f32], z: &[f32], eps: f32, to: Precision) {
    for (x, z) in x.chunks_exact_mut(weight.len()).zip(z.chunks_exact(weight.len())) {
        let scale = inverse_rms::<LEVEL>(x, eps);
        for ((x, &w), &z) in x.iter_mut().zip(weight).zip(z) {
            *x = *x * scale * w * silu(z);
        }
    }
    round_all(x, to);
}
