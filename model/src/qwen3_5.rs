//! The `qwen3_5` text model:
//!
//! ```text
//! x = embedding(ids);  for every block: x = x + mixer(norm(x));  x = x + ffn(norm(x))
//! logits = final_norm(x) output_head^T
//! ```

use std::cell::RefCell;

use burn::tensor::Tensor;
use perplexity_kernels::backend::{HeadRequest, HeadScores, RotaryTable, Routing};
use perplexity_kernels::{Evaluation, EvaluatorBackend, Precision};
use perplexity_kv::options::KvOptions;

use crate::config::TextConfig;
use crate::layers::Pass;
use crate::layers::block::{Block, BlockState};
use crate::layers::embedding::Embedding;
use crate::layers::loader::{LoadOptions, Loader};
use crate::layers::norm::OffsetNorm;
use crate::rope::{RopeExtension, Rotary};
use crate::route::{Boundary, Route};
use crate::scorer::ModelError;
use crate::source::TextSource;

/// The weights, and what depends on the configuration alone.
#[derive(Debug)]
pub struct Qwen3_5<B: EvaluatorBackend> {
    embedding: Embedding<B>,
    blocks: Vec<Block<B>>,
    final_norm: OffsetNorm<B>,
    /// `None` when it equals the embedding table.
    output_head: Option<B::Weight>,
    rotary: Rotary,
    route: Route,
    delta_state: Precision,
    /// Codecs of the KV cache; without them it holds the rows as the route rounds them.
    kv: Option<KvOptions>,
    device: B::Device,
}

/// A batch of equal-length windows on their way through the model.
#[derive(Debug)]
pub struct Windows<B: EvaluatorBackend> {
    batch: usize,
    position: usize,
    blocks: Vec<BlockState<B>>,
    rotary: RotaryTable<B>,
    /// The experts chosen in the last pass, one entry per mixture, when someone wants them.
    routing: Option<RefCell<Vec<Routing<B>>>>,
}

impl<B: EvaluatorBackend> Windows<B> {
    /// Tokens each window has passed so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Keeps each mixture's choice of experts from here on, one pass at a time.
    pub fn keep_routing(&mut self) {
        self.routing.get_or_insert_default();
    }

    /// The experts chosen in the last pass, block after block; empty for a dense model or when they were not kept.
    pub fn routing(&mut self) -> &[Routing<B>] {
        self.routing.as_mut().map_or(&[], |kept| kept.get_mut())
    }
}

impl<B: EvaluatorBackend> Qwen3_5<B> {
    /// Loads every parameter as it is.
    ///
    /// # Errors
    /// When the source cannot provide one, or the configuration asks for what is not implemented.
    pub fn load(source: &dyn TextSource, route: Route, device: &B::Device) -> Result<Self, ModelError> {
        Self::load_with(source, route, &LoadOptions::default(), device)
    }

    /// Loads every parameter, as `options` say.
    ///
    /// # Errors
    /// As [`Self::load`], and when a weight cannot be rounded to the format asked for.
    pub fn load_with(
        source: &dyn TextSource,
        route: Route,
        options: &LoadOptions,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let config: &TextConfig = source.config();
        let loader = Loader::<B>::new(source, options, device).rounding_to_bf16(route.rounds_weights());
        let loader = match route.keeps_weights() {
            true => loader.unrounded(),
            false => loader,
        };
        let blocks = (0..config.layer_types.len())
            .map(|i| Block::load(&loader, config, i))
            .collect::<Result<_, _>>()?;
        // Whether they are one matrix is for the values to say; the flag only describes the checkpoint.
        let names = ["token_embedding", "output_head"];
        let (table, output_head) = loader.pair(names, [config.vocab_size, config.hidden_size])?;
        Ok(Self {
            embedding: Embedding::new(table),
            blocks,
            final_norm: OffsetNorm::load(&loader, "final_norm", config.hidden_size, config.rms_norm_eps)?,
            output_head,
            rotary: Rotary::new(config, RopeExtension::None),
            route,
            delta_state: Precision::Full,
            kv: None,
            device: device.clone(),
        })
    }

    /// The model with its rotary angles extended; `config` is the one it was loaded with.
    #[must_use]
    pub fn with_rope(self, config: &TextConfig, extension: RopeExtension) -> Self {
        Self {
            rotary: Rotary::new(config, extension),
            ..self
        }
    }

