//! The n-gram table of a checkpoint: tensors `ngram_embedding.shard_<k>.weight` on top of one another, in floats or in
//! E4M3FN codes with one scale for all.
//!
//! The hash's constants are computed, not read; a checkpoint that carries them must carry the same ones.

use std::sync::Arc;

use half::bf16;
use perplexity_kernels::numeric::round_bf16;
use safetensors::Dtype;

use super::CheckpointError;
use super::locate::Locator;
use super::shards::{Shards, Tensor};
use super::words::{decode_floats, float, is_float};
use crate::config::FlashNextConfig;
use crate::ngram::{NgramHash, NgramTable, VolumeError, decode_row};

/// The table's tensors.
#[derive(Clone)]
pub(super) struct NgramTensors {
    shards: Arc<Shards>,
    /// First row and tensor of each shard, all of one type.
    parts: Vec<(u64, Tensor)>,
    rows: u64,
    width: usize,
    /// What E4M3FN codes are multiplied by; `None` when the rows are floats.
    scale: Option<f32>,
    /// Names of all tensors that belong to the table.
    pub(super) names: Vec<String>,
}

impl NgramTensors {
    /// Finds and checks the table of a model with `dims`.
    ///
    /// # Errors
    /// When a shard is missing or of another shape or type, rows are missing, or a constant of the hash differs.
    pub(super) fn locate(
        locator: &Locator<'_>,
        shards: &Arc<Shards>,
        dims: &FlashNextConfig,
    ) -> Result<Self, CheckpointError> {
        let module = format!("{}layers.{}.ple.ple_embedding.", locator.prefix, dims.ple.layer);
        let hash = NgramHash::new(&dims.ngram, locator.config.vocab_size);
        let mut table = Self {
            shards: Arc::clone(shards),
            parts: Vec::new(),
            rows: 0,
            width: dims.row_width(),
            scale: None,
            names: Vec::new(),
        };
        for (name, expected) in [
            ("layer_multipliers", hash.multipliers()),
            ("ngram_heads_offsets", hash.offsets()),
            ("ngram_heads_vocab_sizes", hash.sizes()),
        ] {
            table.check_constants(format!("{module}{name}"), expected)?;
        }
        for part in 0..dims.ngram.parts {
            let name = format!("{module}ngram_embedding.shard_{part}.weight");
            let tensor = shards.tensors.get(&name).cloned();
            let tensor = tensor.ok_or_else(|| CheckpointError::MissingTensor {
                directory: locator.directory.into(),
                tensor: name.clone(),
                parameter: format!("shard {part} of {} of the n-gram table", dims.ngram.parts),
                expected: vec![hash.rows() as usize / dims.ngram.parts, table.width],
            })?;
            table.add(name, tensor)?;
        }
        if table.rows != hash.rows() {
            let (name, tensor) = (table.names.last().cloned(), table.parts.last());
            return Err(table.refused(
                name.unwrap_or_default(),
                tensor.map(|(_, tensor)| tensor),
                format!(
                    "the shards have {} rows together: the hash has {}",
                    table.rows,
                    hash.rows()
                ),
            ));
        }
        if table.is_coded() {
            let name = format!("{module}ngram_embedding.weight_scale");
            let tensor = shards.tensors.get(&name).cloned();
            let tensor = tensor.ok_or_else(|| CheckpointError::MissingScale {
                directory: locator.directory.into(),
                tensor: name.clone(),
                weight: format!("{module}ngram_embedding"),
            })?;
            table.set_scale(name, &tensor)?;
        }
        Ok(table)
    }

    fn refused(&self, tensor: String, found: Option<&Tensor>, reason: String) -> CheckpointError {
        let path = found.map_or_else(Default::default, |tensor| self.shards.path(tensor).into());
        CheckpointError::NgramTable { path, tensor, reason }
    }

    fn check_constants(&mut self, name: String, expected: &[u64]) -> Result<(), CheckpointError> {
        let Some(tensor) = self.shards.tensors.get(&name) else {
            return Ok(());
        };
        let words = self.shards.bytes(tensor).as_chunks::<8>().0.iter();
        let found: Vec<u64> = words.map(|word| u64::from_le_bytes(*word)).collect();
        if tensor.dtype != Dtype::I64 || found != expected {
            let reason = format!("the hash of this configuration has {expected:?} (I64)");
            return Err(self.refused(name.clone(), Some(tensor), reason));
        }
        self.names.push(name);
        Ok(())
    }

    fn add(&mut self, name: String, tensor: Tensor) -> Result<(), CheckpointError> {
        let kind = self.parts.first().map_or(tensor.dtype, |(_, first)| first.dtype);
        let has_kind = tensor.dtype == kind && (kind == Dtype::F8_E4M3 || is_float(kind));
        let rows = match *tensor.shape {
            [rows, width] if width == self.width && has_kind => rows as u64,
            _ => {
                let reason = format!(
                    "{:?} of shape {:?}: expected rows of {} elements, BF16, F16, F32 or F8_E4M3 in all shards",
                    tensor.dtype, tensor.shape, self.width
                );
                return Err(self.refused(name, Some(&tensor), reason));
            }
        };
        self.parts.push((self.rows, tensor));
        self.rows += rows;
        self.names.push(name);
        Ok(())
    }

    fn set_scale(&mut self, name: String, tensor: &Tensor) -> Result<(), CheckpointError> {
        let single = tensor.shape.iter().product::<usize>() == 1 && is_float(tensor.dtype);
        let value = if single {
            float(self.shards.bytes(tensor), tensor.dtype, 0)
        } else {
            f32::NAN
        };
        // An artifact holds the scale in bfloat16.
        if !(value > 0.0 && value.is_finite() && round_bf16(value) == value) {
            let reason = "expected one finite positive number that bfloat16 holds".to_owned();
            return Err(self.refused(name, Some(tensor), reason));
        }
        self.scale = Some(value);
        self.names.push(name);
        Ok(())
    }

    /// Whether the rows are E4M3FN codes.
    pub(super) fn is_coded(&self) -> bool {
        self.parts
            .first()
            .is_some_and(|(_, tensor)| tensor.dtype == Dtype::F8_E4M3)
    }

    /// What an artifact's volume multiplies its codes by to get these rows; `None` when they are floats.
    pub(super) fn scale(&self) -> Option<f32> {
        self.scale
    }

    /// The stored bytes of row `row`, and their type.
    pub(super) fn row(&self, row: u64) -> Result<(&[u8], Dtype), VolumeError> {
        if row >= self.rows {
            let rows = self.rows;
            return Err(VolumeError::Row { row, rows });
        }
        let part = self.parts.partition_point(|(first, _)| *first <= row) - 1;
        let (first, tensor) = &self.parts[part];
        let bytes = self.shards.bytes(tensor);
        let stride = bytes.len() / tensor.shape[0];
        let start = (row - first) as usize * stride;
        Ok((&bytes[start..start + stride], tensor.dtype))
    }
}

impl NgramTable for NgramTensors {
    fn read(&self, rows: &[u64], out: &mut [f32]) -> Result<(), VolumeError> {
        for (&row, out) in rows.iter().zip(out.chunks_exact_mut(self.width)) {
            let (bytes, dtype) = self.row(row)?;
            match self.scale {
                Some(scale) => decode_row(row, bytes, scale, out)?,
                None => decode_floats(bytes, dtype, 0, out),
            }
            if let Some(element) = out.iter().position(|value| !value.is_finite()) {
                let word = bf16::from_f32(out[element]).to_bits();
                return Err(VolumeError::Word { row, element, word });
            }
        }
        Ok(())
    }
}
