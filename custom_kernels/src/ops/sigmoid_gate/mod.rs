//! `y = x * sigmoid(gate)`.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;
pub mod host;
pub mod precise;

use burn::tensor::{Tensor, activation::sigmoid};

use crate::backend::EvaluatorBackend;
use crate::ops::widen;
use crate::precision::Precision;

/// Elementwise, one rounding.
pub fn reference<B: EvaluatorBackend, const D: usize>(
    x: Tensor<B, D>,
    gate: Tensor<B, D>,
    to: Precision,
) -> Tensor<B, D> {
    B::round(widen(x) * sigmoid(widen(gate)), to)
}
