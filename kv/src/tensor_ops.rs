//! Steps of the codecs in burn tensor operations on float32, equal to the host steps bit for bit.
//!
//! Only operations with one correctly rounded result are used (add, multiply, divide, square root, comparisons, integer
//! arithmetic, gathers), so the results do not depend on the backend: no bit casts, no logarithms, no reductions of
//! unspecified order. Stored words are integer tensors; small floats are taken apart by exact scaling with powers of two.

use crate::arith::NAN_SCALE;
use burn::tensor::{Bool, Int, Tensor, TensorData, backend::Backend};
use perplexity_kernels::numeric::{E2M1_VALUES, E4M3FN_MAX, E4M3FN_NAN_WORD, E4M3FN_VALUES};

/// Nearest integer, ties to even, for |x| < 2^22. Backends differ in how their `round` treats ties.
pub fn rne<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    const MAGIC: f32 = 12_582_912.0;
    (x + MAGIC) - MAGIC
}

/// Largest magnitude over the last dimension, `[.., n]` to `[..]`; NaN if any value is NaN.
pub fn absmax<B: Backend>(x: Tensor<B, 4>) -> Tensor<B, 3> {
    let nan = is_nan(&x);
    let largest = x.abs().mask_fill(nan.clone(), 0.0).max_dim(3);
    let any_nan = nan.int().max_dim(3).greater_elem(0);
    largest.mask_fill(any_nan, f32::NAN).squeeze_dim(3)
}

/// `x` limited to [low, high]; NaN stays NaN.
pub fn clamp<B: Backend, const D: usize>(x: Tensor<B, D>, low: f32, high: f32) -> Tensor<B, D> {
    let (below, above) = (x.clone().lower_elem(low), x.clone().greater_elem(high));
    x.mask_fill(below, low).mask_fill(above, high)
}

/// `1 / x` by division, correctly rounded: burn-ndarray's vector `recip` is an approximation.
pub fn reciprocal<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    x.ones_like() / x
}

/// `1 / scale`, 0 where the scale is zero or NaN.
pub fn code_factor<B: Backend, const D: usize>(scale: Tensor<B, D>) -> Tensor<B, D> {
    let positive = scale.clone().greater_elem(0.0);
    reciprocal(scale).mask_fill(positive.bool_not(), 0.0)
}

/// `x * factor`, 0 where the factor is 0 whatever `x` is; `factor` has last dimension 1.
pub fn scaled<B: Backend, const D: usize>(x: Tensor<B, D>, factor: Tensor<B, D>) -> Tensor<B, D> {
    let shape = x.dims();
    let zero = factor.clone().equal_elem(0.0).expand(shape);
    (x * factor).mask_fill(zero, 0.0)
}

/// Values of `table` at `codes`.
pub fn lookup<B: Backend, const D: usize>(codes: Tensor<B, D, Int>, table: &[f32]) -> Tensor<B, D> {
    let shape = codes.shape();
    let table = Tensor::<B, 1>::from_data(TensorData::new(table.to_vec(), [table.len()]), &codes.device());
    table.select(0, codes.reshape([shape.num_elements()])).reshape(shape)
}

/// `2^exponent` for exponents in [-149, 127].
pub fn pow2<B: Backend, const D: usize>(exponent: Tensor<B, D, Int>) -> Tensor<B, D> {
    const SMALLEST: i64 = -149;
    let table: Vec<f32> = (SMALLEST..=127).map(|e| 2f64.powi(e as i32) as f32).collect();
    lookup(exponent - SMALLEST, &table)
}

