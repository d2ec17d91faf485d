//! The CPU implementation: one for every burn backend whose float tensors are float32 in memory.
//!
//! Each operation reads its operands as slices, writes a fresh vector and hands it back to burn, both without copies;
//! the loops are in `ops/*/host.rs`. Every result is a fixed sequence of float32 operations per row, independent of
//! batch, pass and thread count. Rows are shared out over the current rayon pool.

pub mod gemm;
pub mod gemm64;
pub mod math;
pub mod simd;

use std::borrow::Cow;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorData, TensorPrimitive};

use crate::backend::{
    ActivationFormat, BlockSelection, DeltaHeads, EvaluatorBackend, Expert, HeadRequest, HeadScores, RotaryTable,
    Routing,
};
use crate::ops::{
    append_rows, causal_attention, causal_conv_silu, delta_gates, embed_tokens, expert_feed_forward, gated_delta_rule,
    gated_rms_norm, offset_rms_norm, quantize_rows, rotary, round, route_experts, score_head, sigmoid_gate,
    sparse_attention, swiglu,
};
use crate::precision::Precision;

use gemm::Panels;

/// A CPU backend whose float32 tensors can be read in place.
pub trait HostTensors: Backend {
    /// The elements in C order; borrowed when the tensor is float32 and contiguous.
    fn elements(tensor: &FloatTensor<Self>) -> Cow<'_, [f32]>;
}

#[cfg(feature = "flex")]
impl HostTensors for burn_flex::Flex {
    fn elements(tensor: &FloatTensor<Self>) -> Cow<'_, [f32]> {
        tensor
            .as_slice()
            .map_or_else(|| Cow::Owned(copied::<Self>(tensor)), Cow::Borrowed)
    }
}

#[cfg(feature = "ndarray")]
impl HostTensors for burn_ndarray::NdArray<f32> {
    fn elements(tensor: &FloatTensor<Self>) -> Cow<'_, [f32]> {
        if let burn_ndarray::NdArrayTensor::F32(storage) = tensor
            && let Some(elements) = storage.view().to_slice()
        {
            return Cow::Borrowed(elements);
        }
        Cow::Owned(copied::<Self>(tensor))
    }
}

#[cfg(any(feature = "ndarray", feature = "flex"))]
fn copied<B: Backend>(tensor: &FloatTensor<B>) -> Vec<f32> {
    let data = burn::tensor::read_sync(B::float_into_data(tensor.clone())).expect("a CPU tensor can always be read");
    data.convert::<f32>().into_vec().expect("converted to f32 just now")
}

fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> FloatTensor<B> {
    tensor.into_primitive().tensor()
}

fn tensor<B: Backend, const D: usize>(values: Vec<f32>, shape: [usize; D], device: &B::Device) -> Tensor<B, D> {
    debug_assert_eq!(values.len(), shape.iter().product::<usize>());
    let data = TensorData::new(values, shape);
    Tensor::from_primitive(TensorPrimitive::Float(B::float_from_data(data, device)))
}

/// The elements for writing, in place when nothing else holds the tensor.
fn into_vec<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor
        .into_data()
        .convert::<f32>()
        .into_vec()
        .expect("converted to f32 just now")
}

impl<B: HostTensors> EvaluatorBackend for B {
    type Weight = Panels;

    fn weight(values: Vec<f32>, shape: [usize; 2], _stored: Precision, _device: &Self::Device) -> Panels {
        Panels::pack(&values, shape)
    }

    fn dense(weight: &Panels) -> Tensor<Self, 2> {
        tensor(weight.unpack(), weight.shape(), &Self::Device::default())
    }

    fn panels(weight: &Panels) -> Panels {
        weight.clone()
    }

    fn round<const D: usize>(x: Tensor<Self, D>, to: Precision) -> Tensor<Self, D> {
        if to == Precision::Full {
            return x;
        }
        let (shape, device) = (x.dims(), x.device());
        let mut values = into_vec(x);
        round::host::round(&mut values, to);
        tensor(values, shape, &device)
    }

    fn embed_tokens(table: &Panels, ids: &[u32], batch: usize, to: Precision) -> Tensor<Self, 3> {
        let values = embed_tokens::host::gather(table, ids, to);
        tensor(
            values,
            [batch, ids.len() / batch, table.shape()[1]],
            &Self::Device::default(),
        )
    }

    fn project(x: Tensor<Self, 3>, weight: &Panels, to: Precision) -> Tensor<Self, 3> {
        let ([batch, tokens, _], device) = (x.dims(), x.device());
        let x = primitive(x);
        let mut y = vec![0.0; batch * tokens * weight.shape()[0]];
        gemm::accumulate(&Self::elements(&x), weight, &mut y, to);
        tensor(y, [batch, tokens, weight.shape()[0]], &device)
    }

