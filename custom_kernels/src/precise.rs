//! The operations in f64, each result rounded where its steps say: [`Precise`], and the [`Host`] bodies, which every
//! backend has and which any other implementation is held against.

use burn::tensor::{Tensor, TensorData};
use rayon::prelude::*;

use crate::backend::{DeltaHeads, EvaluatorBackend, HeadRequest, HeadScores, RotaryTable, Routing};
use crate::evaluation::{GRAIN, Steps};
use crate::host::gemm64::product;
use crate::host_precise::{tensor, values};
use crate::ops::mixture_of_experts::{self, Mixture};
use crate::ops::{
    causal_attention, causal_conv_silu, delta_gates, gated_delta_rule, gated_rms_norm, offset_rms_norm, project,
    rotary, score_head, sigmoid_gate, swiglu, widen,
};
use crate::precision::Precision;

/// Rows and outputs of one product on a device that makes f64 operands tile by tile: enough for its full speed. With
/// 17,408 inputs the operands of a tile are 1.1 and 0.5 GiB, its result 0.25.
pub const ROW_TILE: usize = 8192;
/// See [`ROW_TILE`].
pub const OUTPUT_TILE: usize = 4096;
/// Scores of one tile of attention on such a device: 1 GiB.
pub const SCORE_ELEMENTS: usize = 1 << 27;

/// Where an operation evaluated in f64 is rounded, and to what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rounding {
    /// Inside.
    pub steps: Steps,
    /// At its result.
    pub to: Precision,
}

/// The operations of [`EvaluatorBackend`] in f64, shapes as there; those that work row by row or element by element take
/// their operands flattened.
pub trait Precise<B: EvaluatorBackend>: Sync {
    /// `x W^T`; see [`project`].
    fn project(&self, x: Tensor<B, 3>, weight: &B::Weight, how: Rounding) -> Tensor<B, 3>;

    /// `residual + x W^T`; see [`project`].
    fn project_add(&self, residual: Tensor<B, 3>, x: Tensor<B, 3>, weight: &B::Weight, how: Rounding) -> Tensor<B, 3>;

    /// `SiLU(x gate^T) * (x up^T)`; see [`swiglu`].
    fn swiglu(&self, x: Tensor<B, 3>, gate: &B::Weight, up: &B::Weight, how: Rounding) -> Tensor<B, 3>;

    /// `residual` plus a mixture of experts of `x`, and the experts that were chosen; see [`mixture_of_experts`].
    fn mixture_of_experts(
        &self,
        residual: Tensor<B, 3>,
        x: Tensor<B, 3>,
        weights: &Mixture<B>,
        how: Rounding,
    ) -> (Tensor<B, 3>, Routing<B>);

    /// RMS norm of rows `[rows, n]` with weight `1 + w`; see [`offset_rms_norm`].
    fn offset_rms_norm(&self, x: Tensor<B, 2>, weight: Tensor<B, 1>, eps: f32, how: Rounding) -> Tensor<B, 2>;

    /// RMS norm of rows `[rows, n]` with weight `w`, times `SiLU(z)`; see [`gated_rms_norm`].
    fn gated_rms_norm(
        &self,
        x: Tensor<B, 2>,
        weight: Tensor<B, 1>,
        z: Tensor<B, 2>,
        eps: f32,
        how: Rounding,
    ) -> Tensor<B, 2>;

    /// Partial rotary embedding; see [`rotary`].
    fn rotary(&self, x: Tensor<B, 4>, table: &RotaryTable<B>, first_position: usize, how: Rounding) -> Tensor<B, 4>;

    /// Causal depthwise convolution and SiLU, and the next tail; see [`causal_conv_silu`].
    fn causal_conv_silu(
        &self,
        x: Tensor<B, 3>,
        weight: Tensor<B, 2>,
        tail: Tensor<B, 3>,
        how: Rounding,
    ) -> (Tensor<B, 3>, Tensor<B, 3>);

    /// Log-decay and write strength of the delta rule, float32; see [`delta_gates`].
    fn delta_gates(
        &self,
        a: Tensor<B, 3>,
        b: Tensor<B, 3>,
        a_log: Tensor<B, 1>,
        dt_bias: Tensor<B, 1>,
        steps: Steps,
    ) -> (Tensor<B, 3>, Tensor<B, 3>);

