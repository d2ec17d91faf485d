//! `x * sigmoid(gate)`; Hugging Face rounds the sigmoid to bfloat16.

use rayon::prelude::*;

use crate::evaluation::{GRAIN, Steps};
use crate::precision::Precision;

/// `x *= sigmoid(gate)`.
pub fn gate(x: &mut [f32], gate: &[f32], steps: Steps, to: Precision) {
    let pairs = x.par_iter_mut().zip(gate).with_min_len(GRAIN);
    pairs.for_each(|(x, &gate)| *x = to.nearest(f64::from(*x) * steps.bf16(sigmoid(gate.into()))));
}

/// `1 / (1 + e^-x)`.
pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
