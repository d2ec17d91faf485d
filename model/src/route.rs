//! Numerical routes: where the forward pass rounds, and to what.
//!
//! The layers are written once. Each result that others can observe is named by a [`Boundary`], and the route says how it
//! is evaluated and in which precision it exists: `route.on(Boundary::AttentionOutput).causal_attention(q, ..)`.
//!
//! | route | operations | boundaries |
//! |---|---|---|
//! | normal | the backend's, float32 or better inside | bfloat16 |
//! | exact | the backend's | none |
//! | reproducible | those of the CPU backends, every sum in a fixed order | as normal |
//! | reference | f64, rounded once at the boundary | as normal |
//! | lossless | f64, rounded after each operation of Hugging Face's eager bfloat16 model | its own: all bfloat16, float32 logits |

use burn::tensor::Tensor;
use perplexity_kernels::evaluation::{Arithmetic, Steps};
use perplexity_kernels::ops::rotary::Angles;
use perplexity_kernels::{Evaluation, EvaluatorBackend, Precision};

use crate::config::TextConfig;

/// Version of the boundaries and steps below; a change that moves a result changes it.
pub const ROUNDING_CONTRACT: &str = "1";

/// The version of transformers whose operations [`Route::Lossless`] follows.
pub const TRANSFORMERS: &str = "5.24.0";

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
    /// Normalised keys and queries on the way to a result of their own: the indexer's before their rotation, the n-gram
    /// injection's.
    InnerNorm,
    /// What experts are chosen and weighted by, the shared one too.
    Routing,
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
    /// The normal boundaries, and the same bits for every pass size, batch and thread count.
    Reproducible,
    /// The normal boundaries, each evaluated in f64 and rounded once.
    Reference,
    /// Hugging Face's sequence of operations, each correctly rounded.
    Lossless,
    /// Lossless but for one boundary, which is evaluated in f64 and rounded once: shows what its inner roundings do.
    LosslessBut(Boundary),
}

impl Route {
    /// The precision in which the result at `boundary` exists.
    pub fn at(self, boundary: Boundary) -> Precision {
        match (self, boundary) {
            (Self::Exact, _) => Precision::Full,
            (Self::Lossless | Self::LosslessBut(_), Boundary::Logits) => Precision::Full,
            (Self::Lossless | Self::LosslessBut(_), _) => Precision::Bf16,
            (_, Boundary::DeltaNetControl | Boundary::InnerNorm | Boundary::Routing) => Precision::Full,
            (_, Boundary::CachedValue) => Precision::F16,
            _ => Precision::Bf16,
        }
    }

    /// How the result at `boundary` is evaluated.
    pub fn on(self, boundary: Boundary) -> Evaluation {
        let arithmetic = match self {
            Self::Normal | Self::Exact | Self::Reproducible => Arithmetic::Native,
            Self::Reference => Arithmetic::Precise(Steps::Once),
            Self::LosslessBut(but) if but == boundary => Arithmetic::Precise(Steps::Once),
            Self::Lossless | Self::LosslessBut(_) => Arithmetic::Precise(Steps::Each),
        };
        Evaluation {
            arithmetic,
            to: self.at(boundary),
        }
    }

    /// Whether projections see their inputs in 8 or 4 bits where the model permits it.
    pub fn narrows_activations(self) -> bool {
        matches!(self, Self::Normal | Self::Reproducible | Self::Reference)
    }

    /// `x` as it exists at `boundary`, where rounding is not part of an operation.
    pub fn round<B: EvaluatorBackend, const D: usize>(self, boundary: Boundary, x: Tensor<B, D>) -> Tensor<B, D> {
        B::round(x, self.at(boundary))
    }

    /// Rotary angles of `positions`.
    pub fn angles(self, frequencies: &[f64], magnitude: f64, positions: &[f64]) -> Angles {
        match self.on(Boundary::Rotary).arithmetic {
            Arithmetic::Precise(Steps::Each) => Angles::stepwise(frequencies, magnitude, positions),
            _ => Angles::new(frequencies, magnitude, positions),
        }
    }

    /// Whether every operation is evaluated in f64. Such a route sees a window in one pass, because the delta rule's state is
    /// f64 only within one.
    pub fn is_precise(self) -> bool {
        self.on(Boundary::Residual).arithmetic != Arithmetic::Native
    }

    /// Whether weights are rounded to bfloat16 when they are loaded, as a bfloat16 model holds them.
    pub fn rounds_weights(self) -> bool {
        matches!(self, Self::Lossless | Self::LosslessBut(_))
    }

    /// Whether devices keep weights with the values they are stored with; other routes may round them to bfloat16.
    pub fn keeps_weights(self) -> bool {
        matches!(self, Self::Exact | Self::Reference)
    }

    /// Precision of the logits of a model; float32 in every route of Qwen3.8-Flash-Next.
    pub fn logits(self, config: &TextConfig) -> Precision {
        match config.flash_next {
            Some(_) => Precision::Full,
            None => self.at(Boundary::Logits),
        }
    }

    /// The same as reports spell it.
    pub fn logits_dtype(self, config: &TextConfig) -> &'static str {
        match self.logits(config) {
            Precision::Full => "f32",
            Precision::Bf16 => "bf16",
            Precision::F16 => "f16",
        }
    }

    /// As options and reports spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Exact => "exact",
            Self::Reproducible => "reproducible",
            Self::Reference => "reference",
            Self::Lossless => "lossless",
            Self::LosslessBut(_) => "lossless but for one boundary",
        }
    }
}
