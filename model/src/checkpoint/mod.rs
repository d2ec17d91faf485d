//! A Hugging Face checkpoint directory as a weight source: `config.json`, `*.safetensors`, `tokenizer.json`.
//!
//! Opening checks everything that can be checked without arithmetic: files, headers, index, and for every parameter of
//! the configuration its tensor's presence, shape and type, and whether it is quantised as the checkpoint declares.
//! Vision and multi-token-prediction tensors and the scales of a KV cache are skipped with a note; any other tensor of
//! the text model that no parameter uses is an error, because it would change the numbers.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::config::{ConfigError, TextConfig};
use crate::convert::Words;
use crate::formats::Format;
use crate::ngram::{NgramTable, VolumeError};
use crate::parameters::{EXPERT_BANK, NGRAM_SCALE, in_checkpoint, parameters};
use crate::source::{ActivationPolicy, SourceError, SourceFile, StoredParameter, StoredPart, TextSource};

mod declaration;
mod error;
mod locate;
mod names;
mod ngram;
mod shards;
mod words;

pub use error::CheckpointError;
pub(crate) use words::RowWords;

use declaration::Declaration;
use locate::{Locator, PACKED, Stored};
use names::{EMBEDDING, LM_HEAD, Selection};
use ngram::NgramTensors;
use shards::{INDEX, Shards};
use words::Storage;

const CONFIG: &str = "config.json";
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
/// Ending of a derived table that some exporters store.
const ROTARY_TABLE: &str = "rotary_emb.inv_freq";

/// Endings of the scales of a quantised KV cache, which belongs to the codec of a run and not to the weights.
const CACHE_SCALES: [&str; 3] = [".k_scale", ".v_scale", ".q_scale"];

/// A weight that is stored quantised, and what an artifact can take over.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantizedWeight {
    /// What the checkpoint's format is called in inspections.
    pub stored: &'static str,
    /// The artifact format that holds the words as they are, if any.
    pub format: Option<Format>,
    /// The divisor of an NVFP4 matrix as an artifact stores it.
    pub weight_divisor: Option<f32>,
    /// The activation precision the weight was quantised for.
    pub policy: ActivationPolicy,
    /// The divisor for 4-bit activations.
    pub activation_divisor: Option<f32>,
}

/// An opened checkpoint directory; serves parameters by their artifact names.
pub struct CheckpointSource {
    directory: PathBuf,
    name: String,
    config: TextConfig,
    shards: Arc<Shards>,
    stored: HashMap<String, Stored>,
    ngram: Option<NgramTensors>,
    notes: Vec<String>,
}

impl CheckpointSource {
    /// Opens and checks `directory`.
    ///
    /// # Errors
    /// See [`CheckpointError`]; nothing has been computed by then.
    pub fn open(directory: &Path) -> Result<Self, CheckpointError> {
        let (config, json) = read_config(&directory.join(CONFIG))?;
        let declaration = Declaration::read(directory, &json)?;
        let mut shards = Shards::open(directory)?;
        let mut notes = std::mem::take(&mut shards.notes);
        let shards = Arc::new(shards);
        let prefix = text_prefix(directory, &shards)?;
        let has_head = [LM_HEAD.into(), format!("{LM_HEAD}{PACKED}")]
            .iter()
            .any(|name| shards.tensors.contains_key(name));
        if !config.tie_word_embeddings && !has_head {
            return Err(CheckpointError::UntiedWithoutHead {
                directory: directory.into(),
            });
        }
        let mut used = HashSet::new();
        let mut stored = HashMap::new();
        let locator = Locator {
            directory,
            shards: &shards,
            config: &config,
            prefix,
            declaration: declaration.as_ref(),
        };
        for parameter in parameters(&config).flat_map(in_checkpoint) {
            let found = locator.locate(parameter)?;
            used.insert(found.weight.name.clone());
            used.extend(found.weight.companions.iter().cloned());
            stored.insert(found.parameter.name.clone(), found);
        }
        let ngram = match &config.flash_next {
            Some(dims) => Some(NgramTensors::locate(&locator, &shards, dims)?),
            None => None,
        };
        used.extend(ngram.iter().flat_map(|table| table.names.iter().cloned()));
        notes.extend(quantization_notes(declaration.as_ref(), &stored));
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
            ngram,
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
        let weight = &stored.weight;
        weight
            .storage
            .decode(&self.shards, &weight.tensor, &stored.selection, range)
            .map_err(|source| CheckpointError::Word {
                path: self.shards.path(&weight.tensor).into(),
                tensor: weight.name.clone(),
                source,
            })
    }