    fn project_add(residual: Tensor<Self, 3>, x: Tensor<Self, 3>, weight: &Panels, to: Precision) -> Tensor<Self, 3> {
        let (shape, device) = (residual.dims(), x.device());
        let x = primitive(x);
        let mut y = into_vec(residual);
        gemm::accumulate(&Self::elements(&x), weight, &mut y, to);
        tensor(y, shape, &device)
    }

    fn swiglu(x: Tensor<Self, 3>, gate: &Panels, up: &Panels, to: Precision) -> Tensor<Self, 3> {
        let ([batch, tokens, _], device) = (x.dims(), x.device());
        let x = primitive(x);
        let y = swiglu::host::swiglu(&Self::elements(&x), gate, up, to);
        tensor(y, [batch, tokens, gate.shape()[0]], &device)
    }

    fn route_experts(x: Tensor<Self, 3>, router: &Panels, top_k: usize) -> Routing<Self> {
        let ([batch, tokens, _], device) = (x.dims(), x.device());
        let (x, [count, _], rows) = (primitive(x), router.shape(), batch * tokens);
        let mut y = vec![0.0; rows * count];
        gemm::accumulate(&Self::elements(&x), router, &mut y, Precision::Full);
        let (ids, values) = route_experts::host::choose(&y, count, top_k);
        Routing {
            experts: Tensor::from_data(TensorData::new(ids, [rows, top_k]), &device),
            weights: tensor(values, [rows, top_k], &device),
        }
    }

    fn expert_feed_forward(x: Tensor<Self, 3>, routing: &Routing<Self>, experts: &[Expert<Panels>]) -> Tensor<Self, 3> {
        let (shape, device, [_, top_k]) = (x.dims(), x.device(), routing.weights.dims());
        let (x, weights) = (primitive(x), primitive(routing.weights.clone()));
        let ids = routing.experts.to_data().convert::<i32>();
        let ids = ids.as_slice().expect("converted to i32 just now");
        let (x, weights) = (Self::elements(&x), Self::elements(&weights));
        let y = expert_feed_forward::host::feed_forward(&x, ids, &weights, top_k, experts);
        tensor(y, shape, &device)
    }

    fn quantize_rows(x: Tensor<Self, 3>, format: ActivationFormat) -> Tensor<Self, 3> {
        let (shape, device) = (x.dims(), x.device());
        let mut values = into_vec(x);
        quantize_rows::host::quantize(&mut values, shape[2], format);
        tensor(values, shape, &device)
    }

    fn offset_rms_norm<const D: usize>(
        x: Tensor<Self, D>,
        weight: Tensor<Self, 1>,
        eps: f32,
        to: Precision,
    ) -> Tensor<Self, D> {
        let (shape, device) = (x.dims(), x.device());
        let (x, weight) = (primitive(x), primitive(weight));
        let y = offset_rms_norm::host::norm(&Self::elements(&x), &Self::elements(&weight), eps, to);
        tensor(y, shape, &device)
    }

    fn gated_rms_norm<const D: usize>(
        x: Tensor<Self, D>,
        weight: Tensor<Self, 1>,
        z: Tensor<Self, D>,
        eps: f32,
        to: Precision,
    ) -> Tensor<Self, D> {
        let (shape, device) = (x.dims(), x.device());
        let (weight, z) = (primitive(weight), primitive(z));
        let mut y = into_vec(x);
        gated_rms_norm::host::norm(&mut y, &Self::elements(&weight), &Self::elements(&z), eps, to);
        tensor(y, shape, &device)
    }

    fn rotary(x: Tensor<Self, 4>, table: &RotaryTable<Self>, first_position: usize, to: Precision) -> Tensor<Self, 4> {
        let (shape, device) = (x.dims(), x.device());
        let (cos, sin) = (primitive(table.cos.clone()), primitive(table.sin.clone()));
        let half = table.cos.dims()[1];
        let rows = first_position * half..(first_position + shape[1]) * half;
        let (cos, sin) = (Self::elements(&cos), Self::elements(&sin));
        let mut y = into_vec(x);
        rotary::host::rotate(&mut y, &cos[rows.clone()], &sin[rows], half, shape[2], shape[3], to);
        tensor(y, shape, &device)
    }

