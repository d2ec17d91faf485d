//! Signed integers with one f16 multiplier per group of columns, in three planes (`row_split_k128_v1`).
//!
//! `w[n,k] = f16 scale[n, k/G] * q[n,k]`, exact in f32; `G` = 64 (q4, q5, q6) or 32 (q8). Rows are padded to a
//! multiple of 128 columns, `Kp`; a row has `Kp / G` groups. The planes, each row-major by group:
//!
//! | plane | bytes per group | content |
//! |---|---|---|
//! | base | 32 | low 4 bits of lanes `2j`, `2j+1` in byte `j` (low nibble first); q8: lane `i` in byte `i` |
//! | high, at the next multiple of 256 | q5: 8, q6: 16 | bit 4 of each lane; q6: bits 4 and 5; low bits first |
//! | scale, at the next multiple of 256 | 2 | f16 word |
//!
//! Padding lanes have code 0; a group of padding alone has scale 0.

use super::{EncodeMethod, Format, FormatError, align_up, index, matrix_shape, require_zero, rows};
use perplexity_kernels::numeric::{f16_to_f32, f32_to_f16};
use rayon::prelude::*;
use std::ops::Range;

/// Columns a row is padded to.
const ROW_ALIGNMENT: u64 = 128;
/// Alignment of the high and scale planes within the tensor.
const PLANE_ALIGNMENT: u64 = 256;
/// Base plane bytes per group, in all four formats.
pub(crate) const BASE_BYTES: usize = 32;
/// Most lanes a group has.
const MAX_GROUP: usize = 64;

/// Signed values of both nibbles of a byte, low nibble first.
static NIBBLE_PAIRS: [[f32; 2]; 256] = nibble_pairs();

const fn nibble_pairs() -> [[f32; 2]; 256] {
    let mut table = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = [(((byte as u8) << 4) as i8 >> 4) as f32, (byte as u8 as i8 >> 4) as f32];
        byte += 1;
    }
    table
}

/// Where the planes of a `[rows, columns]` tensor lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// The numeric format.
    pub format: Format,
    /// Rows `N`.
    pub rows: usize,
    /// Columns `K`, without padding.
    pub columns: usize,
    /// Columns per group `G`.
    pub group: usize,
    /// Groups per row, padding included.
    pub groups_per_row: usize,
    /// High plane bytes per group.
    pub high_bytes: usize,
    /// Byte offset of the high plane.
    pub high_offset: usize,
    /// Byte offset of the scale plane.
    pub scale_offset: usize,
    /// Bytes of the whole tensor.
    pub size: u64,
}

impl Geometry {
    /// Planes of a tensor of this format and shape `[N, K]`.
    ///
    /// # Errors
    /// When the format is not a grouped one, the shape is not a matrix, or a size overflows.
    pub fn new(format: Format, shape: &[u64]) -> Result<Self, FormatError> {
        let (group, high_bytes): (u64, u64) = match format {
            Format::Q4G64Fp16 => (64, 0),
            Format::Q5G64Fp16 => (64, 8),
            Format::Q6G64Fp16 => (64, 16),
            Format::Q8G32Fp16 => (32, 0),
            _ => return Err(FormatError::shape(format, shape, "another layout")),
        };
        let (rows, columns) = matrix_shape(format, shape)?;
        let overflow = || FormatError::Overflow {
            what: "an encoded size",
        };
        let groups_per_row = align_up(columns, ROW_ALIGNMENT).ok_or_else(overflow)? / group;
        let groups = rows.checked_mul(groups_per_row).ok_or_else(overflow)?;
        let plane = |bytes: u64| {
            groups
                .checked_mul(bytes)
                .and_then(|bytes| align_up(bytes, PLANE_ALIGNMENT))
        };
        let high_offset = plane(BASE_BYTES as u64).ok_or_else(overflow)?;
        let scale_offset = plane(high_bytes)
            .and_then(|bytes| high_offset.checked_add(bytes))
            .ok_or_else(overflow)?;
        let size = groups
            .checked_mul(2)
            .and_then(|bytes| scale_offset.checked_add(bytes))
            .ok_or_else(overflow)?;
        index(size)?;
        Ok(Self {
            format,
            rows: rows as usize,
            columns: columns as usize,
            group: group as usize,
            groups_per_row: groups_per_row as usize,
            high_bytes: high_bytes as usize,
            high_offset: high_offset as usize,
            scale_offset: scale_offset as usize,
            size,
        })
    }

