//! The rotation with f64 angles; Hugging Face rounds cosine, sine, both products and their sum to bfloat16.

use rayon::prelude::*;

use super::Angles;
use crate::evaluation::Steps;
use crate::precision::Precision;

/// `x` `[batch, tokens, heads, head_dim]` = `shape`, in place; features beyond the rotated ones are not touched.
pub fn rotate(x: &mut [f32], angles: &Angles, first_position: usize, shape: [usize; 4], steps: Steps, to: Precision) {
    let [_, tokens, heads, head_dim] = shape;
    let half = angles.pairs;
    x.par_chunks_exact_mut(heads * head_dim)
        .enumerate()
        .for_each(|(row, x)| {
            let position = first_position + row % tokens;
            let (cos, sin) = (&angles.cos[position * half..], &angles.sin[position * half..]);
            for head in x.chunks_exact_mut(head_dim) {
                let (first, second) = head[..2 * half].split_at_mut(half);
                for (((first, second), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                    let (a, b) = (f64::from(*first), f64::from(*second));
                    *first = to.nearest(steps.bf16(a * cos) - steps.bf16(b * sin));
                    *second = to.nearest(steps.bf16(b * cos) + steps.bf16(a * sin));
                }
            }
        });
}
