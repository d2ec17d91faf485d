//! Offset RMS norm, `x * rsqrt(mean(x^2) + eps) * (1 + w)`: block norms, final norm, query and key norms.

use burn::tensor::Tensor;
use perplexity_kernels::{EvaluatorBackend, Precision};

use super::loader::Loader;
use crate::scorer::ModelError;

/// One norm's weight and epsilon.
#[derive(Debug)]
pub struct OffsetNorm<B: EvaluatorBackend> {
    weight: Tensor<B, 1>,
    eps: f32,
}

impl<B: EvaluatorBackend> OffsetNorm<B> {
    /// Loads `name` `[width]`.
    ///
    /// # Errors
    /// When the source cannot provide it.
    pub fn load(loader: &Loader<'_, B>, name: &str, width: usize, eps: f32) -> Result<Self, ModelError> {
        Ok(Self {
            weight: loader.tensor(name, [width])?,
            eps,
        })
    }

    /// Over the last axis.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>, to: Precision) -> Tensor<B, D> {
        B::offset_rms_norm(x, self.weight.clone(), self.eps, to)
    }
}
