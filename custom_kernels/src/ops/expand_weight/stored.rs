//! A packed matrix made of rows that lie in stored objects: which of their bytes stand where in its planes.

use std::borrow::Cow;
use std::ops::Range;

use super::{ExpandError, NVFP4_GROUP, Packing, Planes, TILE, validate};

/// Consecutive rows of a stored matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredRows<'a> {
    /// All bytes of the stored matrix.
    pub bytes: Cow<'a, [u8]>,
    /// How it is packed.
    pub packing: Packing,
    /// Its `[rows, columns]`.
    pub shape: [usize; 2],
    /// The rows meant.
    pub rows: Range<usize>,
}

/// A matrix in one packing, as pieces of stored bytes; gaps between planes have no meaning.
#[derive(Debug, Clone)]
pub struct StoredMatrix<'a> {
    packing: Packing,
    shape: [usize; 2],
    planes: Planes,
    /// Where each piece begins, and its bytes; in ascending order.
    pieces: Vec<(usize, Cow<'a, [u8]>)>,
}

/// Rows of a plane that share `stride` bytes.
struct Plane {
    offset: usize,
    stride: usize,
    unit: usize,
}

impl Packing {
    /// All planes but the divisors.
    fn row_planes(self, planes: &Planes, columns: usize) -> Vec<Plane> {
        let plane = |offset, stride, unit| Plane { offset, stride, unit };
        match self {
            Packing::Grouped { bits } => {
                let high = match bits {
                    5 => 8,
                    6 => 16,
                    _ => 0,
                };
                vec![
                    plane(0, planes.groups * 32, 1),
                    plane(planes.high, planes.groups * high, 1),
                    plane(planes.scales, planes.groups * 2, 1),
                ]
            }
            Packing::Nvfp4 { .. } => vec![
                plane(0, columns / 2, 1),
                plane(planes.scales, columns / NVFP4_GROUP * TILE, TILE),
            ],
            Packing::Fp8Row => vec![plane(0, columns, 1), plane(planes.scales, 2, 1)],
            Packing::Fp8Tile => vec![plane(0, columns, 1), plane(planes.scales, 4 * planes.groups, TILE)],
            Packing::Bf16 => vec![plane(0, 2 * columns, 1)],
        }
    }

    /// The packing without what may differ between matrices that are stacked.
    pub(super) fn kind(self) -> Self {
        match self {
            Packing::Nvfp4 { .. } => Packing::Nvfp4 { divisors: 1 },
            other => other,
        }
    }
}

