//! Token embedding, without scale: `x = table[ids]`.

use burn::tensor::Tensor;
use perplexity_kernels::EvaluatorBackend;

use crate::route::{Boundary, Route};

/// The embedding table.
#[derive(Debug)]
pub struct Embedding<B: EvaluatorBackend> {
    table: B::Weight,
}

impl<B: EvaluatorBackend> Embedding<B> {
    /// From `table` `[vocab_size, hidden_size]`.
    pub fn new(table: B::Weight) -> Self {
        Self { table }
    }

    /// The table, for a head that shares it.
    pub fn table(&self) -> &B::Weight {
        &self.table
    }

    /// `ids` of `batch` windows, window after window, as `[batch, tokens, hidden]`; every id below `vocab_size`.
    pub fn forward(&self, ids: &[u32], batch: usize, route: Route) -> Tensor<B, 3> {
        B::embed_tokens(&self.table, ids, batch, route.at(Boundary::Embedding))
    }
}
