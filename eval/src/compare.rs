//! Compares two reports window by window.
//!
//! Both runs scored the same windows, so the difference of a window's sums cancels what makes its text easy or hard. Pooled
//! over windows of `n_w` tokens: `D = Σ (t_w - t'_w) / Σ n_w`, with the standard error clustered by stream. Reports of
//! versions 3, 4 and 6 are read, the last with [every check](Report::check) that joining shards makes; those of unequal
//! protocols are refused with every mismatch named.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::exact_json;
use crate::files::read_regular;
use crate::humanize::{column, exponent_form, printable, significant};
use crate::report::{Report, ReportError, ReportFault, SCHEMA_VERSION, check_kl, check_total};
use crate::statistics::KlFigures;
use crate::uncertainty::{Block, ClusterKind, Uncertainty};

/// Most tokens of a stream that are believed. A resample draws as many windows as there are, so sums over it stay below 2^64
/// however the windows are cut.
const MOST_TOKENS: u64 = 1 << 40;

/// Why two reports cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    /// A file cannot be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is no report.
    #[error("{path} is not a perplexity report: {source}", path = path.display())]
    Report {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A file of this program's schema lacks something of it.
    #[error("{path}: {source}", path = path.display())]
    Schema {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ReportError,
    },
    /// A number cannot be right.
    #[error("{path}: {fault}", path = path.display())]
    Fault {
        /// The file.
        path: PathBuf,
        /// The field and what is wrong with it.
        fault: ReportFault,
    },
    /// The runs did not score the same thing.
    #[error("the reports cannot be compared: {}", .0.join("; "))]
    Protocol(Vec<String>),
}

/// What is needed of a report; every other field is ignored.
#[derive(Debug, Clone, Deserialize)]
struct Loaded {
    schema_version: u32,
    artifact: Map<String, Value>,
    corpus: Map<String, Value>,
    execution: Map<String, Value>,
    #[serde(default)]
    denominators: Map<String, Value>,
    streams: Vec<LoadedStream>,
    kl_divergence: Option<LoadedReference>,
}

#[derive(Debug, Clone, Deserialize)]
struct LoadedReference {
    reference: String,
    reference_top_tokens: Option<u64>,
    reference_sha256: Option<String>,
}

impl LoadedReference {
    /// Whether both are one reference: by content where both reports say it, else by path.
    fn is(&self, other: &Self) -> bool {
        let same = match (&self.reference_sha256, &other.reference_sha256) {
            (Some(a), Some(b)) => a == b,
            _ => self.reference == other.reference,
        };
        same && self.reference_top_tokens == other.reference_top_tokens
    }
}

#[derive(Debug, Clone, Deserialize)]
struct LoadedStream {
    id: String,
    domain: String,
    tokens_sha256: Option<String>,
    scored_tokens: Option<u64>,
    total_nll: Option<f64>,
    windows: Vec<LoadedWindow>,
}

#[derive(Debug, Clone, Deserialize)]
struct LoadedWindow {
    index: u64,
    target_begin: u64,
    target_end: u64,
    scored_tokens: u64,
    total_nll: f64,
    kl_divergence: Option<KlFigures>,
}

/// A setting that differs between the runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// Its path in the report.
    pub field: String,
    /// Value of the first report.
    pub first: Value,
    /// Value of the second report.
    pub second: Value,
}

/// A token-weighted mean in both runs and the paired difference, second minus first.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Paired {
    /// Tokens.
    pub count: u64,
    /// Mean of the first run.
    pub first: f64,
    /// Mean of the second run.
    pub second: f64,
    /// Second minus first.
    pub difference: f64,
    /// The difference over its clustered standard error.
    pub t: Option<f64>,
    /// Uncertainty of the difference.
    pub uncertainty: Uncertainty,
}

/// Divergences from one reference.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PairedKl {
    /// Mean divergence.
    pub mean_kl: Paired,
    /// Share of positions that agree with the reference.
    pub top1_agreement: Paired,
}

/// The comparison of two reports.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReportComparison {
    /// Path of the first report.
    pub first: String,
    /// Path of the second report.
    pub second: String,
    /// What differs between the runs.
    pub differences: Vec<Difference>,
    /// Whether there are windows, and every one has the same sum, bit for bit.
    pub identical: bool,
    /// Windows whose negative log-likelihood is lower in the second run.
    pub windows_better: u64,
    /// Windows whose negative log-likelihood is higher in the second run.
    pub windows_worse: u64,
    /// Windows of equal negative log-likelihood.
    pub windows_equal: u64,
    /// Negative log-likelihood over everything.
    pub mean_nll: Paired,
    /// `exp(difference)`: the second perplexity over the first; `None` beyond the range of f64.
    pub perplexity_ratio: Option<f64>,
    /// Negative log-likelihood by domain.
    pub domains: BTreeMap<String, Paired>,
    /// Negative log-likelihood by stream, in selection order.
    pub streams: Vec<(String, Paired)>,
    /// Divergences, when both runs compared with the same reference.
    pub kl_divergence: Option<PairedKl>,
}

