//! Products of packed experts in exact integers, so that no order of summation, tier or thread changes a bit.
//!
//! With `c2 = 2 e2m1(code)` and `s512 = 512 e4m3fn(scale)` integers, and weights times a multiplier `m`:
//!
//! ```text
//! 4-bit activations of scale g:   S = sum_b s512(w_b) s512(a_b) sum_j c2(w_j) c2(a_j)
//!                                 y = bf16(f32(f32(S) 2^-20 f32(m g)))
//! 16-bit activations:             v_j = X_j 2^(emax - 134 - P),  S = sum_b s512(w_b) sum_j c2(w_j) X_j
//!                                 y = bf16(f32(f32(S) 2^(emax - 144 - P) m))
//! ```
//!
//! A 4-bit block of 16 has the scale `s = e4m3fn(amax / f32(6 g))` and the codes `e2m1(v / f32(s g))`, all zero when `s` is.
//! A 16-bit row is aligned to its largest exponent `emax` with `P` guard bits; what lies further below is rounded, ties to
//! even. An infinity or NaN in a 16-bit row makes every output NaN.

use perplexity_kernels::numeric::{e4m3fn_to_f32, f32_to_e2m1, f32_to_e4m3fn, round_bf16};
use rayon::prelude::*;

use crate::formats::FormatError;
use crate::formats::nvfp4_expert::{Geometry, Projection, UNIT, for_each_block};

/// `2 e2m1(code)`.
const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// Guard bits below the largest exponent of a 16-bit row.
const GUARD_BITS: i32 = 13;

/// `512 e4m3fn(word)` of a word without sign.
fn scaled_512(word: u8) -> i32 {
    let (exponent, fraction) = (word >> 3, i32::from(word & 7));
    match exponent {
        0 => fraction,
        _ => (8 + fraction) << (exponent - 1),
    }
}

/// A matrix of an expert, its codes and scales as integers.
#[derive(Debug, Clone)]
pub struct IntegerMatrix {
    columns: usize,
    /// `c2`, C order.
    codes: Vec<i8>,
    /// `s512`, one per 16 columns.
    scales: Vec<i32>,
}

impl IntegerMatrix {
    /// One matrix of the expert whose record is given.
    ///
    /// # Errors
    /// When a block scale is negative or not a number.
    pub fn unpack(geometry: &Geometry, record: &[u8], projection: Projection) -> Result<Self, FormatError> {
        let (rows, columns) = geometry.matrix(projection);
        let mut codes = vec![0; rows * columns];
        let mut scales = vec![0; rows * columns / UNIT];
        let mut negative = None;
        for row in 0..rows {
            let first = row * columns / UNIT;
            for_each_block(geometry, record, projection, row, |block, word, words| {
                if word & 0x80 != 0 {
                    negative = negative.or(Some((first + block, word)));
                }
                scales[first + block] = scaled_512(word & 0x7F);
                let codes = &mut codes[(first + block) * UNIT..][..UNIT];
                codes
                    .iter_mut()
                    .zip(words)
                    .for_each(|(c2, code)| *c2 = DOUBLED[usize::from(code)]);
            })?;
        }
        match negative {
            Some((index, word)) => Err(FormatError::InvalidWord {
                what: "scale",
                index: index as u64,
                word: word.into(),
            }),
            None => Ok(Self { columns, codes, scales }),
        }
    }

    /// Rows, one output each.
    pub fn rows(&self) -> usize {
        self.codes.len() / self.columns
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        self.codes.len() + size_of_val(&*self.scales)
    }
}

/// How the activations of routed experts are rounded before a product.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activations {
    /// Bfloat16, as they are.
    Sixteen,
    /// E2M1 codes in blocks of 16, under this scale.
    Four(f32),
}

/// A row of activations as integers.
#[derive(Debug, Clone, PartialEq, Eq)]
enum IntegerRow {
    Four { codes: Vec<i8>, scales: Vec<i32> },
    Sixteen { values: Vec<i32>, emax: i32 },
    NotFinite,
}

