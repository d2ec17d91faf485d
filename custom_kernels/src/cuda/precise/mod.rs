//! The operations in f64 on the card: products through cuBLASLt, everything else in the kernels of this folder. Values
//! stay on the card between operations, and what a product needs in f64 is made tile by tile.

/// A kernel text behind what they all share.
macro_rules! text {
    ($file:literal) => {
        concat!(include_str!("common.cuh"), include_str!($file))
    };
}

mod product;

use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::{CubeBackend, element::BoolElement};
use bytemuck::NoUninit;
use cubecl::cuda::CudaRuntime;
use cubecl::server::KernelArguments;

use super::CudaTensor;
use super::source::CudaSource;
use crate::backend::{DeltaHeads, HeadRequest, HeadScores, RotaryTable, Routing};
use crate::cube::{empty, primitive, storage, tensor};
use crate::cube_backend::{CubeWeight, HEAD_TILE_ELEMENTS, push, read};
use crate::evaluation::Steps;
use crate::ops::mixture_of_experts::{Mixture, precise::route};
use crate::ops::{delta_gates::SOFTPLUS_IDENTITY, gated_delta_rule::L2_EPSILON, round, score_head};
use crate::precise::{Host, Precise, ROW_TILE, Rounding, SCORE_ELEMENTS, routing};
use crate::precision::Precision;
use product::{Finish, Tile, gather, output_tile, whole, widen};

type Cuda<BT> = CubeBackend<CudaRuntime, f32, i32, BT>;
type Weight = CubeWeight<CudaRuntime>;

const ROWS: &str = text!("rows.cu");
const DELTA: &str = text!("delta.cu");
const ATTENTION: &str = text!("attention.cu");
const HEAD: &str = text!("head.cu");
const EXPERTS: &str = text!("experts.cu");

/// Most queries of a tile of attention, so that causality leaves little to waste.
const QUERY_TILE: usize = 512;
/// Rows of the state that the delta rule's kernel keeps in the registers of one of eight lanes.
const MAX_KEY_ROWS: usize = 32;
/// Columns of the state per block, as in the kernel text.
const DELTA_COLUMNS: usize = 16;
const THREADS: usize = 256;

/// The operations on a card.
#[derive(Debug)]
pub struct Card {
    /// Whether products go through cuBLASLt where it is there; else, and without it, through a plain kernel.
    pub library: bool,
}

/// The operations as fast as they go.
pub(super) static CARD: Card = Card { library: true };

/// How the kernels name a type, and a precision by the type that stores it.
fn kind(dtype: DType) -> u64 {
    match dtype {
        DType::BF16 => 1,
        DType::F16 => 2,
        DType::F64 => 3,
        _ => 0,
    }
}

fn stored(to: Precision) -> DType {
    storage::<CudaRuntime>(to)
}

fn target(to: Precision) -> u64 {
    kind(stored(to))
}

fn each(steps: Steps) -> u64 {
    u64::from(steps == Steps::Each)
}

/// Queues kernel `entry` of a text, `THREADS` to a block.
///
/// # Safety
/// `buffers` and `info` must be what the kernel takes, and what it makes of `info` inside the buffers.
unsafe fn launch(text: &str, entry: &'static str, grid: [usize; 3], buffers: &[&CudaTensor], info: &[u64]) {
    let kernel = CudaSource {
        entry,
        text: CudaSource::text(&[], text),
        threads: THREADS as u32,
        shared_bytes: 0,
    };
    // SAFETY: the caller's promise.
    unsafe { queue(&kernel, grid, buffers, info) };
}

/// # Safety
/// As [`launch`].
unsafe fn queue(kernel: &CudaSource, grid: [usize; 3], buffers: &[&CudaTensor], info: &[u64]) {
    if grid.contains(&0) {
        return;
    }
    let bindings = buffers.iter().map(|t| t.handle.clone().binding()).collect();
    let arguments = KernelArguments::new().with_buffers(bindings);
    // SAFETY: the caller's promise.
    unsafe { kernel.launch(&buffers[0].client, grid.into(), arguments, info.to_vec()) };
}

