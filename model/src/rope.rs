//! Rotary extensions: the angles of positions beyond those that a model was made for.
//!
//! With `R` rotated features, `L0` native positions and `inv[i] = theta^(-2i/R)`, pair `i < R/2` at position `p` turns by:
//!
//! | extension | angle | cosine and sine times |
//! |---|---|---|
//! | none | `p inv[i]` | 1 |
//! | YaRN by `F` | `p inv[i] ((1 - r[i]) + r[i] / F)` | `1 + 0.1 ln F` |
//! | linear by `F` past `N` | `p' inv[i]`; `p' = p` up to `N`, `N + (p - N) / F` beyond | 1 |
//!
//! YaRN leaves pairs that turn more than 32 times within `L0` alone, divides those that turn less than once by `F`, and
//! blends between them:
//!
//! ```text
//! d(turns) = R ln(L0 / (2 pi turns)) / (2 ln theta)
//! low = max(floor(d(32)), 0);  high = min(ceil(d(1)), R - 1), plus 0.001 if they are equal
//! r[i] = clamp((i - low) / (high - low), 0, 1)
//! ```
//!
//! Linear interpolation keeps every angle up to `N`; it is not the kind that divides all positions.

use std::f64::consts::PI;

use burn::tensor::backend::Backend;
use perplexity_kernels::backend::RotaryTable;
use perplexity_kernels::ops::rotary;

use crate::config::{AttentionConfig, TextConfig};
use crate::route::Route;

/// Positions that no extension goes beyond.
const MOST_POSITIONS: usize = 1 << 20;
/// Native windows that linear interpolation reaches, whatever its factor.
const LINEAR_WINDOWS: usize = 4;
/// Turns within the native window beyond which YaRN keeps a frequency, and below which it divides it.
const YARN_TURNS: [f64; 2] = [32.0, 1.0];

/// How rotary angles go on beyond the native window.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum RopeExtension {
    /// Not at all.
    #[default]
    None,
    /// YaRN, at every position.
    Yarn {
        /// From 1 to 4.
        factor: f64,
    },
    /// Positions past the original context advance by `1 / factor`.
    Linear {
        /// From 1 to 32.
        factor: f64,
        /// The last position with its native angle.
        original_context: usize,
    },
}

impl RopeExtension {
    /// Most positions of a window, for a model of `native` positions.
    pub fn positions(self, native: usize) -> usize {
        let extended = match self {
            Self::None => native,
            Self::Yarn { factor } => (native as f64 * factor) as usize,
            Self::Linear { .. } => native.saturating_mul(LINEAR_WINDOWS),
        };
        extended.min(MOST_POSITIONS).max(native)
    }
}

/// Angles of one model's attention layers.
#[derive(Debug, Clone)]
pub struct Rotary {
    /// Per rotated pair; empty in a model without attention.
    pub frequencies: Vec<f64>,
    /// Multiplies every cosine and sine.
    pub magnitude: f64,
    extension: RopeExtension,
}

impl Rotary {
    /// The angles of `config` under `extension`, in f64.
    pub fn new(config: &TextConfig, extension: RopeExtension) -> Self {
        let native =
            |attention: &AttentionConfig| rotary::frequencies(f64::from(attention.rope_theta), attention.rotary_dim());
        let mut frequencies = config.attention.as_ref().map_or_else(Vec::new, native);
        let mut magnitude = 1.0;
        if let (RopeExtension::Yarn { factor }, Some(attention)) = (extension, &config.attention) {
            let ramp = yarn_ramp(
                f64::from(attention.rope_theta),
                attention.rotary_dim(),
                config.max_position_embeddings,
            );
            for (frequency, ramp) in frequencies.iter_mut().zip(ramp) {
                *frequency *= (1.0 - ramp) + ramp / factor;
            }
            magnitude = 1.0 + 0.1 * factor.ln();
        }
        Self {
            frequencies,
            magnitude,
            extension,
        }
    }

    /// Where token `index` of a window stands.
    pub fn position(&self, index: usize) -> f64 {
        match self.extension {
            RopeExtension::Linear {
                factor,
                original_context,
            } if index > original_context => original_context as f64 + (index - original_context) as f64 / factor,
            _ => index as f64,
        }
    }

    /// Cosines and sines of the first `tokens` positions, as the route has them.
    pub fn table<B: Backend>(&self, route: Route, tokens: usize, device: &B::Device) -> RotaryTable<B> {
        self.table_at(route, 0..tokens, device)
    }

    /// The same of the given tokens of a window.
    pub fn table_at<B: Backend>(
        &self,
        route: Route,
        tokens: impl Iterator<Item = usize>,
        device: &B::Device,
    ) -> RotaryTable<B> {
        let positions: Vec<f64> = tokens.map(|index| self.position(index)).collect();
        RotaryTable::of(route.angles(&self.frequencies, self.magnitude, &positions), device)
    }
}

