//! Random matrices straight in their stored form.
//!
//! A pool of 4,096 units, each 64 neighbouring columns of normally distributed weights, is encoded once by the format's
//! own encoder. A matrix is then units drawn from the pool: unit `u` of the matrix is pool unit `hash(seed, u)`, whose
//! words are copied into every plane. The hash is a function of the position, so planes agree and threads do not matter.

use rayon::prelude::*;

use crate::convert::{ConvertError, Encoding, quantise};
use crate::formats::nvfp4_expert::{self, MatrixWords, Projection, UNIT_BYTES};
use crate::formats::{self, Format, FormatError, Layout, grouped, nvfp4};

/// Standard deviation of the weights, that of trained matrices of this family.
const DEVIATION: f32 = 0.02;
/// Columns of a unit: the largest group of any format.
const UNIT: usize = 64;
/// Binary logarithm of the number of units; 4,096 of 64 bf16 weights fit a second-level cache.
const POOL_BITS: u32 = 12;
/// Columns of the encoded pool: what the grouped formats pad rows to, so that the pool has no padding.
const POOL_COLUMNS: usize = 128;
const POOL_ROWS: usize = (UNIT << POOL_BITS) / POOL_COLUMNS;
/// Every plane of every format starts at a multiple of this.
const PLANE_ALIGNMENT: usize = 256;
/// Bytes handed over at a time.
const PIECE: usize = 1 << 24;
/// Units one task fills.
const TASK: usize = 1 << 12;

/// A random permutation of 64-bit words (the finaliser of SplitMix64).
pub(super) fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// Word `at` of the sequence that belongs to `seed`.
pub(super) fn random(seed: u64, at: u64) -> u64 {
    mix(seed.wrapping_add((at + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)))
}

/// A standard normal number: the sum of twelve uniform ones, exact, so that every machine draws the same.
fn normal(seed: u64, at: u64) -> f32 {
    let sixteenths = |word: u64| (0..4).map(move |part| (word >> (16 * part)) as u16);
    let sum: i32 = (0..3)
        .flat_map(|word| sixteenths(random(seed, 3 * at + word)))
        .map(i32::from)
        .sum();
    (sum - 6 * 0xFFFF) as f32 / 65_536.0
}

/// One plane of the encoded pool.
struct Plane {
    /// Words of all units (or rows), one after the other.
    words: Vec<u8>,
    /// Bytes of one.
    width: usize,
    order: Order,
}

/// Which unit's words stand at a position of a plane.
#[derive(Clone, Copy)]
enum Order {
    /// Row by row.
    Rows,
    /// In tiles of 128 rows by one unit, see [`nvfp4::scale_position`].
    ScaleTiles,
    /// One word per row, drawn from the pool's rows.
    RowScales,
}

/// Encoded units of one format.
pub(super) struct Pool {
    planes: Vec<Plane>,
    /// Bytes behind the last plane.
    tail: Vec<u8>,
}

