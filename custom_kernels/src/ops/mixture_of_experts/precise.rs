//! The mixture in f64, expert by expert over the rows that chose it.
//!
//! Hugging Face's steps: router logits bfloat16; their softmax and the renormalised weights float32, the weights then
//! bfloat16; per expert gate, SiLU, up, product, output and weighted output bfloat16, added in ascending id to a bfloat16
//! sum; the shared expert likewise; its score's sigmoid, its product and the sum of both bfloat16. Evaluated once, only
//! router weights and what stands between two matrices are rounded, to float32.

use rayon::prelude::*;

use super::Mixture;
use crate::backend::EvaluatorBackend;
use crate::evaluation::Steps;
use crate::host::gemm::Panels;
use crate::host::gemm64::product;
use crate::ops::sigmoid_gate::precise::sigmoid;
use crate::ops::swiglu::precise::silu;
use crate::precision::Precision;

/// `residual` and `x` `[rows, in]`; the result replaces `residual`. Returns the experts of every row and their weights,
/// `[rows, top_k]`.
pub fn mixture<B: EvaluatorBackend>(
    residual: &mut [f32],
    x: &[f32],
    weights: &Mixture<B>,
    steps: Steps,
    to: Precision,
) -> (Vec<i32>, Vec<f32>) {
    let router = B::panels(&weights.router);
    let ([experts, width], top_k) = (router.shape(), weights.top_k);
    let (ids, shares) = route(product(x, &router), experts, top_k, steps);

    let mut sum = vec![0.0; x.len()];
    for (id, expert) in weights.experts.iter().enumerate() {
        let chosen: Vec<usize> = (0..ids.len()).filter(|&choice| ids[choice] as usize == id).collect();
        if chosen.is_empty() {
            continue;
        }
        let row = |choice: usize| &x[choice / top_k * width..][..width];
        let own: Vec<f32> = chosen.iter().flat_map(|&choice| row(choice)).copied().collect();
        let both = product(&own, &B::panels(&expert.gate_up));
        let inner = both.len() / chosen.len() / 2;
        let hidden: Vec<f32> = both
            .par_chunks_exact(2 * inner)
            .flat_map_iter(|both| both[..inner].iter().zip(&both[inner..]))
            .map(|(&gate, &up)| activated(gate, up, steps))
            .collect();
        let outputs = product(&hidden, &B::panels(&expert.down));
        for (&choice, output) in chosen.iter().zip(outputs.chunks_exact(width)) {
            let share = f64::from(shares[choice]);
            let sum = &mut sum[choice / top_k * width..][..width];
            for (sum, &output) in sum.iter_mut().zip(output) {
                *sum = steps.bf16(*sum + steps.bf16(share * steps.bf16(output)));
            }
        }
    }

    let of = |weight: &B::Weight| -> Panels { B::panels(weight) };
    let (gate, up) = (
        product(x, &of(&weights.shared_gate)),
        product(x, &of(&weights.shared_up)),
    );
    let pairs = gate.par_iter().zip(&up);
    let hidden: Vec<f32> = pairs.map(|(&gate, &up)| activated(gate, up, steps)).collect();
    let shared = product(&hidden, &of(&weights.shared_down));
    let scores = product(x, &of(&weights.shared_score));
    for (row, score) in scores.iter().enumerate() {
        let open = steps.bf16(sigmoid(steps.bf16(*score)));
        for i in row * width..(row + 1) * width {
            let both = steps.bf16(sum[i] + steps.bf16(open * steps.bf16(shared[i])));
            residual[i] = to.nearest(f64::from(residual[i]) + both);
        }
    }
    (ids, shares)
}

/// The experts of every row and their weights, `[rows, top_k]`, from router logits `[rows, experts]` not yet rounded.
pub(crate) fn route(mut logits: Vec<f64>, experts: usize, top_k: usize, steps: Steps) -> (Vec<i32>, Vec<f32>) {
    logits.iter_mut().for_each(|logit| *logit = steps.bf16(*logit));
    let (ids, shares): (Vec<_>, Vec<_>) = logits
        .par_chunks_exact(experts)
        .map(|logits| choose(logits, top_k, steps))
        .unzip();
    (ids.concat(), shares.concat())
}

/// The `top_k` largest logits, the lower id first of equal ones, and their renormalised probabilities.
fn choose(logits: &[f64], top_k: usize, steps: Steps) -> (Vec<i32>, Vec<f32>) {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    // What is not a number comes first, so that it is chosen and shows.
    order.sort_by(|&a, &b| {
        let (a_nan, b_nan) = (logits[a].is_nan(), logits[b].is_nan());
        let larger = logits[b].partial_cmp(&logits[a]);
        b_nan
            .cmp(&a_nan)
            .then(larger.unwrap_or(std::cmp::Ordering::Equal))
            .then(a.cmp(&b))
    });
    let largest = logits[order[0]];
    let all: f64 = logits.iter().map(|logit| (logit - largest).exp()).sum();
    order.truncate(top_k);
    let chosen: Vec<f64> = order
        .iter()
        .map(|&id| steps.f32((logits[id] - largest).exp() / all))
        .collect();
    let sum = steps.f32(chosen.iter().sum());
    let shares = chosen.iter().map(|p| steps.bf16(steps.f32(p / sum)) as f32);
    (order.iter().map(|&id| id as i32).collect(), shares.collect())
}

fn activated(gate: f64, up: f64, steps: Steps) -> f32 {
    steps.bf16(steps.bf16(silu(steps.bf16(gate))) * steps.bf16(up)) as f32
}
