//! The recurrence in f64, rounded at the read-out.
//!
//! Hugging Face's steps: the norm of queries and keys and the scale of queries in float32, then the chunked form in
//! float32. Correctly rounded, every form of the rule gives the recurrence's result, so that is what both steps evaluate.

use rayon::prelude::*;

use super::{DeltaHeads, L2_EPSILON};
use crate::evaluation::Steps;
use crate::host::simd::per_instruction_set;
use crate::ops::offset_rms_norm::precise::sum_of_squares;
use crate::precision::Precision;

/// Columns of the state per task: 128 rows of them are 16 KB.
const COLUMNS: usize = 16;

/// The operands of all tasks.
struct Operands<'a> {
    qkv: &'a [f32],
    /// Normalised queries and keys, `[batch, tokens, 2, Nk, Dk]`.
    qk: Vec<f64>,
    g: &'a [f32],
    beta: &'a [f32],
    tokens: usize,
    heads: DeltaHeads,
}

/// `qkv` `[batch, tokens, channels]`, `g` and `beta` `[batch, tokens, Nv]`, `state` `[batch, Nv, Dk, Dv]`, updated;
/// returns `[batch, tokens, Nv, Dv]`.
pub fn recurrent(
    qkv: &[f32],
    g: &[f32],
    beta: &[f32],
    state: &mut [f32],
    shape: [usize; 2],
    heads: DeltaHeads,
    steps: Steps,
    to: Precision,
) -> Vec<f32> {
    let [batch, tokens] = shape;
    let DeltaHeads {
        value_heads,
        key_dim,
        value_dim,
        ..
    } = heads;
    let operands = Operands {
        qkv,
        qk: normalised(qkv, heads, steps),
        g,
        beta,
        tokens,
        heads,
    };
    let blocks = value_dim.div_ceil(COLUMNS);
    let before: &[f32] = state;
    // Per window, head and block of columns: the outputs [tokens, COLUMNS] and the next state [Dk, COLUMNS].
    let results: Vec<[Vec<f64>; 2]> = (0..batch * value_heads * blocks)
        .into_par_iter()
        .map(|task| {
            let (head, column) = (task / blocks, task % blocks * COLUMNS);
            let width = COLUMNS.min(value_dim - column);
            let mut block = vec![0.0; key_dim * COLUMNS];
            for (i, row) in block.chunks_exact_mut(COLUMNS).enumerate() {
                let source = &before[(head * key_dim + i) * value_dim + column..][..width];
                row.iter_mut().zip(source).for_each(|(s, &value)| *s = value.into());
            }
            let mut output = vec![0.0; tokens * COLUMNS];
            run(&operands, head, column, &mut block, &mut output);
            [output, block]
        })
        .collect();

    let mut y = vec![0.0; batch * tokens * value_heads * value_dim];
    for (task, [output, block]) in results.iter().enumerate() {
        let (head, column) = (task / blocks, task % blocks * COLUMNS);
        let (window, value_head) = (head / value_heads, head % value_heads);
        let width = COLUMNS.min(value_dim - column);
        for (t, output) in output.chunks_exact(COLUMNS).enumerate() {
            let target = ((window * tokens + t) * value_heads + value_head) * value_dim + column;
            let y = &mut y[target..][..width];
            y.iter_mut().zip(output).for_each(|(y, &o)| *y = to.nearest(o));
        }
        for (i, row) in block.chunks_exact(COLUMNS).enumerate() {
            let target = &mut state[(head * key_dim + i) * value_dim + column..][..width];
            target.iter_mut().zip(row).for_each(|(s, &value)| *s = value as f32);
        }
    }
    y
}

per_instruction_set! {
    /// All tokens of one window and head over one block of columns; `state` `[Dk, COLUMNS]`, `output`
    /// `[tokens, COLUMNS]`.
    fn run(operands: &Operands<'_>, head: usize, column: usize, state: &mut [f64], output: &mut [f64]) = run_body;
}

#[inline(always)]
fn run_body<const LEVEL: u8>(
    operands: &Operands<'_>,
    head: usize,
    column: usize,
    state: &mut [f64],
    output: &mut [f64],
) {
    let Operands { tokens, heads, .. } = *operands;
    let DeltaHeads {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
    } = heads;
    let (window, head) = (head / value_heads, head % value_heads);
    let key_width = key_heads * key_dim;
    let key_head = head / (value_heads / key_heads);
    let first = 2 * key_width + head * value_dim + column;
    let width = COLUMNS.min(value_dim - column);
    let state = state.as_chunks_mut::<COLUMNS>().0;

    for (t, output) in output.as_chunks_mut::<COLUMNS>().0.iter_mut().enumerate() {
        let row = window * tokens + t;
        let q = &operands.qk[row * 2 * key_width + key_head * key_dim..][..key_dim];
        let k = &operands.qk[(row * 2 + 1) * key_width + key_head * key_dim..][..key_dim];
        let decay = f64::from(operands.g[row * value_heads + head]).exp();
        let beta = f64::from(operands.beta[row * value_heads + head]);
        let v = &operands.qkv[row * heads.channels() + first..][..width];

        let mut predicted = [0.0; COLUMNS];
        for (s, &k) in state.iter_mut().zip(k) {
            for c in 0..COLUMNS {
                s[c] *= decay;
                predicted[c] += k * s[c];
            }
        }
        let mut u = [0.0; COLUMNS];
        for c in 0..width {
            u[c] = beta * (f64::from(v[c]) - predicted[c]);
        }
        let mut o = [0.0; COLUMNS];
        for ((s, &k), &q) in state.iter_mut().zip(k).zip(q) {
            for c in 0..COLUMNS {
                s[c] += k * u[c];
                o[c] += q * s[c];
            }
        }
        *output = o;
    }
}

/// Queries, scaled by `1 / sqrt(Dk)`, and keys of unit length: `[batch, tokens, 2, Nk, Dk]`.
fn normalised(qkv: &[f32], heads: DeltaHeads, steps: Steps) -> Vec<f64> {
    let width = 2 * heads.key_heads * heads.key_dim;
    let mut qk = vec![0.0; qkv.len() / heads.channels() * width];
    qk.par_chunks_mut(width)
        .zip(qkv.par_chunks(heads.channels()))
        .for_each(|(qk, qkv)| {
            let rows = qk.chunks_exact_mut(heads.key_dim).zip(qkv.chunks_exact(heads.key_dim));
            for (head, (target, x)) in rows.enumerate() {
                let is_query = head < heads.key_heads;
                let scale = if is_query {
                    (heads.key_dim as f64).sqrt().recip()
                } else {
                    1.0
                };
                let sum = steps.f32(sum_of_squares(x, steps));
                let inverse = steps.f32(1.0 / steps.f32(sum + f64::from(L2_EPSILON)).sqrt());
                for (y, &x) in target.iter_mut().zip(x) {
                    *y = steps.f32(steps.f32(f64::from(x) * inverse) * steps.f32(scale));
                }
            }
        });
    qk
}
