//! Whole rows of log-probabilities, for files and comparisons that need every token:
//!
//! ```text
//! lp[x] = logits[x] - m - ln sum_{r < public} exp(logits[r] - m),   m = max_{r < public} logits[r],   logits = h W^T
//! ```
//!
//! with the window's own final hidden states `h`, or with given ones: the same head applied to what another run saved. Rows
//! come in tiles while the next tile is computed, so memory holds a few tiles whatever window and vocabulary are.

use std::sync::mpsc::{SyncSender, sync_channel};

use burn::tensor::{FloatDType, Tensor, TensorData};
use perplexity_kernels::EvaluatorBackend;
use perplexity_kernels::ops::score_head::TILE_ROWS;
use rayon::prelude::*;

use crate::scorer::{Ask, ModelError, Window, WindowScorer};

/// Takes a position's log-probabilities `[public_tokens]`, and those of the reference's hidden state, empty without one.
pub type RowVisitor<'a> = dyn FnMut(&[f32], &[f32]) -> Result<(), RowError> + 'a;

/// Why a visitor stopped.
pub type RowError = Box<dyn std::error::Error + Send + Sync>;

/// The rows of a few positions, `[positions, public_tokens]`; `reference` is empty without one.
struct RowTile {
    run: Vec<f32>,
    reference: Vec<f32>,
}

impl<B: EvaluatorBackend> WindowScorer<B> {
    /// See [`Scorer::rows`](crate::scorer::Scorer::rows).
    pub(crate) fn visit_rows(
        &self,
        window: &Window,
        reference: &[f32],
        visit: &mut RowVisitor<'_>,
    ) -> Result<(), ModelError> {
        self.check(std::slice::from_ref(window), &Ask::default())?;
        let expected = window.positions() * self.hidden_size;
        if !reference.is_empty() && reference.len() != expected {
            return Err(ModelError::Option {
                option: "the number of given hidden values",
                found: reference.len(),
                expected: expected.to_string(),
            });
        }
        let public = self.options.public_tokens;
        let (tiles, received) = sync_channel(1);
        std::thread::scope(|scope| {
            scope.spawn(move || self.on_pool(|| self.send_tiles(window, reference, &tiles)));
            for tile in received {
                let RowTile { run, reference } = tile?;
                let mut given = reference.chunks_exact(public);
                for row in run.chunks_exact(public) {
                    // Leaving the loop closes the channel, which ends the thread.
                    visit(row, given.next().unwrap_or(&[])).map_err(ModelError::Row)?;
                }
            }
            Ok(())
        })
    }

    /// Computes the window's rows tile by tile until nobody receives them.
    fn send_tiles(&self, window: &Window, reference: &[f32], tiles: &SyncSender<Result<RowTile, ModelError>>) {
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
                let rows = hidden.clone().slice([0..1, columns, 0..width]);
                let rows = self.model.normalise(rows.reshape([count, width]));
                let given = match reference.is_empty() {
                    true => Vec::new(),
                    false => {
                        let size = self.hidden_size;
                        let given = &reference[(row - first) * size..][..count * size];
                        let given = TensorData::new(given.to_vec(), [count, size]);
                        // The rows of the same route have the precision of these, so nothing is lost.
                        let given =
                            Tensor::<B, 2>::from_data(given, &rows.device()).cast(FloatDType::from(rows.dtype()));
                        self.log_softmax(self.model.apply_head(given))
                    }
                };
                let tile = RowTile {
                    run: self.log_softmax(self.model.apply_head(rows)),
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