/// `values` beside `like`.
pub(super) fn upload<E: NoUninit>(like: &CudaTensor, values: &[E], dtype: DType) -> CudaTensor {
    let handle = like.client.create_from_slice(bytemuck::cast_slice(values));
    CudaTensor::new_contiguous(
        like.client.clone(),
        like.device.clone(),
        Shape::from([values.len()]),
        handle,
        dtype,
    )
}

/// The shape of `x` with another last axis.
fn with_last(x: &CudaTensor, width: usize) -> Shape {
    let mut shape = x.meta.shape().clone();
    if let Some(last) = shape.last_mut() {
        *last = width;
    }
    shape
}

fn norm(x: &CudaTensor, weight: &CudaTensor, z: Option<&CudaTensor>, eps: f32, how: Rounding) -> CudaTensor {
    let width = weight.meta.num_elements();
    let rows = x.meta.num_elements() / width;
    let out = empty(x, x.meta.shape().clone(), stored(how.to));
    let gate = z.unwrap_or(x);
    let info = [
        rows as u64,
        width as u64,
        kind(x.dtype),
        kind(weight.dtype),
        kind(gate.dtype),
        u64::from(z.is_some()),
        each(how.steps),
        target(how.to),
        f64::from(eps).to_bits(),
    ];
    // SAFETY: rows beyond the last do nothing.
    unsafe {
        launch(
            ROWS,
            "f64_norm",
            [rows.div_ceil(8), 1, 1],
            &[x, weight, gate, &out],
            &info,
        )
    };
    out
}

impl<BT: BoolElement> Precise<Cuda<BT>> for Card {
    fn project(&self, x: Tensor<Cuda<BT>, 3>, weight: &Weight, how: Rounding) -> Tensor<Cuda<BT>, 3> {
        let x = primitive(x);
        let out = empty(&x, with_last(&x, weight.shape()[0]), stored(how.to));
        self.multiply(&x, weight, None, None, &out, how);
        tensor(out)
    }

    fn project_add(
        &self,
        residual: Tensor<Cuda<BT>, 3>,
        x: Tensor<Cuda<BT>, 3>,
        weight: &Weight,
        how: Rounding,
    ) -> Tensor<Cuda<BT>, 3> {
        let (residual, x) = (primitive(residual), primitive(x));
        let out = empty(&x, with_last(&x, weight.shape()[0]), stored(how.to));
        self.multiply(&x, weight, None, Some(&residual), &out, how);
        tensor(out)
    }

    fn swiglu(&self, x: Tensor<Cuda<BT>, 3>, gate: &Weight, up: &Weight, how: Rounding) -> Tensor<Cuda<BT>, 3> {
        let x = primitive(x);
        let out = empty(&x, with_last(&x, gate.shape()[0]), stored(how.to));
        self.multiply(&x, gate, Some(up), None, &out, how);
        tensor(out)
    }

