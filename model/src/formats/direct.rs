//! bf16, fp32 and int32 words in C order, little-endian, nothing else (`contiguous_le_v1`).

use super::{Format, FormatError, element_count};
use perplexity_kernels::numeric::{bf16_to_f32, f32_to_bf16};
use rayon::prelude::*;

/// Most extents a shape may have.
pub const MAX_RANK: usize = 16;

/// Elements per parallel task.
const TASK: usize = 1 << 16;

/// Bytes per word.
pub(super) fn word_bytes(format: Format) -> usize {
    if format == Format::Bf16 { 2 } else { 4 }
}

/// `elements * word bytes`.
pub(super) fn encoded_size(format: Format, shape: &[u64]) -> Result<u64, FormatError> {
    if shape.len() > MAX_RANK || shape.contains(&0) {
        return Err(FormatError::shape(format, shape, "at most 16 positive extents"));
    }
    element_count(shape)?
        .checked_mul(word_bytes(format) as u64)
        .ok_or(FormatError::Overflow {
            what: "an encoded size",
        })
}

/// Decodes elements from `begin` on; the range was checked.
pub(super) fn decode(format: Format, bytes: &[u8], begin: usize, out: &mut [f32]) -> Result<(), FormatError> {
    let width = word_bytes(format);
    let bytes = &bytes[begin * width..][..out.len() * width];
    let chunk = |(at, (bytes, out)): (usize, (&[u8], &mut [f32]))| match format {
        Format::Bf16 => {
            decode_bf16(bytes, out);
            Ok(())
        }
        Format::Int32 => decode_int32(bytes, begin + at * TASK, out),
        _ => {
            for (word, out) in bytes.as_chunks::<4>().0.iter().zip(out) {
                *out = f32::from_le_bytes(*word);
            }
            Ok(())
        }
    };
    if out.len() <= TASK {
        return chunk((0, (bytes, out)));
    }
    bytes
        .par_chunks(TASK * width)
        .zip(out.par_chunks_mut(TASK))
        .enumerate()
        .try_for_each(chunk)
}

fn decode_bf16(bytes: &[u8], out: &mut [f32]) {
    for (word, out) in bytes.as_chunks::<2>().0.iter().zip(out) {
        *out = bf16_to_f32(u16::from_le_bytes(*word));
    }
}

fn decode_int32(bytes: &[u8], first: usize, out: &mut [f32]) -> Result<(), FormatError> {
    for (at, (word, out)) in bytes.as_chunks::<4>().0.iter().zip(out).enumerate() {
        let value = i32::from_le_bytes(*word);
        *out = value as f32;
        if f64::from(*out) != f64::from(value) {
            return Err(FormatError::InexactInteger {
                index: (first + at) as u64,
                value,
            });
        }
    }
    Ok(())
}

/// `cast_direct`: each value rounded to the nearest word, ties to even. Writes the words of `values` to `out`; `first`
/// is the element index of `values[0]`. Infinities and NaN are values of bf16 and fp32 and stay what they are; a finite
/// value that would round to an infinity is refused.
pub(super) fn encode(format: Format, values: &[f32], first: u64, out: &mut [u8]) -> Result<(), FormatError> {
    let width = word_bytes(format);
    let chunk = |(at, (values, out)): (usize, (&[f32], &mut [u8]))| {
        let first = first + (at * TASK) as u64;
        match format {
            Format::Bf16 => {
                for (at, (value, word)) in values.iter().zip(out.as_chunks_mut::<2>().0).enumerate() {
                    let rounded = f32_to_bf16(*value);
                    if value.is_finite() && !bf16_to_f32(rounded).is_finite() {
                        return Err(FormatError::OutOfRange {
                            format,
                            index: first + at as u64,
                            value: *value,
                        });
                    }
                    *word = rounded.to_le_bytes();
                }
            }
            Format::Int32 => {
                for (at, (value, word)) in values.iter().zip(out.as_chunks_mut::<4>().0).enumerate() {
                    let rounded = f64::from(*value).round_ties_even();
                    if !(f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&rounded) {
                        return Err(FormatError::OutOfRange {
                            format,
                            index: first + at as u64,
                            value: *value,
                        });
                    }
                    *word = (rounded as i32).to_le_bytes();
                }
            }
            _ => {
                for (value, word) in values.iter().zip(out.as_chunks_mut::<4>().0) {
                    *word = value.to_le_bytes();
                }
            }
        }
        Ok(())
    };
    values
        .par_chunks(TASK)
        .zip(out.par_chunks_mut(TASK * width))
        .enumerate()
        .try_for_each(chunk)
}
