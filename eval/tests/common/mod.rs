//! A scorer small enough to check by hand, and one with arbitrary distributions.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

use perplexity_eval::merge::MergeError;
use perplexity_eval::report::Report;
use perplexity_eval::scorer::{CausalScorer, ScoreError, ScoreRequest, WindowScores, WindowTokens};

/// Joins reports that were read from `part0`, `part1`, ...
pub fn merge(parts: Vec<Report>) -> Result<Report, MergeError> {
    let named = |(i, part)| (format!("part{i}").into(), part);
    perplexity_eval::merge::merge(parts.into_iter().enumerate().map(named).collect())
}

/// A scorer whose next-token logits are a pure function of the token before, the context length and a seed.
pub struct ToyScorer {
    pub vocabulary: usize,
    /// Scale of the logits; 0 is the uniform distribution.
    pub sharpness: f32,
    pub seed: u64,
    /// Windows per call, as seen.
    pub batches: Vec<usize>,
}

impl ToyScorer {
    pub fn new(vocabulary: usize, sharpness: f32, seed: u64) -> Self {
        Self {
            vocabulary,
            sharpness,
            seed,
            batches: Vec::new(),
        }
    }

    /// Log-softmax after `previous` with `context` tokens before the target.
    pub fn row(&self, previous: u32, context: usize) -> Vec<f32> {
        let logit = |id: usize| {
            let mut h = self.seed ^ (u64::from(previous) << 40) ^ ((context as u64) << 20) ^ id as u64;
            h = (h ^ (h >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            h = (h ^ (h >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            // Quarters, so that ties occur.
            f64::from(self.sharpness) * ((h >> 56) as f64 / 4.0).floor() / 64.0
        };
        let logits: Vec<f64> = (0..self.vocabulary).map(logit).collect();
        let max = logits.iter().copied().fold(f64::MIN, f64::max);
        let log_sum = logits.iter().map(|l| (l - max).exp()).sum::<f64>().ln();
        logits.iter().map(|l| (l - max - log_sum) as f32).collect()
    }
}

impl CausalScorer for ToyScorer {
    fn public_tokens(&self) -> usize {
        self.vocabulary
    }

    fn score(&mut self, windows: &[WindowTokens], ask: &ScoreRequest) -> Result<Vec<WindowScores>, ScoreError> {
        self.batches.push(windows.len());
        let mut all = Vec::new();
        for (w, window) in windows.iter().enumerate() {
            let mut scores = WindowScores::default();
            for j in 0..window.positions() {
                let i = window.first_target + j;
                let row = self.row(window.tokens[i - 1], i);
                scores.logprobs.push(row[window.tokens[i] as usize]);
                let mut order: Vec<u32> = (0..self.vocabulary as u32).collect();
                order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
                for &id in &order[..ask.top_k] {
                    scores.top_ids.push(id);
                    scores.top_logprobs.push(row[id as usize]);
                }
                let k = ask.candidates_per_position;
                if k > 0 {
                    let ids = &ask.candidates[w][j * k..(j + 1) * k];
                    scores.candidate_logprobs.extend(ids.iter().map(|&id| row[id as usize]));
                }
            }
            all.push(scores);
        }
        Ok(all)
    }
}

/// A scorer that returns prepared log-probabilities, indexed by target token.
pub struct Prepared(pub Vec<f32>);

impl CausalScorer for Prepared {
    fn public_tokens(&self) -> usize {
        self.0.len()
    }

    fn score(&mut self, windows: &[WindowTokens], _ask: &ScoreRequest) -> Result<Vec<WindowScores>, ScoreError> {
        let score = |w: &WindowTokens| WindowScores {
            logprobs: w.tokens[w.first_target..].iter().map(|&t| self.0[t as usize]).collect(),
            ..WindowScores::default()
        };
        Ok(windows.iter().map(score).collect())
    }
}
