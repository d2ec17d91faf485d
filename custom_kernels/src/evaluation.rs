//! How an operation is evaluated, chosen per result by the numerical route.
//!
//! [`Arithmetic::Native`] is the backend's own operation. The precise forms compute in f64 on the host, whatever the
//! backend: each operation's `precise.rs`, one body for both choices of [`Steps`].

use burn::tensor::{Tensor, TensorData, backend::Backend};
use rayon::prelude::*;

use crate::backend::{DeltaHeads, EvaluatorBackend, HeadRequest, HeadScores, RotaryTable, Routing};
use crate::host::gemm64::product;
use crate::ops::mixture_of_experts::{self, Mixture, mixture};
use crate::ops::{
    causal_attention, causal_conv_silu, delta_gates, gated_delta_rule, gated_rms_norm, offset_rms_norm, project,
    rotary, score_head, sigmoid_gate, swiglu,
};
use crate::precision::Precision;

/// What an operation computes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// The backend's own operation: float32 or better inside.
    Native,
    /// f64, rounded where the steps say.
    Precise(Steps),
}

/// Where a formula evaluated in f64 is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Steps {
    /// Once, at its result.
    Once,
    /// After every operation of Hugging Face's eager bfloat16 model, to the type that PyTorch gives its result.
    Each,
}

impl Steps {
    /// The result of an operation whose type is bfloat16.
    #[inline]
    pub(crate) fn bf16(self, x: f64) -> f64 {
        match self {
            Self::Once => x,
            Self::Each => Precision::Bf16.nearest(x).into(),
        }
    }

    /// The result of an operation whose type is float32.
    #[inline]
    pub(crate) fn f32(self, x: f64) -> f64 {
        match self {
            Self::Once => x,
            Self::Each => f64::from(x as f32),
        }
    }
}

/// How one result is evaluated; each method is the operation of that name in [`EvaluatorBackend`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Evaluation {
    /// What the operation computes with.
    pub arithmetic: Arithmetic,
    /// The precision in which its result is observable.
    pub to: Precision,
}

impl From<Precision> for Evaluation {
    /// The backend's own operation.
    fn from(to: Precision) -> Self {
        let arithmetic = Arithmetic::Native;
        Self { arithmetic, to }
    }
}

impl Evaluation {
    /// `x W^T`; see [`project`].
    pub fn project<B: EvaluatorBackend>(self, x: Tensor<B, 3>, weight: &B::Weight) -> Tensor<B, 3> {
        let Arithmetic::Precise(_) = self.arithmetic else {
            return B::project(x, weight, self.to);
        };
        let ([batch, tokens, _], device) = (x.dims(), x.device());
        let panels = B::panels(weight);
        let y = rounded(&product(&values(x), &panels), self.to);
        tensor(y, [batch, tokens, panels.shape()[0]], &device)
    }

