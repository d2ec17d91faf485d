//! The table of the module, group by group, in place.

use rayon::prelude::*;

use super::{ActivationFormat, INT8_GROUP, INT8_MAX, NVFP4_GROUP, Nvfp4Rounding, e4m3_inverse, e4m3_scale};
use crate::numeric::{E2M1_MAX, e2m1_to_f32, e4m3fn_to_f32, f32_to_e2m1, f32_to_e4m3fn};

/// `x` `[rows, width]`.
pub fn quantize(x: &mut [f32], width: usize, format: ActivationFormat) {
    x.par_chunks_mut(width).for_each(|row| match format {
        ActivationFormat::Fp8 => fp8(row),
        ActivationFormat::Nvfp4 { divisor, rounding } => row
            .chunks_mut(NVFP4_GROUP)
            .for_each(|group| nvfp4(group, divisor, rounding)),
        ActivationFormat::Int8 => row.chunks_mut(INT8_GROUP).for_each(int8),
    });
}

fn fp8(row: &mut [f32]) {
    let scale = e4m3_scale(row);
    let inverse = e4m3_inverse(scale);
    each(row, |x| e4m3fn_to_f32(f32_to_e4m3fn(x * inverse)) * scale);
}

fn nvfp4(group: &mut [f32], divisor: f32, rounding: Nvfp4Rounding) {
    let largest = magnitude(group);
    match rounding {
        Nvfp4Rounding::Engine => {
            let scale = e4m3fn_to_f32(f32_to_e4m3fn((largest * divisor) / E2M1_MAX));
            if scale == 0.0 {
                return each(group, |_| 0.0);
            }
            each(group, |x| {
                e2m1_to_f32(f32_to_e2m1((x * divisor) / scale)) * scale / divisor
            });
        }
        Nvfp4Rounding::ModelOpt => {
            let g = 1.0 / divisor;
            let step = e4m3fn_to_f32(f32_to_e4m3fn(largest / (E2M1_MAX * g))) * g;
            if step == 0.0 {
                return each(group, |_| 0.0);
            }
            each(group, |x| e2m1_to_f32(f32_to_e2m1(x / step)) * step);
        }
    }
}

fn int8(group: &mut [f32]) {
    let scale = magnitude(group) / INT8_MAX;
    if scale == 0.0 {
        return each(group, |_| 0.0);
    }
    each(group, |x| {
        (x / scale).round_ties_even().clamp(-INT8_MAX, INT8_MAX) * scale
    });
}

fn magnitude(group: &[f32]) -> f32 {
    group.iter().fold(0.0f32, |max, x| max.max(x.abs()))
}

/// Applies `quantize` to finite values; others are no numbers.
fn each(values: &mut [f32], quantize: impl Fn(f32) -> f32) {
    for x in values {
        *x = if x.is_finite() { quantize(*x) } else { f32::NAN };
    }
}
