//! Statistics of a comparison over sets of positions.
//!
//! Over `n` positions: means, `kl_standard_deviation = √max(Σkl²/n - mean², 0)` (of the population, no standard error),
//! standard errors of the means (positions taken as independent; `√(a(1-a)/(n-1))` for an agreement `a`), quantiles
//! as the element `⌊q·(n-1)⌋` in ascending order, and the same sums by context length and by the reference's confidence.

mod figures;

use std::collections::BTreeMap;

use crate::divergence::Position;
use crate::humanize::exponent_form;
use crate::uncertainty::quantile;

pub use figures::{ConfidenceBucket, ContextBucket, DeltaP, KlDetail, KlErrors, KlFigures, KlQuantiles};

/// Width of the first context bucket; each later one doubles.
const FIRST_BUCKET: u64 = 1024;
/// Edges of the confidence buckets; the last is closed above.
const CONFIDENCE_EDGES: [f64; 7] = [0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0];
/// Below this mean covered mass the divergence says little about the rest of the distribution.
pub const LOW_COVERAGE: f64 = 0.9;

/// Sums over positions.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sums {
    positions: u64,
    kl: f64,
    kl_squares: f64,
    reverse_kl: f64,
    /// Positions with a divergence in the other direction.
    reversed: u64,
    matches: u64,
    delta_nll: f64,
    delta_nll_squares: f64,
    mass: f64,
}

impl Sums {
    /// Adds one position.
    pub fn add(&mut self, position: &Position) {
        self.positions += 1;
        self.kl += position.kl;
        self.kl_squares += position.kl * position.kl;
        self.reverse_kl += position.reverse_kl.unwrap_or(0.0);
        self.reversed += u64::from(position.reverse_kl.is_some());
        self.matches += u64::from(position.top1_match);
        self.delta_nll += position.delta_nll;
        self.delta_nll_squares += position.delta_nll * position.delta_nll;
        self.mass += position.reference_top_mass;
    }

    /// The sums behind figures, up to rounding.
    pub fn of_figures(figures: &KlFigures) -> Self {
        let n = figures.positions as f64;
        let squares = |mean: f64, deviation: f64| (mean * mean + deviation * deviation) * n;
        Self {
            positions: figures.positions,
            kl: figures.mean_kl * n,
            kl_squares: squares(figures.mean_kl, figures.kl_standard_deviation),
            reverse_kl: figures.mean_reverse_kl.unwrap_or(0.0) * n,
            reversed: figures.mean_reverse_kl.map_or(0, |_| figures.positions),
            matches: (figures.top1_agreement * n).round() as u64,
            delta_nll: figures.mean_delta_nll * n,
            delta_nll_squares: squares(figures.mean_delta_nll, figures.delta_nll_standard_deviation),
            mass: figures.mean_reference_top_mass * n,
        }
    }

    /// Adds another set.
    pub fn merge(&mut self, other: &Self) {
        self.positions += other.positions;
        self.kl += other.kl;
        self.kl_squares += other.kl_squares;
        self.reverse_kl += other.reverse_kl;
        self.reversed += other.reversed;
        self.matches += other.matches;
        self.delta_nll += other.delta_nll;
        self.delta_nll_squares += other.delta_nll_squares;
        self.mass += other.mass;
    }

    /// Positions.
    pub fn positions(&self) -> u64 {
        self.positions
    }

    /// `Σ kl`.
    pub fn total_kl(&self) -> f64 {
        self.kl
    }

    /// `Σ delta_nll`.
    pub fn total_delta_nll(&self) -> f64 {
        self.delta_nll
    }

    /// The figures; all zero for an empty set.
    pub fn figures(&self) -> KlFigures {
        let n = self.positions.max(1) as f64;
        let deviation = |sum: f64, squares: f64| (squares / n - (sum / n) * (sum / n)).max(0.0).sqrt();
        KlFigures {
            positions: self.positions,
            mean_kl: self.kl / n,
            mean_reverse_kl: (self.reversed > 0 && self.reversed == self.positions).then(|| self.reverse_kl / n),
            kl_standard_deviation: deviation(self.kl, self.kl_squares),
            delta_nll_standard_deviation: deviation(self.delta_nll, self.delta_nll_squares),
            top1_agreement: self.matches as f64 / n,
            mean_delta_nll: self.delta_nll / n,
            mean_reference_top_mass: self.mass / n,
        }
    }

