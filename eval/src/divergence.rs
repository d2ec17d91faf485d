//! How far one next-token distribution lies from another, in nats: `KL(reference ‖ run)`, and over whole rows the reverse too.
//!
//! With the reference's k most probable tokens (log-probabilities `r_j`), this run's log-probabilities `e_j` of the same
//! tokens, and everything else merged into one bucket:
//!
//! ```text
//! R = Σ exp(r_j), E = Σ exp(e_j)
//! KL = Σ exp(r_j)·(r_j - e_j) + (1 - R)·(ln(1 - R) - ln max(1 - E, floor))     second term only if R < 1
//! ```
//!
//! Merging tokens can only lower a KL divergence, so this is a lower bound of the divergence over the whole vocabulary. The
//! floor keeps a bucket that this run leaves empty finite. Nothing is clamped: rounding may leave values like -1e-9.

/// Smallest probability of the merged bucket.
const BUCKET_FLOOR: f64 = 1e-12;
/// Log-probability from which on a logit base tells tokens apart: `-16.f` in `llama-perplexity`'s comparison.
pub(crate) const BASE_FLOOR: f32 = -16.0;

/// One scored position of a comparison.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Position {
    /// `KL(reference ‖ run)`.
    pub kl: f64,
    /// `KL(run ‖ reference)`; `None` where the reference holds some tokens only.
    pub reverse_kl: Option<f64>,
    /// Probability that the reference gives to the compared tokens, at most 1.
    pub reference_top_mass: f64,
    /// Probability of the reference's most probable token.
    pub reference_top_probability: f64,
    /// Whether both have the same most probable token.
    pub top1_match: bool,
    /// The run's negative log-likelihood of the target minus the reference's; positive is worse.
    pub delta_nll: f64,
    /// The run's probability of the target minus the reference's.
    pub delta_p: f64,
}

impl Position {
    /// From the targets' log-probabilities, the compared tokens' and whether the first tokens agree. The reference's most
    /// probable token comes first.
    pub fn of_top_tokens(target: [f32; 2], top1_match: bool, reference: &[f32], run: &[f32]) -> Self {
        let (kl, mass) = top_token_divergence(reference, run);
        let first = reference.first().map_or(0.0, |&r| f64::from(r).exp());
        Self::new(target, top1_match, kl, mass, first)
    }

    /// From whole rows.
    pub fn of_rows(target: [f32; 2], top1_match: bool, reference: &[f32], run: &[f32]) -> Self {
        let first = reference.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let kl = row_divergence(reference, run);
        Self {
            reverse_kl: Some(row_divergence(run, reference)),
            ..Self::new(target, top1_match, kl, 1.0, f64::from(first).exp())
        }
    }

    /// From a whole row and one of a logit base, whose codes end 16 nats below the most probable token. As in
    /// `llama-perplexity`, tokens at -16 or below take no part; there is no reverse divergence, which would live on them.
    pub fn of_base_row(target: [f32; 2], top1_match: bool, base: &[f32], run: &[f32]) -> Self {
        let first = base.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let told = |&(&b, _): &(&f32, &f32)| b > BASE_FLOOR;
        let kl = divergence(base.iter().zip(run).filter(told));
        let mass = base
            .iter()
            .filter(|&&b| b > BASE_FLOOR)
            .map(|&b| f64::from(b).exp())
            .sum();
        Self::new(target, top1_match, kl, mass, f64::from(first).exp())
    }

    fn new([reference, run]: [f32; 2], top1_match: bool, kl: f64, mass: f64, first: f64) -> Self {
        let (reference, run) = (f64::from(reference), f64::from(run));
        Self {
            kl,
            reverse_kl: None,
            reference_top_mass: mass.min(1.0),
            reference_top_probability: first.min(1.0),
            top1_match,
            delta_nll: reference - run,
            delta_p: run.exp() - reference.exp(),
        }
    }
}

/// `(KL, R)` over the compared tokens and the bucket of all others.
pub fn top_token_divergence(reference: &[f32], run: &[f32]) -> (f64, f64) {
    let (mut kl, mut reference_mass, mut run_mass) = (0.0, 0.0, 0.0);
    for (&r, &e) in reference.iter().zip(run) {
        let (r, e) = (f64::from(r), f64::from(e));
        let p = r.exp();
        reference_mass += p;
        run_mass += e.exp();
        kl += p * (r - e);
    }
    let rest = 1.0 - reference_mass;
    if rest > 0.0 {
        // A bucket below the floor on the reference's side is its own floor, so that equal distributions give exactly 0.
        let floor = BUCKET_FLOOR.min(rest);
        kl += rest * (rest.ln() - (1.0 - run_mass).max(floor).ln());
    }
    (kl, reference_mass)
}

/// `Σ p·(ln p - ln q)` over whole rows; tokens of no probability in the reference contribute nothing.
pub fn row_divergence(reference: &[f32], run: &[f32]) -> f64 {
    divergence(reference.iter().zip(run))
}

