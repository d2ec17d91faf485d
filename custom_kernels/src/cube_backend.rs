//! The operations on CubeCL runtimes: portable kernels, and what [`KernelRuntime`] adds on a runtime that has better.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_cubecl::{CubeBackend, CubeElement, kernel};

use crate::backend::{
    ActivationFormat, BlockSelection, CodedSides, DeltaHeads, EvaluatorBackend, Expert, HeadRequest, HeadScores,
    PackedExperts, Residency, RotaryTable, Routing, RowCoding, RowFormat,
};
use crate::cube::{
    CubeTensor, KernelRuntime, MixtureOperands, PackedJob, contiguous, empty, primitive, storage, tensor,
};
use crate::ops::widen;
use crate::ops::{
    append_rows, causal_attention, causal_conv_silu, coded_rows, delta_gates, embed_tokens,
    expand_weight::cube::{Packed, all_finite},
    expand_weight::{ExpandError, Packing, StoredMatrix},
    expert_feed_forward, gated_delta_rule, hadamard, hyper_connection, mixture_of_experts,
    mixture_of_experts::Mixture,
    offset_rms_norm,
    offset_rms_norm::cube::Factor,
    packed_experts, project, quantize_rows, rotary, round, route_experts, score_head,
    sigmoid_gate::cube::{self as gate, Gate},
    sparse_attention,
};
use crate::precise::{Host, Precise};
use crate::precision::Precision;

/// Logits held at once on a card: 1 GiB of float32, about 1,080 rows of a 248,320-row head, enough for a full-speed product.
pub(crate) const HEAD_TILE_ELEMENTS: usize = 1 << 28;

/// The same where one buffer may be limited to 128 MiB, as Vulkan guarantees no more.
const SMALL_HEAD_TILE_ELEMENTS: usize = 1 << 24;

/// A matrix `[out, in]` on the device.
#[derive(Debug, Clone)]
pub enum CubeWeight<R: KernelRuntime> {
    /// Values, bfloat16 where the runtime stores it and it holds them exactly, else float32.
    Dense(CubeTensor<R>),
    /// Codes as an artifact stores them, expanded into a scratch tensor for each use.
    Packed(PackedWeight<R>),
    /// Rows of a matrix that holds others too.
    Rows(Arc<Self>, Range<usize>),
}

/// Stored codes of a matrix.
#[derive(Debug, Clone)]
pub struct PackedWeight<R: KernelRuntime> {
    codes: Packed<R>,
    /// Float32 scales of an FP8 matrix whose inputs may be 8-bit too.
    row_scales: Option<CubeTensor<R>>,
}

/// The type of dense weights.
fn dense_type<R: KernelRuntime>() -> DType {
    if R::NARROW { DType::BF16 } else { DType::F32 }
}

impl<R: KernelRuntime> CubeWeight<R> {
    /// Uploads a packed matrix, with `eight_bit_inputs` for products with 8-bit rows where the device has them.
    ///
    /// # Errors
    /// When the matrix is larger than the runtime addresses.
    pub fn packed(matrix: &StoredMatrix<'_>, eight_bit_inputs: bool, device: &R::Device) -> Result<Self, ExpandError> {
        let client = R::client(device);
        let tensor = |handle, elements: usize, dtype: DType| {
            CubeTensor::new_contiguous(client.clone(), device.clone(), [elements].into(), handle, dtype)
        };
        let words = matrix.bytes().div_ceil(4);
        let words = tensor(
            R::upload(&client, 4 * words, &mut matrix.pieces(), device),
            words,
            DType::U32,
        );
        let row_scales = matrix
            .row_scales()
            .filter(|_| eight_bit_inputs && R::multiplies_e4m3(device))
            .map(|scales| {
                let handle = client.create_from_slice(bytemuck::cast_slice(&scales));
                tensor(handle, scales.len(), DType::F32)
            });
        Ok(Self::Packed(PackedWeight {
            codes: Packed::new(words, matrix.packing(), matrix.shape())?,
            row_scales,
        }))
    }

