//! Dense feed-forward, `y = (SiLU(h gate^T) * (h up^T)) down^T`.

use burn::tensor::Tensor;
use perplexity_kernels::EvaluatorBackend;

use super::loader::Loader;
use crate::route::{Boundary, Route};
use crate::scorer::ModelError;

/// SwiGLU of one width.
#[derive(Debug)]
pub struct Mlp<B: EvaluatorBackend> {
    gate: B::Weight,
    up: B::Weight,
    down: B::Weight,
}

impl<B: EvaluatorBackend> Mlp<B> {
    /// Loads `gate`, `up` `[inner, hidden]` and `down` `[hidden, inner]`.
    ///
    /// # Errors
    /// When the source cannot provide one.
    pub fn load(loader: &Loader<'_, B>, hidden: usize, inner: usize) -> Result<Self, ModelError> {
        Ok(Self {
            gate: loader.matrix("gate", [inner, hidden])?,
            up: loader.matrix("up", [inner, hidden])?,
            down: loader.matrix("down", [hidden, inner])?,
        })
    }

    /// `residual + mlp(h)`, both `[batch, tokens, hidden]`.
    pub fn forward(&self, residual: Tensor<B, 3>, h: Tensor<B, 3>, route: Route) -> Tensor<B, 3> {
        let inner = B::swiglu(h, &self.gate, &self.up, route.at(Boundary::FeedForward));
        B::project_add(residual, inner, &self.down, route.at(Boundary::Residual))
    }
}
