//! Rows are sorted by expert; a task is up to [`BLOCK`] rows of one expert, both its products and the activation between
//! them. Outputs wait in the sorted order for their rows, which add them up in ascending expert id: a row's result is a
//! fixed sequence of operations, whoever its neighbours are. Experts that nobody chose cost nothing.

use rayon::prelude::*;

use super::Expert;
use crate::host::gemm::{BLOCK, Panels, accumulate_block};
use crate::host::math::silu;
use crate::host::simd::{multiply_add, per_instruction_set};

/// Rows at a time, which bounds the waiting outputs: `top_k` per row.
const ROUND: usize = 4096;

/// `x` `[rows, in]`, `ids` and `weights` `[rows, top_k]`, every id below `experts.len()`; returns `[rows, in]`.
pub fn feed_forward(x: &[f32], ids: &[i32], weights: &[f32], top_k: usize, experts: &[Expert<Panels>]) -> Vec<f32> {
    let width = experts[0].gate_up.shape()[1];
    let mut y = vec![0.0; x.len()];
    let choices = ids.chunks(ROUND * top_k).zip(weights.chunks(ROUND * top_k));
    for ((y, x), (ids, weights)) in y.chunks_mut(ROUND * width).zip(x.chunks(ROUND * width)).zip(choices) {
        // Choices `row * top_k + place`, by expert, then row.
        let mut order: Vec<usize> = (0..ids.len()).collect();
        order.sort_by_key(|&choice| ids[choice]);
        let outputs = outputs(x, ids, top_k, experts, &order);

        let mut position = vec![0; order.len()];
        order.iter().enumerate().for_each(|(at, &choice)| position[choice] = at);
        y.par_chunks_mut(width)
            .enumerate()
            .for_each_init(Vec::new, |own, (row, y)| {
                own.clear();
                own.extend(row * top_k..(row + 1) * top_k);
                own.sort_unstable_by_key(|&choice| ids[choice]);
                for &choice in &*own {
                    add(y, weights[choice], &outputs[position[choice] * width..][..width]);
                }
            });
    }
    y
}

/// Each choice's expert output, `[order.len(), in]`, not yet weighted.
fn outputs(x: &[f32], ids: &[i32], top_k: usize, experts: &[Expert<Panels>], order: &[usize]) -> Vec<f32> {
    let width = experts[0].gate_up.shape()[1];
    let mut outputs = vec![0.0; order.len() * width];
    let mut rest = &mut outputs[..];
    let mut tasks = Vec::new();
    for same in order.chunk_by(|a, b| ids[*a] == ids[*b]) {
        for choices in same.chunks(BLOCK) {
            let (own, others) = rest.split_at_mut(choices.len() * width);
            tasks.push((&experts[ids[choices[0]] as usize], choices, own));
            rest = others;
        }
    }
    tasks
        .into_par_iter()
        .for_each_init(Scratch::default, |scratch, (expert, choices, output)| {
            scratch.rows.clear();
            for choice in choices {
                scratch.rows.extend_from_slice(&x[choice / top_k * width..][..width]);
            }
            let [twice, _] = expert.gate_up.shape();
            scratch.gate_up.clear();
            scratch.gate_up.resize(choices.len() * twice, 0.0);
            accumulate_block(&scratch.rows, &expert.gate_up, &mut scratch.gate_up, 0, twice);
            scratch.hidden.clear();
            scratch.hidden.resize(choices.len() * twice / 2, 0.0);
            activate(&scratch.gate_up, &mut scratch.hidden, twice / 2);
            accumulate_block(&scratch.hidden, &expert.down, output, 0, width);
        });
    outputs
}

/// Buffers of one task.
#[derive(Default)]
struct Scratch {
    rows: Vec<f32>,
    gate_up: Vec<f32>,
    hidden: Vec<f32>,
}

per_instruction_set! {
    /// `hidden = SiLU(gate) * up`; rows of `gate_up` are `width` of either.
    fn activate(gate_up: &[f32], hidden: &mut [f32], width: usize) = activate_body;
}

#[inline(always)]
fn activate_body<const LEVEL: u8>(gate_up: &[f32], hidden: &mut [f32], width: usize) {
    for (both, hidden) in gate_up.chunks_exact(2 * width).zip(hidden.chunks_exact_mut(width)) {
        let (gate, up) = both.split_at(width);
        for ((hidden, &gate), &up) in hidden.iter_mut().zip(gate).zip(up) {
            *hidden = silu(gate) * up;
        }
    }
}

per_instruction_set! {
    /// `sum += weight * output`.
    fn add(sum: &mut [f32], weight: f32, output: &[f32]) = add_body;
}

#[inline(always)]
fn add_body<const LEVEL: u8>(sum: &mut [f32], weight: f32, output: &[f32]) {
    for (sum, &output) in sum.iter_mut().zip(output) {
        *sum = multiply_add::<LEVEL>(weight, output, *sum);
    }
}
