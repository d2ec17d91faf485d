//! Hugging Face's steps, all float32: square, mean, sum with eps, reciprocal root, product with it, `1 + w`, product; then
//! bfloat16.

use rayon::prelude::*;

use crate::evaluation::Steps;
use crate::precision::Precision;

/// `x` `[rows, weight.len()]`, in place.
pub fn norm(x: &mut [f32], weight: &[f32], eps: f32, steps: Steps, to: Precision) {
    x.par_chunks_exact_mut(weight.len()).for_each(|x| {
        let scale = inverse_rms(x, eps, steps);
        for (x, &w) in x.iter_mut().zip(weight) {
            *x = to.nearest(steps.f32(steps.f32(f64::from(*x) * scale) * steps.f32(1.0 + f64::from(w))));
        }
    });
}

/// The same of each of several streams by itself: `x` `[rows, streams * width]`, `weight` `[streams * width]`.
pub fn stream_norm(x: &mut [f32], weight: &[f32], width: usize, eps: f32, steps: Steps, to: Precision) {
    x.par_chunks_exact_mut(weight.len()).for_each(|x| {
        let streams = x.chunks_exact_mut(width).zip(weight.chunks_exact(width));
        streams.for_each(|(x, weight)| norm(x, weight, eps, steps, to));
    });
}

/// `1 / sqrt(mean(x^2) + eps)`.
pub(crate) fn inverse_rms(x: &[f32], eps: f32, steps: Steps) -> f64 {
    let mean = steps.f32(sum_of_squares(x, steps) / x.len() as f64);
    steps.f32(1.0 / steps.f32(mean + f64::from(eps)).sqrt())
}

/// `sum(x^2)`, not rounded; the squares are.
pub(crate) fn sum_of_squares(x: &[f32], steps: Steps) -> f64 {
    x.iter().map(|&x| steps.f32(f64::from(x) * f64::from(x))).sum()
}
