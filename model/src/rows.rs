//! Whole rows of log-probabilities, for files and comparisons that need every token:
//!
//! ```text
//! lp[x] = logits[x] - m - ln sum_{r < public} exp(logits[r] - m),   m = max_{r < public} logits[r],   logits = h W^T
//! ```
//!
//! with the window's own final hidden states `h`, or with given ones: the same head applied to what another run saved, logits
//! rounded as in that run. Rows come in tiles while the next tile is computed, so memory holds a few tiles whatever window and vocabulary are.

use std::sync::mpsc::{SyncSender, sync_channel};

use burn::tensor::{FloatDType, Tensor, TensorData};
use perplexity_kernels::EvaluatorBackend;
pub use perplexity_kernels::Precision;
use perplexity_kernels::backend::HeadRequest;
use perplexity_kernels::ops::score_head::TILE_ROWS;
use rayon::prelude::*;

use crate::scorer::{Ask, ModelError, Window, WindowScorer};

/// Another run's final hidden states of a window.
#[derive(Debug, Clone, Copy)]
pub struct Reference<'a> {
    /// `[positions, hidden_size]`.
    pub states: &'a [f32],
    /// Precision of the values.
    pub precision: Precision,
    /// Precision that their logits had in that run.
    pub logits: Precision,
}

/// A scored position; log-probabilities `[public_tokens]`.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// Log-probability of the target, the very one that [`Scorer::score`](crate::scorer::Scorer::score) gives.
    pub logprob: f32,
    /// This run's distribution.
    pub run: &'a [f32],
    /// What the output head makes of the reference's hidden state; empty without one.
    pub reference: &'a [f32],
}

/// Takes a position.
pub type RowVisitor<'a> = dyn FnMut(Row<'_>) -> Result<(), RowError> + 'a;

/// Why a visitor stopped.
pub type RowError = Box<dyn std::error::Error + Send + Sync>;

/// The rows of a few positions, `[positions, public_tokens]`; `reference` is empty without one.
struct RowTile {
    logprobs: Vec<f32>,
    run: Vec<f32>,
    reference: Vec<f32>,
}

impl<B: EvaluatorBackend> WindowScorer<B> {
    /// See [`Scorer::rows`](crate::scorer::Scorer::rows).
    pub(crate) fn visit_rows(
        &self,
        window: &Window,
        reference: Option<&Reference<'_>>,
        visit: &mut RowVisitor<'_>,
    ) -> Result<(), ModelError> {
        self.check(std::slice::from_ref(window), &Ask::default())?;
        let expected = window.positions() * self.hidden_size;
        if let Some(given) = reference.filter(|given| given.states.len() != expected) {
            return Err(ModelError::Option {
                option: "the number of given hidden values",
                found: given.states.len(),
                expected: expected.to_string(),
            });
        }
        let public = self.options.public_tokens;
        let (tiles, received) = sync_channel(1);
        std::thread::scope(|scope| {
            scope.spawn(move || self.on_pool(|| self.send_tiles(window, reference, &tiles)));
            for tile in received {
                let RowTile {
                    logprobs,
                    run,
                    reference,
                } = tile?;
                let mut given = reference.chunks_exact(public);
                for (run, logprob) in run.chunks_exact(public).zip(logprobs) {
                    let reference = given.next().unwrap_or(&[]);
                    let row = Row {
                        logprob,
                        run,
                        reference,
                    };
                    // Leaving the loop closes the channel, which ends the thread.
                    visit(row).map_err(ModelError::Row)?;
                }
            }
            Ok(())
        })
    }

    /// Computes the window's rows tile by tile until nobody receives them.
    fn send_tiles(
        &self,
        window: &Window,
        reference: Option<&Reference<'_>>,
        tiles: &SyncSender<Result<RowTile, ModelError>>,
    ) {
        let fed = window.tokens.len() - 1;
        let first = window.first_target - 1;
        let mut state = self.model.begin(1, fed);
        while state.position() < fed {
            let start = state.position();
            let end = self.pass_end(start, fed);
            let hidden = match self.model.pass(&mut state, &window.tokens[start..end]) {
                Ok(hidden) => hidden,
                Err(error) => {
                    // When nobody receives the error, another one has ended the loop.
                    let _ = tiles.send(Err(error));
                    return;
                }
            };
            let [_, _, width] = hidden.dims();
            for row in (start.max(first)..end).step_by(TILE_ROWS) {
                let count = TILE_ROWS.min(end - row);
                let columns = row - start..row - start + count;
                let rows = hidden.clone().slice([0..1, columns, 0..width]).reshape([count, width]);
                let targets = &window.tokens[row + 1..=row + count];
                let logprobs = self.model.score(
                    rows.clone(),
                    &HeadRequest {
                        public_rows: self.options.public_tokens,
                        targets,
                        top_k: 0,
                        candidates_per_row: 0,
                        candidates: &[],
                    },
                );
                let rows = self.model.normalise(rows);
                let given = reference.map_or_else(Vec::new, |given| {
                    let size = self.hidden_size;
                    let states = &given.states[(row - first) * size..][..count * size];
                    let states = TensorData::new(states.to_vec(), [count, size]);
                    let mut states = Tensor::<B, 2>::from_data(states, &rows.device());
                    if given.precision != Precision::Full {
                        // As the run has its own, and nothing is lost.
                        states = states.cast(FloatDType::from(rows.dtype()));
                    }
                    self.log_softmax(self.model.apply_head(states, Some(given.logits)))
                });
                let tile = RowTile {
                    logprobs: logprobs.logprobs,
                    run: self.log_softmax(self.model.apply_head(rows, None)),
                    reference: given,
                };
                if tiles.send(Ok(tile)).is_err() {
                    return;
                }
            }
        }
    }

    /// Log-probabilities `[rows, public_tokens]` of logits `[rows, vocab_size]`, with sums in f64.
    fn log_softmax(&self, logits: Tensor<B, 2>) -> Vec<f32> {
        let [rows, head_rows] = logits.dims();
        let public = self.options.public_tokens;
        let logits: Vec<f32> = logits
            .into_data()
            .convert::<f32>()
            .into_vec()
            .expect("converted to f32 just now");
        let mut all = vec![0.0; rows * public];
        all.par_chunks_exact_mut(public)
            .zip(logits.par_chunks_exact(head_rows))
            .for_each(|(row, logits)| {
                let logits = &logits[..public];
                let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
                let normaliser = f64::from(max) + sum.ln();
                row.iter_mut()
                    .zip(logits)
                    .for_each(|(lp, &l)| *lp = (f64::from(l) - normaliser) as f32);
            });
        all
    }
}
