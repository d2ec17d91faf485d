//! From named parameters to weights on the device.
//!
//! A matrix that the source stores in codes goes to a backend that takes them as it is stored; everything else, and whatever
//! such a backend refuses, is decoded to float32 first.

use burn::tensor::{Tensor, TensorData};
use perplexity_kernels::backend::{ActivationFormat, Expert, Residency};
use perplexity_kernels::numeric::round_bf16;
use perplexity_kernels::ops::expand_weight::{Packing, StoredMatrix, StoredRows};
use perplexity_kernels::{EvaluatorBackend, Precision};

use super::linear::{Input, Linear};
use crate::activations::Activations;
use crate::calibrate::Maxima;
use crate::formats::{self, EncodeMethod, Format, FormatError};
use crate::scorer::ModelError;
use crate::source::TextSource;
use crate::stored::stored_rows;

/// What becomes of weights on loading.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LoadOptions {
    /// How matrices stored in codes are kept on a device that takes codes; those of [`LoadOptions::activations`] in FP8
    /// stay codes.
    pub residency: Residency,
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
    residency: Residency,
    prefix: String,
    /// Whether every value is rounded to bfloat16.
    to_bf16: bool,
}

impl<'a, B: EvaluatorBackend> Loader<'a, B> {
    /// Names are taken under `text/`; matrices in codes are kept as the options say where the backend takes them.
    pub fn new(source: &'a dyn TextSource, options: &'a LoadOptions, device: &'a B::Device) -> Self {
        Self {
            source,
            options,
            device,
            residency: options.residency,
            prefix: "text/".into(),
            to_bf16: false,
        }
    }

    /// The same with every value rounded to bfloat16.
    #[must_use]
    pub fn rounding_to_bf16(self, to_bf16: bool) -> Self {
        Self { to_bf16, ..self }
    }

    /// Names are taken under `name/` from here.
    pub fn scope(&self, name: &str) -> Self {
        Self {
            prefix: format!("{}{name}/", self.prefix),
            ..self.clone()
        }
    }

    /// For matrices that meet float32 rows: none of their values is rounded.
    pub fn unrounded(&self) -> Self {
        Self {
            residency: Residency::Packed,
            ..self.clone()
        }
    }

    /// Matrix `[out, in]`.
    pub fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<B::Weight, ModelError> {
        self.stacked(&[(name, shape[0])], shape[1])
    }

    /// Matrix `[out, in]` as a projection.
    pub fn linear(&self, name: &str, shape: [usize; 2]) -> Result<Linear<B>, ModelError> {
        let input = self.input(name);
        Ok(Linear::new(self.meeting(&input).matrix(name, shape)?, input))
    }

    /// Matrices `[rows, columns]` on top of one another, as one weight.
    pub fn stacked(&self, parts: &[(&str, usize)], columns: usize) -> Result<B::Weight, ModelError> {
        if let Some(weight) = self.stored(parts, columns)? {
            return Ok(weight);
        }
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
            .map(|parts| {
                let input = self.input(parts[0].0);
                Ok(Linear::new(self.meeting(&input).stacked(parts, columns)?, input))
            })
            .collect()
    }

    /// For projections that see their inputs as `input` says: codes stay codes where they meet codes.
    fn meeting(&self, input: &Input) -> Self {
        let residency = match input {
            Input::Quantized(ActivationFormat::Fp8) => Residency::EightBit,
            _ => self.residency,
        };
        Self {
            residency,
            ..self.clone()
        }
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
        if B::STACKS_EXPERTS {
            let names = |matrix| (0..count).map(move |id| format!("{id}/{matrix}"));
            let (gates, ups, downs): (Vec<_>, Vec<_>, Vec<_>) =
                (names("gate").collect(), names("up").collect(), names("down").collect());
            let pairs = gates
                .iter()
                .zip(&ups)
                .flat_map(|(gate, up)| [(&**gate, inner), (&**up, inner)]);
            let gate_up = self.stacked(&pairs.collect::<Vec<_>>(), hidden)?;
            let down = downs.iter().map(|down| (&**down, hidden)).collect::<Vec<_>>();
            let down = self.stacked(&down, inner)?;
            let parts = B::rows(gate_up, &vec![2 * inner; count]).into_iter();
            let pairs = parts.zip(B::rows(down, &vec![hidden; count]));
            return Ok(pairs.map(|(gate_up, down)| Expert { gate_up, down }).collect());
        }
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
        let [first, second] = names.map(|name| [(name, shape[0])]);
        if let Some(weight) = self.stored(&first, shape[1])? {
            // Equal bytes in one format are equal values; the reverse is not worth decoding both.
            let same = self.rows(&first, shape[1])? == self.rows(&second, shape[1])?;
            let other = (!same).then(|| self.stacked(&second, shape[1]));
            return Ok((weight, other.transpose()?));
        }
        let (first, second) = (self.values(names[0], &shape)?, self.values(names[1], &shape)?);
        let second = (first != second).then(|| self.weight(second, shape));
        Ok((self.weight(first, shape), second))
    }

    /// Vector or small tensor in float32.
    pub fn tensor<const D: usize>(&self, name: &str, shape: [usize; D]) -> Result<Tensor<B, D>, ModelError> {
        let values = self.values(name, &shape)?;
        Ok(Tensor::from_data(TensorData::new(values, shape), self.device))
    }

    /// The matrix as the backend keeps stored codes, if it does and they are one packed matrix.
    fn stored(&self, parts: &[(&str, usize)], columns: usize) -> Result<Option<B::Weight>, ModelError> {
        let rounded = |name: &str| self.options.format(&format!("{}{name}", self.prefix)).is_some();
        if !B::ON_DEVICE || parts.iter().any(|(name, _)| rounded(name)) {
            return Ok(None);
        }
        let Some(rows) = self.rows(parts, columns)? else {
            return Ok(None);
        };
        // Bytes that are no such matrix are refused by the decoder, which names the object.
        let matrix = StoredMatrix::stack(&rows).ok().flatten();
        // Where every value is rounded to bfloat16, only words of it are taken as they are.
        let taken = matrix.filter(|matrix| !self.to_bf16 || matrix.packing() == Packing::Bf16);
        Ok(taken.and_then(|matrix| B::stored_weight(&matrix, self.residency, self.device)))
    }

    fn rows(&self, parts: &[(&str, usize)], columns: usize) -> Result<Option<Vec<StoredRows<'a>>>, ModelError> {
        let mut all = Vec::new();
        for &(name, rows) in parts {
            match stored_rows(self.source, &format!("{}{name}", self.prefix), [rows, columns])? {
                Some(rows) => all.extend(rows),
                None => return Ok(None),
            }
        }
        Ok(Some(all))
    }

    /// Given values as a matrix `[out, in]`.
    pub fn weight(&self, values: Vec<f32>, shape: [usize; 2]) -> B::Weight {
        self.weights()(values, shape)
    }

    /// What makes a matrix `[out, in]` of given values, rounded as this loader rounds.
    pub fn weights(&self) -> impl Fn(Vec<f32>, [usize; 2]) -> B::Weight + Send + Sync + use<B> {
        let (device, to_bf16) = (self.device.clone(), self.to_bf16);
        move |mut values, shape| {
            if to_bf16 {
                values.iter_mut().for_each(|value| *value = round_bf16(*value));
            }
            let stored = narrowest(&values);
            B::weight(values, shape, stored, &device)
        }
    }

    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let name = format!("{}{name}", self.prefix);
        let mut values = self.source.load(&name, shape)?;
        if self.to_bf16 {
            values.iter_mut().for_each(|value| *value = round_bf16(*value));
        }
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
