//! A projection, `y = x W^T`, and how it sees its input:
//!
//! ```text
//! x' = x                                   16-bit activations
//! x' = x as an activation format has it    where the model's file permits it
//! ```
//!
//! 8-bit integers are for whole tiles of 128 tokens, as in the engine that has them: the rest of a pass stays as it is.

use burn::tensor::{Tensor, activation::silu};
use perplexity_kernels::backend::ActivationFormat;
use perplexity_kernels::evaluation::Arithmetic;
use perplexity_kernels::{Evaluation, EvaluatorBackend, Precision};

use crate::calibrate::Maximum;

/// Tokens of one tile of an integer product.
const INTEGER_TILE: usize = 128;

/// What a projection multiplies.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Input {
    /// The values as they are.
    #[default]
    Plain,
    /// The values as the format represents them.
    Quantized(ActivationFormat),
    /// The values as they are, their largest magnitude noted.
    Observed(Maximum),
}

/// A weight and its view of the input.
#[derive(Debug, Clone)]
pub struct Linear<B: EvaluatorBackend> {
    weight: B::Weight,
    input: Input,
}

impl<B: EvaluatorBackend> Linear<B> {
    /// `weight` `[out, in]`, seeing its input as `input` says.
    pub fn new(weight: B::Weight, input: Input) -> Self {
        Self { weight, input }
    }

    /// `x W^T`, `[batch, tokens, in]` to `[batch, tokens, out]`.
    pub fn forward(&self, x: Tensor<B, 3>, how: Evaluation) -> Tensor<B, 3> {
        match self.narrowed_by_backend(how) {
            Some(format) => B::project_quantized(x, format, &self.weight, None, how.to),
            None => how.project(self.see(x), &self.weight),
        }
    }

    /// `residual + x W^T`, rounded once.
    pub fn forward_add(&self, residual: Tensor<B, 3>, x: Tensor<B, 3>, how: Evaluation) -> Tensor<B, 3> {
        match self.narrowed_by_backend(how) {
            Some(format) => B::project_quantized(x, format, &self.weight, Some(residual), how.to),
            None => how.project_add(residual, self.see(x), &self.weight),
        }
    }

    /// `SiLU(x gate^T) * (x up^T)`.
    pub fn swiglu(gate: &Self, up: &Self, x: Tensor<B, 3>, how: Evaluation) -> Tensor<B, 3> {
        if gate.input == up.input {
            return match gate.narrowed_by_backend(how) {
                Some(format) => B::swiglu_quantized(x, format, &gate.weight, &up.weight, how.to),
                None => how.swiglu(gate.see(x), &gate.weight, &up.weight),
            };
        }
        let full = Evaluation {
            to: Precision::Full,
            ..how
        };
        let gate = gate.forward(x.clone(), full);
        B::round(silu(gate) * up.forward(x, full), how.to)
    }

    /// The format that the product itself brings its rows to: that of whole rows, where the backend evaluates it.
    fn narrowed_by_backend(&self, how: Evaluation) -> Option<ActivationFormat> {
        match self.input {
            // Only some rows of a pass.
            Input::Quantized(ActivationFormat::Int8) => None,
            Input::Quantized(format) => (how.arithmetic == Arithmetic::Native).then_some(format),
            _ => None,
        }
    }

    /// `x` as the weight meets it.
    fn see(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        match &self.input {
            Input::Plain => x,
            Input::Observed(maximum) => {
                maximum.observe(x.clone());
                x
            }
            Input::Quantized(ActivationFormat::Int8) => {
                let tokens = x.dims()[1];
                let tiled = tokens / INTEGER_TILE * INTEGER_TILE;
                let quantized = |x| B::quantize_rows(x, ActivationFormat::Int8);
                match (tiled, tokens - tiled) {
                    (0, _) => x,
                    (_, 0) => quantized(x),
                    (_, rest) => {
                        let last = x.clone().narrow(1, tiled, rest);
                        Tensor::cat(vec![quantized(x.narrow(1, 0, tiled)), last], 1)
                    }
                }
            }
            Input::Quantized(format) => B::quantize_rows(x, *format),
        }
    }
}