    /// `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::Dense(matrix) => [matrix.meta.shape()[0], matrix.meta.shape()[1]],
            Self::Packed(packed) => packed.codes.shape,
            Self::Rows(whole, rows) => [rows.len(), whole.shape()[1]],
        }
    }

    /// Rows `first..first + count`: a tensor and the row of it where they begin. Values of codes come in float32.
    #[cfg(feature = "cuda")]
    pub(crate) fn rows(&self, first: usize, count: usize) -> (CubeTensor<R>, usize) {
        match self {
            Self::Dense(matrix) => (contiguous(matrix.clone()), first),
            Self::Packed(packed) => {
                let ids: Vec<u32> = (first as u32..(first + count) as u32).collect();
                (packed.codes.rows(&ids, DType::F32), 0)
            }
            Self::Rows(whole, rows) => whole.rows(rows.start + first, count),
        }
    }

    /// The values, contiguous: those of codes as `dtype`.
    fn values(&self, dtype: DType) -> CubeTensor<R> {
        match self {
            Self::Dense(matrix) => contiguous(matrix.clone()),
            Self::Packed(packed) => packed.codes.values(dtype),
            Self::Rows(whole, rows) => match &**whole {
                Self::Packed(packed) => {
                    let ids: Vec<u32> = rows.clone().map(|row| row as u32).collect();
                    packed.codes.rows(&ids, dtype)
                }
                whole => {
                    let matrix = whole.values(dtype);
                    let columns = 0..matrix.meta.shape()[1];
                    contiguous(kernel::slice(matrix, &[rows.clone(), columns]))
                }
            },
        }
    }

    /// The matrix that `parts` are all rows of, in order.
    fn whole<'a>(parts: impl Iterator<Item = &'a Self>) -> Option<&'a Self> {
        let (mut found, mut next): (Option<&Arc<Self>>, usize) = (None, 0);
        for part in parts {
            match part {
                Self::Rows(whole, rows)
                    if rows.start == next && found.is_none_or(|other| Arc::ptr_eq(whole, other)) =>
                {
                    (found, next) = (Some(whole), rows.end);
                }
                _ => return None,
            }
        }
        found.map(|whole| &**whole).filter(|whole| whole.shape()[0] == next)
    }
}

impl<R: KernelRuntime, BT: burn_cubecl::element::BoolElement> From<Tensor<CubeBackend<R, f32, i32, BT>, 2>>
    for CubeWeight<R>
{
    fn from(matrix: Tensor<CubeBackend<R, f32, i32, BT>, 2>) -> Self {
        let to = if R::NARROW { Precision::Bf16 } else { Precision::Full };
        Self::Dense(round::cube::launch(primitive(matrix), to))
    }
}