    /// Gated delta rule, and the next state, float32; see [`gated_delta_rule`].
    fn gated_delta_rule(
        &self,
        qkv: Tensor<B, 3>,
        g: Tensor<B, 3>,
        beta: Tensor<B, 3>,
        state: Tensor<B, 4>,
        heads: DeltaHeads,
        how: Rounding,
    ) -> (Tensor<B, 4>, Tensor<B, 4>);

    /// Causal grouped-query attention; see [`causal_attention`].
    fn causal_attention(
        &self,
        q: Tensor<B, 4>,
        keys: Tensor<B, 4>,
        rows: Tensor<B, 4>,
        first_position: usize,
        how: Rounding,
    ) -> Tensor<B, 4>;

    /// `x * sigmoid(gate)`; see [`sigmoid_gate`].
    fn sigmoid_gate(&self, x: Tensor<B, 1>, gate: Tensor<B, 1>, how: Rounding) -> Tensor<B, 1>;

    /// Log-probabilities, top tokens and candidates; see [`score_head`].
    fn score_head(
        &self,
        hidden: Tensor<B, 2>,
        head: &B::Weight,
        ask: &HeadRequest<'_>,
        logits: Precision,
    ) -> HeadScores;
}

/// Each operation's `precise.rs`, on the processor whatever the backend.
#[derive(Debug, Clone, Copy)]
pub struct Host;

impl<B: EvaluatorBackend> Precise<B> for Host {
    fn project(&self, x: Tensor<B, 3>, weight: &B::Weight, how: Rounding) -> Tensor<B, 3> {
        let ([batch, tokens, _], device) = (x.dims(), x.device());
        let panels = B::panels(weight);
        let y = rounded(&product(&values(x), &panels), how.to);
        tensor(y, [batch, tokens, panels.shape()[0]], &device)
    }

    fn project_add(&self, residual: Tensor<B, 3>, x: Tensor<B, 3>, weight: &B::Weight, how: Rounding) -> Tensor<B, 3> {
        let (shape, device) = (residual.dims(), x.device());
        let mut y = values(residual);
        project::precise::add(&mut y, &product(&values(x), &B::panels(weight)), how.steps, how.to);
        tensor(y, shape, &device)
    }

    fn swiglu(&self, x: Tensor<B, 3>, gate: &B::Weight, up: &B::Weight, how: Rounding) -> Tensor<B, 3> {
        let ([batch, tokens, _], device) = (x.dims(), x.device());
        let (x, gate) = (values(x), B::panels(gate));
        let (of_gate, of_up) = (product(&x, &gate), product(&x, &B::panels(up)));
        let y = swiglu::precise::activate(&of_gate, &of_up, how.steps, how.to);
        tensor(y, [batch, tokens, gate.shape()[0]], &device)
    }

    fn mixture_of_experts(
        &self,
        residual: Tensor<B, 3>,
        x: Tensor<B, 3>,
        weights: &Mixture<B>,
        how: Rounding,
    ) -> (Tensor<B, 3>, Routing<B>) {
        let (shape, device) = (x.dims(), x.device());
        let mut y = values(residual);
        let (experts, shares) = mixture_of_experts::precise::mixture(&mut y, &values(x), weights, how.steps, how.to);
        let routing = routing(experts, shares, weights.top_k, &device);
        (tensor(y, shape, &device), routing)
    }

    fn offset_rms_norm(&self, x: Tensor<B, 2>, weight: Tensor<B, 1>, eps: f32, how: Rounding) -> Tensor<B, 2> {
        let (shape, device) = (x.dims(), x.device());
        let mut y = values(x);
        offset_rms_norm::precise::norm(&mut y, &values(weight), eps, how.steps, how.to);
        tensor(y, shape, &device)
    }

    fn gated_rms_norm(
        &self,
        x: Tensor<B, 2>,
        weight: Tensor<B, 1>,
        z: Tensor<B, 2>,
        eps: f32,
        how: Rounding,
    ) -> Tensor<B, 2> {
        let (shape, device) = (x.dims(), x.device());
        let mut y = values(x);
        gated_rms_norm::precise::norm(&mut y, &values(weight), &values(z), eps, how.steps, how.to);
        tensor(y, shape, &device)
    }

