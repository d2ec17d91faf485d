//! A block of hidden rows against [`SPAN`] rows of the head at a time; each span's logits are reduced while they are in
//! the cache and forgotten, so that memory does not grow with the vocabulary.
//!
//! Running normaliser per row, in f64: `l = l exp(m - m') + sum exp(logit - m')`, span after span.

use rayon::prelude::*;

use super::{HeadRequest, HeadScores};
use crate::host::gemm::{BLOCK, COLUMNS, Panels, accumulate_block};
use crate::host::math::{exp, round_all};
use crate::host::simd::per_instruction_set;
use crate::precision::Precision;

/// Rows of the head per span: with [`ROWS`] hidden rows 192 KB of logits.
const SPAN: usize = 32 * COLUMNS;
/// Hidden rows per task.
const ROWS: usize = BLOCK / 2;

/// What is known of one hidden row after some spans.
#[derive(Clone)]
struct Running {
    max: f32,
    sum: f64,
    target: f32,
    candidates: Vec<f32>,
    /// Largest first, equal ones in ascending id.
    top: Vec<(f32, u32)>,
}

/// `hidden` `[targets.len(), in]`.
pub fn score(hidden: &[f32], head: &Panels, ask: &HeadRequest<'_>, logits: Precision) -> HeadScores {
    let width = head.shape()[1];
    let rows: Vec<Running> = hidden
        .par_chunks(ROWS * width)
        .enumerate()
        .flat_map_iter(|(block, hidden)| score_block(hidden, head, ask, block * ROWS, logits))
        .collect();
    let mut scores = HeadScores::default();
    for row in rows {
        let normaliser = f64::from(row.max) + row.sum.ln();
        let logprob = |logit: f32| (f64::from(logit) - normaliser) as f32;
        scores.logprobs.push(logprob(row.target));
        scores.top_ids.extend(row.top.iter().map(|&(_, id)| id));
        scores
            .top_logprobs
            .extend(row.top.iter().map(|&(logit, _)| logprob(logit)));
        scores
            .candidate_logprobs
            .extend(row.candidates.iter().map(|&logit| logprob(logit)));
    }
    scores
}

fn score_block(
    hidden: &[f32],
    head: &Panels,
    ask: &HeadRequest<'_>,
    first_row: usize,
    precision: Precision,
) -> Vec<Running> {
    let count = hidden.len() / head.shape()[1];
    let new = Running {
        max: f32::NEG_INFINITY,
        sum: 0.0,
        target: f32::NAN,
        candidates: vec![f32::NAN; ask.candidates_per_row],
        top: Vec::with_capacity(ask.top_k + 1),
    };
    let mut rows = vec![new; count];
    let mut span = vec![0.0; count * SPAN];
    for start in (0..ask.public_rows).step_by(SPAN) {
        let columns = SPAN.min(ask.public_rows - start);
        let span = &mut span[..count * columns];
        span.fill(0.0);
        accumulate_block(hidden, head, span, start, columns);
        for (i, (logits, running)) in span.chunks_exact_mut(columns).zip(&mut rows).enumerate() {
            let max;
            (max, running.sum) = reduce(logits, running.max, running.sum, precision);
            running.max = max;
            let pick = |id: u32| {
                (id as usize)
                    .checked_sub(start)
                    .and_then(|column| logits.get(column).copied())
            };
            let row = first_row + i;
            if let Some(logit) = pick(ask.targets[row]) {
                running.target = logit;
            }
            for (value, &id) in running.candidates.iter_mut().zip(ask.candidates_of(row)) {
                *value = pick(id).unwrap_or(*value);
            }
            super::merge_top(&mut running.top, ask.top_k, logits, start);
        }
    }
    rows
}

per_instruction_set! {
    /// Rounds the logits and takes them into the running maximum and sum.
    fn reduce(logits: &mut [f32], max: f32, sum: f64, precision: Precision) -> (f32, f64) = reduce_body;
}

#[inline(always)]
fn reduce_body<const LEVEL: u8>(logits: &mut [f32], max: f32, sum: f64, precision: Precision) -> (f32, f64) {
    const LANES: usize = 16;
    round_all(logits, precision);
    let (lanes, rest) = logits.as_chunks::<LANES>();
    let mut maxima = [max; LANES];
    for lane in lanes {
        for i in 0..LANES {
            maxima[i] = if lane[i] > maxima[i] { lane[i] } else { maxima[i] };
        }
    }
    let new_max = maxima.iter().chain(rest).copied().fold(max, f32::max);
    let mut sums = [0.0f32; LANES];
    for lane in lanes {
        for i in 0..LANES {
            sums[i] += exp(lane[i] - new_max);
        }
    }
    let tail: f64 = rest.iter().map(|&l| f64::from(exp(l - new_max))).sum();
    let added = sums.iter().map(|&s| f64::from(s)).sum::<f64>() + tail;
    let kept = if sum == 0.0 {
        0.0
    } else {
        sum * f64::from(max - new_max).exp()
    };
    (new_max, kept + added)
}
