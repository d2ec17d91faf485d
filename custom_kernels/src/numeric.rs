//! Scalar words of 4, 8 and 16 bits and their conversions to and from f32.
//!
//! | word | sign, exponent, fraction bits | bias | largest | non-finite |
//! |---|---|---|---|---|
//! | bf16 | 1, 8, 7 | 127 | 3.39e38 | infinities, NaN |
//! | f16 | 1, 5, 10 | 15 | 65504 | infinities, NaN |
//! | E4M3FN | 1, 4, 3 | 7 | 448 | NaN (`0x7F`, `0xFF`), no infinity |
//! | E2M1 | 1, 2, 1 | 1 | 6 | none |
//!
//! Every conversion to a word rounds to nearest, ties to the even word. E4M3FN and E2M1 saturate; the 16-bit formats
//! overflow to infinity.

/// Largest finite E4M3FN value.
pub const E4M3FN_MAX: f32 = 448.0;
/// Word of [`E4M3FN_MAX`].
pub const E4M3FN_MAX_WORD: u8 = 0x7E;
/// The positive E4M3FN NaN; with the sign bit set it is the negative one.
pub const E4M3FN_NAN_WORD: u8 = 0x7F;
/// Largest E2M1 value.
pub const E2M1_MAX: f32 = 6.0;

/// Values of the 16 E2M1 words; bit 3 is the sign.
pub const E2M1_VALUES: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// Values of the 256 E4M3FN words.
pub static E4M3FN_VALUES: [f32; 256] = e4m3fn_values();

/// Values of both E2M1 words of a byte, low nibble first.
pub static E2M1_PAIRS: [[f32; 2]; 256] = e2m1_pairs();

const fn e4m3fn_values() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut word = 0;
    while word < 256 {
        table[word] = e4m3fn_reference(word as u8);
        word += 1;
    }
    table
}

const fn e2m1_pairs() -> [[f32; 2]; 256] {
    let mut table = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = [E2M1_VALUES[byte & 15], E2M1_VALUES[byte >> 4]];
        byte += 1;
    }
    table
}

/// Value of an E4M3FN word by its definition: `m 2^-9` for exponent 0, else `(1 + m/8) 2^(e-7)`.
const fn e4m3fn_reference(word: u8) -> f32 {
    let sign = (word as u32 >> 7) << 31;
    let exponent = (word >> 3) & 15;
    let fraction = word & 7;
    if exponent == 15 && fraction == 7 {
        return f32::from_bits(sign | 0x7FC0_0000);
    }
    // 2^-9 is the unit of the subnormals; both products below are exact.
    let magnitude = if exponent == 0 {
        fraction as f32 * f32::from_bits((127 - 9) << 23)
    } else {
        (8 + fraction) as f32 * f32::from_bits((127 - 10 + exponent as u32) << 23)
    };
    f32::from_bits(magnitude.to_bits() | sign)
}

/// Value of a bf16 word: the f32 whose upper half it is (NaN payloads included).
#[inline]
pub const fn bf16_to_f32(word: u16) -> f32 {
    f32::from_bits((word as u32) << 16)
}

/// Nearest bf16 word, ties to even; a NaN stays a NaN of the same sign.
#[inline]
pub const fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if bits & 0x7FFF_FFFF > 0x7F80_0000 {
        // The quiet bit keeps a payload that lies only in the lower half from turning into an infinity.
        return (bits >> 16) as u16 | 0x0040;
    }
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// `value` rounded to bf16 and widened again.
#[inline]
pub const fn round_bf16(value: f32) -> f32 {
    bf16_to_f32(f32_to_bf16(value))
}

/// Value of an f16 word.
#[inline]
pub fn f16_to_f32(word: u16) -> f32 {
    half::f16::from_bits(word).to_f32()
}

/// Nearest f16 word, ties to even, infinity from 65520 up; a NaN stays a NaN.
#[inline]
pub fn f32_to_f16(value: f32) -> u16 {
    half::f16::from_f32(value).to_bits()
}

/// Value of an E4M3FN word.
#[inline]
pub fn e4m3fn_to_f32(word: u8) -> f32 {
    E4M3FN_VALUES[word as usize]
}

