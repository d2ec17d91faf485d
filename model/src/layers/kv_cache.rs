//! Keys and values of one attention layer and batch: normalised, rotated keys and plain values.
//!
//! Rows pass through the cache before any query reads them, the token's own included. Whatever the representation, a
//! cache is [`KvCache::append`], then [`KvCache::attend`]; here it holds the rows as given, 16-bit values under a route
//! that rounds them so.

use burn::tensor::Tensor;
use perplexity_kernels::{EvaluatorBackend, Precision};

/// Rows of every token so far, with room for the whole window.
#[derive(Debug)]
pub struct KvCache<B: EvaluatorBackend> {
    /// `[batch, kv_heads, capacity, head_dim]`; `None` only while a pass appends.
    rows: Option<[Tensor<B, 4>; 2]>,
    tokens: usize,
}

impl<B: EvaluatorBackend> KvCache<B> {
    /// Empty, `shape` `[batch, kv_heads, capacity, head_dim]`.
    pub fn new(shape: [usize; 4], device: &B::Device) -> Self {
        Self {
            rows: Some([Tensor::zeros(shape, device), Tensor::zeros(shape, device)]),
            tokens: 0,
        }
    }

    /// Takes the rows of a pass, `[batch, tokens, kv_heads, head_dim]` each; the capacity must hold them.
    pub fn append(&mut self, keys: Tensor<B, 4>, values: Tensor<B, 4>) {
        let appended = keys.dims()[1];
        // Taken out, so that the backend may write in place.
        self.rows = self.rows.take().map(|[k, v]| {
            [
                B::append_rows(k, keys, self.tokens),
                B::append_rows(v, values, self.tokens),
            ]
        });
        self.tokens += appended;
    }

    /// Causal attention of the last appended tokens' queries `[batch, tokens, heads, head_dim]`.
    pub fn attend(&self, q: Tensor<B, 4>, to: Precision) -> Tensor<B, 4> {
        let [keys, values] = self.rows.as_ref().expect("appending always puts the rows back");
        let first_position = self.tokens - q.dims()[1];
        B::causal_attention(q, keys.clone(), values.clone(), first_position, to)
    }
}
