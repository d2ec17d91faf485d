//! Numeric formats (what a stored word means) and layouts (where it lies), one file per family.
//!
//! | family | formats | weight |
//! |---|---|---|
//! | [`direct`] | bf16, fp32, int32 | the word |
//! | [`grouped`] | q4, q5, q6 (groups of 64), q8 (of 32) | `f16 scale * code` |
//! | [`nvfp4`] | nvfp4 | `e2m1 * e4m3fn scale / f32 divisor` |
//! | [`fp8_row`] | fp8_e4m3fn_row_bf16 | `e4m3fn * bf16 scale of the row` |
//! | [`nvfp4_expert`] | nvfp4_mul | `e2m1 * e4m3fn scale * f32 multiplier` |
//! | [`fp8_block`] | fp8_e4m3fn_block128_f32 | `e4m3fn * f32 scale of the 128x128 tile` |
//!
//! Each family offers the exact size, decoding of any range of logical elements, a strict check of every word, a way
//! to pack given words, and the canonical encoders where the format has any. Decoding refuses words that stand for no
//! finite number; it takes negative scales, which some writers emit, while [`validate`] refuses them.

mod encode;
mod error;
mod registry;
mod rows;

pub mod direct;
pub mod fp8_block;
pub mod fp8_row;
pub mod grouped;
pub mod nvfp4;
pub mod nvfp4_expert;
pub mod reference;

pub use encode::{Encoder, encode};
pub use error::FormatError;
pub use registry::{EncodeMethod, Format, Layout};

use std::ops::Range;

/// Product of the extents; 1 for a scalar (`shape = []`).
///
/// # Errors
/// [`FormatError::Overflow`] beyond 2^64 - 1.
pub fn element_count(shape: &[u64]) -> Result<u64, FormatError> {
    shape
        .iter()
        .try_fold(1u64, |product, &extent| product.checked_mul(extent))
        .ok_or(FormatError::Overflow {
            what: "the number of elements",
        })
}

/// Size in bytes of a whole encoded tensor. `divisors` is 1 except for nvfp4 tensors with one divisor per row block.
///
/// # Errors
/// When the layout does not hold the format, the shape breaks the layout's rules, or the size overflows.
pub fn encoded_size(format: Format, layout: Layout, shape: &[u64], divisors: u64) -> Result<u64, FormatError> {
    check_layout(format, layout, divisors)?;
    match layout {
        Layout::ContiguousLeV1 => direct::encoded_size(format, shape),
        Layout::RowSplitK128V1 => grouped::Geometry::new(format, shape).map(|geometry| geometry.size),
        Layout::BlockScaleK16M128x4V1 => nvfp4::Geometry::new(shape, divisors).map(|geometry| geometry.size),
        Layout::RowScaleV1 => fp8_row::Geometry::new(shape).map(|geometry| geometry.size),
        Layout::Nvfp4ExpertRg16V1 => nvfp4_expert::Geometry::new(shape).map(|geometry| geometry.size),
        Layout::Block128ScaleV1 => fp8_block::Geometry::new(shape).map(|geometry| geometry.size),
    }
}

/// Decodes logical elements `[range.start, range.end)`, C order, of an encoded tensor into `out`.
///
/// `bytes` is the whole tensor. Large ranges are decoded in parallel. Values have one f32 rounding at most; they are
/// exact for every format but nvfp4, nvfp4_mul and the tile-scaled fp8.
///
/// # Errors
/// Everything [`encoded_size`] refuses; bytes or `out` of another length than the shape and range imply; a range
/// outside the tensor; a word that stands for no finite number (not for bf16 and fp32, where all words are values);
/// int32 values that f32 cannot hold; an expert bank, which has no element order (see [`nvfp4_expert`]).
pub fn decode(
    format: Format,
    layout: Layout,
    shape: &[u64],
    divisors: u64,
    bytes: &[u8],
    range: Range<u64>,
    out: &mut [f32],
) -> Result<(), FormatError> {
    check_bytes(format, layout, shape, divisors, bytes)?;
    let elements = element_count(shape)?;
    if range.start > range.end || range.end > elements {
        return Err(FormatError::Range {
            begin: range.start,
            end: range.end,
            elements,
        });
    }
    if out.len() as u64 != range.end - range.start {
        return Err(FormatError::OutputLength {
            expected: range.end - range.start,
            actual: out.len() as u64,
        });
    }
    if out.is_empty() {
        return Ok(());
    }
    // The byte count fits memory, and every layout stores at least 4 bits per element, so positions fit usize.
    let begin = range.start as usize;
    match layout {
        Layout::ContiguousLeV1 => direct::decode(format, bytes, begin, out),
        Layout::RowSplitK128V1 => grouped::decode(&grouped::Geometry::new(format, shape)?, bytes, begin, out),
        Layout::BlockScaleK16M128x4V1 => nvfp4::decode(&nvfp4::Geometry::new(shape, divisors)?, bytes, begin, out),
        Layout::RowScaleV1 => fp8_row::decode(&fp8_row::Geometry::new(shape)?, bytes, begin, out),
        Layout::Nvfp4ExpertRg16V1 => Err(FormatError::NoElementOrder { layout }),
        Layout::Block128ScaleV1 => fp8_block::decode(&fp8_block::Geometry::new(shape)?, bytes, begin, out),
    }
}

