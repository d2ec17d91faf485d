//! `round(x)`: the nearest representable value, ties to even.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;
pub mod host;

use burn::tensor::{FloatDType, Tensor, backend::Backend};

use crate::precision::Precision;

/// Rounds by casting there and back; needs a backend that stores the narrow type.
pub fn reference<B: Backend, const D: usize>(x: Tensor<B, D>, to: Precision) -> Tensor<B, D> {
    let narrow = match to {
        Precision::Full => return x,
        Precision::Bf16 => FloatDType::BF16,
        Precision::F16 => FloatDType::F16,
    };
    x.cast(narrow).cast(FloatDType::F32)
}
