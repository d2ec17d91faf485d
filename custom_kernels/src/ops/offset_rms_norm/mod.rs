//! `y = x * rsqrt(mean(x^2) + eps) * (1 + w)` over the last axis.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;
pub mod host;
pub mod precise;

use burn::tensor::Tensor;

use crate::backend::EvaluatorBackend;
use crate::ops::widen;
use crate::precision::Precision;

/// Of each of several streams by itself: `x` `[batch, tokens, S, n]`, `weight` `[S, n]`.
pub fn stream_reference<B: EvaluatorBackend>(
    x: Tensor<B, 4>,
    weight: Tensor<B, 2>,
    eps: f32,
    to: Precision,
) -> Tensor<B, 4> {
    let [streams, width] = weight.dims();
    let plain = Tensor::zeros([width], &x.device());
    let x = B::offset_rms_norm(x, plain, eps, Precision::Full);
    B::round(x * (weight + 1.0).reshape([1, 1, streams, width]), to)
}

/// `x` `[..., n]`, `weight` `[n]`.
pub fn reference<B: EvaluatorBackend, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 1>,
    eps: f32,
    to: Precision,
) -> Tensor<B, D> {
    B::round(normalise(widen(x), eps) * (widen(weight) + 1.0).unsqueeze(), to)
}

/// `x * rsqrt(mean(x^2) + eps)` over the last axis.
pub(crate) fn normalise<B: EvaluatorBackend, const D: usize>(x: Tensor<B, D>, eps: f32) -> Tensor<B, D> {
    let mean_square = (x.clone() * x.clone()).mean_dim(D - 1);
    x / (mean_square + eps).sqrt()
}
