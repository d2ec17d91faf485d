//! One method per operation of the forward pass, each with a default body in burn tensor operations.
//!
//! Conventions for whoever implements this trait:
//! - sequences are `[batch, tokens, ...]`: equal-length windows that never see each other;
//! - `to` is the precision in which the result is observable: round once, after the whole expression;
//! - inputs may be stored in bfloat16 or float32; reductions are float32 or better; nothing leaves the device except the
//!   result of [`EvaluatorBackend::score_head`];
//! - a row's result depends on no other row of the batch or pass but those its formula names;
//! - operands have the shapes their documentation states: the layers check the model's dimensions when they load.

use std::fmt::Debug;

use burn::tensor::{Int, Tensor, activation::silu, backend::Backend};

use crate::host::gemm::Panels;
use crate::ops::{
    append_rows, causal_attention, causal_conv_silu, delta_gates, embed_tokens, expand_weight::StoredMatrix,
    expert_feed_forward, gated_delta_rule, gated_rms_norm, hadamard, hyper_connection, mixture_of_experts,
    offset_rms_norm, packed_experts, project, quantize_rows, rotary, round, route_experts, score_head, sigmoid_gate,
    sparse_attention, swiglu, widen,
};
use crate::precise::{Host, Precise};
use crate::precision::Precision;

pub use crate::ops::coded_rows::{CodedSides, RowCoding, RowFormat};
pub use crate::ops::expert_feed_forward::Expert;
pub use crate::ops::gated_delta_rule::DeltaHeads;
pub use crate::ops::mixture_of_experts::Mixture;
pub use crate::ops::packed_experts::PackedExperts;
pub use crate::ops::quantize_rows::ActivationFormat;
pub use crate::ops::rotary::RotaryTable;
pub use crate::ops::route_experts::Routing;
pub use crate::ops::score_head::{HeadRequest, HeadScores};
pub use crate::ops::sparse_attention::BlockSelection;

/// How a matrix that is stored in codes is kept on a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Residency {
    #[default]
    /// As values in bfloat16, rounded once on loading: for products with rows in 16 bits.
    Dense,
    /// As codes, expanded for each use.
    Packed,
    /// As codes, for rows as FP8 represents them: where the device multiplies FP8, codes meet codes.
    EightBit,
}

/// A burn backend with the operations of the forward pass.
pub trait EvaluatorBackend: Backend {
    /// Whether values live on a device of their own: stored matrices then go there as they are, and rows of the KV cache
    /// are coded there, with [`EvaluatorBackend::append_coded`], and read by [`EvaluatorBackend::coded_attention`].
    const ON_DEVICE: bool = false;

    /// Whether the routed experts of a mixture are wanted as rows of two matrices, all gates and ups and all downs; see
    /// [`EvaluatorBackend::rows`].
    const STACKS_EXPERTS: bool = false;

    /// A matrix `[out, in]` in the form this backend multiplies with: packed panels, bfloat16, stored codes.
    type Weight: Clone + Debug + Send + Sync + 'static;

    /// Takes decoded values `[out, in]`, C order, `shape[0] * shape[1]` of them.
    ///
    /// `stored` is the narrowest precision that holds every value exactly, so that a backend may keep them in it.
    fn weight(values: Vec<f32>, shape: [usize; 2], stored: Precision, device: &Self::Device) -> Self::Weight;

    /// Takes a matrix as it is stored. `None` when this backend does not, or when a code stands for no finite number: the
    /// caller decodes, and the decoder can say which one.
    fn stored_weight(
        _matrix: &StoredMatrix<'_>,
        _residency: Residency,
        _device: &Self::Device,
    ) -> Option<Self::Weight> {
        None
    }

