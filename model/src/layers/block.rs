//! One block: `x = x + mixer(norm(x))`, then `x = x + feed_forward(norm(x))`.

use burn::tensor::Tensor;
use perplexity_kernels::EvaluatorBackend;
use perplexity_kv::options::KvOptions;

use super::Pass;
use super::attention::Attention;
use super::delta_net::{DeltaNet, DeltaNetState};
use super::kv_cache::KvCache;
use super::loader::Loader;
use super::mlp::Mlp;
use super::moe::Moe;
use super::norm::OffsetNorm;
use crate::config::{FeedForwardConfig, LayerType, TextConfig};
use crate::route::{Boundary, Route};
use crate::scorer::ModelError;

/// A mixer and a feed-forward, each behind its norm.
#[derive(Debug)]
pub struct Block<B: EvaluatorBackend> {
    input_norm: OffsetNorm<B>,
    mixer: Mixer<B>,
    post_attention_norm: OffsetNorm<B>,
    feed_forward: FeedForward<B>,
}

#[derive(Debug)]
enum Mixer<B: EvaluatorBackend> {
    Attention(Box<Attention<B>>),
    DeltaNet(Box<DeltaNet<B>>),
}

#[derive(Debug)]
enum FeedForward<B: EvaluatorBackend> {
    Dense(Mlp<B>),
    Moe(Box<Moe<B>>),
}

/// What one block carries from pass to pass.
#[derive(Debug)]
pub enum BlockState<B: EvaluatorBackend> {
    /// Keys and values.
    Attention(KvCache<B>),
    /// Convolution tail and delta rule state.
    DeltaNet(DeltaNetState<B>),
}

impl<B: EvaluatorBackend> Block<B> {
    /// Loads block `index`, the parameters under `layers/<index>/`.
    ///
    /// # Errors
    /// When the source cannot provide one, or the configuration has no dimensions for the block's kind.
    pub fn load(loader: &Loader<'_, B>, config: &TextConfig, index: usize) -> Result<Self, ModelError> {
        let loader = loader.scope(&format!("layers/{index}"));
        let norm = |name| OffsetNorm::load(&loader, name, config.hidden_size, config.rms_norm_eps);
        let mixer = match (config.layer_types[index], &config.attention, &config.delta_net) {
            (LayerType::FullAttention, Some(dims), _) => {
                Mixer::Attention(Box::new(Attention::load(&loader.scope("attention"), config, dims)?))
            }
            (LayerType::LinearAttention, _, Some(dims)) => {
                Mixer::DeltaNet(Box::new(DeltaNet::load(&loader.scope("gdn"), config, dims)?))
            }
            (kind, _, _) => {
                return Err(ModelError::MissingDimensions {
                    layer: index,
                    kind: kind.name(),
                });
            }
        };
        let feed_forward = match &config.feed_forward {
            FeedForwardConfig::Dense { intermediate_size } => {
                FeedForward::Dense(Mlp::load(&loader.scope("mlp"), config.hidden_size, *intermediate_size)?)
            }
            FeedForwardConfig::Moe(dims) => {
                FeedForward::Moe(Box::new(Moe::load(&loader.scope("moe"), config.hidden_size, dims)?))
            }
        };
        Ok(Self {
            input_norm: norm("input_norm")?,
            mixer,
            post_attention_norm: norm("post_attention_norm")?,
            feed_forward,
        })
    }

    /// The state at the start of `batch` windows of `capacity` tokens; `kv` names the codecs and this layer's index.
    pub fn state(
        &self,
        batch: usize,
        capacity: usize,
        kv: Option<(&KvOptions, usize)>,
        route: Route,
        device: &B::Device,
    ) -> BlockState<B> {
        match &self.mixer {
            Mixer::Attention(attention) => BlockState::Attention(attention.cache(batch, capacity, kv, route, device)),
            Mixer::DeltaNet(delta_net) => BlockState::DeltaNet(delta_net.state(batch, device)),
        }
    }

    /// `x` `[batch, tokens, hidden]` through the block; `state` must be this block's.
    pub fn forward(&self, x: Tensor<B, 3>, state: &mut BlockState<B>, pass: &Pass<'_, B>) -> Tensor<B, 3> {
        let route = pass.route;
        let x = match (&self.mixer, state) {
            (Mixer::Attention(attention), BlockState::Attention(cache)) => {
                let h = self.input_norm.forward(x.clone(), route.on(Boundary::Norm));
                attention.forward(x, h, cache, pass)
            }
            (Mixer::DeltaNet(delta_net), BlockState::DeltaNet(carried)) => {
                let row = self.input_norm.forward(x.clone(), route.on(Boundary::DeltaNetControl));
                // Rounding a row that is float32 already would be a second rounding.
                let h = if route.is_precise() {
                    self.input_norm.forward(x.clone(), route.on(Boundary::Norm))
                } else {
                    route.round(Boundary::Norm, row.clone())
                };
                delta_net.forward(x, h, row, carried, pass)
            }
            _ => unreachable!("a state is used with the block that made it"),
        };
        let h = self.post_attention_norm.forward(x.clone(), route.on(Boundary::Norm));
        match &self.feed_forward {
            FeedForward::Dense(mlp) => mlp.forward(x, h, route),
            FeedForward::Moe(moe) => moe.forward(x, h, pass),
        }
    }
}
