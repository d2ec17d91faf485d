//! Scores a planned corpus, one batch of windows at a time.
//!
//! Windows go to the scorer in scoring order (streams in selection order, windows in stream order); a batch may hold
//! windows of several streams, since every window starts from an empty state. Results do not depend on the batch size
//! as far as the scorer's do not. Memory holds one batch of scores and a few figures per window.

mod error;
mod observer;
mod options;
mod results;

use std::collections::BTreeMap;
use std::time::Instant;

use crate::aggregate::{Aggregate, BadLogprob};
use crate::corpus::CorpusPlan;
use crate::divergence::Position;
use crate::recording::Files;
use crate::scorer::{CausalScorer, ScoreError, ScoreRequest, WindowScores, WindowTokens};
use crate::shard::Shard;
use crate::statistics::{Collector, Sums};
use crate::uncertainty::{Block, RunningError, Uncertainty};
use crate::windows::Window;

pub use error::EvaluateError;
pub use observer::{Progress, Snapshot, Totals};
pub use options::{Options, SaveLogits, SaveTopTokens};
pub use results::{KlResults, KlSource, ReferenceKind, Results, StreamResult, WindowResult};

/// A window on its way to the scorer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    pub(crate) stream: usize,
    pub(crate) index: usize,
    pub(crate) window: Window,
}

/// Scores the windows of `plan` that belong to the shard: [`prepare`], then [`Evaluation::run`].
///
/// # Errors
/// See there.
pub fn evaluate(
    plan: &CorpusPlan,
    scorer: &mut dyn CausalScorer,
    options: &Options,
    observer: &mut dyn Progress,
) -> Result<Results, EvaluateError> {
    prepare(plan, options, scorer.public_tokens())?.run(scorer, observer)
}

/// An evaluation whose references are checked and whose files are open, and which needs only a model now.
#[derive(Debug)]
pub struct Evaluation<'a> {
    plan: &'a CorpusPlan,
    options: &'a Options,
    public_tokens: usize,
    files: Files<'a>,
}

/// Everything that can fail before a model of `public_tokens` tokens is loaded: references are read to their end and
/// compared with the plan, files to be written are opened under their temporary names.
///
/// # Errors
/// When options exclude one another, a reference is refused or a file cannot be created.
pub fn prepare<'a>(
    plan: &'a CorpusPlan,
    options: &'a Options,
    public_tokens: usize,
) -> Result<Evaluation<'a>, EvaluateError> {
    options.check()?;
    check_tokens(plan, public_tokens)?;
    Ok(Evaluation {
        plan,
        options,
        public_tokens,
        files: Files::open(plan, options, public_tokens)?,
    })
}

impl Evaluation<'_> {
    /// Scores the windows and gives the written files their names.
    ///
    /// # Errors
    /// When the scorer has another vocabulary, fails, or returns something that is no score, the message naming stream and
    /// window; when a file cannot be read or written.
    pub fn run(self, scorer: &mut dyn CausalScorer, observer: &mut dyn Progress) -> Result<Results, EvaluateError> {
        if scorer.public_tokens() != self.public_tokens {
            return Err(EvaluateError::Vocabulary {
                prepared: self.public_tokens,
                found: scorer.public_tokens(),
            });
        }
        self.files.check_hidden_size(self.options, scorer.hidden_size())?;
        run(self, scorer, observer)
    }
}

fn run(
    evaluation: Evaluation<'_>,
    scorer: &mut dyn CausalScorer,
    observer: &mut dyn Progress,
) -> Result<Results, EvaluateError> {
    let Evaluation {
        plan, options, files, ..
    } = evaluation;
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
struct Scored {
    /// Sums of the negative log-likelihood.
    aggregate: Aggregate,
    /// The compared positions, when comparing.
    positions: Vec<Position>,
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
            let reference = self.files.read_hidden(job)?;
            let mut logprobs = Vec::with_capacity(window.positions());
            let mut positions = Vec::new();
            let mut targets = window.tokens[window.first_target..].iter();
            let files = &mut self.files;
            let scored = scorer.score_rows(window, reference.as_ref(), &mut |row| {
                let target = *targets
                    .next()
                    .ok_or_else(|| ScoreError("more rows than scored positions".into()))?;
                if row.run.len() <= target as usize {
                    return Err(ScoreError(format!("a row has {} values", row.run.len()).into()));
                }
                logprobs.push(row.logprob);
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
        self.check_length(job, "hidden values", scores.hidden.len(), self.files.hidden_values(p))?;
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
        let hidden_states = Files::saved_hidden(options)?;
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
            hidden_states,
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
