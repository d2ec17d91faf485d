//! A report that is read back is untrusted: every number that figures are computed from must be possible and must agree with
//! the others.
//!
//! - Ranges: a window holds exactly the tokens that protocol, stream length and shard give it, so a missing one is noticed.
//! - Sums: windows add up to their stream, streams to domains and to the whole, each with the figures that follow from a sum;
//!   so do the means of a comparison.
//! - Magnitudes: a log-probability is a finite f32 of at most 0 (but for rounding), a share lies in `[0, 1]`, a time is no
//!   negative number. Within these bounds no sum over any report overflows.

use std::collections::BTreeMap;

use super::{Figures, Report, SCHEMA_VERSION, StreamReport, WindowReport};
use crate::aggregate::{Aggregate, LOGPROB_ROUNDING};
use crate::shard::Shard;
use crate::statistics::{self, KlDetail, KlFigures};
use crate::windows::{Protocol, WindowPlan};

/// Most seconds that are believed, some thirty thousand years.
const MOST_SECONDS: f64 = 1e12;
/// Most nats of one token: the range of an f32 log-probability.
const MOST_NATS: f64 = f32::MAX as f64;
/// Relative error of a figure that was computed from the same sums in another order.
const ROUNDING: f64 = 1e-9;

/// A number of a report that cannot be right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{field}` {problem}")]
pub struct ReportFault {
    /// Path of the field.
    pub field: String,
    /// What is wrong with it.
    pub problem: String,
}

type Checked = Result<(), ReportFault>;

fn fault(at: &str, field: &str, problem: String) -> ReportFault {
    let field = match at {
        "" => field.to_owned(),
        at => format!("{at}.{field}"),
    };
    ReportFault { field, problem }
}

fn equal<T: PartialEq + std::fmt::Display>(at: &str, field: &str, found: T, expected: T) -> Checked {
    match found == expected {
        true => Ok(()),
        false => Err(fault(at, field, format!("is {found}, expected {expected}"))),
    }
}

fn within(at: &str, field: &str, found: f64, [least, most]: [f64; 2]) -> Checked {
    // A NaN is in no range.
    match (least..=most).contains(&found) {
        true => Ok(()),
        false => Err(fault(at, field, format!("is {found}, expected {least} to {most}"))),
    }
}

fn near(at: &str, field: &str, found: Option<f64>, expected: Option<f64>) -> Checked {
    let close = match (found, expected) {
        (Some(a), Some(b)) => (a - b).abs() <= ROUNDING * (1.0 + b.abs()),
        (a, b) => a == b,
    };
    let show = |value: Option<f64>| value.map_or("null".to_owned(), |v| v.to_string());
    match close {
        true => Ok(()),
        false => Err(fault(
            at,
            field,
            format!("is {}, expected {}", show(found), show(expected)),
        )),
    }
}

fn seconds(at: &str, field: &str, found: f64) -> Checked {
    within(at, field, found, [0.0, MOST_SECONDS])
}

/// Checks the sum of `tokens` scored tokens.
pub(crate) fn check_total(at: &str, tokens: u64, total_nll: f64) -> Checked {
    let n = tokens as f64;
    within(
        at,
        "total_nll",
        total_nll,
        [-f64::from(LOGPROB_ROUNDING) * n, MOST_NATS * n],
    )
}

/// Checks the figures of a comparison over `positions` positions.
pub(crate) fn check_kl(at: &str, kl: &KlFigures, positions: u64) -> Checked {
    equal(at, "positions", kl.positions, positions)?;
    for (field, value, range) in [
        ("mean_kl", kl.mean_kl, [-f64::from(LOGPROB_ROUNDING), 2.0 * MOST_NATS]),
        (
            "kl_standard_deviation",
            kl.kl_standard_deviation,
            [0.0, 2.0 * MOST_NATS],
        ),
        ("top1_agreement", kl.top1_agreement, [0.0, 1.0]),
        ("mean_delta_nll", kl.mean_delta_nll, [-2.0 * MOST_NATS, 2.0 * MOST_NATS]),
        (
            "delta_nll_standard_deviation",
            kl.delta_nll_standard_deviation,
            [0.0, 2.0 * MOST_NATS],
        ),
        (
            "mean_reference_top_mass",
            kl.mean_reference_top_mass,
            [0.0, 1.0 + ROUNDING],
        ),
    ] {
        within(at, field, value, range)?;
    }
    let reverse = kl.mean_reverse_kl.unwrap_or(0.0);
    within(
        at,
        "mean_reverse_kl",
        reverse,
        [-f64::from(LOGPROB_ROUNDING), 2.0 * MOST_NATS],
    )
}

