//! Gated grouped-query attention with partial rotary embedding:
//!
//! ```text
//! q, gate, k, v = projections of h;  q = rope(norm(q));  k = rope(norm(k))
//! y = residual + (attention(q, k, v) * sigmoid(gate)) output^T
//! ```

use burn::tensor::Tensor;
use perplexity_kernels::EvaluatorBackend;
use perplexity_kv::options::KvOptions;

use super::Pass;
use super::kv_cache::KvCache;
use super::linear::Linear;
use super::loader::Loader;
use super::norm::OffsetNorm;
use crate::config::{AttentionConfig, TextConfig};
use crate::route::{Boundary, Route};
use crate::scorer::ModelError;

/// One attention layer.
#[derive(Debug)]
pub struct Attention<B: EvaluatorBackend> {
    query: Linear<B>,
    gate: Linear<B>,
    key: Linear<B>,
    value: Linear<B>,
    query_norm: OffsetNorm<B>,
    key_norm: OffsetNorm<B>,
    output: Linear<B>,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

impl<B: EvaluatorBackend> Attention<B> {
    /// Loads the parameters under `attention/`.
    ///
    /// # Errors
    /// When the source cannot provide one.
    pub fn load(loader: &Loader<'_, B>, config: &TextConfig, dims: &AttentionConfig) -> Result<Self, ModelError> {
        let &AttentionConfig {
            num_heads,
            num_kv_heads,
            head_dim,
            ..
        } = dims;
        let (hidden, queries, keys) = (config.hidden_size, num_heads * head_dim, num_kv_heads * head_dim);
        Ok(Self {
            query: loader.linear("query", [queries, hidden])?,
            gate: loader.linear("gate", [queries, hidden])?,
            key: loader.linear("key", [keys, hidden])?,
            value: loader.linear("value", [keys, hidden])?,
            query_norm: OffsetNorm::load(loader, "query_norm", head_dim, config.rms_norm_eps)?,
            key_norm: OffsetNorm::load(loader, "key_norm", head_dim, config.rms_norm_eps)?,
            output: loader.linear("output", [hidden, queries])?,
            num_heads,
            num_kv_heads,
            head_dim,
        })
    }

    /// An empty cache for `batch` windows of `capacity` tokens; `kv` names the codecs and this layer's index.
    pub fn cache(
        &self,
        batch: usize,
        capacity: usize,
        kv: Option<(&KvOptions, usize)>,
        route: Route,
        device: &B::Device,
    ) -> KvCache<B> {
        let shape = [batch, self.num_kv_heads, capacity, self.head_dim];
        let Some((kv, layer)) = kv else {
            return KvCache::new(shape, device);
        };
        let output = route.at(Boundary::AttentionOutput);
        // In f64 a codec's rows are read as it defines them.
        let on_device = B::ON_DEVICE && !route.is_precise();
        let here = on_device.then(|| KvCache::on_device(shape, kv, layer, output, device));
        here.flatten().unwrap_or_else(|| KvCache::coded(shape, kv, layer))
    }

    /// `residual + attention(h)`, both `[batch, tokens, hidden]`.
    pub fn forward(
        &self,
        residual: Tensor<B, 3>,
        h: Tensor<B, 3>,
        cache: &mut KvCache<B>,
        pass: &Pass<'_, B>,
    ) -> Tensor<B, 3> {
        let route = pass.route;
        let [batch, tokens, _] = h.dims();
        let project = |linear: &Linear<B>| linear.forward(h.clone(), route.on(Boundary::AttentionProjection));
        let heads = |x: Tensor<B, 3>, count| x.reshape([batch, tokens, count, self.head_dim]);
        let position = |x: Tensor<B, 4>, norm: &OffsetNorm<B>| {
            let x = norm.forward(x, route.on(Boundary::QueryKeyNorm));
            route.on(Boundary::Rotary).rotary(x, pass.rotary, pass.first_position)
        };

        let q = position(heads(project(&self.query), self.num_heads), &self.query_norm);
        let k = position(heads(project(&self.key), self.num_kv_heads), &self.key_norm);
        let v = heads(project(&self.value), self.num_kv_heads);
        let v = if cache.is_coded() {
            v
        } else {
            route.round(Boundary::CachedValue, v)
        };
        cache.append(k, v);
        let o = cache.attend(q, route.on(Boundary::AttentionOutput));

        let o = o.reshape([batch, tokens, self.num_heads * self.head_dim]);
        let o = route.on(Boundary::OutputGate).sigmoid_gate(o, project(&self.gate));
        self.output.forward_add(residual, o, route.on(Boundary::Residual))
    }
}
