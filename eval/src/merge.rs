//! Joins the reports of all shards of a run into the report that one run would have given.
//!
//! Windows are put back in scoring order and summed as the evaluation sums them, so negative log-likelihoods agree bit for
//! bit. Order statistics of a comparison need every position, which reports do not hold: they are `null` in the result.
//! Times are the sums over shards.
//!
//! Shards belong together when protocol, settings and the identities of model, texts and reference agree. Paths may differ
//! from machine to machine, and so may the build, which a note then says; the result has those of shard 0.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;

use crate::aggregate::Aggregate;
use crate::evaluate::{KlResults, KlSource};
use crate::report::{
    Build, Denominators, DomainReport, KlReport, OverallReport, Report, ReportError, StreamReport, WindowReport,
    kl_report, rate,
};
use crate::statistics::{KlDetail, Sums, coverage_note};
use crate::uncertainty::{Block, Uncertainty};

/// Fields that may differ between shards without changing what was measured: where things lie, and settings of the machine.
const MAY_DIFFER: [&str; 12] = [
    "path",
    "source",
    "device",
    "devices",
    "device_name",
    "expert_residency",
    "expert_cache_bytes",
    "expert_stripe",
    "ngram_volume",
    "ngram_access",
    "ngram_ram_bytes",
    "ngram_hot_profile",
];
/// Most missing shards that a message names.
const MOST_NAMED: usize = 8;

/// Why reports cannot be joined.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// There is nothing to join.
    #[error("there is no report to merge")]
    Nothing,
    /// The runs were cut into different numbers of shards.
    #[error("{first:?} is shard {of_first} and {second:?} is shard {of_second}; they belong to different runs")]
    Counts {
        /// A report.
        first: PathBuf,
        /// Its share.
        of_first: String,
        /// Another report.
        second: PathBuf,
        /// Its share.
        of_second: String,
    },
    /// A shard occurs twice.
    #[error("{first:?} and {second:?} are both shard {shard}; every shard is needed once")]
    Twice {
        /// A report.
        first: PathBuf,
        /// Another report.
        second: PathBuf,
        /// Their share.
        shard: String,
    },
    /// Shards are missing.
    #[error("of the {count} shards these are missing: {}", named(.missing))]
    Missing {
        /// Number of shards.
        count: u64,
        /// The first of those that are missing, ascending.
        missing: Vec<u64>,
    },
    /// Two shards belong to different runs.
    #[error("`{field}` differs between {first:?} and {second:?}; they belong to different runs")]
    Differs {
        /// Path of the field.
        field: String,
        /// A report.
        first: PathBuf,
        /// Another report.
        second: PathBuf,
    },
    /// The windows of a stream do not add up.
    #[error("stream `{stream}`: window {window} is missing, doubled or in the wrong shard")]
    Windows {
        /// The stream.
        stream: String,
        /// The window.
        window: u64,
    },
    /// The number of scored tokens exceeds 64 bits.
    #[error("the number of scored tokens overflows")]
    Overflow,
    /// A report cannot be expressed.
    #[error(transparent)]
    Report(#[from] ReportError),
}

fn named(missing: &[u64]) -> String {
    let names: Vec<String> = missing.iter().take(MOST_NAMED).map(u64::to_string).collect();
    let more = if missing.len() > MOST_NAMED { ", ..." } else { "" };
    format!("{}{more}", names.join(", "))
}

/// Index and number of shards; a report that was not cut is the only one of its run.
fn shard(report: &Report) -> (u64, u64) {
    report.shard.as_ref().map_or((0, 1), |shard| (shard.index, shard.count))
}

