//! Scoring windows: what the program sees of a model, whatever the backend.
//!
//! A window's tokens but the last are fed, in passes of at most `prefill_chunk`, from an empty state at position 0; the
//! row at position `i - 1` scores token `i`. Windows of equal length run as one batch; none sees another.

use std::ops::Range;
use std::path::PathBuf;

use burn::tensor::Tensor;
use perplexity_kernels::EvaluatorBackend;
use perplexity_kernels::backend::HeadRequest;
use perplexity_kv::options::{KvOptions, KvOptionsError};

use crate::any_model::AnyModel;
use crate::experts::ExpertError;
use crate::formats::{Format, FormatError};
use crate::layers::loader::LoadOptions;
use crate::ngram::VolumeError;
use crate::qwen4_exp::{FlashNextOptions, Statistics};
use crate::rope::RopeExtension;
use crate::route::Route;
use crate::rows::{Reference, RowError, RowVisitor};
use crate::source::{SourceError, TextSource};

/// One window of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// Input ids; the last one is a target only and is never fed.
    pub tokens: Vec<u32>,
    /// Index of the first scored token; `1 <= first_target < tokens.len()`.
    pub first_target: usize,
}

impl Window {
    /// Scored positions, `tokens.len() - first_target`.
    pub fn positions(&self) -> usize {
        self.tokens.len() - self.first_target
    }
}

/// What to return beside the targets' log-probabilities.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ask {
    /// Most probable tokens per position; 0 for none.
    pub top_k: usize,
    /// Tokens to score per position; 0 for none.
    pub candidates_per_position: usize,
    /// One list per window, position-major, `positions * candidates_per_position` ids each; may be empty when there are
    /// no candidates.
    pub candidates: Vec<Vec<u32>>,
    /// Whether to return the final hidden states.
    pub hidden: bool,
}

/// Scores of one window; natural logarithms.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scores {
    /// `logprobs[j]` belongs to `tokens[first_target + j]`.
    pub logprobs: Vec<f32>,
    /// Position-major, most probable first, equal logits in ascending id.
    pub top_ids: Vec<u32>,
    /// The top tokens' log-probabilities, same layout.
    pub top_logprobs: Vec<f32>,
    /// The candidates' log-probabilities, in the order asked.
    pub candidate_logprobs: Vec<f32>,
    /// Outputs of the final norm, `[positions, hidden_size]`; empty unless asked for.
    pub hidden: Vec<f32>,
}

/// How a model is loaded and run.
#[derive(Debug, Clone, PartialEq)]
pub struct ScorerOptions {
    /// The numerical route.
    pub route: Route,
    /// Codecs of the KV cache; `None` keeps the rows as the route rounds them.
    pub kv: Option<KvOptions>,
    /// Rotary angles beyond the native window.
    pub rope: RopeExtension,
    /// What becomes of weights on loading.
    pub load: LoadOptions,
    /// Whether the delta rule's state is kept in half precision.
    pub delta_state_f16: bool,
    /// Most tokens per pass and window; precise routes take the window in one.
    pub prefill_chunk: usize,
    /// Most windows per batch.
    pub batch: usize,
    /// CPU threads; `None` for one per core.
    pub threads: Option<usize>,
    /// Ids the tokenizer can produce; rows of the head at or beyond it take no part.
    pub public_tokens: usize,
    /// What concerns Qwen3.8-Flash-Next alone.
    pub flash_next: FlashNextOptions,
}

impl ScorerOptions {
    /// The normal route, passes of 1,024 tokens, one window at a time, all cores, expanded weights.
    pub fn new(public_tokens: usize) -> Self {
        Self {
            route: Route::Normal,
            kv: None,
            rope: RopeExtension::None,
            load: LoadOptions::default(),
            delta_state_f16: false,
            prefill_chunk: 1024,
            batch: 1,
            threads: None,
            public_tokens,
            flash_next: FlashNextOptions::default(),
        }
    }
}

