//! Sums over scored tokens and the figures derived from them.
//!
//! `mean_nll = total_nll / scored_tokens`, `perplexity = exp(mean_nll)`; all in f64, window totals added in scoring order.
//! Domain and overall figures are therefore token-weighted, never means of perplexities. Beside the sum, the centred
//! second moment `Σ (l - mean)²` is carried (Welford per window, Chan across windows) for the standard error
//! `s / √n` with `s² = Σ (l - mean)² / (n - 1)`; by error propagation `SE(perplexity) = perplexity · SE(mean_nll)`.

use std::f64::consts::LN_2;

/// A log-probability above zero by more than this is no rounding of a probability of one.
pub const LOGPROB_ROUNDING: f32 = 1e-3;

/// A value that is no log-probability.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error(
    "log-probability {value} at scored position {position} is not a finite number of at most 0; \
     the window has {count} such value(s)"
)]
pub struct BadLogprob {
    /// Position of the first within the window's targets.
    pub position: usize,
    /// The first value.
    pub value: f32,
    /// How many there are.
    pub count: usize,
}

/// Whether `value` can be the logarithm of a probability.
fn is_logprob(value: f32) -> bool {
    value.is_finite() && value <= LOGPROB_ROUNDING
}

/// Negative log-likelihood summed over scored tokens, in nats.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Aggregate {
    /// Scored tokens.
    pub scored_tokens: u64,
    /// `-Σ logprob`.
    pub total_nll: f64,
    /// `Σ (nll - mean)²`.
    pub squared_deviations: f64,
}

impl Aggregate {
    /// Sums one window in position order.
    ///
    /// # Errors
    /// On the first value that is not a log-probability.
    pub fn of_window(logprobs: &[f32]) -> Result<Self, BadLogprob> {
        let (mut total, mut mean, mut squares) = (0.0f64, 0.0f64, 0.0f64);
        for (position, &value) in logprobs.iter().enumerate() {
            if !is_logprob(value) {
                let count = logprobs.iter().filter(|&&v| !is_logprob(v)).count();
                return Err(BadLogprob { position, value, count });
            }
            let nll = -f64::from(value);
            total += nll;
            let from_old = nll - mean;
            mean += from_old / (position + 1) as f64;
            squares += from_old * (nll - mean);
        }
        // `-0.0` would be printed with its sign.
        Ok(Self {
            scored_tokens: logprobs.len() as u64,
            total_nll: total + 0.0,
            squared_deviations: squares,
        })
    }

    /// Adds another set of tokens; `None` when the count overflows.
    #[must_use]
    pub fn plus(self, other: Self) -> Option<Self> {
        let scored_tokens = self.scored_tokens.checked_add(other.scored_tokens)?;
        let between = match (self.mean_nll(), other.mean_nll()) {
            (Some(a), Some(b)) => {
                let weight = self.scored_tokens as f64 * other.scored_tokens as f64 / scored_tokens as f64;
                (a - b) * (a - b) * weight
            }
            _ => 0.0,
        };
        Some(Self {
            scored_tokens,
            total_nll: self.total_nll + other.total_nll,
            squared_deviations: self.squared_deviations + other.squared_deviations + between,
        })
    }

    /// Mean negative log-likelihood in nats; `None` without tokens.
    pub fn mean_nll(&self) -> Option<f64> {
        (self.scored_tokens > 0).then(|| self.total_nll / self.scored_tokens as f64)
    }

    /// `exp(mean_nll)`; `None` without tokens or beyond the range of f64.
    pub fn perplexity(&self) -> Option<f64> {
        self.mean_nll().map(f64::exp).filter(|p| p.is_finite())
    }

    /// Mean negative log-likelihood in bits.
    pub fn bits_per_token(&self) -> Option<f64> {
        self.mean_nll().map(|nats| nats / LN_2)
    }

    /// `Σ nll / (bytes · ln 2)`.
    pub fn bits_per_byte(&self, bytes: u64) -> Option<f64> {
        (bytes > 0).then(|| self.total_nll / (bytes as f64 * LN_2))
    }

