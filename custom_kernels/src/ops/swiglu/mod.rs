//! `y = SiLU(x gate^T) * (x up^T)`, `SiLU(u) = u / (1 + exp(-u))`; neither product is rounded.

pub mod host;
pub mod precise;

use burn::tensor::{Tensor, activation::silu};

use crate::backend::EvaluatorBackend;
use crate::ops::project;
use crate::precision::Precision;

/// `x` `[batch, tokens, in]`, `gate` and `up` `[inner, in]`.
pub fn reference<B: EvaluatorBackend>(
    x: Tensor<B, 3>,
    gate: Tensor<B, 2>,
    up: Tensor<B, 2>,
    to: Precision,
) -> Tensor<B, 3> {
    let gate = project::reference(x.clone(), gate, Precision::Full);
    let up = project::reference(x, up, Precision::Full);
    B::round(silu(gate) * up, to)
}
