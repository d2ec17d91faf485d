//! Float32 steps the host codecs share, each rounding exactly where the formats say.

use perplexity_kernels::numeric::{f16_to_f32, f32_to_f16};

/// FP16 word of every NaN scale.
pub(crate) const NAN_SCALE: u16 = 0x7E00;

/// Nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits below one.
#[inline]
pub(crate) fn rne(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    (x + MAGIC) - MAGIC
}

/// Largest magnitude, NaN if any value is NaN.
#[inline]
pub(crate) fn absmax(values: &[f32]) -> f32 {
    // Magnitudes order like their bit patterns, NaN above infinity: an integer maximum vectorises.
    f32::from_bits(
        values
            .iter()
            .map(|value| value.to_bits() & 0x7FFF_FFFF)
            .fold(0, u32::max),
    )
}

/// `scale` rounded to FP16: the stored word and its value.
#[inline]
pub(crate) fn f16_scale(scale: f32) -> (u16, f32) {
    if scale.is_nan() {
        return (NAN_SCALE, f32::NAN);
    }
    let word = f32_to_f16(scale);
    (word, f16_to_f32(word))
}

/// `1 / scale`, or 0 where codes cannot be formed (scale zero or NaN; an infinite scale gives 0 by itself).
#[inline]
pub(crate) fn code_factor(scale: f32) -> f32 {
    if scale > 0.0 { 1.0 / scale } else { 0.0 }
}

/// Pairwise sum of a power-of-two number of lanes: lane l takes lane l + half, half = n/2, n/4, .., 1.
#[inline]
pub(crate) fn butterfly_sum<const N: usize>(mut lanes: [f32; N]) -> f32 {
    let mut half = N / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Sum of squares of a 256-value row: lane l accumulates y[l], y[l + 32], .. y[l + 224] by FMA, lanes by butterfly.
pub(crate) fn sum_of_squares(y: &[f32]) -> f32 {
    let mut lanes = [0f32; 32];
    for chunk in y.chunks_exact(32) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = value.mul_add(*value, *lane);
        }
    }
    butterfly_sum(lanes)
}

/// `<y, c>` of a 256-value row: an FMA chain inside each word of 8, words by butterfly.
pub(crate) fn word_dot(y: &[f32], c: &[f32]) -> f32 {
    let mut words = [0f32; 32];
    for ((word, y), c) in words.iter_mut().zip(y.chunks_exact(8)).zip(c.chunks_exact(8)) {
        *word = y.iter().zip(c).fold(0.0, |sum, (y, c)| y.mul_add(*c, sum));
    }
    butterfly_sum(words)
}

/// Stored scale of a codec whose codes come from the RMS: `FP16(energy / projection)`, the value that makes the
/// reconstruction `S c` satisfy `<S c, y> = |y|^2`; 0 when the projection is not positive, NaN when a value is NaN.
pub(crate) fn unbiased_scale(energy: f32, projection: f32) -> u16 {
    if energy.is_nan() || projection.is_nan() {
        NAN_SCALE
    } else if projection > 0.0 {
        f16_scale(energy / projection).0
    } else {
        0
    }
}
