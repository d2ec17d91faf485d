//! `y = round(residual + x W^T)`; Hugging Face rounds the product to bfloat16 first.

use rayon::prelude::*;

use crate::evaluation::{GRAIN, Steps};
use crate::precision::Precision;

/// Adds `product` to `residual`.
pub fn add(residual: &mut [f32], product: &[f64], steps: Steps, to: Precision) {
    let pairs = residual.par_iter_mut().zip(product).with_min_len(GRAIN);
    pairs.for_each(|(y, &product)| *y = to.nearest(f64::from(*y) + steps.bf16(product)));
}
