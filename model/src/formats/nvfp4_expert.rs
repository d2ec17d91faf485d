//! The routed experts of one layer, shape `[E, H, I]`: E2M1 codes, one E4M3FN scale per 16 columns, one f32
//! multiplier per matrix (`nvfp4_expert_rg16_v1`).
//!
//! `w = e2m1(c) * e4m3fn(s) * m`, rounded once to f32. An expert is three matrices, gate `[I, H]`, up `[I, H]` and down
//! `[H, I]`, so a bank holds `3 E H I` weights and has no element order of its own: [`decode_matrix`] reads one matrix.
//!
//! | bytes | content |
//! |---|---|
//! | record `e` at `e * stride` | interleaved gate/up matrix (row `2i` = gate row `i`, `2i+1` = up row `i`), then down |
//! | `E * stride` | f32 multipliers: gate, up, down of each expert |
//!
//! A matrix is units of 16 rows x 16 columns, 144 bytes, row group by row group. In a unit, byte `32q + 4j + t`
//! (q < 4, j < 8, t < 4) holds column `4q + t` of row `j` (low nibble) and of row `8 + j` (high nibble); bytes 128 to
//! 143 are the rows' scales. `stride` is the record rounded up to 4096.

use super::nvfp4::{WeightTable, checked_matrix_scale, is_nan, require_scale_words};
use super::{Format, FormatError, align_up, index, require_zero};
use rayon::prelude::*;

/// Rows and columns of a unit.
pub const UNIT: usize = 16;
/// Bytes of a unit: 128 of codes, 16 of scales.
pub(crate) const UNIT_BYTES: usize = 144;
/// Code bytes of a unit.
const UNIT_CODES: usize = 128;
/// Alignment of the records.
const RECORD_ALIGNMENT: u64 = 4096;

/// One of an expert's matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Projection {
    /// `[I, H]`.
    Gate,
    /// `[I, H]`.
    Up,
    /// `[H, I]`.
    Down,
}

impl Projection {
    /// All three, in the order of the multipliers.
    pub const ALL: [Projection; 3] = [Self::Gate, Self::Up, Self::Down];
}

/// Where the records of an `[E, H, I]` bank lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Experts `E`.
    pub experts: usize,
    /// Model width `H`, a multiple of 16.
    pub hidden: usize,
    /// Inner width `I`, a multiple of 16.
    pub inner: usize,
    /// Bytes of the interleaved gate/up matrix, where the down matrix of a record starts.
    pub gate_up_bytes: usize,
    /// Bytes of a record without its zero tail.
    pub record_bytes: usize,
    /// Bytes from one record to the next.
    pub stride: usize,
    /// Bytes of the whole bank.
    pub size: u64,
}

impl Geometry {
    /// Records of a bank of shape `[E, H, I]`.
    ///
    /// # Errors
    /// When the shape is not three positive extents with `H` and `I` multiples of 16, or a size overflows.
    pub fn new(shape: &[u64]) -> Result<Self, FormatError> {
        let unit = UNIT as u64;
        let (experts, hidden, inner) = match *shape {
            [experts, hidden, inner]
                if shape.iter().all(|&extent| extent > 0) && hidden % unit == 0 && inner % unit == 0 =>
            {
                (experts, hidden, inner)
            }
            _ => {
                return Err(FormatError::shape(
                    Format::Nvfp4Mul,
                    shape,
                    "[E, H, I] with H % 16 == 0 and I % 16 == 0",
                ));
            }
        };
        let overflow = || FormatError::Overflow {
            what: "an encoded size",
        };
        let down_bytes = (hidden / unit)
            .checked_mul(inner / unit)
            .and_then(|units| units.checked_mul(UNIT_BYTES as u64))
            .ok_or_else(overflow)?;
        let gate_up_bytes = down_bytes.checked_mul(2).ok_or_else(overflow)?;
        let record_bytes = gate_up_bytes.checked_add(down_bytes).ok_or_else(overflow)?;
        let stride = align_up(record_bytes, RECORD_ALIGNMENT).ok_or_else(overflow)?;
        let size = stride
            .checked_add(12)
            .and_then(|bytes| bytes.checked_mul(experts))
            .ok_or_else(overflow)?;
        index(size)?;
        Ok(Self {
            experts: experts as usize,
            hidden: hidden as usize,
            inner: inner as usize,
            gate_up_bytes: gate_up_bytes as usize,
            record_bytes: record_bytes as usize,
            stride: stride as usize,
            size,
        })
    }