    /// Experts are chosen on the host, from the logits of all rows.
    fn mixture_of_experts(
        &self,
        residual: Tensor<Cuda<BT>, 3>,
        x: Tensor<Cuda<BT>, 3>,
        weights: &Mixture<Cuda<BT>>,
        how: Rounding,
    ) -> (Tensor<Cuda<BT>, 3>, Routing<Cuda<BT>>) {
        let (device, top_k) = (x.device(), weights.top_k);
        let (residual, x) = (primitive(residual), primitive(x));
        let [experts, width] = weights.router.shape();
        let rows = x.meta.num_elements() / width;
        let out = empty(&x, x.meta.shape().clone(), stored(how.to));
        let (mut all_ids, mut all_shares) = (vec![], vec![]);
        let hidden_rows = |product: &CudaTensor, other: &CudaTensor, inner: usize, distance: usize, offset: usize| {
            let rows = product.meta.shape()[1];
            let out = empty(product, [1, rows, inner], DType::F64);
            let tile = Tile {
                product,
                rows,
                columns: inner,
                distance,
                first_row: 0,
                first_column: 0,
                stride: inner,
                out: &out,
                to: Precision::Full,
            };
            tile.finish(Finish::Expert { other, offset }, how.steps);
            out
        };
        for first_row in (0..rows).step_by(ROW_TILE) {
            let count = ROW_TILE.min(rows - first_row);
            let x = widen(&x, first_row, count, width);
            let logits: Vec<f64> = read(self.product(&x, &whole(&weights.router)));
            let (ids, shares) = route(logits, experts, top_k, how.steps);
            let mut chosen = vec![vec![]; experts];
            for (choice, &id) in ids.iter().enumerate() {
                chosen[id as usize].push(choice as u32);
            }
            let on_card = upload(&x, &shares, DType::F32);
            // Twice as many float32 zeros are as many f64 ones.
            let sum = primitive(Tensor::<Cuda<BT>, 1>::zeros([2 * count * width], &device));
            for (expert, chosen) in weights.experts.iter().zip(&chosen) {
                if chosen.is_empty() {
                    continue;
                }
                let choices = upload(&x, chosen, DType::U32);
                let both = self.product(&gather(&x, &choices, top_k, width), &whole(&expert.gate_up));
                let inner = both.meta.shape()[2] / 2;
                let hidden = hidden_rows(&both, &both, inner, 2 * inner, inner);
                let outputs = self.product(&hidden, &whole(&expert.down));
                let info = [width as u64, top_k as u64, each(how.steps)];
                let grid = [chosen.len(), width.div_ceil(THREADS), 1];
                // SAFETY: choices are places in `[count, top_k]`, each row of them once.
                unsafe {
                    launch(
                        EXPERTS,
                        "f64_expert",
                        grid,
                        &[&outputs, &choices, &on_card, &sum],
                        &info,
                    )
                };
            }
            let (gate, up) = (
                self.product(&x, &whole(&weights.shared_gate)),
                self.product(&x, &whole(&weights.shared_up)),
            );
            let inner = gate.meta.shape()[2];
            let hidden = hidden_rows(&gate, &up, inner, inner, 0);
            let shared = self.product(&hidden, &whole(&weights.shared_down));
            let scores = self.product(&x, &whole(&weights.shared_score));
            let info = [
                first_row as u64,
                width as u64,
                kind(residual.dtype),
                each(how.steps),
                target(how.to),
            ];
            let grid = [count, width.div_ceil(THREADS), 1];
            // SAFETY: one block per row of the tile, which are rows of residual and result.
            unsafe {
                launch(
                    EXPERTS,
                    "f64_mixture",
                    grid,
                    &[&residual, &sum, &shared, &scores, &out],
                    &info,
                )
            };
            all_ids.extend(ids);
            all_shares.extend(shares);
        }
        (tensor(out), routing(all_ids, all_shares, top_k, &device))
    }

    fn offset_rms_norm(
        &self,
        x: Tensor<Cuda<BT>, 2>,
        weight: Tensor<Cuda<BT>, 1>,
        eps: f32,
        how: Rounding,
    ) -> Tensor<Cuda<BT>, 2> {
        tensor(norm(&primitive(x), &primitive(weight), None, eps, how))
    }

    fn gated_rms_norm(
        &self,
        x: Tensor<Cuda<BT>, 2>,
        weight: Tensor<Cuda<BT>, 1>,
        z: Tensor<Cuda<BT>, 2>,
        eps: f32,
        how: Rounding,
    ) -> Tensor<Cuda<BT>, 2> {
        tensor(norm(&primitive(x), &primitive(weight), Some(&primitive(z)), eps, how))
    }

