//! Scores a planned corpus, one batch of windows at a time.
//!
//! Windows go to the scorer in scoring order (streams in selection order, windows in stream order); a batch may hold
//! windows of several streams, since every window starts from an empty state. Results do not depend on the batch size
//! as far as the scorer's do not. Memory holds one batch of scores and a few figures per window.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::aggregate::{Aggregate, BadLogprob};
use crate::corpus::CorpusPlan;
use crate::scorer::{CausalScorer, ScoreError, ScoreRequest, WindowScores, WindowTokens};
use crate::shard::Shard;
use crate::uncertainty::{Block, Uncertainty};
use crate::windows::Window;

/// Why an evaluation stopped.
#[derive(Debug, thiserror::Error)]
pub enum EvaluateError {
    /// No windows per batch.
    #[error("the batch must hold at least 1 window")]
    Batch,
    /// A token that the model does not know.
    #[error(
        "stream `{stream}`: token {token} at index {index} is outside the model's {public} public tokens; the \
         tokenizer belongs to another model"
    )]
    Token {
        /// The stream.
        stream: String,
        /// Index in the stream.
        index: usize,
        /// The id.
        token: u32,
        /// Public tokens of the model.
        public: usize,
    },
    /// The model failed.
    #[error("stream `{stream}`, window {window} (first of a batch of {batch}): {source}")]
    Scorer {
        /// Stream of the batch's first window.
        stream: String,
        /// Index of that window within its stream.
        window: usize,
        /// Windows in the batch.
        batch: usize,
        /// The model's message.
        source: ScoreError,
    },
    /// The model returned fewer or more windows than it was given.
    #[error("stream `{stream}`, window {window}: the model scored {found} windows of a batch of {expected}")]
    Windows {
        /// Stream of the batch's first window.
        stream: String,
        /// Index of that window within its stream.
        window: usize,
        /// Windows returned.
        found: usize,
        /// Windows asked for.
        expected: usize,
    },
    /// A result has the wrong length.
    #[error("stream `{stream}`, window {window}: the model returned {found} {what}, expected {expected}")]
    Length {
        /// The stream.
        stream: String,
        /// Index of the window within its stream.
        window: usize,
        /// Which result.
        what: &'static str,
        /// Values returned.
        found: usize,
        /// Values expected.
        expected: usize,
    },
    /// A result is no log-probability.
    #[error("stream `{stream}`, window {window}: {source}")]
    Value {
        /// The stream.
        stream: String,
        /// Index of the window within its stream.
        window: usize,
        /// The value and its position.
        source: BadLogprob,
    },
    /// The number of scored tokens exceeds 64 bits.
    #[error("the number of scored tokens overflows")]
    Overflow,
}

/// How to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Windows per call of the scorer, at least 1.
    pub batch: usize,
    /// Share of the windows to score.
    pub shard: Shard,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            batch: 1,
            shard: Shard::WHOLE,
        }
    }
}

/// What will be scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Totals {
    /// Streams.
    pub streams: usize,
    /// Scored tokens.
    pub tokens: u64,
    /// Windows.
    pub windows: u64,
}

/// State after a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Snapshot {
    /// What will be scored.
    pub totals: Totals,
    /// Windows scored so far.
    pub windows: u64,
    /// Everything scored so far.
    pub running: Aggregate,
    /// Mean divergence of the current stream so far, when comparing.
    pub stream_kl: Option<f64>,
    /// Seconds since scoring began.
    pub elapsed: f64,
}

/// Hears how an evaluation proceeds; every method may be left out.
pub trait Progress {
    /// Scoring begins.
    fn started(&mut self, _totals: Totals) {}
    /// The first window of a stream is about to be scored.
    fn stream_started(&mut self, _plan: &CorpusPlan, _stream: usize) {}
    /// A batch was scored.
    fn batch_scored(&mut self, _snapshot: &Snapshot) {}
    /// The last window of a stream was scored.
    fn stream_finished(&mut self, _plan: &CorpusPlan, _stream: usize, _result: &StreamResult) {}
}

/// Hears nothing.
impl Progress for () {}

/// One scored window.
#[derive(Debug, Clone, PartialEq)]
pub struct WindowResult {
    /// Index within its stream.
    pub index: usize,
    /// Its token ranges.
    pub window: Window,
    /// Its sums.
    pub aggregate: Aggregate,
    /// Mean over everything scored up to and with this window.
    pub running_mean_nll: f64,
    /// Its share of the batch's time, by input tokens.
    pub seconds: f64,
}

