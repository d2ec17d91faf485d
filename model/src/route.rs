//! Numerical routes: where the forward pass rounds, and to what.
//!
//! The layers are written once. Each result that others can observe is named by a [`Boundary`], and the route says in
//! which precision it exists: `B::causal_attention(q, .., route.at(Boundary::AttentionOutput))`. Between boundaries
//! precision is private to the operation, float32 or better.

use burn::tensor::Tensor;
use perplexity_kernels::{EvaluatorBackend, Precision};

/// An observable result of the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Boundary {
    /// Embedding rows.
    Embedding,
    /// Block and final norms, after the whole expression.
    Norm,
    /// Query, gate, key and value projections of the attention.
    AttentionProjection,
    /// Query and key norms.
    QueryKeyNorm,
    /// Rotated queries and keys; with bfloat16 boundaries this is the key that the cache holds.
    Rotary,
    /// The value as the cache holds it.
    CachedValue,
    /// Attention's weighted sum of values.
    AttentionOutput,
    /// The attention's output times the sigmoid of its gate.
    OutputGate,
    /// Query, key, value and `z` projections of the Gated DeltaNet.
    DeltaNetProjection,
    /// The two scalars per value head that control the delta rule, and the normalised row they are computed from.
    DeltaNetControl,
    /// Convolution with its SiLU.
    Convolution,
    /// The delta rule's output; its state is float32 in every route.
    DeltaRule,
    /// Gated norm of the delta rule's output.
    GatedNorm,
    /// `SiLU(gate) * up`, of unrounded gate and up.
    FeedForward,
    /// What hyper-connections and the n-gram injection project.
    MixProjection,
    /// The activation between a hyper-connection's two projections, and the gated values of the n-gram injection.
    MixActivation,
    /// The residual plus a mixer's or feed-forward's output projection, one rounding for the sum.
    Residual,
    /// Logits.
    Logits,
}

/// A rule for every boundary.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Route {
    /// bfloat16 at every boundary but the controls of the delta rule, values cached in half precision.
    #[default]
    Normal,
    /// No rounding beyond float32 anywhere.
    Exact,
}

impl Route {
    /// The precision in which the result at `boundary` exists.
    pub fn at(self, boundary: Boundary) -> Precision {
        match (self, boundary) {
            (Self::Exact, _) | (Self::Normal, Boundary::DeltaNetControl) => Precision::Full,
            (Self::Normal, Boundary::CachedValue) => Precision::F16,
            (Self::Normal, _) => Precision::Bf16,
        }
    }

    /// Whether projections see their inputs in 8 or 4 bits where the model permits it.
    pub fn narrows_activations(self) -> bool {
        self == Self::Normal
    }

    /// `x` as it exists at `boundary`, where rounding is not part of an operation.
    pub fn round<B: EvaluatorBackend, const D: usize>(self, boundary: Boundary, x: Tensor<B, D>) -> Tensor<B, D> {
        B::round(x, self.at(boundary))
    }

    /// `normal` or `exact`, as options and reports spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Exact => "exact",
        }
    }
}