    /// The quantised weights, by parameter.
    pub fn quantized(&self) -> HashMap<String, QuantizedWeight> {
        let quantized = |stored: &Stored| {
            let weight = &stored.weight;
            let weight_divisor = match &weight.storage {
                Storage::Float => return None,
                Storage::Fp8(_) => None,
                Storage::Nvfp4(nvfp4) => Some(nvfp4.matrix_scale.divisor()),
            };
            Some(QuantizedWeight {
                stored: weight.storage.format_name(&weight.tensor),
                format: weight.storage.artifact_format(),
                weight_divisor,
                policy: weight.policy,
                activation_divisor: weight.activation_divisor,
            })
        };
        let pairs = self.stored.iter();
        pairs
            .filter_map(|(name, stored)| Some((name.clone(), quantized(stored)?)))
            .collect()
    }

    /// The words of quantised parameter `name` as an artifact stores them; `None` when no artifact format takes them.
    pub(crate) fn row_words(&self, name: &str) -> Result<Option<RowWords>, CheckpointError> {
        let Stored { weight, selection, .. } = self.find(name)?;
        Ok(weight.storage.row_words(&self.shards, &weight.tensor, selection))
    }

    /// The words of NVFP4 parameter `name` as a bank of experts stores them; `None` when it is stored otherwise.
    pub(crate) fn nvfp4_words(&self, name: &str) -> Result<Option<Words>, CheckpointError> {
        let Stored { weight, .. } = self.find(name)?;
        let Storage::Nvfp4(nvfp4) = &weight.storage else {
            return Ok(None);
        };
        let multiplier = nvfp4.matrix_scale.multiplier();
        Ok(self.row_words(name)?.and_then(|words| match words {
            RowWords::Nvfp4 { codes, scales, .. } => Some(Words {
                codes,
                scales,
                multiplier,
            }),
            RowWords::Fp8Row { .. } => None,
        }))
    }

    /// What the activations of parameter `name` are multiplied by after 4-bit rounding.
    pub(crate) fn input_scale(&self, name: &str) -> Option<f32> {
        self.stored.get(name)?.weight.input_scale
    }

    /// The n-gram table.
    pub(crate) fn table(&self) -> Option<&dyn NgramTable> {
        self.ngram.as_ref().map(|table| table as &dyn NgramTable)
    }

    /// The scale of an n-gram table of E4M3FN codes; `None` when it is stored in floats.
    pub(crate) fn coded_table_scale(&self) -> Option<f32> {
        self.ngram.as_ref().and_then(NgramTensors::scale)
    }

    /// The stored bytes of a row of the n-gram table.
    pub(crate) fn table_row(&self, row: u64) -> Result<&[u8], VolumeError> {
        match &self.ngram {
            Some(table) => table.row(row).map(|(bytes, _)| bytes),
            None => Err(VolumeError::Row { row, rows: 0 }),
        }
    }

    /// SHA-256 of every weight file, lowercase hex, in the order of [`TextSource::files`].
    pub fn file_hashes(&self) -> Vec<String> {
        let contents: Vec<&[u8]> = self.shards.contents().collect();
        let hash = |content: &&[u8]| format!("{:x}", Sha256::digest(content));
        contents.par_iter().map(hash).collect()
    }

