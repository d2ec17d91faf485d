//! Reductions over a tile of logits, one cube per row; only their results leave the device.
//!
//! Each unit owns a contiguous segment of the public rows. The first pass gives maximum and sum of exponentials; each
//! top token is then the best of the units' best, whose segment is searched again for what comes next in the order
//! "larger logit, then smaller id".

use burn::tensor::DType;
use cubecl::prelude::*;

use super::HeadRequest;
use crate::cube::{CubeTensor, KernelRuntime, UNITS, cubes, empty};

/// Per row: maximum, sum of `exp(logit - maximum)`, the target's logit, then `top_k` logits, then the candidates' logits.
pub(crate) const FIXED: usize = 3;

/// Below every logit; finite, as not every runtime can write an infinity.
const LOWEST: f32 = f32::MIN;

/// No token: behind every id in the order.
const NONE: u32 = u32::MAX;

/// Whether `(a, i)` comes before `(b, j)`: larger logit first, smaller id among equals.
#[cube]
fn before(a: f32, i: u32, b: f32, j: u32) -> bool {
    a > b || (a == b && i < j)
}

/// Best of all units' `(value, id)`; every unit gets it.
#[cube]
fn best(
    values: &mut SharedMemory<f32>,
    ids: &mut SharedMemory<u32>,
    value: f32,
    id: u32,
    #[comptime] units: u32,
) -> (f32, u32) {
    let unit = UNIT_POS as usize;
    values[unit] = value;
    ids[unit] = id;
    #[unroll]
    for i in 0..comptime!(units.ilog2()) {
        let half = comptime!((units >> (i + 1)) as usize);
        sync_cube();
        if unit < half {
            let other = values[unit + half];
            let other_id = ids[unit + half];
            if before(other, other_id, values[unit], ids[unit]) {
                values[unit] = other;
                ids[unit] = other_id;
            }
        }
    }
    sync_cube();
    let result = (values[0], ids[0]);
    sync_cube();
    result
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn reduce(
    logits: &Array<f32>,
    targets: &Array<u32>,
    candidates: &Array<u32>,
    scores: &mut Array<f32>,
    top_ids: &mut Array<u32>,
    rows: usize,
    stride: usize,
    public: usize,
    top_k: usize,
    per_row: usize,
    #[comptime] units: u32,
) {
    let unit = UNIT_POS as usize;
    let mut values = SharedMemory::<f32>::new(comptime!(units as usize));
    let mut ids = SharedMemory::<u32>::new(comptime!(units as usize));
    // Each unit's best token not yet taken.
    let mut next = SharedMemory::<f32>::new(comptime!(units as usize));
    let mut next_id = SharedMemory::<u32>::new(comptime!(units as usize));
    if CUBE_POS < rows {
        let row = CUBE_POS * stride;
        let lowest = f32::cast_from(LOWEST);
        let none = u32::cast_from(NONE);
        // Largest logit, in strides so that neighbours read neighbours.
        let mut top = lowest;
        let mut i = unit;
        while i < public {
            top = max(top, logits[row + i]);
            i += comptime!(units as usize);
        }
        let (maximum, _) = best(&mut values, &mut ids, top, UNIT_POS, units);
        let mut sum = 0.0f32;
        i = unit;
        while i < public {
            sum += f32::exp(logits[row + i] - maximum);
            i += comptime!(units as usize);
        }
        values[unit] = sum;
        #[unroll]
        for i in 0..comptime!(units.ilog2()) {
            let half = comptime!((units >> (i + 1)) as usize);
            sync_cube();
            if unit < half {
                values[unit] += values[unit + half];
            }
        }
        sync_cube();
        let width = FIXED + top_k + per_row;
        let start = CUBE_POS * width;
        if unit == 0 {
            scores[start] = maximum;
            scores[start + 1] = values[0];
            scores[start + 2] = logits[row + targets[CUBE_POS] as usize];
        }
        i = unit;
        while i < per_row {
            scores[start + FIXED + top_k + i] = logits[row + candidates[CUBE_POS * per_row + i] as usize];
            i += comptime!(units as usize);
        }
        sync_cube();
        if top_k > 0 {
            let segment = public.div_ceil(comptime!(units as usize));
            let mut value = lowest;
            let mut id = none;
            for j in 0..segment {
                let at = unit * segment + j;
                if at < public {
                    let logit = logits[row + at];
                    if logit > value || id == none {
                        value = logit;
                        id = at as u32;
                    }
                }
            }
            next[unit] = value;
            next_id[unit] = id;
            for k in 0..top_k {
                sync_cube();
                let mine = next[unit];
                let my_id = next_id[unit];
                let (chosen, chosen_id) = best(&mut values, &mut ids, mine, my_id, units);
                if unit == 0 {
                    scores[start + FIXED + k] = chosen;
                    top_ids[CUBE_POS * top_k + k] = chosen_id;
                }
                // All units search the chosen token's segment for the one after it.
                let owner = chosen_id as usize / segment;
                value = lowest;
                id = none;
                i = unit;
                while i < segment {
                    let at = owner * segment + i;
                    if at < public {
                        let logit = logits[row + at];
                        let after = before(chosen, chosen_id, logit, at as u32);
                        if after && (id == none || before(logit, at as u32, value, id)) {
                            value = logit;
                            id = at as u32;
                        }
                    }
                    i += comptime!(units as usize);
                }
                let (value_after, id_after) = best(&mut values, &mut ids, value, id, units);
                if unit == 0 {
                    next[owner] = value_after;
                    next_id[owner] = id_after;
                }
            }
        }
    }
}

/// Reduces rows `first..` of the request over a tile of float32 `logits` `[rows, stride]`, contiguous.
///
/// Returns `[rows, FIXED + top_k + candidates]` float32 and `[rows, top_k]` ids.
pub(crate) fn launch<R: KernelRuntime>(
    logits: CubeTensor<R>,
    ask: &HeadRequest<'_>,
    first: usize,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let (rows, stride) = (logits.meta.shape()[0], logits.meta.shape()[1]);
    let per_row = ask.candidates_per_row;
    let scores = empty(&logits, [rows, FIXED + ask.top_k + per_row], DType::F32);
    let ids = empty(&logits, [rows, ask.top_k.max(1)], DType::U32);
    let client = logits.client.clone();
    // A binding cannot be empty: without candidates the targets stand in and are not read.
    let targets = &ask.targets[first..first + rows];
    let candidates = match per_row {
        0 => targets,
        _ => &ask.candidates[first * per_row..(first + rows) * per_row],
    };
    let target_handle = client.create_from_slice(bytemuck::cast_slice(targets));
    let candidate_handle = client.create_from_slice(bytemuck::cast_slice(candidates));
    // SAFETY: rows beyond the tile do nothing; targets and candidates lie below `public_rows` by contract.
    unsafe {
        reduce::launch_unchecked::<R>(
            &client,
            cubes(&client, rows),
            CubeDim::new_1d(UNITS),
            logits.required_address_type(),
            logits.into_array_arg(),
            ArrayArg::from_raw_parts(target_handle, targets.len()),
            ArrayArg::from_raw_parts(candidate_handle, candidates.len()),
            scores.clone().into_array_arg(),
            ids.clone().into_array_arg(),
            rows,
            stride,
            ask.public_rows,
            ask.top_k,
            per_row,
            UNITS,
        );
    }
    (scores, ids)
}
