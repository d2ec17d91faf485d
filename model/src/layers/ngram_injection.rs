//! The injection of n-gram embeddings `e` into the residual streams `R_s`, before one layer's mixer:
//!
//! ```text
//! a_s = norm(key_s) . norm(R_s) / sqrt(H),   key = e key_projection^T,   value = e value_projection^T
//! G_s = sigmoid(sign(a_s) sqrt(max(|a_s|, 1e-6))) value
//! C[t] = sum_j convolution[j] norm(G)[t - d (W-1-j)]            zeros before the window, d = longest n-gram
//! R   = R + G + SiLU(C)
//! ```
//!
//! `sign(0) = 0`. Embeddings of zero leave the streams as they are.

use burn::tensor::Tensor;
use perplexity_kernels::EvaluatorBackend;
use perplexity_kernels::ops::{ngram_injection, widen};

use super::loader::Loader;
use super::norm::StreamNorm;
use crate::config::{FlashNextConfig, TextConfig};
use crate::route::{Boundary, Route};
use crate::scorer::ModelError;

/// The injection's weights.
#[derive(Debug)]
pub struct NgramInjection<B: EvaluatorBackend> {
    key_projection: B::Weight,
    value_projection: B::Weight,
    key_norm: StreamNorm<B>,
    query_norm: StreamNorm<B>,
    conv_norm: StreamNorm<B>,
    /// `[taps, S * width]`.
    convolution: Tensor<B, 2>,
    /// Tokens between taps.
    dilation: usize,
}

/// The last inputs of the convolution, `[batch, (W - 1) d, S * width]`.
#[derive(Debug)]
pub struct InjectionState<B: EvaluatorBackend>(Tensor<B, 3>);

impl<B: EvaluatorBackend> NgramInjection<B> {
    /// Loads the parameters under `ple/`.
    ///
    /// # Errors
    /// When the source cannot provide one.
    pub fn load(loader: &Loader<'_, B>, config: &TextConfig, dims: &FlashNextConfig) -> Result<Self, ModelError> {
        let (hidden, width) = (config.hidden_size, dims.residual_width(config.hidden_size));
        let norm = |name| StreamNorm::load(loader, name, [dims.streams, hidden], config.rms_norm_eps);
        Ok(Self {
            key_projection: loader.matrix("key_projection", [width, dims.ple.embed_dim])?,
            value_projection: loader.matrix("value_projection", [hidden, dims.ple.embed_dim])?,
            key_norm: norm("key_norm")?,
            query_norm: norm("query_norm")?,
            conv_norm: norm("conv_norm")?,
            convolution: loader.tensor("convolution", [dims.ple.conv_kernel_size, width])?,
            dilation: dims.ngram.size,
        })
    }

    /// The state at the start of `batch` windows: all zeros.
    pub fn state(&self, batch: usize, device: &B::Device) -> InjectionState<B> {
        let [taps, width] = self.convolution.dims();
        InjectionState(Tensor::zeros([batch, (taps - 1) * self.dilation, width], device))
    }

    /// `streams` `[batch, tokens, S * width]` with the embeddings `e` `[batch, tokens, embed_dim]` injected.
    pub fn forward(
        &self,
        streams: Tensor<B, 3>,
        e: Tensor<B, 3>,
        state: &mut InjectionState<B>,
        route: Route,
    ) -> Tensor<B, 3> {
        let shape @ [_, tokens, _] = streams.dims();
        let project = |weight| route.on(Boundary::MixProjection).project(e.clone(), weight);
        let inner = route.on(Boundary::InnerNorm);
        let key = self.key_norm.forward(project(&self.key_projection), inner);
        let query = self.query_norm.forward(streams.clone(), inner);
        let value = project(&self.value_projection);
        let gated = ngram_injection::gate(key, query, value, route.on(Boundary::MixActivation));

        let normal = self.conv_norm.forward(gated.clone(), route.on(Boundary::Norm));
        let history = state.0.dims()[1];
        let inputs = Tensor::cat(vec![state.0.clone(), widen(normal).reshape(shape)], 1);
        state.0 = inputs.clone().narrow(1, tokens, history);
        let (convolution, how) = (self.convolution.clone(), route.on(Boundary::Residual));
        ngram_injection::inject(streams, gated, inputs, convolution, self.dilation, how)
    }
}
