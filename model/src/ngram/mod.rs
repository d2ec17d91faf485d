//! The n-gram embedding: which rows of the table a token looks up ([`NgramHash`]), and where the table is
//! ([`NgramTable`]: an artifact's volume file, [`Volume`], or tensors of a checkpoint).

mod hash;
mod volume;

pub use hash::{Context, NgramHash, mix64};
pub use volume::{Access, BLOCK_BYTES, Volume, VolumeError, VolumeGeometry, VolumeWriter};

pub(crate) use volume::decode_row;

/// A table of embedding rows.
pub trait NgramTable: Send + Sync {
    /// Writes the values of the given rows to `out`, one row after the other.
    ///
    /// # Errors
    /// When a row does not exist or cannot be read.
    fn read(&self, rows: &[u64], out: &mut [f32]) -> Result<(), VolumeError>;
}
