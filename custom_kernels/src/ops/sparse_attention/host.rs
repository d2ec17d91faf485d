//! Query by query over the keys it names, in ascending order, all query heads of a key head together.

use rayon::prelude::*;

use super::BlockSelection;
use crate::host::math::{dot, exp, round_all};
use crate::host::simd::{multiply_add, per_instruction_set};
use crate::precision::Precision;

/// `q` `[batch, tokens, heads, head_dim]` = `shape`; `keys` and `values` `[batch, kv_heads, capacity, head_dim]` =
/// `kv_shape`.
pub fn attention(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    shape: [usize; 4],
    kv_shape: [usize; 4],
    selection: &BlockSelection,
    to: Precision,
) -> Vec<f32> {
    let [_, tokens, heads, head_dim] = shape;
    let [_, kv_heads, capacity, _] = kv_shape;
    let (row, group) = (heads * head_dim, heads / kv_heads * head_dim);
    let mut y = vec![0.0; q.len()];
    y.par_chunks_mut(row)
        .zip(q.par_chunks(row))
        .enumerate()
        .for_each(|(query, (y, q))| {
            let position = selection.first_position + query % tokens;
            let chosen: Vec<usize> = selection.ranges(query, position).flatten().collect();
            for head in 0..kv_heads {
                let first = (query / tokens * kv_heads + head) * capacity * head_dim;
                let rows = first..first + capacity * head_dim;
                let heads = head * group..(head + 1) * group;
                attend(
                    &q[heads.clone()],
                    &keys[rows.clone()],
                    &values[rows],
                    &chosen,
                    &mut y[heads],
                    head_dim,
                );
            }
            round_all(y, to);
        });
    y
}

per_instruction_set! {
    /// The query heads of one key head: `q` and `y` `[heads, head_dim]`, `keys` and `values` `[capacity, head_dim]`.
    fn attend(q: &[f32], keys: &[f32], values: &[f32], chosen: &[usize], y: &mut [f32], head_dim: usize) = attend_body;
}

#[inline(always)]
fn attend_body<const LEVEL: u8>(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    chosen: &[usize],
    y: &mut [f32],
    head_dim: usize,
) {
    let scale = 1.0 / (head_dim as f32).sqrt();
    let mut weights = vec![0.0; chosen.len()];
    for (q, y) in q.chunks_exact(head_dim).zip(y.chunks_exact_mut(head_dim)) {
        let mut max = f32::NEG_INFINITY;
        for (weight, &key) in weights.iter_mut().zip(chosen) {
            *weight = dot::<LEVEL>(q, &keys[key * head_dim..][..head_dim]) * scale;
            max = if *weight > max { *weight } else { max };
        }
        let mut sum = 0.0;
        for (weight, &key) in weights.iter_mut().zip(chosen) {
            *weight = exp(*weight - max);
            sum += *weight;
            for (y, &value) in y.iter_mut().zip(&values[key * head_dim..][..head_dim]) {
                *y = multiply_add::<LEVEL>(*weight, value, *y);
            }
        }
        let inverse = 1.0 / sum;
        y.iter_mut().for_each(|y| *y *= inverse);
    }
}
