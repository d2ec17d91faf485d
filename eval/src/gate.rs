//! May a fast path replace an exact one? A verdict from two runs over the same windows, each compared with one reference.
//!
//! With the paired differences fast minus exact of the mean divergence `dK`, the mean negative log-likelihood `dN` and the
//! top-1 agreement `dA`, and their 95 % bounds at 1.96 clustered standard errors:
//!
//! - reject when a bound shows harm: `dK` above its tolerance, `|dN|` above its tolerance, or `dA` below zero;
//! - accept when the bounds exclude harm: `dK` and `|dN|` within tolerance, and `dA` not significantly negative;
//! - otherwise, and without a single token, more data is needed.
//!
//! Runs that agree bit for bit are accepted without statistics. Perplexity alone cannot decide, since a numerical change can
//! move it either way, so both runs must have compared with the same reference.

use std::fmt;

use crate::compare::{Paired, ReportComparison};

/// Two-sided 95 % point of the normal distribution.
const Z95: f64 = 1.96;

/// Settings in which the two runs may differ: where the model lies, and those that choose the path.
const MAY_DIFFER: [&str; 9] = [
    "artifact.path",
    "execution.fast_paths",
    "execution.reproducible",
    "execution.route",
    "execution.fast_prefill_kernel",
    "execution.original_int8_prefill_kernel",
    "execution.original_nvfp4_prefill_kernel",
    "execution.prefill_8bit_pv",
    "execution.batch_windows",
];

/// What is still harmless.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerances {
    /// Growth of the mean divergence, relative to the exact run's.
    pub relative_kl: f64,
    /// Change of the mean negative log-likelihood in nats.
    pub nll: f64,
}

impl Default for Tolerances {
    /// A twentieth of the divergence that the configuration has anyway, and a tenth of a percent of perplexity.
    fn default() -> Self {
        Self {
            relative_kl: 0.05,
            nll: 1e-3,
        }
    }
}

/// The decision, with its reasons.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The fast path is as good.
    Accept(String),
    /// The fast path is worse.
    Reject(String),
    /// More windows are needed.
    Inconclusive(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accept(why) => write!(f, "accept: {why}"),
            Self::Reject(why) => write!(f, "reject: {why}"),
            Self::Inconclusive(why) => write!(f, "inconclusive, more data is needed: {why}"),
        }
    }
}

/// Why there is no verdict.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GateError {
    /// The runs differ in more than their path.
    #[error("the runs differ in {}, so a difference between them says nothing about the path", .0.join(", "))]
    Settings(Vec<String>),
    /// There is no common reference.
    #[error("both runs must be compared with the same reference; score both with it")]
    NoReference,
    /// There is too little to estimate an error from.
    #[error("there is only one window, so no error can be estimated")]
    OneWindow,
}

/// Judges a comparison whose first report is the exact run and whose second is the fast one.
///
/// # Errors
/// When the runs do not isolate the path or there is too little data for any verdict.
pub fn judge(comparison: &ReportComparison, tolerances: &Tolerances) -> Result<Verdict, GateError> {
    let others = comparison
        .differences
        .iter()
        .filter(|d| !MAY_DIFFER.contains(&d.field.as_str()));
    let others: Vec<String> = others.map(|d| d.field.clone()).collect();
    if !others.is_empty() {
        return Err(GateError::Settings(others));
    }
    if comparison.mean_nll.count == 0 {
        return Ok(Verdict::Inconclusive("the reports hold no scored token".into()));
    }
    if comparison.identical {
        return Ok(Verdict::Accept(
            "every window has the same negative log-likelihood, bit for bit".into(),
        ));
    }
    let kl = comparison.kl_divergence.as_ref().ok_or(GateError::NoReference)?;
    let [kl_low, kl_high] = bounds(&kl.mean_kl)?;
    let [nll_low, nll_high] = bounds(&comparison.mean_nll)?;
    let [_, agreement_high] = bounds(&kl.top1_agreement)?;
    let allowed = tolerances.relative_kl * kl.mean_kl.first.abs();
    let figures = format!(
        "divergence {kl_low:+.2e} to {kl_high:+.2e} (allowed {allowed:.2e}), negative log-likelihood {nll_low:+.2e} to \
         {nll_high:+.2e} (allowed {:.2e}), agreement at most {agreement_high:+.2e}",
        tolerances.nll
    );
    let harm = kl_low > allowed || nll_low > tolerances.nll || nll_high < -tolerances.nll || agreement_high < 0.0;
    let safe = kl_high <= allowed && nll_low >= -tolerances.nll && nll_high <= tolerances.nll;
    Ok(match (harm, safe) {
        (true, _) => Verdict::Reject(figures),
        (false, true) => Verdict::Accept(figures),
        (false, false) => Verdict::Inconclusive(figures),
    })
}

