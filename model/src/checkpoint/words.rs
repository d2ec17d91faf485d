//! Stored words of a weight tensor, with the scales beside it.
//!
//! | storage | weight |
//! |---|---|
//! | floats | the word |
//! | FP8 | `e4m3fn(c[n,k]) * s`, `s` per 128x128 tile, row or tensor |
//! | NVFP4 with a divisor | `e2m1(c[n,k]) * e4m3fn(s[n,k/16]) / d` |
//! | NVFP4 with a multiplier | `e2m1(c[n,k]) * e4m3fn(s[n,k/16]) * m` |
//!
//! Each is rounded once to f32. Two E2M1 codes share a byte, the even column in the low nibble. A scale called
//! `weight_scale_inv` multiplies like any other. An absent scale is never taken to be 1.

use std::ops::Range;

use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;

use super::CheckpointError;
use super::names::Selection;
use super::shards::{Shards, Tensor};
use crate::formats::fp8_block::TILE;
use crate::formats::nvfp4::{GROUP, WeightTable, is_nan};
use crate::formats::{Format, FormatError, fp8_row};

/// Elements that one task decodes.
const DECODE_CHUNK: usize = 1 << 16;

/// How a tensor's elements are stored.
pub(super) enum Storage {
    Float,
    Fp8(Fp8),
    Nvfp4(Nvfp4),
}

/// Matrices `[.., rows, columns]` of E4M3FN codes with one multiplier per tile; tiles at the edges are cut.
pub(super) struct Fp8 {
    pub(super) scales: Tensor,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) grain: Grain,
}

/// What shares a multiplier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Grain {
    Tensor,
    Row,
    Block,
}

/// A matrix of E2M1 codes with one E4M3FN scale per 16 columns and one scale for all.
pub(super) struct Nvfp4 {
    pub(super) scales: Tensor,
    pub(super) matrix_scale: MatrixScale,
}

/// The scale of a whole NVFP4 matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum MatrixScale {
    Divisor(f32),
    Multiplier(f32),
}

impl MatrixScale {
    /// As an artifact's divisor: `d` itself or `f32(1 / m)`.
    pub(super) fn divisor(self) -> f32 {
        match self {
            Self::Divisor(divisor) => divisor,
            Self::Multiplier(multiplier) => 1.0 / multiplier,
        }
    }
}

impl MatrixScale {
    /// As a bank's multiplier: `m` itself or `f32(1 / d)`.
    pub(super) fn multiplier(self) -> f32 {
        match self {
            Self::Divisor(divisor) => 1.0 / divisor,
            Self::Multiplier(multiplier) => multiplier,
        }
    }
}

/// Words of a weight as an artifact stores them, rows in the order of the parameter.
pub(crate) enum RowWords {
    /// `[N, K]` codes, one bf16 scale per row.
    Fp8Row { codes: Vec<u8>, scales: Vec<u16> },
    /// `[N, K/2]` code bytes, `[N, K/16]` scales, the divisor of the matrix.
    Nvfp4 {
        codes: Vec<u8>,
        scales: Vec<u8>,
        divisor: f32,
    },
}

impl Fp8 {
    fn tile_of(&self, element: usize) -> usize {
        let (row, column) = (element / self.columns, element % self.columns);
        match self.grain {
            Grain::Tensor => 0,
            Grain::Row => row,
            Grain::Block => {
                let (matrix, row) = (row / self.rows, row % self.rows);
                (matrix * self.rows.div_ceil(TILE) + row / TILE) * self.columns.div_ceil(TILE) + column / TILE
            }
        }
    }

    /// Elements from `element` on that share its multiplier and its row.
    fn run(&self, element: usize) -> usize {
        let column = element % self.columns;
        match self.grain {
            Grain::Block => self.columns.min((column / TILE + 1) * TILE) - column,
            _ => self.columns - column,
        }
    }

    fn decode(&self, codes: &[u8], scales: &[u8], first: usize, out: &mut [f32]) -> Result<(), FormatError> {
        let (mut element, mut rest) = (first, out);
        while !rest.is_empty() {
            let (now, tail) = rest.split_at_mut(rest.len().min(self.run(element)));
            let scale = float(scales, self.scales.dtype, self.tile_of(element));
            fp8_row::scale_codes(&codes[element..element + now.len()], element, scale, now)?;
            element += now.len();
            rest = tail;
        }
        Ok(())
    }
}