    fn rotary(&self, x: Tensor<B, 4>, table: &RotaryTable<B>, first_position: usize, how: Rounding) -> Tensor<B, 4> {
        let (shape, device) = (x.dims(), x.device());
        let mut y = values(x);
        rotary::precise::rotate(&mut y, table.angles(), first_position, shape, how.steps, how.to);
        tensor(y, shape, &device)
    }

    fn causal_conv_silu(
        &self,
        x: Tensor<B, 3>,
        weight: Tensor<B, 2>,
        tail: Tensor<B, 3>,
        how: Rounding,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let (shape, tail_shape, device) = (x.dims(), tail.dims(), x.device());
        // [batch, W - 1 + tokens, channels]
        let padded = values(Tensor::cat(vec![widen(tail), widen(x)], 1));
        let y = causal_conv_silu::precise::convolve(&padded, &values(weight), shape, how.steps, how.to);
        let next = (padded.chunks_exact((tail_shape[1] + shape[1]) * shape[2]))
            .flat_map(|window| &window[shape[1] * shape[2]..])
            .copied()
            .collect();
        (tensor(y, shape, &device), tensor(next, tail_shape, &device))
    }

    fn delta_gates(
        &self,
        a: Tensor<B, 3>,
        b: Tensor<B, 3>,
        a_log: Tensor<B, 1>,
        dt_bias: Tensor<B, 1>,
        steps: Steps,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let (shape, device) = (a.dims(), a.device());
        let (mut g, mut beta) = (values(a), values(b));
        delta_gates::precise::gates(&mut g, &mut beta, &values(a_log), &values(dt_bias), steps);
        (tensor(g, shape, &device), tensor(beta, shape, &device))
    }

    fn gated_delta_rule(
        &self,
        qkv: Tensor<B, 3>,
        g: Tensor<B, 3>,
        beta: Tensor<B, 3>,
        state: Tensor<B, 4>,
        heads: DeltaHeads,
        how: Rounding,
    ) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let ([batch, tokens, _], state_shape, device) = (qkv.dims(), state.dims(), qkv.device());
        let mut next = values(state);
        let y = gated_delta_rule::precise::recurrent(
            &values(qkv),
            &values(g),
            &values(beta),
            &mut next,
            [batch, tokens],
            heads,
            how.steps,
            how.to,
        );
        let shape = [batch, tokens, heads.value_heads, heads.value_dim];
        (tensor(y, shape, &device), tensor(next, state_shape, &device))
    }

    fn causal_attention(
        &self,
        q: Tensor<B, 4>,
        keys: Tensor<B, 4>,
        rows: Tensor<B, 4>,
        first_position: usize,
        how: Rounding,
    ) -> Tensor<B, 4> {
        let (shape, kv_shape, device) = (q.dims(), keys.dims(), q.device());
        let y = causal_attention::precise::attention(
            &values(q),
            &values(keys),
            &values(rows),
            shape,
            kv_shape,
            first_position,
            how.steps,
            how.to,
        );
        tensor(y, shape, &device)
    }

    fn sigmoid_gate(&self, x: Tensor<B, 1>, gate: Tensor<B, 1>, how: Rounding) -> Tensor<B, 1> {
        let (shape, device) = (x.dims(), x.device());
        let mut y = values(x);
        sigmoid_gate::precise::gate(&mut y, &values(gate), how.steps, how.to);
        tensor(y, shape, &device)
    }

    fn score_head(
        &self,
        hidden: Tensor<B, 2>,
        head: &B::Weight,
        ask: &HeadRequest<'_>,
        logits: Precision,
    ) -> HeadScores {
        score_head::precise::score(&values(hidden), &B::panels(head), ask, logits)
    }
}

/// Experts and their weights, `top_k` per row, as tensors.
pub(crate) fn routing<B: EvaluatorBackend>(
    experts: Vec<i32>,
    shares: Vec<f32>,
    top_k: usize,
    device: &B::Device,
) -> Routing<B> {
    let chosen = [experts.len() / top_k, top_k];
    Routing {
        experts: Tensor::from_data(TensorData::new(experts, chosen), device),
        weights: tensor(shares, chosen, device),
    }
}

/// The nearest values of `to`.
fn rounded(values: &[f64], to: Precision) -> Vec<f32> {
    values.par_iter().with_min_len(GRAIN).map(|&x| to.nearest(x)).collect()
}
