//! E4M3FN codes with one bf16 multiplier per row (`row_scale_v1`).
//!
//! `w[n,k] = f32(e4m3fn(c[n,k]) * bf16(r[n]))`, exact apart from f32 under- and overflow. The code plane is row-major;
//! the scale plane starts at the next multiple of 256.

use super::{Format, FormatError, align_up, index, matrix_shape, require_zero, rows};
use perplexity_kernels::numeric::{E4M3FN_MAX, E4M3FN_VALUES, bf16_to_f32, f32_to_bf16, f32_to_e4m3fn, round_bf16};
use rayon::prelude::*;

/// Alignment of the scale plane within the tensor.
const PLANE_ALIGNMENT: u64 = 256;

/// Where the planes of a `[rows, columns]` tensor lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Rows `N`.
    pub rows: usize,
    /// Columns `K`.
    pub columns: usize,
    /// Byte offset of the scale plane.
    pub scale_offset: usize,
    /// Bytes of the whole tensor.
    pub size: u64,
}

impl Geometry {
    /// Planes of a tensor of shape `[N, K]`.
    ///
    /// # Errors
    /// When the shape is not a matrix or a size overflows.
    pub fn new(shape: &[u64]) -> Result<Self, FormatError> {
        let (rows, columns) = matrix_shape(Format::Fp8E4m3fnRowBf16, shape)?;
        let overflow = FormatError::Overflow {
            what: "an encoded size",
        };
        let scale_offset = rows
            .checked_mul(columns)
            .and_then(|bytes| align_up(bytes, PLANE_ALIGNMENT));
        let size = scale_offset
            .zip(rows.checked_mul(2))
            .and_then(|(offset, scales)| offset.checked_add(scales));
        let (scale_offset, size) = scale_offset.zip(size).ok_or(overflow)?;
        index(size)?;
        Ok(Self {
            rows: rows as usize,
            columns: columns as usize,
            scale_offset: scale_offset as usize,
            size,
        })
    }

    fn scale(&self, bytes: &[u8], row: usize) -> u16 {
        let at = self.scale_offset + 2 * row;
        u16::from_le_bytes([bytes[at], bytes[at + 1]])
    }
}

/// Writes `scale * e4m3fn(code)`; refuses NaN codes, whose plane index starts at `first`.
pub(crate) fn scale_codes(codes: &[u8], first: usize, scale: f32, out: &mut [f32]) -> Result<(), FormatError> {
    require_numbers(codes, first)?;
    for (value, code) in out.iter_mut().zip(codes) {
        *value = scale * E4M3FN_VALUES[*code as usize];
    }
    Ok(())
}

/// Refuses NaN codes, whose plane index starts at `first`.
pub(super) fn require_numbers(codes: &[u8], first: usize) -> Result<(), FormatError> {
    // A fold without early exit is vectorised.
    if codes.iter().fold(true, |numbers, code| numbers & (code & 0x7F != 0x7F)) {
        return Ok(());
    }
    let at = codes.iter().position(|code| code & 0x7F == 0x7F).unwrap_or(0);
    Err(FormatError::InvalidWord {
        what: "code",
        index: (first + at) as u64,
        word: codes[at].into(),
    })
}

/// Decodes elements from `begin` on; bytes and range were checked.
pub(super) fn decode(geometry: &Geometry, bytes: &[u8], begin: usize, out: &mut [f32]) -> Result<(), FormatError> {
    rows::for_each_row(geometry.columns, begin, out, |row, column, out| {
        let word = geometry.scale(bytes, row);
        let scale = bf16_to_f32(word);
        if !scale.is_finite() {
            return Err(FormatError::InvalidWord {
                what: "row scale",
                index: row as u64,
                word: word.into(),
            });
        }
        let first = row * geometry.columns + column;
        scale_codes(&bytes[first..first + out.len()], first, scale, out)
    })
}