impl Nvfp4 {
    fn decode(
        &self,
        table: &WeightTable,
        codes: &[u8],
        scales: &[u8],
        first: usize,
        out: &mut [f32],
    ) -> Result<(), FormatError> {
        let (mut element, mut rest) = (first, out);
        while !rest.is_empty() {
            // Rows are whole groups, so groups number on across rows.
            let group = element / GROUP;
            let (now, tail) = rest.split_at_mut(rest.len().min((group + 1) * GROUP - element));
            let word = scales[group];
            if is_nan(word) {
                return Err(FormatError::InvalidWord {
                    what: "scale",
                    index: group as u64,
                    word: word.into(),
                });
            }
            let weights = table.under(word);
            if let Ok(group) = <&mut [f32; GROUP]>::try_from(&mut *now) {
                let bytes = &codes[element / 2..][..GROUP / 2];
                for (pair, byte) in group.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
                    *pair = [weights[usize::from(byte & 15)], weights[usize::from(byte >> 4)]];
                }
            } else {
                for (at, value) in now.iter_mut().enumerate() {
                    let element = element + at;
                    *value = weights[usize::from((codes[element / 2] >> (4 * (element % 2))) & 15)];
                }
            }
            element += now.len();
            rest = tail;
        }
        Ok(())
    }
}

impl Storage {
    /// What an inspection calls it.
    pub(super) fn format_name(&self, tensor: &Tensor) -> &'static str {
        match self {
            Self::Float => match tensor.dtype {
                Dtype::BF16 => "bf16",
                Dtype::F16 => "fp16",
                _ => "fp32",
            },
            Self::Fp8(fp8) => match (fp8.grain, fp8.scales.dtype) {
                (Grain::Tensor, _) => "fp8_e4m3fn_tensor",
                (Grain::Row, Dtype::BF16) => Format::Fp8E4m3fnRowBf16.name(),
                (Grain::Row, Dtype::F16) => "fp8_e4m3fn_row_fp16",
                (Grain::Row, _) => "fp8_e4m3fn_row_f32",
                (Grain::Block, Dtype::BF16) => "fp8_e4m3fn_block128_bf16",
                (Grain::Block, Dtype::F16) => "fp8_e4m3fn_block128_fp16",
                (Grain::Block, _) => Format::Fp8E4m3fnBlock128F32.name(),
            },
            Self::Nvfp4(Nvfp4 { matrix_scale, .. }) => match matrix_scale {
                MatrixScale::Divisor(_) => Format::Nvfp4.name(),
                MatrixScale::Multiplier(_) => Format::Nvfp4Mul.name(),
            },
        }
    }

    /// The artifact format that takes these words as they are, if any.
    pub(super) fn artifact_format(&self) -> Option<Format> {
        match self {
            Self::Fp8(Fp8 {
                grain: Grain::Tensor | Grain::Row,
                ..
            }) => Some(Format::Fp8E4m3fnRowBf16),
            Self::Nvfp4(_) => Some(Format::Nvfp4),
            _ => None,
        }
    }

    /// Extents of the whole tensor in elements; two of NVFP4 share a byte.
    pub(super) fn shape(&self, tensor: &Tensor) -> Vec<usize> {
        let mut shape = tensor.shape.clone();
        if let (Self::Nvfp4(_), Some(columns)) = (self, shape.last_mut()) {
            *columns *= 2;
        }
        shape
    }

    /// Bytes of the tensor and its scales.
    pub(super) fn bytes(&self, tensor: &Tensor) -> usize {
        tensor.bytes()
            + match self {
                Self::Float => 0,
                Self::Fp8(fp8) => fp8.scales.bytes(),
                Self::Nvfp4(nvfp4) => nvfp4.scales.bytes() + size_of::<f32>(),
            }
    }

    /// Elements `range` of `selection` as f32.
    ///
    /// # Errors
    /// A code or scale that is NaN.
    pub(super) fn decode(
        &self,
        shards: &Shards,
        tensor: &Tensor,
        selection: &Selection,
        range: Range<usize>,
    ) -> Result<Vec<f32>, FormatError> {
        let bytes = shards.bytes(tensor);
        match self {
            Self::Float => decode(selection, range, &|first, out| {
                decode_floats(bytes, tensor.dtype, first, out);
                Ok(())
            }),
            Self::Fp8(fp8) => {
                let scales = shards.bytes(&fp8.scales);
                decode(selection, range, &|first, out| fp8.decode(bytes, scales, first, out))
            }
            Self::Nvfp4(nvfp4) => {
                let scales = shards.bytes(&nvfp4.scales);
                let table = match nvfp4.matrix_scale {
                    MatrixScale::Divisor(divisor) => WeightTable::new(|product| product / divisor),
                    MatrixScale::Multiplier(multiplier) => WeightTable::new(|product| product * multiplier),
                };
                decode(selection, range, &|first, out| {
                    nvfp4.decode(&table, bytes, scales, first, out)
                })
            }
        }
    }

    /// The words of the selected rows, unchanged; only f32 row scales are rounded to bf16. `None` when no artifact
    /// format takes them.
    pub(super) fn row_words(&self, shards: &Shards, tensor: &Tensor, selection: &Selection) -> Option<RowWords> {
        let runs = selection.runs()?;
        let bytes = shards.bytes(tensor);
        match self {
            Self::Fp8(fp8) if fp8.grain != Grain::Block => {
                let scales = shards.bytes(&fp8.scales);
                let rows = runs
                    .iter()
                    .flat_map(|run| (run.start..run.end).step_by(fp8.columns))
                    .map(|element| float(scales, fp8.scales.dtype, fp8.tile_of(element)));
                Some(RowWords::Fp8Row {
                    scales: rows.map(|scale| bf16::from_f32(scale).to_bits()).collect(),
                    codes: gather(bytes, &runs, 1),
                })
            }
            Self::Nvfp4(nvfp4) => Some(RowWords::Nvfp4 {
                codes: gather(bytes, &runs, 2),
                scales: gather(shards.bytes(&nvfp4.scales), &runs, GROUP),
                divisor: nvfp4.matrix_scale.divisor(),
            }),
            _ => None,
        }
    }
}