/// Reads and compares two reports.
///
/// # Errors
/// When a file is no report or the runs did not score the same windows of the same tokens.
pub fn compare(first: &Path, second: &Path) -> Result<ReportComparison, CompareError> {
    let (a, b) = (load(first)?, load(second)?);
    let mismatches = mismatches(&a, &b);
    if !mismatches.is_empty() {
        return Err(CompareError::Protocol(mismatches));
    }
    let pairs = || a.streams.iter().zip(&b.streams);
    let nll = |w: &LoadedWindow| Block {
        count: w.scored_tokens,
        total: w.total_nll,
    };
    let windows = || pairs().flat_map(|(a, b)| a.windows.iter().zip(&b.windows));
    let ordering = |wanted| {
        windows()
            .filter(|(a, b)| b.total_nll.total_cmp(&a.total_nll) == wanted)
            .count() as u64
    };
    let mut domains: BTreeMap<String, Vec<Pair<'_>>> = BTreeMap::new();
    for pair in pairs() {
        domains.entry(pair.0.domain.clone()).or_default().push(pair);
    }
    let all: Vec<Pair<'_>> = pairs().collect();
    let mean_nll = paired(&all, nll);
    Ok(ReportComparison {
        first: first.display().to_string(),
        second: second.display().to_string(),
        differences: differences(&a, &b),
        identical: mean_nll.count > 0 && windows().all(|(a, b)| a.total_nll.to_bits() == b.total_nll.to_bits()),
        windows_better: ordering(std::cmp::Ordering::Less),
        windows_worse: ordering(std::cmp::Ordering::Greater),
        windows_equal: ordering(std::cmp::Ordering::Equal),
        perplexity_ratio: Some(mean_nll.difference.exp()).filter(|ratio| ratio.is_finite()),
        mean_nll,
        domains: domains
            .iter()
            .map(|(name, pairs)| (name.clone(), paired(pairs, nll)))
            .collect(),
        streams: all
            .iter()
            .map(|pair| (pair.0.id.clone(), paired(&[*pair], nll)))
            .collect(),
        kl_divergence: paired_kl(&a, &b, &all),
    })
}

fn load(path: &Path) -> Result<Loaded, CompareError> {
    let read = |source| CompareError::Read {
        path: path.to_owned(),
        source,
    };
    let bytes = read_regular(path).map_err(read)?;
    let text = String::from_utf8(bytes).map_err(|error| read(io::Error::new(io::ErrorKind::InvalidData, error)))?;
    let loaded: Loaded = exact_json::parse(&text).map_err(|source| CompareError::Report {
        path: path.to_owned(),
        source,
    })?;
    let fault = |fault| CompareError::Fault {
        path: path.to_owned(),
        fault,
    };
    match loaded.schema_version {
        SCHEMA_VERSION => drop(Report::from_json(&text).map_err(|error| match error {
            ReportError::Fault(found) => fault(found),
            other => CompareError::Schema {
                path: path.to_owned(),
                source: other,
            },
        })?),
        3 | 4 => {}
        version => {
            return Err(fault(ReportFault {
                field: "schema_version".into(),
                problem: format!("is {version}, expected 3, 4 or {SCHEMA_VERSION}"),
            }));
        }
    }
    loaded.check().map_err(fault)?;
    Ok(loaded)
}