/// Checks a comparison against the sums of its windows.
fn check_detail(at: &str, kl: Option<&KlDetail>, sums: &statistics::Sums, positions: u64) -> Checked {
    let Some(kl) = kl else { return Ok(()) };
    let at = format!("{at}kl_divergence");
    check_kl(&at, &kl.figures, positions)?;
    let (found, expected) = (&kl.figures, sums.figures());
    for (field, found, expected) in [
        ("mean_kl", found.mean_kl, expected.mean_kl),
        ("top1_agreement", found.top1_agreement, expected.top1_agreement),
        ("mean_delta_nll", found.mean_delta_nll, expected.mean_delta_nll),
        (
            "mean_reference_top_mass",
            found.mean_reference_top_mass,
            expected.mean_reference_top_mass,
        ),
    ] {
        near(&at, field, Some(found), Some(expected))?;
    }
    near(&at, "mean_reverse_kl", found.mean_reverse_kl, expected.mean_reverse_kl)?;
    let contexts = kl.by_context.iter().map(|bucket| &bucket.figures);
    let confidences = kl.by_confidence.iter().map(|bucket| &bucket.figures);
    for (field, buckets) in [
        ("by_context", contexts.collect::<Vec<_>>()),
        ("by_confidence", confidences.collect()),
    ] {
        for (i, bucket) in buckets.iter().enumerate() {
            check_kl(&format!("{at}.{field}[{i}]"), bucket, bucket.positions)?;
        }
        let sum: u128 = buckets.iter().map(|bucket| u128::from(bucket.positions)).sum();
        equal(&at, field, sum, u128::from(positions))?;
    }
    Ok(())
}

/// Checks that `found` is what `sum` gives.
fn check_figures(at: &str, found: &Figures, sum: &Aggregate) -> Checked {
    let expected = Figures::from(sum);
    equal(at, "scored_tokens", found.scored_tokens, expected.scored_tokens)?;
    for (field, found, expected) in [
        ("total_nll", Some(found.total_nll), Some(expected.total_nll)),
        ("mean_nll", found.mean_nll, expected.mean_nll),
        ("perplexity", found.perplexity, expected.perplexity),
        ("bits_per_token", found.bits_per_token, expected.bits_per_token),
        (
            "squared_deviations",
            Some(found.squared_deviations),
            Some(expected.squared_deviations),
        ),
        (
            "standard_error_mean_nll",
            found.standard_error_mean_nll,
            expected.standard_error_mean_nll,
        ),
        (
            "standard_error_perplexity",
            found.standard_error_perplexity,
            expected.standard_error_perplexity,
        ),
    ] {
        near(at, field, found, expected)?;
    }
    Ok(())
}

/// Sums in scoring order.
#[derive(Default)]
struct Sums {
    number: u64,
    overall: Part,
    domains: BTreeMap<String, Part>,
}

/// Sums of some windows and of their comparisons.
#[derive(Default)]
struct Part {
    nll: Aggregate,
    kl: statistics::Sums,
}

impl Part {
    fn add(&mut self, at: &str, window: &WindowReport) -> Checked {
        let sum = self.nll.plus(window.figures.aggregate());
        self.nll = or_fault(sum.ok_or("overflows the sum of all windows"), at, "scored_tokens")?;
        if let Some(kl) = &window.kl_divergence {
            self.kl.merge(&statistics::Sums::of_figures(kl));
        }
        Ok(())
    }

    fn check_detail(&self, at: &str, kl: Option<&KlDetail>) -> Checked {
        check_detail(at, kl, &self.kl, self.nll.scored_tokens)
    }
}