/// One scored stream.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StreamResult {
    /// The scored windows in order.
    pub windows: Vec<WindowResult>,
    /// Their sum.
    pub aggregate: Aggregate,
    /// Their time.
    pub seconds: f64,
}

/// Everything an evaluation found.
#[derive(Debug, Clone, PartialEq)]
pub struct Results {
    /// One entry per planned stream, in selection order.
    pub streams: Vec<StreamResult>,
    /// By domain, in bytewise order of the name.
    pub domains: BTreeMap<String, Aggregate>,
    /// Over everything.
    pub overall: Aggregate,
    /// Uncertainty of the overall mean.
    pub uncertainty: Uncertainty,
    /// Wall-clock time of scoring.
    pub score_seconds: f64,
    /// The share that was scored.
    pub shard: Shard,
    /// Windows per call of the scorer.
    pub batch: usize,
    /// Rows of the head in the softmax's denominator.
    pub public_tokens: usize,
}

/// A window on its way to the scorer.
#[derive(Debug, Clone, Copy)]
struct Job {
    stream: usize,
    index: usize,
    window: Window,
}

/// Scores the windows of `plan` that belong to the shard.
///
/// # Errors
/// When the scorer fails or returns something that is no score; the message names stream and window.
pub fn evaluate(
    plan: &CorpusPlan,
    scorer: &mut dyn CausalScorer,
    options: &Options,
    observer: &mut dyn Progress,
) -> Result<Results, EvaluateError> {
    if options.batch == 0 {
        return Err(EvaluateError::Batch);
    }
    check_tokens(plan, scorer.public_tokens())?;
    let mut run = Run::new(plan, options);
    observer.started(run.totals);
    let mut jobs = jobs(plan, options.shard);
    loop {
        let batch: Vec<Job> = jobs.by_ref().take(options.batch).collect();
        if batch.is_empty() {
            break;
        }
        for job in &batch {
            if run.streams[job.stream].windows.is_empty() && run.announced <= job.stream {
                run.announced = job.stream + 1;
                observer.stream_started(plan, job.stream);
            }
        }
        let began = Instant::now();
        let scores = run.score(&batch, scorer)?;
        let seconds = began.elapsed().as_secs_f64();
        let fed: usize = batch.iter().map(|job| job.window.input_tokens()).sum();
        for (job, scores) in batch.iter().zip(&scores) {
            run.add(job, scores, seconds * job.window.input_tokens() as f64 / fed as f64)?;
            if run.remaining[job.stream] == 0 {
                observer.stream_finished(plan, job.stream, &run.streams[job.stream]);
            }
        }
        observer.batch_scored(&run.snapshot());
    }
    Ok(run.finish(options, scorer.public_tokens()))
}

fn check_tokens(plan: &CorpusPlan, public: usize) -> Result<(), EvaluateError> {
    for stream in &plan.streams {
        if let Some(index) = stream.tokens.iter().position(|&t| t as usize >= public) {
            let token = stream.tokens[index];
            return Err(EvaluateError::Token {
                stream: stream.id.clone(),
                index,
                token,
                public,
            });
        }
    }
    Ok(())
}

/// The windows of a shard in scoring order.
fn jobs(plan: &CorpusPlan, shard: Shard) -> impl Iterator<Item = Job> + '_ {
    let all = plan.streams.iter().enumerate().flat_map(|(stream, planned)| {
        planned
            .windows
            .iter()
            .enumerate()
            .map(move |(index, window)| Job { stream, index, window })
    });
    (0u64..)
        .zip(all)
        .filter(move |(number, _)| shard.contains(*number))
        .map(|(_, job)| job)
}

/// State of an evaluation.
struct Run<'a> {
    plan: &'a CorpusPlan,
    totals: Totals,
    streams: Vec<StreamResult>,
    /// Windows still to be scored, per stream.
    remaining: Vec<u64>,
    /// Streams below this were announced.
    announced: usize,
    domains: BTreeMap<String, Aggregate>,
    overall: Aggregate,
    windows: u64,
    began: Instant,
}

