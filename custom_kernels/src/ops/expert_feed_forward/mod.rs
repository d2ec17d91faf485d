//! Routed experts, each a SwiGLU of its own weights over the rows that chose it:
//!
//! ```text
//! y = sum over the row's experts e, in ascending id, of  w_e * (SiLU(x gate_e^T) * (x up_e^T)) down_e^T
//! ```
//!
//! Nothing is rounded beyond float32. No capacity limit, no dropped row; a row reads its own experts and nothing else.

pub mod host;

use burn::tensor::{Int, Tensor, TensorData, activation::silu};

use crate::backend::{EvaluatorBackend, Routing};
use crate::ops::{project, widen};
use crate::precision::Precision;

/// The matrices of one expert.
#[derive(Debug, Clone)]
pub struct Expert<W> {
    /// Gate rows, then up rows: `[2 * inner, in]`.
    pub gate_up: W,
    /// `[in, inner]`.
    pub down: W,
}

/// `x` `[batch, tokens, in]`, one row of `routing` per token; `experts` in ascending id.
///
/// Every expert meets every row and the unwanted products are thrown away.
pub fn reference<B: EvaluatorBackend>(
    x: Tensor<B, 3>,
    routing: &Routing<B>,
    experts: &[Expert<B::Weight>],
) -> Tensor<B, 3> {
    let [batch, tokens, width] = x.dims();
    let mut y = Tensor::zeros([batch, tokens, width], &x.device());
    for (id, expert) in experts.iter().enumerate() {
        let others = routing.experts.clone().not_equal_elem(id as i64);
        let weight = routing.weights.clone().mask_fill(others.clone(), 0.0).sum_dim(1);
        let idle = others
            .all_dim(1)
            .reshape([batch, tokens, 1])
            .expand([batch, tokens, width]);
        let weight = weight.reshape([batch, tokens, 1]).expand([batch, tokens, width]);

        let both = project::reference(x.clone(), B::dense(&expert.gate_up), Precision::Full);
        let [gate, up]: [Tensor<B, 3>; 2] = both.chunk(2, 2).try_into().expect("two halves");
        let output = project::reference(silu(gate) * up, B::dense(&expert.down), Precision::Full);
        y = y + (weight * output).mask_fill(idle, 0.0);
    }
    y
}

/// The same for backends that have nothing of their own: the choices are read back once, to sort them; then each chosen
/// expert multiplies the rows that chose it, by [`EvaluatorBackend::project`], and everything else is done for all of them
/// at once. Between the products values exist at `inner`; `activate` gives `SiLU(gate) * up` in it.
pub fn grouped<B: EvaluatorBackend>(
    x: Tensor<B, 3>,
    routing: &Routing<B>,
    experts: &[Expert<B::Weight>],
    inner: Precision,
    activate: impl Fn(Tensor<B, 3>, Tensor<B, 3>) -> Tensor<B, 3>,
) -> Tensor<B, 3> {
    let ([batch, tokens, width], [rows, top_k], device) = (x.dims(), routing.weights.dims(), x.device());
    let indices = |values: Vec<usize>| {
        let values = values.into_iter().map(|value| value as i64).collect();
        Tensor::<B, 1, Int>::from_data(TensorData::new::<i64, _>(values, [rows * top_k]), &device)
    };
    let ids = routing.experts.to_data().convert::<i64>();
    let ids: &[i64] = ids.as_slice().expect("converted to i64 just now");

    // Choices `row * top_k + place`, by expert, then row.
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_by_key(|&choice| ids[choice]);
    // `x W^T` of sorted rows, each with its own expert's `W`.
    let product = |x: Tensor<B, 2>, matrix: fn(&Expert<B::Weight>) -> &B::Weight| {
        let mut first = 0;
        let parts = order.chunk_by(|a, b| ids[*a] == ids[*b]).map(|same| {
            let own = x.clone().slice([first..first + same.len()]).unsqueeze::<3>();
            first += same.len();
            B::project(own, matrix(&experts[ids[same[0]] as usize]), inner)
        });
        Tensor::cat(parts.collect(), 1)
    };
    let sorted = indices(order.iter().map(|choice| choice / top_k).collect());
    let both = product(x.reshape([rows, width]).select(0, sorted), |expert| &expert.gate_up);
    let [gate, up]: [Tensor<B, 3>; 2] = both.chunk(2, 2).try_into().expect("two halves");
    let outputs = product(activate(gate, up).squeeze_dim::<2>(0), |expert| &expert.down).squeeze_dim::<2>(0);

    // Row by row in ascending expert, which is the order of the sorted positions.
    let mut position = vec![0; order.len()];
    (order.iter().enumerate()).for_each(|(at, &choice)| position[choice] = at);
    let mut y = Tensor::zeros([rows, width], &device);
    position.chunks_exact_mut(top_k).for_each(<[usize]>::sort_unstable);
    let by_expert: Vec<usize> = position.iter().map(|&at| order[at]).collect();
    let weights = routing
        .weights
        .clone()
        .reshape([rows * top_k])
        .select(0, indices(by_expert));
    let weights = weights.reshape([rows, top_k]);
    let position = indices(position).reshape([rows, top_k]);
    for place in 0..top_k {
        let at = position.clone().slice([0..rows, place..place + 1]).reshape([rows]);
        let weight = weights.clone().slice([0..rows, place..place + 1]).expand([rows, width]);
        y = y + weight * widen(outputs.clone().select(0, at));
    }
    y.reshape([batch, tokens, width])
}