impl<R, BT> EvaluatorBackend for CubeBackend<R, f32, i32, BT>
where
    R: KernelRuntime,
    BT: burn_cubecl::element::BoolElement,
{
    type Weight = CubeWeight<R>;

    fn weight(values: Vec<f32>, shape: [usize; 2], stored: Precision, device: &Self::Device) -> Self::Weight {
        let matrix = Tensor::<Self, 2>::from_data(TensorData::new(values, shape), device);
        match stored {
            Precision::Bf16 => matrix.into(),
            _ => CubeWeight::Dense(primitive(matrix)),
        }
    }

    const ON_DEVICE: bool = true;
    const STACKS_EXPERTS: bool = R::NARROW;

    fn stored_weight(matrix: &StoredMatrix<'_>, residency: Residency, device: &Self::Device) -> Option<Self::Weight> {
        let eight_bit = residency == Residency::EightBit;
        let packed = CubeWeight::packed(matrix, eight_bit, device).ok()?;
        // Words of bfloat16 are their values, whatever they stand for.
        if matrix.packing() == Packing::Bf16 {
            return Some(CubeWeight::Dense(packed.values(dense_type::<R>())));
        }
        let values = packed.values(dense_type::<R>());
        all_finite(&values).then(|| match residency {
            Residency::Dense => CubeWeight::Dense(values),
            Residency::Packed | Residency::EightBit => packed,
        })
    }

    fn rows(weight: Self::Weight, counts: &[usize]) -> Vec<Self::Weight> {
        let (whole, mut first) = (Arc::new(weight), 0);
        let part = |count: &usize| {
            first += count;
            CubeWeight::Rows(whole.clone(), first - count..first)
        };
        counts.iter().map(part).collect()
    }

    fn dense(weight: &Self::Weight) -> Tensor<Self, 2> {
        tensor(weight.values(DType::F32))
    }

    fn precise(device: &Self::Device) -> &'static dyn Precise<Self> {
        R::precise(device).unwrap_or(&Host)
    }

    fn round<const D: usize>(x: Tensor<Self, D>, to: Precision) -> Tensor<Self, D> {
        tensor(round::cube::launch(primitive(x), to))
    }

    fn embed_tokens(table: &Self::Weight, ids: &[u32], batch: usize, to: Precision) -> Tensor<Self, 3> {
        match table {
            CubeWeight::Dense(_) | CubeWeight::Rows(..) => {
                let table = table.values(DType::F32);
                tensor(embed_tokens::cube::launch(table, ids, batch, to))
            }
            CubeWeight::Packed(table) => {
                let rows = table.codes.rows(ids, storage::<R>(to));
                let width = table.codes.shape[1];
                let rows: Tensor<Self, 2> = tensor(round::cube::launch(rows, to));
                rows.reshape([batch, ids.len() / batch, width])
            }
        }
    }

    fn project(x: Tensor<Self, 3>, weight: &Self::Weight, to: Precision) -> Tensor<Self, 3> {
        linear(x, weight, None, to)
    }

    fn project_add(
        residual: Tensor<Self, 3>,
        x: Tensor<Self, 3>,
        weight: &Self::Weight,
        to: Precision,
    ) -> Tensor<Self, 3> {
        linear(x, weight, Some(residual), to)
    }

    fn swiglu(x: Tensor<Self, 3>, gate: &Self::Weight, up: &Self::Weight, to: Precision) -> Tensor<Self, 3> {
        let stored = between::<R>(to);
        let gate = linear(x.clone(), gate, None, stored);
        let up = linear(x, up, None, stored);
        tensor(gate::launch(primitive(gate), primitive(up), Gate::Swiglu, to))
    }

    fn quantize_rows(x: Tensor<Self, 3>, format: ActivationFormat) -> Tensor<Self, 3> {
        let width = x.dims()[2];
        // Devices that store bfloat16 divide and round as the formulas say.
        let values = R::NARROW.then(|| quantize_rows::cube::values(&primitive(x.clone()), width, format));
        values
            .flatten()
            .map_or_else(|| quantize_rows::reference(x, format), tensor)
    }

    fn project_quantized(
        x: Tensor<Self, 3>,
        format: ActivationFormat,
        weight: &Self::Weight,
        residual: Option<Tensor<Self, 3>>,
        to: Precision,
    ) -> Tensor<Self, 3> {
        let narrow = NarrowRows::new(&x, format, &[weight]);
        narrow
            .and_then(|rows| rows.product(weight, residual.clone(), to))
            .unwrap_or_else(|| linear(Self::quantize_rows(x, format), weight, residual, to))
    }

    fn swiglu_quantized(
        x: Tensor<Self, 3>,
        format: ActivationFormat,
        gate: &Self::Weight,
        up: &Self::Weight,
        to: Precision,
    ) -> Tensor<Self, 3> {
        let stored = between::<R>(to);
        let products = NarrowRows::new(&x, format, &[gate, up])
            .map(|rows| [gate, up].map(|weight| rows.product::<BT>(weight, None, stored)));
        match products {
            Some([Some(gate), Some(up)]) => tensor(gate::launch(primitive(gate), primitive(up), Gate::Swiglu, to)),
            _ => Self::swiglu(Self::quantize_rows(x, format), gate, up, to),
        }
    }

    fn route_experts(x: Tensor<Self, 3>, router: &Self::Weight, top_k: usize) -> Routing<Self> {
        let ([batch, tokens, _], [count, _]) = (x.dims(), router.shape());
        // Rows in float32 meet the router in float32: what a product of two terms leaves out could change a choice.
        let router = CubeWeight::Dense(round::cube::launch(router.values(DType::F32), Precision::Full));
        let logits = linear(x, &router, None, Precision::Full);
        let logits = logits.reshape([batch * tokens, count]);
        match R::choose_experts(&primitive(logits.clone()), top_k) {
            Some([experts, weights]) => Routing {
                experts: Tensor::from_primitive(experts),
                weights: tensor(weights),
            },
            None => route_experts::choose(logits, top_k),
        }
    }

    fn multiplies_packed_experts(device: &Self::Device) -> bool {
        R::multiplies_packed_experts(device)
    }

    fn records(
        bytes: usize,
        pieces: &mut dyn Iterator<Item = (usize, &[u8])>,
        device: &Self::Device,
    ) -> Option<Tensor<Self, 1, Int>> {
        if !R::multiplies_packed_experts(device) {
            return None;
        }
        let client = R::client(device);
        let words = bytes.div_ceil(4);
        let handle = R::upload(&client, 4 * words, pieces, device);
        let words = CubeTensor::new_contiguous(client, device.clone(), [words].into(), handle, DType::I32);
        Some(Tensor::from_primitive(words))
    }

    fn packed_experts(
        x: &Tensor<Self, 2>,
        experts: &PackedExperts<'_, Self>,
        outputs: Option<Tensor<Self, 3>>,
    ) -> Option<Tensor<Self, 3>> {
        let job = PackedJob {
            x: &primitive(x.clone()),
            records: &experts.records.clone().into_primitive(),
            stride: experts.stride,
            inner: experts.inner,
            factors: experts.factors,
            scales: experts.scales,
            counts: experts.counts,
            choices: experts.choices,
            top_k: experts.top_k,
        };
        let outputs = outputs.map(|outputs| owned(outputs.into_primitive().tensor()));
        R::packed_experts(&job, outputs).map(tensor)
    }

    fn combine_experts(
        outputs: Tensor<Self, 3>,
        weights: Tensor<Self, 2>,
        shared: Tensor<Self, 3>,
        scores: Tensor<Self, 3>,
        to: Precision,
    ) -> Tensor<Self, 3> {
        let operands = [
            primitive(outputs.clone()),
            primitive(weights.clone()),
            primitive(shared.clone()),
            primitive(scores.clone()),
        ];
        let combined = match storage::<R>(to) {
            DType::BF16 => R::combine_experts(operands.each_ref()),
            _ => None,
        };
        combined.map_or_else(
            || packed_experts::reference(outputs, weights, shared, scores, to),
            tensor,
        )
    }

    fn expert_feed_forward(
        x: Tensor<Self, 3>,
        routing: &Routing<Self>,
        experts: &[Expert<Self::Weight>],
    ) -> Tensor<Self, 3> {
        // Rows in 16 bits meet the weights in 16 bits in both products, as in `swiglu`.
        let inner = match x.clone().into_primitive().tensor().dtype {
            DType::BF16 => Precision::Bf16,
            _ => Precision::Full,
        };
        expert_feed_forward::grouped(x, routing, experts, inner, |g, up| {
            tensor(gate::launch(primitive(g), primitive(up), Gate::Swiglu, inner))
        })
    }

    fn mixture_of_experts(
        residual: Tensor<Self, 3>,
        x: Tensor<Self, 3>,
        weights: &Mixture<Self>,
        to: Precision,
    ) -> (Tensor<Self, 3>, Routing<Self>) {
        match routed_on_device(&residual, &x, weights, to) {
            Some([y, experts, shares]) => {
                let routing = Routing {
                    experts: Tensor::from_primitive(experts),
                    weights: tensor(shares),
                };
                (tensor(y), routing)
            }
            None => mixture_of_experts::mixture(residual, x, weights, to),
        }
    }

    fn offset_rms_norm<const D: usize>(
        x: Tensor<Self, D>,
        weight: Tensor<Self, 1>,
        eps: f32,
        to: Precision,
    ) -> Tensor<Self, D> {
        tensor(offset_rms_norm::cube::launch(
            primitive(x),
            primitive(weight),
            None,
            eps,
            to,
        ))
    }

    fn gated_rms_norm<const D: usize>(
        x: Tensor<Self, D>,
        weight: Tensor<Self, 1>,
        z: Tensor<Self, D>,
        eps: f32,
        to: Precision,
    ) -> Tensor<Self, D> {
        let z = Some((primitive(z), Factor::Silu));
        tensor(offset_rms_norm::cube::launch(
            primitive(x),
            primitive(weight),
            z,
            eps,
            to,
        ))
    }

    fn sigmoid_gated_rms_norm<const D: usize>(
        x: Tensor<Self, D>,
        weight: Tensor<Self, 1>,
        z: Tensor<Self, D>,
        eps: f32,
        to: Precision,
    ) -> Tensor<Self, D> {
        let z = Some((primitive(z), Factor::Sigmoid));
        tensor(offset_rms_norm::cube::launch(
            primitive(x),
            primitive(weight),
            z,
            eps,
            to,
        ))
    }

    fn stream_norm(x: Tensor<Self, 4>, weight: Tensor<Self, 2>, eps: f32, to: Precision) -> Tensor<Self, 4> {
        let (x, weight) = (primitive(x), primitive(weight));
        tensor(offset_rms_norm::cube::launch(x, weight, None, eps, to))
    }

    fn mix_streams(u: Tensor<Self, 3>, normal: Tensor<Self, 4>, to: Precision) -> Tensor<Self, 3> {
        let [batch, tokens, streams, width] = normal.dims();
        let shape = [batch, tokens, width];
        tensor(hyper_connection::cube::mix(
            primitive(u),
            primitive(normal),
            shape,
            streams,
            to,
        ))
    }

    fn write_streams(
        streams: Tensor<Self, 3>,
        y: Tensor<Self, 3>,
        weights: Tensor<Self, 3>,
        to: Precision,
    ) -> Tensor<Self, 3> {
        let shape = [weights.dims()[2], y.dims()[2]];
        let weights = round::cube::launch(primitive(weights), Precision::Full);
        tensor(hyper_connection::cube::write(
            primitive(streams),
            primitive(y),
            weights,
            shape,
            to,
        ))
    }

    fn rotary(x: Tensor<Self, 4>, table: &RotaryTable<Self>, first_position: usize, to: Precision) -> Tensor<Self, 4> {
        let (cos, sin) = (primitive(table.cos.clone()), primitive(table.sin.clone()));
        tensor(rotary::cube::launch(primitive(x), cos, sin, first_position, to))
    }

    fn causal_conv_silu(
        x: Tensor<Self, 3>,
        weight: Tensor<Self, 2>,
        tail: Tensor<Self, 3>,
        to: Precision,
    ) -> (Tensor<Self, 3>, Tensor<Self, 3>) {
        let (y, next) = causal_conv_silu::cube::launch(primitive(x), primitive(weight), primitive(tail), to);
        (tensor(y), tensor(next))
    }

    fn delta_gates(
        a: Tensor<Self, 3>,
        b: Tensor<Self, 3>,
        a_log: Tensor<Self, 1>,
        dt_bias: Tensor<Self, 1>,
    ) -> (Tensor<Self, 3>, Tensor<Self, 3>) {
        let (g, beta) = delta_gates::cube::launch(primitive(a), primitive(b), primitive(a_log), primitive(dt_bias));
        (tensor(g), tensor(beta))
    }

    fn gated_delta_rule(
        qkv: Tensor<Self, 3>,
        g: Tensor<Self, 3>,
        beta: Tensor<Self, 3>,
        state: Tensor<Self, 4>,
        heads: DeltaHeads,
        to: Precision,
    ) -> (Tensor<Self, 4>, Tensor<Self, 4>) {
        let wide = |x: CubeTensor<R>| round::cube::launch(x, Precision::Full);
        let qkv = primitive(qkv);
        let (g, beta, state) = (wide(primitive(g)), wide(primitive(beta)), wide(primitive(state)));
        let special = match to {
            Precision::Bf16 => R::gated_delta_rule(&qkv, &g, &beta, &state, heads),
            _ => None,
        };
        let (out, next) = special.unwrap_or_else(|| gated_delta_rule::cube::launch(qkv, g, beta, state, heads, to));
        (tensor(out), tensor(next))
    }

    fn append_rows(cache: Tensor<Self, 4>, rows: Tensor<Self, 4>, at: usize) -> Tensor<Self, 4> {
        let (cache, rows) = (cache.into_primitive().tensor(), primitive(rows));
        let cache = if R::NARROW && cache.dtype != rows.dtype && at == 0 {
            // A cache takes the type of its first rows; what lies beyond them is never read.
            empty(&cache, cache.meta.shape().clone(), rows.dtype)
        } else {
            owned(cache)
        };
        tensor(append_rows::cube::launch(cache, rows, at))
    }

    fn hadamard<const D: usize>(x: Tensor<Self, D>, block: usize, to: Precision) -> Tensor<Self, D> {
        let x = primitive(x);
        match hadamard::cube::launch(&x, block, to) {
            Some(y) => tensor(y),
            None => Self::round(hadamard::reference(widen(tensor::<R, Self, D>(x)), block), to),
        }
    }

    fn append_coded(
        cache: Tensor<Self, 4, Int>,
        rows: Tensor<Self, 4>,
        at: usize,
        coding: RowCoding,
    ) -> Option<Tensor<Self, 4, Int>> {
        let cache = owned(cache.into_primitive());
        let cache = coded_rows::cube::append(cache, primitive(rows), at, coding);
        Some(Tensor::from_primitive(cache))
    }

    fn decoded_rows(
        cache: Tensor<Self, 4, Int>,
        visible: usize,
        format: RowFormat,
        to: Precision,
    ) -> Option<Tensor<Self, 4>> {
        let rows = coded_rows::cube::decoded(cache.into_primitive(), visible, format, to);
        Some(tensor(rows))
    }

    fn causal_attention(
        q: Tensor<Self, 4>,
        keys: Tensor<Self, 4>,
        values: Tensor<Self, 4>,
        first_position: usize,
        to: Precision,
    ) -> Tensor<Self, 4> {
        let (q, keys, values) = (primitive(q), primitive(keys), primitive(values));
        let special = match to {
            Precision::Bf16 => R::causal_attention(&q, &keys, &values, first_position),
            _ => None,
        };
        tensor(special.unwrap_or_else(|| causal_attention::cube::launch(q, keys, values, first_position, None, to)))
    }

    fn coded_attention(
        q: Tensor<Self, 4>,
        keys: Tensor<Self, 4, Int>,
        values: Tensor<Self, 4, Int>,
        sides: CodedSides,
        first_position: usize,
        to: Precision,
    ) -> Option<Tensor<Self, 4>> {
        // Tensor cores outrun threads that decode: a runtime with its own kernel decodes each row once, before.
        if R::NARROW && to == Precision::Bf16 {
            return causal_attention::over_decoded(q, keys, values, sides, first_position, to);
        }
        let [keys, values] = [keys, values].map(|words| contiguous(words.into_primitive()));
        let o = causal_attention::cube::launch(primitive(q), keys, values, first_position, Some(sides), to);
        Some(tensor(o))
    }

    fn sparse_attention(
        q: Tensor<Self, 4>,
        keys: Tensor<Self, 4>,
        values: Tensor<Self, 4>,
        selection: &BlockSelection,
        to: Precision,
    ) -> Tensor<Self, 4> {
        let operands = [q.clone(), keys.clone(), values.clone()].map(primitive);
        let special = match to {
            Precision::Bf16 => R::sparse_attention(&operands[0], &operands[1], &operands[2], selection),
            _ => None,
        };
        special.map_or_else(|| sparse_attention::reference(q, keys, values, selection, to), tensor)
    }

    fn choose_blocks(
        q: &Tensor<Self, 4>,
        keys: &Tensor<Self, 3>,
        first_position: usize,
        ratio: usize,
        count: usize,
    ) -> Option<BlockSelection> {
        let wide = |x| round::cube::launch(x, Precision::Full);
        let (q, keys) = (wide(primitive(q.clone())), wide(primitive(keys.clone())));
        R::choose_blocks(&q, &keys, first_position, ratio, count)
    }

    fn sigmoid_gate<const D: usize>(x: Tensor<Self, D>, gate: Tensor<Self, D>, to: Precision) -> Tensor<Self, D> {
        tensor(gate::launch(primitive(x), primitive(gate), Gate::Sigmoid, to))
    }

    fn score_head(
        hidden: Tensor<Self, 2>,
        head: &Self::Weight,
        ask: &HeadRequest<'_>,
        logits: Precision,
    ) -> HeadScores {
        let [rows, width] = hidden.dims();
        let elements = if R::NARROW {
            HEAD_TILE_ELEMENTS
        } else {
            SMALL_HEAD_TILE_ELEMENTS
        };
        let tile = (elements / head.shape()[0]).clamp(1, rows.max(1));
        // Expanded once for all tiles.
        let head = &match head {
            CubeWeight::Packed(packed) => {
                CubeWeight::Dense(packed.codes.values(product_type::<R>(&primitive(hidden.clone()))))
            }
            other => other.clone(),
        };
        // Queued for all tiles first: reading waits for the device.
        let reduced: Vec<_> = (0..rows)
            .step_by(tile)
            .map(|first| {
                let count = tile.min(rows - first);
                let x = hidden.clone().narrow(0, first, count).reshape([1, count, width]);
                let values = linear(x, head, None, logits);
                let values = round::cube::launch(primitive(values.reshape([count as i32, -1])), Precision::Full);
                score_head::cube::launch(values, ask, first)
            })
            .collect();
        let mut scores = HeadScores::default();
        for (values, ids) in reduced {
            let values = read::<R, f32>(values);
            let width = score_head::cube::FIXED + ask.top_k + ask.candidates_per_row;
            let normaliser = |row: &[f32]| f64::from(row[0]) + f64::from(row[1]).ln();
            let normalisers = values.chunks_exact(width).map(normaliser);
            push(&mut scores, &values, &read::<R, u32>(ids), normalisers, ask);
        }
        scores
    }
}