impl Report {
    /// Checks that the numbers are possible and agree with one another.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub fn check(&self) -> Result<(), ReportFault> {
        equal("", "schema_version", self.schema_version, SCHEMA_VERSION)?;
        let execution = &self.execution;
        let protocol = Protocol::new(
            execution.windows,
            size("execution", "context_tokens", execution.context_tokens)?,
            size("execution", "stride_tokens", execution.stride_tokens)?,
        );
        let protocol = or_fault(protocol, "execution", "context_tokens")?;
        equal(
            "execution",
            "stride_tokens",
            execution.stride_tokens,
            protocol.stride() as u64,
        )?;
        equal(
            "corpus",
            "stream_count",
            self.corpus.stream_count,
            self.streams.len() as u64,
        )?;
        let shard = match &self.shard {
            None => Shard::WHOLE,
            Some(shard) => or_fault(format!("{}/{}", shard.index, shard.count).parse(), "", "shard")?,
        };
        let mut sums = Sums::default();
        for (i, stream) in self.streams.iter().enumerate() {
            let at = format!("streams[{i}]");
            let plan = or_fault(
                protocol.plan(size(&at, "input_tokens", stream.input_tokens)?),
                &at,
                "input_tokens",
            )?;
            let plan = match execution.window_limit {
                None => plan,
                Some(limit) => {
                    let limit = size("execution", "window_limit", limit)?;
                    or_fault(plan.first(limit), "execution", "window_limit")?
                }
            };
            sums.check_stream(&at, stream, &plan, shard)?;
        }
        equal("", "domains", self.domains.len(), sums.domains.len())?;
        for (i, (domain, (name, sum))) in self.domains.iter().zip(&sums.domains).enumerate() {
            let at = format!("domains[{i}]");
            equal(&at, "domain", &domain.domain, name)?;
            check_figures(&at, &domain.figures, &sum.nll)?;
            sum.check_detail(&format!("{at}."), domain.kl_divergence.as_ref())?;
        }
        check_figures("overall", &self.overall.figures, &sums.overall.nll)?;
        let positions = sums.overall.nll.scored_tokens;
        sums.overall
            .check_detail("", self.kl_divergence.as_ref().map(|kl| &kl.detail))?;
        let sum = |value: fn(&StreamReport) -> u64| self.streams.iter().map(|s| u128::from(value(s))).sum::<u128>();
        let found = &self.denominators;
        for (field, found, expected) in [
            ("input_tokens", found.input_tokens, sum(|s| s.input_tokens)),
            ("scored_tokens", found.scored_tokens, u128::from(positions)),
            ("windows", found.windows, sum(|s| s.windows.len() as u64)),
            ("bytes", found.bytes, sum(|s| s.text.bytes)),
            ("words", found.words, sum(|s| s.text.words)),
        ] {
            equal("denominators", field, u128::from(found), expected)?;
        }
        let timing = &self.timing;
        seconds("timing", "load_seconds", timing.load_seconds)?;
        seconds("timing", "read_and_tokenize_seconds", timing.read_and_tokenize_seconds)?;
        seconds("timing", "score_seconds", timing.score_seconds)?;
        seconds("timing", "total_seconds", timing.total_seconds)
    }
}

impl Sums {
    fn check_stream(&mut self, at: &str, stream: &StreamReport, plan: &WindowPlan, shard: Shard) -> Checked {
        let begin = self.number;
        let of_shard = shard.below(begin + plan.len() as u64) - shard.below(begin);
        equal(at, "windows", stream.windows.len() as u64, of_shard)?;
        self.number += plan.len() as u64;
        let mut sum = Part::default();
        // Windows of the run that come before the first of this stream's.
        let skipped = shard.below(begin);
        for (i, window) in (0u64..).zip(&stream.windows) {
            let at = format!("{at}.windows[{i}]");
            let index = (skipped + i) * shard.count() + shard.index() - begin;
            check_window(&at, window, plan, index)?;
            sum.add(&at, window)?;
            self.overall.add(&at, window)?;
            near(
                &at,
                "running_mean_nll",
                Some(window.running_mean_nll),
                self.overall.nll.mean_nll(),
            )?;
        }
        for window in &stream.windows {
            self.domains.entry(stream.domain.clone()).or_default().add(at, window)?;
        }
        check_figures(at, &stream.figures, &sum.nll)?;
        let unscored = stream.input_tokens.saturating_sub(sum.nll.scored_tokens);
        equal(at, "unscored_tokens", stream.unscored_tokens, unscored)?;
        seconds(at, "seconds", stream.seconds)?;
        sum.check_detail(&format!("{at}."), stream.kl_divergence.as_ref())
    }
}

fn check_window(at: &str, found: &WindowReport, plan: &WindowPlan, index: u64) -> Checked {
    let window = plan.window(index as usize);
    for (field, found, expected) in [
        ("index", found.index, index),
        ("input_begin", found.input_begin, window.input_begin as u64),
        ("input_end", found.input_end, window.input_end as u64),
        ("target_begin", found.target_begin, window.target_begin as u64),
        ("target_end", found.target_end, window.target_end() as u64),
        ("first_target", found.first_target, window.first_target() as u64),
        ("scored_tokens", found.figures.scored_tokens, window.positions() as u64),
    ] {
        equal(at, field, found, expected)?;
    }
    let sum = found.figures.aggregate();
    check_total(at, sum.scored_tokens, sum.total_nll)?;
    let most = 4.0 * MOST_NATS * MOST_NATS * sum.scored_tokens as f64;
    within(at, "squared_deviations", sum.squared_deviations, [0.0, most])?;
    check_figures(at, &found.figures, &sum)?;
    seconds(at, "seconds", found.seconds)?;
    if let Some(kl) = &found.kl_divergence {
        check_kl(&format!("{at}.kl_divergence"), kl, sum.scored_tokens)?;
    }
    Ok(())
}

fn size(at: &str, field: &str, value: u64) -> Result<usize, ReportFault> {
    // Half the range, so that the sum of two never overflows.
    let size = usize::try_from(value).ok().filter(|&size| size <= usize::MAX / 2);
    or_fault(
        size.ok_or_else(|| format!("is {value}, which no text reaches")),
        at,
        field,
    )
}

fn or_fault<T, E: std::fmt::Display>(result: Result<T, E>, at: &str, field: &str) -> Result<T, ReportFault> {
    result.map_err(|error| fault(at, field, error.to_string()))
}
