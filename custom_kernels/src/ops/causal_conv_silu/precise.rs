//! Hugging Face rounds the sum of the taps to bfloat16 before SiLU.

use rayon::prelude::*;

use crate::evaluation::Steps;
use crate::ops::swiglu::precise::silu;
use crate::precision::Precision;

/// `padded` `[batch, W - 1 + tokens, channels]`, `weight` `[channels, W]`; returns `[batch, tokens, channels]` = `shape`.
pub fn convolve(padded: &[f32], weight: &[f32], shape: [usize; 3], steps: Steps, to: Precision) -> Vec<f32> {
    let [batch, tokens, channels] = shape;
    let width = weight.len() / channels;
    let mut y = vec![0.0; batch * tokens * channels];
    y.par_chunks_exact_mut(channels).enumerate().for_each(|(row, y)| {
        let (window, t) = (row / tokens, row % tokens);
        let inputs = &padded[(window * (width - 1 + tokens) + t) * channels..][..width * channels];
        for (c, (y, taps)) in y.iter_mut().zip(weight.chunks_exact(width)).enumerate() {
            let products = taps.iter().zip(inputs[c..].iter().step_by(channels));
            let sum = products.map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
            *y = to.nearest(silu(steps.bf16(sum)));
        }
    });
    y
}