/// `x` itself where it may be written in place, else a contiguous copy.
fn owned<R: KernelRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    if x.can_mut() && x.is_contiguous() {
        x
    } else {
        contiguous(x.copy())
    }
}

/// What the products of a SwiGLU pass through memory in: the type of the result, a bfloat16 more per element than the
/// formula.
fn between<R: KernelRuntime>(to: Precision) -> Precision {
    if storage::<R>(to) == DType::F32 {
        Precision::Full
    } else {
        to
    }
}

/// The mixture by the runtime's own kernels; `None` where it has none, or the matrices of the experts are not stacked.
fn routed_on_device<R, BT>(
    residual: &Tensor<CubeBackend<R, f32, i32, BT>, 3>,
    x: &Tensor<CubeBackend<R, f32, i32, BT>, 3>,
    weights: &Mixture<CubeBackend<R, f32, i32, BT>>,
    to: Precision,
) -> Option<[CubeTensor<R>; 3]>
where
    R: KernelRuntime,
    BT: burn_cubecl::element::BoolElement,
{
    let (residual, x) = (primitive(residual.clone()), primitive(x.clone()));
    let narrow = residual.dtype == DType::BF16 && x.dtype == DType::BF16;
    if storage::<R>(to) != DType::BF16 || !narrow {
        return None;
    }
    let gate_up = CubeWeight::whole(weights.experts.iter().map(|expert| &expert.gate_up))?;
    let down = CubeWeight::whole(weights.experts.iter().map(|expert| &expert.down))?;
    let values = |weight: &CubeWeight<R>| weight.values(DType::BF16);
    R::mixture_of_experts(&MixtureOperands {
        residual: &residual,
        x: &x,
        router: &values(&weights.router),
        top_k: weights.top_k,
        gate_up: &values(gate_up),
        down: &values(down),
        shared_gate: &values(&weights.shared_gate),
        shared_up: &values(&weights.shared_up),
        shared_down: &values(&weights.shared_down),
        shared_score: &values(&weights.shared_score),
    })
}

