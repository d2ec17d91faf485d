//! A few values per token: plain loops with the standard library's functions.

use super::SOFTPLUS_IDENTITY;

/// `a` becomes `g`, `b` becomes `beta`; both `[rows, value_heads]`.
pub fn gates(a: &mut [f32], b: &mut [f32], a_log: &[f32], dt_bias: &[f32]) {
    for a in a.chunks_exact_mut(a_log.len()) {
        for ((a, &a_log), &dt_bias) in a.iter_mut().zip(a_log).zip(dt_bias) {
            let u = *a + dt_bias;
            let softplus = if u > SOFTPLUS_IDENTITY { u } else { u.exp().ln_1p() };
            *a = -a_log.exp() * softplus;
        }
    }
    b.iter_mut().for_each(|b| *b = 1.0 / (1.0 + (-*b).exp()));
}
