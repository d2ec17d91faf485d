//! The operations, one folder each.

pub mod append_rows;
pub mod causal_attention;
pub mod causal_conv_silu;
pub mod coded_rows;
pub mod delta_gates;
pub mod embed_tokens;
pub mod expand_weight;
pub mod expert_feed_forward;
pub mod gated_delta_rule;
pub mod gated_rms_norm;
pub mod hadamard;
pub mod hyper_connection;
pub mod mixture_of_experts;
pub mod ngram_injection;
pub mod offset_rms_norm;
pub mod packed_experts;
pub mod project;
pub mod quantize_rows;
pub mod rotary;
pub mod round;
pub mod route_experts;
pub mod score_head;
pub mod sigmoid_gate;
pub mod sparse_attention;
pub mod swiglu;

use burn::tensor::{FloatDType, Tensor, backend::Backend};

/// A float32 view of `x`, for bodies that compute in float32 whatever the storage.
pub fn widen<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    x.cast(FloatDType::F32)
}
