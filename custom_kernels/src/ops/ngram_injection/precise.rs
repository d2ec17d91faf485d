//! Hugging Face rounds to bfloat16: products of key and query, their sum, the quotient, the root, the sigmoid; the sum of
//! the taps, SiLU, and both sums at the end.

use rayon::prelude::*;

use super::LEAST;
use crate::evaluation::Steps;
use crate::ops::sigmoid_gate::precise::sigmoid;
use crate::ops::swiglu::precise::silu;
use crate::precision::Precision;

/// `key` and `query` `[rows, S, H]`, `value` `[rows, H]`; returns `[rows, S, H]`.
pub fn gate(
    key: &[f32],
    query: &[f32],
    value: &[f32],
    [count, width]: [usize; 2],
    steps: Steps,
    to: Precision,
) -> Vec<f32> {
    let least = steps.bf16(LEAST.into());
    let mut gated = vec![0.0; key.len()];
    gated
        .par_chunks_exact_mut(width)
        .zip(key.par_chunks_exact(width).zip(query.par_chunks_exact(width)))
        .enumerate()
        .for_each(|(at, (gated, (key, query)))| {
            let products = key.iter().zip(query);
            let sum: f64 = products.map(|(&k, &q)| steps.bf16(f64::from(k) * f64::from(q))).sum();
            let a = steps.bf16(steps.bf16(sum) / (width as f64).sqrt());
            let root = steps.bf16(if a.abs() < least { least } else { a.abs() }.sqrt());
            let open = steps.bf16(sigmoid(if a == 0.0 { 0.0 } else { root.copysign(a) }));
            let value = &value[at / count * width..][..width];
            for (gated, &value) in gated.iter_mut().zip(value) {
                *gated = to.nearest(open * f64::from(value));
            }
        });
    gated
}

/// Adds `gated` and the convolution to `streams`, both `[batch, tokens, channels]` = `shape`; `inputs`
/// `[batch, (W - 1) dilation + tokens, channels]`, `convolution` `[W, channels]`.
pub fn inject(
    streams: &mut [f32],
    gated: &[f32],
    inputs: &[f32],
    convolution: &[f32],
    shape: [usize; 3],
    dilation: usize,
    steps: Steps,
    to: Precision,
) {
    let [_, tokens, channels] = shape;
    let history = (convolution.len() / channels - 1) * dilation;
    streams
        .par_chunks_exact_mut(channels)
        .zip(gated.par_chunks_exact(channels))
        .enumerate()
        .for_each(|(row, (stream, gated))| {
            let (window, t) = (row / tokens, row % tokens);
            let inputs = &inputs[(window * (history + tokens) + t) * channels..];
            for (c, (stream, &gated)) in stream.iter_mut().zip(gated).enumerate() {
                let taps = convolution[c..].iter().step_by(channels);
                let products = taps.zip(inputs[c..].iter().step_by(dilation * channels));
                let sum = products.map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                let added = steps.bf16(f64::from(gated) + steps.bf16(silu(steps.bf16(sum))));
                *stream = to.nearest(f64::from(*stream) + added);
            }
        });
}
