//! E2M1 codes, one E4M3FN scale per 16 columns, one f32 divisor per matrix or block of rows
//! (`block_scale_k16_m128x4_v1`).
//!
//! `w[n,k] = e2m1(c[n,k]) * e4m3fn(s[n,k/16]) / d`: the product is exact in f32, the division rounds once.
//!
//! | plane | content |
//! |---|---|
//! | codes, `N K / 2` bytes | byte `(n K + k) / 2`, low nibble = even `k` |
//! | scales, at the next multiple of 256, `N K / 16` bytes | tiles of 128 rows x 4 groups, see [`scale_position`] |
//! | divisors, 4 bytes each | f32; divisor `i` belongs to the `i`-th of equal blocks of rows |

use super::{EncodeMethod, Format, FormatError, align_up, index, matrix_shape, require_zero, rows};
use perplexity_kernels::numeric::{
    E2M1_MAX, E2M1_VALUES, E4M3FN_MAX, E4M3FN_MAX_WORD, E4M3FN_VALUES, f32_to_e2m1, f32_to_e4m3fn,
};
use rayon::prelude::*;

/// Columns per scale.
pub const GROUP: usize = 16;
/// Rows per scale tile.
const TILE_ROWS: u64 = 128;
/// Columns per scale tile: 4 groups.
const TILE_COLUMNS: u64 = 64;
/// Bytes of a scale tile.
const TILE_BYTES: usize = 512;
/// Alignment of the scale plane within the tensor.
const PLANE_ALIGNMENT: u64 = 256;

/// Where the planes of a `[rows, columns]` tensor lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Rows `N`, a multiple of 128.
    pub rows: usize,
    /// Columns `K`, a multiple of 64.
    pub columns: usize,
    /// Divisors, each for `rows / divisors` consecutive rows.
    pub divisors: usize,
    /// Byte offset of the scale plane.
    pub scale_offset: usize,
    /// Byte offset of the first divisor.
    pub divisor_offset: usize,
    /// Bytes of the whole tensor.
    pub size: u64,
}

impl Geometry {
    /// Planes of a tensor of shape `[N, K]` with this many divisors.
    ///
    /// # Errors
    /// When the shape is not a matrix of whole tiles, the divisors do not split the rows into whole tiles, or a size
    /// overflows.
    pub fn new(shape: &[u64], divisors: u64) -> Result<Self, FormatError> {
        let format = Format::Nvfp4;
        let (rows, columns) = matrix_shape(format, shape)?;
        if rows % TILE_ROWS != 0 || columns % TILE_COLUMNS != 0 {
            return Err(FormatError::shape(format, shape, "N % 128 == 0 and K % 64 == 0"));
        }
        let whole_tiles =
            divisors == 1 || (divisors != 0 && rows % divisors == 0 && (rows / divisors).is_multiple_of(TILE_ROWS));
        if !whole_tiles {
            return Err(FormatError::UnexpectedDivisors { format, divisors });
        }
        let overflow = || FormatError::Overflow {
            what: "an encoded size",
        };
        let elements = rows.checked_mul(columns).ok_or_else(overflow)?;
        let scale_offset = align_up(elements / 2, PLANE_ALIGNMENT).ok_or_else(overflow)?;
        let divisor_offset = scale_offset.checked_add(elements / GROUP as u64).ok_or_else(overflow)?;
        let size = divisor_offset.checked_add(4 * divisors).ok_or_else(overflow)?;
        index(size.max(elements))?;
        Ok(Self {
            rows: rows as usize,
            columns: columns as usize,
            divisors: divisors as usize,
            scale_offset: scale_offset as usize,
            divisor_offset: divisor_offset as usize,
            size,
        })
    }

    /// Rows that share a divisor.
    fn rows_per_divisor(&self) -> usize {
        self.rows / self.divisors
    }

    fn divisor(&self, bytes: &[u8], at: usize) -> Result<f32, FormatError> {
        let word = bytes[self.divisor_offset + 4 * at..]
            .first_chunk()
            .expect("the length was checked");
        checked_matrix_scale(f32::from_le_bytes(*word), at)
    }
}

/// A divisor or multiplier of a matrix, which must be finite and positive.
pub(crate) fn checked_matrix_scale(value: f32, at: usize) -> Result<f32, FormatError> {
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err(FormatError::Divisor {
            index: at as u64,
            value,
        })
    }
}