/// The bytes of the element ranges `runs`, with `elements` elements in a byte.
fn gather(bytes: &[u8], runs: &[Range<usize>], elements: usize) -> Vec<u8> {
    let pieces: Vec<&[u8]> = runs
        .iter()
        .map(|run| &bytes[run.start / elements..run.end / elements])
        .collect();
    pieces.concat()
}

/// Element `at` of a tensor of floats.
pub(super) fn float(bytes: &[u8], dtype: Dtype, at: usize) -> f32 {
    let mut value = [0.0];
    decode_floats(bytes, dtype, at, &mut value);
    value[0]
}

/// Whether [`float`] reads this type.
pub(super) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32)
}

fn word_bytes(dtype: Dtype) -> usize {
    if dtype == Dtype::F32 { 4 } else { 2 }
}

/// Calls `run(first element of the tensor, out)` for every consecutive run of elements `range` of the selection.
fn decode(
    selection: &Selection,
    range: Range<usize>,
    run: &(impl Fn(usize, &mut [f32]) -> Result<(), FormatError> + Sync),
) -> Result<Vec<f32>, FormatError> {
    let mut values = vec![0.0; range.len()];
    values
        .par_chunks_mut(DECODE_CHUNK)
        .enumerate()
        .try_for_each(|(chunk, out)| {
            let begin = range.start + chunk * DECODE_CHUNK;
            match selection {
                Selection::Range(selected) => run(selected.start + begin, out),
                Selection::EverySecond { block, half, .. } => {
                    let (mut element, mut rest) = (begin, out);
                    while !rest.is_empty() {
                        let (number, inside) = (element / block, element % block);
                        let (now, tail) = rest.split_at_mut(rest.len().min(block - inside));
                        run((2 * number + half) * block + inside, now)?;
                        element += now.len();
                        rest = tail;
                    }
                    Ok(())
                }
                Selection::TapMajor { channels, taps } => out.iter_mut().enumerate().try_for_each(|(at, value)| {
                    let (tap, channel) = ((begin + at) / channels, (begin + at) % channels);
                    run(channel * taps + tap, std::slice::from_mut(value))
                }),
            }
        })?;
    Ok(values)
}

/// Consecutive elements from `first` on; every float type is exact in f32.
pub(super) fn decode_floats(bytes: &[u8], dtype: Dtype, first: usize, out: &mut [f32]) {
    let width = word_bytes(dtype);
    let words = bytes[first * width..][..out.len() * width].chunks_exact(width);
    let pairs = out.iter_mut().zip(words);
    match dtype {
        Dtype::BF16 => pairs.for_each(|(out, word)| *out = bf16::from_le_bytes([word[0], word[1]]).to_f32()),
        Dtype::F16 => pairs.for_each(|(out, word)| *out = f16::from_le_bytes([word[0], word[1]]).to_f32()),
        _ => pairs.for_each(|(out, word)| *out = f32::from_le_bytes([word[0], word[1], word[2], word[3]])),
    }
}