impl Pool {
    /// Encodes the pool of a format that weights are stored in.
    pub(super) fn new(encoding: Encoding, seed: u64) -> Result<Self, FormatError> {
        let values: Vec<f32> = (0..POOL_ROWS * POOL_COLUMNS)
            .into_par_iter()
            .map(|at| DEVIATION * normal(seed, at as u64))
            .collect();
        let shape = [POOL_ROWS as u64, POOL_COLUMNS as u64];
        let Encoding { format, method } = encoding;
        let bytes = formats::encode(format, method, &shape, &values)?;
        let units = 1 << POOL_BITS;
        let plane = |offset: usize, width: usize| Plane {
            words: bytes[offset..][..units * width].to_vec(),
            width,
            order: Order::Rows,
        };
        let (planes, tail) = match format.layout() {
            Layout::RowSplitK128V1 => {
                let geometry = grouped::Geometry::new(format, &shape)?;
                let groups = UNIT / geometry.group;
                let mut planes = vec![plane(0, formats::grouped::BASE_BYTES * groups)];
                if geometry.high_bytes > 0 {
                    planes.push(plane(geometry.high_offset, geometry.high_bytes * groups));
                }
                planes.push(plane(geometry.scale_offset, 2 * groups));
                (planes, Vec::new())
            }
            Layout::BlockScaleK16M128x4V1 => {
                let geometry = nvfp4::Geometry::new(&shape, 1)?;
                let groups = POOL_COLUMNS / nvfp4::GROUP;
                let scale = |group: usize| {
                    let position = nvfp4::scale_position(POOL_COLUMNS, group / groups, group % groups);
                    bytes[geometry.scale_offset + position]
                };
                let scales = Plane {
                    words: (0..POOL_ROWS * groups).map(scale).collect(),
                    width: UNIT / nvfp4::GROUP,
                    order: Order::ScaleTiles,
                };
                (
                    vec![plane(0, UNIT / 2), scales],
                    bytes[geometry.divisor_offset..].to_vec(),
                )
            }
            Layout::RowScaleV1 => {
                let geometry = formats::fp8_row::Geometry::new(&shape)?;
                let scales = Plane {
                    words: bytes[geometry.scale_offset..].to_vec(),
                    width: 2,
                    order: Order::RowScales,
                };
                (vec![plane(0, UNIT), scales], Vec::new())
            }
            _ => (vec![plane(0, bytes.len() / units)], Vec::new()),
        };
        Ok(Self { planes, tail })
    }

    /// Draws the matrix `[rows, columns]` that belongs to `seed` and hands its bytes over in pieces.
    ///
    /// # Errors
    /// When the columns are no multiple of 64 (nvfp4: 128), or those of `append`.
    pub(super) fn write<E: From<FormatError>>(
        &self,
        format: Format,
        shape: &[u64],
        seed: u64,
        mut append: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let &[rows, columns] = shape else {
            return Err(FormatError::shape(format, shape, "a matrix").into());
        };
        let (rows, columns) = (rows as usize, columns as usize);
        let least = match format.layout() {
            Layout::BlockScaleK16M128x4V1 => POOL_COLUMNS,
            _ => UNIT,
        };
        if !columns.is_multiple_of(least) {
            return Err(FormatError::shape(format, shape, "a multiple of 64 columns, of 128 in nvfp4").into());
        }
        // Grouped formats pad rows to their pool's width; the padding is zero.
        let per_row = match format.layout() {
            Layout::RowSplitK128V1 => columns.next_multiple_of(POOL_COLUMNS) / UNIT,
            _ => columns / UNIT,
        };
        let units = rows * per_row;
        let mut written = 0usize;
        let mut buffer = Vec::new();
        for plane in &self.planes {
            let gap = written.next_multiple_of(PLANE_ALIGNMENT) - written;
            append(&[0; PLANE_ALIGNMENT][..gap])?;
            let words = match plane.order {
                Order::RowScales => rows,
                _ => units,
            };
            let per_piece = PIECE / plane.width;
            for first in (0..words).step_by(per_piece) {
                buffer.resize(per_piece.min(words - first) * plane.width, 0);
                plane.fill(seed, per_row, first, &mut buffer);
                if per_row > columns / UNIT {
                    for (at, word) in buffer.chunks_exact_mut(plane.width).enumerate() {
                        if (first + at) % per_row >= columns / UNIT {
                            word.fill(0);
                        }
                    }
                }
                append(&buffer)?;
            }
            written += gap + words * plane.width;
        }
        append(&self.tail)
    }
}

/// Encoded units of banks of experts, 16 rows by 16 columns with their scales, all under one multiplier.
pub(super) struct ExpertPool {
    /// [`UNIT_BYTES`] each.
    units: Vec<u8>,
    multiplier: f32,
}