    /// Rows and columns of a matrix.
    pub fn matrix(&self, projection: Projection) -> (usize, usize) {
        match projection {
            Projection::Gate | Projection::Up => (self.inner, self.hidden),
            Projection::Down => (self.hidden, self.inner),
        }
    }

    /// Offset of the stored matrix within a record and stored row of the matrix's row `row`.
    fn stored_row(&self, projection: Projection, row: usize) -> (usize, usize) {
        match projection {
            Projection::Gate => (0, 2 * row),
            Projection::Up => (0, 2 * row + 1),
            Projection::Down => (self.gate_up_bytes, row),
        }
    }

    pub(crate) fn multiplier_offset(&self, expert: usize, projection: Projection) -> usize {
        self.experts * self.stride + 12 * expert + 4 * projection as usize
    }

    /// The multiplier of a matrix.
    ///
    /// # Errors
    /// When it is not finite and positive.
    fn multiplier(&self, bytes: &[u8], expert: usize, projection: Projection) -> Result<f32, FormatError> {
        let word = bytes[self.multiplier_offset(expert, projection)..]
            .first_chunk()
            .expect("the length was checked");
        checked_matrix_scale(f32::from_le_bytes(*word), 3 * expert + projection as usize)
    }
}

/// Decodes one matrix of one expert into `out`, C order; in parallel when it is large.
///
/// # Errors
/// When `bytes` or `out` have the wrong length, the expert does not exist, or a scale or multiplier is not a finite
/// (the multiplier: positive) number.
pub fn decode_matrix(
    shape: &[u64],
    bytes: &[u8],
    expert: usize,
    projection: Projection,
    out: &mut [f32],
) -> Result<(), FormatError> {
    let geometry = Geometry::new(shape)?;
    if bytes.len() as u64 != geometry.size {
        return Err(FormatError::Size {
            expected: geometry.size,
            actual: bytes.len() as u64,
        });
    }
    if expert >= geometry.experts {
        let (begin, elements) = (expert as u64, geometry.experts as u64);
        return Err(FormatError::Range {
            begin,
            end: begin.saturating_add(1),
            elements,
        });
    }
    let (rows, columns) = geometry.matrix(projection);
    if out.len() != rows * columns {
        return Err(FormatError::OutputLength {
            expected: (rows * columns) as u64,
            actual: out.len() as u64,
        });
    }
    let multiplier = geometry.multiplier(bytes, expert, projection)?;
    let record = &bytes[expert * geometry.stride..][..geometry.record_bytes];
    decode_record(&geometry, record, projection, multiplier, out).map_err(|error| match error {
        // Counted from the start of the bank.
        FormatError::InvalidWord { what, index, word } => FormatError::InvalidWord {
            what,
            index: index + (expert * geometry.stride) as u64,
            word,
        },
        other => other,
    })
}

/// Decodes one matrix of an expert's record into `out`, C order, of the matrix's size; `record` starts with the whole
/// record.
///
/// # Errors
/// When a scale is not a number.
pub fn decode_record(
    geometry: &Geometry,
    record: &[u8],
    projection: Projection,
    multiplier: f32,
    out: &mut [f32],
) -> Result<(), FormatError> {
    let table = WeightTable::new(|product| product * multiplier);
    let (_, columns) = geometry.matrix(projection);
    out.par_chunks_exact_mut(columns)
        .enumerate()
        .with_min_len((1usize << 13).div_ceil(columns))
        .try_for_each(|(row, out)| {
            for_each_block(geometry, record, projection, row, |block, word, codes| {
                let weights = table.under(word);
                let out = &mut out[block * UNIT..][..UNIT];
                out.iter_mut()
                    .zip(codes)
                    .for_each(|(value, code)| *value = weights[usize::from(code)]);
            })
        })
}

/// Checks the scales of a record without decoding it.
///
/// # Errors
/// When one is negative or not a number.
pub(crate) fn check_record(geometry: &Geometry, record: &[u8]) -> Result<(), FormatError> {
    let units = record[..geometry.record_bytes].chunks_exact(UNIT_BYTES);
    for (unit, bytes) in units.enumerate() {
        if let Some(at) = bytes[UNIT_CODES..].iter().position(|word| *word >= 0x7F) {
            return Err(FormatError::InvalidWord {
                what: "scale",
                index: (unit * UNIT + at) as u64,
                word: bytes[UNIT_CODES + at].into(),
            });
        }
    }
    Ok(())
}