/// Refuses a multiplier that is negative or not finite; `what` tells where it is.
pub(super) fn require_multipliers(shards: &Shards, name: &str, scales: &Tensor) -> Result<(), CheckpointError> {
    let bytes = shards.bytes(scales);
    let count = bytes.len() / word_bytes(scales.dtype);
    for at in 0..count {
        let value = float(bytes, scales.dtype, at);
        if !value.is_finite() || value.is_sign_negative() {
            return Err(CheckpointError::Scale {
                path: shards.path(scales).into(),
                tensor: name.into(),
                element: at,
                value,
                expected: "a finite number that is not negative",
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::{self, fp8_block};

    #[test]
    fn tiles_of_blocks_are_cut_at_the_edges_and_counted_matrix_by_matrix() {
        // Two matrices of 130 x 200 have 2 x 2 tiles each, as an artifact's blocks do.
        let (shape, rows, columns) = ([2, 130, 200], 130, 200);
        let codes: Vec<u8> = (0..2 * rows * columns).map(|at| (at * 37 % 0x7F) as u8).collect();
        let scales: Vec<f32> = (0..8).map(|tile| 0.125 + 0.3 * tile as f32).collect();
        let format = Format::Fp8E4m3fnBlock128F32;
        let bytes = fp8_block::pack(&shape, &codes, &scales).expect("packs");
        let mut expected = vec![0.0; codes.len()];
        let range = 0..codes.len() as u64;
        formats::decode(format, format.layout(), &shape, 1, &bytes, range, &mut expected).expect("decodes");

        let blocks = Fp8 {
            scales: Tensor::unplaced(Dtype::F32, vec![2, 2, 2]),
            rows,
            columns,
            grain: Grain::Block,
        };
        let scale_bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        for first in [0, 1, 127, 199, 200, 25_599, 25_999, 26_000, 51_999] {
            for length in [1, 2, 73, 128, 129, 1000] {
                let length = length.min(codes.len() - first);
                let mut values = vec![0.0; length];
                blocks
                    .decode(&codes, &scale_bytes, first, &mut values)
                    .expect("decodes");
                assert_eq!(values, expected[first..first + length], "{length} from {first}");
            }
        }
    }

    #[test]
    fn a_row_scale_belongs_to_its_row_and_a_tensor_scale_to_all() {
        let codes = [0x38, 0xB8, 0x40, 0x30, 0x38, 0x38]; // 1, -1, 2, 0.5, 1, 1
        let mut fp8 = Fp8 {
            scales: Tensor::unplaced(Dtype::BF16, vec![2, 1]),
            rows: 2,
            columns: 3,
            grain: Grain::Row,
        };
        let scales = [0x80, 0x3F, 0x00, 0x3E]; // 1, 0.125
        let mut values = [0.0; 6];
        fp8.decode(&codes, &scales, 0, &mut values).expect("decodes");
        assert_eq!(values, [1.0, -1.0, 2.0, 0.0625, 0.125, 0.125]);
        fp8.grain = Grain::Tensor;
        fp8.decode(&codes, &scales, 0, &mut values).expect("decodes");
        assert_eq!(values, [1.0, -1.0, 2.0, 0.5, 1.0, 1.0]);
    }

    #[test]
    fn divisors_divide_and_multipliers_multiply() {
        // Codes 7 D 2 0 under scale 0x7E: 6, -3, 1, 0 times 448.
        let (codes, scales) = ([0xD7, 0x02, 0, 0, 0, 0, 0, 0], [0x7E]);
        let nvfp4 = Nvfp4 {
            scales: Tensor::unplaced(Dtype::F8_E4M3, vec![1, 1]),
            matrix_scale: MatrixScale::Divisor(896.0),
        };
        for (table, expected) in [
            (WeightTable::new(|product| product / 896.0), [3.0, -1.5, 0.5, 0.0]),
            (WeightTable::new(|product| product * 0.25), [672.0, -336.0, 112.0, 0.0]),
        ] {
            let mut values = [0.0; 4];
            nvfp4.decode(&table, &codes, &scales, 0, &mut values).expect("decodes");
            assert_eq!(values, expected);
        }
        assert_eq!(nvfp4.matrix_scale.divisor(), 896.0);
        assert_eq!(MatrixScale::Multiplier(0.25).divisor(), 4.0);
    }
}
