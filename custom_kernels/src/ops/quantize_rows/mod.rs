//! Rows to E4M3 codes with one float32 scale each, the activation side of an 8-bit product:
//!
//! ```text
//! s = max|x| / 448        0 for a zero row
//! c = E4M3(x * (1 / s))   nearest, ties to even, saturating at 448
//! ```

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;

/// Largest E4M3 value.
pub const E4M3_MAX: f32 = 448.0;

/// Codes and scales of `x`, `width` values per row.
pub fn reference(x: &[f32], width: usize) -> (Vec<u8>, Vec<f32>) {
    let scales: Vec<f32> = x
        .chunks_exact(width)
        .map(|row| row.iter().fold(0.0f32, |max, x| max.max(x.abs())) / E4M3_MAX)
        .collect();
    let codes = x.chunks_exact(width).zip(&scales).flat_map(|(row, &scale)| {
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        row.iter().map(move |x| encode_e4m3(x * inverse))
    });
    (codes.collect(), scales)
}

/// The E4M3 code nearest to `y`.
pub fn encode_e4m3(y: f32) -> u8 {
    let size = y.abs().min(E4M3_MAX);
    // Below 2^-6 codes are multiples of 2^-9; above, the upper bits of the float32 with its exponent rebased.
    let code = if size < 2f32.powi(-6) {
        (size * 512.0).round_ties_even() as u32
    } else {
        let bits = size.to_bits();
        ((bits + 0x7_ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    };
    code as u8 | ((y.to_bits() >> 24) & 0x80) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_format() {
        for (value, code) in [
            (0.0, 0x00),
            (-0.0, 0x80),
            (1.0, 0x38),
            (-1.75, 0xbe),
            (448.0, 0x7e),
            (1e9, 0x7e),
            (224.438, 0x76),
            (-112.219, 0xee),
            (67.5069, 0x68),
            (0.001953125, 0x01),  // 2^-9
            (0.0009765625, 0x00), // half of it, to even
            (0.0029296875, 0x02), // 1.5 of it, to even
            (0.015625, 0x08),     // 2^-6, the first normal
            (1.0625, 0x38),       // between 1 and 1.125, to even
            (1.1875, 0x3a),       // between 1.125 and 1.25, to even
        ] {
            assert_eq!(encode_e4m3(value), code, "{value}");
        }
    }
}
