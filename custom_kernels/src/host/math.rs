//! Elementary functions that vectorise: straight-line float32, the same bits on every CPU.

use crate::precision::Precision;

/// `e^x` within 2 units in the last place; 0 below the smallest normal result, infinite above the largest.
///
/// `x = n ln 2 + r`, `|r| <= ln 2 / 2`; `ln 2` in two parts so that `r` is exact enough; Taylor polynomial of degree 7
/// in `r` (remainder 3e-9), then `2^n` by its bits, in two halves so that both are normal numbers.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4; // 355/512: n * LN2_HIGH is exact for |n| < 2^15
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    const SMALLEST: f32 = -87.336_54; // ln of the smallest normal number
    const LARGEST: f32 = 88.722_84; // ln of the largest number

    let clamped = x.clamp(SMALLEST, LARGEST);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let p = 1.0 / 5040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = (p * r) * r + r + 1.0;
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
    let y = p * power(n >> 1) * power(n - (n >> 1));
    let y = if x < SMALLEST { 0.0 } else { y };
    let y = if x > LARGEST { f32::INFINITY } else { y };
    if x.is_nan() { x } else { y }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// The nearest bfloat16, ties to even, as float32; NaN stays NaN.
#[inline(always)]
pub fn round_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    f32::from_bits(if x.is_nan() { bits | 0x0040_0000 } else { rounded })
}

/// The nearest IEEE half, ties to even, as float32.
pub fn round_f16(x: f32) -> f32 {
    half::f16::from_f32(x).to_f32()
}

/// Rounds every element in place.
#[inline(always)]
pub(crate) fn round_all(values: &mut [f32], to: Precision) {
    match to {
        Precision::Full => {}
        Precision::Bf16 => values.iter_mut().for_each(|x| *x = round_bf16(*x)),
        Precision::F16 => values.iter_mut().for_each(|x| *x = round_f16(*x)),
    }
}

/// `sum a_i b_i` in 16 interleaved partial sums, then pairwise: a fixed order that vectorises.
#[inline(always)]
pub(crate) fn dot<const LEVEL: u8>(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0f32; LANES];
    let (a_lanes, a_rest) = a.as_chunks::<LANES>();
    let (b_lanes, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_lanes.iter().zip(b_lanes) {
        for i in 0..LANES {
            sums[i] = crate::host::simd::multiply_add::<LEVEL>(a[i], b[i], sums[i]);
        }
    }
    for (i, (&a, &b)) in a_rest.iter().zip(b_rest).enumerate() {
        sums[i] = crate::host::simd::multiply_add::<LEVEL>(a, b, sums[i]);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            let (got, want) = (exp(x), f64::from(x).exp());
            let unit = f64::from(f32::from_bits((want as f32).to_bits() + 1) - want as f32);
            assert!(
                (f64::from(got) - want).abs() <= 2.0 * unit,
                "exp({x}) = {got}, not {want}"
            );
        }
    }

    #[test]
    fn exp_keeps_its_ends() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(88.7).is_finite());
    }

    #[test]
    fn silu_and_sigmoid_saturate_without_nan() {
        assert_eq!(silu(-1e5), -0.0);
        assert_eq!(silu(1e5), 1e5);
        assert_eq!(sigmoid(-1e5), 0.0);
        assert_eq!(sigmoid(1e5), 1.0);
        assert_eq!(sigmoid(0.0), 0.5);
    }

    #[test]
    fn bf16_rounding_is_the_half_crates() {
        for bits in (0..u32::MAX).step_by(65_521) {
            let x = f32::from_bits(bits);
            let want = half::bf16::from_f32(x).to_f32();
            assert!(round_bf16(x) == want || (x.is_nan() && round_bf16(x).is_nan()), "{x}");
        }
        // 1 + 2^-8 lies halfway between 1 and 1 + 2^-7: the even one is 1.
        assert_eq!(round_bf16(1.0 + 1.0 / 256.0), 1.0);
        assert_eq!(round_bf16(1.0 + 3.0 / 256.0), 1.015_625);
    }

    #[test]
    fn dot_reads_every_element_once() {
        for n in [0, 1, 15, 16, 17, 33] {
            let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let want: f32 = (0..n).map(|i| (i * i) as f32).sum();
            assert_eq!(dot::<{ crate::host::simd::BASE }>(&a, &a), want);
        }
    }
}