    /// `exp(Σ nll / words)`.
    pub fn word_perplexity(&self, words: u64) -> Option<f64> {
        (words > 0)
            .then(|| (self.total_nll / words as f64).exp())
            .filter(|p| p.is_finite())
    }

    /// Standard error of the mean if tokens were independent; `None` below two tokens.
    pub fn standard_error(&self) -> Option<f64> {
        let n = self.scored_tokens as f64;
        (self.scored_tokens >= 2).then(|| (self.squared_deviations / (n - 1.0) / n).sqrt())
    }

    /// The standard error carried over to the perplexity.
    pub fn perplexity_standard_error(&self) -> Option<f64> {
        Some(self.perplexity()? * self.standard_error()?).filter(|e| e.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FOUR: [f32; 4] = [-0.5, -1.25, -3.0, -0.25];

    #[test]
    fn four_tokens_by_hand() {
        let sum = Aggregate::of_window(&FOUR).unwrap();
        assert_eq!((sum.scored_tokens, sum.total_nll, sum.mean_nll()), (4, 5.0, Some(1.25)));
        assert_eq!(sum.perplexity(), Some(3.490_342_957_461_841_4));
        // s² = (0.5625 + 0 + 3.0625 + 1) / 3 = 1.541667
        assert!((sum.squared_deviations - 4.625).abs() < 1e-15);
        assert!((sum.standard_error().unwrap() - 0.620_819).abs() < 1e-6);
        assert!((sum.perplexity_standard_error().unwrap() - 2.166_872).abs() < 1e-6);
        // 5 nats over 10 bytes and over 2 words.
        assert!((sum.bits_per_byte(10).unwrap() - 0.5 / LN_2).abs() < 1e-15);
        assert!((sum.word_perplexity(2).unwrap() - 2.5f64.exp()).abs() < 1e-12);
    }

    #[test]
    fn the_mean_weighs_tokens_not_windows() {
        let a = Aggregate::of_window(&[-1.0]).unwrap();
        let b = Aggregate::of_window(&[-2.0, -2.0, -2.0]).unwrap();
        assert_eq!(a.plus(b).unwrap().mean_nll(), Some(1.75));
        assert_eq!(Aggregate::default().plus(a), Some(a));
        assert_eq!(
            Aggregate {
                scored_tokens: u64::MAX,
                ..a
            }
            .plus(a),
            None
        );
    }

    #[test]
    fn what_is_no_log_probability_is_refused() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.5] {
            let error = Aggregate::of_window(&[-1.0, value, -2.0, f32::NAN]).unwrap_err();
            assert_eq!((error.position, error.count), (1, 2));
        }
        // The target's probability may round to one from above.
        assert!(Aggregate::of_window(&[1e-7]).is_ok());
    }

    #[test]
    fn an_unbounded_perplexity_is_absent_not_infinite() {
        let sum = Aggregate::of_window(&[-800.0, -800.0]).unwrap();
        assert_eq!(
            (sum.mean_nll(), sum.perplexity(), sum.perplexity_standard_error()),
            (Some(800.0), None, None)
        );
        assert_eq!(Aggregate::default().mean_nll(), None);
    }

    proptest! {
        #[test]
        fn splitting_does_not_change_the_moments(values in prop::collection::vec(-30.0f32..0.0, 2..200), at in 0usize..200) {
            let at = at % values.len();
            let (left, right) = values.split_at(at);
            let joined = Aggregate::of_window(left).unwrap().plus(Aggregate::of_window(right).unwrap()).unwrap();
            let n = values.len() as f64;
            let mean = values.iter().map(|&v| -f64::from(v)).sum::<f64>() / n;
            let squares = values.iter().map(|&v| (-f64::from(v) - mean).powi(2)).sum::<f64>();
            prop_assert_eq!(joined.scored_tokens, values.len() as u64);
            prop_assert!((joined.mean_nll().unwrap() - mean).abs() < 1e-10);
            prop_assert!((joined.squared_deviations - squares).abs() < 1e-8 * squares.max(1.0));
        }
    }
}
