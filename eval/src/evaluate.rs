//! Scores a planned corpus, one batch of windows at a time.
//!
//! Windows go to the scorer in scoring order (streams in selection order, windows in stream order); a batch may hold
//! windows of several streams, since every window starts from an empty state. Results do not depend on the batch size
//! as far as the scorer's do not. Memory holds one batch of scores and a few figures per window.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use crate::aggregate::{Aggregate, BadLogprob};
use crate::corpus::CorpusPlan;
use crate::llama_base::LlamaBaseError;
use crate::recording::Files;
use crate::scorer::{CausalScorer, ScoreError, ScoreRequest, WindowScores, WindowTokens};
use crate::shard::Shard;
use crate::statistics::{Collector, KlDetail, Sums};
use crate::top_tokens::{Provenance, TopTokenError};
use crate::uncertainty::{Block, RunningError, Uncertainty};
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
    /// Options that exclude one another.
    #[error("{0}")]
    Combination(&'static str),
    /// More top tokens per position than a file or the model has.
    #[error("{asked} top tokens per position were asked for; ask for 1 to {limit}")]
    TopK {
        /// Tokens asked for.
        asked: u32,
        /// The limit.
        limit: u64,
    },
    /// Two roles for one file.
    #[error("{path} is to be both read and written; name two files", path = path.display())]
    SameFile {
        /// The file.
        path: PathBuf,
    },
    /// A top-token file is at fault.
    #[error(transparent)]
    TopTokens(#[from] TopTokenError),
    /// A logit base is at fault.
    #[error(transparent)]
    LlamaBase(#[from] LlamaBaseError),
    /// The tokens file cannot be written.
    #[error("cannot write the tokens file {path}: {source}", path = path.display())]
    TokensFile {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The number of scored tokens exceeds 64 bits.
    #[error("the number of scored tokens overflows")]
    Overflow,
}

/// A top-token reference to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveTopTokens {
    /// Where to.
    pub path: PathBuf,
    /// Tokens per position, `1..=64`.
    pub per_position: u32,
}

/// A logit base to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveLogits {
    /// Where to; an existing file is refused.
    pub path: PathBuf,
    /// Values per row, at least the public tokens, which is the default; further ones get code 0.
    pub row_width: Option<u32>,
}

/// How to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Windows per call of the scorer, at least 1.
    pub batch: usize,
    /// Share of the windows to score.
    pub shard: Shard,
    /// Top-token reference to write.
    pub save_top_tokens: Option<SaveTopTokens>,
    /// Top-token reference to compare with.
    pub kl_reference: Option<PathBuf>,
    /// Tokens file to write before scoring.
    pub save_tokens: Option<PathBuf>,
    /// Logit base to write.
    pub logits_out: Option<SaveLogits>,
    /// Logit base to compare with.
    pub logits_reference: Option<PathBuf>,
    /// What written references say about this run.
    pub provenance: Option<Provenance>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            batch: 1,
            shard: Shard::WHOLE,
            save_top_tokens: None,
            kl_reference: None,
            save_tokens: None,
            logits_out: None,
            logits_reference: None,
            provenance: None,
        }
    }
}