    /// Groups of the whole tensor.
    fn groups(&self) -> usize {
        self.rows * self.groups_per_row
    }

    /// Largest and smallest code the encoders use.
    fn code_range(&self) -> (f32, f32) {
        match self.format {
            Format::Q4G64Fp16 => (7.0, -8.0),
            Format::Q5G64Fp16 => (15.0, -16.0),
            Format::Q6G64Fp16 => (31.0, -32.0),
            // -128 is not a legal q8 code.
            _ => (127.0, -127.0),
        }
    }

    /// Base bytes, high bytes and scale word of group `at` (row-major over all groups).
    fn group_words<'a>(&self, bytes: &'a [u8], at: usize) -> (&'a [u8; BASE_BYTES], &'a [u8], u16) {
        let base = bytes[at * BASE_BYTES..].first_chunk().expect("the length was checked");
        let high = &bytes[self.high_offset + at * self.high_bytes..][..self.high_bytes];
        let scale = &bytes[self.scale_offset + 2 * at..];
        (base, high, u16::from_le_bytes([scale[0], scale[1]]))
    }

    /// Lanes of group `group` of a row that hold weights.
    fn logical_lanes(&self, group: usize) -> usize {
        self.columns.saturating_sub(group * self.group).min(self.group)
    }
}

/// Writes `scale * code` of the `G` lanes of one group to `out[..G]`. A full group compiles to straight vector code.
#[inline]
fn expand(format: Format, base: &[u8; BASE_BYTES], high: &[u8], scale: f32, out: &mut [f32; MAX_GROUP]) {
    match format {
        Format::Q4G64Fp16 => {
            for (pair, byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(base) {
                *pair = NIBBLE_PAIRS[*byte as usize].map(|code| scale * code);
            }
        }
        Format::Q5G64Fp16 => {
            // Two's complement: bit 4 weighs -16.
            for ((lanes, bytes), high) in out
                .as_chunks_mut::<8>()
                .0
                .iter_mut()
                .zip(base.as_chunks::<4>().0)
                .zip(high)
            {
                for lane in 0..8 {
                    let low = i32::from((bytes[lane / 2] >> (4 * (lane % 2))) & 15);
                    let top = i32::from((high >> lane) & 1);
                    lanes[lane] = scale * (low - 16 * top) as f32;
                }
            }
        }
        Format::Q6G64Fp16 => {
            // Bit 4 weighs 16, bit 5 weighs -32.
            for ((lanes, bytes), high) in out
                .as_chunks_mut::<4>()
                .0
                .iter_mut()
                .zip(base.as_chunks::<2>().0)
                .zip(high)
            {
                for lane in 0..4 {
                    let low = i32::from((bytes[lane / 2] >> (4 * (lane % 2))) & 15);
                    let top = i32::from((high >> (2 * lane)) & 3);
                    lanes[lane] = scale * (low + 16 * (top & 1) - 32 * (top >> 1)) as f32;
                }
            }
        }
        _ => {
            for (value, byte) in out.iter_mut().zip(base) {
                *value = scale * f32::from(*byte as i8);
            }
        }
    }
}

/// Code of one lane, by the definition of the planes.
fn code(format: Format, base: &[u8; BASE_BYTES], high: &[u8], lane: usize) -> i32 {
    if format == Format::Q8G32Fp16 {
        return i32::from(base[lane] as i8);
    }
    let low = i32::from((base[lane / 2] >> (4 * (lane % 2))) & 15);
    let (bits, word) = match format {
        Format::Q5G64Fp16 => (5, low | i32::from((high[lane / 8] >> (lane % 8)) & 1) << 4),
        Format::Q6G64Fp16 => (6, low | i32::from((high[lane / 4] >> (2 * (lane % 4))) & 3) << 4),
        _ => (4, low),
    };
    if word < 1 << (bits - 1) {
        word
    } else {
        word - (1 << bits)
    }
}

/// Decodes elements from `begin` on; bytes and range were checked.
pub(super) fn decode(geometry: &Geometry, bytes: &[u8], begin: usize, out: &mut [f32]) -> Result<(), FormatError> {
    rows::for_each_row(geometry.columns, begin, out, |row, column, mut out| {
        let (mut group, mut lane) = (column / geometry.group, column % geometry.group);
        while !out.is_empty() {
            let at = row * geometry.groups_per_row + group;
            let (base, high, word) = geometry.group_words(bytes, at);
            let scale = f16_to_f32(word);
            if !scale.is_finite() {
                return Err(FormatError::InvalidWord {
                    what: "f16 scale",
                    index: at as u64,
                    word: word.into(),
                });
            }
            let taken = out.len().min(geometry.group - lane);
            let (now, rest) = out.split_at_mut(taken);
            if let Ok(whole) = <&mut [f32; MAX_GROUP]>::try_from(&mut *now) {
                expand(geometry.format, base, high, scale, whole);
            } else {
                let mut values = [0.0; MAX_GROUP];
                expand(geometry.format, base, high, scale, &mut values);
                now.copy_from_slice(&values[lane..lane + taken]);
            }
            (out, group, lane) = (rest, group + 1, 0);
        }
        Ok(())
    })
}

/// Checks scales (zero or finite positive), codes under a zero scale, q8 codes, padding lanes and gaps.
pub(super) fn validate(geometry: &Geometry, bytes: &[u8]) -> Result<(), FormatError> {
    let groups = geometry.groups();
    (0..groups).into_par_iter().with_min_len(1 << 10).try_for_each(|at| {
        let (base, high, word) = geometry.group_words(bytes, at);
        let logical = geometry.logical_lanes(at % geometry.groups_per_row);
        // Positive finite words are 0x0001..=0x7BFF; a group of padding alone has 0.
        if word > 0x7BFF || (logical == 0 && word != 0) {
            return Err(FormatError::InvalidWord {
                what: "f16 scale",
                index: at as u64,
                word: word.into(),
            });
        }
        for lane in 0..geometry.group {
            let code = code(geometry.format, base, high, lane);
            if (code != 0 && (word == 0 || lane >= logical)) || code == -128 {
                let index = (at * geometry.group + lane) as u64;
                return Err(FormatError::InvalidWord {
                    what: "padded code",
                    index,
                    word: code as u32,
                });
            }
        }
        Ok(())
    })?;
    let base_end = groups * BASE_BYTES;
    require_zero(&bytes[base_end..geometry.high_offset], base_end)?;
    let high_end = geometry.high_offset + groups * geometry.high_bytes;
    require_zero(&bytes[high_end..geometry.scale_offset], high_end)
}

/// One encoded group: codes of all `G` lanes (padding 0) and the f16 scale word.
#[derive(Clone, Copy)]
struct Group {
    codes: [i8; MAX_GROUP],
    scale: u16,
}

impl Group {
    const ZERO: Self = Self {
        codes: [0; MAX_GROUP],
        scale: 0,
    };

    /// Writes the words into the group's slices of the three planes.
    fn store(&self, format: Format, base: &mut [u8], high: &mut [u8], scale: &mut [u8]) {
        scale.copy_from_slice(&self.scale.to_le_bytes());
        if format == Format::Q8G32Fp16 {
            for (byte, code) in base.iter_mut().zip(self.codes) {
                *byte = code as u8;
            }
            return;
        }
        for (byte, pair) in base.iter_mut().zip(self.codes.as_chunks::<2>().0) {
            *byte = (pair[0] as u8 & 15) | (pair[1] as u8) << 4;
        }
        match format {
            Format::Q5G64Fp16 => {
                for (byte, lanes) in high.iter_mut().zip(self.codes.as_chunks::<8>().0) {
                    *byte = (0..8).fold(0, |byte, lane| byte | ((lanes[lane] as u8 >> 4) & 1) << lane);
                }
            }
            Format::Q6G64Fp16 => {
                for (byte, lanes) in high.iter_mut().zip(self.codes.as_chunks::<4>().0) {
                    *byte = (0..4).fold(0, |byte, lane| byte | ((lanes[lane] as u8 >> 4) & 3) << (2 * lane));
                }
            }
            _ => {}
        }
    }
}

/// `code = clamp(rint(x * v), qmin, qmax)` with `v = 1 / scale`, every operation rounded to f32.
fn quantise(values: &[f32], scale: u16, (max, min): (f32, f32)) -> Group {
    let mut group = Group {
        codes: [0; MAX_GROUP],
        scale,
    };
    let reciprocal = 1.0 / f16_to_f32(scale);
    for (code, value) in group.codes.iter_mut().zip(values) {
        *code = (value * reciprocal).round_ties_even().clamp(min, max) as i8;
    }
    group
}

/// The f16 word of `value`, at least the smallest positive one; `None` when it overflows.
fn scale_word(value: f32) -> Option<u16> {
    let word = f32_to_f16(value).max(1);
    (word <= 0x7BFF).then_some(word)
}

/// Largest magnitude over the largest code, as the scale; `None` when the scale overflows f16.
fn absmax(values: &[f32], range: (f32, f32)) -> Option<Group> {
    let largest = rows::max_magnitude(values);
    if largest == 0.0 {
        return Some(Group::ZERO);
    }
    Some(quantise(values, scale_word(largest / range.0)?, range))
}

/// The group of least squared error among, in this order and with ties to the first: the absmax scale; a quarter, a
/// half, twice, four times it; the least-squares scale of the absmax codes; half and twice that; the words one and two
/// steps from the absmax scale, then from the least-squares scale.
fn least_squares(values: &[f32], range: (f32, f32)) -> Option<Group> {
    let first = absmax(values, range)?;
    if first.scale == 0 {
        return Some(first);
    }
    let (mut numerator, mut denominator) = (0.0f64, 0.0f64);
    for (value, code) in values.iter().zip(first.codes) {
        numerator += f64::from(*value) * f64::from(code);
        denominator += f64::from(code) * f64::from(code);
    }
    let absmax_scale = f16_to_f32(first.scale);
    let fitted = if denominator > 0.0 {
        (numerator / denominator) as f32
    } else {
        absmax_scale
    };
    let fitted_word = scale_word(fitted);
    let scaled = [0.25, 0.5, 2.0, 4.0].map(|factor| scale_word(absmax_scale * factor));
    let around_fit = [1.0, 0.5, 2.0].map(|factor| scale_word(fitted * factor));
    let neighbours = |word: Option<u16>| {
        [-1i32, 1, -2, 2].map(|step| word.and_then(|word| u16::try_from(i32::from(word) + step).ok()))
    };
    let candidates = scaled
        .into_iter()
        .chain(around_fit)
        .chain(neighbours(Some(first.scale)))
        .chain(neighbours(fitted_word));
    let error = |group: &Group| -> f64 {
        let scale = f16_to_f32(group.scale);
        values
            .iter()
            .zip(group.codes)
            .map(|(value, code)| (f64::from(*value) - f64::from(scale * f32::from(code))).powi(2))
            .sum()
    };
    let (mut best, mut least) = (first, error(&first));
    for word in candidates.flatten().filter(|word| (1..=0x7BFF).contains(word)) {
        let group = quantise(values, word, range);
        let error = error(&group);
        if error < least {
            (best, least) = (group, error);
        }
    }
    Some(best)
}

/// Encodes whole rows: `values` are the rows from `first_row` on; `bytes` is the whole tensor, zero where unwritten.
pub(super) fn encode_rows(
    geometry: &Geometry,
    method: EncodeMethod,
    first_row: usize,
    values: &[f32],
    bytes: &mut [u8],
) -> Result<(), FormatError> {
    let range = geometry.code_range();
    let row_count = values.len() / geometry.columns;
    for_rows_of_planes(geometry, first_row..first_row + row_count, bytes, |row, planes| {
        let values = &values[(row - first_row) * geometry.columns..][..geometry.columns];
        let first = (row * geometry.columns) as u64;
        rows::require_finite(values, first)?;
        for (group, (values, planes)) in values.chunks(geometry.group).zip(planes).enumerate() {
            let encoded = match method {
                EncodeMethod::GroupedMse => least_squares(values, range),
                _ => absmax(values, range),
            };
            let Some(encoded) = encoded else {
                let value = rows::max_magnitude(values);
                let index = first + (group * geometry.group) as u64;
                return Err(FormatError::OutOfRange {
                    format: geometry.format,
                    index,
                    value,
                });
            };
            encoded.store(geometry.format, planes.0, planes.1, planes.2);
        }
        Ok(())
    })
}

/// Packs given words: `codes` row-major `[N, K]`, `scales` f16 words row-major `[N, ceil(K / G)]`.
///
/// # Errors
/// When the counts are not the shape's, or a code lies outside the format.
pub fn pack(format: Format, shape: &[u64], codes: &[i8], scales: &[u16]) -> Result<Vec<u8>, FormatError> {
    let geometry = Geometry::new(format, shape)?;
    let logical_groups = geometry.columns.div_ceil(geometry.group);
    for (what, expected, actual) in [
        ("codes", geometry.rows * geometry.columns, codes.len()),
        ("scales", geometry.rows * logical_groups, scales.len()),
    ] {
        if expected != actual {
            return Err(FormatError::Count {
                what,
                expected: expected as u64,
                actual: actual as u64,
            });
        }
    }
    let (max, min) = geometry.code_range();
    if let Some(at) = codes.iter().position(|code| !(min..=max).contains(&f32::from(*code))) {
        return Err(FormatError::InvalidWord {
            what: "code",
            index: at as u64,
            word: i32::from(codes[at]) as u32,
        });
    }
    let mut bytes = vec![0; geometry.size as usize];
    for_rows_of_planes(&geometry, 0..geometry.rows, &mut bytes, |row, planes| {
        let codes = &codes[row * geometry.columns..][..geometry.columns];
        let scales = &scales[row * logical_groups..][..logical_groups];
        for ((codes, scale), planes) in codes.chunks(geometry.group).zip(scales).zip(planes) {
            let mut group = Group {
                codes: [0; MAX_GROUP],
                scale: *scale,
            };
            group.codes[..codes.len()].copy_from_slice(codes);
            group.store(format, planes.0, planes.1, planes.2);
        }
        Ok(())
    })?;
    Ok(bytes)
}

/// Base, high and scale bytes of one group.
type GroupPlanes<'a> = (&'a mut [u8], &'a mut [u8], &'a mut [u8]);