impl Loaded {
    /// Checks the numbers that figures are computed from; the versions have no more of them in common.
    fn check(&self) -> Result<(), ReportFault> {
        for (i, stream) in self.streams.iter().enumerate() {
            let at = format!("streams[{i}]");
            let (mut tokens, mut total) = (0u64, 0.0);
            for (j, window) in stream.windows.iter().enumerate() {
                let at = format!("{at}.windows[{j}]");
                let fault = |problem: String| ReportFault {
                    field: format!("{at}.scored_tokens"),
                    problem,
                };
                let expected = window.target_end.checked_sub(window.target_begin).filter(|&n| n > 0);
                if expected != Some(window.scored_tokens) {
                    let range = format!("{}..{}", window.target_begin, window.target_end);
                    return Err(fault(format!("is {}, the targets are {range}", window.scored_tokens)));
                }
                check_total(&at, window.scored_tokens, window.total_nll)?;
                if let Some(kl) = &window.kl_divergence {
                    check_kl(&format!("{at}.kl_divergence"), kl, window.scored_tokens)?;
                }
                let sum = tokens.checked_add(window.scored_tokens).filter(|&n| n <= MOST_TOKENS);
                tokens = sum.ok_or_else(|| fault(format!("is {}, too much for a text", window.scored_tokens)))?;
                total += window.total_nll;
            }
            let fault = |field: &str, found: String, sum: String| ReportFault {
                field: format!("{at}.{field}"),
                problem: format!("is {found}, its windows add up to {sum}"),
            };
            if let Some(found) = stream.scored_tokens.filter(|&found| found != tokens) {
                return Err(fault("scored_tokens", found.to_string(), tokens.to_string()));
            }
            let off = |found: &f64| (found - total).abs() > 1e-9 * (1.0 + total.abs());
            if let Some(found) = stream.total_nll.filter(off) {
                return Err(fault("total_nll", found.to_string(), total.to_string()));
            }
        }
        Ok(())
    }
}

/// Everything that keeps the runs from being comparable.
fn mismatches(a: &Loaded, b: &Loaded) -> Vec<String> {
    let mut found = Vec::new();
    let mut differ = |what: &str, a: Option<&Value>, b: Option<&Value>| {
        if a != b {
            let show = |value: Option<&Value>| value.map_or("nothing".into(), Value::to_string);
            found.push(format!(
                "{what} is {} in the first and {} in the second",
                show(a),
                show(b)
            ));
        }
    };
    for field in ["id", "mode"] {
        differ(&format!("corpus {field}"), a.corpus.get(field), b.corpus.get(field));
    }
    for field in ["context_tokens", "stride_tokens"] {
        differ(field, a.execution.get(field), b.execution.get(field));
    }
    // Reports of version 3 know sliding windows only.
    let sliding = Value::from("sliding");
    let kind = |loaded: &Loaded| loaded.execution.get("windows").unwrap_or(&sliding).clone();
    differ("windows", Some(&kind(a)), Some(&kind(b)));
    // Fields that only one version records cannot contradict each other.
    if let (Some(x), Some(y)) = (a.denominators.get("softmax_rows"), b.denominators.get("softmax_rows")) {
        differ("the number of rows in the softmax", Some(x), Some(y));
    }
    if a.streams.len() != b.streams.len() {
        found.push(format!(
            "{} streams in the first, {} in the second",
            a.streams.len(),
            b.streams.len()
        ));
        return found;
    }
    for (x, y) in a.streams.iter().zip(&b.streams) {
        if x.id != y.id || x.domain != y.domain {
            found.push(format!(
                "stream `{}` ({}) faces stream `{}` ({})",
                x.id, x.domain, y.id, y.domain
            ));
            continue;
        }
        if let (Some(p), Some(q)) = (&x.tokens_sha256, &y.tokens_sha256)
            && p != q
        {
            found.push(format!("stream `{}` has different tokens", x.id));
        }
        let range = |w: &LoadedWindow| (w.index, w.target_begin, w.target_end, w.scored_tokens);
        if !x.windows.iter().map(range).eq(y.windows.iter().map(range)) {
            found.push(format!("stream `{}` has different windows", x.id));
        }
    }
    found
}

/// Settings that differ, which is what the comparison is about.
fn differences(a: &Loaded, b: &Loaded) -> Vec<Difference> {
    let mut found = Vec::new();
    for (part, a, b) in [
        ("artifact", &a.artifact, &b.artifact),
        ("execution", &a.execution, &b.execution),
    ] {
        let mut fields: Vec<&String> = a.keys().chain(b.keys()).collect();
        fields.sort_unstable();
        fields.dedup();
        for field in fields {
            let value = |side: &Map<String, Value>| side.get(field).cloned().unwrap_or(Value::Null);
            let (first, second) = (value(a), value(b));
            if first != second {
                found.push(Difference {
                    field: format!("{part}.{field}"),
                    first,
                    second,
                });
            }
        }
    }
    found
}

type Pair<'a> = (&'a LoadedStream, &'a LoadedStream);

