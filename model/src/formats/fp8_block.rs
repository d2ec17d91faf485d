//! E4M3FN codes with one f32 multiplier per tile of 128x128 (`block128_scale_v1`).
//!
//! `w[.., n, k] = e4m3fn(c[.., n, k]) * t[.., n/128, k/128]`, rounded once to f32. Codes lie in C order; the scales,
//! C order `[.., ceil(N/128), ceil(K/128)]`, start at the next multiple of 256. Tiles at the edges are cut.

use super::fp8_row::{require_numbers, scale_codes};
use super::{Format, FormatError, align_up, direct::MAX_RANK, element_count, index, require_zero, rows};

/// Rows and columns of a tile.
pub const TILE: usize = 128;
/// Alignment of the scale plane within the tensor.
const PLANE_ALIGNMENT: u64 = 256;

/// Where the planes of a `[.., rows, columns]` tensor lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Matrices: the product of the leading extents.
    pub matrices: usize,
    /// Rows `N` of each.
    pub rows: usize,
    /// Columns `K` of each.
    pub columns: usize,
    /// Byte offset of the scale plane.
    pub scale_offset: usize,
    /// Bytes of the whole tensor.
    pub size: u64,
}

impl Geometry {
    /// Planes of a tensor of shape `[.., N, K]`.
    ///
    /// # Errors
    /// When the shape has fewer than two extents or a size overflows.
    pub fn new(shape: &[u64]) -> Result<Self, FormatError> {
        let format = Format::Fp8E4m3fnBlock128F32;
        let (&[rows, columns], leading) = shape
            .split_last_chunk::<2>()
            .map(|(leading, matrix)| (matrix, leading))
            .filter(|_| shape.len() <= MAX_RANK && !shape.contains(&0))
            .ok_or_else(|| FormatError::shape(format, shape, "2 to 16 positive extents"))?;
        let overflow = || FormatError::Overflow {
            what: "an encoded size",
        };
        let elements = element_count(shape)?;
        let matrices = element_count(leading)?;
        let scale_offset = align_up(elements, PLANE_ALIGNMENT).ok_or_else(overflow)?;
        let tile = TILE as u64;
        let size = matrices
            .checked_mul(rows.div_ceil(tile))
            .and_then(|tiles| tiles.checked_mul(columns.div_ceil(tile)))
            .and_then(|tiles| tiles.checked_mul(4))
            .and_then(|scales| scale_offset.checked_add(scales))
            .ok_or_else(overflow)?;
        index(size)?;
        Ok(Self {
            matrices: matrices as usize,
            rows: rows as usize,
            columns: columns as usize,
            scale_offset: scale_offset as usize,
            size,
        })
    }

    /// Tiles across the columns.
    fn tile_columns(&self) -> usize {
        self.columns.div_ceil(TILE)
    }

    /// Index in the scale plane of the first tile that `row`, counted over all matrices, touches.
    fn first_tile(&self, row: usize) -> usize {
        let (matrix, row) = (row / self.rows, row % self.rows);
        (matrix * self.rows.div_ceil(TILE) + row / TILE) * self.tile_columns()
    }

    fn scale(&self, bytes: &[u8], tile: usize) -> f32 {
        let word = bytes[self.scale_offset + 4 * tile..]
            .first_chunk()
            .expect("the length was checked");
        f32::from_le_bytes(*word)
    }
}

fn invalid_scale(tile: usize, scale: f32) -> FormatError {
    FormatError::InvalidWord {
        what: "tile scale",
        index: tile as u64,
        word: scale.to_bits(),
    }
}

/// Decodes elements from `begin` on; bytes and range were checked.
pub(super) fn decode(geometry: &Geometry, bytes: &[u8], begin: usize, out: &mut [f32]) -> Result<(), FormatError> {
    rows::for_each_row(geometry.columns, begin, out, |row, mut column, mut out| {
        while !out.is_empty() {
            let tile = geometry.first_tile(row) + column / TILE;
            let scale = geometry.scale(bytes, tile);
            if !scale.is_finite() {
                return Err(invalid_scale(tile, scale));
            }
            let taken = out.len().min((column / TILE + 1) * TILE - column);
            let (now, rest) = out.split_at_mut(taken);
            let first = row * geometry.columns + column;
            scale_codes(&bytes[first..first + taken], first, scale, now)?;
            (out, column) = (rest, column + taken);
        }
        Ok(())
    })
}

/// Checks codes (not NaN), scales (finite, sign 0) and the gap.
pub(super) fn validate(geometry: &Geometry, bytes: &[u8]) -> Result<(), FormatError> {
    let codes_end = geometry.matrices * geometry.rows * geometry.columns;
    require_numbers(&bytes[..codes_end], 0)?;
    for tile in 0..(bytes.len() - geometry.scale_offset) / 4 {
        let scale = geometry.scale(bytes, tile);
        if !scale.is_finite() || scale.is_sign_negative() {
            return Err(invalid_scale(tile, scale));
        }
    }
    require_zero(&bytes[codes_end..geometry.scale_offset], codes_end)
}

/// Packs given words: `codes` C order `[.., N, K]`, `scales` C order `[.., ceil(N/128), ceil(K/128)]`.
///
/// # Errors
/// When the counts are not the shape's, a code is NaN, or a scale is negative or not finite.
pub fn pack(shape: &[u64], codes: &[u8], scales: &[f32]) -> Result<Vec<u8>, FormatError> {
    let geometry = Geometry::new(shape)?;
    let tiles = (geometry.size as usize - geometry.scale_offset) / 4;
    for (what, expected, actual) in [
        (
            "codes",
            geometry.matrices * geometry.rows * geometry.columns,
            codes.len(),
        ),
        ("scales", tiles, scales.len()),
    ] {
        if expected != actual {
            return Err(FormatError::Count {
                what,
                expected: expected as u64,
                actual: actual as u64,
            });
        }
    }
    let mut bytes = vec![0; geometry.size as usize];
    bytes[..codes.len()].copy_from_slice(codes);
    for (word, scale) in bytes[geometry.scale_offset..]
        .as_chunks_mut::<4>()
        .0
        .iter_mut()
        .zip(scales)
    {
        *word = scale.to_le_bytes();
    }
    validate(&geometry, &bytes)?;
    Ok(bytes)
}
