//! Hugging Face rounds each quotient, SiLU, sigmoid, product and sum with a stream to bfloat16; its mean over the streams
//! is a float32 sum and quotient, then bfloat16.

use rayon::prelude::*;

use crate::evaluation::{GRAIN, Steps};
use crate::ops::sigmoid_gate::precise::sigmoid;
use crate::ops::swiglu::precise::silu;
use crate::precision::Precision;

/// `SiLU(z / streams)`, in place.
pub fn activate(z: &mut [f32], streams: usize, steps: Steps, to: Precision) {
    let inner = |z: f32| silu(steps.bf16(f64::from(z) / streams as f64));
    z.par_iter_mut()
        .with_min_len(GRAIN)
        .for_each(|z| *z = to.nearest(inner(*z)));
}

/// `1/S sum_s sigmoid(u_s) * normal_s`, both `[rows, S, width]`; returns `[rows, width]`.
pub fn mix(u: &[f32], normal: &[f32], [count, width]: [usize; 2], steps: Steps, to: Precision) -> Vec<f32> {
    let mut x = vec![0.0; u.len() / count];
    x.par_chunks_exact_mut(width)
        .zip(
            u.par_chunks_exact(count * width)
                .zip(normal.par_chunks_exact(count * width)),
        )
        .for_each(|(x, (u, normal))| {
            for (d, x) in x.iter_mut().enumerate() {
                let streams = (d..count * width).step_by(width);
                let product = |i: usize| steps.bf16(steps.bf16(sigmoid(u[i].into())) * f64::from(normal[i]));
                let sum: f64 = streams.map(product).sum();
                *x = to.nearest(steps.f32(steps.f32(sum) / count as f64));
            }
        });
    x
}

/// `2 sigmoid(v / streams)`, in place.
pub fn weights(v: &mut [f32], streams: usize, steps: Steps) {
    for v in v {
        *v = (2.0 * steps.bf16(sigmoid(steps.bf16(f64::from(*v) / streams as f64)))) as f32;
    }
}

/// Adds `y` `[rows, width]` to each of the streams `[rows, S, width]` by its weight, `[rows, S]`.
pub fn write(streams: &mut [f32], y: &[f32], weights: &[f32], count: usize, steps: Steps, to: Precision) {
    let width = y.len() * count / weights.len();
    streams
        .par_chunks_exact_mut(width)
        .zip(weights)
        .enumerate()
        .for_each(|(at, (stream, &weight))| {
            let y = &y[at / count * width..][..width];
            for (stream, &y) in stream.iter_mut().zip(y) {
                let product = steps.bf16(f64::from(y) * f64::from(weight));
                *stream = to.nearest(f64::from(*stream) + product);
            }
        });
}