    /// `residual + x W^T`; see [`project`].
    pub fn project_add<B: EvaluatorBackend>(
        self,
        residual: Tensor<B, 3>,
        x: Tensor<B, 3>,
        weight: &B::Weight,
    ) -> Tensor<B, 3> {
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return B::project_add(residual, x, weight, self.to);
        };
        let (shape, device) = (residual.dims(), x.device());
        let mut y = values(residual);
        project::precise::add(&mut y, &product(&values(x), &B::panels(weight)), steps, self.to);
        tensor(y, shape, &device)
    }

    /// `SiLU(x gate^T) * (x up^T)`; see [`swiglu`].
    pub fn swiglu<B: EvaluatorBackend>(self, x: Tensor<B, 3>, gate: &B::Weight, up: &B::Weight) -> Tensor<B, 3> {
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return B::swiglu(x, gate, up, self.to);
        };
        let ([batch, tokens, _], device) = (x.dims(), x.device());
        let (x, gate) = (values(x), B::panels(gate));
        let y = swiglu::precise::activate(&product(&x, &gate), &product(&x, &B::panels(up)), steps, self.to);
        tensor(y, [batch, tokens, gate.shape()[0]], &device)
    }

    /// `residual` plus a mixture of experts of `x`, and the experts that were chosen; see [`mixture_of_experts`].
    pub fn mixture_of_experts<B: EvaluatorBackend>(
        self,
        residual: Tensor<B, 3>,
        x: Tensor<B, 3>,
        weights: &Mixture<B>,
    ) -> (Tensor<B, 3>, Routing<B>) {
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return mixture(residual, x, weights, self.to);
        };
        let (shape, device) = (x.dims(), x.device());
        let mut y = values(residual);
        let (experts, shares) = mixture_of_experts::precise::mixture(&mut y, &values(x), weights, steps, self.to);
        let chosen = [shape[0] * shape[1], weights.top_k];
        let routing = Routing {
            experts: Tensor::from_data(TensorData::new(experts, chosen), &device),
            weights: tensor(shares, chosen, &device),
        };
        (tensor(y, shape, &device), routing)
    }

    /// RMS norm with weight `1 + w`; see [`offset_rms_norm`].
    pub fn offset_rms_norm<B: EvaluatorBackend, const D: usize>(
        self,
        x: Tensor<B, D>,
        weight: Tensor<B, 1>,
        eps: f32,
    ) -> Tensor<B, D> {
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return B::offset_rms_norm(x, weight, eps, self.to);
        };
        let (shape, device) = (x.dims(), x.device());
        let mut y = values(x);
        offset_rms_norm::precise::norm(&mut y, &values(weight), eps, steps, self.to);
        tensor(y, shape, &device)
    }

    /// RMS norm with weight `w`, times `SiLU(z)`; see [`gated_rms_norm`].
    pub fn gated_rms_norm<B: EvaluatorBackend, const D: usize>(
        self,
        x: Tensor<B, D>,
        weight: Tensor<B, 1>,
        z: Tensor<B, D>,
        eps: f32,
    ) -> Tensor<B, D> {
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return B::gated_rms_norm(x, weight, z, eps, self.to);
        };
        let (shape, device) = (x.dims(), x.device());
        let mut y = values(x);
        gated_rms_norm::precise::norm(&mut y, &values(weight), &values(z), eps, steps, self.to);
        tensor(y, shape, &device)
    }

    /// Partial rotary embedding; see [`rotary`].
    pub fn rotary<B: EvaluatorBackend>(
        self,
        x: Tensor<B, 4>,
        table: &RotaryTable<B>,
        first_position: usize,
    ) -> Tensor<B, 4> {
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return B::rotary(x, table, first_position, self.to);
        };
        let (shape, device) = (x.dims(), x.device());
        let mut y = values(x);
        rotary::precise::rotate(&mut y, table.angles(), first_position, shape, steps, self.to);
        tensor(y, shape, &device)
    }

    /// Causal depthwise convolution and SiLU, and the next tail; see [`causal_conv_silu`].
    pub fn causal_conv_silu<B: EvaluatorBackend>(
        self,
        x: Tensor<B, 3>,
        weight: Tensor<B, 2>,
        tail: Tensor<B, 3>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return B::causal_conv_silu(x, weight, tail, self.to);
        };
        let (shape, tail_shape, device) = (x.dims(), tail.dims(), x.device());
        // [batch, W - 1 + tokens, channels]
        let padded = values(Tensor::cat(vec![tail, x.clone()], 1));
        let y = causal_conv_silu::precise::convolve(&padded, &values(weight), shape, steps, self.to);
        let next = (padded.chunks_exact((tail_shape[1] + shape[1]) * shape[2]))
            .flat_map(|window| &window[shape[1] * shape[2]..])
            .copied()
            .collect();
        (tensor(y, shape, &device), tensor(next, tail_shape, &device))
    }

    /// Log-decay and write strength of the delta rule, float32 whatever the precision; see [`delta_gates`].
    pub fn delta_gates<B: EvaluatorBackend>(
        self,
        a: Tensor<B, 3>,
        b: Tensor<B, 3>,
        a_log: Tensor<B, 1>,
        dt_bias: Tensor<B, 1>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return B::delta_gates(a, b, a_log, dt_bias);
        };
        let (shape, device) = (a.dims(), a.device());
        let (mut g, mut beta) = (values(a), values(b));
        delta_gates::precise::gates(&mut g, &mut beta, &values(a_log), &values(dt_bias), steps);
        (tensor(g, shape, &device), tensor(beta, shape, &device))
    }

    /// Gated delta rule, and the next state; see [`gated_delta_rule`]. The state between passes is float32: only within a
    /// pass is a precise one f64.
    pub fn gated_delta_rule<B: EvaluatorBackend>(
        self,
        qkv: Tensor<B, 3>,
        g: Tensor<B, 3>,
        beta: Tensor<B, 3>,
        state: Tensor<B, 4>,
        heads: DeltaHeads,
    ) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return B::gated_delta_rule(qkv, g, beta, state, heads, self.to);
        };
        let ([batch, tokens, _], state_shape, device) = (qkv.dims(), state.dims(), qkv.device());
        let mut next = values(state);
        let y = gated_delta_rule::precise::recurrent(
            &values(qkv),
            &values(g),
            &values(beta),
            &mut next,
            [batch, tokens],
            heads,
            steps,
            self.to,
        );
        let shape = [batch, tokens, heads.value_heads, heads.value_dim];
        (tensor(y, shape, &device), tensor(next, state_shape, &device))
    }

    /// Causal grouped-query attention; see [`causal_attention`].
    pub fn causal_attention<B: EvaluatorBackend>(
        self,
        q: Tensor<B, 4>,
        keys: Tensor<B, 4>,
        rows: Tensor<B, 4>,
        first_position: usize,
    ) -> Tensor<B, 4> {
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return B::causal_attention(q, keys, rows, first_position, self.to);
        };
        let (shape, kv_shape, device) = (q.dims(), keys.dims(), q.device());
        let y = causal_attention::precise::attention(
            &values(q),
            &values(keys),
            &values(rows),
            shape,
            kv_shape,
            first_position,
            steps,
            self.to,
        );
        tensor(y, shape, &device)
    }

    /// `x * sigmoid(gate)`; see [`sigmoid_gate`].
    pub fn sigmoid_gate<B: EvaluatorBackend, const D: usize>(
        self,
        x: Tensor<B, D>,
        gate: Tensor<B, D>,
    ) -> Tensor<B, D> {
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return B::sigmoid_gate(x, gate, self.to);
        };
        let (shape, device) = (x.dims(), x.device());
        let mut y = values(x);
        sigmoid_gate::precise::gate(&mut y, &values(gate), steps, self.to);
        tensor(y, shape, &device)
    }

    /// Log-probabilities, top tokens and candidates; see [`score_head`].
    pub fn score_head<B: EvaluatorBackend>(
        self,
        hidden: Tensor<B, 2>,
        head: &B::Weight,
        ask: &HeadRequest<'_>,
    ) -> HeadScores {
        let Arithmetic::Precise(_) = self.arithmetic else {
            return B::score_head(hidden, head, ask, self.to);
        };
        score_head::precise::score(&values(hidden), &B::panels(head), ask, self.to)
    }
}

/// Elements per task.
pub(crate) const GRAIN: usize = 1 << 12;

/// The nearest values of `to`.
fn rounded(values: &[f64], to: Precision) -> Vec<f32> {
    values.par_iter().with_min_len(GRAIN).map(|&x| to.nearest(x)).collect()
}

fn values<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f32> {
    x.into_data()
        .convert::<f32>()
        .into_vec()
        .expect("converted to f32 just now")
}

fn tensor<B: Backend, const D: usize>(values: Vec<f32>, shape: [usize; D], device: &B::Device) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values, shape), device)
}
