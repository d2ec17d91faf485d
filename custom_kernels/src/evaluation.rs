//! How an operation is evaluated, chosen per result by the numerical route.
//!
//! [`Arithmetic::Native`] is the backend's own operation. The precise forms compute in f64, [`EvaluatorBackend::precise`]
//! says where: one body for both choices of [`Steps`].

use burn::tensor::Tensor;

use crate::backend::{DeltaHeads, EvaluatorBackend, HeadRequest, HeadScores, RotaryTable, Routing};
use crate::ops::mixture_of_experts::Mixture;
use crate::precise::Rounding;
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
    /// Where the result is rounded when it is evaluated in f64; `None` for the backend's own operation.
    fn precise(self) -> Option<Rounding> {
        match self.arithmetic {
            Arithmetic::Native => None,
            Arithmetic::Precise(steps) => Some(Rounding { steps, to: self.to }),
        }
    }

    /// `x W^T`; see [`project`](crate::ops::project).
    pub fn project<B: EvaluatorBackend>(self, x: Tensor<B, 3>, weight: &B::Weight) -> Tensor<B, 3> {
        match self.precise() {
            None => B::project(x, weight, self.to),
            Some(how) => B::precise(&x.device()).project(x, weight, how),
        }
    }

    /// `residual + x W^T`; see [`project`](crate::ops::project).
    pub fn project_add<B: EvaluatorBackend>(
        self,
        residual: Tensor<B, 3>,
        x: Tensor<B, 3>,
        weight: &B::Weight,
    ) -> Tensor<B, 3> {
        match self.precise() {
            None => B::project_add(residual, x, weight, self.to),
            Some(how) => B::precise(&x.device()).project_add(residual, x, weight, how),
        }
    }

    /// `SiLU(x gate^T) * (x up^T)`; see [`swiglu`](crate::ops::swiglu).
    pub fn swiglu<B: EvaluatorBackend>(self, x: Tensor<B, 3>, gate: &B::Weight, up: &B::Weight) -> Tensor<B, 3> {
        match self.precise() {
            None => B::swiglu(x, gate, up, self.to),
            Some(how) => B::precise(&x.device()).swiglu(x, gate, up, how),
        }
    }

    /// `residual` plus a mixture of experts of `x`, and the experts that were chosen; see [`mixture_of_experts`](crate::ops::mixture_of_experts).
    pub fn mixture_of_experts<B: EvaluatorBackend>(
        self,
        residual: Tensor<B, 3>,
        x: Tensor<B, 3>,
        weights: &Mixture<B>,
    ) -> (Tensor<B, 3>, Routing<B>) {
        match self.precise() {
            None => B::mixture_of_experts(residual, x, weights, self.to),
            Some(how) => B::precise(&x.device()).mixture_of_experts(residual, x, weights, how),
        }
    }

    /// RMS norm with weight `1 + w`; see [`offset_rms_norm`](crate::ops::offset_rms_norm).
    pub fn offset_rms_norm<B: EvaluatorBackend, const D: usize>(
        self,
        x: Tensor<B, D>,
        weight: Tensor<B, 1>,
        eps: f32,
    ) -> Tensor<B, D> {
        match self.precise() {
            None => B::offset_rms_norm(x, weight, eps, self.to),
            Some(how) => {
                let shape = x.dims();
                let y = B::precise(&x.device()).offset_rms_norm(rows(x), weight, eps, how);
                y.reshape(shape)
            }
        }
    }

    /// RMS norm with weight `w`, times `SiLU(z)`; see [`gated_rms_norm`](crate::ops::gated_rms_norm).
    pub fn gated_rms_norm<B: EvaluatorBackend, const D: usize>(
        self,
        x: Tensor<B, D>,
        weight: Tensor<B, 1>,
        z: Tensor<B, D>,
        eps: f32,
    ) -> Tensor<B, D> {
        match self.precise() {
            None => B::gated_rms_norm(x, weight, z, eps, self.to),
            Some(how) => {
                let shape = x.dims();
                let y = B::precise(&x.device()).gated_rms_norm(rows(x), weight, rows(z), eps, how);
                y.reshape(shape)
            }
        }
    }

    /// Partial rotary embedding; see [`rotary`](crate::ops::rotary).
    pub fn rotary<B: EvaluatorBackend>(
        self,
        x: Tensor<B, 4>,
        table: &RotaryTable<B>,
        first_position: usize,
    ) -> Tensor<B, 4> {
        match self.precise() {
            None => B::rotary(x, table, first_position, self.to),
            Some(how) => B::precise(&x.device()).rotary(x, table, first_position, how),
        }
    }

    /// Causal depthwise convolution and SiLU, and the next tail; see [`causal_conv_silu`](crate::ops::causal_conv_silu).
    pub fn causal_conv_silu<B: EvaluatorBackend>(
        self,
        x: Tensor<B, 3>,
        weight: Tensor<B, 2>,
        tail: Tensor<B, 3>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        match self.precise() {
            None => B::causal_conv_silu(x, weight, tail, self.to),
            Some(how) => B::precise(&x.device()).causal_conv_silu(x, weight, tail, how),
        }
    }

    /// Log-decay and write strength of the delta rule, float32 whatever the precision; see [`delta_gates`](crate::ops::delta_gates).
    pub fn delta_gates<B: EvaluatorBackend>(
        self,
        a: Tensor<B, 3>,
        b: Tensor<B, 3>,
        a_log: Tensor<B, 1>,
        dt_bias: Tensor<B, 1>,
    ) -> (Tensor<B, 3>, Tensor<B, 3>) {
        match self.precise() {
            None => B::delta_gates(a, b, a_log, dt_bias),
            Some(how) => B::precise(&a.device()).delta_gates(a, b, a_log, dt_bias, how.steps),
        }
    }

    /// Gated delta rule, and the next state; see [`gated_delta_rule`](crate::ops::gated_delta_rule). The state between passes is float32: only within a
    /// pass is a precise one f64.
    pub fn gated_delta_rule<B: EvaluatorBackend>(
        self,
        qkv: Tensor<B, 3>,
        g: Tensor<B, 3>,
        beta: Tensor<B, 3>,
        state: Tensor<B, 4>,
        heads: DeltaHeads,
    ) -> (Tensor<B, 4>, Tensor<B, 4>) {
        match self.precise() {
            None => B::gated_delta_rule(qkv, g, beta, state, heads, self.to),
            Some(how) => B::precise(&qkv.device()).gated_delta_rule(qkv, g, beta, state, heads, how),
        }
    }

    /// Causal grouped-query attention; see [`causal_attention`](crate::ops::causal_attention).
    pub fn causal_attention<B: EvaluatorBackend>(
        self,
        q: Tensor<B, 4>,
        keys: Tensor<B, 4>,
        rows: Tensor<B, 4>,
        first_position: usize,
    ) -> Tensor<B, 4> {
        match self.precise() {
            None => B::causal_attention(q, keys, rows, first_position, self.to),
            Some(how) => B::precise(&q.device()).causal_attention(q, keys, rows, first_position, how),
        }
    }

    /// `x * sigmoid(gate)`; see [`sigmoid_gate`](crate::ops::sigmoid_gate).
    pub fn sigmoid_gate<B: EvaluatorBackend, const D: usize>(
        self,
        x: Tensor<B, D>,
        gate: Tensor<B, D>,
    ) -> Tensor<B, D> {
        match self.precise() {
            None => B::sigmoid_gate(x, gate, self.to),
            Some(how) => {
                let shape = x.dims();
                let flat = |x: Tensor<B, D>| x.reshape([-1]);
                let y = B::precise(&x.device()).sigmoid_gate(flat(x), flat(gate), how);
                y.reshape(shape)
            }
        }
    }

    /// Log-probabilities, top tokens and candidates; see [`score_head`](crate::ops::score_head).
    pub fn score_head<B: EvaluatorBackend>(
        self,
        hidden: Tensor<B, 2>,
        head: &B::Weight,
        ask: &HeadRequest<'_>,
    ) -> HeadScores {
        match self.precise() {
            None => B::score_head(hidden, head, ask, self.to),
            Some(how) => B::precise(&hidden.device()).score_head(hidden, head, ask, how.to),
        }
    }
}

/// Elements per task.
pub(crate) const GRAIN: usize = 1 << 12;

/// `x` as rows of its last axis.
fn rows<B: EvaluatorBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, 2> {
    let width = x.dims()[D - 1];
    x.reshape([-1, width as i32])
}
