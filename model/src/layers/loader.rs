//! From named parameters to weights on the device.

use burn::tensor::{Tensor, TensorData};
use perplexity_kernels::backend::Expert;
use perplexity_kernels::{EvaluatorBackend, Precision};

use super::linear::{Input, Linear};
use crate::activations::Activations;
use crate::calibrate::Maxima;
use crate::formats::{self, EncodeMethod, Format, FormatError};
use crate::scorer::ModelError;
use crate::source::TextSource;

/// What becomes of weights on loading.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LoadOptions {
    /// Grouped-integer format that the output head is rounded to.
    pub output_head: Option<Format>,
    /// The same of the token embedding.
    pub embedding: Option<Format>,
    /// Projections that see their inputs narrowed.
    pub activations: Activations,
    /// Where projections note the magnitudes of their inputs; then none is narrowed.
    pub maxima: Option<Maxima>,
}

impl LoadOptions {
    /// The format that parameter `name` is rounded to.
    fn format(&self, name: &str) -> Option<Format> {
        match name {
            "text/output_head" => self.output_head,
            "text/token_embedding" => self.embedding,
            _ => None,
        }
    }
}

/// Loads parameters under one name prefix.
#[derive(Clone)]
pub struct Loader<'a, B: EvaluatorBackend> {
    source: &'a dyn TextSource,
    options: &'a LoadOptions,
    device: &'a B::Device,
    prefix: String,
}

impl<'a, B: EvaluatorBackend> Loader<'a, B> {
    /// Names are taken under `text/`.
    pub fn new(source: &'a dyn TextSource, options: &'a LoadOptions, device: &'a B::Device) -> Self {
        Self {
            source,
            options,
            device,
            prefix: "text/".into(),
        }
    }

    /// Names are taken under `name/` from here.
    pub fn scope(&self, name: &str) -> Self {
        Self {
            prefix: format!("{}{name}/", self.prefix),
            ..self.clone()
        }
    }

    /// Matrix `[out, in]`.
    pub fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<B::Weight, ModelError> {
        Ok(self.weight(self.values(name, &shape)?, shape))
    }

    /// Matrix `[out, in]` as a projection.
    pub fn linear(&self, name: &str, shape: [usize; 2]) -> Result<Linear<B>, ModelError> {
        Ok(Linear::new(self.matrix(name, shape)?, self.input(name)))
    }

    /// Matrices `[rows, columns]` on top of one another, as one weight.
    pub fn stacked(&self, parts: &[(&str, usize)], columns: usize) -> Result<B::Weight, ModelError> {
        let mut values = Vec::new();
        for &(name, rows) in parts {
            values.extend(self.values(name, &[rows, columns])?);
        }
        let rows = parts.iter().map(|&(_, rows)| rows).sum();
        Ok(self.weight(values, [rows, columns]))
    }

    /// The same as projections, one for each run of parts that see their input alike.
    pub fn stacked_linear(&self, parts: &[(&str, usize)], columns: usize) -> Result<Vec<Linear<B>>, ModelError> {
        let alike = parts.chunk_by(|a, b| self.input(a.0) == self.input(b.0));
        alike
            .map(|parts| Ok(Linear::new(self.stacked(parts, columns)?, self.input(parts[0].0))))
            .collect()
    }

    /// How the projection `name` sees its input.
    fn input(&self, name: &str) -> Input {
        let name = format!("{}{name}", self.prefix);
        match &self.options.maxima {
            Some(maxima) => maxima.of(&name).cloned().map_or(Input::Plain, Input::Observed),
            None => self
                .options
                .activations
                .of(&name)
                .map_or(Input::Plain, Input::Quantized),
        }
    }

    /// `count` routed experts, each `gate` and `up` `[inner, hidden]` and `down` `[hidden, inner]` under its number.
    pub fn experts(&self, count: usize, hidden: usize, inner: usize) -> Result<Vec<Expert<B::Weight>>, ModelError> {
        let expert = |id: usize| {
            let loader = self.scope(&id.to_string());
            Ok(Expert {
                gate_up: loader.stacked(&[("gate", inner), ("up", inner)], hidden)?,
                down: loader.matrix("down", [hidden, inner])?,
            })
        };
        (0..count).map(expert).collect()
    }

    /// Two matrices of one shape; the second is `None` when it equals the first.
    pub fn pair(&self, names: [&str; 2], shape: [usize; 2]) -> Result<(B::Weight, Option<B::Weight>), ModelError> {
        let (first, second) = (self.values(names[0], &shape)?, self.values(names[1], &shape)?);
        let second = (first != second).then(|| self.weight(second, shape));
        Ok((self.weight(first, shape), second))
    }

    /// Vector or small tensor in float32.
    pub fn tensor<const D: usize>(&self, name: &str, shape: [usize; D]) -> Result<Tensor<B, D>, ModelError> {
        let values = self.values(name, &shape)?;
        Ok(Tensor::from_data(TensorData::new(values, shape), self.device))
    }

    /// Given values as a matrix `[out, in]`.
    pub fn weight(&self, values: Vec<f32>, shape: [usize; 2]) -> B::Weight {
        let stored = narrowest(&values);
        B::weight(values, shape, stored, self.device)
    }

    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let name = format!("{}{name}", self.prefix);
        let values = self.source.load(&name, shape)?;
        match self.options.format(&name) {
            None => Ok(values),
            Some(format) => requantised(values, format, shape).map_err(|source| ModelError::Requantise {
                parameter: name,
                format,
                source,
            }),
        }
    }
}

/// `values` as `format` stores them.
fn requantised(mut values: Vec<f32>, format: Format, shape: &[usize]) -> Result<Vec<f32>, FormatError> {
    let shape: Vec<u64> = shape.iter().map(|extent| *extent as u64).collect();
    let bytes = formats::encode(format, EncodeMethod::GroupedAbsmax, &shape, &values)?;
    formats::decode(
        format,
        format.layout(),
        &shape,
        1,
        &bytes,
        0..values.len() as u64,
        &mut values,
    )?;
    Ok(values)
}

/// Bfloat16 when it holds every value exactly, else float32.
fn narrowest(values: &[f32]) -> Precision {
    let exact = |value: &f32| value.to_bits() & 0xffff == 0;
    if values.iter().all(exact) {
        Precision::Bf16
    } else {
        Precision::Full
    }
}
