//! Why a logit base is refused or cannot be written.

use std::io;
use std::path::PathBuf;

/// Why a base is refused or cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum LlamaBaseError {
    /// The system refuses.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The target exists; such files take hours and are never overwritten.
    #[error("{path} exists; remove it or name another file", path = path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The file is something else.
    #[error("{path} is not a llama.cpp logit base; it is {found}", path = path.display())]
    Kind {
        /// The file.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// A field of the header is out of range.
    #[error("{path}: {field} is {value}, which no logit base has", path = path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// Its value.
        value: i64,
    },
    /// The file has another length than its header implies.
    #[error("{path} has {found} bytes, its header implies {expected}; it is damaged or incomplete", path = path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// The length implied.
        expected: u64,
    },
    /// The base belongs to another run.
    #[error("{path} was written for {field} {recorded}, this run has {run}; use the same {field}", path = path.display())]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// What differs.
        field: &'static str,
        /// Its value in the file.
        recorded: u64,
        /// Its value in this run.
        run: u64,
    },
    /// The base has other tokens.
    #[error(
        "{path}: token {index} is {recorded}, this run has {run}; the text or the tokenizer differs",
        path = path.display()
    )]
    Token {
        /// The file.
        path: PathBuf,
        /// Index in the stream.
        index: usize,
        /// The id in the file.
        recorded: i32,
        /// The id in this run.
        run: u32,
    },
    /// The number of rows is not the one announced.
    #[error("{path}: {found} rows were written, {expected} announced", path = path.display())]
    Rows {
        /// The file.
        path: PathBuf,
        /// Rows written.
        found: u64,
        /// Rows announced.
        expected: u64,
    },
    /// A row is no distribution.
    #[error("{path}: row {row} holds no log-probabilities of a distribution; it is damaged", path = path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The row, counted over all chunks.
        row: u64,
    },
}
