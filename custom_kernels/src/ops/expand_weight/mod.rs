//! Stored weight codes to values: `w = code * scale`, with the scale's place and kind given by the [`Packing`].
//!
//! | packing | code | scale |
//! |---|---|---|
//! | grouped integers | two's complement, 4 to 8 bits | IEEE half per group of a row, multiplied |
//! | NVFP4 | E2M1, two per byte | E4M3 per 16 columns, over one float32 divisor of the matrix |
//! | FP8 by row | E4M3 | bfloat16 per row, multiplied |
//! | FP8 by tile | E4M3 | float32 per 128 x 128 tile, multiplied |
//! | bfloat16 | the value | none |
//!
//! Planes lie behind one another as the artifact stores them; a matrix is expanded from those bytes as they are.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;
mod stored;

use half::{bf16, f16};

pub use stored::{StoredMatrix, StoredRows};

/// Rows of a grouped-integer matrix are padded to this many columns.
const GROUPED_COLUMNS: usize = 128;
/// Planes start at multiples of this.
const PLANE_ALIGNMENT: usize = 256;
/// Columns that share an NVFP4 scale.
const NVFP4_GROUP: usize = 16;
/// Rows and columns of one FP8 tile.
const TILE: usize = 128;

/// How a matrix is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Packing {
    /// Signed integers of `bits` 4, 5, 6 (64 columns per scale) or 8 (32), low nibbles, high bits and scales in planes.
    Grouped {
        /// Bits per code.
        bits: u32,
    },
    /// E2M1 codes, E4M3 scales in swizzled 128 x 4 tiles, float32 divisors at the end.
    Nvfp4 {
        /// Divisors, each of as many consecutive rows.
        divisors: usize,
    },
    /// E4M3 codes, a bfloat16 scale per row.
    Fp8Row,
    /// E4M3 codes, a float32 scale per 128 x 128 tile.
    Fp8Tile,
    /// The values themselves.
    Bf16,
}

/// A matrix that cannot be expanded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpandError {
    /// Grouped codes of an unknown width.
    #[error("grouped integers of {0} bits: expected 4, 5, 6 or 8")]
    Bits(u32),
    /// The swizzled scales of NVFP4 cover whole tiles only.
    #[error(
        "NVFP4 matrix of {rows} x {columns} with {divisors} divisors: the rows of each must be a multiple of 128 and columns of 64"
    )]
    Shape {
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
        /// Divisors.
        divisors: usize,
    },
    /// More elements or bytes than can be addressed.
    #[error("matrix of {rows} x {columns} is too large")]
    TooLarge {
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
    },
    /// Another number of bytes than the shape needs.
    #[error("{packing:?} matrix of {rows} x {columns} holds {actual} bytes, expected {expected}")]
    Bytes {
        /// The packing.
        packing: Packing,
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
        /// Bytes given.
        actual: usize,
        /// Bytes needed.
        expected: usize,
    },
}

/// Byte offsets of the planes of a packed matrix, and its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Planes {
    /// Columns per scale (0 where a scale is not per group of one row).
    pub group: usize,
    /// Groups of a row, padding included.
    pub groups: usize,
    /// High bits of 5- and 6-bit codes; where there are none, the scales.
    pub high: usize,
    /// Scales.
    pub scales: usize,
    /// Float32 divisors of blocks of rows (NVFP4), else the end.
    pub divisors: usize,
    /// Rows of one divisor (NVFP4), else all.
    pub divisor_rows: usize,
    /// All bytes.
    pub bytes: usize,
}

