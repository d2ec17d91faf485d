//! The recurrence itself, with no chunks: columns of the state never mix, so a block of [`COLUMNS`] of them stays in the
//! first-level cache while all tokens pass. This is as fast as the chunked form on a CPU and needs no triangular solve;
//! a token's result does not depend on where a pass began.
//!
//! Per token the block is read twice and written once. The decay is folded into both readings:
//! `u = beta (v - exp(g) k^T S)`, then `S = exp(g) S + k u^T` and `o = q^T S` row by row.

use rayon::prelude::*;

use super::{DeltaHeads, L2_EPSILON};
use crate::host::gemm::round_block;
use crate::host::math::dot;
use crate::host::simd::{multiply_add, per_instruction_set};
use crate::precision::Precision;

/// Columns of the state per task: 128 rows of them are 16 KB.
const COLUMNS: usize = 32;
/// Partial sums per column, to hide the latency of a fused multiply-add.
const PARTS: usize = 2;

/// The operands of all tasks.
struct Operands<'a> {
    qkv: &'a [f32],
    /// Normalised queries and keys, `[batch, tokens, 2, Nk, Dk]`.
    qk: Vec<f32>,
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
        qk: normalised(qkv, heads),
        g,
        beta,
        tokens,
        heads,
    };
    let blocks = value_dim.div_ceil(COLUMNS);
    let width = |block: usize| COLUMNS.min(value_dim - block * COLUMNS);

    // Per window, head and column block, the columns' state and output lie together, padded to COLUMNS.
    let tasks = batch * value_heads * blocks;
    let mut states = vec![0.0; tasks * key_dim * COLUMNS];
    for (row, padded) in states.chunks_exact_mut(COLUMNS).enumerate() {
        let (task, i) = (row / key_dim, row % key_dim);
        let (head, block) = (task / blocks, task % blocks);
        let source = (head * key_dim + i) * value_dim + block * COLUMNS;
        padded[..width(block)].copy_from_slice(&state[source..][..width(block)]);
    }
    let mut outputs = vec![0.0; tasks * tokens * COLUMNS];
    states
        .par_chunks_exact_mut(key_dim * COLUMNS)
        .zip(outputs.par_chunks_exact_mut(tokens * COLUMNS))
        .enumerate()
        .for_each(|(task, (state, output))| run(&operands, task / blocks, task % blocks, state, output));

    for (row, padded) in states.chunks_exact(COLUMNS).enumerate() {
        let (task, i) = (row / key_dim, row % key_dim);
        let (head, block) = (task / blocks, task % blocks);
        let target = (head * key_dim + i) * value_dim + block * COLUMNS;
        state[target..][..width(block)].copy_from_slice(&padded[..width(block)]);
    }
    let mut y = vec![0.0; batch * tokens * value_heads * value_dim];
    y.par_chunks_mut(value_heads * value_dim)
        .enumerate()
        .for_each(|(row, y)| {
            let (window, t) = (row / tokens, row % tokens);
            for (head, y) in y.chunks_exact_mut(value_dim).enumerate() {
                for (block, y) in y.chunks_mut(COLUMNS).enumerate() {
                    let task = (window * value_heads + head) * blocks + block;
                    y.copy_from_slice(&outputs[(task * tokens + t) * COLUMNS..][..y.len()]);
                }
            }
            round_block(y, to);
        });
    y
}