    /// The matrix in parts of so many rows, in order, which share its memory where the backend can.
    fn rows(weight: Self::Weight, counts: &[usize]) -> Vec<Self::Weight> {
        let (dense, mut first) = (Self::dense(&weight), 0);
        let part = |&count: &usize| {
            let rows = dense.clone().narrow(0, first, count);
            first += count;
            let (shape, device) = (rows.dims(), rows.device());
            let values = rows
                .into_data()
                .convert::<f32>()
                .into_vec()
                .expect("converted to f32 just now");
            Self::weight(values, shape, Precision::Full, &device)
        };
        counts.iter().map(part).collect()
    }

    /// The matrix as a float tensor `[out, in]`.
    fn dense(weight: &Self::Weight) -> Tensor<Self, 2>;

    /// The matrix for products on the host, float32.
    fn panels(weight: &Self::Weight) -> Panels {
        let dense = Self::dense(weight);
        let (shape, values) = (dense.dims(), dense.into_data().convert::<f32>());
        Panels::pack(values.as_slice().expect("converted to f32 just now"), shape)
    }

    /// The operations in f64 for values on `device`: the processor's, unless the device has its own.
    fn precise(_device: &Self::Device) -> &'static dyn Precise<Self> {
        &Host
    }

    /// `x` rounded; see [`round`].
    fn round<const D: usize>(x: Tensor<Self, D>, to: Precision) -> Tensor<Self, D> {
        round::reference(x, to)
    }

    /// Rows `ids` of `table` as `[batch, ids.len() / batch, in]`; see [`embed_tokens`].
    fn embed_tokens(table: &Self::Weight, ids: &[u32], batch: usize, to: Precision) -> Tensor<Self, 3> {
        embed_tokens::reference(Self::dense(table), ids, batch, to)
    }

    /// `x W^T`: `[batch, tokens, in]` to `[batch, tokens, out]`; see [`project`].
    fn project(x: Tensor<Self, 3>, weight: &Self::Weight, to: Precision) -> Tensor<Self, 3> {
        project::reference(x, Self::dense(weight), to)
    }

    /// `residual + x W^T`, rounded once; see [`project`].
    fn project_add(
        residual: Tensor<Self, 3>,
        x: Tensor<Self, 3>,
        weight: &Self::Weight,
        to: Precision,
    ) -> Tensor<Self, 3> {
        project::reference_add(residual, x, Self::dense(weight), to)
    }

    /// `SiLU(x gate^T) * (x up^T)`; see [`swiglu`].
    fn swiglu(x: Tensor<Self, 3>, gate: &Self::Weight, up: &Self::Weight, to: Precision) -> Tensor<Self, 3> {
        swiglu::reference(x, Self::dense(gate), Self::dense(up), to)
    }

    /// The `top_k` experts of every row of `x` and their weights; see [`route_experts`].
    fn route_experts(x: Tensor<Self, 3>, router: &Self::Weight, top_k: usize) -> Routing<Self> {
        route_experts::reference(x, Self::dense(router), top_k)
    }

    /// The weighted sum of the chosen experts' outputs, float32 `[batch, tokens, in]`; see [`expert_feed_forward`].
    fn expert_feed_forward(
        x: Tensor<Self, 3>,
        routing: &Routing<Self>,
        experts: &[Expert<Self::Weight>],
    ) -> Tensor<Self, 3> {
        expert_feed_forward::grouped(x, routing, experts, Precision::Full, |gate, up| silu(gate) * up)
    }

    /// `residual` plus the mixture of experts of `x`, and the experts that the rows chose; see [`mixture_of_experts`].
    fn mixture_of_experts(
        residual: Tensor<Self, 3>,
        x: Tensor<Self, 3>,
        weights: &Mixture<Self>,
        to: Precision,
    ) -> (Tensor<Self, 3>, Routing<Self>) {
        mixture_of_experts::mixture(residual, x, weights, to)
    }

    /// Whether `device` multiplies packed experts, with [`EvaluatorBackend::packed_experts`].
    fn multiplies_packed_experts(_device: &Self::Device) -> bool {
        false
    }

    /// `bytes` of memory on `device` with `pieces` in their places, as words: records for
    /// [`EvaluatorBackend::packed_experts`]. `None` where the device does not multiply them.
    fn records(
        _bytes: usize,
        _pieces: &mut dyn Iterator<Item = (usize, &[u8])>,
        _device: &Self::Device,
    ) -> Option<Tensor<Self, 1, Int>> {
        None
    }

    /// Writes what the experts make of the rows of `x` `[rows, hidden]`, bfloat16, that chose them into `outputs`
    /// `[rows, top_k, hidden]`, new ones unless given; see [`packed_experts`]. `None` where the device does not multiply
    /// them, or `x` is not stored in bfloat16.
    fn packed_experts(
        _x: &Tensor<Self, 2>,
        _experts: &PackedExperts<'_, Self>,
        _outputs: Option<Tensor<Self, 3>>,
    ) -> Option<Tensor<Self, 3>> {
        None
    }

    /// The mixture of experts' outputs; see [`packed_experts::reference`].
    fn combine_experts(
        outputs: Tensor<Self, 3>,
        weights: Tensor<Self, 2>,
        shared: Tensor<Self, 3>,
        scores: Tensor<Self, 3>,
        to: Precision,
    ) -> Tensor<Self, 3> {
        packed_experts::reference(outputs, weights, shared, scores, to)
    }

    /// The rows of `x` `[batch, tokens, in]` as `format` represents them, in float32; see [`quantize_rows`].
    fn quantize_rows(x: Tensor<Self, 3>, format: ActivationFormat) -> Tensor<Self, 3> {
        quantize_rows::reference(x, format)
    }

    /// `x W^T`, or `residual + x W^T`, of the rows of `x` as `format` represents them; see [`quantize_rows`].
    fn project_quantized(
        x: Tensor<Self, 3>,
        format: ActivationFormat,
        weight: &Self::Weight,
        residual: Option<Tensor<Self, 3>>,
        to: Precision,
    ) -> Tensor<Self, 3> {
        let x = Self::quantize_rows(x, format);
        match residual {
            Some(residual) => Self::project_add(residual, x, weight, to),
            None => Self::project(x, weight, to),
        }
    }

    /// `SiLU(x gate^T) * (x up^T)` of the rows of `x` as `format` represents them; see [`quantize_rows`].
    fn swiglu_quantized(
        x: Tensor<Self, 3>,
        format: ActivationFormat,
        gate: &Self::Weight,
        up: &Self::Weight,
        to: Precision,
    ) -> Tensor<Self, 3> {
        Self::swiglu(Self::quantize_rows(x, format), gate, up, to)
    }

    /// RMS norm over the last axis with weight `1 + w`; see [`offset_rms_norm`].
    fn offset_rms_norm<const D: usize>(
        x: Tensor<Self, D>,
        weight: Tensor<Self, 1>,
        eps: f32,
        to: Precision,
    ) -> Tensor<Self, D> {
        offset_rms_norm::reference(x, weight, eps, to)
    }

    /// RMS norm of each of several streams by itself, `x` `[batch, tokens, S, n]` and `weight` `[S, n]`; see
    /// [`offset_rms_norm`].
    fn stream_norm(x: Tensor<Self, 4>, weight: Tensor<Self, 2>, eps: f32, to: Precision) -> Tensor<Self, 4> {
        offset_rms_norm::stream_reference(x, weight, eps, to)
    }

    /// The mixture of several streams, `u` `[batch, tokens, S * n]` and `normal` `[batch, tokens, S, n]`; see
    /// [`hyper_connection::mix`].
    fn mix_streams(u: Tensor<Self, 3>, normal: Tensor<Self, 4>, to: Precision) -> Tensor<Self, 3> {
        hyper_connection::mix_reference(u, normal, to)
    }

    /// Several streams plus an output by their weights; see [`hyper_connection::write`].
    fn write_streams(
        streams: Tensor<Self, 3>,
        y: Tensor<Self, 3>,
        weights: Tensor<Self, 3>,
        to: Precision,
    ) -> Tensor<Self, 3> {
        hyper_connection::write_reference(streams, y, weights, to)
    }

    /// RMS norm over the last axis with weight `w`, times `SiLU(z)`; see [`gated_rms_norm`].
    fn gated_rms_norm<const D: usize>(
        x: Tensor<Self, D>,
        weight: Tensor<Self, 1>,
        z: Tensor<Self, D>,
        eps: f32,
        to: Precision,
    ) -> Tensor<Self, D> {
        gated_rms_norm::reference(x, weight, z, eps, to)
    }

    /// RMS norm over the last axis with weight `w`, times `sigmoid(z)`; see [`gated_rms_norm`].
    fn sigmoid_gated_rms_norm<const D: usize>(
        x: Tensor<Self, D>,
        weight: Tensor<Self, 1>,
        z: Tensor<Self, D>,
        eps: f32,
        to: Precision,
    ) -> Tensor<Self, D> {
        gated_rms_norm::sigmoid_reference(x, weight, z, eps, to)
    }

    /// Rotates the first features of each head of `x` `[batch, tokens, heads, head_dim]`; token `t` stands at position
    /// `first_position + t`; see [`rotary`].
    fn rotary(x: Tensor<Self, 4>, table: &RotaryTable<Self>, first_position: usize, to: Precision) -> Tensor<Self, 4> {
        rotary::reference(x, table, first_position, to)
    }

    /// Causal depthwise convolution and SiLU over `x` `[batch, tokens, channels]`, with the inputs of the `W - 1` tokens
    /// before as `tail`; returns the result and the next tail; see [`causal_conv_silu`].
    fn causal_conv_silu(
        x: Tensor<Self, 3>,
        weight: Tensor<Self, 2>,
        tail: Tensor<Self, 3>,
        to: Precision,
    ) -> (Tensor<Self, 3>, Tensor<Self, 3>) {
        causal_conv_silu::reference(x, weight, tail, to)
    }

    /// Log-decay `g` and write strength `beta` of the delta rule, both float32 `[batch, tokens, value_heads]`; see
    /// [`delta_gates`].
    fn delta_gates(
        a: Tensor<Self, 3>,
        b: Tensor<Self, 3>,
        a_log: Tensor<Self, 1>,
        dt_bias: Tensor<Self, 1>,
    ) -> (Tensor<Self, 3>, Tensor<Self, 3>) {
        delta_gates::reference(a, b, a_log, dt_bias)
    }

    /// Gated delta rule over `qkv` `[batch, tokens, 2 Kd + Vd]` (query, key, value channels, not yet normalised) from
    /// `state` `[batch, value_heads, key_dim, value_dim]`; returns `[batch, tokens, value_heads, value_dim]` and the next
    /// state, float32; see [`gated_delta_rule`].
    fn gated_delta_rule(
        qkv: Tensor<Self, 3>,
        g: Tensor<Self, 3>,
        beta: Tensor<Self, 3>,
        state: Tensor<Self, 4>,
        heads: DeltaHeads,
        to: Precision,
    ) -> (Tensor<Self, 4>, Tensor<Self, 4>) {
        gated_delta_rule::chunked(qkv, g, beta, state, heads, to)
    }

    /// Writes `rows` `[batch, tokens, kv_heads, head_dim]` into `cache` `[batch, kv_heads, capacity, head_dim]` from row
    /// `at` on; see [`append_rows`].
    fn append_rows(cache: Tensor<Self, 4>, rows: Tensor<Self, 4>, at: usize) -> Tensor<Self, 4> {
        append_rows::reference(cache, rows, at)
    }

    /// `H x` over blocks of `block` features of the last axis; see [`hadamard`].
    fn hadamard<const D: usize>(x: Tensor<Self, D>, block: usize, to: Precision) -> Tensor<Self, D> {
        Self::round(hadamard::reference(widen(x), block), to)
    }

    /// Codes `rows` `[batch, tokens, kv_heads, 256]` into `cache` `[batch, kv_heads, capacity, words]` from row `at` on; see
    /// [`coded_rows`](crate::ops::coded_rows). `None` on backends without a device.
    fn append_coded(
        _cache: Tensor<Self, 4, Int>,
        _rows: Tensor<Self, 4>,
        _at: usize,
        _coding: RowCoding,
    ) -> Option<Tensor<Self, 4, Int>> {
        None
    }

    /// The first `visible` rows of such a cache as decoded, `[batch, kv_heads, visible, 256]`. `None` as above.
    fn decoded_rows(
        _cache: Tensor<Self, 4, Int>,
        _visible: usize,
        _format: RowFormat,
        _to: Precision,
    ) -> Option<Tensor<Self, 4>> {
        None
    }

    /// Causal grouped-query attention of `q` `[batch, tokens, heads, head_dim]` at positions `first_position..` over
    /// `keys`, `values` `[batch, kv_heads, capacity, head_dim]`, of which rows from `first_position + tokens` on are never
    /// read; see [`causal_attention`].
    fn causal_attention(
        q: Tensor<Self, 4>,
        keys: Tensor<Self, 4>,
        values: Tensor<Self, 4>,
        first_position: usize,
        to: Precision,
    ) -> Tensor<Self, 4> {
        causal_attention::reference(q, keys, values, first_position, to)
    }

    /// [`EvaluatorBackend::causal_attention`] over `keys`, `values` `[batch, kv_heads, capacity, words]` in codes, as
    /// [`EvaluatorBackend::append_coded`] leaves them. `None` on backends without a device.
    fn coded_attention(
        q: Tensor<Self, 4>,
        keys: Tensor<Self, 4, Int>,
        values: Tensor<Self, 4, Int>,
        sides: CodedSides,
        first_position: usize,
        to: Precision,
    ) -> Option<Tensor<Self, 4>> {
        causal_attention::over_decoded(q, keys, values, sides, first_position, to)
    }

    /// Grouped-query attention of `q` `[batch, tokens, heads, head_dim]` over the blocks of `keys`, `values`
    /// `[batch, kv_heads, capacity, head_dim]` that each query names; see [`sparse_attention`].
    fn sparse_attention(
        q: Tensor<Self, 4>,
        keys: Tensor<Self, 4>,
        values: Tensor<Self, 4>,
        selection: &BlockSelection,
        to: Precision,
    ) -> Tensor<Self, 4> {
        sparse_attention::reference(q, keys, values, selection, to)
    }

    /// The blocks that the queries of a sparse attention read, window after window, by the scores of `q`
    /// `[batch, tokens, heads, width]` and `keys` `[batch, blocks, width]`; see
    /// [`choose_blocks`](crate::ops::sparse_attention#choice). `None` where the host chooses.
    fn choose_blocks(
        _q: &Tensor<Self, 4>,
        _keys: &Tensor<Self, 3>,
        _first_position: usize,
        _ratio: usize,
        _count: usize,
    ) -> Option<BlockSelection> {
        None
    }

    /// `x * sigmoid(gate)`; see [`sigmoid_gate`].
    fn sigmoid_gate<const D: usize>(x: Tensor<Self, D>, gate: Tensor<Self, D>, to: Precision) -> Tensor<Self, D> {
        sigmoid_gate::reference(x, gate, to)
    }

    /// Log-probabilities, top tokens and candidates of `hidden` `[rows, in]`, reduced tile by tile; see [`score_head`].
    fn score_head(
        hidden: Tensor<Self, 2>,
        head: &Self::Weight,
        ask: &HeadRequest<'_>,
        logits: Precision,
    ) -> HeadScores {
        score_head::tiled::<Self>(hidden, head, ask, logits)
    }
}