impl ExpertPool {
    pub(super) fn new(seed: u64) -> Result<Self, ConvertError> {
        // One expert whose three matrices are as many units as any pool has.
        let shape = [1, 1024, 352];
        let geometry = nvfp4_expert::Geometry::new(&shape)?;
        let sizes = Projection::ALL.map(|projection| {
            let (rows, columns) = geometry.matrix(projection);
            rows * columns
        });
        let values: Vec<f32> = (0..sizes.iter().sum())
            .into_par_iter()
            .map(|at: usize| DEVIATION * normal(seed, at as u64))
            .collect();
        let words = quantise("the pool of experts", &values)?;
        let first = |projection: Projection| sizes[..projection as usize].iter().sum::<usize>();
        let bank = nvfp4_expert::pack::<FormatError>(&shape, |_, projection| {
            let elements = first(projection)..first(projection) + sizes[projection as usize];
            Ok(MatrixWords {
                codes: &words.codes[elements.start / 2..elements.end / 2],
                scales: &words.scales[elements.start / nvfp4_expert::UNIT..elements.end / nvfp4_expert::UNIT],
                multiplier: words.multiplier,
            })
        })?;
        Ok(Self {
            units: bank[..geometry.record_bytes].to_vec(),
            multiplier: words.multiplier,
        })
    }

    /// Draws the bank `[E, H, I]` that belongs to `seed` and hands its bytes over expert by expert.
    ///
    /// # Errors
    /// When the shape is not one of a bank, or those of `append`.
    pub(super) fn write<E: From<FormatError>>(
        &self,
        shape: &[u64],
        seed: u64,
        mut append: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let geometry = nvfp4_expert::Geometry::new(shape)?;
        let pool = self.units.as_chunks::<UNIT_BYTES>().0;
        let mut record = vec![0; geometry.stride];
        for expert in 0..geometry.experts {
            let units = record[..geometry.record_bytes].as_chunks_mut::<UNIT_BYTES>().0;
            let first = expert * units.len();
            units
                .par_iter_mut()
                .with_min_len(TASK)
                .enumerate()
                .for_each(|(at, unit)| {
                    *unit = pool[random(seed, (first + at) as u64) as usize % pool.len()];
                });
            append(&record)?;
        }
        append(&self.multiplier.to_le_bytes().repeat(3 * geometry.experts))
    }
}

impl Plane {
    /// Writes the words at positions from `first` on.
    fn fill(&self, seed: u64, units_per_row: usize, first: usize, out: &mut [u8]) {
        // A width known to the compiler is a few moves, any other a call per word.
        match self.width {
            2 => self.fill_words::<2>(seed, units_per_row, first, out),
            4 => self.fill_words::<4>(seed, units_per_row, first, out),
            8 => self.fill_words::<8>(seed, units_per_row, first, out),
            16 => self.fill_words::<16>(seed, units_per_row, first, out),
            32 => self.fill_words::<32>(seed, units_per_row, first, out),
            64 => self.fill_words::<64>(seed, units_per_row, first, out),
            128 => self.fill_words::<128>(seed, units_per_row, first, out),
            256 => self.fill_words::<256>(seed, units_per_row, first, out),
            width => unreachable!("no format stores {width} bytes per unit"),
        }
    }

    fn fill_words<const WIDTH: usize>(&self, seed: u64, units_per_row: usize, first: usize, out: &mut [u8]) {
        let pool = self.words.as_chunks::<WIDTH>().0;
        out.as_chunks_mut::<WIDTH>()
            .0
            .par_chunks_mut(TASK)
            .enumerate()
            .for_each(|(task, words)| {
                let first = first + task * TASK;
                for (at, word) in words.iter_mut().enumerate() {
                    let unit = match self.order {
                        Order::Rows => first + at,
                        Order::ScaleTiles => unit_of_scales(first + at, units_per_row),
                        Order::RowScales => first + at,
                    };
                    *word = pool[random(seed, unit as u64) as usize % pool.len()];
                }
            });
    }
}