/// Nearest E4M3FN word, ties to even, saturating at ±448 (infinities too); a NaN gives the NaN word of its sign.
#[inline]
pub fn f32_to_e4m3fn(value: f32) -> u8 {
    // 2^-6, below which words step by 2^-9.
    const SMALLEST_NORMAL: f32 = 0.015625;
    let bits = value.to_bits();
    let sign = ((bits >> 24) & 0x80) as u8;
    let magnitude = f32::from_bits(bits & 0x7FFF_FFFF);
    if magnitude.is_nan() {
        return sign | E4M3FN_NAN_WORD;
    }
    if magnitude >= E4M3FN_MAX {
        return sign | E4M3FN_MAX_WORD;
    }
    if magnitude < SMALLEST_NORMAL {
        // Scaling by 512 is exact; 8 (the smallest normal) is the right word when it rounds up.
        return sign | (magnitude * 512.0).round_ties_even() as u8;
    }
    // Keep 3 of 23 fraction bits, then move the exponent bias from 127 to 7.
    let bits = magnitude.to_bits();
    let rounded = (bits + 0x7_FFFF + ((bits >> 20) & 1)) >> 20;
    sign | (rounded - ((127 - 7) << 3)) as u8
}

/// Value of an E2M1 word; only the low four bits count.
#[inline]
pub fn e2m1_to_f32(word: u8) -> f32 {
    E2M1_VALUES[(word & 15) as usize]
}

