//! What stands between the projections of the n-gram injection. With normalised keys and queries `k_s`, `q_s` of width `H`
//! per residual stream `R_s`, and one value for all:
//!
//! ```text
//! a_s = k_s . q_s / sqrt(H)
//! G_s = sigmoid(sign(a_s) sqrt(max(|a_s|, 1e-6))) value                       sign(0) = 0
//! C[t] = sum_j convolution[j] N[t - d (W-1-j)],   R = R + G + SiLU(C)         N = norm(G)
//! ```

pub mod precise;

use burn::tensor::Tensor;
use burn::tensor::activation::{sigmoid, silu};

use crate::backend::EvaluatorBackend;
use crate::evaluation::{Arithmetic, Evaluation};
use crate::host_precise::{tensor, values};
use crate::ops::widen;

/// The smallest magnitude whose root is taken.
const LEAST: f32 = 1e-6;

/// `G` `[batch, tokens, S * H]` of `key` and `query` `[batch, tokens, S, H]` and `value` `[batch, tokens, H]`.
pub fn gate<B: EvaluatorBackend>(
    key: Tensor<B, 4>,
    query: Tensor<B, 4>,
    value: Tensor<B, 3>,
    how: Evaluation,
) -> Tensor<B, 3> {
    let [batch, tokens, count, width] = key.dims();
    let shape = [batch, tokens, count * width];
    let Arithmetic::Precise(steps) = how.arithmetic else {
        let a = (widen(key) * widen(query)).sum_dim(3) / (width as f64).sqrt();
        let open = sigmoid(a.clone().sign() * a.abs().clamp_min(LEAST).sqrt());
        let value = widen(value).reshape([batch, tokens, 1, width]);
        return B::round((open * value).reshape(shape), how.to);
    };
    let device = value.device();
    let gated = precise::gate(
        &values(key),
        &values(query),
        &values(value),
        [count, width],
        steps,
        how.to,
    );
    tensor(gated, shape, &device)
}

/// `streams + gated + SiLU(C)`, both `[batch, tokens, channels]`; `inputs` `[batch, (W - 1) dilation + tokens, channels]`
/// and `convolution` `[W, channels]`.
pub fn inject<B: EvaluatorBackend>(
    streams: Tensor<B, 3>,
    gated: Tensor<B, 3>,
    inputs: Tensor<B, 3>,
    convolution: Tensor<B, 2>,
    dilation: usize,
    how: Evaluation,
) -> Tensor<B, 3> {
    let shape @ [_, tokens, channels] = streams.dims();
    let Arithmetic::Precise(steps) = how.arithmetic else {
        let tap = |j: usize| {
            let weights = convolution.clone().narrow(0, j, 1).reshape([1, 1, channels]);
            widen(inputs.clone().narrow(1, j * dilation, tokens)) * weights
        };
        let convolved = (1..convolution.dims()[0]).fold(tap(0), |sum, j| sum + tap(j));
        return B::round(widen(streams) + widen(gated) + silu(convolved), how.to);
    };
    let device = streams.device();
    let mut sum = values(streams);
    precise::inject(
        &mut sum,
        &values(gated),
        &values(inputs),
        &values(convolution),
        shape,
        dilation,
        steps,
        how.to,
    );
    tensor(sum, shape, &device)
}
