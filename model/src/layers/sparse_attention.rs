//! Gated grouped-query attention over the blocks of keys that an indexer chooses:
//!
//! ```text
//! q, gate, k, v = projections of x;  q = rope(norm(q));  k = rope(norm(k))
//! y = (attention(q, k[chosen], v[chosen]) * sigmoid(gate)) output^T
//! ```
//!
//! While a window has no more blocks than a query may choose, this is dense causal attention and computed as such.

use burn::tensor::Tensor;
use perplexity_kernels::EvaluatorBackend;
use perplexity_kernels::backend::BlockSelection;
use perplexity_kv::options::KvOptions;

use super::Pass;
use super::indexer::{IndexState, Indexer};
use super::kv_cache::KvCache;
use super::loader::Loader;
use super::norm::OffsetNorm;
use crate::config::{AttentionConfig, FlashNextConfig, TextConfig};
use crate::rope::Rotary;
use crate::route::{Boundary, Route};
use crate::scorer::ModelError;

/// One sparse attention layer.
#[derive(Debug)]
pub struct SparseAttention<B: EvaluatorBackend> {
    query: B::Weight,
    gate: B::Weight,
    key: B::Weight,
    value: B::Weight,
    query_norm: OffsetNorm<B>,
    key_norm: OffsetNorm<B>,
    output: B::Weight,
    indexer: Indexer<B>,
    dims: AttentionConfig,
}

/// Keys and values so far, and the indexer's keys.
#[derive(Debug)]
pub struct SparseState<B: EvaluatorBackend> {
    cache: KvCache<B>,
    index: IndexState<B>,
}

impl<B: EvaluatorBackend> SparseAttention<B> {
    /// Loads the parameters under `attention/`.
    ///
    /// # Errors
    /// When the source cannot provide one.
    pub fn load(
        loader: &Loader<'_, B>,
        config: &TextConfig,
        dims: &AttentionConfig,
        flash_next: &FlashNextConfig,
    ) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        let (queries, keys) = (dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim);
        let norm = |name| OffsetNorm::load(loader, name, dims.head_dim, config.rms_norm_eps);
        Ok(Self {
            query: loader.matrix("query", [queries, hidden])?,
            gate: loader.matrix("gate", [queries, hidden])?,
            key: loader.matrix("key", [keys, hidden])?,
            value: loader.matrix("value", [keys, hidden])?,
            query_norm: norm("query_norm")?,
            key_norm: norm("key_norm")?,
            output: loader.matrix("output", [hidden, queries])?,
            indexer: Indexer::load(loader, config, &flash_next.indexer)?,
            dims: dims.clone(),
        })
    }

    /// The state at the start of `batch` windows of `capacity` tokens; `kv` names the codecs and this layer's index.
    pub fn state(
        &self,
        batch: usize,
        capacity: usize,
        kv: Option<(&KvOptions, usize)>,
        rotary: &Rotary,
        route: Route,
        device: &B::Device,
    ) -> SparseState<B> {
        let shape = [batch, self.dims.num_kv_heads, capacity, self.dims.head_dim];
        SparseState {
            cache: match kv {
                Some((kv, layer)) => KvCache::coded(shape, kv, layer),
                None => KvCache::new(shape, device),
            },
            index: self.indexer.state(batch, capacity, rotary, route, device),
        }
    }

    /// `attention(x)`, both `[batch, tokens, hidden]`; `observe` sees which blocks were chosen, if any were.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        state: &mut SparseState<B>,
        pass: &Pass<'_, B>,
        observe: &mut dyn FnMut(&BlockSelection),
    ) -> Tensor<B, 3> {
        let route = pass.route;
        let [batch, tokens, _] = x.dims();
        let AttentionConfig {
            num_heads,
            num_kv_heads,
            head_dim,
            ..
        } = self.dims;
        let project = |weight: &B::Weight| route.on(Boundary::AttentionProjection).project(x.clone(), weight);
        let heads = |x: Tensor<B, 3>, count| x.reshape([batch, tokens, count, head_dim]);
        let position = |x: Tensor<B, 4>, norm: &OffsetNorm<B>| {
            let x = norm.forward(x, route.on(Boundary::QueryKeyNorm));
            route.on(Boundary::Rotary).rotary(x, pass.rotary, pass.first_position)
        };

        let q = position(heads(project(&self.query), num_heads), &self.query_norm);
        let k = position(heads(project(&self.key), num_kv_heads), &self.key_norm);
        state.cache.append(k, heads(project(&self.value), num_kv_heads));
        self.indexer.append(x.clone(), &mut state.index, pass);

        // The first tokens of a window read all keys before them, whatever the pass.
        let dense = self
            .indexer
            .dense_tokens()
            .saturating_sub(pass.first_position)
            .min(tokens);
        let how = route.on(Boundary::AttentionOutput);
        let mut outputs = Vec::new();
        if dense > 0 {
            let q = q.clone().narrow(1, 0, dense);
            outputs.push(state.cache.attend_from(q, pass.first_position, None, how));
        }
        if dense < tokens {
            let selection = self.indexer.select(x.clone(), dense, &state.index, pass);
            observe(&selection);
            let q = q.narrow(1, dense, tokens - dense);
            let first_position = selection.first_position;
            outputs.push(state.cache.attend_from(q, first_position, Some(&selection), how));
        }
        let o = Tensor::cat(outputs, 1).reshape([batch, tokens, num_heads * head_dim]);
        let o = route.on(Boundary::OutputGate).sigmoid_gate(o, project(&self.gate));
        route.on(Boundary::Residual).project(o, &self.output)
    }
}