/// Rows in a narrow format, as tensor cores multiply them.
enum NarrowRows<R: KernelRuntime> {
    /// E4M3 codes, four per word, and the float32 scale of every row: for weights that are FP8 rows too.
    Codes {
        codes: CubeTensor<R>,
        scales: CubeTensor<R>,
        /// `[batch, tokens]`.
        shape: [usize; 2],
    },
    /// Values in bfloat16, exact, over a factor that all of them share.
    Scaled(CubeTensor<R>, f32),
}

impl<R: KernelRuntime> NarrowRows<R> {
    /// The rows of `x` in bfloat16 for products with `weights`; `None` when the device multiplies no such pair.
    fn new<BT>(
        x: &Tensor<CubeBackend<R, f32, i32, BT>, 3>,
        format: ActivationFormat,
        weights: &[&CubeWeight<R>],
    ) -> Option<Self>
    where
        BT: burn_cubecl::element::BoolElement,
    {
        let ([batch, tokens, width], rows) = (x.dims(), primitive(x.clone()));
        let eight_bit = |weight: &&CubeWeight<R>| matches!(weight, CubeWeight::Packed(w) if w.row_scales.is_some());
        match format {
            _ if !R::NARROW || rows.dtype != DType::BF16 => None,
            ActivationFormat::Fp8 if width.is_multiple_of(4) && weights.iter().all(eight_bit) => {
                let (codes, scales) = quantize_rows::cube::launch(&rows, width);
                Some(Self::Codes {
                    codes,
                    scales,
                    shape: [batch, tokens],
                })
            }
            ActivationFormat::Nvfp4 { divisor, rounding } if width.is_multiple_of(quantize_rows::NVFP4_GROUP) => {
                let rows = quantize_rows::cube::nvfp4(&rows, divisor, rounding, DType::BF16);
                Some(Self::Scaled(rows, quantize_rows::cube::nvfp4_factor(divisor)))
            }
            _ => None,
        }
    }

