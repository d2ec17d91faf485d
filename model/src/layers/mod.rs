//! The layers of the text models, one file each, generic over the backend.
//!
//! A layer is built by its `load` from the parameters under its name and holds nothing but weights; what it carries from
//! pass to pass is a separate state, so that one model serves any number of windows.

pub mod attention;
pub mod block;
pub mod delta_net;
pub mod embedding;
pub mod expert_mixture;
pub mod hyper_connection;
pub mod indexer;
pub mod kv_cache;
pub mod linear;
pub mod loader;
pub mod mlp;
pub mod moe;
pub mod ngram_injection;
pub mod norm;
pub mod sparse_attention;

use std::cell::RefCell;

use perplexity_kernels::backend::{RotaryTable, Routing};
use perplexity_kernels::{EvaluatorBackend, Precision};

use crate::route::Route;

/// What all layers of one pass share.
#[derive(Debug)]
pub struct Pass<'a, B: EvaluatorBackend> {
    /// The numerical route.
    pub route: Route,
    /// Position of the pass's first token in its window.
    pub first_position: usize,
    /// Cosines and sines of every position of the window.
    pub rotary: &'a RotaryTable<B>,
    /// Where mixtures of experts leave their choices, block after block, for whoever asks.
    pub routing: Option<&'a RefCell<Vec<Routing<B>>>>,
    /// How the delta rule's state is stored.
    pub delta_state: Precision,
}