/// A model that cannot be loaded, or a request it cannot answer.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A weight that could not be provided.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A KV cache that does not fit the model.
    #[error(transparent)]
    Kv(#[from] KvOptionsError),
    /// An n-gram table that is not this model's, or cannot be read.
    #[error(transparent)]
    Ngrams(#[from] VolumeError),
    /// No n-gram table anywhere.
    #[error("the model has no n-gram table and no artifact beside which it could be")]
    NoNgramTable,
    /// A volume for a checkpoint, which has its table among its weights.
    #[error("a checkpoint has its n-gram table among its weights: the volume {} belongs to an artifact", path.display())]
    NgramVolumeOfCheckpoint {
        /// The volume.
        path: PathBuf,
    },
    /// Four-bit activations of routed experts where they are not permitted.
    #[error(
        "4-bit expert activations need packed experts with input scales and a route that rounds: layer {layer} has none"
    )]
    FourBitExperts {
        /// The block.
        layer: usize,
    },
    /// A part that this build does not implement.
    #[error("{what} is not in this build")]
    NotInThisBuild {
        /// The part.
        what: &'static str,
    },
    /// An option that needs packed experts.
    #[error("{option} needs packed experts, which an artifact has and a checkpoint has not")]
    NoBank {
        /// What was asked for.
        option: &'static str,
    },
    /// Packed experts, or a second copy of them, that cannot be used.
    #[error(transparent)]
    Experts(#[from] ExpertError),
    /// Kernel emulation of a KV cache with sparse attention.
    #[error("the kernels that --kv-emulation imitates are of dense attention, and this model's is sparse")]
    KernelsOfDenseAttention,
    /// A weight that cannot be rounded to the format asked for.
    #[error("{parameter} cannot be rounded to {format}: {source}")]
    Requantise {
        /// The weight.
        parameter: String,
        /// The format.
        format: Format,
        /// Why.
        source: FormatError,
    },
    /// A value that no divisor can be made from.
    #[error("the activation at {input} is not finite")]
    NotFinite {
        /// The input.
        input: String,
    },
    /// A block whose dimensions the configuration does not give.
    #[error("layer {layer} is {kind}, but the configuration gives no dimensions for it")]
    MissingDimensions {
        /// The block.
        layer: usize,
        /// Its kind.
        kind: &'static str,
    },
    /// An option out of range.
    #[error("{option} is {found}: expected {expected}")]
    Option {
        /// The option.
        option: &'static str,
        /// Its value.
        found: usize,
        /// What it may be.
        expected: String,
    },
    /// A window that cannot be scored.
    #[error("window {window} of {tokens} tokens with first target {first_target}: expected 1 <= first target < tokens")]
    Window {
        /// Index in the request.
        window: usize,
        /// Its tokens.
        tokens: usize,
        /// Its first target.
        first_target: usize,
    },
    /// A token or candidate that the tokenizer cannot produce.
    #[error("window {window}: id {id} at {index} is not below the public token count {public_tokens}")]
    Token {
        /// Index of the window in the request.
        window: usize,
        /// Index in the window's tokens or candidates.
        index: usize,
        /// The id.
        id: u32,
        /// The bound.
        public_tokens: usize,
    },
    /// Candidates that do not fit the positions.
    #[error("window {window} has {found} candidates: expected {expected}")]
    Candidates {
        /// Index of the window in the request.
        window: usize,
        /// Candidates given.
        found: usize,
        /// Scored positions times candidates per position.
        expected: usize,
    },
    /// A model that scores targets, top tokens and candidates only.
    #[error("this model gives no whole rows of log-probabilities")]
    NoRows,
    /// Whoever took whole rows stopped.
    #[error("{0}")]
    Row(RowError),
    /// A device that cannot be used.
    #[error("device {device}: {reason}")]
    Device {
        /// The device, as options spell it.
        device: String,
        /// Why.
        reason: String,
    },
    /// The thread pool could not be started.
    #[error("cannot start {threads} threads: {reason}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// The system's reason.
        reason: String,
    },
}

/// Scores next-token log-probabilities of independent windows, each from an empty state.
pub trait Scorer: Send {
    /// Ids the tokenizer can produce; rows of the head at or beyond it take no part in the softmax.
    fn public_tokens(&self) -> usize;

    /// Scores each window; one result per window, in order.
    ///
    /// # Errors
    /// On an invalid window or request, before anything is computed.
    fn score(&mut self, windows: &[Window], ask: &Ask) -> Result<Vec<Scores>, ModelError>;

    /// Values of a final hidden state; `None` when the model does not give them.
    fn hidden_size(&self) -> Option<usize> {
        None
    }