/// E4M3FN scale words and E2M1 codes of `row` (a multiple of 16 long) under the scale `g`.
pub fn quantise_four(row: &[f32], g: f32) -> (Vec<u8>, Vec<u8>) {
    let six_g = 6.0 * g;
    let (mut words, mut codes) = (Vec::with_capacity(row.len() / UNIT), Vec::with_capacity(row.len()));
    for block in row.chunks_exact(UNIT) {
        let amax = block.iter().fold(0.0f32, |amax, v| amax.max(v.abs()));
        let word = f32_to_e4m3fn(amax / six_g);
        let d = e4m3fn_to_f32(word) * g;
        words.push(word);
        codes.extend(block.iter().map(|v| if word == 0 { 0 } else { f32_to_e2m1(v / d) }));
    }
    (words, codes)
}

impl IntegerRow {
    fn new(row: &[f32], activations: Activations) -> Self {
        if row.iter().any(|v| !v.is_finite()) {
            return Self::NotFinite;
        }
        match activations {
            Activations::Four(g) => {
                let (words, codes) = quantise_four(row, g);
                Self::Four {
                    codes: codes.iter().map(|code| DOUBLED[usize::from(*code)]).collect(),
                    scales: words.iter().map(|word| scaled_512(*word)).collect(),
                }
            }
            Activations::Sixteen => {
                // Sign, exponent field and mantissa of a bfloat16.
                let parts = |v: &f32| {
                    let word = v.to_bits() >> 16;
                    let (field, fraction) = ((word >> 7 & 0xFF) as i32, (word & 0x7F) as i32);
                    let mantissa = if field == 0 { fraction } else { 128 | fraction };
                    (word >> 15 != 0, field.max(1), mantissa)
                };
                let emax = row.iter().map(|v| parts(v).1).max().unwrap_or(1);
                let values = row.iter().map(|v| {
                    let (negative, exponent, mantissa) = parts(v);
                    let x = shifted(i64::from(mantissa) << GUARD_BITS, (emax - exponent) as u32);
                    if negative { -x } else { x }
                });
                Self::Sixteen {
                    values: values.collect(),
                    emax,
                }
            }
        }
    }
}

/// `value / 2^shift`, ties to even; `value` below 2^22.
fn shifted(value: i64, shift: u32) -> i32 {
    if shift >= 24 {
        return 0;
    }
    let (floor, rest) = (value >> shift, value & ((1 << shift) - 1));
    let half = (1i64 << shift) / 2;
    let up = shift > 0 && (rest > half || (rest == half && floor & 1 == 1));
    (floor + i64::from(up)) as i32
}

/// One output, rounded to bfloat16: row `n` of `matrix`, whose multiplier is `m`, times `row`.
fn output(matrix: &IntegerMatrix, n: usize, m: f32, row: &IntegerRow, activations: Activations) -> f32 {
    let codes = &matrix.codes[n * matrix.columns..][..matrix.columns];
    let blocks = matrix.columns / UNIT;
    let scales = &matrix.scales[n * blocks..][..blocks];
    let codes = codes.as_chunks::<UNIT>().0.iter();
    match (row, activations) {
        (
            IntegerRow::Four {
                codes: row,
                scales: row_scales,
            },
            Activations::Four(g),
        ) => {
            let mut sum = 0i64;
            for ((w, a), (ws, rs)) in codes.zip(row.as_chunks::<UNIT>().0).zip(scales.iter().zip(row_scales)) {
                let block: i32 = w.iter().zip(a).map(|(w, a)| i32::from(*w) * i32::from(*a)).sum();
                sum += i64::from(block) * i64::from(*ws) * i64::from(*rs);
            }
            scaled(sum, -20, m * g)
        }
        (IntegerRow::Sixteen { values, emax }, _) => {
            let mut sum = 0i64;
            for ((w, x), ws) in codes.zip(values.as_chunks::<UNIT>().0).zip(scales) {
                let block: i32 = w.iter().zip(x).map(|(w, x)| i32::from(*w) * x).sum();
                sum += i64::from(block) * i64::from(*ws);
            }
            scaled(sum, emax - 144 - GUARD_BITS, m)
        }
        _ => f32::NAN,
    }
}

/// `bf16(f32(f32(sum) 2^exponent factor))`: in f64 the two products are exact, so that one rounding to f32 is left.
fn scaled(sum: i64, exponent: i32, factor: f32) -> f32 {
    round_bf16((f64::from(sum as f32) * 2f64.powi(exponent) * f64::from(factor)) as f32)
}

