//! The router of a mixture of experts, per row:
//!
//! ```text
//! p       = softmax(x router^T)            over all experts, float32
//! experts = the top_k largest of p, largest first; of equal ones the lower id goes first
//! weights = p[experts] / sum(p[experts])
//! ```
//!
//! Softmax is monotone, so the order is taken from the logits: no rounding of an exponential can make a tie. Zeros of both
//! signs are equal. A row with a logit that is not a number has weights that are not.

pub mod host;

use burn::tensor::activation::softmax;
use burn::tensor::{Int, Tensor, backend::Backend};

use crate::backend::EvaluatorBackend;
use crate::ops::project;
use crate::precision::Precision;

/// The experts of every row and what their outputs count.
#[derive(Debug, Clone)]
pub struct Routing<B: Backend> {
    /// Expert ids `[rows, top_k]`, most probable first.
    pub experts: Tensor<B, 2, Int>,
    /// Their weights `[rows, top_k]`; a row's sum to 1.
    pub weights: Tensor<B, 2>,
}

/// `x` `[batch, tokens, in]` and `router` `[experts, in]`, `1 <= top_k <= experts`; one row per token, batch-major.
///
/// `top_k` times in turn the largest logit that is left, the lowest id that has it.
pub fn reference<B: EvaluatorBackend>(x: Tensor<B, 3>, router: Tensor<B, 2>, top_k: usize) -> Routing<B> {
    let ([batch, tokens, _], [count, _]) = (x.dims(), router.dims());
    let logits = project::reference(x, router, Precision::Full);
    choose(logits.reshape([batch * tokens, count]), top_k)
}

/// The routing that `logits` `[rows, experts]`, float32, give.
pub fn choose<B: Backend>(logits: Tensor<B, 2>, top_k: usize) -> Routing<B> {
    let [rows, count] = logits.dims();
    let p = softmax(logits.clone(), 1);
    let ids = Tensor::<B, 1, Int>::arange(0..count as i64, &p.device())
        .reshape([1, count])
        .expand([rows, count]);

    let (mut left, mut experts, mut probabilities) = (logits, Vec::new(), Vec::new());
    for _ in 0..top_k {
        let largest = left.clone().max_dim(1).expand([rows, count]);
        let below = left.clone().equal(largest).bool_not();
        // A row of no numbers has no largest; it takes the last id, and its weights say so.
        let first = ids.clone().mask_fill(below, count as i64 - 1).min_dim(1);
        let taken = ids.clone().equal(first.clone().expand([rows, count]));
        probabilities.push(p.clone().mask_fill(taken.clone().bool_not(), 0.0).sum_dim(1));
        experts.push(first);
        left = left.mask_fill(taken, f32::NEG_INFINITY);
    }
    let chosen = Tensor::cat(probabilities, 1);
    let sum = chosen.clone().sum_dim(1).expand([rows, top_k]);
    Routing {
        experts: Tensor::cat(experts, 1),
        weights: chosen / sum,
    }
}
