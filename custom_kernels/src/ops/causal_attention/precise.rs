//! Query by query, scores and sums in f64. Hugging Face rounds the dot product, its scaled value and the softmax (after
//! float32) to bfloat16 each, and the weighted sum of values once.

use rayon::prelude::*;

use crate::evaluation::Steps;
use crate::host::simd::per_instruction_set;
use crate::precision::Precision;

/// `q` `[batch, tokens, heads, head_dim]` = `shape`, `keys` and `values` `[batch, kv_heads, capacity, head_dim]` =
/// `kv_shape`; returns the shape of `q`.
pub fn attention(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    shape: [usize; 4],
    kv_shape: [usize; 4],
    first_position: usize,
    steps: Steps,
    to: Precision,
) -> Vec<f32> {
    let [_, tokens, heads, head_dim] = shape;
    let [_, kv_heads, capacity, _] = kv_shape;
    let mut y = vec![0.0; q.len()];
    y.par_chunks_exact_mut(head_dim)
        .zip(q.par_chunks_exact(head_dim))
        .enumerate()
        .for_each(|(row, (y, q))| {
            let (window, t, head) = (row / (tokens * heads), row / heads % tokens, row % heads);
            let kv_head = (window * kv_heads + head / (heads / kv_heads)) * capacity * head_dim;
            let visible = kv_head..kv_head + (first_position + t + 1) * head_dim;
            over_rows(q, &keys[visible.clone()], &values[visible], y, steps, to);
        });
    y
}

/// One head of one query over all the given rows of `keys` and `values`.
pub(crate) fn over_rows(q: &[f32], keys: &[f32], values: &[f32], y: &mut [f32], steps: Steps, to: Precision) {
    let scale = (q.len() as f64).sqrt().recip();
    let mut weights = scores(q, keys);
    for s in &mut weights {
        *s = steps.bf16(steps.bf16(*s) * scale);
    }
    soften(&mut weights);
    for p in &mut weights {
        *p = steps.bf16(steps.f32(*p));
    }
    let sums = weighted_sum(&weights, values);
    y.iter_mut().zip(sums).for_each(|(y, sum)| *y = to.nearest(sum));
}

/// `exp(s_j) / sum exp(s)`.
fn soften(scores: &mut [f64]) {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    scores.iter_mut().for_each(|s| *s = (*s - max).exp());
    let sum: f64 = scores.iter().sum();
    scores.iter_mut().for_each(|s| *s /= sum);
}

per_instruction_set! {
    /// `q . k_j` for each row of `keys`.
    fn scores(q: &[f32], keys: &[f32]) -> Vec<f64> = scores_body;
}

#[inline(always)]
fn scores_body<const LEVEL: u8>(q: &[f32], keys: &[f32]) -> Vec<f64> {
    const LANES: usize = 8;
    let (q_lanes, q_rest) = q.as_chunks::<LANES>();
    let dot = |k: &[f32]| {
        let (k_lanes, k_rest) = k.as_chunks::<LANES>();
        let mut sums = [0.0f64; LANES];
        for (q, k) in q_lanes.iter().zip(k_lanes) {
            for i in 0..LANES {
                sums[i] += f64::from(q[i]) * f64::from(k[i]);
            }
        }
        let rest: f64 = q_rest
            .iter()
            .zip(k_rest)
            .map(|(&q, &k)| f64::from(q) * f64::from(k))
            .sum();
        sums.iter().sum::<f64>() + rest
    };
    keys.chunks_exact(q.len()).map(dot).collect()
}

per_instruction_set! {
    /// `sum_j weights_j values_j`.
    fn weighted_sum(weights: &[f64], values: &[f32]) -> Vec<f64> = weighted_sum_body;
}

#[inline(always)]
fn weighted_sum_body<const LEVEL: u8>(weights: &[f64], values: &[f32]) -> Vec<f64> {
    let width = values.len() / weights.len();
    let mut sums = vec![0.0; width];
    for (&p, values) in weights.iter().zip(values.chunks_exact(width)) {
        for (sum, &v) in sums.iter_mut().zip(values) {
            *sum += p * f64::from(v);
        }
    }
    sums
}
