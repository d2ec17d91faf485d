//! What can be wrong with a checkpoint directory.

use std::path::PathBuf;

use safetensors::{Dtype, SafeTensorError};

use super::names::LM_HEAD;
use crate::config::ConfigError;
use crate::formats::FormatError;
use crate::source::SourceError;

/// A checkpoint that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file or directory cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// `config.json` cannot be used.
    #[error("{}: {source}", path.display())]
    Config {
        /// The configuration file.
        path: PathBuf,
        /// Why.
        source: ConfigError,
    },
    /// No weights in the directory.
    #[error("{} holds no .safetensors file", directory.display())]
    NoWeights {
        /// The checkpoint.
        directory: PathBuf,
    },
    /// More than one reading of which files are the weights.
    #[error("{} holds {found}: cannot tell which files are the model", directory.display())]
    AmbiguousFiles {
        /// The checkpoint.
        directory: PathBuf,
        /// What was found.
        found: String,
    },
    /// The index is unusable.
    #[error("{}: {reason}", path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The n-gram table or a constant of its hash is not this model's.
    #[error("{}: {tensor}: {reason}", path.display())]
    NgramTable {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong, and what was expected.
        reason: String,
    },
    /// A file that the index names does not exist.
    #[error("{} is missing: the index places {tensors} tensors in it", path.display())]
    MissingShard {
        /// The absent file.
        path: PathBuf,
        /// How many tensors it should hold.
        tensors: usize,
    },
    /// A file is not a complete safetensors file.
    #[error("{} ({length} bytes) is not a complete safetensors file: {source}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
        /// What is wrong.
        source: SafeTensorError,
    },
    /// The index names a tensor that its file does not hold.
    #[error("the index places {tensor} in {}, which does not hold it", shard.display())]
    NotInShard {
        /// The tensor.
        tensor: String,
        /// The file.
        shard: PathBuf,
    },
    /// Both text prefixes occur.
    #[error("{} holds both {first} and {second}: expected one text model", directory.display())]
    TwoTextModels {
        /// The checkpoint.
        directory: PathBuf,
        /// One embedding.
        first: String,
        /// The other.
        second: String,
    },
    /// The configuration says untied and there is no head.
    #[error("{} has no {LM_HEAD}, and `tie_word_embeddings` is not true", directory.display())]
    UntiedWithoutHead {
        /// The checkpoint.
        directory: PathBuf,
    },
    /// A tensor of the text model is absent.
    #[error("{} lacks {tensor} of shape {expected:?}, needed for {parameter}", directory.display())]
    MissingTensor {
        /// The checkpoint.
        directory: PathBuf,
        /// The absent tensor.
        tensor: String,
        /// The parameter it makes up.
        parameter: String,
        /// Its shape.
        expected: Vec<usize>,
    },
    /// A tensor has another shape than the configuration implies.
    #[error("{tensor} in {} has shape {found:?}: expected {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
    },
    /// A tensor is of a type that cannot be read.
    #[error("{tensor} in {} is of type {found:?}: expected {expected}", path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        found: Dtype,
        /// Types that can be read.
        expected: &'static str,
    },
    /// The declaration of what is quantised cannot be used.
    #[error("{}: {member} of the quantisation is {found}: expected {expected}", path.display())]
    Declaration {
        /// The file with the declaration.
        path: PathBuf,
        /// The member at fault.
        member: String,
        /// Its value.
        found: String,
        /// What can be used.
        expected: String,
    },
    /// A weight that is declared quantised is not stored so.
    #[error(
        "{tensor} in {} is of type {found:?}, but {} declares it as {declared}",
        path.display(),
        declaration.display()
    )]
    NotAsDeclared {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        found: Dtype,
        /// The file with the declaration.
        declaration: PathBuf,
        /// What is declared.
        declared: &'static str,
    },
    /// A quantised weight that is not declared so.
    #[error("{tensor} in {} is of type {found:?}, but {declaration}", path.display())]
    NotDeclared {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        found: Dtype,
        /// What is declared, or where a declaration would be.
        declaration: String,
    },
    /// A quantised weight without one of its scales.
    #[error("{} has no {tensor}, which {weight} needs", directory.display())]
    MissingScale {
        /// The checkpoint.
        directory: PathBuf,
        /// The absent tensor.
        tensor: String,
        /// The quantised weight.
        weight: String,
    },
    /// A scale that cannot be one.
    #[error("element {element} of {tensor} in {} is {value}: expected {expected}", path.display())]
    Scale {
        /// The file.
        path: PathBuf,
        /// The tensor of scales.
        tensor: String,
        /// Flat index.
        element: usize,
        /// The value.
        value: f32,
        /// What a scale may be.
        expected: &'static str,
    },
    /// A word of a quantised weight that stands for no number, or a shape that the format does not have.
    #[error("{tensor} in {}: {source}", path.display())]
    Word {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong.
        source: FormatError,
    },
    /// A tensor of the text model that no parameter uses.
    #[error("{tensor} in {} belongs to the text model but to no parameter of this configuration", path.display())]
    UnusedTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// The model has no parameter of this name.
    #[error("the model has no parameter {parameter}")]
    UnknownParameter {
        /// The name asked for.
        parameter: String,
    },
    /// Asked for with another number of elements.
    #[error("{parameter} has shape {found:?}, but {expected:?} was asked for")]
    ExpectedShape {
        /// The parameter.
        parameter: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape asked for.
        expected: Vec<usize>,
    },
    /// A size does not fit.
    #[error("the number of elements of {parameter} overflows")]
    TooLarge {
        /// The parameter.
        parameter: String,
    },
}

impl From<CheckpointError> for SourceError {
    fn from(error: CheckpointError) -> Self {
        Self(Box::new(error))
    }
}