/// Byte of the scale of row `row`, group `group` within the scale plane of a matrix of `columns` columns:
/// `((n/128) (K/64) + g/4) 512 + (n%32) 16 + ((n%128)/32) 4 + g%4`.
pub const fn scale_position(columns: usize, row: usize, group: usize) -> usize {
    let tile = row / TILE_ROWS as usize * (columns / TILE_COLUMNS as usize) + group / 4;
    tile * TILE_BYTES + (row % 32) * 16 + (row % 128) / 32 * 4 + group % 4
}

/// Row and group of a byte of the scale plane, the inverse of [`scale_position`].
pub const fn scale_owner(columns: usize, position: usize) -> (usize, usize) {
    let (tile, byte) = (position / TILE_BYTES, position % TILE_BYTES);
    let tiles_per_row = columns / TILE_COLUMNS as usize;
    (
        tile / tiles_per_row * TILE_ROWS as usize + (byte % 16) / 4 * 32 + byte / 16,
        (tile % tiles_per_row) * 4 + byte % 4,
    )
}

/// Weight of every (scale word, code word), so that decoding neither multiplies nor divides; 16 KiB.
pub(crate) struct WeightTable(Box<[[f32; 16]; 256]>);

impl WeightTable {
    /// Fills the table with `weight(e2m1 * e4m3fn)`, a product that is exact in f32.
    pub(crate) fn new(weight: impl Fn(f32) -> f32) -> Self {
        let mut table = Box::new([[0.0; 16]; 256]);
        for (row, scale) in table.iter_mut().zip(E4M3FN_VALUES) {
            *row = E2M1_VALUES.map(|code| weight(code * scale));
        }
        Self(table)
    }

    /// Weights of the 16 codes under a scale word.
    #[inline]
    pub(crate) fn under(&self, scale: u8) -> &[f32; 16] {
        &self.0[scale as usize]
    }
}

/// Whether a scale word is NaN.
pub(crate) const fn is_nan(word: u8) -> bool {
    word & 0x7F == 0x7F
}

/// Decodes elements from `begin` on; bytes and range were checked.
pub(super) fn decode(geometry: &Geometry, bytes: &[u8], begin: usize, out: &mut [f32]) -> Result<(), FormatError> {
    let block = geometry.rows_per_divisor() * geometry.columns;
    let (mut begin, mut rest) = (begin, out);
    while !rest.is_empty() {
        let at = begin / block;
        let taken = rest.len().min((at + 1) * block - begin);
        let divisor = geometry.divisor(bytes, at)?;
        let table = WeightTable::new(|product| product / divisor);
        let out;
        (out, rest) = rest.split_at_mut(taken);
        decode_with(geometry, &table, bytes, begin, out)?;
        begin += taken;
    }
    Ok(())
}

fn decode_with(
    geometry: &Geometry,
    table: &WeightTable,
    bytes: &[u8],
    begin: usize,
    out: &mut [f32],
) -> Result<(), FormatError> {
    let columns = geometry.columns;
    let scales = &bytes[geometry.scale_offset..geometry.divisor_offset];
    rows::for_each_row(columns, begin, out, |row, mut column, mut out| {
        while !out.is_empty() {
            let group = column / GROUP;
            let position = scale_position(columns, row, group);
            let word = scales[position];
            if is_nan(word) {
                return Err(FormatError::InvalidWord {
                    what: "scale",
                    index: position as u64,
                    word: word.into(),
                });
            }
            let weights = table.under(word);
            let taken = out.len().min((group + 1) * GROUP - column);
            let (now, rest) = out.split_at_mut(taken);
            if taken == GROUP {
                let codes = &bytes[(row * columns + column) / 2..][..GROUP / 2];
                for (pair, byte) in now.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                    *pair = [weights[(byte & 15) as usize], weights[(byte >> 4) as usize]];
                }
            } else {
                for (at, value) in now.iter_mut().enumerate() {
                    let element = row * columns + column + at;
                    *value = weights[((bytes[element / 2] >> (4 * (element % 2))) & 15) as usize];
                }
            }
            (out, column) = (rest, column + taken);
        }
        Ok(())
    })
}