impl Packing {
    /// Where the planes of a `rows` x `columns` matrix lie.
    ///
    /// # Errors
    /// When the packing has no such matrix.
    pub fn planes(self, rows: usize, columns: usize) -> Result<Planes, ExpandError> {
        let too_large = ExpandError::TooLarge { rows, columns };
        // Every product below is at most 8 bytes per padded element.
        let padded = columns
            .checked_next_multiple_of(TILE)
            .and_then(|c| c.checked_mul(rows.max(1)));
        if padded.and_then(|n| n.checked_mul(8)).is_none() {
            return Err(too_large);
        }
        let aligned = |at: usize| at.next_multiple_of(PLANE_ALIGNMENT);
        Ok(match self {
            Packing::Grouped { bits } => {
                let (group, high_bytes) = match bits {
                    4 => (64, 0),
                    5 => (64, 8),
                    6 => (64, 16),
                    8 => (32, 0),
                    _ => return Err(ExpandError::Bits(bits)),
                };
                let groups = columns.next_multiple_of(GROUPED_COLUMNS) / group;
                let high = aligned(rows * groups * 32);
                let scales = high + aligned(rows * groups * high_bytes);
                let bytes = scales + rows * groups * 2;
                Planes {
                    group,
                    groups,
                    high,
                    scales,
                    divisors: bytes,
                    divisor_rows: rows,
                    bytes,
                }
            }
            Packing::Nvfp4 { divisors: count } => {
                let whole_tiles = count > 0 && rows.is_multiple_of(count) && (rows / count).is_multiple_of(TILE);
                if !whole_tiles || !columns.is_multiple_of(64) {
                    return Err(ExpandError::Shape {
                        rows,
                        columns,
                        divisors: count,
                    });
                }
                let scales = aligned(rows * columns / 2);
                let divisors = scales + rows * columns / NVFP4_GROUP;
                Planes {
                    group: NVFP4_GROUP,
                    groups: columns / NVFP4_GROUP,
                    high: scales,
                    scales,
                    divisors,
                    divisor_rows: rows / count,
                    bytes: divisors + 4 * count,
                }
            }
            Packing::Bf16 => {
                let bytes = 2 * rows * columns;
                Planes {
                    group: 0,
                    groups: 0,
                    high: bytes,
                    scales: bytes,
                    divisors: bytes,
                    divisor_rows: rows,
                    bytes,
                }
            }
            Packing::Fp8Row | Packing::Fp8Tile => {
                let scales = aligned(rows * columns);
                let bytes = scales
                    + match self {
                        Packing::Fp8Row => 2 * rows,
                        _ => 4 * rows.div_ceil(TILE) * columns.div_ceil(TILE),
                    };
                Planes {
                    group: 0,
                    groups: columns.div_ceil(TILE),
                    high: scales,
                    scales,
                    divisors: bytes,
                    divisor_rows: rows,
                    bytes,
                }
            }
        })
    }
}

/// Checks the length of `bytes` and gives the planes.
pub(crate) fn validate(packing: Packing, rows: usize, columns: usize, actual: usize) -> Result<Planes, ExpandError> {
    let planes = packing.planes(rows, columns)?;
    if actual != planes.bytes {
        return Err(ExpandError::Bytes {
            packing,
            rows,
            columns,
            actual,
            expected: planes.bytes,
        });
    }
    Ok(planes)
}

/// Position of the NVFP4 scale of row `n`, group `g`: tiles of 128 rows x 4 groups, 512 bytes each.
fn nvfp4_scale(n: usize, g: usize, groups: usize) -> usize {
    ((n / 128) * (groups / 4) + g / 4) * 512 + (n % 32) * 16 + (n % 128 / 32) * 4 + g % 4
}

/// The values `[rows, columns]` of `bytes`, one at a time.
///
/// # Errors
/// When `bytes` is not a matrix of this packing and shape.
pub fn reference(bytes: &[u8], packing: Packing, rows: usize, columns: usize) -> Result<Vec<f32>, ExpandError> {
    let planes = validate(packing, rows, columns, bytes.len())?;
    let nibble = |at: usize| (bytes[at / 2] >> (4 * (at % 2))) & 15;
    let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let float = |at: usize| f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let value = |n: usize, k: usize| match packing {
        Packing::Grouped { bits } => {
            let group = n * planes.groups + k / planes.group;
            let lane = k % planes.group;
            let code = match bits {
                8 => bytes[group * 32 + lane],
                _ => nibble(group * 64 + lane),
            };
            let high = match bits {
                5 => (bytes[planes.high + group * 8 + lane / 8] >> (lane % 8)) & 1,
                6 => (bytes[planes.high + group * 16 + lane / 4] >> (2 * (lane % 4))) & 3,
                _ => 0,
            };
            let code = i32::from(code) | i32::from(high) << 4;
            let signed = if code >> (bits - 1) == 1 {
                code - (1 << bits)
            } else {
                code
            };
            f16::from_bits(word(planes.scales + 2 * group)).to_f32() * signed as f32
        }
        Packing::Nvfp4 { .. } => {
            let scale = bytes[planes.scales + nvfp4_scale(n, k / NVFP4_GROUP, planes.groups)];
            let divisor = float(planes.divisors + 4 * (n / planes.divisor_rows));
            e2m1(nibble(n * columns + k)) * e4m3(scale) / divisor
        }
        Packing::Fp8Row => e4m3(bytes[n * columns + k]) * bf16::from_bits(word(planes.scales + 2 * n)).to_f32(),
        Packing::Fp8Tile => {
            e4m3(bytes[n * columns + k]) * float(planes.scales + 4 * (n / TILE * planes.groups + k / TILE))
        }
        Packing::Bf16 => bf16::from_bits(word(2 * (n * columns + k))).to_f32(),
    };
    Ok((0..rows)
        .flat_map(|n| (0..columns).map(move |k| (n, k)))
        .map(|(n, k)| value(n, k))
        .collect())
}

