//! Offset RMS norm, `x * rsqrt(mean(x^2) + eps) * (1 + w)`: block norms, final norm, query and key norms.

use burn::tensor::Tensor;
use perplexity_kernels::{Evaluation, EvaluatorBackend};

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
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>, how: impl Into<Evaluation>) -> Tensor<B, D> {
        how.into().offset_rms_norm(x, self.weight.clone(), self.eps)
    }
}

/// Offset RMS norm of each of several streams by itself, every stream with weights of its own.
#[derive(Debug)]
pub struct StreamNorm<B: EvaluatorBackend> {
    /// `[streams, width]`.
    weight: Tensor<B, 2>,
    eps: f32,
}

impl<B: EvaluatorBackend> StreamNorm<B> {
    /// Loads `name` `[streams * width]`.
    ///
    /// # Errors
    /// When the source cannot provide it.
    pub fn load(
        loader: &Loader<'_, B>,
        name: &str,
        [streams, width]: [usize; 2],
        eps: f32,
    ) -> Result<Self, ModelError> {
        let weight: Tensor<B, 1> = loader.tensor(name, [streams * width])?;
        Ok(Self {
            weight: weight.reshape([streams, width]),
            eps,
        })
    }

    /// `x` `[batch, tokens, streams * width]` as `[batch, tokens, streams, width]`, normalised.
    pub fn forward(&self, x: Tensor<B, 3>, how: Evaluation) -> Tensor<B, 4> {
        how.stream_norm(x, self.weight.clone(), self.eps)
    }
}