    /// The model with the delta rule's state in half precision, or in float32.
    #[must_use]
    pub fn with_delta_state(self, half: bool) -> Self {
        let delta_state = if half { Precision::F16 } else { Precision::Full };
        Self { delta_state, ..self }
    }

    /// The model with its KV cache packed by codecs; `config` is the one it was loaded with.
    ///
    /// # Errors
    /// When the options do not fit the model's attention layers.
    pub fn with_kv(self, config: &TextConfig, kv: KvOptions) -> Result<Self, ModelError> {
        kv.check(
            &config.attention_layers(),
            config.attention.as_ref().map_or(0, |attention| attention.head_dim),
        )?;
        Ok(Self { kv: Some(kv), ..self })
    }

    /// `batch` windows at position 0, each of at most `capacity` tokens.
    pub fn begin(&self, batch: usize, capacity: usize) -> Windows<B> {
        Windows {
            batch,
            position: 0,
            blocks: self
                .blocks
                .iter()
                .enumerate()
                .map(|(layer, block)| {
                    block.state(
                        batch,
                        capacity,
                        self.kv.as_ref().map(|kv| (kv, layer)),
                        self.route,
                        &self.device,
                    )
                })
                .collect(),
            rotary: self.rotary.table(self.route, capacity, &self.device),
            routing: None,
        }
    }

    /// One pass over the next tokens of every window, window after window in `ids`; returns the residual stream after the
    /// last block, `[batch, tokens, hidden]`.
    ///
    /// `observe` sees the residual stream before block 0, 1, ... and after the last one.
    pub fn pass(
        &self,
        windows: &mut Windows<B>,
        ids: &[u32],
        mut observe: impl FnMut(usize, &Tensor<B, 3>),
    ) -> Tensor<B, 3> {
        if let Some(kept) = &windows.routing {
            kept.borrow_mut().clear();
        }
        let mut x = self.embedding.forward(ids, windows.batch, self.route);
        for index in 0..self.blocks.len() {
            observe(index, &x);
            x = self.block(windows, index, x);
        }
        observe(self.blocks.len(), &x);
        windows.position += ids.len() / windows.batch;
        x
    }

    /// Block `index` alone: `x` `[batch, tokens, hidden]` is the residual stream before it at the next tokens of every
    /// window, whose position does not move.
    pub fn block(&self, windows: &mut Windows<B>, index: usize, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let pass = Pass {
            route: self.route,
            first_position: windows.position,
            rotary: &windows.rotary,
            routing: windows.routing.as_ref(),
            delta_state: self.delta_state,
        };
        self.blocks[index].forward(x, &mut windows.blocks[index], &pass)
    }

    /// Scores rows `[rows, hidden]` of the residual stream.
    pub fn score(&self, rows: Tensor<B, 2>, ask: &HeadRequest<'_>) -> HeadScores {
        let rows = self.normalise(rows);
        self.route.on(Boundary::Logits).score_head(rows, self.head(), ask)
    }

    /// Logits `[rows, vocab_size]` of rows of the residual stream, all at once.
    pub fn logits(&self, rows: Tensor<B, 2>) -> Tensor<B, 2> {
        self.apply_head(self.normalise(rows), None)
    }

    /// Logits `[rows, vocab_size]` of final hidden states, the outputs of the final norm, rounded as the route says or to
    /// `logits`.
    pub fn apply_head(&self, hidden: Tensor<B, 2>, logits: Option<Precision>) -> Tensor<B, 2> {
        let hidden = hidden.unsqueeze::<3>();
        let how = self.route.on(Boundary::Logits);
        let to = logits.unwrap_or(how.to);
        let logits = Evaluation { to, ..how }.project(hidden, self.head());
        logits.squeeze_dim::<2>(0)
    }

    /// The final norm over rows of the residual stream.
    pub fn normalise(&self, rows: Tensor<B, 2>) -> Tensor<B, 2> {
        self.final_norm.forward(rows, self.route.on(Boundary::Norm))
    }

    fn head(&self) -> &B::Weight {
        self.output_head.as_ref().unwrap_or_else(|| self.embedding.table())
    }
}
