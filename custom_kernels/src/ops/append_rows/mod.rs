//! `cache[b, h, at + t] = rows[b, t, h]`.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;
pub mod host;

use burn::tensor::{Tensor, backend::Backend};

use crate::ops::widen;

/// `rows` `[batch, tokens, kv_heads, head_dim]` into `cache` `[batch, kv_heads, capacity, head_dim]`.
pub fn reference<B: Backend>(cache: Tensor<B, 4>, rows: Tensor<B, 4>, at: usize) -> Tensor<B, 4> {
    let [batch, tokens, heads, head_dim] = rows.dims();
    let place = [0..batch, 0..heads, at..at + tokens, 0..head_dim];
    widen(cache).slice_assign(place, widen(rows).swap_dims(1, 2))
}
