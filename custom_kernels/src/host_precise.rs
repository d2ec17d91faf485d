//! More of [`Evaluation`]: operations whose form in f64 runs on the host, whatever the device. They are those of
//! Qwen3.8-Flash-Next; its other operations are the family's.

use burn::tensor::{Tensor, TensorData, backend::Backend};

use crate::backend::{BlockSelection, EvaluatorBackend, Routing};
use crate::evaluation::{Arithmetic, Evaluation};
use crate::host::gemm64::product;
use crate::ops::{gated_rms_norm, mixture_of_experts, offset_rms_norm, sparse_attention};
use crate::precise::routing;

impl Evaluation {
    /// The `top_k` experts of every row and their weights; see [`route_experts`](crate::ops::route_experts).
    pub fn route_experts<B: EvaluatorBackend>(self, x: Tensor<B, 3>, router: &B::Weight, top_k: usize) -> Routing<B> {
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return B::route_experts(x, router, top_k);
        };
        let (device, router) = (x.device(), B::panels(router));
        let logits = product(&values(x), &router);
        let (experts, weights) = mixture_of_experts::precise::route(logits, router.shape()[0], top_k, steps);
        routing(experts, weights, top_k, &device)
    }

    /// RMS norm with weight `1 + w` of each of several streams by itself, `x` `[batch, tokens, S * width]` and `weight`
    /// `[S, width]`; returns `[batch, tokens, S, width]`. See [`offset_rms_norm`].
    pub fn stream_norm<B: EvaluatorBackend>(self, x: Tensor<B, 3>, weight: Tensor<B, 2>, eps: f32) -> Tensor<B, 4> {
        let ([batch, tokens, _], [streams, width], device) = (x.dims(), weight.dims(), x.device());
        let shape = [batch, tokens, streams, width];
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return B::stream_norm(x.reshape(shape), weight, eps, self.to);
        };
        let mut y = values(x);
        offset_rms_norm::precise::stream_norm(&mut y, &values(weight), width, eps, steps, self.to);
        tensor(y, shape, &device)
    }

    /// RMS norm with weight `w`, times `sigmoid(z)`; see [`gated_rms_norm`].
    pub fn sigmoid_gated_rms_norm<B: EvaluatorBackend, const D: usize>(
        self,
        x: Tensor<B, D>,
        weight: Tensor<B, 1>,
        z: Tensor<B, D>,
        eps: f32,
    ) -> Tensor<B, D> {
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return B::sigmoid_gated_rms_norm(x, weight, z, eps, self.to);
        };
        let (shape, device) = (x.dims(), x.device());
        let mut y = values(x);
        gated_rms_norm::precise::sigmoid_norm(&mut y, &values(weight), &values(z), eps, steps, self.to);
        tensor(y, shape, &device)
    }

    /// Attention over the blocks of keys that each query names; see [`sparse_attention`].
    pub fn sparse_attention<B: EvaluatorBackend>(
        self,
        q: Tensor<B, 4>,
        keys: Tensor<B, 4>,
        rows: Tensor<B, 4>,
        selection: &BlockSelection,
    ) -> Tensor<B, 4> {
        let Arithmetic::Precise(steps) = self.arithmetic else {
            return B::sparse_attention(q, keys, rows, selection, self.to);
        };
        let (shape, kv_shape, device) = (q.dims(), keys.dims(), q.device());
        let (q, keys, rows) = (values(q), values(keys), values(rows));
        let y = sparse_attention::precise::attention(&q, &keys, &rows, shape, kv_shape, selection, steps, self.to);
        // Stored as the device's own results are: dense and sparse outputs of a pass become one tensor.
        B::round(tensor(y, shape, &device), self.to)
    }
}

/// Values in C order, widened to float32.
pub(crate) fn values<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f32> {
    x.into_data()
        .convert::<f32>()
        .into_vec()
        .expect("converted to f32 just now")
}

pub(crate) fn tensor<B: Backend, const D: usize>(
    values: Vec<f32>,
    shape: [usize; D],
    device: &B::Device,
) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values, shape), device)
}