/// `rows` `[n, columns]` times `matrix`: `[n, matrix.rows()]`, bfloat16.
pub fn multiply(matrix: &IntegerMatrix, multiplier: f32, rows: &[f32], activations: Activations) -> Vec<f32> {
    let mut y = vec![0.0; rows.len() / matrix.columns * matrix.rows()];
    y.par_chunks_mut(matrix.rows())
        .zip(rows.par_chunks(matrix.columns))
        .for_each(|(y, row)| {
            let row = IntegerRow::new(row, activations);
            for (n, y) in y.iter_mut().enumerate() {
                *y = output(matrix, n, multiplier, &row, activations);
            }
        });
    y
}

/// An expert as integers: gate, up and down, with their multipliers.
#[derive(Debug, Clone)]
pub struct IntegerExpert {
    /// Gate, up, down.
    pub matrices: [IntegerMatrix; 3],
    /// Their multipliers.
    pub multipliers: [f32; 3],
}

impl IntegerExpert {
    /// `(SiLU(x gate^T) * (x up^T)) down^T` of `rows` `[n, hidden]`, rounded to bfloat16 after every product and after the
    /// activation; `scales` of 4-bit activations at the three inputs, or 16-bit activations.
    pub fn forward(&self, rows: &[f32], scales: Option<[f32; 3]>) -> Vec<f32> {
        let activations = |matrix: usize| scales.map_or(Activations::Sixteen, |g| Activations::Four(g[matrix]));
        let product = |matrix: usize, rows: &[f32]| {
            multiply(
                &self.matrices[matrix],
                self.multipliers[matrix],
                rows,
                activations(matrix),
            )
        };
        let (gate, up) = (product(0, rows), product(1, rows));
        let inner: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| round_bf16(silu(*g) * u)).collect();
        product(2, &inner)
    }
}

/// `x / (1 + e^-x)` as a fixed sequence of float32 operations, the same bits everywhere.
pub fn silu(x: f32) -> f32 {
    if x.is_nan() {
        return f32::NAN;
    }
    if x >= 0.0 {
        x / (1.0 + exp(-x))
    } else {
        let e = exp(x);
        (x * e) / (1.0 + e)
    }
}

