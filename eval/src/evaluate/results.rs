//! What an evaluation found.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::SaveTopTokens;
use crate::aggregate::Aggregate;
use crate::hidden::SaveHidden;
use crate::shard::Shard;
use crate::statistics::{KlDetail, Sums};
use crate::top_tokens::Provenance;
use crate::uncertainty::Uncertainty;
use crate::windows::Window;

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

/// What a reference holds of each position.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReferenceKind {
    /// The most probable tokens.
    #[default]
    TopTokens,
    /// Every token, in 16-bit codes.
    LogitBase,
    /// The final hidden state, from which every token follows.
    HiddenStates,
}

/// What was compared with.
#[derive(Debug, Clone, PartialEq)]
pub struct KlSource {
    /// Absolute path of the reference.
    pub path: PathBuf,
    /// Which file it is: [`sketch_sha256`](crate::files::sketch_sha256).
    pub sha256: Option<String>,
    /// What it holds.
    pub kind: ReferenceKind,
    /// Its tokens per position; `None` for whole rows.
    pub top_tokens: Option<u32>,
    /// How far this run's output head, applied to the reference's hidden states, is from the log-probabilities that their own
    /// run gave to the targets; largest difference in nats.
    pub head_error: Option<f64>,
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
    /// The hidden-state reference that was written, by absolute path.
    pub hidden_states: Option<SaveHidden>,
    /// Wall-clock time of scoring.
    pub score_seconds: f64,
    /// The share that was scored.
    pub shard: Shard,
    /// Windows per call of the scorer.
    pub batch: usize,
    /// Rows of the head in the softmax's denominator.
    pub softmax_rows: usize,
}