    fn errors(&self) -> Option<KlErrors> {
        let n = self.positions as f64;
        (self.positions >= 2).then(|| {
            let of_mean = |sum: f64, squares: f64| ((squares - sum * sum / n).max(0.0) / (n - 1.0) / n).sqrt();
            let agreement = self.matches as f64 / n;
            KlErrors {
                mean_kl: of_mean(self.kl, self.kl_squares),
                top1_agreement: (agreement * (1.0 - agreement) / (n - 1.0)).sqrt(),
                mean_delta_nll: of_mean(self.delta_nll, self.delta_nll_squares),
            }
        })
    }
}

impl KlDetail {
    /// Several details taken together, without order statistics.
    pub fn joined<'a>(parts: impl Iterator<Item = &'a Self>) -> Self {
        let mut sums = Sums::default();
        let mut by_context: BTreeMap<u64, (ContextBucket, Sums)> = BTreeMap::new();
        // Probabilities are ordered as the integers of their bits are.
        let mut by_confidence: BTreeMap<u64, (ConfidenceBucket, Sums)> = BTreeMap::new();
        for part in parts {
            sums.merge(&Sums::of_figures(&part.figures));
            for bucket in &part.by_context {
                let entry = by_context
                    .entry(bucket.context_begin)
                    .or_insert((*bucket, Sums::default()));
                entry.1.merge(&Sums::of_figures(&bucket.figures));
            }
            for bucket in &part.by_confidence {
                let key = bucket.confidence_begin.to_bits();
                let entry = by_confidence.entry(key).or_insert((*bucket, Sums::default()));
                entry.1.merge(&Sums::of_figures(&bucket.figures));
            }
        }
        Self {
            figures: sums.figures(),
            quantiles: KlQuantiles::default(),
            reverse_quantiles: None,
            standard_errors: sums.errors(),
            delta_p: None,
            by_context: by_context
                .into_values()
                .map(|(bucket, sums)| ContextBucket {
                    figures: sums.figures(),
                    ..bucket
                })
                .collect(),
            by_confidence: by_confidence
                .into_values()
                .map(|(bucket, sums)| ConfidenceBucket {
                    figures: sums.figures(),
                    ..bucket
                })
                .collect(),
        }
    }
}

/// Collects the positions of a stream; 16 bytes each, 24 with both directions, for exact quantiles.
#[derive(Debug, Clone, Default)]
pub struct Collector {
    sums: Sums,
    kl: Vec<f64>,
    reverse_kl: Vec<f64>,
    delta_p: Vec<f64>,
    by_context: Vec<Sums>,
    by_confidence: [Sums; CONFIDENCE_EDGES.len() - 1],
}

impl Collector {
    /// Adds a position with `context` tokens before the predicted one.
    pub fn add(&mut self, context: u64, position: &Position) {
        self.sums.add(position);
        self.kl.push(position.kl);
        self.reverse_kl.extend(position.reverse_kl);
        self.delta_p.push(position.delta_p);
        let bucket = context_bucket(context);
        if self.by_context.len() <= bucket {
            self.by_context.resize(bucket + 1, Sums::default());
        }
        self.by_context[bucket].add(position);
        self.by_confidence[confidence_bucket(position.reference_top_probability)].add(position);
    }

    /// The sums so far.
    pub fn sums(&self) -> &Sums {
        &self.sums
    }

