//! `report.json`, schema 6: every figure unrounded, every setting that can change one.
//!
//! One schema carries the fields of the two families of reports in circulation (versions 3 and 4); a field that does not
//! apply is `null`, `false` or empty, never absent. Keys are in lexicographic order, indentation is two blanks, numbers
//! are the shortest that read back as the same f64. `docs/report.md` describes each field.

mod check;
mod schema;

use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::aggregate::Aggregate;
use crate::corpus::{CorpusPlan, StreamPlan};
use crate::evaluate::{KlResults, ReferenceKind, Results, StreamResult, WindowResult};
use crate::exact_json;
use crate::files::{PendingFile, TEMPORARY};
use crate::statistics::{Sums, coverage_note};

pub use check::ReportFault;
pub(crate) use check::{check_kl, check_total};
pub use schema::*;

/// Number of this schema.
pub const SCHEMA_VERSION: u32 = 6;
/// Name of the report within its directory.
pub const FILE_NAME: &str = "report.json";

/// Why a report cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A figure is infinite or not a number.
    #[error("the report holds a figure that is not a finite number")]
    NotFinite,
    /// The text is no report of this schema.
    #[error("not a report of schema 6: {0}")]
    Json(#[from] serde_json::Error),
    /// A number of a report that was read cannot be right.
    #[error(transparent)]
    Fault(#[from] ReportFault),
    /// The system refuses.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The report's path.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
}

/// `report.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Which figure this is.
    pub metric: Metric,
    /// What produced the report.
    pub build: Build,
    /// Arguments of the run, program name first.
    pub command_line: Vec<String>,
    /// What was scored.
    pub artifact: Artifact,
    /// Where the text came from.
    pub corpus: Corpus,
    /// Protocol and settings.
    pub execution: Execution,
    /// What the figures were divided by.
    pub denominators: Denominators,
    /// Wall-clock times.
    pub timing: Timing,
    /// Streams in selection order.
    pub streams: Vec<StreamReport>,
    /// Domains in bytewise order.
    pub domains: Vec<DomainReport>,
    /// Everything.
    pub overall: OverallReport,
    /// Comparison with a reference; `null` without one.
    pub kl_divergence: Option<KlReport>,
    /// Top-token reference that was written; `null` without one.
    pub top_tokens: Option<TopTokensReport>,
    /// Hidden-state reference that was written; `null` without one.
    #[serde(default)]
    pub hidden_states: Option<HiddenStatesReport>,
    /// The share that was scored; `null` for everything.
    pub shard: Option<ShardReport>,
    /// Remarks a reader must know, one sentence each.
    pub notes: Vec<String>,
}

/// What the evaluation itself cannot know.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunInfo {
    /// What produced the report.
    pub build: Build,
    /// Arguments of the run, program name first.
    pub command_line: Vec<String>,
    /// What was scored.
    pub artifact: Artifact,
    /// Settings of the model side.
    pub settings: Settings,
    /// Seconds spent loading the model.
    pub load_seconds: f64,
    /// Seconds spent reading and tokenising.
    pub read_and_tokenize_seconds: f64,
    /// Seconds since the program started.
    pub total_seconds: f64,
    /// Remarks a reader must know.
    pub notes: Vec<String>,
}

impl Report {
    /// Puts plan, results and circumstances together.
    pub fn build(plan: &CorpusPlan, results: &Results, mut run: RunInfo) -> Self {
        let streams: Vec<StreamReport> = plan
            .streams
            .iter()
            .zip(&results.streams)
            .map(|(plan, result)| stream_report(plan, result))
            .collect();
        let kl_divergence = results.kl.as_ref().map(|kl| kl_report(kl, &results.overall));
        if let Some(kl) = &kl_divergence {
            run.notes
                .extend(coverage_note(&kl.detail.figures, kl.reference_top_tokens));
            run.notes.extend(kl.reference_head_error.and_then(head_note));
        }
        let domain = |(name, sum): (&String, &Aggregate)| {
            let kl = results.kl.as_ref().and_then(|kl| kl.domains.get(name).cloned());
            DomainReport::new(name, sum, &streams, kl)
        };
        Self {
            schema_version: SCHEMA_VERSION,
            metric: Metric::default(),
            build: run.build,
            command_line: run.command_line,
            artifact: run.artifact,
            corpus: Corpus {
                id: plan.id.clone(),
                mode: plan.mode.clone(),
                source: plan.source.display().to_string(),
                stream_count: plan.streams.len() as u64,
            },
            execution: Execution {
                purpose: "causal_scoring".into(),
                context_tokens: plan.protocol.context() as u64,
                stride_tokens: plan.protocol.stride() as u64,
                windows: plan.protocol.kind(),
                window_limit: plan.limit.map(|limit| limit as u64),
                batch_windows: results.batch as u64,
                settings: run.settings,
            },
            denominators: Denominators::new(results.softmax_rows as u64, &streams),
            timing: Timing {
                load_seconds: run.load_seconds,
                read_and_tokenize_seconds: run.read_and_tokenize_seconds,
                score_seconds: results.score_seconds,
                total_seconds: run.total_seconds,
                scored_tokens_per_second: rate(results.overall.scored_tokens, results.score_seconds),
            },
            domains: results.domains.iter().map(domain).collect(),
            overall: OverallReport::new(&results.overall, &streams, results.uncertainty.clone()),
            streams,
            kl_divergence,
            top_tokens: results.top_tokens.as_ref().map(|saved| TopTokensReport {
                path: saved.path.display().to_string(),
                per_position: saved.per_position,
            }),
            hidden_states: results.hidden_states.as_ref().map(|saved| HiddenStatesReport {
                path: saved.path.display().to_string(),
                hidden_size: saved.hidden_size,
                precision: saved.precision.name().into(),
            }),
            shard: (!results.shard.is_whole()).then(|| ShardReport {
                index: results.shard.index(),
                count: results.shard.count(),
            }),
            notes: run.notes,
        }
    }