    /// `addend + x w^T` in bfloat16, `[batch, tokens, out]` as the addend.
    fn product<BT>(
        &self,
        weight: &CubeWeight<R>,
        addend: Option<Tensor<CubeBackend<R, f32, i32, BT>, 3>>,
        to: Precision,
    ) -> Option<Tensor<CubeBackend<R, f32, i32, BT>, 3>>
    where
        BT: burn_cubecl::element::BoolElement,
    {
        let addend = addend.map(primitive);
        if storage::<R>(to) != DType::BF16 || addend.as_ref().is_some_and(|c: &CubeTensor<R>| c.dtype != DType::BF16) {
            return None;
        }
        match (self, weight) {
            (Self::Codes { codes, scales, shape }, CubeWeight::Packed(packed)) => {
                let [batch, tokens] = *shape;
                let weight = (&packed.codes.words, packed.row_scales.as_ref()?);
                let y = R::linear_e4m3((codes, scales), weight, packed.codes.shape, addend.as_ref())?;
                Some(tensor::<R, _, 2>(y).reshape([batch, tokens, packed.codes.shape[0]]))
            }
            (Self::Scaled(rows, factor), _) => {
                R::linear(rows, &weight.values(DType::BF16), addend.as_ref(), *factor, DType::BF16).map(tensor)
            }
            _ => None,
        }
    }
}