/// Calls `work(row, groups)` in parallel for each of `rows`, `groups` being the row's slices of the planes.
fn for_rows_of_planes<F>(geometry: &Geometry, rows: Range<usize>, bytes: &mut [u8], work: F) -> Result<(), FormatError>
where
    F: Fn(usize, &mut dyn Iterator<Item = GroupPlanes<'_>>) -> Result<(), FormatError> + Sync,
{
    let (base, rest) = bytes.split_at_mut(geometry.high_offset);
    let (high, scale) = rest.split_at_mut(geometry.scale_offset - geometry.high_offset);
    let per_row = geometry.groups_per_row;
    let plane = |width: usize| rows.start * per_row * width..rows.end * per_row * width;
    let base = base[plane(BASE_BYTES)].par_chunks_mut(per_row * BASE_BYTES);
    let scale = scale[plane(2)].par_chunks_mut(per_row * 2);
    let high_bytes = geometry.high_bytes;
    let minimum = (1usize << 13).div_ceil(geometry.columns);
    if high_bytes == 0 {
        return base
            .zip(scale)
            .enumerate()
            .with_min_len(minimum)
            .try_for_each(|(row, (base, scale))| {
                let groups = base.chunks_exact_mut(BASE_BYTES).zip(scale.chunks_exact_mut(2));
                work(
                    rows.start + row,
                    &mut groups.map(|(base, scale)| (base, Default::default(), scale)),
                )
            });
    }
    let high = high[plane(high_bytes)].par_chunks_mut(per_row * high_bytes);
    base.zip(high)
        .zip(scale)
        .enumerate()
        .with_min_len(minimum)
        .try_for_each(|(row, ((base, high), scale))| {
            let groups = base
                .chunks_exact_mut(BASE_BYTES)
                .zip(high.chunks_exact_mut(high_bytes))
                .zip(scale.chunks_exact_mut(2))
                .map(|((base, high), scale)| (base, high, scale));
            work(rows.start + row, &mut { groups })
        })
}
