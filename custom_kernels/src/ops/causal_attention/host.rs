//! Flash attention on the CPU: online softmax over blocks of [`KEYS`] keys counted from position 0,
//!
//! ```text
//! m' = max(m, max_j s_j)    p_j = exp(s_j - m')    l = l exp(m - m') + sum_j p_j    o = o exp(m - m') + sum_j p_j v_j
//! ```
//!
//! with both products in register tiles. A query's operations depend on its position alone, not on its block or pass: a
//! key it may not see has weight 0 exactly.

use rayon::prelude::*;

use crate::host::gemm::{COLUMNS, ROWS, Tile, multiply_tile, tile};
use crate::host::math::{exp, round_all};
use crate::host::simd::per_instruction_set;
use crate::precision::Precision;

/// Keys per block: two register tiles of scores.
const KEYS: usize = 2 * COLUMNS;
/// Queries per task: each panel of keys serves eight register tiles while it is in the first-level cache.
const QUERIES: usize = 8 * ROWS;

/// One key head of one window.
struct KeyHead {
    /// Panels of [`COLUMNS`] keys, `[head_dim][COLUMNS]`, the last one padded with zeros.
    keys: Vec<f32>,
    /// Blocks of [`KEYS`] values, each in panels of [`COLUMNS`] features, `[KEYS][COLUMNS]`, padded with zeros.
    values: Vec<f32>,
}

/// `q` `[batch, tokens, heads, head_dim]` = `shape`; `keys` and `values` `[batch, kv_heads, capacity, head_dim]` =
/// `kv_shape`.
pub fn attention(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    shape: [usize; 4],
    kv_shape: [usize; 4],
    first_position: usize,
    to: Precision,
) -> Vec<f32> {
    let [_, tokens, heads, head_dim] = shape;
    let [_, kv_heads, capacity, _] = kv_shape;
    let visible = first_position + tokens;
    let key_heads: Vec<KeyHead> = keys
        .par_chunks(capacity * head_dim)
        .zip(values.par_chunks(capacity * head_dim))
        .map(|(keys, values)| KeyHead {
            keys: pack_keys(&keys[..visible * head_dim], head_dim),
            values: pack_values(&values[..visible * head_dim], head_dim),
        })
        .collect();

    // A task writes whole rows of all heads, so that the output can be split without copies.
    let mut y = vec![0.0; q.len()];
    let row = heads * head_dim;
    y.par_chunks_mut(tokens * row)
        .zip(q.par_chunks(tokens * row))
        .enumerate()
        .for_each(|(window, (y, q))| {
            y.par_chunks_mut(QUERIES * row)
                .zip(q.par_chunks(QUERIES * row))
                .enumerate()
                .for_each(|(block, (y, q))| {
                    for head in 0..heads {
                        let key_head = &key_heads[window * kv_heads + head / (heads / kv_heads)];
                        let first = first_position + block * QUERIES;
                        attend(
                            &q[head * head_dim..],
                            key_head,
                            &mut y[head * head_dim..],
                            [row, head_dim],
                            first,
                            to,
                        );
                    }
                });
        });
    y
}

fn pack_keys(keys: &[f32], head_dim: usize) -> Vec<f32> {
    let count = keys.len() / head_dim;
    let mut panels = vec![0.0; count.div_ceil(COLUMNS) * COLUMNS * head_dim];
    for (j, key) in keys.chunks_exact(head_dim).enumerate() {
        let panel = &mut panels[j / COLUMNS * COLUMNS * head_dim..];
        for (target, &value) in panel[j % COLUMNS..].iter_mut().step_by(COLUMNS).zip(key) {
            *target = value;
        }
    }
    panels
}

fn pack_values(values: &[f32], head_dim: usize) -> Vec<f32> {
    let count = values.len() / head_dim;
    let width = head_dim.div_ceil(COLUMNS) * COLUMNS;
    let mut blocks = vec![0.0; count.div_ceil(KEYS) * KEYS * width];
    for (j, value) in values.chunks_exact(head_dim).enumerate() {
        let block = &mut blocks[j / KEYS * KEYS * width..];
        for (panel, part) in value.chunks(COLUMNS).enumerate() {
            block[(panel * KEYS + j % KEYS) * COLUMNS..][..part.len()].copy_from_slice(part);
        }
    }
    blocks
}

per_instruction_set! {
    /// One head of at most [`QUERIES`] queries at positions `first..`; a query's features start every `strides[0]`
    /// elements and number `strides[1]`, in `q` as in `y`.
    fn attend(q: &[f32], key_head: &KeyHead, y: &mut [f32], strides: [usize; 2], first: usize, to: Precision)
        = attend_body;
}

