//! A Hugging Face checkpoint directory as a weight source: `config.json`, `*.safetensors`, `tokenizer.json`.
//!
//! Opening checks everything that can be checked without arithmetic: files, headers, index, and for every parameter of
//! the configuration its tensor's presence, shape and type. Vision and multi-token-prediction tensors are skipped with a
//! note; any other tensor of the text model that no parameter uses is an error, because it would change the numbers.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;
use serde_json::Value;

use crate::config::{ConfigError, TextConfig};
use crate::parameters::{Parameter, parameters};
use crate::source::{ActivationPolicy, SourceError, SourceFile, StoredParameter, StoredPart, TextSource};

mod error;
mod names;
mod shards;

pub use error::CheckpointError;

use names::{EMBEDDING, LM_HEAD, Origin, Selection, origins};
use shards::{Shards, Tensor};

/// Prefixes of the text tensors: a multimodal checkpoint's and a text-only one's.
const PREFIXES: [&str; 2] = ["model.language_model.", "model."];
/// Tensors of parts that causal scoring does not use, as prefix and name.
const SKIPPED: [(&str, &str); 5] = [
    ("model.visual.", "vision"),
    ("visual.", "vision"),
    ("mtp.", "multi-token prediction"),
    ("model.mtp.", "multi-token prediction"),
    ("model.language_model.mtp.", "multi-token prediction"),
];
/// Elements that one task decodes.
const DECODE_CHUNK: usize = 1 << 16;
/// Ending of a derived table that some exporters store.
const ROTARY_TABLE: &str = "rotary_emb.inv_freq";

/// Where a parameter's values are.
struct Stored {
    parameter: Parameter,
    name: String,
    tensor: Tensor,
    selection: Selection,
}

/// An opened checkpoint directory; serves parameters by their artifact names.
pub struct CheckpointSource {
    directory: PathBuf,
    name: String,
    config: TextConfig,
    shards: Shards,
    stored: HashMap<String, Stored>,
    notes: Vec<String>,
}

impl CheckpointSource {
    /// Opens and checks `directory`.
    ///
    /// # Errors
    /// See [`CheckpointError`]; nothing has been computed by then.
    pub fn open(directory: &Path) -> Result<Self, CheckpointError> {
        let config = read_config(&directory.join("config.json"))?;
        let mut shards = Shards::open(directory)?;
        let prefix = text_prefix(directory, &shards)?;
        if !config.tie_word_embeddings && !shards.tensors.contains_key(LM_HEAD) {
            return Err(CheckpointError::UntiedWithoutHead {
                directory: directory.into(),
            });
        }
        let mut used = HashSet::new();
        let mut stored = HashMap::new();
        for parameter in parameters(&config) {
            let found = locate(directory, &shards, &config, prefix, parameter)?;
            used.insert(found.name.clone());
            stored.insert(found.parameter.name.clone(), found);
        }
        let mut notes = std::mem::take(&mut shards.notes);
        notes.extend(unused(&shards, prefix, &used)?);
        let absolute = directory.canonicalize().unwrap_or_else(|_| directory.into());
        let name = absolute
            .file_name()
            .map_or_else(|| config.architecture().into(), |name| name.to_string_lossy().into());
        Ok(Self {
            directory: directory.into(),
            name,
            config,
            shards,
            stored,
            notes,
        })
    }

    /// The directory as given.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Elements `range` of parameter `name`, C order; for reading a large parameter piece by piece.
    ///
    /// # Errors
    /// When the parameter does not exist or has fewer elements.
    pub fn load_range(&self, name: &str, range: Range<usize>) -> Result<Vec<f32>, CheckpointError> {
        let stored = self.find(name)?;
        if range.start > range.end || range.end > stored.parameter.elements().unwrap_or(0) {
            return Err(CheckpointError::ExpectedShape {
                parameter: name.into(),
                found: stored.parameter.shape.clone(),
                expected: vec![range.start, range.end],
            });
        }
        Ok(decode(
            self.shards.bytes(&stored.tensor),
            stored.tensor.dtype,
            &stored.selection,
            range,
        ))
    }

    fn find(&self, name: &str) -> Result<&Stored, CheckpointError> {
        self.stored
            .get(name)
            .ok_or_else(|| CheckpointError::UnknownParameter { parameter: name.into() })
    }
}