    /// The statistics of one or several collectors taken together.
    pub fn detail<'a>(parts: impl Iterator<Item = &'a Self> + Clone) -> KlDetail {
        let mut sums = Sums::default();
        let mut by_context: Vec<Sums> = Vec::new();
        let mut by_confidence = [Sums::default(); CONFIDENCE_EDGES.len() - 1];
        for part in parts.clone() {
            sums.merge(&part.sums);
            by_context.resize(by_context.len().max(part.by_context.len()), Sums::default());
            by_context
                .iter_mut()
                .zip(&part.by_context)
                .for_each(|(sum, more)| sum.merge(more));
            by_confidence
                .iter_mut()
                .zip(&part.by_confidence)
                .for_each(|(sum, more)| sum.merge(more));
        }
        let ascending = |values: fn(&Self) -> &[f64]| {
            let mut all: Vec<f64> = parts.clone().flat_map(values).copied().collect();
            all.sort_unstable_by(f64::total_cmp);
            all
        };
        let kl = ascending(|part| &part.kl);
        let reverse_kl = ascending(|part| &part.reverse_kl);
        let filled = |(_, sums): &(usize, Sums)| sums.positions > 0;
        KlDetail {
            figures: sums.figures(),
            standard_errors: sums.errors(),
            quantiles: kl_quantiles(&kl),
            reverse_quantiles: (!reverse_kl.is_empty()).then(|| kl_quantiles(&reverse_kl)),
            delta_p: Some(delta_p(&ascending(|part| &part.delta_p))),
            by_context: by_context
                .into_iter()
                .enumerate()
                .filter(filled)
                .map(|(bucket, sums)| {
                    let (context_begin, context_end) = context_range(bucket);
                    ContextBucket {
                        context_begin,
                        context_end,
                        figures: sums.figures(),
                    }
                })
                .collect(),
            by_confidence: by_confidence
                .into_iter()
                .enumerate()
                .filter(filled)
                .map(|(bucket, sums)| ConfidenceBucket {
                    confidence_begin: CONFIDENCE_EDGES[bucket],
                    confidence_end: CONFIDENCE_EDGES[bucket + 1],
                    figures: sums.figures(),
                })
                .collect(),
        }
    }
}

/// Bucket 0 is `[0, 1024)`, bucket `b` is `[1024·2^(b-1), 1024·2^b)`.
fn context_bucket(context: u64) -> usize {
    (context / FIRST_BUCKET)
        .checked_ilog2()
        .map_or(0, |log| log as usize + 1)
}

fn context_range(bucket: usize) -> (u64, u64) {
    let begin = if bucket == 0 { 0 } else { FIRST_BUCKET << (bucket - 1) };
    (begin, FIRST_BUCKET << bucket)
}

fn confidence_bucket(probability: f64) -> usize {
    let edges = &CONFIDENCE_EDGES[1..CONFIDENCE_EDGES.len() - 1];
    edges.iter().take_while(|&&edge| probability >= edge).count()
}

fn quantile_or_zero(ascending: &[f64], q: f64) -> f64 {
    if ascending.is_empty() {
        0.0
    } else {
        quantile(ascending, q)
    }
}

fn kl_quantiles(ascending: &[f64]) -> KlQuantiles {
    let at = |q| Some(quantile_or_zero(ascending, q));
    KlQuantiles {
        min_kl: at(0.0),
        p01_kl: at(0.01),
        p05_kl: at(0.05),
        p10_kl: at(0.1),
        median_kl: at(0.5),
        p90_kl: at(0.9),
        p95_kl: at(0.95),
        p99_kl: at(0.99),
        p999_kl: at(0.999),
        max_kl: at(1.0),
    }
}

fn delta_p(ascending: &[f64]) -> DeltaP {
    let n = ascending.len().max(1) as f64;
    let at = |q| quantile_or_zero(ascending, q);
    DeltaP {
        mean: ascending.iter().sum::<f64>() / n + 0.0,
        rms: (ascending.iter().map(|d| d * d).sum::<f64>() / n + 0.0).sqrt(),
        min: at(0.0),
        p01: at(0.01),
        p05: at(0.05),
        median: at(0.5),
        p95: at(0.95),
        p99: at(0.99),
        max: at(1.0),
    }
}