/// Checks scales (finite, sign 0), codes (not NaN; zero under a zero scale) and the gap.
pub(super) fn validate(geometry: &Geometry, bytes: &[u8]) -> Result<(), FormatError> {
    (0..geometry.rows)
        .into_par_iter()
        .with_min_len((1usize << 14).div_ceil(geometry.columns))
        .try_for_each(|row| {
            let word = geometry.scale(bytes, row);
            if word >= 0x7F80 {
                return Err(FormatError::InvalidWord {
                    what: "row scale",
                    index: row as u64,
                    word: word.into(),
                });
            }
            let first = row * geometry.columns;
            let codes = &bytes[first..first + geometry.columns];
            require_numbers(codes, first)?;
            match codes.iter().position(|code| word == 0 && code & 0x7F != 0) {
                Some(at) => Err(FormatError::InvalidWord {
                    what: "code under a zero scale",
                    index: (first + at) as u64,
                    word: codes[at].into(),
                }),
                None => Ok(()),
            }
        })?;
    let codes_end = geometry.rows * geometry.columns;
    require_zero(&bytes[codes_end..geometry.scale_offset], codes_end)
}

/// Packs given words: `codes` row-major `[N, K]`, `scales` one bf16 word per row.
///
/// # Errors
/// When the counts are not the shape's, a code is NaN, or a scale is negative or not finite.
pub fn pack(shape: &[u64], codes: &[u8], scales: &[u16]) -> Result<Vec<u8>, FormatError> {
    let geometry = Geometry::new(shape)?;
    for (what, expected, actual) in [
        ("codes", geometry.rows * geometry.columns, codes.len()),
        ("scales", geometry.rows, scales.len()),
    ] {
        if expected != actual {
            return Err(FormatError::Count {
                what,
                expected: expected as u64,
                actual: actual as u64,
            });
        }
    }
    require_numbers(codes, 0)?;
    if let Some(row) = scales.iter().position(|&word| word >= 0x7F80) {
        return Err(FormatError::InvalidWord {
            what: "row scale",
            index: row as u64,
            word: scales[row].into(),
        });
    }
    let mut bytes = vec![0; geometry.size as usize];
    bytes[..codes.len()].copy_from_slice(codes);
    for (word, scale) in bytes[geometry.scale_offset..]
        .as_chunks_mut::<2>()
        .0
        .iter_mut()
        .zip(scales)
    {
        *word = scale.to_le_bytes();
    }
    Ok(bytes)
}

/// `fp8_row_maxabs` on whole rows: `values` are the rows from `first_row` on; `bytes` is the whole tensor.
///
/// The source is first rounded to bf16; `r = bf16(max / 448)`, at least the smallest positive word; `code =
/// e4m3fn(clamp(x * v, -448, 448))` with `v = f32(1 / r)`.
pub(super) fn encode_rows(
    geometry: &Geometry,
    first_row: usize,
    values: &[f32],
    bytes: &mut [u8],
) -> Result<(), FormatError> {
    let columns = geometry.columns;
    let row_count = values.len() / columns;
    let (codes, scales) = bytes.split_at_mut(geometry.scale_offset);
    codes[first_row * columns..][..row_count * columns]
        .par_chunks_exact_mut(columns)
        .zip(scales[2 * first_row..][..2 * row_count].par_chunks_exact_mut(2))
        .zip(values.par_chunks_exact(columns))
        .enumerate()
        .with_min_len((1usize << 13).div_ceil(columns))
        .try_for_each(|(row, ((codes, scale), values))| {
            let first = ((first_row + row) * columns) as u64;
            rows::require_finite(values, first)?;
            let out_of_range = |value| FormatError::OutOfRange {
                format: Format::Fp8E4m3fnRowBf16,
                index: first,
                value,
            };
            let largest = round_bf16(rows::max_magnitude(values));
            if largest == 0.0 {
                // The tensor starts out zero: scale 0, codes 0.
                return Ok(());
            }
            let word = f32_to_bf16((f64::from(largest) / f64::from(E4M3FN_MAX)) as f32).max(1);
            let reciprocal = 1.0 / bf16_to_f32(word);
            if !bf16_to_f32(word).is_finite() {
                return Err(out_of_range(largest));
            }
            scale.copy_from_slice(&word.to_le_bytes());
            for (code, value) in codes.iter_mut().zip(values) {
                // A product of two f32 is exact in f64, so this rounds once, as a plain f32 product does.
                let scaled = round_bf16(*value) * reciprocal;
                if !scaled.is_finite() {
                    return Err(out_of_range(*value));
                }
                *code = f32_to_e4m3fn(scaled.clamp(-E4M3FN_MAX, E4M3FN_MAX));
            }
            Ok(())
        })
}
