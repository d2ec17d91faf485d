//! How a run stores and reads its KV cache.

use crate::attention::{Emulation, KernelOptionError};
use crate::registry::{KvDtype, KvError};

/// `--kv-dtype`, the exact-window switch and the emulation level.
#[derive(Debug, Clone, PartialEq)]
pub struct KvOptions {
    /// Codec of every layer.
    pub dtype: KvDtype,
    /// Whether windowed codecs read recent and first keys from their exact copies.
    pub window: bool,
    /// What attention imitates.
    pub emulation: Emulation,
}

/// Cache options that do not fit the model or each other.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KvOptionsError {
    /// A codec or layer table that does not fit the model.
    #[error(transparent)]
    Codec(#[from] KvError),
    /// A kernel option that does not fit the codec.
    #[error(transparent)]
    Kernel(#[from] KernelOptionError),
}

impl KvOptions {
    /// The window on, exact attention on decoded rows.
    pub fn new(dtype: KvDtype) -> Self {
        Self {
            dtype,
            window: true,
            emulation: Emulation::Format,
        }
    }

    /// Checks the options against a model: `attention` lists the layers with a KV cache.
    ///
    /// # Errors
    /// When a codec cannot store the model's rows, the layer table names another layer, or a kernel option belongs to
    /// another format.
    pub fn check(&self, attention: &[usize], head_dim: usize) -> Result<(), KvOptionsError> {
        self.dtype.check(attention, head_dim)?;
        if let Emulation::Kernel(options) = self.emulation {
            options.check(&self.dtype)?;
        }
        Ok(())
    }

    /// Whether the window switch changes anything.
    pub fn has_window(&self) -> bool {
        self.dtype.default.has_window() || self.dtype.layers.values().any(|pair| pair.has_window())
    }
}
