//! Token by token over all channels, taps transposed so that the channel loop is contiguous.

use rayon::prelude::*;

use crate::host::math::{round_all, silu};
use crate::host::simd::{multiply_add, per_instruction_set};
use crate::precision::Precision;

/// `x` `[batch, tokens, channels]` = `shape`, `weight` `[channels, W]`, `tail` `[batch, W - 1, channels]`; returns the
/// result and the next tail.
pub fn convolve(x: &[f32], weight: &[f32], tail: &[f32], shape: [usize; 3], to: Precision) -> (Vec<f32>, Vec<f32>) {
    let [_, tokens, channels] = shape;
    let width = weight.len() / channels;
    let taps: Vec<f32> = (0..width)
        .flat_map(|j| weight.iter().skip(j).step_by(width).copied())
        .collect();
    let history = (width - 1) * channels;

    // Row `t` of a window counted from the start of its tail.
    let input = |window: usize, t: usize| match t.checked_sub(width - 1) {
        Some(t) => &x[(window * tokens + t) * channels..][..channels],
        None => &tail[window * history + t * channels..][..channels],
    };
    let mut y = vec![0.0; x.len()];
    y.par_chunks_mut(channels).enumerate().for_each(|(row, y)| {
        for (j, taps) in taps.chunks_exact(channels).enumerate() {
            add_tap(y, input(row / tokens, row % tokens + j), taps);
        }
        activate(y, to);
    });
    let mut next = vec![0.0; tail.len()];
    for (row, next) in next.chunks_exact_mut(channels).enumerate() {
        next.copy_from_slice(input(row / (width - 1), tokens + row % (width - 1)));
    }
    (y, next)
}

per_instruction_set! {
    fn add_tap(y: &mut [f32], x: &[f32], taps: &[f32]) = add_tap_body;
}

#[inline(always)]
fn add_tap_body<const LEVEL: u8>(y: &mut [f32], x: &[f32], taps: &[f32]) {
    y.iter_mut()
        .zip(x)
        .zip(taps)
        .for_each(|((y, &x), &w)| *y = multiply_add::<LEVEL>(x, w, *y));
}

per_instruction_set! {
    fn activate(y: &mut [f32], to: Precision) = activate_body;
}

#[inline(always)]
fn activate_body<const LEVEL: u8>(y: &mut [f32], to: Precision) {
    y.iter_mut().for_each(|y| *y = silu(*y));
    round_all(y, to);
}
