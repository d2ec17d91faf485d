//! Hyper-connections: `S` residual streams, which a layer reads as one mixture and writes back to, each by its weight.
//! With streams `R_s`, their norms `Rn_s`, and `z = Rn down^T`:
//!
//! ```text
//! x   = 1/S sum_s sigmoid(u_s) * Rn_s          u = SiLU(z / S) up^T
//! w_s = 2 sigmoid(v_s / S)                     v = Rn inject^T
//! R_s = R_s + w_s layer(x)
//! ```
//!
//! At the model's end there is a mixture only.

use burn::tensor::Tensor;
use perplexity_kernels::EvaluatorBackend;
use perplexity_kernels::ops::hyper_connection;

use super::loader::Loader;
use super::norm::StreamNorm;
use crate::config::{FlashNextConfig, TextConfig};
use crate::route::{Boundary, Route};
use crate::scorer::ModelError;

/// The mixture of one place.
#[derive(Debug)]
pub struct Mixer<B: EvaluatorBackend> {
    norm: StreamNorm<B>,
    down: B::Weight,
    up: B::Weight,
    streams: usize,
}

/// The mixture in front of a layer and the way back.
#[derive(Debug)]
pub struct HyperConnection<B: EvaluatorBackend> {
    mixer: Mixer<B>,
    inject: B::Weight,
}

impl<B: EvaluatorBackend> Mixer<B> {
    /// Loads `norm`, `down` and `up`.
    ///
    /// # Errors
    /// When the source cannot provide one.
    pub fn load(loader: &Loader<'_, B>, config: &TextConfig, dims: &FlashNextConfig) -> Result<Self, ModelError> {
        let width = dims.residual_width(config.hidden_size);
        let shape = [dims.streams, config.hidden_size];
        Ok(Self {
            norm: StreamNorm::load(loader, "norm", shape, config.rms_norm_eps)?,
            down: loader.matrix("down", [dims.low_rank, width])?,
            up: loader.matrix("up", [width, dims.low_rank])?,
            streams: dims.streams,
        })
    }

    /// The mixture `[batch, tokens, width]` of `streams` `[batch, tokens, S * width]`.
    pub fn forward(&self, streams: Tensor<B, 3>, route: Route) -> Tensor<B, 3> {
        self.mix(streams, route).0
    }

    /// The mixture, and the normalised streams it is made of.
    fn mix(&self, streams: Tensor<B, 3>, route: Route) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let shape = streams.dims();
        let project = |x, weight| route.on(Boundary::MixProjection).project(x, weight);
        let normal = self.norm.forward(streams, route.on(Boundary::Norm));
        let flat: Tensor<B, 3> = normal.clone().reshape(shape);
        let z = project(flat.clone(), &self.down);
        let m = hyper_connection::activate(z, self.streams, route.on(Boundary::MixActivation));
        let x = hyper_connection::mix(project(m, &self.up), normal, route.on(Boundary::Norm));
        (x, flat)
    }
}

impl<B: EvaluatorBackend> HyperConnection<B> {
    /// Loads the mixture's parameters and `inject`.
    ///
    /// # Errors
    /// When the source cannot provide one.
    pub fn load(loader: &Loader<'_, B>, config: &TextConfig, dims: &FlashNextConfig) -> Result<Self, ModelError> {
        let width = dims.residual_width(config.hidden_size);
        Ok(Self {
            mixer: Mixer::load(loader, config, dims)?,
            inject: loader.matrix("inject", [dims.streams, width])?,
        })
    }

    /// What the layer reads, `[batch, tokens, width]`, and the streams' weights for what it writes, `[batch, tokens, S]`.
    pub fn read(&self, streams: Tensor<B, 3>, route: Route) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let (x, normal) = self.mixer.mix(streams, route);
        let how = route.on(Boundary::MixProjection);
        (x, hyper_connection::weights(how.project(normal, &self.inject), how))
    }

    /// The streams after the layer's output `y` `[batch, tokens, width]` has gone to each by its weight.
    pub fn write(streams: Tensor<B, 3>, y: Tensor<B, 3>, weights: Tensor<B, 3>, route: Route) -> Tensor<B, 3> {
        hyper_connection::write(streams, y, weights, route.on(Boundary::Residual))
    }
}

/// `x` once for each stream, side by side.
pub fn repeat<B: EvaluatorBackend>(x: Tensor<B, 3>, streams: usize) -> Tensor<B, 3> {
    Tensor::cat(vec![x; streams], 2)
}
