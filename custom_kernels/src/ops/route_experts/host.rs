//! Rows in parallel; per row a partial sort of the ids, then a softmax over the chosen logits alone, which is the same
//! numbers as over all of them renormalised.

use rayon::prelude::*;

use crate::host::math::exp;

/// Rows per task.
const GRAIN: usize = 64;

/// `logits` `[rows, experts]`; returns ids and weights, both `[rows, top_k]`.
pub fn choose(logits: &[f32], experts: usize, top_k: usize) -> (Vec<i32>, Vec<f32>) {
    let rows = logits.len() / experts;
    let (mut ids, mut weights) = (vec![0; rows * top_k], vec![0.0; rows * top_k]);
    let tasks = ids
        .par_chunks_mut(GRAIN * top_k)
        .zip(weights.par_chunks_mut(GRAIN * top_k));
    tasks
        .zip(logits.par_chunks(GRAIN * experts))
        .for_each_init(Vec::new, |order, ((ids, weights), logits)| {
            let rows = ids.chunks_exact_mut(top_k).zip(weights.chunks_exact_mut(top_k));
            for ((ids, weights), logits) in rows.zip(logits.chunks_exact(experts)) {
                choose_row(logits, order, ids, weights);
            }
        });
    (ids, weights)
}

/// `order` is scratch.
fn choose_row(logits: &[f32], order: &mut Vec<i32>, ids: &mut [i32], weights: &mut [f32]) {
    order.clear();
    order.extend(0..logits.len() as i32);
    let before = |a: &i32, b: &i32| {
        let key = |id: &i32| sort_key(logits[*id as usize]);
        key(b).total_cmp(&key(a)).then(a.cmp(b))
    };
    if ids.len() < order.len() {
        order.select_nth_unstable_by(ids.len() - 1, before);
    }
    order.truncate(ids.len());
    order.sort_unstable_by(before);
    ids.copy_from_slice(order);

    let largest = logits[order[0] as usize];
    let mut sum = 0.0;
    for (weight, &id) in weights.iter_mut().zip(&*order) {
        *weight = exp(logits[id as usize] - largest);
        sum += *weight;
    }
    weights.iter_mut().for_each(|weight| *weight /= sum);
}

/// One zero, and what is not a number above everything, so that it is chosen and shows.
fn sort_key(logit: f32) -> f32 {
    if logit.is_nan() { f32::NAN } else { logit + 0.0 }
}