    fn rotary(
        &self,
        x: Tensor<Cuda<BT>, 4>,
        table: &RotaryTable<Cuda<BT>>,
        first_position: usize,
        how: Rounding,
    ) -> Tensor<Cuda<BT>, 4> {
        let [batch, tokens, heads, head_dim] = x.dims();
        let x = primitive(x);
        let (angles, half) = (table.angles(), table.angles().pairs);
        let seen = first_position * half..(first_position + tokens) * half;
        let [cos, sin] = [&angles.cos, &angles.sin].map(|values| upload(&x, &values[seen.clone()], DType::F64));
        // What is not rotated stays as it is: in float32 unless it is as narrow as the result.
        let kept = if x.dtype == stored(how.to) { x.dtype } else { DType::F32 };
        let out = empty(&x, x.meta.shape().clone(), kept);
        let info = [
            tokens as u64,
            heads as u64,
            head_dim as u64,
            half as u64,
            kind(x.dtype),
            each(how.steps),
            target(how.to),
            kind(kept),
        ];
        // SAFETY: one block per head of a token, angles of every token.
        unsafe {
            launch(
                ROWS,
                "f64_rotary",
                [batch * tokens * heads, 1, 1],
                &[&x, &cos, &sin, &out],
                &info,
            )
        };
        tensor(out)
    }

    fn causal_conv_silu(
        &self,
        x: Tensor<Cuda<BT>, 3>,
        weight: Tensor<Cuda<BT>, 2>,
        tail: Tensor<Cuda<BT>, 3>,
        how: Rounding,
    ) -> (Tensor<Cuda<BT>, 3>, Tensor<Cuda<BT>, 3>) {
        let ([batch, tokens, channels], [_, width]) = (x.dims(), weight.dims());
        let (x, weight, tail) = (primitive(x), primitive(weight), primitive(tail));
        let out = empty(&x, x.meta.shape().clone(), stored(how.to));
        let next = empty(&x, tail.meta.shape().clone(), DType::F32);
        let info = [
            tokens as u64,
            channels as u64,
            width as u64,
            kind(x.dtype),
            kind(weight.dtype),
            kind(tail.dtype),
            each(how.steps),
            target(how.to),
        ];
        let grid = [batch * (tokens + width - 1), channels.div_ceil(THREADS), 1];
        // SAFETY: channels beyond the last do nothing, rows are those of the tail and `x`.
        unsafe { launch(ROWS, "f64_convolution", grid, &[&x, &weight, &tail, &out, &next], &info) };
        (tensor(out), tensor(next))
    }

    fn delta_gates(
        &self,
        a: Tensor<Cuda<BT>, 3>,
        b: Tensor<Cuda<BT>, 3>,
        a_log: Tensor<Cuda<BT>, 1>,
        dt_bias: Tensor<Cuda<BT>, 1>,
        steps: Steps,
    ) -> (Tensor<Cuda<BT>, 3>, Tensor<Cuda<BT>, 3>) {
        let (a, b) = (primitive(a), primitive(b));
        let (a_log, dt_bias) = (primitive(a_log), primitive(dt_bias));
        let count = a.meta.num_elements();
        let [g, beta] = [&a, &b].map(|x| empty(x, x.meta.shape().clone(), DType::F32));
        let info = [
            count as u64,
            a_log.meta.num_elements() as u64,
            kind(a.dtype),
            kind(b.dtype),
            kind(a_log.dtype),
            kind(dt_bias.dtype),
            each(steps),
            f64::from(SOFTPLUS_IDENTITY).to_bits(),
        ];
        let buffers = [&a, &b, &a_log, &dt_bias, &g, &beta];
        // SAFETY: elements beyond the last do nothing.
        unsafe {
            launch(
                ROWS,
                "f64_delta_gates",
                [count.div_ceil(THREADS), 1, 1],
                &buffers,
                &info,
            )
        };
        (tensor(g), tensor(beta))
    }