/// Calls `work` with the number, the scale word and the 16 codes of every block of a matrix's row `row`.
///
/// # Errors
/// When a scale is not a number.
pub fn for_each_block(
    geometry: &Geometry,
    record: &[u8],
    projection: Projection,
    row: usize,
    mut work: impl FnMut(usize, u8, [u8; UNIT]),
) -> Result<(), FormatError> {
    let (_, columns) = geometry.matrix(projection);
    let (matrix, row) = geometry.stored_row(projection, row);
    let first_unit = row / UNIT * (columns / UNIT);
    let (lane, shift) = (row % 8, 4 * (row % UNIT / 8));
    for block in 0..columns / UNIT {
        let start = matrix + (first_unit + block) * UNIT_BYTES;
        let unit = &record[start..start + UNIT_BYTES];
        let word = unit[UNIT_CODES + row % UNIT];
        if is_nan(word) {
            return Err(FormatError::InvalidWord {
                what: "scale at byte",
                index: (start + UNIT_CODES + row % UNIT) as u64,
                word: word.into(),
            });
        }
        let code = |column: usize| (unit[32 * (column / 4) + 4 * lane + column % 4] >> shift) & 15;
        work(block, word, std::array::from_fn(code));
    }
    Ok(())
}

/// Checks scale words (sign 0, not NaN), multipliers and the zero tails of the records.
pub(super) fn validate(geometry: &Geometry, bytes: &[u8]) -> Result<(), FormatError> {
    for expert in 0..geometry.experts {
        for projection in Projection::ALL {
            geometry.multiplier(bytes, expert, projection)?;
        }
        let start = expert * geometry.stride;
        let record = &bytes[start..start + geometry.stride];
        for unit in record[..geometry.record_bytes].chunks_exact(UNIT_BYTES) {
            require_scale_words(&unit[UNIT_CODES..])?;
        }
        require_zero(&record[geometry.record_bytes..], start + geometry.record_bytes)?;
    }
    Ok(())
}

/// The words of one matrix to pack.
#[derive(Debug, Clone, Copy)]
pub struct MatrixWords<'a> {
    /// Two codes per byte, row-major, low nibble first.
    pub codes: &'a [u8],
    /// E4M3FN words, row-major `[rows, columns / 16]`.
    pub scales: &'a [u8],
    /// The matrix's multiplier.
    pub multiplier: f32,
}

/// Packs given words; `matrix(expert, projection)` provides them one matrix at a time.
///
/// # Errors
/// What `matrix` returns, and when counts are not the shape's, a scale word is negative or NaN, or a multiplier is not
/// finite and positive.
pub fn pack<'a, E: From<FormatError>>(
    shape: &[u64],
    mut matrix: impl FnMut(usize, Projection) -> Result<MatrixWords<'a>, E>,
) -> Result<Vec<u8>, E> {
    let geometry = Geometry::new(shape)?;
    let mut bytes = vec![0; geometry.size as usize];
    for expert in 0..geometry.experts {
        for projection in Projection::ALL {
            let words = matrix(expert, projection)?;
            let (rows, columns) = geometry.matrix(projection);
            for (what, expected, actual) in [
                ("code bytes", rows * columns / 2, words.codes.len()),
                ("scales", rows * columns / UNIT, words.scales.len()),
            ] {
                if expected != actual {
                    let (expected, actual) = (expected as u64, actual as u64);
                    return Err(FormatError::Count { what, expected, actual }.into());
                }
            }
            require_scale_words(words.scales)?;
            checked_matrix_scale(words.multiplier, 3 * expert + projection as usize)?;
            let at = geometry.multiplier_offset(expert, projection);
            bytes[at..at + 4].copy_from_slice(&words.multiplier.to_le_bytes());
            let record = &mut bytes[expert * geometry.stride..][..geometry.record_bytes];
            for row in 0..rows {
                let (offset, stored) = geometry.stored_row(projection, row);
                for block in 0..columns / UNIT {
                    let start = offset + (stored / UNIT * (columns / UNIT) + block) * UNIT_BYTES;
                    let unit = &mut record[start..start + UNIT_BYTES];
                    unit[UNIT_CODES + stored % UNIT] = words.scales[row * (columns / UNIT) + block];
                    for column in 0..UNIT {
                        let element = row * columns + block * UNIT + column;
                        let code = (words.codes[element / 2] >> (4 * (element % 2))) & 15;
                        let byte = 32 * (column / 4) + 4 * (stored % 8) + column % 4;
                        unit[byte] |= code << (4 * (stored % UNIT / 8));
                    }
                }
            }
        }
    }
    Ok(bytes)
}