/// Checks scale words (sign 0, not NaN), divisors and the gap; every code word is legal.
pub(super) fn validate(geometry: &Geometry, bytes: &[u8]) -> Result<(), FormatError> {
    for at in 0..geometry.divisors {
        geometry.divisor(bytes, at)?;
    }
    require_scale_words(&bytes[geometry.scale_offset..geometry.divisor_offset])?;
    let codes_end = geometry.rows * geometry.columns / 2;
    require_zero(&bytes[codes_end..geometry.scale_offset], codes_end)
}

/// Refuses block scale words with a sign bit and NaN.
pub(super) fn require_scale_words(scales: &[u8]) -> Result<(), FormatError> {
    match scales.iter().position(|&word| word >= 0x7F) {
        Some(at) => Err(FormatError::InvalidWord {
            what: "scale",
            index: at as u64,
            word: scales[at].into(),
        }),
        None => Ok(()),
    }
}

/// Packs given words: `codes` as stored (two per byte, row-major, low nibble first), `scales` row-major `[N, K/16]`,
/// one divisor per equal block of rows.
///
/// # Errors
/// When the counts are not the shape's, a scale word is negative or NaN, or a divisor is not finite and positive.
pub fn pack(shape: &[u64], codes: &[u8], scales: &[u8], divisors: &[f32]) -> Result<Vec<u8>, FormatError> {
    let geometry = Geometry::new(shape, divisors.len() as u64)?;
    let elements = geometry.rows * geometry.columns;
    for (what, expected, actual) in [
        ("code bytes", elements / 2, codes.len()),
        ("scales", elements / GROUP, scales.len()),
    ] {
        if expected != actual {
            return Err(FormatError::Count {
                what,
                expected: expected as u64,
                actual: actual as u64,
            });
        }
    }
    require_scale_words(scales)?;
    let mut bytes = vec![0; geometry.size as usize];
    bytes[..codes.len()].copy_from_slice(codes);
    let groups = geometry.columns / GROUP;
    let plane = &mut bytes[geometry.scale_offset..geometry.divisor_offset];
    for (row, words) in scales.chunks_exact(groups).enumerate() {
        for (group, word) in words.iter().enumerate() {
            plane[scale_position(geometry.columns, row, group)] = *word;
        }
    }
    write_divisors(&geometry, divisors, &mut bytes)?;
    Ok(bytes)
}

pub(super) fn write_divisors(geometry: &Geometry, divisors: &[f32], bytes: &mut [u8]) -> Result<(), FormatError> {
    for (at, (divisor, word)) in divisors
        .iter()
        .zip(bytes[geometry.divisor_offset..].as_chunks_mut::<4>().0)
        .enumerate()
    {
        *word = checked_matrix_scale(*divisor, at)?.to_le_bytes();
    }
    Ok(())
}

/// The divisor for a matrix whose largest magnitude is `max_magnitude`: the f64 quotient `6 * 448 / M` (absmax) or
/// `4 * 448 / M` (mse) rounded to f32; 1 for a zero matrix.
///
/// # Errors
/// When the quotient is not a finite positive f32.
pub fn divisor(method: EncodeMethod, max_magnitude: f32) -> Result<f32, FormatError> {
    if max_magnitude == 0.0 {
        return Ok(1.0);
    }
    let code = if method == EncodeMethod::Nvfp4Mse {
        4.0
    } else {
        f64::from(E2M1_MAX)
    };
    checked_matrix_scale((code * f64::from(E4M3FN_MAX) / f64::from(max_magnitude)) as f32, 0)
}

