//! The table of the checkpoint that an artifact was converted from, in place of the volume: the same codes, made of the
//! checkpoint's rows as the conversion makes them.

use std::path::Path;
use std::sync::Arc;

use perplexity_kernels::numeric::{f32_to_e4m3fn, round_bf16};

use super::volume::decode_row;
use super::{NgramTable, VolumeError, VolumeGeometry};
use crate::checkpoint::CheckpointSource;
use crate::convert::volume_id;
use crate::source::TextSource;

/// A checkpoint's rows under an artifact's scale.
pub struct CheckpointTable {
    rows: Arc<dyn NgramTable>,
    width: usize,
    scale: f32,
}

impl CheckpointTable {
    /// The table of `checkpoint`, whose directory is `path`, for an artifact that describes its volume by `geometry` and
    /// `id` and multiplies its codes by `scale`. The id is made of the checkpoint's files, which are read once for it.
    ///
    /// # Errors
    /// When the checkpoint has no table, or is not the one that the artifact was converted from.
    pub fn new(
        checkpoint: CheckpointSource,
        path: &Path,
        geometry: VolumeGeometry,
        id: [u8; 16],
        scale: f32,
    ) -> Result<Self, VolumeError> {
        let differs = |what, found, expected| VolumeError::Table {
            path: path.into(),
            what,
            found,
            expected,
        };
        let (Some(rows), Some(dims)) = (checkpoint.ngram_table(), &checkpoint.config().flash_next) else {
            return Err(differs("the number of rows", "0".into(), geometry.rows.to_string()));
        };
        let found = dims.geometry(checkpoint.config().vocab_size);
        if found != geometry {
            let shape = |geometry: VolumeGeometry| format!("{} rows of {}", geometry.rows, geometry.row_bytes);
            return Err(differs("the size", shape(found), shape(geometry)));
        }
        let hex = |id: [u8; 16]| id.iter().map(|byte| format!("{byte:02x}")).collect();
        let found = volume_id(&checkpoint);
        if found != id {
            return Err(differs("the volume id that its files give", hex(found), hex(id)));
        }
        Ok(Self {
            rows,
            width: geometry.row_bytes,
            scale,
        })
    }
}

impl NgramTable for CheckpointTable {
    fn read(&self, rows: &[u64], out: &mut [f32]) -> Result<(), VolumeError> {
        self.rows.read(rows, out)?;
        for (row, out) in rows.iter().zip(out.chunks_exact_mut(self.width)) {
            // Rows that are codes under this scale stay what they are.
            let codes: Vec<u8> = out
                .iter()
                .map(|value| f32_to_e4m3fn(round_bf16(value / self.scale)))
                .collect();
            decode_row(*row, &codes, self.scale, out)?;
        }
        Ok(())
    }
}