/// Words of a small float format for `x >= 0`, nearest with ties to the even word: `fraction` bits, normal exponents
/// `smallest..=largest`, overflow to `max_word`. The caller deals with NaN and the sign.
pub fn encode_minifloat<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    fraction: i32,
    smallest: i32,
    largest: i32,
    max_word: i64,
) -> Tensor<B, D, Int> {
    let overflow = x.clone().greater_equal_elem(2f64.powi(largest + 1) as f32);
    // Normalise to t in [1, 2) (or zero): x = t * 2^exponent, every step an exact scaling.
    let mut t = x.mask_fill(overflow.clone(), 0.0);
    let mut exponent = t.zeros_like().int();
    for k in [64, 32, 16, 8, 4, 2, 1] {
        let large = t.clone().greater_equal_elem(2f32.powi(k));
        t = t.clone().mask_where(large.clone(), t * 2f32.powi(-k));
        exponent = exponent + large.int() * k;
    }
    for k in [64, 32, 16, 8, 4, 2, 1] {
        let small = t.clone().lower_elem(2f32.powi(1 - k));
        t = t.clone().mask_where(small.clone(), t * 2f32.powi(k));
        exponent = exponent - small.int() * k;
    }
    let normal = exponent.clone().clamp_min(smallest);
    // Subnormals lose their leading bits here, exactly unless they are rounded next.
    let significand = t * pow2(exponent - normal.clone()) * 2f32.powi(fraction);
    let word = (normal - smallest) * (1i64 << fraction) + rne(significand).int();
    word.clamp_max(max_word).mask_fill(overflow, max_word)
}

/// Where `x` is NaN, by ordered comparisons: burn's own test asks whether a value differs from itself, which vector kernels
/// of its backends do not all answer alike.
pub fn is_nan<B: Backend, const D: usize>(x: &Tensor<B, D>) -> Tensor<B, D, Bool> {
    let ordered = x.clone().greater_equal_elem(0.0).bool_or(x.clone().lower_elem(0.0));
    ordered.bool_not()
}

/// Adds `bit` to the words of negative values, negative zero included.
pub fn with_sign_bit<B: Backend, const D: usize>(
    words: Tensor<B, D, Int>,
    values: &Tensor<B, D>,
    bit: i64,
) -> Tensor<B, D, Int> {
    words + is_negative(values).int() * bit
}

/// The sign bit of values that are not NaN: only a negative zero has reciprocal minus infinity.
fn is_negative<B: Backend, const D: usize>(values: &Tensor<B, D>) -> Tensor<B, D, Bool> {
    let negative_zero = values
        .clone()
        .equal_elem(0.0)
        .bool_and(reciprocal(values.clone()).lower_elem(0.0));
    values.clone().lower_elem(0.0).bool_or(negative_zero)
}

/// FP16 words of scales (`x >= 0` or NaN).
pub fn encode_f16<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D, Int> {
    let nan = is_nan(&x);
    encode_minifloat(x.mask_fill(nan.clone(), 0.0), 10, -14, 15, 0x7C00).mask_fill(nan, i64::from(NAN_SCALE))
}

/// FP16 words of values of either sign; NaN gives the positive quiet NaN.
pub fn encode_f16_signed<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D, Int> {
    let nan = is_nan(&x);
    let x = x.mask_fill(nan.clone(), 0.0);
    let words = with_sign_bit(encode_minifloat(x.clone().abs(), 10, -14, 15, 0x7C00), &x, 1 << 15);
    words.mask_fill(nan, i64::from(NAN_SCALE))
}

/// Values of FP16 words.
pub fn decode_f16<B: Backend, const D: usize>(words: Tensor<B, D, Int>) -> Tensor<B, D> {
    let exponent = (words.clone() / 1024).remainder_scalar(32);
    let fraction = words.clone().remainder_scalar(1024).float();
    let normal = exponent.clone().greater_elem(0);
    let significand = fraction.clone().mask_where(normal, fraction.clone() + 1024.0);
    let special = exponent.clone().equal_elem(31);
    let magnitude = (significand * pow2(exponent.clamp_min(1) - 25))
        .mask_fill(special.clone(), f32::INFINITY)
        .mask_fill(special.bool_and(fraction.greater_elem(0.0)), f32::NAN);
    magnitude
        .clone()
        .mask_where(words.greater_equal_elem(1 << 15), -magnitude)
}

