//! Partial rotary embedding. With `R` rotated features, pair `i < R/2` of a head at position `p` turns by
//! `phi = p * inv[i]`, `inv[i] = theta^(-2i/R)`:
//!
//! ```text
//! y[i]       = x[i] cos(phi) - x[i + R/2] sin(phi)
//! y[i + R/2] = x[i + R/2] cos(phi) + x[i] sin(phi)
//! ```
//!
//! Features `R..` pass unchanged. Pairs are half-split, `(i, i + R/2)`, not neighbours.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;
pub mod host;
pub mod precise;

use std::sync::Arc;

use burn::tensor::{Tensor, TensorData, backend::Backend};

use crate::backend::EvaluatorBackend;
use crate::ops::widen;
use crate::precision::Precision;

/// Cosines and sines of every position and pair, `[positions, R/2]` each, computed in f64 and rounded once to float32.
#[derive(Debug, Clone)]
pub struct RotaryTable<B: Backend> {
    /// `m cos(p inv[i])`.
    pub cos: Tensor<B, 2>,
    /// `m sin(p inv[i])`.
    pub sin: Tensor<B, 2>,
    angles: Arc<Angles>,
}

/// The same before rounding.
#[derive(Debug)]
pub struct Angles {
    /// Positions covered.
    pub positions: usize,
    /// Rotated pairs, `R/2`.
    pub pairs: usize,
    /// `m cos(p inv[i])`, `[positions, pairs]`.
    pub cos: Vec<f64>,
    /// `m sin(p inv[i])`, `[positions, pairs]`.
    pub sin: Vec<f64>,
}

/// Native frequencies `theta^(-2i/R)`, `i < R/2`.
pub fn frequencies(theta: f64, rotary_dim: usize) -> Vec<f64> {
    (0..rotary_dim / 2)
        .map(|i| theta.powf(-2.0 * i as f64 / rotary_dim as f64))
        .collect()
}

/// Frequencies `1 / theta^(2i/R)` with power and quotient rounded to float32 each.
pub fn stepwise_frequencies(frequencies: &[f64]) -> Vec<f32> {
    frequencies.iter().map(|f| 1.0 / (1.0 / f) as f32).collect()
}

impl Angles {
    /// Of each of `positions`; `magnitude` `m` multiplies every cosine and sine.
    pub fn new(frequencies: &[f64], magnitude: f64, positions: &[f64]) -> Self {
        Self::table(frequencies, positions, |f, p, inv| magnitude * f(p * inv))
    }

    /// As Hugging Face's bfloat16 model has them: `theta^(2i/R)`, its reciprocal, the angle, its cosine and sine and their
    /// product with `m` rounded to float32 each, the result to bfloat16.
    pub fn stepwise(frequencies: &[f64], magnitude: f64, positions: &[f64]) -> Self {
        let inverse = stepwise_frequencies(frequencies);
        Self::table(&inverse, positions, |f, p, inv| {
            let angle = p as f32 * inv;
            let product = f64::from(f(angle.into()) as f32) * f64::from(magnitude as f32);
            f64::from(Precision::Bf16.nearest(f64::from(product as f32)))
        })
    }

    /// `value(cos or sin, position, frequency)` of every position and frequency.
    fn table<F: Copy>(frequencies: &[F], positions: &[f64], value: impl Fn(fn(f64) -> f64, f64, F) -> f64) -> Self {
        let values = |f: fn(f64) -> f64| {
            let rows = positions.iter();
            rows.flat_map(|&p| frequencies.iter().map(move |&inv| (p, inv)))
                .map(|(p, inv)| value(f, p, inv))
                .collect()
        };
        Self {
            positions: positions.len(),
            pairs: frequencies.len(),
            cos: values(f64::cos),
            sin: values(f64::sin),
        }
    }
}

impl<B: Backend> RotaryTable<B> {
    /// The table for positions `0..positions`; `magnitude` `m` multiplies every cosine and sine.
    pub fn new(frequencies: &[f64], magnitude: f64, positions: usize, device: &B::Device) -> Self {
        let positions: Vec<f64> = (0..positions).map(|p| p as f64).collect();
        Self::at(frequencies, magnitude, &positions, device)
    }

    /// The table whose row `t` is of `positions[t]`, which need not be whole numbers.
    pub fn at(frequencies: &[f64], magnitude: f64, positions: &[f64], device: &B::Device) -> Self {
        Self::of(Angles::new(frequencies, magnitude, positions), device)
    }

    /// The table of given angles.
    pub fn of(angles: Angles, device: &B::Device) -> Self {
        let table = |values: &[f64]| {
            let rounded: Vec<f32> = values.iter().map(|&value| value as f32).collect();
            Tensor::from_data(TensorData::new(rounded, [angles.positions, angles.pairs]), device)
        };
        Self {
            cos: table(&angles.cos),
            sin: table(&angles.sin),
            angles: Arc::new(angles),
        }
    }

    /// The values in f64.
    pub fn angles(&self) -> &Angles {
        &self.angles
    }

    /// Positions the table covers.
    pub fn positions(&self) -> usize {
        self.cos.dims()[0]
    }
}

/// `x` `[batch, tokens, heads, head_dim]`, `R/2` from the table's width.
pub fn reference<B: EvaluatorBackend>(
    x: Tensor<B, 4>,
    table: &RotaryTable<B>,
    first_position: usize,
    to: Precision,
) -> Tensor<B, 4> {
    let [batch, tokens, heads, head_dim] = x.dims();
    let half = table.cos.dims()[1];
    let rows = |t: &Tensor<B, 2>| {
        t.clone()
            .slice_dim(0, first_position..first_position + tokens)
            .reshape([1, tokens, 1, half])
    };
    let (cos, sin) = (rows(&table.cos), rows(&table.sin));
    let part = |range: std::ops::Range<usize>| widen(x.clone()).slice([0..batch, 0..tokens, 0..heads, range]);
    let (first, second) = (part(0..half), part(half..2 * half));
    let rotated = vec![
        first.clone() * cos.clone() - second.clone() * sin.clone(),
        second * cos + first * sin,
    ];
    let rotated = B::round(Tensor::cat(rotated, 3), to);
    if 2 * half == head_dim {
        return rotated;
    }
    Tensor::cat(vec![widen(rotated), part(2 * half..head_dim)], 3)
}
