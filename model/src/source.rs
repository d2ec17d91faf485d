//! Where weights come from: an artifact or a Hugging Face checkpoint, behind one interface.
//!
//! Parameters go by their artifact names (`text/layers/0/gdn/query`), whatever the file calls them.

use crate::config::TextConfig;

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
}

/// A weight or resource that could not be provided; the message names file, parameter and expectation.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SourceError(pub Box<dyn std::error::Error + Send + Sync>);