    /// Hands over each scored position's log-probabilities of all public tokens, in position order. With `reference`, hidden
    /// states `[positions, hidden_size]` as [`Ask::hidden`] gives them, the log-probabilities that this model's output head
    /// makes of them come along.
    ///
    /// # Errors
    /// On an invalid window, on another number of reference values, when `visit` fails, or when the model does not give rows.
    fn rows(
        &mut self,
        _window: &Window,
        _reference: Option<&Reference<'_>>,
        _visit: &mut RowVisitor<'_>,
    ) -> Result<(), ModelError> {
        Err(ModelError::NoRows)
    }

    /// How often packed experts and rows of an n-gram table were ready when needed; zeros for a model without such.
    fn statistics(&self) -> Statistics {
        Statistics::default()
    }
}

/// A model on one backend.
pub(crate) struct WindowScorer<B: EvaluatorBackend> {
    pub(crate) model: AnyModel<B>,
    pub(crate) options: ScorerOptions,
    pub(crate) hidden_size: usize,
    pool: Option<rayon::ThreadPool>,
}

impl<B: EvaluatorBackend> WindowScorer<B> {
    /// Checks the options, then loads the model.
    pub(crate) fn load(
        source: &dyn TextSource,
        options: &ScorerOptions,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let positive = |option, found: usize| match found {
            0 => Err(ModelError::Option {
                option,
                found,
                expected: "at least 1".into(),
            }),
            _ => Ok(()),
        };
        positive("prefill chunk", options.prefill_chunk)?;
        positive("batch", options.batch)?;
        positive("threads", options.threads.unwrap_or(1))?;
        let rows = source.config().vocab_size;
        if !(1..=rows).contains(&options.public_tokens) {
            return Err(ModelError::Option {
                option: "public token count",
                found: options.public_tokens,
                expected: format!("from 1 to the {rows} rows of the output head"),
            });
        }
        let pool = options.threads.map(|threads| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .map_err(|error| ModelError::Threads {
                    threads,
                    reason: error.to_string(),
                })
        });
        Ok(Self {
            pool: pool.transpose()?,
            model: AnyModel::load(source, options, device)?,
            options: options.clone(),
            hidden_size: source.config().hidden_size,
        })
    }

    /// Runs on the scorer's own threads, if it has some.
    pub(crate) fn on_pool<T: Send>(&self, run: impl FnOnce() -> T + Send) -> T {
        match &self.pool {
            Some(pool) => pool.install(run),
            None => run(),
        }
    }

    pub(crate) fn check(&self, windows: &[Window], ask: &Ask) -> Result<(), ModelError> {
        let public_tokens = self.options.public_tokens;
        if ask.top_k > public_tokens {
            return Err(ModelError::Option {
                option: "top tokens per position",
                found: ask.top_k,
                expected: format!("at most the {public_tokens} public tokens"),
            });
        }
        let check_ids = |window: usize, ids: &[u32]| match ids.iter().position(|&id| id as usize >= public_tokens) {
            Some(index) => Err(ModelError::Token {
                window,
                index,
                id: ids[index],
                public_tokens,
            }),
            None => Ok(()),
        };
        for (index, window) in windows.iter().enumerate() {
            let (tokens, first_target) = (window.tokens.len(), window.first_target);
            if !(1..tokens).contains(&first_target) {
                return Err(ModelError::Window {
                    window: index,
                    tokens,
                    first_target,
                });
            }
            check_ids(index, &window.tokens)?;
            let candidates = candidates_of(ask, index);
            let expected = window.positions() * ask.candidates_per_position;
            if candidates.len() != expected {
                return Err(ModelError::Candidates {
                    window: index,
                    found: candidates.len(),
                    expected,
                });
            }
            check_ids(index, candidates)?;
        }
        Ok(())
    }

    /// Where the pass that begins at `start` of `fed` tokens ends.
    pub(crate) fn pass_end(&self, start: usize, fed: usize) -> usize {
        match self.options.route.is_precise() {
            true => fed,
            false => fed.min(start.saturating_add(self.options.prefill_chunk)),
        }
    }

    /// Windows of equal length as one batch.
    fn score_batch(&self, windows: &[(usize, &Window)], ask: &Ask) -> Result<Vec<Scores>, ModelError> {
        let fed = windows[0].1.tokens.len() - 1;
        let mut state = self.model.begin(windows.len(), fed);
        let mut scores = vec![Scores::default(); windows.len()];
        while state.position() < fed {
            let start = state.position();
            let end = self.pass_end(start, fed);
            let ids: Vec<u32> = windows
                .iter()
                .flat_map(|(_, window)| &window.tokens[start..end])
                .copied()
                .collect();
            let hidden = self.model.pass(&mut state, &ids)?;
            self.score_rows(hidden, start..end, windows, ask, &mut scores);
        }
        Ok(scores)
    }

    /// Appends the scores of the predictors among positions `pass`, whose residual stream is `hidden`.
    fn score_rows(
        &self,
        hidden: Tensor<B, 3>,
        pass: Range<usize>,
        windows: &[(usize, &Window)],
        ask: &Ask,
        scores: &mut [Scores],
    ) {
        let [_, _, width] = hidden.dims();
        let per_position = ask.candidates_per_position;
        let (mut rows, mut targets, mut candidates, mut counts) = (vec![], vec![], vec![], vec![]);
        for (batch_index, (index, window)) in windows.iter().enumerate() {
            let predictors = pass.start.max(window.first_target - 1)..pass.end;
            counts.push(predictors.len());
            if predictors.is_empty() {
                continue;
            }
            let columns = predictors.start - pass.start..predictors.end - pass.start;
            rows.push(
                hidden
                    .clone()
                    .slice([batch_index..batch_index + 1, columns, 0..width])
                    .reshape([-1, width as i32]),
            );
            targets.extend_from_slice(&window.tokens[predictors.start + 1..=predictors.end]);
            let first = predictors.start + 1 - window.first_target;
            let asked = first * per_position..(first + predictors.len()) * per_position;
            candidates.extend_from_slice(&candidates_of(ask, *index)[asked]);
        }
        if targets.is_empty() {
            return;
        }
        let request = HeadRequest {
            public_rows: self.options.public_tokens,
            targets: &targets,
            top_k: ask.top_k,
            candidates_per_row: per_position,
            candidates: &candidates,
        };
        let rows = Tensor::cat(rows, 0);
        let hidden: Vec<f32> = match ask.hidden {
            false => Vec::new(),
            true => self
                .model
                .normalise(rows.clone())
                .into_data()
                .convert::<f32>()
                .into_vec()
                .expect("converted to f32 just now"),
        };
        let width = if ask.hidden { self.hidden_size } else { 0 };
        let head = self.model.score(rows, &request);
        let mut from = 0;
        for (scores, count) in scores.iter_mut().zip(counts) {
            let to = from + count;
            scores.logprobs.extend_from_slice(&head.logprobs[from..to]);
            scores
                .top_ids
                .extend_from_slice(&head.top_ids[from * ask.top_k..to * ask.top_k]);
            scores
                .top_logprobs
                .extend_from_slice(&head.top_logprobs[from * ask.top_k..to * ask.top_k]);
            let asked = from * per_position..to * per_position;
            scores
                .candidate_logprobs
                .extend_from_slice(&head.candidate_logprobs[asked]);
            scores.hidden.extend_from_slice(&hidden[from * width..to * width]);
            from = to;
        }
    }
}