fn divergence<'a>(pairs: impl Iterator<Item = (&'a f32, &'a f32)>) -> f64 {
    let term = |(&r, &e): (&f32, &f32)| {
        let (r, e) = (f64::from(r), f64::from(e));
        if r == f64::NEG_INFINITY { 0.0 } else { r.exp() * (r - e) }
    };
    pairs.map(term).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn logs(probabilities: &[f64]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln() as f32).collect()
    }

    #[test]
    fn two_tokens_and_a_bucket_by_hand() {
        // 0.6 ln 1.2 + 0 + 0.1 ln 0.5 = 0.109393 - 0.069315
        let (kl, mass) = top_token_divergence(&logs(&[0.6, 0.3]), &logs(&[0.5, 0.3]));
        assert!((kl - 0.040_078_2).abs() < 1e-6, "{kl}");
        assert!((mass - 0.9).abs() < 1e-6);
        // The bucket hides (0.07, 0.03) against (0.05, 0.15): 0.07 ln 1.4 + 0.03 ln 0.2 instead of 0.1 ln 0.5.
        let full = row_divergence(&logs(&[0.6, 0.3, 0.07, 0.03]), &logs(&[0.5, 0.3, 0.05, 0.15]));
        assert!((full - 0.084_662_9).abs() < 1e-6, "{full}");
    }

    #[test]
    fn a_covered_distribution_has_no_bucket() {
        // 0.5 ln 2 + 0.5 ln (2/3) over tokens that are everything in the reference.
        let (kl, mass) = top_token_divergence(&[-std::f32::consts::LN_2; 2], &logs(&[0.25, 0.75]));
        assert!((kl - 0.143_841_04).abs() < 1e-6, "{kl}");
        assert!((mass - 1.0).abs() < 1e-6);
    }

    #[test]
    fn an_empty_bucket_of_the_run_stays_finite() {
        // 0.5 ln 0.5 + 0.5 (ln 0.5 - ln 1e-12)
        let (kl, _) = top_token_divergence(&logs(&[0.5]), &[0.0]);
        let half = 0.5f64.ln();
        assert!((kl - (0.5 * half + 0.5 * (half - 1e-12f64.ln()))).abs() < 1e-6, "{kl}");
    }

    #[test]
    fn tokens_at_the_floor_of_a_base_take_no_part() {
        // 0.7 ln(0.7 / 0.6) + 0.3 ln(0.3 / 0.4); codes at and below -16 stand for nothing.
        let base = [logs(&[0.7, 0.3]), vec![-16.0, -16.7]].concat();
        let run = [logs(&[0.6, 0.4]), vec![-20.0, -40.0]].concat();
        let position = Position::of_base_row([base[0], run[0]], true, &base, &run);
        assert!((position.kl - 0.021_600_86).abs() < 1e-7, "{position:?}");
        assert_eq!(position.reverse_kl, None);
        assert!((position.reference_top_mass - 1.0).abs() < 1e-7);
    }

    #[test]
    fn a_position_compares_the_target_too() {
        let position = Position::of_top_tokens([-0.5, -0.75], true, &logs(&[0.6]), &logs(&[0.6]));
        assert_eq!((position.delta_nll, position.kl), (0.25, 0.0));
        assert!((position.delta_p - (0.472_366_55 - 0.606_530_66)).abs() < 1e-7);
        assert!((position.reference_top_probability - 0.6).abs() < 1e-7);
    }

    /// A distribution with a range of up to `nats`, sorted, as log-probabilities.
    fn distribution(nats: f64) -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(-nats..0.0, 2..50).prop_map(|mut logits| {
            logits.sort_by(|a, b| b.total_cmp(a));
            let sum = logits.iter().map(|l| l.exp()).sum::<f64>().ln();
            logits.iter().map(|l| (l - sum) as f32).collect()
        })
    }

    proptest! {
        #[test]
        fn a_distribution_has_no_distance_from_itself(p in distribution(40.0), k in 1usize..50) {
            let k = k.min(p.len());
            prop_assert_eq!(top_token_divergence(&p[..k], &p[..k]).0, 0.0);
            prop_assert_eq!(row_divergence(&p, &p), 0.0);
        }

        #[test]
        fn merging_tokens_only_lowers_the_divergence(p in distribution(6.0), q in distribution(6.0), k in 1usize..50) {
            // Six nats, so that f32 resolves the bucket.
            let n = p.len().min(q.len());
            let renormalise = |x: &[f32]| {
                let sum = x.iter().map(|&v| f64::from(v).exp()).sum::<f64>().ln();
                x.iter().map(|&v| (f64::from(v) - sum) as f32).collect::<Vec<_>>()
            };
            let (p, q) = (renormalise(&p[..n]), renormalise(&q[..n]));
            let k = k.min(n);
            let full = row_divergence(&p, &q);
            let (bound, _) = top_token_divergence(&p[..k], &q[..k]);
            prop_assert!(bound <= full + 1e-5, "{} > {}", bound, full);
            prop_assert!(bound >= -1e-5);
        }
    }
}
