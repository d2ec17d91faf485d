//! Rows of activations as a low-precision product sees them.
//!
//! With `x` a row or a group of it and `a = max|x|`; every step is one float32 operation, roundings go to the nearest value,
//! ties to even, saturating:
//!
//! | format | group | scale | code | value |
//! |---|---|---|---|---|
//! | FP8 | the row | `s = a / 448` | `c = E4M3(x * (1 / s))` | `c * s` |
//! | NVFP4, engine | 16 | `s = E4M3((d * a) / 6)` | `c = E2M1((x * d) / s)` | `c * s / d` |
//! | NVFP4, ModelOpt | 16 | `s = E4M3(a / (6 * g))`, `g = 1 / d` | `c = E2M1(x / (s * g))` | `c * (s * g)` |
//! | INT8 | 64 | `s = a / 127` | `c = clamp(round(x / s), -127, 127)` | `c * s` |
//!
//! `d` is the divisor of the input, fixed beforehand. A group of scale 0 is all zeros, and so is an FP8 row whose `1 / s` is
//! not finite. ModelOpt's own quantiser replaces a step `s * g` below 1e-5 by 1; engines do not, and neither does this. A
//! group with a value that is not finite keeps that value from being taken for a number: it becomes NaN.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;
#[cfg(any(feature = "ndarray", feature = "flex"))]
pub mod host;

use burn::tensor::{Tensor, backend::Backend};

use crate::numeric::{E2M1_MAX, E4M3FN_MAX, f32_to_e4m3fn};
use crate::ops::widen;

/// Largest E4M3 value.
pub const E4M3_MAX: f32 = E4M3FN_MAX;
/// Inputs that share an NVFP4 scale.
pub const NVFP4_GROUP: usize = 16;
/// Inputs that share an INT8 scale.
pub const INT8_GROUP: usize = 64;
/// Largest INT8 code; -128 is not used.
pub const INT8_MAX: f32 = 127.0;

/// How a row of activations is narrowed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ActivationFormat {
    /// E4M3 codes, a float32 scale per row.
    Fp8,
    /// E2M1 codes, an E4M3 scale per 16 values, one divisor for all rows.
    Nvfp4 {
        /// Finite and positive.
        divisor: f32,
        /// The order of operations.
        rounding: Nvfp4Rounding,
    },
    /// 8-bit integers, a float32 scale per 64 values.
    Int8,
}

/// The order of operations of an NVFP4 quantiser.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Nvfp4Rounding {
    /// Multiplies by the divisor.
    #[default]
    Engine,
    /// Divides by its reciprocal, ModelOpt's input scale.
    ModelOpt,
}

/// `x` `[batch, tokens, width]` as `format` represents it, in float32.
pub fn reference<B: Backend>(x: Tensor<B, 3>, format: ActivationFormat) -> Tensor<B, 3> {
    let x = widen(x);
    let width = x.dims()[2];
    match format {
        ActivationFormat::Fp8 => by_group(x, width, |x, a| {
            let scale = a / E4M3_MAX;
            let inverse = scale.ones_like() / scale.clone();
            let dead = inverse.clone().equal_elem(f32::INFINITY);
            let value = minifloat(x * inverse, 3, -6, E4M3_MAX) * scale;
            zero_where(value, dead)
        }),
        ActivationFormat::Nvfp4 { divisor, rounding } => by_group(x, NVFP4_GROUP, |x, a| {
            let word = |x| minifloat(x, 3, -6, E4M3_MAX);
            let (value, scale) = match rounding {
                Nvfp4Rounding::Engine => {
                    let scale = word((a * divisor) / E2M1_MAX);
                    let code = minifloat((x * divisor) / scale.clone(), 1, 0, E2M1_MAX);
                    ((code * scale.clone()) / divisor, scale)
                }
                Nvfp4Rounding::ModelOpt => {
                    let g = 1.0 / divisor;
                    let scale = word(a / (E2M1_MAX * g));
                    let step = scale.clone() * g;
                    (minifloat(x / step.clone(), 1, 0, E2M1_MAX) * step, scale)
                }
            };
            zero_where(value, scale.equal_elem(0.0))
        }),
        ActivationFormat::Int8 => by_group(x, INT8_GROUP, |x, a| {
            let scale = a / INT8_MAX;
            let dead = scale.clone().equal_elem(0.0);
            let code = clamp(nearest(x / scale.clone()), INT8_MAX);
            zero_where(code * scale, dead)
        }),
    }
}

