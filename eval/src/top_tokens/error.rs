//! Why a top-token reference is refused or cannot be written.

use std::io;
use std::path::PathBuf;

/// Why a reference is refused or cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum TopTokenError {
    /// The system refuses.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is something else.
    #[error("{path} is not {name}; it is {found}", path = path.display())]
    Kind {
        /// The file.
        path: PathBuf,
        /// What was expected.
        name: &'static str,
        /// What it is.
        found: &'static str,
    },
    /// The file has another version.
    #[error("{path} is {name} of version {version}; this program reads version {reads}", path = path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// What it is.
        name: &'static str,
        /// The version that is read.
        reads: u32,
        /// Its version.
        version: u32,
    },
    /// A field of the header is out of range.
    #[error("{path} is not a valid reference: {field} is {value}, the limit is {limit}", path = path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// Greatest value; 0 is never valid.
        limit: u64,
    },
    /// A string of the header is not UTF-8.
    #[error("{path} is not a valid reference: its {field} is not UTF-8", path = path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
    },
    /// The file ends too early.
    #[error("{path} is truncated in {place}; the run that wrote it did not finish, record it again", path = path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Where it ends.
        place: String,
    },
    /// Something follows the last record.
    #[error(
        "{path} has {bytes} byte(s) after its footer that say nothing of its origin; it is damaged, record it again",
        path = path.display()
    )]
    Trailing {
        /// The file.
        path: PathBuf,
        /// Bytes after the footer.
        bytes: u64,
    },
    /// The file was recorded under another protocol.
    #[error(
        "{path} was recorded for {recorded}, this run has {run}; use the same corpus, mode, context and stride, or \
         record a new reference", path = path.display()
    )]
    Protocol {
        /// The file.
        path: PathBuf,
        /// What it was recorded for.
        recorded: String,
        /// What this run has.
        run: String,
    },
    /// The file was recorded with another vocabulary.
    #[error(
        "{path} was recorded over {recorded} tokens of vocabulary, this model has {public}; \
         only models with one tokenizer, or runs with the same --softmax-rows, can be compared", path = path.display()
    )]
    Vocabulary {
        /// The file.
        path: PathBuf,
        /// Public tokens of the recorded model.
        recorded: u64,
        /// Public tokens of this model.
        public: u64,
    },
    /// The footer comes where a record should be.
    #[error(
        "{path} holds fewer windows than this run: it ends before window {window} of stream `{stream}`; it was \
         recorded from fewer windows, record it again", path = path.display()
    )]
    TooFewWindows {
        /// The file.
        path: PathBuf,
        /// Stream of the missing window.
        stream: String,
        /// Its index.
        window: usize,
    },
    /// A record comes where the footer should be.
    #[error("{path} holds more windows than this run; score the whole corpus or record a new reference", path = path.display())]
    TooManyWindows {
        /// The file.
        path: PathBuf,
    },
    /// A record has an impossible range of targets.
    #[error("{path}: window {window} of stream `{stream}` has the invalid target range {begin}..{end}", path = path.display())]
    Range {
        /// The file.
        path: PathBuf,
        /// Stream of the expected window.
        stream: String,
        /// Its index.
        window: usize,
        /// First target.
        begin: u64,
        /// End of the targets.
        end: u64,
    },
    /// The record belongs to another window or other tokens.
    #[error(
        "{path}: window {window} of stream `{stream}` was recorded over different tokens ({difference}); the text, the \
         tokenizer or the window plan differs, record a new reference", path = path.display()
    )]
    Tokens {
        /// The file.
        path: PathBuf,
        /// Stream of the expected window.
        stream: String,
        /// Its index.
        window: usize,
        /// The first field that differs.
        difference: String,
    },
    /// A value of a record cannot be right.
    #[error("{path}: window {window} of stream `{stream}`, position {position}: {what}", path = path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// Stream of the window.
        stream: String,
        /// Its index.
        window: usize,
        /// Position within its targets.
        position: usize,
        /// What is wrong.
        what: String,
    },
}