/// E4M3FN words, saturating; NaN gives the positive NaN word.
pub fn encode_e4m3<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D, Int> {
    let nan = is_nan(&x);
    let x = x.mask_fill(nan.clone(), 0.0);
    let magnitude = clamp(x.clone().abs(), 0.0, E4M3FN_MAX);
    with_sign_bit(encode_minifloat(magnitude, 3, -6, 8, 0x7E), &x, 0x80).mask_fill(nan, i64::from(E4M3FN_NAN_WORD))
}

/// Values of E4M3FN words.
pub fn decode_e4m3<B: Backend, const D: usize>(words: Tensor<B, D, Int>) -> Tensor<B, D> {
    lookup(words, &E4M3FN_VALUES)
}

/// E2M1 words, saturating; NaN gives word 0.
pub fn encode_e2m1<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D, Int> {
    let nan = is_nan(&x);
    let x = x.mask_fill(nan, 0.0);
    let magnitude = x.clone().abs();
    // Midpoints between neighbours; a tie belongs to the even word.
    let word = count_above(magnitude.clone(), &[0.25, 1.25, 2.5, 5.0]) + count_at_least(magnitude, &[0.75, 1.75, 3.5]);
    with_sign_bit(word, &x, 8)
}

/// Values of E2M1 words.
pub fn decode_e2m1<B: Backend, const D: usize>(words: Tensor<B, D, Int>) -> Tensor<B, D> {
    lookup(words, &E2M1_VALUES)
}

/// Number of thresholds strictly below each value.
pub fn count_above<B: Backend, const D: usize>(x: Tensor<B, D>, thresholds: &[f32]) -> Tensor<B, D, Int> {
    let above = |threshold: &f32| x.clone().greater_elem(*threshold).int();
    thresholds
        .iter()
        .map(above)
        .reduce(|a, b| a + b)
        .expect("at least one threshold")
}

/// Number of thresholds at or below each value.
pub fn count_at_least<B: Backend, const D: usize>(x: Tensor<B, D>, thresholds: &[f32]) -> Tensor<B, D, Int> {
    let reached = |threshold: &f32| x.clone().greater_equal_elem(*threshold).int();
    thresholds
        .iter()
        .map(reached)
        .reduce(|a, b| a + b)
        .expect("at least one threshold")
}

/// Sum over the last dimension in index order, `[.., n]` to `[..]`.
pub fn sum_in_order<B: Backend>(x: Tensor<B, 4>) -> Tensor<B, 3> {
    let terms = (0..x.dims()[3]).map(|i| x.clone().narrow(3, i, 1));
    terms
        .reduce(|sum, term| sum + term)
        .expect("at least one term")
        .squeeze_dim(3)
}

/// Index of the smallest value of each row, the first on a tie: `[rows, n]` to `[rows, 1]`.
pub fn first_argmin<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2, Int> {
    let [rows, n] = x.dims();
    let smallest = x.clone().min_dim(1);
    let index = Tensor::<B, 1, Int>::arange(0..n as i64, &x.device())
        .unsqueeze::<2>()
        .expand([rows, n]);
    index
        .mask_fill(x.equal(smallest.expand([rows, n])).bool_not(), n as i64)
        .min_dim(1)
}

/// Sum of a power-of-two number of columns: column l takes column l + half, half = n/2, .., 1. `[rows, n]` to `[rows, 1]`.
pub fn butterfly_sum<B: Backend>(mut lanes: Tensor<B, 2>) -> Tensor<B, 2> {
    let mut half = lanes.dims()[1] / 2;
    while half > 0 {
        lanes = lanes.clone().narrow(1, 0, half) + lanes.narrow(1, half, half);
        half /= 2;
    }
    lanes
}