/// Checks every word of an encoded tensor: codes and scales the format allows, zero padding, zero gaps.
///
/// # Errors
/// The first offence found, as [`FormatError::InvalidWord`], [`FormatError::Divisor`] or [`FormatError::Padding`].
pub fn validate(format: Format, layout: Layout, shape: &[u64], divisors: u64, bytes: &[u8]) -> Result<(), FormatError> {
    check_bytes(format, layout, shape, divisors, bytes)?;
    match layout {
        Layout::ContiguousLeV1 => Ok(()),
        Layout::RowSplitK128V1 => grouped::validate(&grouped::Geometry::new(format, shape)?, bytes),
        Layout::BlockScaleK16M128x4V1 => nvfp4::validate(&nvfp4::Geometry::new(shape, divisors)?, bytes),
        Layout::RowScaleV1 => fp8_row::validate(&fp8_row::Geometry::new(shape)?, bytes),
        Layout::Nvfp4ExpertRg16V1 => nvfp4_expert::validate(&nvfp4_expert::Geometry::new(shape)?, bytes),
        Layout::Block128ScaleV1 => fp8_block::validate(&fp8_block::Geometry::new(shape)?, bytes),
    }
}

fn check_layout(format: Format, layout: Layout, divisors: u64) -> Result<(), FormatError> {
    if format.layout() != layout {
        return Err(FormatError::LayoutMismatch { format, layout });
    }
    if divisors != 1 && format != Format::Nvfp4 {
        return Err(FormatError::UnexpectedDivisors { format, divisors });
    }
    Ok(())
}

fn check_bytes(format: Format, layout: Layout, shape: &[u64], divisors: u64, bytes: &[u8]) -> Result<(), FormatError> {
    let expected = encoded_size(format, layout, shape, divisors)?;
    if bytes.len() as u64 != expected {
        return Err(FormatError::Size {
            expected,
            actual: bytes.len() as u64,
        });
    }
    Ok(())
}

/// Smallest multiple of `alignment` that is at least `value`; `None` on overflow.
pub(crate) fn align_up(value: u64, alignment: u64) -> Option<u64> {
    value.checked_next_multiple_of(alignment)
}

/// The extents of a rank-2 shape `[N, K]`, both positive.
fn matrix_shape(format: Format, shape: &[u64]) -> Result<(u64, u64), FormatError> {
    match *shape {
        [rows, columns] if rows > 0 && columns > 0 => Ok((rows, columns)),
        _ => Err(FormatError::shape(format, shape, "two positive extents [N, K]")),
    }
}

/// `value` as an index into bytes; an encoded tensor beyond the address space is an overflow.
fn index(value: u64) -> Result<usize, FormatError> {
    usize::try_from(value).map_err(|_| FormatError::Overflow {
        what: "an encoded size",
    })
}

/// Refuses bytes other than zero in a gap between planes or in padding that starts at byte `start`.
fn require_zero(bytes: &[u8], start: usize) -> Result<(), FormatError> {
    match bytes.iter().position(|&byte| byte != 0) {
        Some(at) => Err(FormatError::Padding {
            at: (start + at) as u64,
            word: bytes[at],
        }),
        None => Ok(()),
    }
}
