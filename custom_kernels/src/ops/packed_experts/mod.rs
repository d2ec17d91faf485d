//! Routed experts in packed records, multiplied on a device in exact integers, and the mixture of their outputs:
//!
//! ```text
//! expert_e(x) = bf16(SiLU(x gate_e^T) * (x up_e^T)) down_e^T         every product rounded to bfloat16
//! y           = sum_i w_i expert_{e_i}(x) + sigmoid(score) shared    in float32, in the order of the ranks
//! ```
//!
//! A record holds interleaved gate and up rows `[2 inner, hidden]`, then down `[hidden, inner]`, in units of 16 by 16 E2M1
//! codes with an E4M3FN scale per row of a unit, 144 bytes each. Codes, scales and rows are integers, so that sums are exact
//! and their order changes nothing; the host's products of the same integers have the same bits.

use burn::tensor::activation::sigmoid;
use burn::tensor::{Int, Tensor};

use crate::backend::EvaluatorBackend;
use crate::ops::widen;
use crate::precision::Precision;

/// Rows and columns of a unit.
pub const UNIT: usize = 16;
/// Bytes of a unit.
pub const UNIT_BYTES: usize = 144;

/// Experts on a device, and the rows that chose them.
#[derive(Debug)]
pub struct PackedExperts<'a, B: EvaluatorBackend> {
    /// The records as words, one every `stride` bytes.
    pub records: &'a Tensor<B, 1, Int>,
    /// Bytes from record to record, a multiple of 16.
    pub stride: usize,
    /// Inner width, a multiple of [`UNIT`].
    pub inner: usize,
    /// Of each expert the factors of its exact sums: those of gate, up and down.
    pub factors: &'a [[f32; 3]],
    /// Of each expert the scales of 4-bit activations at the inputs of gate, up and down, the first two alike; `None` for
    /// 16-bit activations.
    pub scales: Option<&'a [[f32; 3]]>,
    /// Of each expert how many rows chose it.
    pub counts: &'a [usize],
    /// The places in `[rows, top_k]` of those choices, expert after expert.
    pub choices: &'a [u32],
    /// Experts per row.
    pub top_k: usize,
}

/// The mixture `[batch, tokens, hidden]` of `outputs` `[batch * tokens, top_k, hidden]` by `weights`
/// `[batch * tokens, top_k]`, and of `shared` by the sigmoid of `scores` `[batch, tokens, 1]`.
pub fn reference<B: EvaluatorBackend>(
    outputs: Tensor<B, 3>,
    weights: Tensor<B, 2>,
    shared: Tensor<B, 3>,
    scores: Tensor<B, 3>,
    to: Precision,
) -> Tensor<B, 3> {
    let (shape, [rows, top_k, hidden]) = (shared.dims(), outputs.dims());
    let term = |rank: usize| {
        let output = widen(outputs.clone().narrow(1, rank, 1)).reshape([rows, hidden]);
        output * weights.clone().narrow(1, rank, 1)
    };
    let routed = (1..top_k).fold(term(0), |sum, rank| sum + term(rank));
    B::round(routed.reshape(shape) + widen(shared) * sigmoid(widen(scores)), to)
}