/// What codes are expanded to for a product with `rows`: rows in float32 meet every value as it is.
fn product_type<R: KernelRuntime>(rows: &CubeTensor<R>) -> DType {
    if rows.dtype == DType::F32 {
        DType::F32
    } else {
        dense_type::<R>()
    }
}

/// `addend + x w^T`, rounded once. Rows in float32 meet the weight in float32, never rounded to its 16 bits; for rows in
/// 16 bits a float32 weight is rounded to bfloat16 where the runtime stores it.
fn linear<R, BT>(
    x: Tensor<CubeBackend<R, f32, i32, BT>, 3>,
    weight: &CubeWeight<R>,
    addend: Option<Tensor<CubeBackend<R, f32, i32, BT>, 3>>,
    to: Precision,
) -> Tensor<CubeBackend<R, f32, i32, BT>, 3>
where
    R: KernelRuntime,
    BT: burn_cubecl::element::BoolElement,
{
    // Products come in bfloat16 or float32; halves are rounded from the latter.
    let dtype = match storage::<R>(to) {
        DType::BF16 => DType::BF16,
        _ => DType::F32,
    };
    let rows = primitive(x.clone());
    let add = addend.clone().map(primitive);
    let addable = add.as_ref().is_none_or(|c: &CubeTensor<R>| c.dtype == dtype);
    let values = weight.values(product_type(&rows));
    let product = if !addable {
        None
    } else if rows.dtype == DType::F32 && dtype == DType::F32 {
        R::linear(&rows, &values, add.as_ref(), 1.0, dtype)
    } else if R::NARROW {
        let narrow = |matrix: CubeTensor<R>| round::cube::launch(matrix, Precision::Bf16);
        R::linear(&narrow(rows), &narrow(values.clone()), add.as_ref(), 1.0, dtype)
    } else {
        R::linear(&rows, &values, add.as_ref(), 1.0, dtype)
    };
    match product {
        Some(y) => tensor(round::cube::launch(y, to)),
        None => match addend {
            Some(residual) => project::reference_add(residual, x, tensor(values), to),
            None => project::reference(x, tensor(values), to),
        },
    }
}