/// `a * b + c` with one rounding, from float32 operations: the product's error (Veltkamp and Dekker) and the sum's
/// (Knuth) are carried exactly and folded in last. Wrong only where the rest of the rest decides a tie of ties, 2^-48
/// of the result.
pub fn fma<B: Backend, const D: usize>(a: Tensor<B, D>, b: Tensor<B, D>, c: Tensor<B, D>) -> Tensor<B, D> {
    let split = |x: &Tensor<B, D>| {
        let scaled = x.clone() * 4097.0;
        let high = scaled.clone() - (scaled - x.clone());
        (high.clone(), x.clone() - high)
    };
    let two_sum = |x: Tensor<B, D>, y: Tensor<B, D>| {
        let sum = x.clone() + y.clone();
        let part = sum.clone() - x.clone();
        let rest = (x - (sum.clone() - part.clone())) + (y - part);
        (sum, rest)
    };
    let product = a.clone() * b.clone();
    let ((ah, al), (bh, bl)) = (split(&a), split(&b));
    let error = ((ah.clone() * bh.clone() - product.clone()) + ah * bl.clone() + al.clone() * bh) + al * bl;
    let (sum, rest) = two_sum(c, product);
    let (rest, tail) = two_sum(rest, error);
    let (sum, rest) = two_sum(sum, rest);
    sum + (rest + tail)
}

/// Sum of squares of 256-value rows in the host's order: `[rows, 256]` to `[rows, 1]`.
pub fn sum_of_squares<B: Backend>(y: Tensor<B, 2>) -> Tensor<B, 2> {
    let lanes = (0..8).map(|k| y.clone().narrow(1, 32 * k, 32));
    let lanes = lanes.fold(None, |sum, lane| {
        Some(match sum {
            None => lane.clone() * lane,
            Some(sum) => fma(lane.clone(), lane, sum),
        })
    });
    butterfly_sum(lanes.expect("eight parts"))
}

/// `<y, c>` of 256-value rows in the host's order: `[rows, 256]` to `[rows, 1]`.
pub fn word_dot<B: Backend>(y: Tensor<B, 2>, c: Tensor<B, 2>) -> Tensor<B, 2> {
    let [rows, _] = y.dims();
    let (y, c): (Tensor<B, 3>, Tensor<B, 3>) = (y.reshape([rows, 32, 8]), c.reshape([rows, 32, 8]));
    let words = (0..8).fold(None, |sum, j| {
        let (y, c) = (y.clone().narrow(2, j, 1), c.clone().narrow(2, j, 1));
        Some(match sum {
            None => y * c,
            Some(sum) => fma(y, c, sum),
        })
    });
    butterfly_sum(words.expect("eight coordinates").reshape([rows, 32]))
}

/// Dot product of 64-value rows in the host's order, columns i and i + 32 first: `[rows, 64]` to `[rows, 1]`.
pub fn pair_dot<B: Backend>(a: Tensor<B, 2>, b: Tensor<B, 2>) -> Tensor<B, 2> {
    let products = a * b;
    butterfly_sum(products.clone().narrow(1, 0, 32) + products.narrow(1, 32, 32))
}

/// FP16 words of `energy / projection`, 0 where the projection is not positive.
pub fn unbiased_scale<B: Backend>(energy: Tensor<B, 2>, projection: Tensor<B, 2>) -> Tensor<B, 2, Int> {
    let positive = projection.clone().greater_elem(0.0);
    encode_f16((energy / projection).mask_fill(positive.bool_not(), 0.0))
}

/// Cuts entries `[blocks, kv_heads, n + m]` into planes of `n` and `m`.
pub fn split_entries<B: Backend>(entries: Tensor<B, 3, Int>, counts: [usize; 2]) -> [Tensor<B, 3, Int>; 2] {
    [
        entries.clone().narrow(2, 0, counts[0]),
        entries.narrow(2, counts[0], counts[1]),
    ]
}
