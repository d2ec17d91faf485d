//! What stands between the projections of a hyper-connection. With `S` residual streams `R_s` and their norms `Rn_s`:
//!
//! ```text
//! m   = SiLU(z / S)                            z = Rn down^T
//! x   = 1/S sum_s sigmoid(u_s) * Rn_s          u = m up^T
//! w_s = 2 sigmoid(v_s / S)                     v = Rn inject^T
//! R_s = R_s + w_s y
//! ```

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;
pub mod precise;

use burn::tensor::Tensor;
use burn::tensor::activation::{sigmoid, silu};

use crate::backend::EvaluatorBackend;
use crate::evaluation::{Arithmetic, Evaluation};
use crate::host_precise::{tensor, values};
use crate::ops::widen;
use crate::precision::Precision;

/// `SiLU(z / streams)`.
pub fn activate<B: EvaluatorBackend>(z: Tensor<B, 3>, streams: usize, how: Evaluation) -> Tensor<B, 3> {
    let Arithmetic::Precise(steps) = how.arithmetic else {
        return B::round(silu(widen(z) / streams as f64), how.to);
    };
    let (shape, device) = (z.dims(), z.device());
    let mut m = values(z);
    precise::activate(&mut m, streams, steps, how.to);
    tensor(m, shape, &device)
}

/// The mixture `[batch, tokens, width]` of `normal` `[batch, tokens, S, width]`; `u` `[batch, tokens, S * width]`.
pub fn mix<B: EvaluatorBackend>(u: Tensor<B, 3>, normal: Tensor<B, 4>, how: Evaluation) -> Tensor<B, 3> {
    let [batch, tokens, count, width] = normal.dims();
    let Arithmetic::Precise(steps) = how.arithmetic else {
        return B::mix_streams(u, normal, how.to);
    };
    let device = u.device();
    let x = precise::mix(&values(u), &values(normal), [count, width], steps, how.to);
    tensor(x, [batch, tokens, width], &device)
}

/// [`mix()`] in tensor operations.
pub fn mix_reference<B: EvaluatorBackend>(u: Tensor<B, 3>, normal: Tensor<B, 4>, to: Precision) -> Tensor<B, 3> {
    let [batch, tokens, count, width] = normal.dims();
    let x = sigmoid(widen(u)).reshape([batch, tokens, count, width]) * widen(normal);
    let stream = |s: usize| x.clone().narrow(2, s, 1);
    let sum = (1..count).fold(stream(0), |sum, s| sum + stream(s)) / count as f64;
    B::round(sum.reshape([batch, tokens, width]), to)
}

/// [`write()`] in tensor operations.
pub fn write_reference<B: EvaluatorBackend>(
    streams: Tensor<B, 3>,
    y: Tensor<B, 3>,
    weights: Tensor<B, 3>,
    to: Precision,
) -> Tensor<B, 3> {
    let (shape, [batch, tokens, width], [_, _, count]) = (streams.dims(), y.dims(), weights.dims());
    let y = widen(y).reshape([batch, tokens, 1, width]) * weights.reshape([batch, tokens, count, 1]);
    B::round(widen(streams) + y.reshape(shape), to)
}

/// The streams' weights `2 sigmoid(v / S)`, `v` `[batch, tokens, S]`, in float32.
pub fn weights<B: EvaluatorBackend>(v: Tensor<B, 3>, how: Evaluation) -> Tensor<B, 3> {
    let shape @ [_, _, count] = v.dims();
    let Arithmetic::Precise(steps) = how.arithmetic else {
        return sigmoid(widen(v) / count as f64) * 2.0;
    };
    let device = v.device();
    let mut weights = values(v);
    precise::weights(&mut weights, count, steps);
    tensor(weights, shape, &device)
}

/// `streams` `[batch, tokens, S * width]`, each plus `y` `[batch, tokens, width]` by its weight, `[batch, tokens, S]`.
pub fn write<B: EvaluatorBackend>(
    streams: Tensor<B, 3>,
    y: Tensor<B, 3>,
    weights: Tensor<B, 3>,
    how: Evaluation,
) -> Tensor<B, 3> {
    let (shape, count) = (streams.dims(), weights.dims()[2]);
    let Arithmetic::Precise(steps) = how.arithmetic else {
        return B::write_streams(streams, y, weights, how.to);
    };
    let device = y.device();
    let mut sum = values(streams);
    precise::write(&mut sum, &values(y), &values(weights), count, steps, how.to);
    tensor(sum, shape, &device)
}
