//! The rotation in place; features beyond the rotated ones are not touched.

use rayon::prelude::*;

use crate::host::math::round_all;
use crate::host::simd::per_instruction_set;
use crate::precision::Precision;

/// `x` `[batch, tokens, heads, head_dim]`; `cos` and `sin` `[tokens, half]`, the rows of the pass's positions.
pub fn rotate(x: &mut [f32], cos: &[f32], sin: &[f32], half: usize, heads: usize, head_dim: usize, to: Precision) {
    let tokens = cos.len() / half;
    x.par_chunks_mut(heads * head_dim).enumerate().for_each(|(row, x)| {
        let angles = row % tokens * half..(row % tokens + 1) * half;
        rotate_token(x, &cos[angles.clone()], &sin[angles], head_dim, to);
    });
}

per_instruction_set! {
    fn rotate_token(x: &mut [f32], cos: &[f32], sin: &[f32], head_dim: usize, to: Precision) = rotate_token_body;
}

#[inline(always)]
fn rotate_token_body<const LEVEL: u8>(x: &mut [f32], cos: &[f32], sin: &[f32], head_dim: usize, to: Precision) {
    for head in x.chunks_exact_mut(head_dim) {
        let rotated = &mut head[..2 * cos.len()];
        let (first, second) = rotated.split_at_mut(cos.len());
        for (((first, second), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
            (*first, *second) = (*first * cos - *second * sin, *second * cos + *first * sin);
        }
        round_all(rotated, to);
    }
}