per_instruction_set! {
    /// All tokens of one window and head over one block of columns; `state` `[Dk, COLUMNS]`, `output`
    /// `[tokens, COLUMNS]`.
    fn run(operands: &Operands<'_>, head: usize, block: usize, state: &mut [f32], output: &mut [f32]) = run_body;
}

#[inline(always)]
fn run_body<const LEVEL: u8>(
    operands: &Operands<'_>,
    head: usize,
    block: usize,
    state: &mut [f32],
    output: &mut [f32],
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
    let first = 2 * key_width + head * value_dim + block * COLUMNS;
    let width = COLUMNS.min(value_dim - block * COLUMNS);

    for (t, output) in output.as_chunks_mut::<COLUMNS>().0.iter_mut().enumerate() {
        let row = window * tokens + t;
        let q = &operands.qk[row * 2 * key_width + key_head * key_dim..][..key_dim];
        let k = &operands.qk[(row * 2 + 1) * key_width + key_head * key_dim..][..key_dim];
        let decay = operands.g[row * value_heads + head].exp();
        let beta = operands.beta[row * value_heads + head];

        let predicted = read(state, k);
        let mut u = [0.0; COLUMNS];
        u[..width].copy_from_slice(&operands.qkv[row * heads.channels() + first..][..width]);
        for c in 0..COLUMNS {
            u[c] = beta * (u[c] - decay * predicted[c]);
        }
        *output = update_and_read(state, decay, k, &u, q);
    }
}

per_instruction_set! {
    /// `k^T S`; a function of its own, since inlined into the token loop its sums leave the registers.
    fn read(state: &[f32], k: &[f32]) -> [f32; COLUMNS] = read_body;
}

#[inline(always)]
fn read_body<const LEVEL: u8>(state: &[f32], k: &[f32]) -> [f32; COLUMNS] {
    let mut sums = [[0.0f32; COLUMNS]; PARTS];
    let (rows, rest) = state.as_chunks::<COLUMNS>().0.as_chunks::<PARTS>();
    let (ks, k_rest) = k.as_chunks::<PARTS>();
    for (rows, k) in rows.iter().zip(ks) {
        for p in 0..PARTS {
            for c in 0..COLUMNS {
                sums[p][c] = multiply_add::<LEVEL>(k[p], rows[p][c], sums[p][c]);
            }
        }
    }
    for (row, &k) in rest.iter().zip(k_rest) {
        for c in 0..COLUMNS {
            sums[0][c] = multiply_add::<LEVEL>(k, row[c], sums[0][c]);
        }
    }
    fold(&sums)
}

per_instruction_set! {
    /// `S = decay S + k u^T`, returning `q^T S`.
    fn update_and_read(state: &mut [f32], decay: f32, k: &[f32], u: &[f32; COLUMNS], q: &[f32]) -> [f32; COLUMNS]
        = update_and_read_body;
}

#[inline(always)]
fn update_and_read_body<const LEVEL: u8>(
    state: &mut [f32],
    decay: f32,
    k: &[f32],
    u: &[f32; COLUMNS],
    q: &[f32],
) -> [f32; COLUMNS] {
    let mut sums = [[0.0f32; COLUMNS]; PARTS];
    let (rows, rest) = state.as_chunks_mut::<COLUMNS>().0.as_chunks_mut::<PARTS>();
    let ((ks, k_rest), (qs, q_rest)) = (k.as_chunks::<PARTS>(), q.as_chunks::<PARTS>());
    for ((rows, k), q) in rows.iter_mut().zip(ks).zip(qs) {
        for p in 0..PARTS {
            for c in 0..COLUMNS {
                let s = multiply_add::<LEVEL>(k[p], u[c], decay * rows[p][c]);
                rows[p][c] = s;
                sums[p][c] = multiply_add::<LEVEL>(q[p], s, sums[p][c]);
            }
        }
    }
    for ((row, &k), &q) in rest.iter_mut().zip(k_rest).zip(q_rest) {
        for c in 0..COLUMNS {
            row[c] = multiply_add::<LEVEL>(k, u[c], decay * row[c]);
            sums[0][c] = multiply_add::<LEVEL>(q, row[c], sums[0][c]);
        }
    }
    fold(&sums)
}

#[inline(always)]
fn fold(sums: &[[f32; COLUMNS]; PARTS]) -> [f32; COLUMNS] {
    std::array::from_fn(|c| sums[0][c] + sums[1][c])
}

/// Queries, scaled by `1 / sqrt(Dk)`, and keys of unit length: `[batch, tokens, 2, Nk, Dk]`.
fn normalised(qkv: &[f32], heads: DeltaHeads) -> Vec<f32> {
    let width = 2 * heads.key_heads * heads.key_dim;
    let mut qk = vec![0.0; qkv.len() / heads.channels() * width];
    qk.par_chunks_mut(width)
        .zip(qkv.par_chunks(heads.channels()))
        .for_each(|(qk, qkv)| {
            qk.copy_from_slice(&qkv[..width]);
            let (q, k) = qk.split_at_mut(width / 2);
            normalise_heads(q, heads.key_dim, 1.0 / (heads.key_dim as f32).sqrt());
            normalise_heads(k, heads.key_dim, 1.0);
        });
    qk
}

per_instruction_set! {
    fn normalise_heads(x: &mut [f32], head_dim: usize, scale: f32) = normalise_heads_body;
}

#[inline(always)]
fn normalise_heads_body<const LEVEL: u8>(x: &mut [f32], head_dim: usize, scale: f32) {
    for head in x.chunks_exact_mut(head_dim) {
        let factor = scale / (dot::<LEVEL>(head, head) + L2_EPSILON).sqrt();
        head.iter_mut().for_each(|x| *x *= factor);
    }
}