/// `e^x`: `x = n ln 2 + r`, a Taylor polynomial of degree 7 in `r`, every operation rounded to float32; infinite above
/// the largest result, 0 below the smallest subnormal one.
fn exp(x: f32) -> f32 {
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    const LARGEST: f32 = 88.722_84;
    const SMALLEST: f32 = -103.972_084;
    const COEFFICIENTS: [f32; 8] = [
        1.0 / 5040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
    if x > LARGEST {
        return f32::INFINITY;
    }
    if x < SMALLEST {
        return 0.0;
    }
    let n = (x * LOG2_E + ROUND) - ROUND;
    let r = (-n).mul_add(LN2_LOW, (-n).mul_add(LN2_HIGH, x));
    let p = COEFFICIENTS[1..].iter().fold(COEFFICIENTS[0], |p, c| p.mul_add(r, *c));
    let n = n as i32;
    let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
    p * power(n / 2) * power(n - n / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_and_silu_have_the_canonical_bits() {
        assert_eq!(exp(1.0).to_bits(), 0x402D_F854);
        for (x, bits) in [
            (1.0, 0x3F3B_26A8),
            (-1.0, 0xBE89_B2B1),
            (3.5, 0x4059_6F1F),
            (-20.0, 0xB331_0D40),
        ] {
            assert_eq!(silu(x).to_bits(), bits, "silu({x}) = {}", silu(x));
        }
        assert!(silu(f32::NAN).is_nan());
        assert_eq!(exp(89.0), f32::INFINITY);
        assert_eq!(exp(-104.0), 0.0);
    }

    #[test]
    fn constants_are_the_stated_decimals() {
        // The nearest float32 of each of these decimals.
        for (text, value) in [
            ("1.44269502162933349609375", std::f32::consts::LOG2_E),
            ("0.693145751953125", 0.693_145_75),
            ("1.428606765330187045e-06", 1.428_606_8e-6),
            ("88.72283935546875", 88.722_84),
            ("-103.97208404541015625", -103.972_084),
        ] {
            assert_eq!(text.parse::<f32>().map(f32::to_bits), Ok(value.to_bits()), "{text}");
        }
    }

    #[test]
    fn four_bit_blocks_have_the_scales_and_codes_of_the_rule() {
        let row: Vec<f32> = (0..16).map(|j| (j as f32 - 7.5) * 0.25).collect();
        for (g, word) in [(1.0 / 256.0, 0x6A), (0.0117, 0x5D), (1.0, 0x2A)] {
            let (words, codes) = quantise_four(&row, g);
            assert_eq!(words, [word], "scale {g}");
            let doubled: Vec<i8> = codes.iter().map(|code| DOUBLED[usize::from(*code)]).collect();
            assert_eq!(doubled, [-12, -12, -8, -8, -6, -4, -2, -1, 1, 2, 4, 6, 8, 8, 12, 12]);
        }
        let mut tiny = [0.0; 16];
        tiny[5] = 1e-3;
        assert_eq!(quantise_four(&tiny, 0.5), (vec![0], vec![0; 16]));
    }

    #[test]
    fn sixteen_bit_rows_are_exact_within_the_guard_bits() {
        let row: Vec<f32> = (0..32).map(|j| round_bf16((j as f32 - 11.3) * 0.37)).collect();
        let IntegerRow::Sixteen { values, emax } = IntegerRow::new(&row, Activations::Sixteen) else {
            panic!("finite values")
        };
        for (v, x) in row.iter().zip(&values) {
            assert_eq!(f64::from(*v), f64::from(*x) * 2f64.powi(emax - 134 - GUARD_BITS));
        }
        // Half a unit of the last guard bit is a tie, which goes to the even side.
        assert_eq!(
            (shifted(3, 1), shifted(5, 1), shifted(6, 2), shifted(7, 0)),
            (2, 2, 2, 7)
        );
        let infinite = IntegerRow::new(&[f32::INFINITY; 16], Activations::Sixteen);
        assert_eq!(infinite, IntegerRow::NotFinite);
    }

    /// Against f64 products of decoded operands, which are exact at this size.
    #[test]
    fn products_are_the_rounded_exact_sums() {
        let (rows, columns) = (5usize, 48usize);
        let mut state = 9u32;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 16
        };
        let codes: Vec<u8> = (0..rows * columns).map(|_| (next() & 15) as u8).collect();
        let words: Vec<u8> = (0..rows * columns / UNIT).map(|_| (next() % 0x7F) as u8).collect();
        let matrix = IntegerMatrix {
            columns,
            codes: codes.iter().map(|code| DOUBLED[usize::from(*code)]).collect(),
            scales: words.iter().map(|word| scaled_512(*word)).collect(),
        };
        let x: Vec<f32> = (0..columns).map(|_| round_bf16(next() as f32 / 9000.0 - 3.6)).collect();
        let (m, g) = (0.031f32, 0.0071f32);
        let (x_words, x_codes) = quantise_four(&x, g);
        let weight = |n: usize, k: usize| {
            let i = n * columns + k;
            f64::from(DOUBLED[usize::from(codes[i])]) / 2.0 * f64::from(e4m3fn_to_f32(words[i / UNIT]))
        };
        let four =
            |k: usize| f64::from(DOUBLED[usize::from(x_codes[k])]) / 2.0 * f64::from(e4m3fn_to_f32(x_words[k / UNIT]));
        let a4 = multiply(&matrix, m, &x, Activations::Four(g));
        let a16 = multiply(&matrix, m, &x, Activations::Sixteen);
        for n in 0..rows {
            let exact: f64 = (0..columns).map(|k| weight(n, k) * four(k)).sum();
            assert_eq!(a4[n], round_bf16((f64::from(exact as f32) * f64::from(m * g)) as f32));
            let exact: f64 = (0..columns).map(|k| weight(n, k) * f64::from(x[k])).sum();
            assert_eq!(a16[n], round_bf16((f64::from(exact as f32) * f64::from(m)) as f32));
        }
    }
}