impl TextSource for CheckpointSource {
    fn config(&self) -> &TextConfig {
        &self.config
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn load(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>, SourceError> {
        let stored = self.find(name)?;
        let elements = expected
            .iter()
            .try_fold(1usize, |product, extent| product.checked_mul(*extent));
        if elements != stored.parameter.elements() {
            return Err(CheckpointError::ExpectedShape {
                parameter: name.into(),
                found: stored.parameter.shape.clone(),
                expected: expected.to_vec(),
            }
            .into());
        }
        Ok(self.load_range(name, 0..elements.unwrap_or(0))?)
    }

    fn resource(&self, role: &str) -> Result<Option<Vec<u8>>, SourceError> {
        if role.is_empty() || role.starts_with('.') || role.contains(['/', '\\']) {
            return Ok(None);
        }
        let path = self.directory.join(role);
        match std::fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(CheckpointError::Read { path, source }.into()),
        }
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn files(&self) -> Vec<SourceFile> {
        self.shards.files()
    }

    fn stored(&self, name: &str) -> Result<StoredParameter, SourceError> {
        let stored = self.find(name)?;
        let elements = stored.parameter.elements().unwrap_or(0);
        let part = StoredPart {
            object: stored.name.clone(),
            object_shape: stored.tensor.shape.clone(),
            format: format_name(stored.tensor.dtype),
            layout: "contiguous",
            range: match &stored.selection {
                Selection::Range(range) => Some((range.start as u64, range.end as u64)),
                _ => None,
            },
            bytes: (elements * word_bytes(stored.tensor.dtype)) as u64,
        };
        let policy = stored.parameter.input.is_some().then_some(ActivationPolicy::A16Only);
        Ok(StoredParameter {
            elements: elements as u64,
            parts: vec![part],
            policy,
            has_activation_divisor: false,
        })
    }
}

fn read_config(path: &Path) -> Result<TextConfig, CheckpointError> {
    let text = std::fs::read(path).map_err(|source| CheckpointError::Read {
        path: path.into(),
        source,
    })?;
    let config = serde_json::from_slice::<Value>(&text).map_err(|error| ConfigError::Json(error.to_string()));
    config
        .and_then(|config| TextConfig::from_hugging_face(&config))
        .map_err(|source| CheckpointError::Config {
            path: path.into(),
            source,
        })
}

fn text_prefix(directory: &Path, shards: &Shards) -> Result<&'static str, CheckpointError> {
    let mut found = PREFIXES
        .into_iter()
        .filter(|prefix| shards.tensors.contains_key(&format!("{prefix}{EMBEDDING}")));
    match (found.next(), found.next()) {
        (Some(first), Some(second)) => Err(CheckpointError::TwoTextModels {
            directory: directory.into(),
            first: format!("{first}{EMBEDDING}"),
            second: format!("{second}{EMBEDDING}"),
        }),
        // Without an embedding, the missing tensor is reported under the name that the other tensors suggest.
        (Some(prefix), None) => Ok(prefix),
        (None, _) if shards.tensors.keys().any(|name| name.starts_with(PREFIXES[0])) => Ok(PREFIXES[0]),
        (None, _) => Ok(PREFIXES[1]),
    }
}

fn full_name(prefix: &str, origin: &Origin) -> String {
    if origin.tensor == LM_HEAD {
        LM_HEAD.into()
    } else {
        format!("{prefix}{}", origin.tensor)
    }
}

fn locate(
    directory: &Path,
    shards: &Shards,
    config: &TextConfig,
    prefix: &str,
    parameter: Parameter,
) -> Result<Stored, CheckpointError> {
    if parameter
        .elements()
        .and_then(|elements| elements.checked_mul(size_of::<f32>()))
        .is_none()
    {
        return Err(CheckpointError::TooLarge {
            parameter: parameter.name,
        });
    }
    let candidates = origins(config, &parameter);
    for origin in &candidates {
        let name = full_name(prefix, origin);
        let Some(tensor) = shards.tensors.get(&name) else {
            continue;
        };
        if tensor.shape != origin.shape {
            return Err(CheckpointError::Shape {
                path: shards.path(tensor).into(),
                tensor: name,
                found: tensor.shape.clone(),
                expected: origin.shape.clone(),
            });
        }
        if !matches!(tensor.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) {
            return Err(CheckpointError::Dtype {
                path: shards.path(tensor).into(),
                tensor: name,
                found: tensor.dtype,
            });
        }
        return Ok(Stored {
            parameter,
            name,
            tensor: tensor.clone(),
            selection: origin.selection.clone(),
        });
    }
    // Every role has at least one origin; the last is the plainest name.
    let origin = candidates
        .into_iter()
        .next_back()
        .unwrap_or_else(|| unreachable!("a role without a tensor"));
    Err(CheckpointError::MissingTensor {
        directory: directory.into(),
        tensor: full_name(prefix, &origin),
        parameter: parameter.name,
        expected: origin.shape,
    })
}

/// Notes about tensors that no parameter uses, or the error that one of them must not be ignored.
fn unused(shards: &Shards, prefix: &str, used: &HashSet<String>) -> Result<Vec<String>, CheckpointError> {
    let mut skipped: [(usize, usize); SKIPPED.len()] = [(0, 0); SKIPPED.len()];
    let mut other = Vec::new();
    let mut notes = Vec::new();
    let mut names: Vec<&String> = shards.tensors.keys().filter(|name| !used.contains(*name)).collect();
    names.sort();
    for name in names {
        let tensor = &shards.tensors[name];
        if let Some(kind) = SKIPPED.iter().position(|(prefix, _)| name.starts_with(prefix)) {
            skipped[kind].0 += 1;
            skipped[kind].1 += tensor.bytes();
        } else if name == LM_HEAD {
            notes.push(format!(
                "{LM_HEAD} is not used: the configuration ties the output head to the embedding"
            ));
        } else if name.starts_with(prefix) && !name.ends_with(ROTARY_TABLE) {
            return Err(CheckpointError::UnusedTensor {
                path: shards.path(tensor).into(),
                tensor: name.clone(),
            });
        } else {
            other.push(name.as_str());
        }
    }
    for ((prefix, kind), (count, bytes)) in SKIPPED.iter().zip(skipped).filter(|(_, (count, _))| *count > 0) {
        notes.push(format!("skipped {count} {kind} tensors ({prefix}*, {bytes} bytes)"));
    }
    if !other.is_empty() {
        notes.push(format!(
            "ignored tensors that are not part of the text model: {}",
            other.join(", ")
        ));
    }
    Ok(notes)
}

fn format_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::BF16 => "bf16",
        Dtype::F16 => "fp16",
        _ => "fp32",
    }
}

