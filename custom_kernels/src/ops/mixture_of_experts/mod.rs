//! Sparse mixture of experts beside one that every row takes, with the residual:
//!
//! ```text
//! experts, w = the top_k of softmax(x router^T), renormalised
//! y = residual + sum_e w_e expert_e(x) + sigmoid(x shared_score^T) shared(x)
//! ```
//!
//! The shared expert is a SwiGLU as the routed ones are. One rounding, that of the result.

pub mod precise;

use burn::tensor::Tensor;

use crate::backend::{EvaluatorBackend, Expert, Routing};
use crate::ops::widen;
use crate::precision::Precision;

/// The weights of one mixture.
#[derive(Debug, Clone)]
pub struct Mixture<B: EvaluatorBackend> {
    /// `[experts, in]`.
    pub router: B::Weight,
    /// Experts per row.
    pub top_k: usize,
    /// The routed experts, in ascending id.
    pub experts: Vec<Expert<B::Weight>>,
    /// `[inner, in]`.
    pub shared_gate: B::Weight,
    /// `[inner, in]`.
    pub shared_up: B::Weight,
    /// `[in, inner]`.
    pub shared_down: B::Weight,
    /// `[1, in]`.
    pub shared_score: B::Weight,
}

/// `residual` and `x` `[batch, tokens, in]`; also returns the experts that the rows chose. The sum is taken from the right:
/// shared to routed, then both to the residual.
pub fn mixture<B: EvaluatorBackend>(
    residual: Tensor<B, 3>,
    x: Tensor<B, 3>,
    weights: &Mixture<B>,
    to: Precision,
) -> (Tensor<B, 3>, Routing<B>) {
    let full = Precision::Full;
    let routing = B::route_experts(x.clone(), &weights.router, weights.top_k);
    let routed = B::expert_feed_forward(x.clone(), &routing, &weights.experts);
    let shared = B::swiglu(x.clone(), &weights.shared_gate, &weights.shared_up, full);
    let shared = B::project(shared, &weights.shared_down, full);
    let score = B::project(x, &weights.shared_score, full).expand(shared.dims());
    let shared = B::sigmoid_gate(shared, score, full);
    let y = widen(residual) + (routed + widen(shared));
    (B::round(y, to), routing)
}