/// Joins the reports of all shards, in any order, each with the file it was read from. A report that covers everything is
/// returned as it is.
///
/// # Errors
/// When the reports are not all shards of one run; the message names the files.
pub fn merge(mut files: Vec<(PathBuf, Report)>) -> Result<Report, MergeError> {
    files.sort_by_key(|(_, part)| shard(part));
    check_shards(&files)?;
    for (path, part) in &files[1..] {
        if let Some(field) = difference(&files[0].1, part)? {
            return Err(MergeError::Differs {
                field,
                first: files[0].0.clone(),
                second: path.clone(),
            });
        }
    }
    let mut parts: Vec<Report> = files.into_iter().map(|(_, part)| part).collect();
    if parts.len() == 1 {
        return Ok(parts.remove(0));
    }

    let mut joined = Joined::default();
    let mut number = 0;
    let streams = (0..parts[0].streams.len())
        .map(|s| {
            let of_shards: Vec<&StreamReport> = parts.iter().map(|part| &part.streams[s]).collect();
            joined.stream(&of_shards, &mut number)
        })
        .collect::<Result<Vec<_>, _>>()?;
    let uncertainty = uncertainty(&streams, |w| Block {
        count: w.figures.scored_tokens,
        total: w.figures.total_nll,
    });
    let kl_divergence = parts[0]
        .kl_divergence
        .as_ref()
        .map(|kl| joined_kl(kl, head_error(&parts), &streams, &joined));
    let mut notes: Vec<String> = Vec::new();
    // What a shard says of its own coverage is said anew of the whole.
    let of_shard = |part: &Report, note: &String| {
        part.kl_divergence
            .as_ref()
            .and_then(|kl| coverage_note(&kl.detail.figures, kl.reference_top_tokens))
            .is_some_and(|own| own == *note)
    };
    for part in &parts {
        for note in part.notes.iter().filter(|note| !of_shard(part, note)) {
            if !notes.contains(note) {
                notes.push(note.clone());
            }
        }
    }
    if let Some(kl) = &kl_divergence {
        notes.extend(coverage_note(&kl.detail.figures, kl.reference_top_tokens));
    }
    notes.extend(build_note(&parts));
    let mut timing = parts[0].timing.clone();
    let seconds = |value: fn(&Report) -> f64| parts.iter().map(value).sum::<f64>();
    timing.load_seconds = seconds(|r| r.timing.load_seconds);
    timing.read_and_tokenize_seconds = seconds(|r| r.timing.read_and_tokenize_seconds);
    timing.score_seconds = seconds(|r| r.timing.score_seconds);
    timing.total_seconds = seconds(|r| r.timing.total_seconds);
    timing.scored_tokens_per_second = rate(joined.overall.scored_tokens, timing.score_seconds);
    let domain = |(name, sum): (&String, &Aggregate)| {
        let of_domain = streams.iter().filter(|s| s.domain == *name);
        let kl = kl_divergence
            .is_some()
            .then(|| KlDetail::joined(of_domain.filter_map(|s| s.kl_divergence.as_ref())));
        DomainReport::new(name, sum, &streams, kl)
    };
    let first = parts[0].clone();
    let merged = Report {
        denominators: Denominators::new(first.denominators.softmax_rows, &streams),
        timing,
        domains: joined.domains.iter().map(domain).collect(),
        overall: OverallReport::new(&joined.overall, &streams, uncertainty),
        streams,
        kl_divergence,
        shard: None,
        notes,
        ..first
    };
    merged.check().map_err(ReportError::from)?;
    Ok(merged)
}

/// Checks that sorted reports are every shard of one count, each once.
fn check_shards(files: &[(PathBuf, Report)]) -> Result<(), MergeError> {
    let Some((_, first)) = files.first() else {
        return Err(MergeError::Nothing);
    };
    let named = |(index, count): (u64, u64)| format!("{index}/{count}");
    for ((first, a), (second, b)) in files.iter().zip(&files[1..]) {
        let (first, second) = (first.clone(), second.clone());
        let (a, b) = (shard(a), shard(b));
        if a.1 != b.1 {
            let (of_first, of_second) = (named(a), named(b));
            return Err(MergeError::Counts {
                first,
                of_first,
                second,
                of_second,
            });
        }
        if a == b {
            let shard = named(a);
            return Err(MergeError::Twice { first, second, shard });
        }
    }
    let (_, count) = shard(first);
    let mut found = files.iter().map(|(_, part)| shard(part).0).peekable();
    let absent = (0..count).filter(|index| found.next_if_eq(index).is_none());
    let missing: Vec<u64> = absent.take(MOST_NAMED + 1).collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(MergeError::Missing { count, missing }),
    }
}

/// Said when the shards were scored by different builds.
fn build_note(parts: &[Report]) -> Option<String> {
    let describe = |part: &Report| {
        let Build {
            name,
            version,
            commit,
            target,
            features,
        } = &part.build;
        let known = [commit, target].into_iter().flatten().cloned();
        let details: Vec<String> = known.chain(features.iter().cloned()).collect();
        format!("{name} {version} ({})", details.join(", "))
    };
    let mut builds: Vec<String> = parts.iter().map(describe).collect();
    builds.sort_unstable();
    builds.dedup();
    (builds.len() > 1).then(|| format!("the shards were scored by different builds: {}", builds.join("; ")))
}

/// The first field of the circumstances that differs.
fn difference(a: &Report, b: &Report) -> Result<Option<String>, MergeError> {
    let json = |report: &Report| serde_json::to_value(report).map_err(ReportError::from);
    let (a, b) = (json(a)?, json(b)?);
    for part in ["schema_version", "metric", "artifact", "corpus", "execution"] {
        if let Some(field) = first_difference(part, &a[part], &b[part]) {
            return Ok(Some(field));
        }
    }
    let rows = |report: &Value| report["denominators"]["softmax_rows"].clone();
    if rows(&a) != rows(&b) {
        return Ok(Some("denominators.softmax_rows".into()));
    }
    let kl = [
        "reference_sha256",
        "reference_kind",
        "reference_top_tokens",
        "reference_provenance",
    ];
    if let Some(field) = kl
        .iter()
        .find(|&&field| a["kl_divergence"][field] != b["kl_divergence"][field])
    {
        return Ok(Some(format!("kl_divergence.{field}")));
    }
    let streams = |report: &Value| report["streams"].as_array().cloned().unwrap_or_default();
    let (a, b) = (streams(&a), streams(&b));
    let identity = ["id", "domain", "sha256", "tokens_sha256", "input_tokens"];
    if a.len() != b.len() {
        return Ok(Some("streams".into()));
    }
    let differs = |(i, (a, b)): (usize, (&Value, &Value))| {
        identity
            .iter()
            .find(|&&field| a[field] != b[field])
            .map(|field| format!("streams[{i}].{field}"))
    };
    Ok(a.iter().zip(&b).enumerate().find_map(differs))
}