    fn gated_delta_rule(
        &self,
        qkv: Tensor<Cuda<BT>, 3>,
        g: Tensor<Cuda<BT>, 3>,
        beta: Tensor<Cuda<BT>, 3>,
        state: Tensor<Cuda<BT>, 4>,
        heads: DeltaHeads,
        how: Rounding,
    ) -> (Tensor<Cuda<BT>, 4>, Tensor<Cuda<BT>, 4>) {
        let key_rows = heads.key_dim.div_ceil(8);
        if key_rows > MAX_KEY_ROWS {
            return Host.gated_delta_rule(qkv, g, beta, state, heads, how);
        }
        let [batch, tokens, channels] = qkv.dims();
        let wide = |x| round::cube::launch(x, Precision::Full);
        let qkv = primitive(qkv);
        let (g, beta, state) = (wide(primitive(g)), wide(primitive(beta)), wide(primitive(state)));
        let rows = batch * tokens;
        let qk = empty(&qkv, [rows, 2, heads.key_heads, heads.key_dim], DType::F64);
        let info = [
            rows as u64,
            channels as u64,
            heads.key_heads as u64,
            heads.key_dim as u64,
            kind(qkv.dtype),
            each(how.steps),
            (heads.key_dim as f64).sqrt().recip().to_bits(),
            f64::from(L2_EPSILON).to_bits(),
        ];
        let units = rows * 2 * heads.key_heads;
        // SAFETY: units beyond the last do nothing.
        unsafe { launch(DELTA, "f64_delta_units", [units.div_ceil(8), 1, 1], &[&qkv, &qk], &info) };

        let out = empty(
            &qkv,
            [batch, tokens, heads.value_heads, heads.value_dim],
            stored(how.to),
        );
        let next = empty(&state, state.meta.shape().clone(), DType::F32);
        let kernel = CudaSource {
            entry: "f64_delta",
            text: CudaSource::text(&[("KEY_ROWS", &key_rows.to_string())], DELTA),
            threads: 128,
            shared_bytes: 0,
        };
        let info = [
            tokens,
            channels,
            heads.key_heads,
            heads.value_heads,
            heads.key_dim,
            heads.value_dim,
            kind(qkv.dtype) as usize,
            target(how.to) as usize,
        ]
        .map(|value| value as u64);
        let grid = [heads.value_dim.div_ceil(DELTA_COLUMNS), heads.value_heads, batch];
        // SAFETY: tokens, rows and columns beyond the last are neither read nor written.
        unsafe { queue(&kernel, grid, &[&qkv, &qk, &g, &beta, &state, &next, &out], &info) };
        (tensor(out), tensor(next))
    }

    fn causal_attention(
        &self,
        q: Tensor<Cuda<BT>, 4>,
        keys: Tensor<Cuda<BT>, 4>,
        rows: Tensor<Cuda<BT>, 4>,
        first_position: usize,
        how: Rounding,
    ) -> Tensor<Cuda<BT>, 4> {
        let ([batch, tokens, heads, head_dim], [_, kv_heads, capacity, _]) = (q.dims(), keys.dims());
        let (q, keys, values) = (primitive(q), primitive(keys), primitive(rows));
        let out = empty(&q, q.meta.shape().clone(), stored(how.to));
        let group = heads / kv_heads;
        let step = (SCORE_ELEMENTS / (heads * (first_position + tokens))).clamp(1, QUERY_TILE);
        for window in 0..batch {
            for first in (0..tokens).step_by(step) {
                let count = step.min(tokens - first);
                let visible = first_position + first + count;
                let tile_rows = kv_heads * count * group;
                let seen = |cache: &CudaTensor, transpose: bool| {
                    let shape = if transpose {
                        [kv_heads, head_dim, visible]
                    } else {
                        [kv_heads, visible, head_dim]
                    };
                    let out = empty(cache, shape, DType::F64);
                    let info = [
                        window as u64,
                        kv_heads as u64,
                        capacity as u64,
                        visible as u64,
                        head_dim as u64,
                        kind(cache.dtype),
                        u64::from(transpose),
                    ];
                    let grid = [visible.div_ceil(32), head_dim.div_ceil(32), kv_heads];
                    // SAFETY: rows and columns beyond those seen are neither read nor written.
                    unsafe { launch(ATTENTION, "f64_cache", grid, &[cache, &out], &info) };
                    out
                };
                let info = [
                    window as u64,
                    first as u64,
                    count as u64,
                    tokens as u64,
                    heads as u64,
                    kv_heads as u64,
                    head_dim as u64,
                    kind(q.dtype),
                    target(how.to),
                ];
                let queries = empty(&q, [kv_heads, count * group, head_dim], DType::F64);
                // SAFETY: one block per row of the tile.
                unsafe { launch(ATTENTION, "f64_queries", [tile_rows, 1, 1], &[&q, &queries], &info) };
                let scores = self.product(&queries, &seen(&keys, false));
                let softmax = [
                    count as u64,
                    group as u64,
                    visible as u64,
                    (first_position + first + 1) as u64,
                    each(how.steps),
                    (head_dim as f64).sqrt().recip().to_bits(),
                ];
                // SAFETY: one block per row of scores.
                unsafe { launch(ATTENTION, "f64_softmax", [tile_rows, 1, 1], &[&scores], &softmax) };
                let outputs = self.product(&scores, &seen(&values, true));
                // SAFETY: as the queries.
                unsafe { launch(ATTENTION, "f64_outputs", [tile_rows, 1, 1], &[&outputs, &out], &info) };
            }
        }
        tensor(out)
    }