    /// Reads a report of this schema, every number as the f64 that was written, and [checks](Self::check) it.
    ///
    /// # Errors
    /// When the text is not the JSON of such a report, or a number cannot be right.
    pub fn from_json(text: &str) -> Result<Self, ReportError> {
        let report: Self = exact_json::parse(text)?;
        report.check()?;
        Ok(report)
    }

    /// The report as text: sorted keys, two-blank indentation, a newline at the end.
    ///
    /// # Errors
    /// When a figure is infinite or not a number.
    pub fn to_json(&self) -> Result<String, ReportError> {
        let mut value = serde_json::to_value(self)?;
        // JSON has no NaN: it would become a null, which does not read back as the same report.
        match serde_json::from_value::<Self>(value.clone()) {
            Ok(same) if same == *self => {}
            _ => return Err(ReportError::NotFinite),
        }
        value.sort_all_objects();
        let mut text = serde_json::to_string_pretty(&value)?;
        text.push('\n');
        Ok(text)
    }

    /// Writes `report.json` into `directory` through a temporary name.
    ///
    /// # Errors
    /// When a figure is not finite or the file cannot be written; nothing is left behind then.
    pub fn write(&self, directory: &Path) -> Result<(), ReportError> {
        let path = directory.join(FILE_NAME);
        let file = PendingFile::create(&path, TEMPORARY).map_err(|source| ReportError::Write {
            path: path.display().to_string(),
            source,
        })?;
        self.store(file, &path)
    }

    /// Writes the report into the file that will be `path`.
    pub(crate) fn store(&self, mut file: PendingFile, path: &Path) -> Result<(), ReportError> {
        let text = self.to_json()?;
        let written = file.write_all(text.as_bytes()).and_then(|()| file.commit());
        written.map_err(|source| ReportError::Write {
            path: path.display().to_string(),
            source,
        })
    }
}

/// Nats by which a target's log-probability may change when the head is applied again in another batch.
const HEAD_ROUNDING: f64 = 1e-3;

/// Said when the reference was made with another output head, whose own error the divergence then misses.
fn head_note(head_error: f64) -> Option<String> {
    (head_error > HEAD_ROUNDING).then(|| {
        format!(
            "this run's output head gives the reference's hidden states other log-probabilities than their own run did, by up \
             to {head_error:.2e} nats: the divergence leaves out what the heads differ by"
        )
    })
}

/// Tokens per second; `None` when the clock saw no time.
pub(crate) fn rate(tokens: u64, seconds: f64) -> Option<f64> {
    Some(tokens as f64 / seconds).filter(|rate| rate.is_finite())
}

fn stream_report(plan: &StreamPlan, result: &StreamResult) -> StreamReport {
    let input_tokens = plan.tokens.len() as u64;
    let mut report = StreamReport {
        id: plan.id.clone(),
        domain: plan.domain.clone(),
        path: plan.path.clone(),
        sha256: plan.sha256.clone(),
        tokens_sha256: plan.tokens_sha256.clone(),
        input_tokens,
        unscored_tokens: input_tokens - result.aggregate.scored_tokens,
        seconds: result.seconds,
        figures: (&result.aggregate).into(),
        text: TextFigures::of_stream(plan.bytes, plan.words),
        windows: result.windows.iter().map(window_report).collect(),
        kl_divergence: result.kl.clone(),
    };
    report.measure_text(&result.aggregate);
    report
}

pub(crate) fn kl_report(kl: &KlResults, overall: &Aggregate) -> KlReport {
    let definition = match kl.source.kind {
        ReferenceKind::TopTokens => {
            "KL(reference || this run) in nats over the reference's top tokens plus one bucket for all other tokens: a \
             lower bound of the divergence over the whole vocabulary; delta_nll is this run minus the reference"
        }
        ReferenceKind::HiddenStates => {
            "KL(reference || this run), and the reverse, in nats over the whole vocabulary, the reference's distribution being \
             this run's output head applied to its hidden states; delta_nll is this run minus the reference"
        }
        ReferenceKind::LogitBase => {
            "KL(reference || this run) in nats over the whole vocabulary; the reference's log-probabilities are 16-bit \
             codes over at most 16 nats; delta_nll is this run minus the reference"
        }
    };
    let delta = kl.overall.figures.mean_delta_nll;
    KlReport {
        definition: definition.into(),
        reference: kl.source.path.display().to_string(),
        reference_sha256: kl.source.sha256.clone(),
        reference_kind: kl.source.kind,
        reference_top_tokens: kl.source.top_tokens,
        reference_head_error: kl.source.head_error,
        reference_provenance: kl.source.provenance.clone(),
        reference_mean_nll: overall.mean_nll().map(|mean| mean - delta),
        perplexity_ratio: Some(delta.exp()).filter(|ratio| ratio.is_finite()),
        uncertainty: KlUncertainty {
            mean_kl: kl.mean_kl.clone(),
            mean_delta_nll: kl.mean_delta_nll.clone(),
        },
        detail: kl.overall.clone(),
    }
}

fn window_report(result: &WindowResult) -> WindowReport {
    let window = &result.window;
    WindowReport {
        index: result.index as u64,
        input_begin: window.input_begin as u64,
        input_end: window.input_end as u64,
        target_begin: window.target_begin as u64,
        target_end: window.target_end() as u64,
        first_target: window.first_target() as u64,
        seconds: result.seconds,
        running_mean_nll: result.running_mean_nll,
        figures: (&result.aggregate).into(),
        kl_divergence: result.kl.as_ref().map(Sums::figures),
    }
}