/// The candidates of window `index`; none when the request has none.
fn candidates_of(ask: &Ask, index: usize) -> &[u32] {
    ask.candidates.get(index).map_or(&[], Vec::as_slice)
}

impl<B: EvaluatorBackend> Scorer for WindowScorer<B> {
    fn public_tokens(&self) -> usize {
        self.options.public_tokens
    }

    fn statistics(&self) -> Statistics {
        self.model.statistics()
    }

    fn score(&mut self, windows: &[Window], ask: &Ask) -> Result<Vec<Scores>, ModelError> {
        self.check(windows, ask)?;
        let mut order: Vec<(usize, &Window)> = windows.iter().enumerate().collect();
        order.sort_by_key(|(_, window)| window.tokens.len());
        let run = || {
            let mut scores = vec![Scores::default(); windows.len()];
            for equal in order.chunk_by(|(_, a), (_, b)| a.tokens.len() == b.tokens.len()) {
                for batch in equal.chunks(self.options.batch) {
                    for ((index, _), result) in batch.iter().zip(self.score_batch(batch, ask)?) {
                        scores[*index] = result;
                    }
                }
            }
            Ok(scores)
        };
        self.on_pool(run)
    }

    fn hidden_size(&self) -> Option<usize> {
        Some(self.hidden_size)
    }

    fn rows(
        &mut self,
        window: &Window,
        reference: Option<&Reference<'_>>,
        visit: &mut RowVisitor<'_>,
    ) -> Result<(), ModelError> {
        self.visit_rows(window, reference, visit)
    }
}
