//! `g = -exp(A_log) * softplus(a + dt_bias)`, never positive, and `beta = sigmoid(b)`.
//! `softplus(u) = ln(1 + e^u)`, `u` itself above [`SOFTPLUS_IDENTITY`].

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;
pub mod host;
pub mod precise;

use burn::tensor::{Tensor, activation::sigmoid};

use crate::backend::EvaluatorBackend;
use crate::ops::widen;

/// Above it `ln(1 + e^u)` is `u` in float32; the published kernels and PyTorch switch here.
pub const SOFTPLUS_IDENTITY: f32 = 20.0;

/// `a`, `b` `[batch, tokens, value_heads]`, `a_log`, `dt_bias` `[value_heads]`; returns `(g, beta)`.
///
/// `A_log = -inf` means no decay: `g = 0`.
pub fn reference<B: EvaluatorBackend>(
    a: Tensor<B, 3>,
    b: Tensor<B, 3>,
    a_log: Tensor<B, 1>,
    dt_bias: Tensor<B, 1>,
) -> (Tensor<B, 3>, Tensor<B, 3>) {
    let u = widen(a) + widen(dt_bias).unsqueeze();
    let softplus = u.clone().clamp_max(SOFTPLUS_IDENTITY).exp().log1p();
    let softplus = softplus.mask_where(u.clone().greater_elem(SOFTPLUS_IDENTITY), u);
    let rate = widen(a_log).exp().neg();
    (softplus * rate.unsqueeze(), sigmoid(widen(b)))
}