    /// How the matrices of a block's experts are stored, one after the other.
    fn stored_bank(&self, name: &str) -> Result<StoredParameter, SourceError> {
        let mut bank = StoredParameter::absent();
        for parameter in parameters(&self.config).filter(|parameter| parameter.name == name) {
            bank.elements = parameter.elements().unwrap_or(0) as u64;
            for matrix in in_checkpoint(parameter) {
                let stored = self.stored(&matrix.name)?;
                bank.parts.extend(stored.parts);
                bank.policy = stored.policy;
            }
        }
        Ok(bank)
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

    fn ngram_table(&self) -> Option<Arc<dyn NgramTable>> {
        self.ngram.clone().map(|table| Arc::new(table) as Arc<dyn NgramTable>)
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

    fn header_sha256(&self) -> Result<Option<String>, SourceError> {
        let config = self.resource(CONFIG)?.unwrap_or_default();
        let index = self.resource(INDEX)?;
        let weights = index.as_deref().unwrap_or_else(|| self.shards.first_header());
        let hash = Sha256::new().chain_update(config).chain_update(weights).finalize();
        Ok(Some(format!("{hash:x}")))
    }

    fn stored(&self, name: &str) -> Result<StoredParameter, SourceError> {
        if name.ends_with(EXPERT_BANK) && self.config.flash_next.is_some() {
            return self.stored_bank(name);
        }
        if name.ends_with(NGRAM_SCALE) && self.ngram.is_some() {
            return Ok(StoredParameter::absent());
        }
        let stored = self.find(name)?;
        let elements = stored.parameter.elements().unwrap_or(0);
        let weight = &stored.weight;
        // The weight's share of the bytes of its tensor and scales, by elements.
        let object_shape = weight.storage.shape(&weight.tensor);
        let tensor_elements: u128 = object_shape.iter().map(|extent| *extent as u128).product();
        let bytes = weight.storage.bytes(&weight.tensor) as u128 * elements as u128 / tensor_elements.max(1);
        let part = StoredPart {
            object: weight.name.clone(),
            object_shape,
            format: weight.storage.format_name(&weight.tensor),
            layout: "contiguous",
            range: match &stored.selection {
                Selection::Range(range) => Some((range.start as u64, range.end as u64)),
                _ => None,
            },
            bytes: bytes as u64,
        };
        let is_projection = stored.parameter.input.is_some();
        Ok(StoredParameter {
            elements: elements as u64,
            parts: vec![part],
            policy: is_projection.then_some(weight.policy),
            activation_divisor: weight.activation_divisor.filter(|_| is_projection),
        })
    }
}

/// What is quantised and where its scales come from, in words.
fn quantization_notes(declaration: Option<&Declaration>, stored: &HashMap<String, Stored>) -> Vec<String> {
    let Some(declaration) = declaration else {
        return Vec::new();
    };
    let mut formats: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let (mut fixed, mut missing) = (BTreeSet::new(), BTreeSet::new());
    for Stored { weight, .. } in stored.values() {
        if !matches!(weight.storage, Storage::Float) {
            let format = weight.storage.format_name(&weight.tensor);
            formats.entry(format).or_default().insert(&weight.name);
        }
        if weight.unused_input_scale {
            fixed.insert(&weight.name);
        }
        if weight.missing_input_scale {
            missing.insert(&weight.name);
        }
    }
    let file = declaration.path.file_name().unwrap_or_default().to_string_lossy();
    let mut notes: Vec<String> = formats
        .iter()
        .map(|(format, weights)| {
            let count = weights.len();
            format!("{count} weights are stored as {format} with the scales beside them, as {file} declares")
        })
        .collect();
    if formats.is_empty() {
        notes.push(format!(
            "{file} declares a quantisation that covers no weight of the text model"
        ));
    }
    if !fixed.is_empty() {
        notes.push(format!(
            "fixed input scales of {} FP8 weights are not used: 8-bit activations are scaled token by token",
            fixed.len()
        ));
    }
    if !missing.is_empty() {
        notes.push(format!(
            "{} NVFP4 weights have no input scale: 4-bit activations are not permitted there",
            missing.len()
        ));
    }
    notes
}

/// The text configuration and the whole file.
fn read_config(path: &Path) -> Result<(TextConfig, Value), CheckpointError> {
    let text = std::fs::read(path).map_err(|source| CheckpointError::Read {
        path: path.into(),
        source,
    })?;
    let config = serde_json::from_slice::<Value>(&text).map_err(|error| ConfigError::Json(error.to_string()));
    config
        .and_then(|config| Ok((TextConfig::from_hugging_face(&config)?, config)))
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

/// Notes about tensors that no parameter uses, or the error that one of them must not be ignored.
fn unused(shards: &Shards, prefix: &str, used: &HashSet<String>) -> Result<Vec<String>, CheckpointError> {
    let mut skipped: [(usize, usize); SKIPPED.len()] = [(0, 0); SKIPPED.len()];
    let (mut other, mut cache_scales) = (Vec::new(), 0);
    let mut notes = Vec::new();
    let mut names: Vec<&String> = shards.tensors.keys().filter(|name| !used.contains(*name)).collect();
    names.sort();
    for name in names {
        let tensor = &shards.tensors[name];
        if let Some(kind) = SKIPPED.iter().position(|(prefix, _)| name.starts_with(prefix)) {
            skipped[kind].0 += 1;
            skipped[kind].1 += tensor.bytes();
        } else if CACHE_SCALES.iter().any(|ending| name.ends_with(ending)) {
            cache_scales += 1;
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
    if cache_scales > 0 {
        notes.push(format!(
            "{cache_scales} scales of a quantised KV cache are not used: the KV codec of a run has its own"
        ));
    }
    if !other.is_empty() {
        notes.push(format!(
            "ignored tensors that are not part of the text model: {}",
            other.join(", ")
        ));
    }
    Ok(notes)
}