/// Encodes whole rows with a given divisor: `values` are the rows from `first_row` on; `bytes` is the whole tensor,
/// whose divisor is written elsewhere.
pub(super) fn encode_rows(
    geometry: &Geometry,
    method: EncodeMethod,
    divisor: f32,
    first_row: usize,
    values: &[f32],
    bytes: &mut [u8],
) -> Result<(), FormatError> {
    let columns = geometry.columns;
    let row_count = values.len() / columns;
    let table = WeightTable::new(|product| product / divisor);
    let groups = columns / GROUP;
    let codes = &mut bytes[first_row * columns / 2..][..row_count * columns / 2];
    let mut scales = vec![0u8; row_count * groups];
    codes
        .par_chunks_exact_mut(columns / 2)
        .zip(scales.par_chunks_exact_mut(groups))
        .zip(values.par_chunks_exact(columns))
        .enumerate()
        .with_min_len((1usize << 13).div_ceil(columns))
        .try_for_each(|(row, ((codes, scales), values))| {
            rows::require_finite(values, ((first_row + row) * columns) as u64)?;
            for ((codes, scale), values) in codes
                .as_chunks_mut::<{ GROUP / 2 }>()
                .0
                .iter_mut()
                .zip(scales)
                .zip(values.as_chunks::<GROUP>().0)
            {
                let (word, block) = match method {
                    EncodeMethod::Nvfp4Mse => least_squares(values, divisor, &table),
                    _ => absmax(values, divisor),
                };
                *scale = word;
                for (byte, pair) in codes.iter_mut().zip(block.as_chunks::<2>().0) {
                    *byte = pair[0] | pair[1] << 4;
                }
            }
            Ok(())
        })?;
    // The rows of a slab are scattered over the swizzled plane, so this pass is serial; it is 1/16 of the data.
    let plane = &mut bytes[geometry.scale_offset..geometry.divisor_offset];
    for (row, words) in scales.chunks_exact(groups).enumerate() {
        for (group, word) in words.iter().enumerate() {
            plane[scale_position(columns, first_row + row, group)] = *word;
        }
    }
    Ok(())
}

/// `y = (x * d) / s`, each operation rounded to f32, then to the nearest code.
#[inline]
fn codes_under(values: &[f32; GROUP], divisor: f32, scale: f32) -> [u8; GROUP] {
    values.map(|value| f32_to_e2m1(value * divisor / scale))
}

/// The scale puts the group's largest magnitude on code 6.
fn absmax(values: &[f32; GROUP], divisor: f32) -> (u8, [u8; GROUP]) {
    let largest = rows::max_magnitude(values);
    if largest == 0.0 {
        return (0, [0; GROUP]);
    }
    let target = (largest * divisor / E2M1_MAX).min(E4M3FN_MAX);
    let word = f32_to_e4m3fn(target).max(1);
    (word, codes_under(values, divisor, E4M3FN_VALUES[word as usize]))
}

/// Squared error of the group under `codes` and the weights of one scale word; stops early beyond `limit`.
fn squared_error(values: &[f32; GROUP], codes: &[u8; GROUP], weights: &[f32; 16], limit: f64) -> f64 {
    let mut sum = 0.0;
    for (values, codes) in values.as_chunks::<4>().0.iter().zip(codes.as_chunks::<4>().0) {
        for (value, code) in values.iter().zip(codes) {
            let error = f64::from(*value) - f64::from(weights[*code as usize]);
            sum += error * error;
        }
        if sum > limit {
            break;
        }
    }
    sum
}

/// Among the 126 positive finite scale words the one of least squared error, the smaller on a tie.
///
/// The search starts at the absmax word and goes both ways. Downwards it ends where the saturation of the largest
/// value alone costs more than the best word: it only grows. Upwards it ends where every code is 0: the error no
/// longer changes.
fn least_squares(values: &[f32; GROUP], divisor: f32, table: &WeightTable) -> (u8, [u8; GROUP]) {
    let largest = rows::max_magnitude(values);
    if largest == 0.0 {
        return (1, codes_under(values, divisor, E4M3FN_VALUES[1]));
    }
    let (start, codes) = absmax(values, divisor);
    let least = squared_error(values, &codes, table.under(start), f64::INFINITY);
    let mut best = (least, start, codes);
    for word in (1..start).rev() {
        let saturation = f64::from(largest) - f64::from(table.under(word)[7]);
        if saturation > 0.0 && saturation * saturation > best.0 {
            break;
        }
        let codes = codes_under(values, divisor, E4M3FN_VALUES[word as usize]);
        let error = squared_error(values, &codes, table.under(word), best.0);
        if error <= best.0 {
            best = (error, word, codes);
        }
    }
    for word in start + 1..=E4M3FN_MAX_WORD {
        let codes = codes_under(values, divisor, E4M3FN_VALUES[word as usize]);
        let error = squared_error(values, &codes, table.under(word), best.0);
        if error < best.0 {
            best = (error, word, codes);
        }
        if codes.iter().all(|code| code & 7 == 0) {
            break;
        }
    }
    (best.1, best.2)
}