fn word_bytes(dtype: Dtype) -> usize {
    if dtype == Dtype::F32 { 4 } else { 2 }
}

/// Elements `range` of the selection as f32; every source value is exact in f32.
fn decode(bytes: &[u8], dtype: Dtype, selection: &Selection, range: Range<usize>) -> Vec<f32> {
    let mut values = vec![0.0; range.len()];
    values
        .par_chunks_mut(DECODE_CHUNK)
        .enumerate()
        .for_each(|(chunk, out)| {
            let begin = range.start + chunk * DECODE_CHUNK;
            match selection {
                Selection::Range(selected) => decode_run(bytes, dtype, selected.start + begin, out),
                Selection::EverySecond { block, half, .. } => {
                    let (mut element, mut rest) = (begin, out);
                    while !rest.is_empty() {
                        let (number, inside) = (element / block, element % block);
                        let (run, tail) = rest.split_at_mut(rest.len().min(block - inside));
                        decode_run(bytes, dtype, (2 * number + half) * block + inside, run);
                        element += run.len();
                        rest = tail;
                    }
                }
                Selection::TapMajor { channels, taps } => {
                    for (at, value) in out.iter_mut().enumerate() {
                        let (tap, channel) = ((begin + at) / channels, (begin + at) % channels);
                        decode_run(bytes, dtype, channel * taps + tap, std::slice::from_mut(value));
                    }
                }
            }
        });
    values
}

/// Consecutive elements from `first` on.
fn decode_run(bytes: &[u8], dtype: Dtype, first: usize, out: &mut [f32]) {
    let width = word_bytes(dtype);
    let words = bytes[first * width..][..out.len() * width].chunks_exact(width);
    let pairs = out.iter_mut().zip(words);
    match dtype {
        Dtype::BF16 => pairs.for_each(|(out, word)| *out = bf16::from_le_bytes([word[0], word[1]]).to_f32()),
        Dtype::F16 => pairs.for_each(|(out, word)| *out = f16::from_le_bytes([word[0], word[1]]).to_f32()),
        _ => pairs.for_each(|(out, word)| *out = f32::from_le_bytes([word[0], word[1], word[2], word[3]])),
    }
}