#[inline(always)]
fn attend_body<const LEVEL: u8>(
    q: &[f32],
    key_head: &KeyHead,
    y: &mut [f32],
    strides: [usize; 2],
    first: usize,
    to: Precision,
) {
    let [stride, head_dim] = strides;
    let queries = q.len().div_ceil(stride);
    let tiles = queries.div_ceil(ROWS);
    let scale = 1.0 / (head_dim as f32).sqrt();

    // Queries as tiles [head_dim][ROWS]; outputs as rows, padded to whole tiles and register columns.
    let width = head_dim.div_ceil(COLUMNS) * COLUMNS;
    let mut q_tiles = vec![0.0; tiles * ROWS * head_dim];
    for (i, q) in q.chunks(stride).enumerate() {
        let tile = &mut q_tiles[i / ROWS * ROWS * head_dim..];
        for (target, &value) in tile[i % ROWS..].iter_mut().step_by(ROWS).zip(&q[..head_dim]) {
            *target = value;
        }
    }
    let mut output = vec![0.0; tiles * ROWS * width];
    let mut max = [f32::NEG_INFINITY; QUERIES];
    let mut sum = [0.0f32; QUERIES];

    let last = first + queries;
    for start in (0..last).step_by(KEYS) {
        let count = KEYS.min(last - start);
        let values = &key_head.values[start * width..][..KEYS * width];
        for index in 0..tiles {
            let mut scores = [[[0.0; COLUMNS]; ROWS]; KEYS / COLUMNS];
            let q = &q_tiles[index * ROWS * head_dim..][..ROWS * head_dim];
            for (half, scores) in scores.iter_mut().enumerate().take(count.div_ceil(COLUMNS)) {
                let panel = &key_head.keys[(start / COLUMNS + half) * COLUMNS * head_dim..][..COLUMNS * head_dim];
                multiply_tile(q, panel, COLUMNS, scores);
            }
            let mut weights = [[0.0; ROWS]; KEYS];
            let mut rescale = [1.0; ROWS];
            for r in 0..ROWS {
                let i = index * ROWS + r;
                // Keys of this block that query i sees; beyond the last query nobody reads the result.
                let seen = count.min((first + i + 1).saturating_sub(start));
                if seen == 0 {
                    continue;
                }
                let mut row = [f32::NEG_INFINITY; KEYS];
                for (half, scores) in scores.iter().enumerate() {
                    for c in 0..COLUMNS {
                        row[half * COLUMNS + c] = scores[r][c] * scale;
                    }
                }
                row[seen..].fill(f32::NEG_INFINITY);
                (max[i], rescale[r], sum[i]) = soften(&mut row, max[i], sum[i]);
                for (weights, &p) in weights.iter_mut().zip(&row) {
                    weights[r] = p;
                }
            }
            let rows = &mut output[index * ROWS * width..][..ROWS * width];
            add_values(rows, weights[..count].as_flattened(), values, &rescale);
        }
    }
    for (i, y) in y.chunks_mut(stride).enumerate() {
        let inverse = 1.0 / sum[i];
        for (y, &o) in y[..head_dim].iter_mut().zip(&output[i * width..]) {
            *y = o * inverse;
        }
        round_all(&mut y[..head_dim], to);
    }
}

per_instruction_set! {
    /// `rows = rescale * rows + weights * values` for one register tile of queries; `rows` `[ROWS, width]`, `weights`
    /// `[keys][ROWS]`, `values` one block.
    fn add_values(rows: &mut [f32], weights: &[f32], values: &[f32], rescale: &[f32; ROWS]) = add_values_body;
}

#[inline(always)]
fn add_values_body<const LEVEL: u8>(rows: &mut [f32], weights: &[f32], values: &[f32], rescale: &[f32; ROWS]) {
    let width = rows.len() / ROWS;
    for (row, &rescale) in rows.chunks_exact_mut(width).zip(rescale) {
        row.iter_mut().for_each(|o| *o *= rescale);
    }
    for (panel, values) in values.chunks_exact(KEYS * COLUMNS).enumerate() {
        let mut sums: Tile = [[0.0; COLUMNS]; ROWS];
        tile::<LEVEL>(weights, values, COLUMNS, &mut sums);
        for (row, sums) in rows.chunks_exact_mut(width).zip(&sums) {
            for (o, sum) in row[panel * COLUMNS..][..COLUMNS].iter_mut().zip(sums) {
                *o += sum;
            }
        }
    }
}

per_instruction_set! {
    /// Turns scores into weights `exp(s_j - m')`; returns `m'`, `exp(m - m')` and the next sum.
    fn soften(row: &mut [f32; KEYS], max: f32, sum: f32) -> (f32, f32, f32) = soften_body;
}

#[inline(always)]
fn soften_body<const LEVEL: u8>(row: &mut [f32; KEYS], max: f32, sum: f32) -> (f32, f32, f32) {
    let new_max = reduce(row, |a, b| if a > b { a } else { b }).max(max);
    let rescale = exp(max - new_max);
    row.iter_mut().for_each(|s| *s = exp(*s - new_max));
    (new_max, rescale, sum * rescale + reduce(row, |a, b| a + b))
}

/// Lane-wise, then pairwise, so that it vectorises.
#[inline(always)]
fn reduce(row: &[f32; KEYS], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = *row;
    let mut width = KEYS / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = combine(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}
