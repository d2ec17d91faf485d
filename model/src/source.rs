//! Where weights come from: an artifact or a Hugging Face checkpoint, behind one interface.
//!
//! Parameters go by their artifact names (`text/layers/0/gdn/query`), whatever the file calls them.

use std::path::Path;
use std::sync::Arc;

use crate::artifact::{Artifact, ArtifactError};
use crate::bindings::ArtifactSource;
use crate::checkpoint::CheckpointSource;
use crate::config::TextConfig;
use crate::experts::ExpertBank;
use crate::ngram::NgramTable;

/// Activation precision a weight permits at one input: an upper limit, not an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ActivationPolicy {
    /// 16-bit activations only.
    A16Only,
    /// 16-bit or 8-bit.
    AllowA8,
    /// 16-bit, 8-bit or 4-bit.
    AllowA4,
}

impl ActivationPolicy {
    /// Its name in an artifact.
    pub fn name(self) -> &'static str {
        match self {
            Self::A16Only => "A16Only",
            Self::AllowA8 => "AllowA8",
            Self::AllowA4 => "AllowA4",
        }
    }
}

/// A text model's configuration, weights and tokenizer files.
pub trait TextSource: Send + Sync {
    /// The model's dimensions.
    fn config(&self) -> &TextConfig;

    /// Public model name, for reports.
    fn name(&self) -> &str;

    /// Decoded values of parameter `name`, C order.
    ///
    /// # Errors
    /// When the parameter is missing, has another number of elements than `expected`, or cannot be read.
    fn load(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>, SourceError>;

    /// Bytes of a tokenizer resource such as `tokenizer.json`, if the source has it.
    ///
    /// # Errors
    /// When the resource exists but cannot be read.
    fn resource(&self, role: &str) -> Result<Option<Vec<u8>>, SourceError>;

    /// What was skipped or ignored on opening, in words.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// The files that are read, and the bytes of weights and resources in each (artifact) or their lengths (checkpoint).
    fn files(&self) -> Vec<SourceFile> {
        Vec::new()
    }

    /// SHA-256 of what the source declares without its weights, 64 lowercase hex digits; `None` when it has no such text.
    ///
    /// For an artifact the 32-byte header and the directory as stored; for a checkpoint `config.json` and then
    /// `model.safetensors.index.json`, or in its place the header of the only weight file, its length field included.
    ///
    /// # Errors
    /// When a file cannot be read.
    fn header_sha256(&self) -> Result<Option<String>, SourceError> {
        Ok(None)
    }

    /// How parameter `name` is stored.
    ///
    /// # Errors
    /// When the parameter is missing or the source does not know.
    fn stored(&self, name: &str) -> Result<StoredParameter, SourceError> {
        Err(SourceError(
            format!("the source does not say how {name} is stored").into(),
        ))
    }

    /// The table of n-gram rows, when it is among the source's own weights.
    fn ngram_table(&self) -> Option<Arc<dyn NgramTable>> {
        None
    }

    /// The packed routed experts of block `layer`, when they are stored as one bank.
    ///
    /// # Errors
    /// When the bank cannot be read or a scale in it is no finite positive number.
    fn expert_bank(&self, layer: usize) -> Result<Option<ExpertBank>, SourceError> {
        let _ = layer;
        Ok(None)
    }

    /// The artifact behind the source, for callers that take packed objects as they are.
    fn artifact(&self) -> Option<&Artifact> {
        None
    }
}

/// A file behind a source.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct SourceFile {
    /// File name.
    pub name: String,
    /// Payload bytes or length.
    pub bytes: u64,
}

/// How one parameter is stored.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredParameter {
    /// Number of elements.
    pub elements: u64,
    /// Its pieces, in order.
    pub parts: Vec<StoredPart>,
    /// Activation permission at the parameter's input; `None` when it multiplies no activation.
    pub policy: Option<ActivationPolicy>,
    /// The input's divisor for 4-bit activations, finite and positive: `x` is quantised as `divisor * x`.
    pub activation_divisor: Option<f32>,
}

impl StoredParameter {
    /// Nothing, for a parameter that the source does without.
    pub(crate) fn absent() -> Self {
        Self {
            elements: 0,
            parts: Vec::new(),
            policy: None,
            activation_divisor: None,
        }
    }
}

/// A piece of a parameter inside one stored object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredPart {
    /// Object id in the artifact, or tensor name in the checkpoint.
    pub object: String,
    /// Extents of that object.
    pub object_shape: Vec<usize>,
    /// Numeric format, such as `q4_g64_fp16`, `bf16` or `fp16`.
    pub format: &'static str,
    /// Storage layout, such as `row_split_k128_v1`.
    pub layout: &'static str,
    /// First element of the object that belongs to the parameter, and the one behind the last; `None` when the elements
    /// are scattered (a head-interleaved or transposed tensor of a checkpoint).
    pub range: Option<(u64, u64)>,
    /// The piece's share of the object's bytes, scales and padding included, rounded down.
    pub bytes: u64,
}

/// Opens a checkpoint directory or an artifact file.
///
/// # Errors
/// When the path cannot be read or what it holds cannot be used; names what was wrong and where.
pub fn open(path: &Path) -> Result<Box<dyn TextSource>, SourceError> {
    if path.is_dir() {
        Ok(Box::new(CheckpointSource::open(path)?))
    } else {
        Ok(Box::new(ArtifactSource::open(path)?))
    }
}

/// A weight or resource that could not be provided; the message names file, parameter and expectation.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SourceError(pub Box<dyn std::error::Error + Send + Sync>);

impl From<ArtifactError> for SourceError {
    fn from(error: ArtifactError) -> Self {
        Self(Box::new(error))
    }
}
