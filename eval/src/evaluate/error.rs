//! Why an evaluation stopped.

use std::path::PathBuf;

use crate::aggregate::BadLogprob;
use crate::files::FilesError;
use crate::llama_base::LlamaBaseError;
use crate::scorer::ScoreError;
use crate::top_tokens::TopTokenError;

/// Why an evaluation stopped.
#[derive(Debug, thiserror::Error)]
pub enum EvaluateError {
    /// No windows per batch.
    #[error("the batch must hold at least 1 window")]
    Batch,
    /// A token that the model does not know.
    #[error(
        "stream `{stream}`: token {token} at index {index} is outside the model's {public} public tokens; the \
         tokenizer belongs to another model"
    )]
    Token {
        /// The stream.
        stream: String,
        /// Index in the stream.
        index: usize,
        /// The id.
        token: u32,
        /// Public tokens of the model.
        public: usize,
    },
    /// The model failed.
    #[error("stream `{stream}`, window {window} (first of a batch of {batch}): {source}")]
    Scorer {
        /// Stream of the batch's first window.
        stream: String,
        /// Index of that window within its stream.
        window: usize,
        /// Windows in the batch.
        batch: usize,
        /// The model's message.
        source: ScoreError,
    },
    /// The model returned fewer or more windows than it was given.
    #[error("stream `{stream}`, window {window}: the model scored {found} windows of a batch of {expected}")]
    Windows {
        /// Stream of the batch's first window.
        stream: String,
        /// Index of that window within its stream.
        window: usize,
        /// Windows returned.
        found: usize,
        /// Windows asked for.
        expected: usize,
    },
    /// A result has the wrong length.
    #[error("stream `{stream}`, window {window}: the model returned {found} {what}, expected {expected}")]
    Length {
        /// The stream.
        stream: String,
        /// Index of the window within its stream.
        window: usize,
        /// Which result.
        what: &'static str,
        /// Values returned.
        found: usize,
        /// Values expected.
        expected: usize,
    },
    /// A result is no log-probability.
    #[error("stream `{stream}`, window {window}: {source}")]
    Value {
        /// The stream.
        stream: String,
        /// Index of the window within its stream.
        window: usize,
        /// The value and its position.
        source: BadLogprob,
    },
    /// Options that exclude one another.
    #[error("{0}")]
    Combination(&'static str),
    /// More top tokens per position than a file or the model has.
    #[error("{asked} top tokens per position were asked for; ask for 1 to {limit}")]
    TopK {
        /// Tokens asked for.
        asked: u32,
        /// The limit.
        limit: u64,
    },
    /// The scorer is not of the model that the evaluation was prepared for.
    #[error("the evaluation was prepared for {prepared} public tokens, the model has {found}")]
    Vocabulary {
        /// Public tokens announced.
        prepared: usize,
        /// Public tokens of the scorer.
        found: usize,
    },
    /// The model's hidden states are not those of a file.
    #[error("hidden states of {expected} values are to be saved or compared, {}", has(*found))]
    HiddenSize {
        /// Values of a state in the file.
        expected: usize,
        /// Values of the model's; `None` when it gives none.
        found: Option<usize>,
    },
    /// A file that is to be written is also read, or written twice.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// A top-token file is at fault.
    #[error(transparent)]
    TopTokens(#[from] TopTokenError),
    /// A logit base is at fault.
    #[error(transparent)]
    LlamaBase(#[from] LlamaBaseError),
    /// The tokens file cannot be written.
    #[error("cannot write the tokens file {path}: {source}", path = path.display())]
    TokensFile {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The number of scored tokens exceeds 64 bits.
    #[error("the number of scored tokens overflows")]
    Overflow,
}

fn has(hidden_size: Option<usize>) -> String {
    match hidden_size {
        Some(values) => format!("the model's have {values}"),
        None => "this model does not give its own".into(),
    }
}
