//! One element at a time, straight from the definitions of formats and layouts: what the fast decoders are held to.
//!
//! Positions are worked out afresh here, without the geometries and tables of the decoders, and values in f64, in which
//! every product is exact and the quotient of nvfp4 is rounded once.

use super::{Format, FormatError, Layout, check_bytes, element_count};

/// The value of logical element `element` of an encoded tensor: exact, for nvfp4 the f64 nearest to it. Not finite where
/// the words are not.
///
/// # Errors
/// As [`super::decode`] for sizes and ranges.
pub fn decode_element(
    format: Format,
    layout: Layout,
    shape: &[u64],
    divisors: u64,
    bytes: &[u8],
    element: u64,
) -> Result<f64, FormatError> {
    check_bytes(format, layout, shape, divisors, bytes)?;
    let elements = element_count(shape)?;
    if element >= elements {
        return Err(FormatError::Range {
            begin: element,
            end: element.saturating_add(1),
            elements,
        });
    }
    let columns = shape.last().copied().unwrap_or(1);
    let (row, column) = (element / columns, element % columns);
    let rows = elements / columns;
    let byte = |at: u64| bytes[at as usize];
    let f32_at = |at: u64| f64::from(f32::from_le_bytes([byte(at), byte(at + 1), byte(at + 2), byte(at + 3)]));
    let u16_at = |at: u64| u16::from_le_bytes([byte(at), byte(at + 1)]);
    Ok(match format {
        Format::Bf16 => bf16(u16_at(2 * element)),
        Format::Fp32 => f32_at(4 * element),
        Format::Int32 => {
            let at = 4 * element;
            f64::from(i32::from_le_bytes([byte(at), byte(at + 1), byte(at + 2), byte(at + 3)]))
        }
        Format::Q4G64Fp16 | Format::Q5G64Fp16 | Format::Q6G64Fp16 | Format::Q8G32Fp16 => {
            let (bits, size): (u64, u64) = match format {
                Format::Q4G64Fp16 => (4, 64),
                Format::Q5G64Fp16 => (5, 64),
                Format::Q6G64Fp16 => (6, 64),
                _ => (8, 32),
            };
            let groups_per_row = up(columns, 128) / size;
            let groups = rows * groups_per_row;
            let (group, lane) = (row * groups_per_row + column / size, column % size);
            let high_bytes = if bits == 8 { 0 } else { (bits - 4) * 8 };
            let high = up(groups * 32, 256);
            let scale = f16(u16_at(high + up(groups * high_bytes, 256) + 2 * group));
            let mut word = match bits {
                8 => u64::from(byte(32 * group + lane)),
                _ => u64::from(byte(32 * group + lane / 2) >> (4 * (lane % 2)) & 15),
            };
            for bit in 4..4 + high_bytes / 8 {
                // The high plane is one stream of bits per group, (bits - 4) a lane, low bits of a byte first; q8 has none.
                let position = lane * (bits - 4) + bit - 4;
                word |= u64::from(byte(high + group * high_bytes + position / 8) >> (position % 8) & 1) << bit;
            }
            let code = if word < 1 << (bits - 1) {
                word as f64
            } else {
                word as f64 - (1u64 << bits) as f64
            };
            scale * code
        }
        Format::Nvfp4 => {
            let scales = up(rows * columns / 2, 256);
            let group = column / 16;
            let position =
                ((row / 128) * (columns / 64) + group / 4) * 512 + (row % 32) * 16 + ((row % 128) / 32) * 4 + group % 4;
            let divisor = f32_at(scales + rows * columns / 16 + 4 * (row / (rows / divisors)));
            e2m1(byte(element / 2) >> (4 * (element % 2))) * e4m3fn(byte(scales + position)) / divisor
        }
        Format::Fp8E4m3fnRowBf16 => e4m3fn(byte(element)) * bf16(u16_at(up(elements, 256) + 2 * row)),
        Format::Fp8E4m3fnBlock128F32 => {
            let matrix_rows = shape[shape.len() - 2];
            let (matrix, row) = (row / matrix_rows, row % matrix_rows);
            let tile = (matrix * matrix_rows.div_ceil(128) + row / 128) * columns.div_ceil(128) + column / 128;
            e4m3fn(byte(element)) * f32_at(up(elements, 256) + 4 * tile)
        }
        Format::Nvfp4Mul => return Err(FormatError::NoElementOrder { layout }),
    })
}

fn up(value: u64, alignment: u64) -> u64 {
    value.div_ceil(alignment) * alignment
}

fn bf16(word: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(word) << 16))
}

/// Value of a binary float word with a sign bit, `exponent_bits` and `fraction_bits`, all exponents finite.
fn float(word: u16, exponent_bits: u32, fraction_bits: u32) -> f64 {
    let bias = (1i32 << (exponent_bits - 1)) - 1;
    let exponent = i32::from(word >> fraction_bits) & ((1 << exponent_bits) - 1);
    let fraction = f64::from(word & ((1 << fraction_bits) - 1)) / f64::from(1 << fraction_bits);
    let sign = if word >> (exponent_bits + fraction_bits) & 1 == 1 {
        -1.0
    } else {
        1.0
    };
    let magnitude = if exponent == 0 {
        fraction * 2f64.powi(1 - bias)
    } else {
        (1.0 + fraction) * 2f64.powi(exponent - bias)
    };
    sign * magnitude
}

fn f16(word: u16) -> f64 {
    match (word & 0x7FFF, word >> 15) {
        (0x7C00, 0) => f64::INFINITY,
        (0x7C00, _) => f64::NEG_INFINITY,
        (0x7C01.., _) => f64::NAN,
        _ => float(word, 5, 10),
    }
}

fn e4m3fn(word: u8) -> f64 {
    if word & 0x7F == 0x7F {
        f64::NAN
    } else {
        float(word.into(), 4, 3)
    }
}

fn e2m1(word: u8) -> f64 {
    float(u16::from(word & 15), 2, 1)
}
