//! Flash attention on the CPU: online softmax over blocks of [`KEYS`] keys counted from position 0,
//!
//! ```text
//! m' = max(m, max_j s_j)    p_j = exp(s_j - m')    l = l exp(m - m') + sum_j p_j    o = o exp(m - m') + sum_j p_j v_j
//! ```
//!
//! with both products in register tiles. A query's operations depend on its position alone, not on its block or pass: a
//! key it may not see has weight 0 exactly.

use rayon::prelude::*;

use crate::host::gemm::{COLUMNS, ROWS, Tile, tile};
use crate::host::math::{exp, round_all};
use crate::host::simd::per_instruction_set;
use crate::precision::Precision;

/// Keys per block: two register tiles of scores.
const KEYS: usize = 2 * COLUMNS;
/// Queries per task: each panel of keys serves eight register tiles while it is in the first-level cache.
const QUERIES: usize = 8 * ROWS;

/// One key head of one window.
struct KeyHead<'a> {
    /// Panels of [`COLUMNS`] keys, `[head_dim][COLUMNS]`, the last one padded with zeros.
    keys: Vec<f32>,
    /// `[visible, head_dim]`.
    values: &'a [f32],
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
    let key_heads: Vec<KeyHead<'_>> = keys
        .par_chunks(capacity * head_dim)
        .zip(values.par_chunks(capacity * head_dim))
        .map(|(keys, values)| KeyHead {
            keys: pack_keys(&keys[..visible * head_dim], head_dim),
            values: &values[..visible * head_dim],
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

per_instruction_set! {
    /// One head of at most [`QUERIES`] queries at positions `first..`; a query's features start every `strides[0]`
    /// elements and number `strides[1]`, in `q` as in `y`.
    fn attend(q: &[f32], key_head: &KeyHead<'_>, y: &mut [f32], strides: [usize; 2], first: usize, to: Precision)
        = attend_body;
}

#[inline(always)]
fn attend_body<const LEVEL: u8>(
    q: &[f32],
    key_head: &KeyHead<'_>,
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
    let mut value_panel = vec![0.0; if width == head_dim { 0 } else { KEYS * width }];

    let last = first + queries;
    for start in (0..last).step_by(KEYS) {
        let count = KEYS.min(last - start);
        let values = &key_head.values[start * head_dim..][..count * head_dim];
        let values = if width == head_dim {
            values
        } else {
            for (target, source) in value_panel.chunks_exact_mut(width).zip(values.chunks_exact(head_dim)) {
                target[..head_dim].copy_from_slice(source);
            }
            &value_panel[..count * width]
        };
        for index in 0..tiles {
            let mut scores = [[[0.0; COLUMNS]; ROWS]; KEYS / COLUMNS];
            let q = &q_tiles[index * ROWS * head_dim..][..ROWS * head_dim];
            for (half, scores) in scores.iter_mut().enumerate().take(count.div_ceil(COLUMNS)) {
                let panel = &key_head.keys[(start / COLUMNS + half) * COLUMNS * head_dim..][..COLUMNS * head_dim];
                tile::<LEVEL>(q, panel, COLUMNS, scores);
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
                let new_max = max_of(&row).max(max[i]);
                rescale[r] = exp(max[i] - new_max);
                row.iter_mut().for_each(|s| *s = exp(*s - new_max));
                sum[i] = sum[i] * rescale[r] + sum_of(&row);
                max[i] = new_max;
                for (weights, &p) in weights.iter_mut().zip(&row) {
                    weights[r] = p;
                }
            }
            let rows = &mut output[index * ROWS * width..][..ROWS * width];
            for column in (0..width).step_by(COLUMNS) {
                let mut sums: Tile = std::array::from_fn(|r| {
                    let row = rows[r * width + column..]
                        .first_chunk::<COLUMNS>()
                        .expect("rows are whole tiles");
                    std::array::from_fn(|c| row[c] * rescale[r])
                });
                tile::<LEVEL>(weights[..count].as_flattened(), &values[column..], width, &mut sums);
                for r in 0..ROWS {
                    rows[r * width + column..][..COLUMNS].copy_from_slice(&sums[r]);
                }
            }
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

/// Lane-wise, then pairwise, so that it vectorises.
#[inline(always)]
fn max_of(row: &[f32; KEYS]) -> f32 {
    reduce(row, f32::max)
}

/// Lane-wise, then pairwise.
#[inline(always)]
fn sum_of(row: &[f32; KEYS]) -> f32 {
    reduce(row, |a, b| a + b)
}

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
