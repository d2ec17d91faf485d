//! `y[t, c] = SiLU(sum_{j<W} w[c, j] * x[t - (W-1) + j, c])`: depthwise, no bias, tap `W - 1` meets the current token.
//! Inputs before the pass come from the tail, zero at a window's start.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;
pub mod host;
pub mod precise;

use burn::tensor::{Tensor, activation::silu};

use crate::backend::EvaluatorBackend;
use crate::ops::widen;
use crate::precision::Precision;

/// `x` `[batch, tokens, channels]`, `weight` `[channels, W]`, `tail` `[batch, W - 1, channels]`; returns the result and
/// the last `W - 1` inputs.
pub fn reference<B: EvaluatorBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    tail: Tensor<B, 3>,
    to: Precision,
) -> (Tensor<B, 3>, Tensor<B, 3>) {
    let ([batch, tokens, channels], [_, width]) = (x.dims(), weight.dims());
    let weight = widen(weight);
    let padded = Tensor::cat(vec![widen(tail), widen(x)], 1);
    let rows = |from: usize, count: usize| padded.clone().slice([0..batch, from..from + count, 0..channels]);
    let tap = |j: usize| weight.clone().slice([0..channels, j..j + 1]).reshape([1, 1, channels]);
    let sum = (1..width).fold(rows(0, tokens) * tap(0), |sum, j| sum + rows(j, tokens) * tap(j));
    (B::round(silu(sum), to), rows(tokens, width - 1))
}
