//! The figures of a comparison, as reports carry them.

use serde::{Deserialize, Serialize};

/// Figures of a set of positions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct KlFigures {
    /// Positions compared.
    pub positions: u64,
    /// Mean divergence in nats.
    pub mean_kl: f64,
    /// Mean divergence in the other direction, KL(this run ‖ reference); `None` unless whole rows were compared.
    #[serde(default)]
    pub mean_reverse_kl: Option<f64>,
    /// Spread of the divergence over positions; no standard error.
    pub kl_standard_deviation: f64,
    /// Share of positions with the same most probable token.
    pub top1_agreement: f64,
    /// Mean of this run's negative log-likelihood minus the reference's; positive is worse.
    pub mean_delta_nll: f64,
    /// Mean probability that the reference gives to the compared tokens.
    pub mean_reference_top_mass: f64,
    /// Spread of the change over positions; reports of version 3 lack it.
    #[serde(default)]
    pub delta_nll_standard_deviation: f64,
}

/// Standard errors, positions taken as independent.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct KlErrors {
    /// Of `mean_kl`.
    pub mean_kl: f64,
    /// Of `top1_agreement`.
    pub top1_agreement: f64,
    /// Of `mean_delta_nll`.
    pub mean_delta_nll: f64,
}

/// Order statistics of the divergence, all zero for an empty set; `null` where only sums are known, as in joined reports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct KlQuantiles {
    /// Smallest value.
    pub min_kl: Option<f64>,
    /// 1 % point.
    pub p01_kl: Option<f64>,
    /// 5 % point.
    pub p05_kl: Option<f64>,
    /// 10 % point.
    pub p10_kl: Option<f64>,
    /// 50 % point.
    pub median_kl: Option<f64>,
    /// 90 % point.
    pub p90_kl: Option<f64>,
    /// 95 % point.
    pub p95_kl: Option<f64>,
    /// 99 % point.
    pub p99_kl: Option<f64>,
    /// 99.9 % point.
    pub p999_kl: Option<f64>,
    /// Greatest value.
    pub max_kl: Option<f64>,
}

/// Change of the target's probability. Symmetric tails are noise, a heavy negative tail is damage.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DeltaP {
    /// Mean.
    pub mean: f64,
    /// Root of the mean square.
    pub rms: f64,
    /// Smallest value.
    pub min: f64,
    /// 1 % point.
    pub p01: f64,
    /// 5 % point.
    pub p05: f64,
    /// 50 % point.
    pub median: f64,
    /// 95 % point.
    pub p95: f64,
    /// 99 % point.
    pub p99: f64,
    /// Greatest value.
    pub max: f64,
}

/// Positions with a certain number of tokens before them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ContextBucket {
    /// Fewest tokens before the predicted one.
    pub context_begin: u64,
    /// One more than the most.
    pub context_end: u64,
    /// Figures.
    #[serde(flatten)]
    pub figures: KlFigures,
}

/// Positions at which the reference gave its first token a certain probability.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ConfidenceBucket {
    /// Least probability.
    pub confidence_begin: f64,
    /// Bound above; exclusive unless it is 1.
    pub confidence_end: f64,
    /// Figures.
    #[serde(flatten)]
    pub figures: KlFigures,
}

/// A comparison over a stream, a domain or everything.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KlDetail {
    /// Figures.
    #[serde(flatten)]
    pub figures: KlFigures,
    /// Order statistics.
    #[serde(flatten)]
    pub quantiles: KlQuantiles,
    /// Order statistics of the divergence in the other direction; `null` where there is none or only sums are known.
    #[serde(default)]
    pub reverse_quantiles: Option<KlQuantiles>,
    /// Standard errors of the means; `null` below two positions.
    pub standard_errors: Option<KlErrors>,
    /// Change of the target's probability; `null` where only sums are known.
    pub delta_p: Option<DeltaP>,
    /// By tokens before the predicted one, ascending, without empty buckets.
    pub by_context: Vec<ContextBucket>,
    /// By the reference's confidence, ascending, without empty buckets.
    pub by_confidence: Vec<ConfidenceBucket>,
}
