//! Both products of a block of rows, then the activation while they are in the cache: nothing of the inner width is
//! written to memory but the result.

use rayon::prelude::*;

use crate::host::gemm::{BLOCK, Panels, accumulate_block};
use crate::host::math::{round_all, silu};
use crate::host::simd::per_instruction_set;
use crate::precision::Precision;

/// `x` `[rows, in]`; returns `[rows, inner]`.
pub fn swiglu(x: &[f32], gate: &Panels, up: &Panels, to: Precision) -> Vec<f32> {
    let [inner, width] = gate.shape();
    let mut y = vec![0.0; x.len() / width * inner];
    y.par_chunks_mut(BLOCK * inner)
        .zip(x.par_chunks(BLOCK * width))
        .for_each_init(Vec::new, |other, (y, x)| {
            other.clear();
            other.resize(y.len(), 0.0);
            accumulate_block(x, gate, y, 0, inner);
            accumulate_block(x, up, other, 0, inner);
            activate(y, other, to);
        });
    y
}

per_instruction_set! {
    /// `gate = SiLU(gate) * up`, rounded.
    fn activate(gate: &mut [f32], up: &[f32], to: Precision) = activate_body;
}

#[inline(always)]
fn activate_body<const LEVEL: u8>(gate: &mut [f32], up: &[f32], to: Precision) {
    gate.iter_mut().zip(up).for_each(|(gate, &up)| *gate = silu(*gate) * up);
    round_all(gate, to);
}