impl<'a> Run<'a> {
    fn new(plan: &'a CorpusPlan, options: &Options) -> Self {
        let mut remaining = vec![0; plan.streams.len()];
        let mut totals = Totals {
            streams: 0,
            tokens: 0,
            windows: 0,
        };
        for job in jobs(plan, options.shard) {
            totals.streams += usize::from(remaining[job.stream] == 0);
            totals.tokens += job.window.positions() as u64;
            totals.windows += 1;
            remaining[job.stream] += 1;
        }
        Self {
            plan,
            totals,
            streams: vec![StreamResult::default(); plan.streams.len()],
            remaining,
            announced: 0,
            domains: BTreeMap::new(),
            overall: Aggregate::default(),
            windows: 0,
            began: Instant::now(),
        }
    }

    fn name(&self, job: &Job) -> String {
        self.plan.streams[job.stream].id.clone()
    }

    fn score(&self, batch: &[Job], scorer: &mut dyn CausalScorer) -> Result<Vec<WindowScores>, EvaluateError> {
        let windows: Vec<WindowTokens> = batch
            .iter()
            .map(|job| WindowTokens {
                tokens: self.plan.streams[job.stream].tokens[job.window.input_begin..job.window.input_end].to_vec(),
                first_target: job.window.first_target(),
            })
            .collect();
        let ask = ScoreRequest::default();
        let first = &batch[0];
        let scores = scorer.score(&windows, &ask).map_err(|source| EvaluateError::Scorer {
            stream: self.name(first),
            window: first.index,
            batch: batch.len(),
            source,
        })?;
        if scores.len() != batch.len() {
            return Err(EvaluateError::Windows {
                stream: self.name(first),
                window: first.index,
                found: scores.len(),
                expected: batch.len(),
            });
        }
        for (job, scores) in batch.iter().zip(&scores) {
            self.check_lengths(job, scores, &ask)?;
        }
        Ok(scores)
    }

    fn check_lengths(&self, job: &Job, scores: &WindowScores, ask: &ScoreRequest) -> Result<(), EvaluateError> {
        let p = job.window.positions();
        let expected = [
            ("log-probabilities", scores.logprobs.len(), p),
            ("top token ids", scores.top_ids.len(), p * ask.top_k),
            ("top log-probabilities", scores.top_logprobs.len(), p * ask.top_k),
            (
                "candidate log-probabilities",
                scores.candidate_logprobs.len(),
                p * ask.candidates_per_position,
            ),
        ];
        for (what, found, expected) in expected {
            if found != expected {
                return Err(EvaluateError::Length {
                    stream: self.name(job),
                    window: job.index,
                    what,
                    found,
                    expected,
                });
            }
        }
        Ok(())
    }

    fn add(&mut self, job: &Job, scores: &WindowScores, seconds: f64) -> Result<(), EvaluateError> {
        let aggregate = Aggregate::of_window(&scores.logprobs).map_err(|source| EvaluateError::Value {
            stream: self.name(job),
            window: job.index,
            source,
        })?;
        let domain = self
            .domains
            .entry(self.plan.streams[job.stream].domain.clone())
            .or_default();
        *domain = domain.plus(aggregate).ok_or(EvaluateError::Overflow)?;
        self.overall = self.overall.plus(aggregate).ok_or(EvaluateError::Overflow)?;
        let stream = &mut self.streams[job.stream];
        stream.aggregate = stream.aggregate.plus(aggregate).ok_or(EvaluateError::Overflow)?;
        stream.seconds += seconds;
        stream.windows.push(WindowResult {
            index: job.index,
            window: job.window,
            aggregate,
            running_mean_nll: self.overall.mean_nll().unwrap_or(0.0),
            seconds,
        });
        self.remaining[job.stream] -= 1;
        self.windows += 1;
        Ok(())
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot {
            totals: self.totals,
            windows: self.windows,
            running: self.overall,
            stream_kl: None,
            elapsed: self.began.elapsed().as_secs_f64(),
        }
    }

    fn finish(self, options: &Options, public_tokens: usize) -> Results {
        let blocks: Vec<Vec<Block>> = self
            .streams
            .iter()
            .map(|stream| {
                let block = |w: &WindowResult| Block {
                    count: w.aggregate.scored_tokens,
                    total: w.aggregate.total_nll,
                };
                stream.windows.iter().map(block).collect()
            })
            .collect();
        Results {
            uncertainty: Uncertainty::of(&blocks),
            streams: self.streams,
            domains: self.domains,
            overall: self.overall,
            score_seconds: self.began.elapsed().as_secs_f64(),
            shard: options.shard,
            batch: options.batch,
            public_tokens,
        }
    }
}