/// Share of pair `i` that YaRN divides, `r[i]`.
fn yarn_ramp(theta: f64, rotary_dim: usize, native: usize) -> Vec<f64> {
    let pair = |turns: f64| rotary_dim as f64 * (native as f64 / (2.0 * PI * turns)).ln() / (2.0 * theta.ln());
    let [low, high] = YARN_TURNS.map(pair);
    let low = low.floor().max(0.0);
    let mut high = high.ceil().min(rotary_dim as f64 - 1.0);
    if low == high {
        high += 0.001;
    }
    (0..rotary_dim / 2)
        .map(|i| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::FeedForwardConfig;

    fn config(native: usize) -> TextConfig {
        TextConfig {
            hidden_size: 256,
            vocab_size: 8,
            max_position_embeddings: native,
            tie_word_embeddings: true,
            rms_norm_eps: 1e-6,
            layer_types: Vec::new(),
            attention: Some(AttentionConfig {
                num_heads: 1,
                num_kv_heads: 1,
                head_dim: 256,
                rope_theta: 1e7,
                partial_rotary_factor: 0.25,
                mrope_section: [11, 11, 10],
            }),
            delta_net: None,
            feed_forward: FeedForwardConfig::Dense { intermediate_size: 8 },
            flash_next: None,
        }
    }

    /// Hugging Face's `yarn` initialisation (transformers 5.24), evaluated in Python's float64 from its formula with
    /// `original_max_position_embeddings` the native window and no other key.
    #[test]
    fn yarn_frequencies_and_magnitude_equal_hugging_faces() {
        type Case = (usize, f64, f64, [(usize, f64); 8]);
        let cases: [Case; 3] = [
            (
                262_144,
                4.0,
                1.138629436111989,
                [
                    (0, 1.0),
                    (10, 0.00649381631576),
                    (14, 0.00086596432336),
                    (15, 0.00047423982268),
                    (18, 7.21738740431e-05),
                    (21, 8.75977007118e-06),
                    (22, 3.84981631515e-06),
                    (31, 4.13704274986e-08),
                ],
            ),
            (
                262_144,
                1.5,
                1.0405465108108165,
                [
                    (0, 1.0),
                    (10, 0.00649381631576),
                    (14, 0.00086596432336),
                    (15, 0.000501494984903),
                    (18, 9.62318320575e-05),
                    (21, 1.80504352982e-05),
                    (22, 1.02661768404e-05),
                    (31, 1.10321139996e-07),
                ],
            ),
            (
                32_768,
                2.0,
                1.0693147180559945,
                [
                    (0, 1.0),
                    (10, 0.00649381631576),
                    (14, 0.000618545945257),
                    (15, 0.000336406573724),
                    (18, 5.77390992345e-05),
                    (21, 1.27414837399e-05),
                    (22, 7.6996326303e-06),
                    (31, 8.27408549972e-08),
                ],
            ),
        ];
        for (native, factor, magnitude, frequencies) in cases {
            let rotary = Rotary::new(&config(native), RopeExtension::Yarn { factor });
            assert!((rotary.magnitude - magnitude).abs() < 1e-12, "{}", rotary.magnitude);
            for (pair, wanted) in frequencies {
                let found = rotary.frequencies[pair];
                assert!(
                    (found / wanted - 1.0).abs() < 1e-10,
                    "pair {pair}: {found}, not {wanted}"
                );
            }
        }
    }

    /// At theta 1e7, 64 rotated features and 262,144 native positions d(32) = 14.24 and d(1) = 21.12.
    #[test]
    fn yarn_keeps_pairs_to_14_and_divides_pairs_from_22() {
        let ramp = yarn_ramp(1e7, 64, 262_144);
        assert!(ramp[..=14].iter().all(|r| *r == 0.0) && ramp[22..].iter().all(|r| *r == 1.0));
        assert_eq!(ramp[18], 0.5);
        let native = Rotary::new(&config(262_144), RopeExtension::None);
        let one = Rotary::new(&config(262_144), RopeExtension::Yarn { factor: 1.0 });
        assert_eq!((&one.frequencies, one.magnitude), (&native.frequencies, 1.0));
    }

    #[test]
    fn linear_interpolation_begins_past_the_original_context() {
        let extension = RopeExtension::Linear {
            factor: 8.0,
            original_context: 1_000,
        };
        let rotary = Rotary::new(&config(262_144), extension);
        assert_eq!(
            [0, 1, 999, 1_000, 1_001, 1_008, 9_000].map(|p| rotary.position(p)),
            [0.0, 1.0, 999.0, 1_000.0, 1_000.125, 1_001.0, 2_000.0]
        );
        assert_eq!(rotary.magnitude, 1.0);
        assert_eq!(
            rotary.frequencies,
            Rotary::new(&config(262_144), RopeExtension::None).frequencies
        );
    }
}
