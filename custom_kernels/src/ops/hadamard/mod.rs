//! `y = H_n x` on each block of `n` features:
//!
//! ```text
//! H_n[r][c] = (-1)^popcount(r & c) / sqrt(n)
//! ```
//!
//! in log2(n) butterfly stages with ascending strides, each sum and difference one rounded float32 operation, scaled at the
//! end: for a power of four every form gives the same bits.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;

use burn::tensor::{Tensor, backend::Backend};

/// `x` `[.., features]`, float32; `n` a power of two that divides the features.
pub fn reference<B: Backend, const D: usize>(x: Tensor<B, D>, n: usize) -> Tensor<B, D> {
    let shape = x.shape();
    let blocks = shape.num_elements() / n;
    let mut y: Tensor<B, 2> = x.reshape([blocks, n]);
    let mut stride = 1;
    while stride < n {
        let pairs = blocks * n / (2 * stride);
        let halves: Tensor<B, 3> = y.reshape([pairs, 2, stride]);
        let low = halves.clone().narrow(1, 0, 1);
        let high = halves.narrow(1, 1, 1);
        y = Tensor::cat(vec![low.clone() + high.clone(), low - high], 1).reshape([blocks, n]);
        stride *= 2;
    }
    (y * (1.0 / (n as f32).sqrt())).reshape(shape)
}
