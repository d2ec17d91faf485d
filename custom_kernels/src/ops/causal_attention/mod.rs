//! Causal grouped-query attention. Query head `a` at position `t` reads key head `a / G`, `G = Hq / Hkv`:
//!
//! ```text
//! s_j = q . k_j / sqrt(D)     j = 0..=t
//! o   = sum_j softmax(s)_j v_j
//! ```

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;
pub mod host;
pub mod precise;

use burn::tensor::{Int, Tensor, activation::softmax};

use crate::backend::EvaluatorBackend;
use crate::ops::coded_rows::CodedSides;
use crate::ops::widen;
use crate::precision::Precision;

/// Scores in full, masked above the diagonal: `q` `[batch, tokens, heads, head_dim]`, `keys`, `values`
/// `[batch, kv_heads, capacity, head_dim]`.
pub fn reference<B: EvaluatorBackend>(
    q: Tensor<B, 4>,
    keys: Tensor<B, 4>,
    values: Tensor<B, 4>,
    first_position: usize,
    to: Precision,
) -> Tensor<B, 4> {
    let ([batch, tokens, heads, head_dim], kv_heads) = (q.dims(), keys.dims()[1]);
    let visible = first_position + tokens;
    let device = q.device();
    let expand = |rows: Tensor<B, 4>| {
        widen(rows.slice([0..batch, 0..kv_heads, 0..visible, 0..head_dim]))
            .reshape([batch, kv_heads, 1, visible, head_dim])
            .expand([batch, kv_heads, heads / kv_heads, visible, head_dim])
            .reshape([batch, heads, visible, head_dim])
    };
    let scale = 1.0 / (head_dim as f64).sqrt();
    let scores = widen(q).swap_dims(1, 2).matmul(expand(keys).swap_dims(2, 3)) * scale;

    let key_position = Tensor::<B, 1, Int>::arange(0..visible as i64, &device).reshape([1, 1, 1, visible]);
    let query_position =
        Tensor::<B, 1, Int>::arange(first_position as i64..visible as i64, &device).reshape([1, 1, tokens, 1]);
    let future = key_position
        .expand([batch, heads, tokens, visible])
        .greater(query_position.expand([batch, heads, tokens, visible]));
    let weights = softmax(scores.mask_fill(future, f32::NEG_INFINITY), 3);
    B::round(weights.matmul(expand(values)).swap_dims(1, 2), to)
}

/// Attention over rows in codes, all visible ones decoded first; see [`EvaluatorBackend::coded_attention`].
pub fn over_decoded<B: EvaluatorBackend>(
    q: Tensor<B, 4>,
    keys: Tensor<B, 4, Int>,
    values: Tensor<B, 4, Int>,
    sides: CodedSides,
    first_position: usize,
    to: Precision,
) -> Option<Tensor<B, 4>> {
    let visible = first_position + q.dims()[1];
    let keys = B::decoded_rows(keys, visible, sides.keys, sides.precision)?;
    let values = B::decoded_rows(values, visible, sides.values, sides.precision)?;
    Some(B::causal_attention(q, keys, values, first_position, to))
}
