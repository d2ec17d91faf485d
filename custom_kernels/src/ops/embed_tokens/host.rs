//! Rows gathered from the packed table.

use rayon::prelude::*;

use crate::host::gemm::{Panels, round_block};
use crate::precision::Precision;

/// `[ids.len(), width]`.
pub fn gather(table: &Panels, ids: &[u32], to: Precision) -> Vec<f32> {
    let width = table.shape()[1];
    let mut y = vec![0.0; ids.len() * width];
    y.par_chunks_mut(width).zip(ids).for_each(|(y, &id)| {
        y.iter_mut()
            .zip(table.row(id as usize))
            .for_each(|(y, value)| *y = value);
        round_block(y, to);
    });
    y
}