fn paired(streams: &[Pair<'_>], block: impl Fn(&LoadedWindow) -> Block) -> Paired {
    let sides: Vec<Vec<[Block; 2]>> = streams
        .iter()
        .map(|(a, b)| {
            a.windows
                .iter()
                .zip(&b.windows)
                .map(|(a, b)| [block(a), block(b)])
                .collect()
        })
        .collect();
    let count: u64 = sides.iter().flatten().map(|[a, _]| a.count).sum();
    let n = count.max(1) as f64;
    let mean = |side: usize| sides.iter().flatten().map(|pair| pair[side].total).sum::<f64>() / n + 0.0;
    let difference = |[a, b]: &[Block; 2]| Block {
        count: a.count,
        total: b.total - a.total,
    };
    let blocks: Vec<Vec<Block>> = sides
        .iter()
        .map(|stream| stream.iter().map(difference).collect())
        .collect();
    let uncertainty = Uncertainty::of(&blocks);
    // The mean of differences, not the difference of means, which loses digits.
    let difference = blocks.iter().flatten().map(|b| b.total).sum::<f64>() / n + 0.0;
    Paired {
        count,
        first: mean(0),
        second: mean(1),
        difference,
        t: uncertainty
            .clustered_standard_error
            .filter(|&error| error > 0.0)
            .map(|error| difference / error),
        uncertainty,
    }
}

fn paired_kl(a: &Loaded, b: &Loaded, streams: &[Pair<'_>]) -> Option<PairedKl> {
    let (x, y) = (a.kl_divergence.as_ref()?, b.kl_divergence.as_ref()?);
    let all_windows = || streams.iter().flat_map(|(a, b)| a.windows.iter().chain(&b.windows));
    let complete = all_windows().all(|w| w.kl_divergence.is_some());
    if !x.is(y) || !complete {
        return None;
    }
    let figure = |value: fn(&KlFigures) -> f64| {
        paired(streams, move |w| match &w.kl_divergence {
            Some(kl) => Block {
                count: kl.positions,
                total: value(kl) * kl.positions as f64,
            },
            None => Block::default(),
        })
    };
    Some(PairedKl {
        mean_kl: figure(|kl| kl.mean_kl),
        top1_agreement: figure(|kl| kl.top1_agreement),
    })
}

impl ReportComparison {
    /// Writes the comparison as a table.
    ///
    /// # Errors
    /// When `out` fails.
    pub fn write_table(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "first:  {}", printable(&self.first))?;
        writeln!(out, "second: {}", printable(&self.second))?;
        for Difference { field, first, second } in &self.differences {
            writeln!(out, "  {}", printable(&format!("{field}: {first} -> {second}")))?;
        }
        writeln!(out)?;
        if self.identical {
            writeln!(out, "every window has the same negative log-likelihood, bit for bit")?;
        } else {
            writeln!(
                out,
                "windows: {} better, {} worse, {} equal in the second",
                self.windows_better, self.windows_worse, self.windows_equal
            )?;
        }
        writeln!(out)?;
        let heads = ["tokens", "first", "second", "difference", "std. error", "t"];
        write!(out, "{:<24}", "mean_nll")?;
        for head in heads {
            write!(out, " {head:>13}")?;
        }
        writeln!(out)?;
        for (name, figures) in &self.domains {
            row(out, name, figures)?;
        }
        row(out, "overall", &self.mean_nll)?;
        writeln!(out)?;
        let ratio = |nats: f64| Some(nats.exp()).filter(|ratio| ratio.is_finite());
        let show = |ratio: Option<f64>| ratio.map_or("n/a".to_owned(), |ratio| significant(ratio, 8));
        write!(out, "perplexity ratio: {}", show(self.perplexity_ratio))?;
        if let Some([low, high]) = self.mean_nll.uncertainty.bootstrap_interval_95 {
            write!(
                out,
                ", 95 % interval {} to {} (windows resampled)",
                show(ratio(low)),
                show(ratio(high))
            )?;
        }
        writeln!(out)?;
        if let Some(kl) = &self.kl_divergence {
            writeln!(out)?;
            row(out, "KL from the reference", &kl.mean_kl)?;
            row(out, "top-1 agreement", &kl.top1_agreement)?;
        }
        if self.mean_nll.uncertainty.clusters == ClusterKind::Windows {
            writeln!(out, "note: a single stream, so standard errors are clustered by window")?;
        }
        Ok(())
    }
}

fn row(out: &mut impl Write, name: &str, paired: &Paired) -> io::Result<()> {
    let error = paired.uncertainty.clustered_standard_error;
    let error = error.map_or("n/a".into(), |error| exponent_form(error, 2));
    let t = paired.t.map_or("n/a".into(), |t| format!("{t:.2}"));
    let name = printable(name);
    let [first, second] = [paired.first, paired.second].map(|mean| column(mean, 13));
    let sign = if paired.difference < 0.0 { "" } else { "+" };
    let difference = format!("{sign}{}", column(paired.difference, 12));
    writeln!(
        out,
        "{name:<24} {:>13} {first:>13} {second:>13} {difference:>13} {error:>13} {t:>13}",
        paired.count
    )
}
