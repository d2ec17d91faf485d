//! Logits in f64 sums, rounded once; the softmax of a whole row in f64.

use rayon::prelude::*;

use super::{HeadRequest, HeadScores, TILE_ROWS};
use crate::host::gemm::Panels;
use crate::host::gemm64::product;
use crate::precision::Precision;

/// `hidden` `[targets.len(), in]`.
pub fn score(hidden: &[f32], head: &Panels, ask: &HeadRequest<'_>, logits: Precision) -> HeadScores {
    let [head_rows, width] = head.shape();
    let mut scores = HeadScores::default();
    for (tile, hidden) in hidden.chunks(TILE_ROWS * width).enumerate() {
        let values: Vec<f32> = product(hidden, head).par_iter().map(|&l| logits.nearest(l)).collect();
        for (i, row) in values.chunks_exact(head_rows).enumerate() {
            scores.push(&row[..ask.public_rows], ask, tile * TILE_ROWS + i);
        }
    }
    scores
}