impl Options {
    /// Checks everything that needs neither model nor tokenizer: combinations of options, and the headers of the files to
    /// compare with. [`evaluate`] checks it again.
    ///
    /// # Errors
    /// When options exclude one another or a reference is refused.
    pub fn check(&self) -> Result<(), EvaluateError> {
        if self.batch == 0 {
            return Err(EvaluateError::Batch);
        }
        Files::check(self)
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
    /// Standard error of its mean, clustered by window.
    pub standard_error: Option<f64>,
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
    /// Sums of its comparison.
    pub kl: Option<Sums>,
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
    /// Their comparison, once the last one is scored.
    pub kl: Option<KlDetail>,
}

/// What was compared with.
#[derive(Debug, Clone, PartialEq)]
pub struct KlSource {
    /// Absolute path of the reference.
    pub path: PathBuf,
    /// Its tokens per position; `None` for whole rows.
    pub top_tokens: Option<u32>,
    /// What made it, when it says so.
    pub provenance: Option<Provenance>,
}

/// A comparison over everything.
#[derive(Debug, Clone, PartialEq)]
pub struct KlResults {
    /// What was compared with.
    pub source: KlSource,
    /// All positions.
    pub overall: KlDetail,
    /// By domain, in bytewise order of the name.
    pub domains: BTreeMap<String, KlDetail>,
    /// Uncertainty of the mean divergence.
    pub mean_kl: Uncertainty,
    /// Uncertainty of the mean change of the negative log-likelihood.
    pub mean_delta_nll: Uncertainty,
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
    /// The comparison with a reference.
    pub kl: Option<KlResults>,
    /// The top-token reference that was written, by absolute path.
    pub top_tokens: Option<SaveTopTokens>,
    /// Wall-clock time of scoring.
    pub score_seconds: f64,
    /// The share that was scored.
    pub shard: Shard,
    /// Windows per call of the scorer.
    pub batch: usize,
    /// Rows of the head in the softmax's denominator.
    pub softmax_rows: usize,
}

/// A window on its way to the scorer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    pub(crate) stream: usize,
    pub(crate) index: usize,
    pub(crate) window: Window,
}

/// Scores the windows of `plan` that belong to the shard.
///
/// # Errors
/// When the scorer fails or returns something that is no score, the message naming stream and window; when a reference
/// is refused or a file cannot be written.
pub fn evaluate(
    plan: &CorpusPlan,
    scorer: &mut dyn CausalScorer,
    options: &Options,
    observer: &mut dyn Progress,
) -> Result<Results, EvaluateError> {
    options.check()?;
    let public_tokens = scorer.public_tokens();
    check_tokens(plan, public_tokens)?;
    let files = Files::open(plan, options, public_tokens)?;
    let mut run = Run::new(plan, options, files);
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
        for (job, scored) in batch.iter().zip(&scores) {
            run.add(job, scored, seconds * job.window.input_tokens() as f64 / fed as f64)?;
            if run.remaining[job.stream] == 0 {
                observer.stream_finished(plan, job.stream, &run.streams[job.stream]);
            }
        }
        observer.batch_scored(&run.snapshot(batch[batch.len() - 1].stream));
    }
    run.finish(options, scorer.softmax_rows())
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

/// All windows in scoring order.
pub(crate) fn all_jobs(plan: &CorpusPlan) -> impl Iterator<Item = Job> + '_ {
    plan.streams.iter().enumerate().flat_map(|(stream, planned)| {
        planned
            .windows
            .iter()
            .enumerate()
            .map(move |(index, window)| Job { stream, index, window })
    })
}

/// The windows of a shard in scoring order.
fn jobs(plan: &CorpusPlan, shard: Shard) -> impl Iterator<Item = Job> + '_ {
    (0u64..)
        .zip(all_jobs(plan))
        .filter(move |(number, _)| shard.contains(*number))
        .map(|(_, job)| job)
}

/// What a batch gave for one window.
pub(crate) struct Scored {
    /// Sums of the negative log-likelihood.
    pub(crate) aggregate: Aggregate,
    /// The compared positions, when comparing.
    pub(crate) positions: Vec<crate::divergence::Position>,
}

/// State of an evaluation.
struct Run<'a> {
    plan: &'a CorpusPlan,
    files: Files<'a>,
    totals: Totals,
    streams: Vec<StreamResult>,
    collectors: Vec<Collector>,
    /// Windows still to be scored, per stream.
    remaining: Vec<u64>,
    /// Streams below this were announced.
    announced: usize,
    domains: BTreeMap<String, Aggregate>,
    overall: Aggregate,
    running_error: RunningError,
    windows: u64,
    began: Instant,
}

