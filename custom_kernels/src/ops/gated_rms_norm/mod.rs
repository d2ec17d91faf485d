//! `y = x * rsqrt(mean(x^2) + eps) * w * SiLU(z)` over the last axis; the weight is plain, not `1 + w`. Some models gate
//! with `sigmoid(z)` instead.

pub mod host;
pub mod precise;

use burn::tensor::Tensor;
use burn::tensor::activation::{sigmoid, silu};

use crate::backend::EvaluatorBackend;
use crate::ops::{offset_rms_norm::normalise, widen};
use crate::precision::Precision;

/// `x` and `z` `[..., n]`, `weight` `[n]`.
pub fn reference<B: EvaluatorBackend, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 1>,
    z: Tensor<B, D>,
    eps: f32,
    to: Precision,
) -> Tensor<B, D> {
    B::round(
        normalise(widen(x), eps) * widen(weight).unsqueeze() * silu(widen(z)),
        to,
    )
}

/// The same with the gate `sigmoid(z)`.
pub fn sigmoid_reference<B: EvaluatorBackend, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 1>,
    z: Tensor<B, D>,
    eps: f32,
    to: Precision,
) -> Tensor<B, D> {
    B::round(
        normalise(widen(x), eps) * widen(weight).unsqueeze() * sigmoid(widen(z)),
        to,
    )
}