/// Nearest E2M1 word, ties to the even word, saturating at ±6; keeps the sign of zeros. A NaN gives a zero: callers
/// refuse NaN before they quantise.
#[inline]
pub fn f32_to_e2m1(value: f32) -> u8 {
    let magnitude = value.abs();
    // Midpoints between neighbours; a tie belongs to the even word.
    let index = u8::from(magnitude > 0.25)
        + u8::from(magnitude >= 0.75)
        + u8::from(magnitude > 1.25)
        + u8::from(magnitude >= 1.75)
        + u8::from(magnitude > 2.5)
        + u8::from(magnitude >= 3.5)
        + u8::from(magnitude > 5.0);
    index | (u8::from(value.is_sign_negative()) << 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nearest of `candidates` (value, word) to `value` in f64, ties to the even word.
    fn nearest(value: f32, candidates: &[(f32, u16)]) -> u16 {
        let mut best = (f64::INFINITY, 0u16);
        for &(candidate, word) in candidates {
            let distance = (f64::from(value) - f64::from(candidate)).abs();
            if distance < best.0 || (distance == best.0 && word % 2 == 0) {
                best = (distance, word);
            }
        }
        best.1
    }

    /// Every value, every midpoint and their f32 neighbours, for sorted non-negative `values`.
    fn probes(values: &[f32]) -> Vec<f32> {
        let mut probes = Vec::new();
        for pair in values.windows(2) {
            for centre in [
                pair[0],
                ((f64::from(pair[0]) + f64::from(pair[1])) / 2.0) as f32,
                pair[1],
            ] {
                probes.extend([centre, centre.next_up()]);
                if centre > 0.0 {
                    probes.push(centre.next_down());
                }
            }
        }
        probes
    }

    #[test]
    fn e4m3fn_landmarks() {
        let landmarks = [
            (0x00, 0.0),
            (0x01, 0.001953125),
            (0x08, 0.015625),
            (0x38, 1.0),
            (0x3C, 1.5),
            (0x7E, 448.0),
            (0xC0, -2.0),
        ];
        for (word, value) in landmarks {
            assert_eq!(e4m3fn_to_f32(word), value, "{word:#x}");
        }
        assert!(e4m3fn_to_f32(0x7F).is_nan() && e4m3fn_to_f32(0xFF).is_nan());
        assert_eq!(e4m3fn_to_f32(0x80).to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn every_e4m3fn_word_survives_a_round_trip() {
        for word in 0..=255u8 {
            assert_eq!(f32_to_e4m3fn(e4m3fn_to_f32(word)), word);
        }
    }

    #[test]
    fn e4m3fn_rounds_to_the_nearest_even_word_around_every_midpoint() {
        let words: Vec<(f32, u16)> = (0..=0x7E).map(|word| (e4m3fn_to_f32(word as u8), word)).collect();
        let values: Vec<f32> = words.iter().map(|word| word.0).collect();
        for probe in probes(&values) {
            let expected = nearest(probe, &words) as u8;
            assert_eq!(f32_to_e4m3fn(probe), expected, "{probe}");
            assert_eq!(f32_to_e4m3fn(-probe), expected | 0x80, "-{probe}");
        }
    }

    #[test]
    fn e4m3fn_saturates_and_keeps_nan_and_tiny_negatives() {
        assert_eq!(f32_to_e4m3fn(f32::INFINITY), 0x7E);
        assert_eq!(f32_to_e4m3fn(-1e9), 0xFE);
        assert_eq!(f32_to_e4m3fn(f32::NAN) & 0x7F, 0x7F);
        assert_eq!(f32_to_e4m3fn(-1e-30), 0x80);
        assert_eq!(f32_to_e4m3fn(-0.0), 0x80);
    }

    #[test]
    fn e2m1_intervals_are_those_of_the_format() {
        // Interval ends as in the format's table: closed where the tie belongs to the word.
        let table = [
            (0.0, 0),
            (0.25, 0),
            (0.75, 2),
            (1.25, 2),
            (1.75, 4),
            (2.5, 4),
            (3.5, 6),
            (5.0, 6),
            (0.26, 1),
            (0.74, 1),
            (1.26, 3),
            (1.74, 3),
            (2.51, 5),
            (3.49, 5),
            (5.01, 7),
            (1e30, 7),
        ];
        for (value, word) in table {
            assert_eq!(f32_to_e2m1(value), word, "{value}");
            assert_eq!(f32_to_e2m1(-value), word | 8, "-{value}");
        }
    }

    #[test]
    fn e2m1_rounds_to_the_nearest_even_word_around_every_midpoint() {
        let words: Vec<(f32, u16)> = (0..8).map(|word| (e2m1_to_f32(word as u8), word)).collect();
        let values: Vec<f32> = words.iter().map(|word| word.0).collect();
        for probe in probes(&values) {
            assert_eq!(u16::from(f32_to_e2m1(probe)), nearest(probe, &words), "{probe}");
        }
        for word in 0..16 {
            assert_eq!(f32_to_e2m1(e2m1_to_f32(word)), word);
        }
    }

    #[test]
    fn pair_tables_hold_the_low_nibble_first() {
        assert_eq!(E2M1_PAIRS[0xD7], [6.0, -3.0]);
        for byte in 0..=255u8 {
            assert_eq!(
                E2M1_PAIRS[byte as usize].map(f32::to_bits),
                [byte, byte >> 4].map(|w| e2m1_to_f32(w).to_bits())
            );
        }
    }

    #[test]
    fn every_bf16_word_survives_a_round_trip_and_midpoints_go_to_even() {
        for word in 0..=u16::MAX {
            let value = bf16_to_f32(word);
            if value.is_nan() {
                assert!(bf16_to_f32(f32_to_bf16(value)).is_nan());
                continue;
            }
            assert_eq!(f32_to_bf16(value), word);
            if value.is_finite() {
                let midpoint = f32::from_bits(value.to_bits() + 0x8000);
                assert_eq!(f32_to_bf16(midpoint), word + (word & 1), "{word:#x}");
                assert_eq!(f32_to_bf16(f32::from_bits(midpoint.to_bits() - 1)), word, "{word:#x}");
                assert_eq!(
                    f32_to_bf16(f32::from_bits(midpoint.to_bits() + 1)),
                    word + 1,
                    "{word:#x}"
                );
            }
        }
        // A NaN whose payload lies in the dropped half must not become an infinity.
        assert!(bf16_to_f32(f32_to_bf16(f32::from_bits(0x7F80_0001))).is_nan());
    }

    #[test]
    fn every_f16_word_survives_a_round_trip_and_midpoints_go_to_even() {
        let words: Vec<(f32, u16)> = (0..0x7C00).map(|word| (f16_to_f32(word), word)).collect();
        for pair in words.windows(2) {
            let ((low, word), (high, next)) = (pair[0], pair[1]);
            assert_eq!(f32_to_f16(low), word);
            let midpoint = (low + high) / 2.0; // exact: f32 has 13 more fraction bits
            assert_eq!(f32_to_f16(midpoint), if word % 2 == 0 { word } else { next });
            assert_eq!(f32_to_f16(midpoint.next_down()), word);
            assert_eq!(f32_to_f16(midpoint.next_up()), next);
        }
        assert_eq!(f16_to_f32(0x0001), 2f32.powi(-24));
        assert_eq!(f32_to_f16(65519.0), 0x7BFF);
        assert_eq!(f32_to_f16(65520.0), 0x7C00);
        assert_eq!(f32_to_f16(2f32.powi(-25)), 0); // tie between 0 and 2^-24 goes to even
    }
}