impl<'a> Run<'a> {
    fn new(plan: &'a CorpusPlan, options: &Options, files: Files<'a>) -> Self {
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
            files,
            totals,
            streams: vec![StreamResult::default(); plan.streams.len()],
            collectors: vec![Collector::default(); plan.streams.len()],
            remaining,
            announced: 0,
            domains: BTreeMap::new(),
            overall: Aggregate::default(),
            running_error: RunningError::default(),
            windows: 0,
            began: Instant::now(),
        }
    }

    fn name(&self, job: &Job) -> String {
        self.plan.streams[job.stream].id.clone()
    }

    fn tokens(&self, job: &Job) -> WindowTokens {
        WindowTokens {
            tokens: self.plan.streams[job.stream].tokens[job.window.input_begin..job.window.input_end].to_vec(),
            first_target: job.window.first_target(),
        }
    }

    fn score(&mut self, batch: &[Job], scorer: &mut dyn CausalScorer) -> Result<Vec<Scored>, EvaluateError> {
        let windows: Vec<WindowTokens> = batch.iter().map(|job| self.tokens(job)).collect();
        if self.files.wants_rows() {
            return self.score_rows(batch, &windows, scorer);
        }
        let records = self.files.read_references(batch)?;
        let ask = self.files.request(&records);
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
        let mut records = records.iter();
        let mut all = Vec::with_capacity(batch.len());
        for (job, scores) in batch.iter().zip(&scores) {
            self.check(job, scores, &ask)?;
            let aggregate = self.aggregate(job, &scores.logprobs)?;
            let positions = records
                .next()
                .map_or_else(Vec::new, |record| self.files.compare(record, scores, &ask));
            self.files.save(job, scores, &ask)?;
            all.push(Scored { aggregate, positions });
        }
        Ok(all)
    }

    fn score_rows(
        &mut self,
        batch: &[Job],
        windows: &[WindowTokens],
        scorer: &mut dyn CausalScorer,
    ) -> Result<Vec<Scored>, EvaluateError> {
        let mut all = Vec::with_capacity(batch.len());
        for (job, window) in batch.iter().zip(windows) {
            let mut logprobs = Vec::with_capacity(window.positions());
            let mut positions = Vec::new();
            let mut targets = window.tokens[window.first_target..].iter();
            let files = &mut self.files;
            let scored = scorer.score_rows(window, &mut |row| {
                let target = *targets
                    .next()
                    .ok_or_else(|| ScoreError("more rows than scored positions".into()))?;
                let logprob = row.get(target as usize).copied();
                logprobs.push(logprob.ok_or_else(|| ScoreError(format!("a row has {} values", row.len()).into()))?);
                let compared = files
                    .take_row(row, target)
                    .map_err(|error| ScoreError(Box::new(error)))?;
                positions.extend(compared);
                Ok(())
            });
            scored.map_err(|source| EvaluateError::Scorer {
                stream: self.name(job),
                window: job.index,
                batch: 1,
                source,
            })?;
            self.check_length(job, "rows", logprobs.len(), window.positions())?;
            all.push(Scored {
                aggregate: self.aggregate(job, &logprobs)?,
                positions,
            });
        }
        Ok(all)
    }

    fn aggregate(&self, job: &Job, logprobs: &[f32]) -> Result<Aggregate, EvaluateError> {
        Aggregate::of_window(logprobs).map_err(|source| self.bad_value(job, source))
    }

    fn bad_value(&self, job: &Job, source: BadLogprob) -> EvaluateError {
        EvaluateError::Value {
            stream: self.name(job),
            window: job.index,
            source,
        }
    }

    fn check(&self, job: &Job, scores: &WindowScores, ask: &ScoreRequest) -> Result<(), EvaluateError> {
        let p = job.window.positions();
        self.check_length(job, "log-probabilities", scores.logprobs.len(), p)?;
        self.check_length(job, "top token ids", scores.top_ids.len(), p * ask.top_k)?;
        for (what, values, per_position) in [
            ("top log-probabilities", &scores.top_logprobs, ask.top_k),
            (
                "candidate log-probabilities",
                &scores.candidate_logprobs,
                ask.candidates_per_position,
            ),
        ] {
            self.check_length(job, what, values.len(), p * per_position)?;
            // Their sum is of no use; their being log-probabilities is.
            if let Err(bad) = Aggregate::of_window(values) {
                let position = bad.position / per_position.max(1);
                return Err(self.bad_value(job, BadLogprob { position, ..bad }));
            }
        }
        Ok(())
    }

    fn check_length(&self, job: &Job, what: &'static str, found: usize, expected: usize) -> Result<(), EvaluateError> {
        if found == expected {
            return Ok(());
        }
        Err(EvaluateError::Length {
            stream: self.name(job),
            window: job.index,
            what,
            found,
            expected,
        })
    }

    fn add(&mut self, job: &Job, scored: &Scored, seconds: f64) -> Result<(), EvaluateError> {
        let aggregate = scored.aggregate;
        let domain = self
            .domains
            .entry(self.plan.streams[job.stream].domain.clone())
            .or_default();
        *domain = domain.plus(aggregate).ok_or(EvaluateError::Overflow)?;
        self.overall = self.overall.plus(aggregate).ok_or(EvaluateError::Overflow)?;
        self.running_error.add(Block {
            count: aggregate.scored_tokens,
            total: aggregate.total_nll,
        });
        let stream = &mut self.streams[job.stream];
        stream.aggregate = stream.aggregate.plus(aggregate).ok_or(EvaluateError::Overflow)?;
        stream.seconds += seconds;
        let mut kl = Sums::default();
        for (j, position) in scored.positions.iter().enumerate() {
            kl.add(position);
            self.collectors[job.stream].add((job.window.first_target() + j) as u64, position);
        }
        stream.windows.push(WindowResult {
            index: job.index,
            window: job.window,
            aggregate,
            running_mean_nll: self.overall.mean_nll().unwrap_or(0.0),
            seconds,
            kl: self.files.compares().then_some(kl),
        });
        self.remaining[job.stream] -= 1;
        if self.remaining[job.stream] == 0 && self.files.compares() {
            stream.kl = Some(Collector::detail([&self.collectors[job.stream]].into_iter()));
        }
        self.windows += 1;
        Ok(())
    }

    fn snapshot(&self, stream: usize) -> Snapshot {
        let kl = self.collectors[stream].sums().figures().mean_kl;
        Snapshot {
            totals: self.totals,
            windows: self.windows,
            running: self.overall,
            standard_error: self.running_error.standard_error(),
            stream_kl: self.files.compares().then_some(kl),
            elapsed: self.began.elapsed().as_secs_f64(),
        }
    }

    /// Uncertainty of a token-weighted mean of a window's figure.
    fn uncertainty(&self, block: impl Fn(&WindowResult) -> Block) -> Uncertainty {
        let blocks: Vec<Vec<Block>> = self
            .streams
            .iter()
            .map(|stream| stream.windows.iter().map(&block).collect())
            .collect();
        Uncertainty::of(&blocks)
    }

    fn compared(&self, source: KlSource) -> KlResults {
        let part = |total: fn(&Sums) -> f64| {
            self.uncertainty(move |window| {
                let sums = window.kl.unwrap_or_default();
                Block {
                    count: sums.positions(),
                    total: total(&sums),
                }
            })
        };
        let of_domain = |name: &String| {
            let streams = self.plan.streams.iter().zip(&self.collectors);
            Collector::detail(
                streams
                    .filter(|(plan, _)| plan.domain == *name)
                    .map(|(_, collector)| collector),
            )
        };
        KlResults {
            source,
            overall: Collector::detail(self.collectors.iter()),
            domains: self
                .domains
                .keys()
                .map(|name| (name.clone(), of_domain(name)))
                .collect(),
            mean_kl: part(Sums::total_kl),
            mean_delta_nll: part(Sums::total_delta_nll),
        }
    }

    fn finish(mut self, options: &Options, softmax_rows: usize) -> Result<Results, EvaluateError> {
        let score_seconds = self.began.elapsed().as_secs_f64();
        let (source, top_tokens) = (self.files.source(options)?, Files::saved(options)?);
        let files = std::mem::take(&mut self.files);
        files.finish()?;
        let kl = source.map(|source| self.compared(source));
        let uncertainty = self.uncertainty(|window| Block {
            count: window.aggregate.scored_tokens,
            total: window.aggregate.total_nll,
        });
        Ok(Results {
            uncertainty,
            kl,
            top_tokens,
            streams: self.streams,
            domains: self.domains,
            overall: self.overall,
            score_seconds,
            shard: options.shard,
            batch: options.batch,
            softmax_rows,
        })
    }
}
