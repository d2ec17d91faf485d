//! The precision in which an operation's result is observable.

use crate::host::math::{round_bf16, round_f16};

/// How a result is rounded, once, before anything else reads it.
///
/// Inside an operation precision is private, float32 or better. A backend may keep a [`Precision::Bf16`] result as a
/// bfloat16 tensor or as float32 values that are exactly bfloat16; every operation accepts both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Not rounded beyond float32.
    Full,
    /// Rounded to bfloat16, nearest, ties to even.
    Bf16,
    /// Rounded to IEEE half precision, nearest, ties to even; beyond 65,504 infinite.
    F16,
}

impl Precision {
    /// The nearest value, ties to even, of an f64 in one rounding; beyond the largest infinite.
    pub fn nearest(self, x: f64) -> f32 {
        match self {
            Self::Full => x as f32,
            Self::Bf16 => round_bf16(to_odd(x)),
            Self::F16 => round_f16(to_odd(x)),
        }
    }
}

/// `x` as float32, inexact values with an odd last bit: rounding the result to fewer bits is then rounding `x` itself.
/// By way of the nearest float32, a value just beside a tie would be taken for the tie.
fn to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    let back = f64::from(nearest);
    if back == x || nearest.to_bits() & 1 == 1 || x.is_nan() {
        nearest
    } else if back < x {
        nearest.next_up()
    } else {
        nearest.next_down()
    }
}

#[cfg(test)]
mod tests {
    use super::Precision::{Bf16, F16, Full};

    #[test]
    fn values_beside_a_tie_go_to_their_own_side() {
        let tiny = 2f64.powi(-40);
        // 1 + 2^-8 lies halfway between 1 and 1 + 2^-7, and float32 cannot tell it from its neighbours.
        let tie = 1.0 + 2f64.powi(-8);
        assert_eq!(Bf16.nearest(tie), 1.0);
        assert_eq!(Bf16.nearest(tie + tiny), 1.0 + 2f32.powi(-7));
        assert_eq!(Bf16.nearest(-tie - tiny), -1.0 - 2f32.powi(-7));
        // The tie above 1 + 2^-7 goes up to the even 1 + 2^-6, its lower neighbour down.
        let tie = 1.0 + 3.0 * 2f64.powi(-8);
        assert_eq!(Bf16.nearest(tie), 1.0 + 2f32.powi(-6));
        assert_eq!(Bf16.nearest(tie - tiny), 1.0 + 2f32.powi(-7));
        let tie = 1.0 + 2f64.powi(-11);
        assert_eq!(F16.nearest(tie), 1.0);
        assert_eq!(F16.nearest(tie + tiny), 1.0 + 2f32.powi(-10));
    }

    #[test]
    fn the_ends_of_the_range_are_kept() {
        for precision in [Full, Bf16, F16] {
            assert_eq!(precision.nearest(0.0), 0.0);
            assert!(precision.nearest(-0.0).is_sign_negative());
            assert_eq!(precision.nearest(1e300), f32::INFINITY);
            assert_eq!(precision.nearest(f64::NEG_INFINITY), f32::NEG_INFINITY);
            assert_eq!(precision.nearest(1e-300), 0.0);
            assert!(precision.nearest(f64::NAN).is_nan());
        }
        assert_eq!(F16.nearest(65_519.9), 65_504.0);
        assert_eq!(F16.nearest(65_520.0), f32::INFINITY);
        // Half of the smallest subnormal 2^-133 is a tie with zero; more than half is not.
        assert_eq!(Bf16.nearest(2f64.powi(-134)), 0.0);
        assert_eq!(Bf16.nearest(2f64.powi(-134) * 1.000_001), f32::from_bits(0x0001_0000));
    }
}
