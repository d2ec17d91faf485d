//! Grouped-query attention in which every query names the blocks of keys it reads. A query at position `p` reads the keys
//! of its chosen blocks and those of the block that is not complete yet:
//!
//! ```text
//! J   = { r b + i : b chosen, i < r }  and  { r c, .., p },   c = floor((p + 1) / r)
//! o   = sum_{j in J} softmax_J(q . k_j / sqrt(D)) v_j
//! ```
//!
//! Every chosen block lies below `c`. A query need not read its own key.
//!
//! # Choice
//!
//! Index queries `iq` and a key `K_b` per block decide: of the `c` blocks those with the largest scores, of equal ones the
//! lowest numbers,
//!
//! ```text
//! score_b = 1/sqrt(W) sum_heads max(iq_h . K_b, 0)          zeros without sign, float32
//! ```

#[cfg(any(feature = "ndarray", feature = "flex"))]
pub mod host;
pub mod precise;

use std::ops::Range;

use burn::tensor::{Tensor, TensorData, activation::softmax};

use crate::backend::EvaluatorBackend;
use crate::ops::widen;
use crate::precision::Precision;

/// Queries per tile of the reference, which holds a row of scores and a mask per query.
const TILE: usize = 256;

/// The blocks that each query reads; queries window after window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockSelection {
    /// Keys per block `r`.
    pub ratio: usize,
    /// Position of the first query in its window.
    pub first_position: usize,
    /// Ascending block numbers, one list per query.
    pub blocks: Vec<Vec<u32>>,
}

impl BlockSelection {
    /// The queries of window `window` of `batch`.
    #[must_use]
    pub fn of_window(&self, window: usize, batch: usize) -> Self {
        let tokens = self.blocks.len() / batch;
        Self {
            blocks: self.blocks[window * tokens..][..tokens].to_vec(),
            ..*self
        }
    }

    /// The ranges of keys that query `query` at position `position` reads, in ascending order; never empty.
    pub fn ranges(&self, query: usize, position: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        let tail = (position + 1) / self.ratio * self.ratio..position + 1;
        let blocks = self.blocks[query].iter().map(|&block| block as usize * self.ratio);
        blocks
            .map(|first| first..first + self.ratio)
            .chain(Some(tail).filter(|tail| !tail.is_empty()))
    }
}

/// Scores in full under a mask: `q` `[batch, tokens, heads, head_dim]`, `keys`, `values`
/// `[batch, kv_heads, capacity, head_dim]`, one list of blocks per row of `q`.
pub fn reference<B: EvaluatorBackend>(
    q: Tensor<B, 4>,
    keys: Tensor<B, 4>,
    values: Tensor<B, 4>,
    selection: &BlockSelection,
    to: Precision,
) -> Tensor<B, 4> {
    let ([batch, tokens, heads, head_dim], kv_heads) = (q.dims(), keys.dims()[1]);
    let visible = selection.first_position + tokens;
    let device = q.device();
    let expand = |rows: Tensor<B, 4>| {
        widen(rows.slice([0..batch, 0..kv_heads, 0..visible, 0..head_dim]))
            .reshape([batch, kv_heads, 1, visible, head_dim])
            .expand([batch, kv_heads, heads / kv_heads, visible, head_dim])
            .reshape([batch, heads, visible, head_dim])
    };
    let (keys, values) = (expand(keys).swap_dims(2, 3), expand(values));
    let q = widen(q).swap_dims(1, 2) * (1.0 / (head_dim as f64).sqrt());
    let tiles = (0..tokens).step_by(TILE).map(|start| {
        let count = TILE.min(tokens - start);
        let mut mask = vec![f32::NEG_INFINITY; batch * count * visible];
        for (row, mask) in mask.chunks_exact_mut(visible).enumerate() {
            let token = start + row % count;
            let ranges = selection.ranges(row / count * tokens + token, selection.first_position + token);
            ranges.for_each(|range| mask[range].fill(0.0));
        }
        let mask = Tensor::from_data(TensorData::new(mask, [batch, 1, count, visible]), &device);
        let scores = q.clone().narrow(2, start, count).matmul(keys.clone()) + mask;
        softmax(scores, 3).matmul(values.clone())
    });
    B::round(Tensor::cat(tiles.collect(), 2).swap_dims(1, 2), to)
}