/// Path of the first value below `path` that differs and may not.
fn first_difference(path: &str, a: &Value, b: &Value) -> Option<String> {
    let (Value::Object(x), Value::Object(y)) = (a, b) else {
        return (a != b).then(|| path.to_owned());
    };
    let fields = x.keys().chain(y.keys());
    fields
        .filter(|field| !MAY_DIFFER.contains(&field.as_str()))
        .find_map(|field| first_difference(&format!("{path}.{field}"), &a[field.as_str()], &b[field.as_str()]))
}

/// Sums in scoring order.
#[derive(Default)]
struct Joined {
    domains: BTreeMap<String, Aggregate>,
    overall: Aggregate,
}

impl Joined {
    /// One stream from its shards, `of_shards[i]` being shard `i`; `number` counts windows over all streams.
    fn stream(&mut self, of_shards: &[&StreamReport], number: &mut u64) -> Result<StreamReport, MergeError> {
        let first = of_shards[0];
        let mut windows: Vec<(u64, WindowReport)> = (0u64..)
            .zip(of_shards)
            .flat_map(|(shard, stream)| stream.windows.iter().map(move |window| (shard, window.clone())))
            .collect();
        windows.sort_by_key(|(_, window)| window.index);
        let mut sum = Aggregate::default();
        let domain = self.domains.entry(first.domain.clone()).or_default();
        let mut target = None;
        for (index, (shard, window)) in (0u64..).zip(&mut windows) {
            let in_place = window.index == index && *number % of_shards.len() as u64 == *shard;
            // Sliding windows continue where the last one ended; back-to-back windows begin later.
            if !in_place || target.is_some_and(|end| window.target_begin < end) {
                return Err(MergeError::Windows {
                    stream: first.id.clone(),
                    window: index,
                });
            }
            target = Some(window.target_end);
            *number += 1;
            let part = window.figures.aggregate();
            sum = sum.plus(part).ok_or(MergeError::Overflow)?;
            *domain = domain.plus(part).ok_or(MergeError::Overflow)?;
            self.overall = self.overall.plus(part).ok_or(MergeError::Overflow)?;
            window.running_mean_nll = self.overall.mean_nll().unwrap_or(0.0);
        }
        let details = of_shards.iter().filter_map(|stream| stream.kl_divergence.as_ref());
        let compared = windows.iter().any(|(_, window)| window.kl_divergence.is_some());
        let mut stream = StreamReport {
            figures: (&sum).into(),
            unscored_tokens: first.input_tokens.saturating_sub(sum.scored_tokens),
            seconds: of_shards.iter().map(|s| s.seconds).sum(),
            kl_divergence: compared.then(|| KlDetail::joined(details)),
            windows: windows.into_iter().map(|(_, window)| window).collect(),
            ..first.clone()
        };
        stream.measure_text(&sum);
        Ok(stream)
    }
}

/// The largest of the shards.
fn head_error(parts: &[Report]) -> Option<f64> {
    let errors = parts
        .iter()
        .filter_map(|part| part.kl_divergence.as_ref()?.reference_head_error);
    errors.reduce(f64::max)
}

fn uncertainty(streams: &[StreamReport], block: impl Fn(&WindowReport) -> Block) -> Uncertainty {
    let blocks: Vec<Vec<Block>> = streams.iter().map(|s| s.windows.iter().map(&block).collect()).collect();
    Uncertainty::of(&blocks)
}

fn joined_kl(kl: &KlReport, head_error: Option<f64>, streams: &[StreamReport], joined: &Joined) -> KlReport {
    let part = |total: fn(&Sums) -> f64| {
        uncertainty(streams, move |window| {
            let sums = window.kl_divergence.as_ref().map(Sums::of_figures).unwrap_or_default();
            Block {
                count: sums.positions(),
                total: total(&sums),
            }
        })
    };
    let results = KlResults {
        source: KlSource {
            path: PathBuf::from(&kl.reference),
            sha256: kl.reference_sha256.clone(),
            kind: kl.reference_kind,
            top_tokens: kl.reference_top_tokens,
            head_error,
            provenance: kl.reference_provenance.clone(),
        },
        overall: KlDetail::joined(streams.iter().filter_map(|s| s.kl_divergence.as_ref())),
        domains: BTreeMap::new(),
        mean_kl: part(Sums::total_kl),
        mean_delta_nll: part(Sums::total_delta_nll),
    };
    kl_report(&results, &joined.overall)
}
