//! Which blocks of keys a query attends to. Every `r` tokens make a block, counted from the window's start:
//!
//! ```text
//! K_b     = rope_{r b}(norm(mean of the block's index keys))           once the block is complete
//! score_b = 1/sqrt(D) sum_heads relu(iq_h . K_b)                       b < c,  c = floor((p + 1) / r)
//! chosen  = the min(budget / r, c) blocks of the largest scores; of equal ones the lower number first
//! ```
//!
//! A query at `p` also reads the tokens of the block that is not complete yet, but not necessarily its own block when it
//! completes one. Scores of exactly 0 are common, so the rule for equal ones decides.
//!
//! Scores are float32 sums; in f64 in the routes that are, where Hugging Face's steps round products, their sum over the
//! heads and the quotient to float32 each.

use burn::tensor::{Tensor, TensorData};
use perplexity_kernels::EvaluatorBackend;
use perplexity_kernels::backend::{BlockSelection, RotaryTable};
use perplexity_kernels::evaluation::{Arithmetic, Steps};
use perplexity_kernels::ops::widen;
use rayon::prelude::*;

use super::Pass;
use super::loader::Loader;
use super::norm::OffsetNorm;
use crate::config::{IndexerConfig, TextConfig};
use crate::rope::Rotary;
use crate::route::{Boundary, Route};
use crate::scorer::ModelError;

/// The indexer of one attention layer.
#[derive(Debug)]
pub struct Indexer<B: EvaluatorBackend> {
    query: B::Weight,
    key: B::Weight,
    query_norm: OffsetNorm<B>,
    key_norm: OffsetNorm<B>,
    dims: IndexerConfig,
}

/// The keys of the blocks so far, and the index keys of the block that is not complete yet.
#[derive(Debug)]
pub struct IndexState<B: EvaluatorBackend> {
    /// `[blocks, D]` of each window.
    pooled: Vec<Vec<f32>>,
    /// `[batch, 0..r, D]`.
    waiting: Option<Tensor<B, 3>>,
    /// Angles of the first position of every block.
    rotary: RotaryTable<B>,
}

impl<B: EvaluatorBackend> Indexer<B> {
    /// Loads the index parameters under `attention/`.
    ///
    /// # Errors
    /// When the source cannot provide one.
    pub fn load(loader: &Loader<'_, B>, config: &TextConfig, dims: &IndexerConfig) -> Result<Self, ModelError> {
        let norm = |name| OffsetNorm::load(loader, name, dims.head_dim, config.rms_norm_eps);
        Ok(Self {
            query: loader.matrix("index_query", [dims.num_heads * dims.head_dim, config.hidden_size])?,
            key: loader.matrix("index_key", [dims.head_dim, config.hidden_size])?,
            query_norm: norm("index_query_norm")?,
            key_norm: norm("index_key_norm")?,
            dims: dims.clone(),
        })
    }

    /// The state at the start of `batch` windows of `capacity` tokens; `rotary` is that of the attention.
    pub fn state(
        &self,
        batch: usize,
        capacity: usize,
        rotary: &Rotary,
        route: Route,
        device: &B::Device,
    ) -> IndexState<B> {
        let ratio = self.dims.ratio;
        let first_of_blocks = (0..(capacity / ratio).max(1)).map(|block| block * ratio);
        IndexState {
            pooled: vec![Vec::new(); batch],
            waiting: None,
            rotary: rotary.table_at(route, first_of_blocks, device),
        }
    }

    /// Tokens at a window's start that attend to everything before them: as long as there are no more blocks than chosen.
    pub fn dense_tokens(&self) -> usize {
        self.dims.budget + self.dims.ratio - 1
    }

    /// Takes the index keys of a pass over `x` `[batch, tokens, hidden]` in.
    pub fn append(&self, x: Tensor<B, 3>, state: &mut IndexState<B>, pass: &Pass<'_, B>) {
        let (ratio, width) = (self.dims.ratio, self.dims.head_dim);
        let route = pass.route;
        let keys = widen(route.on(Boundary::AttentionProjection).project(x, &self.key));
        let keys = match state.waiting.take() {
            Some(waiting) => Tensor::cat(vec![waiting, keys], 1),
            None => keys,
        };
        let [batch, tokens, _] = keys.dims();
        let blocks = tokens / ratio;
        if tokens > blocks * ratio {
            let rest = tokens - blocks * ratio;
            state.waiting = Some(keys.clone().narrow(1, blocks * ratio, rest));
        }
        if blocks == 0 {
            return;
        }
        let keys = keys.narrow(1, 0, blocks * ratio);
        let (device, to) = (keys.device(), route.at(Boundary::AttentionProjection));
        // The sum of a few 16-bit numbers is exact in f64.
        let mean = |block: &[f32]| -> Vec<f32> {
            let sum = |d: usize| -> f64 { block[d..].iter().step_by(width).map(|x| f64::from(*x)).sum() };
            (0..width).map(|d| to.nearest(sum(d) / ratio as f64)).collect()
        };
        let means = host(keys).chunks_exact(ratio * width).flat_map(mean).collect();
        // One key head: `[batch, blocks, 1, D]`.
        let means = Tensor::from_data(TensorData::new(means, [batch, blocks, 1, width]), &device);
        let normal: Tensor<B, 4> = self.key_norm.forward(means, route.on(Boundary::InnerNorm));
        let first_block = state.pooled[0].len() / width;
        let keys = route.on(Boundary::Rotary).rotary(normal, &state.rotary, first_block);
        let keys = host(keys);
        for (pooled, keys) in state.pooled.iter_mut().zip(keys.chunks_exact(blocks * width)) {
            pooled.extend_from_slice(keys);
        }
    }

