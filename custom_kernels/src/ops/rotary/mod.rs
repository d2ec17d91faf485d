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
#[cfg(any(feature = "ndarray", feature = "flex"))]
pub mod host;

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
}

/// Native frequencies `theta^(-2i/R)`, `i < R/2`.
pub fn frequencies(theta: f64, rotary_dim: usize) -> Vec<f64> {
    (0..rotary_dim / 2)
        .map(|i| theta.powf(-2.0 * i as f64 / rotary_dim as f64))
        .collect()
}

impl<B: Backend> RotaryTable<B> {
    /// The table for positions `0..positions`; `magnitude` `m` multiplies every cosine and sine.
    pub fn new(frequencies: &[f64], magnitude: f64, positions: usize, device: &B::Device) -> Self {
        let positions: Vec<f64> = (0..positions).map(|p| p as f64).collect();
        Self::at(frequencies, magnitude, &positions, device)
    }

    /// The table whose row `t` is of `positions[t]`, which need not be whole numbers.
    pub fn at(frequencies: &[f64], magnitude: f64, positions: &[f64], device: &B::Device) -> Self {
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f32> = positions
                .iter()
                .flat_map(|p| frequencies.iter().map(move |inv| (magnitude * f(p * inv)) as f32))
                .collect();
            Tensor::from_data(TensorData::new(values, [positions.len(), frequencies.len()]), device)
        };
        Self {
            cos: table(f64::cos),
            sin: table(f64::sin),
        }
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
