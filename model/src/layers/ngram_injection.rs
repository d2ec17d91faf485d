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
use burn::tensor::activation::{sigmoid, silu};
use perplexity_kernels::ops::widen;
use perplexity_kernels::{EvaluatorBackend, Precision};

use super::loader::Loader;
use super::norm::StreamNorm;
use crate::config::{FlashNextConfig, TextConfig};
use crate::route::{Boundary, Route};
use crate::scorer::ModelError;

/// The smallest magnitude whose root is taken.
const LEAST: f32 = 1e-6;

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
    streams: usize,
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
            streams: dims.streams,
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
        let [batch, tokens, all] = streams.dims();
        let (count, width) = (self.streams, all / self.streams);
        let project = |weight| B::project(e.clone(), weight, route.at(Boundary::MixProjection));
        let key = self.key_norm.forward(project(&self.key_projection), Precision::Full);
        let query = self.query_norm.forward(streams.clone(), Precision::Full);
        let a = (key * query).sum_dim(3) / (width as f64).sqrt();
        let gate = sigmoid(a.clone().sign() * a.abs().clamp_min(LEAST).sqrt());
        let value = widen(project(&self.value_projection)).reshape([batch, tokens, 1, width]);
        let gated = (gate * value).reshape([batch, tokens, count * width]);
        let gated = route.round(Boundary::MixActivation, gated);

        let normal = self.conv_norm.forward(gated.clone(), route.at(Boundary::Norm));
        let normal = widen(normal).reshape([batch, tokens, all]);
        let history = state.0.dims()[1];
        let inputs = Tensor::cat(vec![state.0.clone(), normal], 1);
        let tap = |j: usize| {
            let weights = self.convolution.clone().narrow(0, j, 1).reshape([1, 1, all]);
            inputs.clone().narrow(1, j * self.dilation, tokens) * weights
        };
        let taps = self.convolution.dims()[0];
        let convolved = (1..taps).fold(tap(0), |sum, j| sum + tap(j));
        state.0 = inputs.narrow(1, tokens, history);
        route.round(Boundary::Residual, widen(streams) + widen(gated) + silu(convolved))
    }
}