/// Sign, two exponent bits, one mantissa bit.
fn e2m1(code: u8) -> f32 {
    let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 != 0 { -size } else { size }
}

/// Sign, four exponent bits of bias 7, three mantissa bits; no infinity, one NaN.
pub fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 != 0 { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The row 3.5, -1.75, 0.25, -3.5 in each grouped format: codes and scales as the format's definition works them out.
    #[test]
    fn grouped_rows_decode_to_the_worked_values() {
        let row = |bits: u32, base: &[u8], high: &[u8], scale: u16| {
            let packing = Packing::Grouped { bits };
            let planes = packing.planes(1, 4).unwrap();
            let mut bytes = vec![0; planes.bytes];
            bytes[..base.len()].copy_from_slice(base);
            bytes[planes.high..][..high.len()].copy_from_slice(high);
            bytes[planes.scales..][..2].copy_from_slice(&scale.to_le_bytes());
            (bytes.len(), reference(&bytes, packing, 1, 4).unwrap())
        };
        assert_eq!(row(4, &[0xc7, 0x90], &[], 0x3800), (260, vec![3.5, -2.0, 0.0, -3.5]));
        let (size, values) = row(5, &[0x8f, 0x11], &[0x0a], 0x3377);
        assert_eq!(
            (size, values),
            (516, vec![3.499_145_5, -1.866_210_9, 0.233_276_37, -3.499_145_5])
        );
        let (size, values) = row(6, &[0x1f, 0x12], &[0x8d], 0x2f3a);
        assert_eq!(
            (size, values),
            (516, vec![3.500_366_2, -1.693_725_6, 0.225_830_08, -3.500_366_2])
        );
        let (size, values) = row(8, &[0x7f, 0xc0, 0x09, 0x81], &[], 0x270e);
        assert_eq!(
            (size, values),
            (264, vec![3.499_786_4, -1.763_671_9, 0.248_016_36, -3.499_786_4])
        );
    }

    #[test]
    fn nvfp4_scales_lie_in_their_tiles() {
        for ((n, g), place) in [
            ((0, 0), 0),
            ((1, 0), 16),
            ((31, 3), 499),
            ((32, 0), 4),
            ((33, 5), 533),
            ((127, 7), 1023),
            ((128, 0), 1024),
            ((255, 7), 2047),
        ] {
            assert_eq!(nvfp4_scale(n, g, 8), place, "row {n}, group {g}");
        }
        assert_eq!(
            Packing::Nvfp4 { divisors: 1 }.planes(14336, 5120).unwrap().bytes,
            41_287_684
        );
    }

    #[test]
    fn sizes_are_those_of_the_container() {
        let size = |bits, n, k| Packing::Grouped { bits }.planes(n, k).unwrap().bytes;
        assert_eq!(
            (size(5, 2, 130), size(4, 7168, 5120), size(5, 7168, 5120)),
            (528, 19_496_960, 24_084_480)
        );
        assert_eq!(Packing::Fp8Row.planes(3, 5).unwrap().bytes, 262);
        assert_eq!(Packing::Fp8Tile.planes(130, 200).unwrap().bytes, 26_128);
    }

    #[test]
    fn impossible_matrices_are_refused_in_words() {
        let error = reference(&[0; 7], Packing::Fp8Row, 3, 5).unwrap_err();
        assert_eq!(error.to_string(), "Fp8Row matrix of 3 x 5 holds 7 bytes, expected 262");
        for (rows, divisors) in [(100, 1), (384, 2), (256, 0)] {
            let refused = Packing::Nvfp4 { divisors }.planes(rows, 64);
            assert!(matches!(refused, Err(ExpandError::Shape { .. })), "{rows} rows");
        }
        assert!(matches!(
            Packing::Grouped { bits: 3 }.planes(1, 1),
            Err(ExpandError::Bits(3))
        ));
        assert!(matches!(
            Packing::Fp8Row.planes(usize::MAX, 2),
            Err(ExpandError::TooLarge { .. })
        ));
    }
}
