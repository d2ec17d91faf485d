//! From hidden rows to log-probabilities: `logits = h W^T`, and over the public rows only
//!
//! ```text
//! lp[x] = logits[x] - m - ln sum_{r < public} exp(logits[r] - m),   m = max_{r < public} logits[r]
//! ```
//!
//! Top tokens come most probable first, equal logits in ascending id. Target, top tokens and candidates read the same
//! logits and the same normaliser. Only one tile of logits is in memory at a time, and tiling changes no value.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;
pub mod host;
pub mod precise;

use burn::tensor::Tensor;

use crate::backend::EvaluatorBackend;
use crate::precision::Precision;

/// Hidden rows per tile where logits are held in full: at 248,320 rows of the head 64 MB in float32.
pub const TILE_ROWS: usize = 64;

/// What to reduce the logits to.
#[derive(Debug, Clone, Copy)]
pub struct HeadRequest<'a> {
    /// Rows of the head that are tokens; the others take no part.
    pub public_rows: usize,
    /// One target per hidden row, each below `public_rows`.
    pub targets: &'a [u32],
    /// Most probable tokens per hidden row, at most `public_rows`; 0 for none.
    pub top_k: usize,
    /// Tokens to score per hidden row; 0 for none.
    pub candidates_per_row: usize,
    /// `targets.len() * candidates_per_row` ids below `public_rows`, row-major.
    pub candidates: &'a [u32],
}

/// The reduction's result, row-major; natural logarithms.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HeadScores {
    /// One per hidden row.
    pub logprobs: Vec<f32>,
    /// `top_k` per hidden row.
    pub top_ids: Vec<u32>,
    /// `top_k` per hidden row.
    pub top_logprobs: Vec<f32>,
    /// `candidates_per_row` per hidden row.
    pub candidate_logprobs: Vec<f32>,
}

impl HeadRequest<'_> {
    /// The candidates of hidden row `row`.
    pub fn candidates_of(&self, row: usize) -> &[u32] {
        &self.candidates[row * self.candidates_per_row..][..self.candidates_per_row]
    }
}

impl HeadScores {
    /// Reduces the public `logits` of hidden row `row` in f64 and appends its scores.
    pub fn push(&mut self, logits: &[f32], ask: &HeadRequest<'_>, row: usize) {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&l| (f64::from(l) - f64::from(max)).exp()).sum();
        self.push_normalised(logits, f64::from(max) + sum.ln(), ask, row);
    }

    /// The same with `normaliser = ln sum exp(logits)` given.
    pub fn push_normalised(&mut self, logits: &[f32], normaliser: f64, ask: &HeadRequest<'_>, row: usize) {
        let logprob = |id: u32| (f64::from(logits[id as usize]) - normaliser) as f32;
        self.logprobs.push(logprob(ask.targets[row]));
        for id in top_ids(logits, ask.top_k) {
            self.top_ids.push(id);
            self.top_logprobs.push(logprob(id));
        }
        self.candidate_logprobs
            .extend(ask.candidates_of(row).iter().map(|&id| logprob(id)));
    }
}

/// Ids of the `count` largest logits, largest first, equal ones in ascending id; NaN counts as the smallest.
pub fn top_ids(logits: &[f32], count: usize) -> Vec<u32> {
    let mut top = Vec::with_capacity(count + 1);
    merge_top(&mut top, count, logits, 0);
    top.into_iter().map(|(_, id)| id).collect()
}

/// Takes `logits`, of ids `first..` above all ids seen before, into the `count` largest so far.
pub(crate) fn merge_top(top: &mut Vec<(f32, u32)>, count: usize, logits: &[f32], first: usize) {
    if count == 0 {
        return;
    }
    for (id, &logit) in (first as u32..).zip(logits) {
        let key = |logit: f32| if logit.is_nan() { f32::NEG_INFINITY } else { logit };
        if top.len() == count && top.last().is_some_and(|&(least, _)| key(logit) <= key(least)) {
            continue;
        }
        // Ids ascend, so an equal logit belongs behind those already there.
        let place = top.partition_point(|&(other, _)| key(other) >= key(logit));
        top.insert(place, (logit, id));
        top.truncate(count);
    }
}

/// Tiles of [`TILE_ROWS`] hidden rows through [`EvaluatorBackend::project`], reduced on the host in f64.
pub fn tiled<B: EvaluatorBackend>(
    hidden: Tensor<B, 2>,
    head: &B::Weight,
    ask: &HeadRequest<'_>,
    logits: Precision,
) -> HeadScores {
    let [rows, width] = hidden.dims();
    let mut scores = HeadScores::default();
    for start in (0..rows).step_by(TILE_ROWS) {
        let count = TILE_ROWS.min(rows - start);
        let tile = hidden.clone().narrow(0, start, count).reshape([1, count, width]);
        let tile = B::project(tile, head, logits);
        let head_rows = tile.dims()[2];
        let values: Vec<f32> = tile
            .into_data()
            .convert::<f32>()
            .into_vec()
            .expect("converted to f32 just now");
        for (i, logits) in values.chunks_exact(head_rows).enumerate() {
            scores.push(&logits[..ask.public_rows], ask, start + i);
        }
    }
    scores
}
