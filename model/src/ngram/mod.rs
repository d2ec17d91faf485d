//! The n-gram embedding: which rows of the table a token looks up ([`NgramHash`]), and where the table is
//! ([`NgramTable`]: an artifact's volume file, [`Volume`], or tensors of a checkpoint).

mod checkpoint;
mod hash;
mod memory;
mod volume;

pub use checkpoint::CheckpointTable;
pub use hash::{Context, NgramHash, mix64};
pub use memory::Kept;
pub use volume::{Access, BLOCK_BYTES, TableOptions, Volume, VolumeError, VolumeGeometry};

pub(crate) use volume::{VolumeWriter, decode_row};

use crate::experts::CacheStatistics;

/// A table of embedding rows.
pub trait NgramTable: Send + Sync {
    /// Writes the values of the given rows to `out`, one row after the other.
    ///
    /// # Errors
    /// When a row does not exist or cannot be read.
    fn read(&self, rows: &[u64], out: &mut [f32]) -> Result<(), VolumeError>;

    /// How many of the rows read so far were in a memory in front of the table, and how many were not; zeros without one.
    fn statistics(&self) -> CacheStatistics {
        CacheStatistics::default()
    }
}
