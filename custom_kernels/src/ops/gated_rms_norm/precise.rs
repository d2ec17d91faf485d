//! Hugging Face's steps: the norm in float32, rounded to bfloat16; times `w`, rounded to bfloat16; `SiLU(z)` in float32;
//! their product in float32, then rounded. A sigmoid gate likewise.

use rayon::prelude::*;

use crate::evaluation::Steps;
use crate::ops::offset_rms_norm::precise::inverse_rms;
use crate::ops::sigmoid_gate::precise::sigmoid;
use crate::ops::swiglu::precise::silu;
use crate::precision::Precision;

/// `x` and `z` `[rows, weight.len()]`, in place.
pub fn norm(x: &mut [f32], weight: &[f32], z: &[f32], eps: f32, steps: Steps, to: Precision) {
    gated(x, weight, z, eps, silu, steps, to);
}

/// The same with the gate `sigmoid(z)`.
pub fn sigmoid_norm(x: &mut [f32], weight: &[f32], z: &[f32], eps: f32, steps: Steps, to: Precision) {
    gated(x, weight, z, eps, sigmoid, steps, to);
}

fn gated(x: &mut [f32], weight: &[f32], z: &[f32], eps: f32, activation: fn(f64) -> f64, steps: Steps, to: Precision) {
    let width = weight.len();
    x.par_chunks_exact_mut(width)
        .zip(z.par_chunks_exact(width))
        .for_each(|(x, z)| {
            let scale = inverse_rms(x, eps, steps);
            for ((x, &w), &z) in x.iter_mut().zip(weight).zip(z) {
                let normalised = steps.bf16(steps.f32(f64::from(*x) * scale));
                let weighted = steps.bf16(f64::from(w) * normalised);
                *x = to.nearest(steps.f32(weighted * steps.f32(activation(z.into()))));
            }
        });
}