    fn sigmoid_gate(&self, x: Tensor<Cuda<BT>, 1>, gate: Tensor<Cuda<BT>, 1>, how: Rounding) -> Tensor<Cuda<BT>, 1> {
        let (x, gate) = (primitive(x), primitive(gate));
        let count = x.meta.num_elements();
        let out = empty(&x, x.meta.shape().clone(), stored(how.to));
        let info = [
            count as u64,
            kind(x.dtype),
            kind(gate.dtype),
            each(how.steps),
            target(how.to),
        ];
        // SAFETY: elements beyond the last do nothing.
        unsafe {
            launch(
                ROWS,
                "f64_sigmoid_gate",
                [count.div_ceil(THREADS), 1, 1],
                &[&x, &gate, &out],
                &info,
            )
        };
        tensor(out)
    }

    fn score_head(
        &self,
        hidden: Tensor<Cuda<BT>, 2>,
        head: &Weight,
        ask: &HeadRequest<'_>,
        logits: Precision,
    ) -> HeadScores {
        let hidden = primitive(hidden);
        let [outputs, width] = head.shape();
        let rows = hidden.meta.num_elements() / width;
        let tile = (HEAD_TILE_ELEMENTS / outputs).clamp(1, rows.max(1));
        let mut scores = HeadScores::default();
        for first in (0..rows).step_by(tile) {
            let count = tile.min(rows - first);
            let x = widen(&hidden, first, count, width);
            let values = empty(&hidden, [count, outputs], DType::F32);
            let step = output_tile(outputs);
            for first_column in (0..outputs).step_by(step) {
                let columns = step.min(outputs - first_column);
                let tile = Tile {
                    product: &self.product(&x, &product::matrix(head, first_column, columns)),
                    rows: count,
                    columns,
                    distance: columns,
                    first_row: 0,
                    first_column,
                    stride: outputs,
                    out: &values,
                    to: logits,
                };
                tile.finish(Finish::Plain, Steps::Once);
            }
            let sums = empty(&hidden, [count, 2], DType::F64);
            let info = [outputs as u64, ask.public_rows as u64];
            // SAFETY: one block per row; public rows are rows of the head.
            unsafe { launch(HEAD, "f64_head_sum", [count, 1, 1], &[&values, &sums], &info) };
            let (reduced, ids) = score_head::cube::launch(values, ask, first);
            let normalisers = read::<_, f64>(sums);
            let normalisers = normalisers.as_chunks::<2>().0.iter().map(|[sum, most]| most + sum.ln());
            push(
                &mut scores,
                &read::<_, f32>(reduced),
                &read::<_, u32>(ids),
                normalisers,
                ask,
            );
        }
        scores
    }
}
