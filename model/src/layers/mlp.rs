//! Dense feed-forward, `y = (SiLU(h gate^T) * (h up^T)) down^T`.

use burn::tensor::Tensor;
use perplexity_kernels::EvaluatorBackend;

use super::linear::Linear;
use super::loader::Loader;
use crate::route::{Boundary, Route};
use crate::scorer::ModelError;

/// SwiGLU of one width.
#[derive(Debug)]
pub struct Mlp<B: EvaluatorBackend> {
    gate: Linear<B>,
    up: Linear<B>,
    down: Linear<B>,
}

impl<B: EvaluatorBackend> Mlp<B> {
    /// Loads `gate`, `up` `[inner, hidden]` and `down` `[hidden, inner]`.
    ///
    /// # Errors
    /// When the source cannot provide one.
    pub fn load(loader: &Loader<'_, B>, hidden: usize, inner: usize) -> Result<Self, ModelError> {
        Ok(Self {
            gate: loader.linear("gate", [inner, hidden])?,
            up: loader.linear("up", [inner, hidden])?,
            down: loader.linear("down", [hidden, inner])?,
        })
    }

    /// `residual + mlp(h)`, both `[batch, tokens, hidden]`.
    pub fn forward(&self, residual: Tensor<B, 3>, h: Tensor<B, 3>, route: Route) -> Tensor<B, 3> {
        let inner = Linear::swiglu(&self.gate, &self.up, h, route.on(Boundary::FeedForward));
        self.down.forward_add(residual, inner, route.on(Boundary::Residual))
    }
}