    /// The blocks of the pass's queries from token `first` on, whose index keys are in.
    pub fn select(&self, x: Tensor<B, 3>, first: usize, state: &IndexState<B>, pass: &Pass<'_, B>) -> BlockSelection {
        let IndexerConfig {
            num_heads,
            head_dim,
            budget,
            ratio,
        } = self.dims;
        let [batch, tokens, _] = x.dims();
        let x = x.narrow(1, first, tokens - first);
        let route = pass.route;
        let q = route.on(Boundary::AttentionProjection).project(x, &self.query);
        let q = q.reshape([batch, tokens - first, num_heads, head_dim]);
        let q = self.query_norm.forward(q, route.on(Boundary::InnerNorm));
        let first_position = pass.first_position + first;
        let q = route.on(Boundary::Rotary).rotary(q, pass.rotary, first_position);
        let arithmetic = route.on(Boundary::AttentionOutput).arithmetic;
        if arithmetic == Arithmetic::Native && B::ON_DEVICE {
            let keys = TensorData::new(
                state.pooled.concat(),
                [batch, state.pooled[0].len() / head_dim, head_dim],
            );
            let keys = Tensor::from_data(keys, &q.device());
            if let Some(selection) = B::choose_blocks(&q, &keys, first_position, ratio, budget / ratio) {
                return selection;
            }
        }
        let q = host(q);
        let blocks = q
            .par_chunks_exact(num_heads * head_dim)
            .enumerate()
            .map(|(query, q)| {
                let (window, token) = (query / (tokens - first), query % (tokens - first));
                let complete = (first_position + token + 1) / ratio;
                let keys = &state.pooled[window][..complete * head_dim];
                let scores = match arithmetic {
                    Arithmetic::Native => scores(q, keys, head_dim),
                    Arithmetic::Precise(steps) => precise_scores(q, keys, head_dim, steps),
                };
                choose(&scores, budget / ratio)
            })
            .collect();
        BlockSelection {
            ratio,
            first_position,
            blocks,
        }
    }
}

/// The scores of all blocks, `keys` `[blocks, head_dim]`, for one query `q` `[heads, head_dim]`; float32 numbers.
pub fn scores(q: &[f32], keys: &[f32], head_dim: usize) -> Vec<f64> {
    let scale = 1.0 / (head_dim as f32).sqrt();
    let score = |key: &[f32]| {
        let heads = q.chunks_exact(head_dim).map(|q| relu(dot(q, key)));
        f64::from(scale * heads.fold(0.0, |sum, x| sum + x))
    };
    keys.chunks_exact(head_dim).map(score).collect()
}

/// The same in f64.
fn precise_scores(q: &[f32], keys: &[f32], head_dim: usize, steps: Steps) -> Vec<f64> {
    let float = |x: f64| match steps {
        Steps::Once => x,
        Steps::Each => f64::from(x as f32),
    };
    let dot = |q: &[f32], key: &[f32]| -> f64 { q.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum() };
    let score = |key: &[f32]| {
        let heads = q.chunks_exact(head_dim).map(|q| relu(float(dot(q, key))));
        float(float(heads.fold(0.0, |sum, x| sum + x)) / (head_dim as f64).sqrt())
    };
    keys.chunks_exact(head_dim).map(score).collect()
}

/// `x` or a zero without sign, so that zeros are equal.
fn relu<T: PartialOrd + Default>(x: T) -> T {
    if x > T::default() { x } else { T::default() }
}

/// The numbers, ascending, of the `count` largest scores; of equal ones the lower number first.
pub fn choose(scores: &[f64], count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    if count < order.len() {
        let by_score = |a: &u32, b: &u32| {
            scores[*b as usize]
                .total_cmp(&scores[*a as usize])
                .then_with(|| a.cmp(b))
        };
        if count > 0 {
            order.select_nth_unstable_by(count - 1, by_score);
        }
        order.truncate(count);
        order.sort_unstable();
    }
    order
}

/// In eight partial sums, a fixed order that vectorises.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let (a_lanes, a_rest) = a.as_chunks::<8>();
    let (b_lanes, b_rest) = b.as_chunks::<8>();
    for (a, b) in a_lanes.iter().zip(b_lanes) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += a * b;
    }
    sums.iter().sum()
}

/// Values in C order, widened to float32.
fn host<B: EvaluatorBackend, const D: usize>(x: Tensor<B, D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_scores_are_chosen_and_ties_go_to_the_lower_number() {
        assert_eq!(choose(&[0.0, 3.0, 1.0, 2.0], 2), [1, 3]);
        assert_eq!(choose(&[0.0; 5], 2), [0, 1]);
        assert_eq!(choose(&[1.0, 0.0, 0.0, 2.0, 0.0], 3), [0, 1, 3]);
        assert_eq!(choose(&[1.0, 2.0], 5), [0, 1]);
        assert_eq!(choose(&[1.0, 2.0], 0), [0u32; 0]);
    }

    #[test]
    fn heads_add_only_what_is_positive() {
        // Two heads of two features: 1 * 3 + 2 * 4 = 11 and -1 * 3 - 2 * 4 = -11.
        let (q, keys) = ([1.0, 2.0, -1.0, -2.0], [3.0, 4.0, -3.0, -4.0, 0.0, 0.0]);
        let scale = 1.0 / 2f32.sqrt();
        let expected = [11.0 * scale, 11.0 * scale, 0.0].map(f64::from);
        assert_eq!(scores(&q, &keys, 2), expected);
        assert_eq!(precise_scores(&q, &keys, 2, Steps::Each), expected);
        let expected = [11.0 / 2f64.sqrt(), 11.0 / 2f64.sqrt(), 0.0];
        assert_eq!(precise_scores(&q, &keys, 2, Steps::Once), expected);
    }
}
