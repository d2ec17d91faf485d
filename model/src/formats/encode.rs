//! Encoding float values, at once or in slabs of rows.

use super::{EncodeMethod, Format, FormatError, Layout, direct, element_count, fp8_row, grouped, index, nvfp4, rows};
use rayon::prelude::*;

/// Where words go, by layout.
enum Target {
    Direct,
    Grouped(grouped::Geometry),
    Nvfp4(nvfp4::Geometry, f32),
    Fp8Row(fp8_row::Geometry),
}

/// Encodes a tensor from consecutive slabs of its values.
///
/// Slabs are whole rows (any number of values for the direct formats). The bytes do not depend on how the values are
/// cut into slabs. Besides the encoded tensor nothing of its size is held.
pub struct Encoder {
    format: Format,
    method: EncodeMethod,
    target: Target,
    columns: usize,
    elements: u64,
    taken: u64,
    bytes: Vec<u8>,
}

impl Encoder {
    /// An encoder for a tensor of this shape. nvfp4 needs to know the largest magnitude of all values beforehand, since
    /// its divisor depends on it; the other methods ignore `max_magnitude`.
    ///
    /// # Errors
    /// When the method does not produce the format, the shape does not fit it, the size overflows, or the largest
    /// magnitude gives no finite positive divisor.
    pub fn new(format: Format, method: EncodeMethod, shape: &[u64], max_magnitude: f32) -> Result<Self, FormatError> {
        if !method.encodes(format) {
            return Err(FormatError::Method { format, method });
        }
        let size = super::encoded_size(format, format.layout(), shape, 1)?;
        let mut bytes = vec![0; index(size)?];
        let (target, columns) = match format.layout() {
            Layout::RowSplitK128V1 => {
                let geometry = grouped::Geometry::new(format, shape)?;
                (Target::Grouped(geometry), geometry.columns)
            }
            Layout::BlockScaleK16M128x4V1 => {
                let geometry = nvfp4::Geometry::new(shape, 1)?;
                let divisor = nvfp4::divisor(method, max_magnitude)?;
                nvfp4::write_divisors(&geometry, &[divisor], &mut bytes)?;
                (Target::Nvfp4(geometry, divisor), geometry.columns)
            }
            Layout::RowScaleV1 => {
                let geometry = fp8_row::Geometry::new(shape)?;
                (Target::Fp8Row(geometry), geometry.columns)
            }
            _ => (Target::Direct, 1),
        };
        Ok(Self {
            format,
            method,
            target,
            columns,
            elements: element_count(shape)?,
            taken: 0,
            bytes,
        })
    }

    /// Encodes the next rows.
    ///
    /// # Errors
    /// When `values` are not whole rows or more than the tensor has, or a value cannot be encoded: NaN or infinite
    /// (except for bf16 and fp32), or beyond the range of the format's scale.
    pub fn push(&mut self, values: &[f32]) -> Result<(), FormatError> {
        let count = values.len() as u64;
        if !values.len().is_multiple_of(self.columns) {
            return Err(FormatError::PartialRow {
                values: count,
                columns: self.columns as u64,
            });
        }
        if count > self.elements - self.taken {
            let actual = self.taken.saturating_add(count);
            return Err(FormatError::Count {
                what: "values",
                expected: self.elements,
                actual,
            });
        }
        let first_row = self.taken as usize / self.columns;
        let bytes = &mut self.bytes;
        match &self.target {
            Target::Direct => {
                let width = direct::word_bytes(self.format);
                let out = &mut bytes[self.taken as usize * width..][..values.len() * width];
                direct::encode(self.format, values, self.taken, out)?;
            }
            Target::Grouped(geometry) => grouped::encode_rows(geometry, self.method, first_row, values, bytes)?,
            Target::Nvfp4(geometry, divisor) => {
                nvfp4::encode_rows(geometry, self.method, *divisor, first_row, values, bytes)?;
            }
            Target::Fp8Row(geometry) => fp8_row::encode_rows(geometry, first_row, values, bytes)?,
        }
        self.taken += count;
        Ok(())
    }

    /// The encoded tensor.
    ///
    /// # Errors
    /// When fewer values were given than the tensor has.
    pub fn finish(self) -> Result<Vec<u8>, FormatError> {
        if self.taken != self.elements {
            return Err(FormatError::Count {
                what: "values",
                expected: self.elements,
                actual: self.taken,
            });
        }
        Ok(self.bytes)
    }
}

/// Encodes a whole tensor, in parallel.
///
/// # Errors
/// As [`Encoder::new`], [`Encoder::push`] and [`Encoder::finish`].
pub fn encode(format: Format, method: EncodeMethod, shape: &[u64], values: &[f32]) -> Result<Vec<u8>, FormatError> {
    let max_magnitude = match format {
        Format::Nvfp4 => values
            .par_chunks(1 << 16)
            .map(rows::max_magnitude)
            .reduce(|| 0.0, f32::max),
        _ => 0.0,
    };
    let mut encoder = Encoder::new(format, method, shape, max_magnitude)?;
    encoder.push(values)?;
    encoder.finish()
}