/// The unit whose four scales stand at `position`, in words of four: inside a tile of 128 rows by one unit, row `r`
/// stands at `4 (r % 32) + r / 32`.
fn unit_of_scales(position: usize, units_per_row: usize) -> usize {
    let (tile, within) = (position / 128, position % 128);
    let row = tile / units_per_row * 128 + within % 4 * 32 + within / 4;
    row * units_per_row + tile % units_per_row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_mean_0_and_deviation_1() {
        let count = 1 << 16;
        let values = (0..count).map(|at| f64::from(normal(7, at)));
        let (sum, squares) = values.fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
        let (mean, variance) = (sum / count as f64, squares / count as f64);
        // Five standard errors of the mean (1/256) and of the variance (sqrt 2 / 256).
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }

    fn deviation(values: &[f32]) -> f64 {
        let squares = values.iter().map(|x| f64::from(*x).powi(2));
        (squares.sum::<f64>() / values.len() as f64).sqrt()
    }

    #[test]
    fn rows_that_a_format_pads_end_in_zeros() {
        let q8 = Encoding {
            format: Format::Q8G32Fp16,
            method: formats::EncodeMethod::GroupedAbsmax,
        };
        let (rows, columns) = (96usize, 320usize);
        let shape = [rows as u64, columns as u64];
        let mut bytes = Vec::new();
        let pool = Pool::new(q8, 5).unwrap();
        pool.write::<FormatError>(q8.format, &shape, 9, |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        })
        .unwrap();
        let geometry = grouped::Geometry::new(q8.format, &shape).unwrap();
        // Rows of 384 codes, of which the last 64 are padding.
        for row in bytes[..rows * 384].chunks(384) {
            assert!(row[..320].iter().any(|code| *code != 0) && row[320..].iter().all(|code| *code == 0));
        }
        for row in bytes[geometry.scale_offset..].chunks(2 * 384 / 32) {
            assert!(row[20..].iter().all(|byte| *byte == 0));
        }
        let mut values = vec![0.0; rows * columns];
        let elements = 0..values.len() as u64;
        formats::decode(q8.format, q8.format.layout(), &shape, 1, &bytes, elements, &mut values).unwrap();
        assert!((deviation(&values) - 0.02).abs() < 0.001, "{}", deviation(&values));
    }

    #[test]
    fn banks_of_experts_decode_to_weights_of_the_usual_size() {
        let shape = [3, 64, 48];
        let geometry = nvfp4_expert::Geometry::new(&shape).unwrap();
        let mut bytes = Vec::new();
        let pool = ExpertPool::new(5).unwrap();
        let mut write = |seed| {
            bytes.clear();
            pool.write::<FormatError>(&shape, seed, |piece| {
                bytes.extend_from_slice(piece);
                Ok(())
            })
            .unwrap();
            bytes.clone()
        };
        let bank = write(1);
        assert_eq!(bank.len() as u64, geometry.size);
        assert_eq!(write(1), bank);
        assert_ne!(write(2), bank);
        for expert in 0..3 {
            let record = &bank[expert * geometry.stride..][..geometry.stride];
            assert!(record[geometry.record_bytes..].iter().all(|byte| *byte == 0));
            for projection in Projection::ALL {
                let (rows, columns) = geometry.matrix(projection);
                let mut values = vec![0.0; rows * columns];
                let at = geometry.multiplier_offset(expert, projection);
                let multiplier = f32::from_le_bytes(bank[at..at + 4].try_into().unwrap());
                nvfp4_expert::decode_record(&geometry, record, projection, multiplier, &mut values).unwrap();
                assert!((deviation(&values) - 0.02).abs() < 0.002, "{}", deviation(&values));
            }
        }
        assert_ne!(
            bank[..geometry.record_bytes],
            bank[geometry.stride..][..geometry.record_bytes]
        );
    }

    #[test]
    fn scale_tiles_are_those_of_the_format() {
        let (rows, columns) = (256, 192);
        for row in 0..rows {
            for group in 0..columns / nvfp4::GROUP {
                let position = nvfp4::scale_position(columns, row, group);
                assert_eq!(
                    unit_of_scales(position / 4, columns / UNIT),
                    row * (columns / UNIT) + group / 4,
                    "{row} {group}"
                );
            }
        }
    }
}
