//! As in causal attention, over the keys that a query names; in Hugging Face's masked softmax the others weigh nothing.

use rayon::prelude::*;

use super::BlockSelection;
use crate::evaluation::Steps;
use crate::ops::causal_attention::precise::over_rows;
use crate::precision::Precision;

/// `q` `[batch, tokens, heads, head_dim]` = `shape`, `keys` and `values` `[batch, kv_heads, capacity, head_dim]` =
/// `kv_shape`; returns the shape of `q`.
pub fn attention(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    shape: [usize; 4],
    kv_shape: [usize; 4],
    selection: &BlockSelection,
    steps: Steps,
    to: Precision,
) -> Vec<f32> {
    let [_, tokens, heads, head_dim] = shape;
    let [_, kv_heads, capacity, _] = kv_shape;
    let group = heads / kv_heads * head_dim;
    let mut y = vec![0.0; q.len()];
    y.par_chunks_exact_mut(group)
        .zip(q.par_chunks_exact(group))
        .enumerate()
        .for_each(|(row, (y, q))| {
            let (query, kv_head) = (row / kv_heads, row % kv_heads);
            let first = (query / tokens * kv_heads + kv_head) * capacity;
            let ranges = selection.ranges(query, selection.first_position + query % tokens);
            let ranges: Vec<_> = ranges
                .map(|range| (first + range.start) * head_dim..(first + range.end) * head_dim)
                .collect();
            let gather =
                |rows: &[f32]| -> Vec<f32> { ranges.iter().flat_map(|range| &rows[range.clone()]).copied().collect() };
            let (keys, values) = (gather(keys), gather(values));
            for (y, q) in y.chunks_exact_mut(head_dim).zip(q.chunks_exact(head_dim)) {
                over_rows(q, &keys, &values, y, steps, to);
            }
        });
    y
}
