//! The gate in place.

use rayon::prelude::*;

use crate::host::math::{round_all, sigmoid};
use crate::host::simd::per_instruction_set;
use crate::precision::Precision;

/// Elements per task.
const GRAIN: usize = 1 << 14;

/// `x *= sigmoid(gate)`, rounded.
pub fn gate(x: &mut [f32], gate: &[f32], to: Precision) {
    x.par_chunks_mut(GRAIN)
        .zip(gate.par_chunks(GRAIN))
        .for_each(|(x, gate)| block(x, gate, to));
}

per_instruction_set! {
    fn block(x: &mut [f32], gate: &[f32], to: Precision) = block_body;
}

#[inline(always)]
fn block_body<const LEVEL: u8>(x: &mut [f32], gate: &[f32], to: Precision) {
    x.iter_mut().zip(gate).for_each(|(x, &gate)| *x *= sigmoid(gate));
    round_all(x, to);
}
