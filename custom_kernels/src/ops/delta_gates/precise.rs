//! Hugging Face's steps: `beta` in bfloat16; `exp(A_log)`, `a + dt_bias`, softplus and their product in float32.

use super::SOFTPLUS_IDENTITY;
use crate::evaluation::Steps;
use crate::ops::sigmoid_gate::precise::sigmoid;

/// `a` becomes `g`, `b` becomes `beta`; both `[rows, value_heads]`.
pub fn gates(a: &mut [f32], b: &mut [f32], a_log: &[f32], dt_bias: &[f32], steps: Steps) {
    for a in a.chunks_exact_mut(a_log.len()) {
        for ((a, &a_log), &dt_bias) in a.iter_mut().zip(a_log).zip(dt_bias) {
            let u = steps.f32(f64::from(*a) + f64::from(dt_bias));
            let softplus = if u > SOFTPLUS_IDENTITY.into() {
                u
            } else {
                steps.f32(u.exp().ln_1p())
            };
            *a = (-steps.f32(f64::from(a_log).exp()) * softplus) as f32;
        }
    }
    for b in b {
        *b = steps.bf16(sigmoid((*b).into())) as f32;
    }
}
