//! Rounding in place.

use rayon::prelude::*;

use crate::host::gemm::round_block;
use crate::precision::Precision;

/// Elements per task.
const GRAIN: usize = 1 << 15;

/// Rounds every element.
pub fn round(values: &mut [f32], to: Precision) {
    values.par_chunks_mut(GRAIN).for_each(|values| round_block(values, to));
}