/// The elements of a small result, in order.
pub(crate) fn read<R: KernelRuntime, E: CubeElement>(x: CubeTensor<R>) -> Vec<E> {
    let bytes = x
        .client
        .read_one(x.handle.clone())
        .expect("the device's memory can be read");
    E::from_bytes(&bytes)[..x.meta.num_elements()].to_vec()
}

/// Turns the reductions of one tile and the normaliser of each row into log-probabilities.
pub(crate) fn push(
    scores: &mut HeadScores,
    values: &[f32],
    ids: &[u32],
    normalisers: impl Iterator<Item = f64>,
    ask: &HeadRequest<'_>,
) {
    let width = score_head::cube::FIXED + ask.top_k + ask.candidates_per_row;
    for (row, (values, normaliser)) in values.chunks_exact(width).zip(normalisers).enumerate() {
        let logprob = |logit: &f32| (f64::from(*logit) - normaliser) as f32;
        let (top, candidates) = values[score_head::cube::FIXED..].split_at(ask.top_k);
        scores.logprobs.push(logprob(&values[2]));
        scores.top_logprobs.extend(top.iter().map(logprob));
        scores.top_ids.extend(&ids[row * ask.top_k..][..ask.top_k]);
        scores.candidate_logprobs.extend(candidates.iter().map(logprob));
    }
}