impl<'a> StoredMatrix<'a> {
    /// The rows of `parts` on top of one another, none of their bytes copied but the divisors of NVFP4.
    ///
    /// `None` when they are no one packed matrix: of several packings or widths, cut within a tile of scales, or with a
    /// divisor that is no positive number. Such parts can only be decoded.
    ///
    /// # Errors
    /// When the bytes of a part are not a matrix of its packing and shape.
    pub fn stack(parts: &'a [StoredRows<'_>]) -> Result<Option<Self>, ExpandError> {
        let Some(first) = parts.first() else { return Ok(None) };
        let (kind, columns) = (first.packing.kind(), first.shape[1]);
        let rows = parts.iter().map(|part| part.rows.len()).sum();
        let mut stored = Vec::new();
        for part in parts {
            let planes = validate(part.packing, part.shape[0], part.shape[1], part.bytes.len())?;
            let tile = match kind {
                Packing::Nvfp4 { .. } | Packing::Fp8Tile => TILE,
                _ => 1,
            };
            let ends =
                part.rows.end.is_multiple_of(tile) || part.rows.end == part.shape[0] && stored.len() + 1 == parts.len();
            let fits = part.packing.kind() == kind && part.shape[1] == columns && part.rows.end <= part.shape[0];
            if !fits || !ends || !part.rows.start.is_multiple_of(tile) || part.rows.is_empty() {
                return Ok(None);
            }
            stored.push(planes);
        }
        let packing = match kind {
            Packing::Nvfp4 { .. } => Packing::Nvfp4 { divisors: rows / TILE },
            other => other,
        };
        let planes = packing.planes(rows, columns)?;
        let mut pieces = Vec::new();
        for (index, plane) in packing.row_planes(&planes, columns).iter().enumerate() {
            let mut at = plane.offset;
            for (part, stored) in parts.iter().zip(&stored) {
                let plane = &part.packing.row_planes(stored, columns)[index];
                let units = part.rows.start / plane.unit..part.rows.end.div_ceil(plane.unit);
                let bytes = &part.bytes[plane.offset + units.start * plane.stride..][..units.len() * plane.stride];
                pieces.push((at, Cow::Borrowed(bytes)));
                at += bytes.len();
            }
        }
        if let Packing::Nvfp4 { .. } = packing {
            let mut divisors = Vec::new();
            for (part, stored) in parts.iter().zip(&stored) {
                for row in part.rows.clone().step_by(TILE) {
                    let word = &part.bytes[stored.divisors + row / stored.divisor_rows * 4..][..4];
                    let value = f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                    if !(value.is_finite() && value > 0.0) {
                        return Ok(None);
                    }
                    divisors.extend_from_slice(word);
                }
            }
            pieces.push((planes.divisors, Cow::Owned(divisors)));
        }
        pieces.retain(|(_, bytes)| !bytes.is_empty());
        Ok(Some(Self {
            packing,
            shape: [rows, columns],
            planes,
            pieces,
        }))
    }

    /// How it is packed.
    pub fn packing(&self) -> Packing {
        self.packing
    }

    /// `[rows, columns]`.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.planes.bytes
    }

    /// Where each run of bytes begins, and the bytes.
    pub fn pieces(&self) -> impl Iterator<Item = (usize, &[u8])> {
        self.pieces.iter().map(|(at, bytes)| (*at, bytes.as_ref()))
    }

    /// The bfloat16 scale of every row of an FP8 matrix by row.
    pub fn row_scales(&self) -> Option<Vec<f32>> {
        let scales = self.pieces().filter(|(at, _)| *at >= self.planes.scales);
        let halves = scales.flat_map(|(_, bytes)| bytes.as_chunks::<2>().0);
        (self.packing == Packing::Fp8Row).then(|| halves.map(|h| half::bf16::from_le_bytes(*h).to_f32()).collect())
    }

    /// The whole as one run of bytes, zeros in the gaps.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut whole = vec![0; self.planes.bytes];
        for (at, bytes) in self.pieces() {
            whole[at..][..bytes.len()].copy_from_slice(bytes);
        }
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::expand_weight::reference;

    /// Bytes without order, the divisors of NVFP4 and scales kept ordinary.
    fn object(packing: Packing, rows: usize, columns: usize, seed: usize) -> Vec<u8> {
        let planes = packing.planes(rows, columns).unwrap();
        let mut bytes: Vec<u8> = (0..planes.bytes)
            .map(|i| (((i + seed) * 2_654_435_761) >> 13) as u8 & 0x3b)
            .collect();
        for (i, divisor) in bytes[planes.divisors..].chunks_exact_mut(4).enumerate() {
            divisor.copy_from_slice(&(100.0 + (seed + i) as f32).to_le_bytes());
        }
        bytes
    }

    #[test]
    fn stacked_rows_have_the_values_of_their_objects() {
        for (packing, columns, parts) in [
            (Packing::Grouped { bits: 4 }, 130, [(5, 0..5), (9, 2..3), (4, 1..4)]),
            (Packing::Grouped { bits: 5 }, 64, [(5, 4..5), (9, 0..9), (4, 0..4)]),
            (Packing::Grouped { bits: 6 }, 200, [(5, 0..5), (9, 2..7), (4, 3..4)]),
            (Packing::Grouped { bits: 8 }, 33, [(5, 0..5), (9, 8..9), (4, 1..4)]),
            (Packing::Fp8Row, 77, [(5, 0..5), (9, 2..3), (4, 1..4)]),
            (Packing::Fp8Tile, 200, [(256, 128..256), (130, 0..128), (130, 128..130)]),
            (Packing::Bf16, 7, [(5, 0..5), (9, 2..3), (4, 1..4)]),
            (
                Packing::Nvfp4 { divisors: 2 },
                128,
                [(512, 128..512), (256, 0..128), (256, 0..256)],
            ),
        ] {
            let objects: Vec<StoredRows> = parts
                .into_iter()
                .enumerate()
                .map(|(seed, (rows, range))| StoredRows {
                    bytes: object(packing, rows, columns, seed).into(),
                    packing,
                    shape: [rows, columns],
                    rows: range,
                })
                .collect();
            let stacked = StoredMatrix::stack(&objects).unwrap().expect("one packing");
            let [rows, _] = stacked.shape();
            let actual = reference(&stacked.to_vec(), stacked.packing(), rows, columns).unwrap();
            let expected: Vec<f32> = objects
                .iter()
                .flat_map(|part| {
                    let all = reference(&part.bytes, packing, part.shape[0], columns).unwrap();
                    all[part.rows.start * columns..part.rows.end * columns].to_vec()
                })
                .collect();
            assert_eq!(actual, expected, "{packing:?}");
        }
    }

    #[test]
    fn rows_that_are_no_one_matrix_are_left_to_the_decoder() {
        let part = |packing, rows: usize, columns, range| StoredRows {
            bytes: object(packing, rows, columns, 0).into(),
            packing,
            shape: [rows, columns],
            rows: range,
        };
        let nvfp4 = Packing::Nvfp4 { divisors: 1 };
        let mut bad_divisor = part(nvfp4, 128, 64, 0..128);
        let end = bad_divisor.bytes.len();
        bad_divisor.bytes.to_mut()[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
        for (what, parts) in [
            ("no part", vec![]),
            (
                "two packings",
                vec![part(Packing::Fp8Row, 3, 8, 0..3), part(Packing::Bf16, 3, 8, 0..3)],
            ),
            (
                "two widths",
                vec![part(Packing::Fp8Row, 3, 8, 0..3), part(Packing::Fp8Row, 3, 9, 0..3)],
            ),
            ("half a tile", vec![part(nvfp4, 256, 64, 0..64)]),
            ("no rows", vec![part(Packing::Fp8Row, 3, 8, 1..1)]),
            ("rows beyond", vec![part(Packing::Fp8Row, 3, 8, 1..4)]),
            ("a NaN divisor", vec![bad_divisor]),
        ] {
            assert!(StoredMatrix::stack(&parts).unwrap().is_none(), "{what}");
        }
        let mut short = part(Packing::Fp8Row, 3, 8, 0..3);
        short.bytes.to_mut().pop();
        assert!(matches!(StoredMatrix::stack(&[short]), Err(ExpandError::Bytes { .. })));
    }
}