/// 95 % bounds of a paired difference.
fn bounds(paired: &Paired) -> Result<[f64; 2], GateError> {
    let error = paired
        .uncertainty
        .clustered_standard_error
        .ok_or(GateError::OneWindow)?;
    Ok([paired.difference - Z95 * error, paired.difference + Z95 * error])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Difference, PairedKl};
    use crate::uncertainty::{Block, Uncertainty};
    use std::collections::BTreeMap;

    /// A paired difference with the given standard error: two streams of 100 tokens at `difference ± error`.
    fn paired(first: f64, difference: f64, error: f64) -> Paired {
        let block = |d: f64| {
            vec![Block {
                count: 100,
                total: 100.0 * d,
            }]
        };
        let uncertainty = Uncertainty::of(&[block(difference - error), block(difference + error)]);
        assert!((uncertainty.clustered_standard_error.unwrap() - error).abs() < 1e-12);
        Paired {
            count: 200,
            first,
            second: first + difference,
            difference,
            t: None,
            uncertainty,
        }
    }

    fn comparison(kl: [f64; 2], nll: [f64; 2], agreement: [f64; 2]) -> ReportComparison {
        ReportComparison {
            first: "exact".into(),
            second: "fast".into(),
            differences: vec![Difference {
                field: "execution.fast_paths".into(),
                first: Vec::<String>::new().into(),
                second: vec!["x"].into(),
            }],
            identical: false,
            windows_better: 0,
            windows_worse: 0,
            windows_equal: 0,
            mean_nll: paired(2.0, nll[0], nll[1]),
            perplexity_ratio: Some(1.0),
            domains: BTreeMap::new(),
            streams: Vec::new(),
            kl_divergence: Some(PairedKl {
                mean_kl: paired(0.02, kl[0], kl[1]),
                top1_agreement: paired(0.96, agreement[0], agreement[1]),
            }),
        }
    }

    fn verdict(kl: [f64; 2], nll: [f64; 2], agreement: [f64; 2]) -> Verdict {
        judge(&comparison(kl, nll, agreement), &Tolerances::default()).unwrap()
    }

    #[test]
    fn bounds_decide() {
        // Allowed: 0.05 · 0.02 = 1e-3 of divergence and 1e-3 nats.
        let quiet = [0.0, 1e-4];
        assert!(matches!(verdict(quiet, quiet, quiet), Verdict::Accept(_)));
        assert!(matches!(verdict([2e-3, 1e-4], quiet, quiet), Verdict::Reject(_)));
        assert!(matches!(verdict([5e-4, 1e-3], quiet, quiet), Verdict::Inconclusive(_)));
        assert!(
            matches!(verdict([-5e-3, 1e-4], quiet, quiet), Verdict::Accept(_)),
            "closer to the reference"
        );
        assert!(
            matches!(verdict(quiet, [-3e-3, 1e-4], quiet), Verdict::Reject(_)),
            "either direction"
        );
        assert!(matches!(verdict(quiet, [3e-3, 1e-4], quiet), Verdict::Reject(_)));
        assert!(matches!(verdict(quiet, [9e-4, 1e-4], quiet), Verdict::Inconclusive(_)));
        assert!(matches!(verdict(quiet, quiet, [-1e-3, 1e-4]), Verdict::Reject(_)));
        assert!(matches!(verdict(quiet, quiet, [-1e-4, 1e-4]), Verdict::Accept(_)));
    }

    #[test]
    fn only_the_path_may_differ() {
        let mut other = comparison([0.0, 1e-4], [0.0, 1e-4], [0.0, 1e-4]);
        other.differences[0].field = "execution.kv_dtype".into();
        let error = judge(&other, &Tolerances::default()).unwrap_err();
        assert_eq!(error, GateError::Settings(vec!["execution.kv_dtype".into()]));
        // Where the same model lies is no setting.
        other.differences[0].field = "artifact.path".into();
        assert!(judge(&other, &Tolerances::default()).is_ok());
    }

    #[test]
    fn equal_bits_need_no_statistics_and_unequal_ones_need_a_reference() {
        let mut same = comparison([0.0, 1e-4], [0.0, 1e-4], [0.0, 1e-4]);
        same.kl_divergence = None;
        assert_eq!(judge(&same, &Tolerances::default()), Err(GateError::NoReference));
        same.identical = true;
        assert!(matches!(judge(&same, &Tolerances::default()), Ok(Verdict::Accept(_))));
        same.mean_nll.count = 0;
        let verdict = judge(&same, &Tolerances::default());
        assert!(matches!(verdict, Ok(Verdict::Inconclusive(_))), "{verdict:?}");
    }
}
