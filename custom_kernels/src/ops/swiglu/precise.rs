//! `SiLU(gate) * up`; Hugging Face rounds gate, up, SiLU and product to bfloat16 each.

use rayon::prelude::*;

use crate::evaluation::{GRAIN, Steps};
use crate::precision::Precision;

/// Of the two products, both `[rows, inner]`.
pub fn activate(gate: &[f64], up: &[f64], steps: Steps, to: Precision) -> Vec<f32> {
    let pairs = gate.par_iter().zip(up).with_min_len(GRAIN);
    pairs
        .map(|(&gate, &up)| to.nearest(steps.bf16(silu(steps.bf16(gate))) * steps.bf16(up)))
        .collect()
}

/// `x / (1 + e^-x)`.
pub(crate) fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}
