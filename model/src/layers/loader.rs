//! From named parameters to weights on the device.

use burn::tensor::{Tensor, TensorData};
use perplexity_kernels::backend::Expert;
use perplexity_kernels::{EvaluatorBackend, Precision};

use crate::scorer::ModelError;
use crate::source::TextSource;

/// Loads parameters under one name prefix.
#[derive(Clone)]
pub struct Loader<'a, B: EvaluatorBackend> {
    source: &'a dyn TextSource,
    device: &'a B::Device,
    prefix: String,
}

impl<'a, B: EvaluatorBackend> Loader<'a, B> {
    /// Names are taken under `text/`.
    pub fn new(source: &'a dyn TextSource, device: &'a B::Device) -> Self {
        Self {
            source,
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

    /// Matrices `[rows, columns]` on top of one another, as one weight.
    pub fn stacked(&self, parts: &[(&str, usize)], columns: usize) -> Result<B::Weight, ModelError> {
        let mut values = Vec::new();
        for &(name, rows) in parts {
            values.extend(self.values(name, &[rows, columns])?);
        }
        let rows = parts.iter().map(|&(_, rows)| rows).sum();
        Ok(self.weight(values, [rows, columns]))
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
        Ok(self.source.load(&format!("{}{name}", self.prefix), shape)?)
    }
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
