//! `y[b, t] = table[ids[b, t]]`, without any scale.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;
pub mod host;

use burn::tensor::{Int, Tensor, TensorData};

use crate::backend::EvaluatorBackend;
use crate::ops::widen;
use crate::precision::Precision;

/// Gathers rows `ids` of `table` `[rows, width]` into `[batch, ids.len() / batch, width]`.
pub fn reference<B: EvaluatorBackend>(table: Tensor<B, 2>, ids: &[u32], batch: usize, to: Precision) -> Tensor<B, 3> {
    let width = table.dims()[1];
    let indices: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
    let indices = Tensor::<B, 1, Int>::from_data(TensorData::new(indices, [ids.len()]), &table.device());
    B::round(widen(table.select(0, indices)), to).reshape([batch, ids.len() / batch, width])
}