/// `0-1K 2.41e-02 1K-2K 2.55e-02`
pub fn by_context_line(buckets: &[ContextBucket]) -> String {
    let bound = |tokens: u64| match tokens / FIRST_BUCKET {
        0 => "0".to_owned(),
        thousands => format!("{thousands}K"),
    };
    let label = |b: &ContextBucket| {
        format!(
            "{}-{} {}",
            bound(b.context_begin),
            bound(b.context_end),
            exponent_form(b.figures.mean_kl, 2)
        )
    };
    buckets.iter().map(label).collect::<Vec<_>>().join(" ")
}

/// A sentence for readers when the compared tokens cover little of the reference's probability.
pub fn coverage_note(figures: &KlFigures, reference_top_tokens: Option<u32>) -> Option<String> {
    let tokens = reference_top_tokens?;
    (figures.positions > 0 && figures.mean_reference_top_mass < LOW_COVERAGE).then(|| {
        format!(
            "the reference's {tokens} tokens cover only {:.1} % of its probability on average, so the divergence is a \
             weak lower bound: a small value does not show that the distributions agree",
            figures.mean_reference_top_mass * 100.0
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(kl: f64) -> Position {
        Position {
            kl,
            reverse_kl: None,
            reference_top_mass: 0.5,
            reference_top_probability: 0.3,
            top1_match: kl < 1.0,
            delta_nll: kl / 2.0,
            delta_p: -kl / 4.0,
        }
    }

    const TEN: [f64; 10] = [2.56, 0.0, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28];

    fn collect(values: &[f64]) -> Collector {
        let mut collector = Collector::default();
        values.iter().for_each(|&kl| collector.add(1, &position(kl)));
        collector
    }

    #[test]
    fn ten_values_by_hand() {
        let collector = collect(&TEN);
        let detail = Collector::detail([&collector].into_iter());
        let q = detail.quantiles;
        let points = [q.min_kl, q.p10_kl, q.median_kl, q.p90_kl, q.p99_kl, q.p999_kl, q.max_kl];
        assert_eq!(points, [0.0, 0.0, 0.08, 1.28, 1.28, 1.28, 2.56].map(Some));
        let f = detail.figures;
        assert_eq!(
            (f.positions, f.top1_agreement, f.mean_reference_top_mass),
            (10, 0.8, 0.5)
        );
        // Σ = 5.11, Σ² = 8.738
        let (sum, squares): (f64, f64) = (5.11, 8.7381);
        assert!((f.mean_kl - 0.511).abs() < 1e-12 && (f.mean_delta_nll - 0.2555).abs() < 1e-12);
        assert!((f.kl_standard_deviation - (squares / 10.0 - 0.261_121f64).sqrt()).abs() < 1e-12);
        let e = detail.standard_errors.unwrap();
        assert!((e.mean_kl - ((squares - sum * sum / 10.0) / 90.0).sqrt()).abs() < 1e-12);
        assert!((e.top1_agreement - (0.16f64 / 9.0).sqrt()).abs() < 1e-12);
        assert!((e.mean_delta_nll - e.mean_kl / 2.0).abs() < 1e-12);
        let p = detail.delta_p.unwrap();
        assert_eq!((p.min, p.max, p.p05), (-0.64, 0.0, -0.64));
        assert!((p.rms - (squares / 160.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn joined_sets_equal_the_whole() {
        let (left, right) = TEN.split_at(3);
        let (left, right, whole) = (collect(left), collect(right), collect(&TEN));
        let joined = Collector::detail([&left, &right].into_iter());
        let whole = Collector::detail([&whole].into_iter());
        assert_eq!(joined.quantiles, whole.quantiles);
        assert!((joined.figures.mean_kl - whole.figures.mean_kl).abs() < 1e-15);
        assert_eq!(joined.by_context.len(), 1);
    }

    #[test]
    fn details_are_joined_by_their_sums() {
        let mut parts = [Collector::default(), Collector::default()];
        let mut whole = Collector::default();
        for (i, kl) in TEN.into_iter().enumerate() {
            let context = if i % 3 == 0 { 5 } else { 5000 };
            let position = Position {
                reference_top_probability: kl / 2.6,
                ..position(kl)
            };
            parts[usize::from(i > 6)].add(context, &position);
            whole.add(context, &position);
        }
        let [a, b] = parts.each_ref().map(|part| Collector::detail([part].into_iter()));
        let (joined, whole) = (
            KlDetail::joined([&b, &a].into_iter()),
            Collector::detail([&whole].into_iter()),
        );
        let same = |a: &KlFigures, b: &KlFigures| {
            assert_eq!((a.positions, a.top1_agreement), (b.positions, b.top1_agreement));
            let numbers = |f: &KlFigures| {
                [
                    f.mean_kl,
                    f.kl_standard_deviation,
                    f.mean_delta_nll,
                    f.delta_nll_standard_deviation,
                ]
            };
            // A deviation of zero comes back as the root of a rounding error.
            numbers(a)
                .iter()
                .zip(numbers(b))
                .for_each(|(a, b)| assert!((a - b).abs() < 1e-7, "{a} {b}"));
        };
        same(&joined.figures, &whole.figures);
        assert_eq!(
            (joined.by_context.len(), joined.by_confidence.len()),
            (2, whole.by_confidence.len())
        );
        joined
            .by_context
            .iter()
            .zip(&whole.by_context)
            .for_each(|(a, b)| same(&a.figures, &b.figures));
        joined
            .by_confidence
            .iter()
            .zip(&whole.by_confidence)
            .for_each(|(a, b)| same(&a.figures, &b.figures));
        let (a, b) = (joined.standard_errors.unwrap(), whole.standard_errors.unwrap());
        assert!((a.mean_kl - b.mean_kl).abs() < 1e-12 && (a.mean_delta_nll - b.mean_delta_nll).abs() < 1e-12);
        assert_eq!((joined.quantiles.max_kl, joined.delta_p), (None, None));
    }

    #[test]
    fn an_empty_set_gives_zeros() {
        let detail = Collector::detail([].into_iter());
        assert_eq!(
            (
                detail.figures.mean_kl,
                detail.quantiles.max_kl,
                detail.delta_p.unwrap().rms
            ),
            (0.0, Some(0.0), 0.0)
        );
        assert!(detail.standard_errors.is_none() && detail.by_context.is_empty());
        assert_eq!(coverage_note(&detail.figures, Some(32)), None);
    }

    #[test]
    fn context_buckets_double_and_own_their_lower_bound() {
        let cases = [
            (0, 0),
            (1, 0),
            (1023, 0),
            (1024, 1),
            (2047, 1),
            (2048, 2),
            (4095, 2),
            (4096, 3),
            (65_536, 7),
        ];
        for (context, bucket) in cases {
            assert_eq!(context_bucket(context), bucket, "{context}");
        }
        assert_eq!([0, 1, 2].map(context_range), [(0, 1024), (1024, 2048), (2048, 4096)]);
        let mut collector = Collector::default();
        for context in [5, 1024, 4000, 5000] {
            collector.add(context, &position(context as f64 / 1e5));
        }
        let detail = Collector::detail([&collector].into_iter());
        assert_eq!(
            by_context_line(&detail.by_context),
            "0-1K 5.00e-05 1K-2K 1.02e-02 2K-4K 4.00e-02 4K-8K 5.00e-02"
        );
    }

    #[test]
    fn confidence_buckets_cover_zero_to_one() {
        let cases = [
            (0.0, 0),
            (0.249, 0),
            (0.25, 1),
            (0.5, 2),
            (0.89, 3),
            (0.9, 4),
            (0.99, 5),
            (1.0, 5),
        ];
        for (probability, bucket) in cases {
            assert_eq!(confidence_bucket(probability), bucket, "{probability}");
        }
    }

    #[test]
    fn little_coverage_is_said_in_words() {
        let figures = Collector::detail([&collect(&TEN)].into_iter()).figures;
        let note = coverage_note(&figures, Some(32)).unwrap();
        assert!(
            note.starts_with("the reference's 32 tokens cover only 50.0 % of its probability"),
            "{note}"
        );
        assert_eq!(
            coverage_note(
                &KlFigures {
                    mean_reference_top_mass: 0.95,
                    ..figures
                },
                Some(32)
            ),
            None
        );
        assert_eq!(coverage_note(&figures, None), None);
    }
}
