//! How an evaluation runs, and which files it reads and writes.

use std::path::PathBuf;

use super::EvaluateError;
use crate::hidden::SaveHidden;
use crate::recording::Files;
use crate::shard::Shard;
use crate::top_tokens::Provenance;

/// A top-token reference to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveTopTokens {
    /// Where to.
    pub path: PathBuf,
    /// Tokens per position, `1..=64`.
    pub per_position: u32,
}

/// A logit base to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveLogits {
    /// Where to; an existing file is refused.
    pub path: PathBuf,
    /// Values per row, at least the public tokens, which is the default; further ones get code 0.
    pub row_width: Option<u32>,
}

/// How to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Windows per call of the scorer, at least 1.
    pub batch: usize,
    /// Share of the windows to score.
    pub shard: Shard,
    /// Top-token reference to write.
    pub save_top_tokens: Option<SaveTopTokens>,
    /// Top-token reference to compare with.
    pub kl_reference: Option<PathBuf>,
    /// Tokens file to write.
    pub save_tokens: Option<PathBuf>,
    /// Logit base to write.
    pub logits_out: Option<SaveLogits>,
    /// Logit base to compare with.
    pub logits_reference: Option<PathBuf>,
    /// Hidden-state reference to write.
    pub save_hidden: Option<SaveHidden>,
    /// Hidden-state reference to compare with.
    pub kl_hidden: Option<PathBuf>,
    /// What written references say about this run.
    pub provenance: Option<Provenance>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            batch: 1,
            shard: Shard::WHOLE,
            save_top_tokens: None,
            kl_reference: None,
            save_tokens: None,
            logits_out: None,
            logits_reference: None,
            save_hidden: None,
            kl_hidden: None,
            provenance: None,
        }
    }
}

impl Options {
    /// Checks everything that needs neither model nor tokenizer nor an open file. [`prepare`](super::prepare) checks it
    /// again.
    ///
    /// # Errors
    /// When options exclude one another, or a file is to be written that is read or written already.
    pub fn check(&self) -> Result<(), EvaluateError> {
        if self.batch == 0 {
            return Err(EvaluateError::Batch);
        }
        Files::check(self)
    }
}