    fn causal_conv_silu(
        x: Tensor<Self, 3>,
        weight: Tensor<Self, 2>,
        tail: Tensor<Self, 3>,
        to: Precision,
    ) -> (Tensor<Self, 3>, Tensor<Self, 3>) {
        let (shape, tail_shape, device) = (x.dims(), tail.dims(), x.device());
        let (x, weight, tail) = (primitive(x), primitive(weight), primitive(tail));
        let (y, next) = causal_conv_silu::host::convolve(
            &Self::elements(&x),
            &Self::elements(&weight),
            &Self::elements(&tail),
            shape,
            to,
        );
        (tensor(y, shape, &device), tensor(next, tail_shape, &device))
    }

    fn delta_gates(
        a: Tensor<Self, 3>,
        b: Tensor<Self, 3>,
        a_log: Tensor<Self, 1>,
        dt_bias: Tensor<Self, 1>,
    ) -> (Tensor<Self, 3>, Tensor<Self, 3>) {
        let (shape, device) = (a.dims(), a.device());
        let (a_log, dt_bias) = (primitive(a_log), primitive(dt_bias));
        let (mut a, mut b) = (into_vec(a), into_vec(b));
        delta_gates::host::gates(&mut a, &mut b, &Self::elements(&a_log), &Self::elements(&dt_bias));
        (tensor(a, shape, &device), tensor(b, shape, &device))
    }

    fn gated_delta_rule(
        qkv: Tensor<Self, 3>,
        g: Tensor<Self, 3>,
        beta: Tensor<Self, 3>,
        state: Tensor<Self, 4>,
        heads: DeltaHeads,
        to: Precision,
    ) -> (Tensor<Self, 4>, Tensor<Self, 4>) {
        let ([batch, tokens, _], state_shape, device) = (qkv.dims(), state.dims(), qkv.device());
        let (qkv, g, beta) = (primitive(qkv), primitive(g), primitive(beta));
        let mut state = into_vec(state);
        let y = gated_delta_rule::host::recurrent(
            &Self::elements(&qkv),
            &Self::elements(&g),
            &Self::elements(&beta),
            &mut state,
            [batch, tokens],
            heads,
            to,
        );
        let shape = [batch, tokens, heads.value_heads, heads.value_dim];
        (tensor(y, shape, &device), tensor(state, state_shape, &device))
    }

    fn append_rows(cache: Tensor<Self, 4>, rows: Tensor<Self, 4>, at: usize) -> Tensor<Self, 4> {
        let (shape, rows_shape, device) = (cache.dims(), rows.dims(), rows.device());
        let rows = primitive(rows);
        let mut cache = into_vec(cache);
        append_rows::host::append(&mut cache, &Self::elements(&rows), shape, rows_shape, at);
        tensor(cache, shape, &device)
    }

    fn causal_attention(
        q: Tensor<Self, 4>,
        keys: Tensor<Self, 4>,
        values: Tensor<Self, 4>,
        first_position: usize,
        to: Precision,
    ) -> Tensor<Self, 4> {
        let (shape, kv_shape, device) = (q.dims(), keys.dims(), q.device());
        let (q, keys, values) = (primitive(q), primitive(keys), primitive(values));
        let y = causal_attention::host::attention(
            &Self::elements(&q),
            &Self::elements(&keys),
            &Self::elements(&values),
            shape,
            kv_shape,
            first_position,
            to,
        );
        tensor(y, shape, &device)
    }

    fn sparse_attention(
        q: Tensor<Self, 4>,
        keys: Tensor<Self, 4>,
        values: Tensor<Self, 4>,
        selection: &BlockSelection,
        to: Precision,
    ) -> Tensor<Self, 4> {
        let (shape, kv_shape, device) = (q.dims(), keys.dims(), q.device());
        let (q, keys, values) = (primitive(q), primitive(keys), primitive(values));
        let y = sparse_attention::host::attention(
            &Self::elements(&q),
            &Self::elements(&keys),
            &Self::elements(&values),
            shape,
            kv_shape,
            selection,
            to,
        );
        tensor(y, shape, &device)
    }

    fn sigmoid_gate<const D: usize>(x: Tensor<Self, D>, gate: Tensor<Self, D>, to: Precision) -> Tensor<Self, D> {
        let (shape, device) = (x.dims(), x.device());
        let gate = primitive(gate);
        let mut y = into_vec(x);
        sigmoid_gate::host::gate(&mut y, &Self::elements(&gate), to);
        tensor(y, shape, &device)
    }

    fn score_head(hidden: Tensor<Self, 2>, head: &Panels, ask: &HeadRequest<'_>, logits: Precision) -> HeadScores {
        let hidden = primitive(hidden);
        score_head::host::score(&Self::elements(&hidden), head, ask, logits)
    }
}