/// Applies `quantize` to the values `[.., group]` of each group and their largest magnitude `[.., 1]`.
fn by_group<B: Backend>(
    x: Tensor<B, 3>,
    group: usize,
    quantize: impl FnOnce(Tensor<B, 4>, Tensor<B, 4>) -> Tensor<B, 4>,
) -> Tensor<B, 3> {
    let [batch, tokens, width] = x.dims();
    let padded = width.next_multiple_of(group);
    let x = if padded == width {
        x
    } else {
        let padding = Tensor::zeros([batch, tokens, padded - width], &x.device());
        Tensor::cat(vec![x, padding], 2)
    };
    let x = x.reshape([batch, tokens, padded / group, group]);
    let largest = x.clone().abs().max_dim(3);
    // Zero for finite values, NaN for all others.
    let not_finite = x.clone() - x.clone();
    let y = quantize(x, largest) + not_finite;
    y.reshape([batch, tokens, padded]).narrow(2, 0, width)
}

/// `x` on the grid of a small float: `fraction` bits, normal exponents from `smallest` on, magnitudes up to `max`.
fn minifloat<B: Backend, const D: usize>(x: Tensor<B, D>, fraction: i32, smallest: i32, max: f32) -> Tensor<B, D> {
    let x = clamp(x, max);
    let size = x.clone().abs();
    // The distance of neighbours doubles with every power of two.
    let mut step = size.ones_like() * 2f32.powi(smallest - fraction);
    let mut power = 2f32.powi(smallest + 1);
    while power <= max {
        step = step
            .clone()
            .mask_where(size.clone().greater_equal_elem(power), step * 2.0);
        power *= 2.0;
    }
    nearest(x / step.clone()) * step
}

/// The nearest integer, ties to even, for |x| below 2^22; backends differ in how their `round` treats ties.
fn nearest<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    const MAGIC: f32 = 12_582_912.0;
    (x + MAGIC) - MAGIC
}

/// `x` limited to magnitudes up to `max`; NaN stays NaN.
fn clamp<B: Backend, const D: usize>(x: Tensor<B, D>, max: f32) -> Tensor<B, D> {
    let (below, above) = (x.clone().lower_elem(-max), x.clone().greater_elem(max));
    x.mask_fill(below, -max).mask_fill(above, max)
}

fn zero_where<B: Backend>(x: Tensor<B, 4>, zero: Tensor<B, 4, burn::tensor::Bool>) -> Tensor<B, 4> {
    let shape = x.dims();
    x.mask_fill(zero.expand(shape), 0.0)
}

/// E4M3 codes and scales of `x`, `width` values per row: the operands of an 8-bit product.
pub fn e4m3_rows(x: &[f32], width: usize) -> (Vec<u8>, Vec<f32>) {
    let scales: Vec<f32> = x.chunks_exact(width).map(e4m3_scale).collect();
    let codes = x.chunks_exact(width).zip(&scales).flat_map(|(row, &scale)| {
        let inverse = e4m3_inverse(scale);
        row.iter().map(move |x| f32_to_e4m3fn(x * inverse))
    });
    (codes.collect(), scales)
}

/// `max|x| / 448`.
pub(crate) fn e4m3_scale(row: &[f32]) -> f32 {
    row.iter().fold(0.0f32, |max, x| max.max(x.abs())) / E4M3_MAX
}

/// `1 / scale`, or 0 where that is not finite.
pub(crate) fn e4m3_inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}
