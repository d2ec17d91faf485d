//! `y = x W^T`, and with a residual `y = residual + x W^T`, the sum rounded once.

pub mod precise;

use burn::tensor::Tensor;

use crate::backend::EvaluatorBackend;
use crate::ops::widen;
use crate::precision::Precision;

/// `x` `[batch, tokens, in]` times `weight` `[out, in]`, accumulated in float32.
pub fn reference<B: EvaluatorBackend>(x: Tensor<B, 3>, weight: Tensor<B, 2>, to: Precision) -> Tensor<B, 3> {
    B::round(product(x, weight), to)
}

/// The residual sum: the product is not rounded before the addition.
pub fn reference_add<B: EvaluatorBackend>(
    residual: Tensor<B, 3>,
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    to: Precision,
) -> Tensor<B, 3> {
    B::round(widen(residual) + product(x, weight), to)
}

fn product<B: EvaluatorBackend>(x: Tensor<B, 3>, weight: Tensor<B, 2>) -> Tensor<B, 3> {
    let ([batch, tokens, width], [out, _]) = (x.dims(), weight.dims());
    let y = widen(x)
        .reshape([batch * tokens, width])
        .matmul(widen(weight).transpose());
    y.reshape([batch, tokens, out])
}
