//! RMS norms, `lanes` units per row: the row stays in registers between the sum of squares and the scaling.

use burn::tensor::DType;
use cubecl::prelude::*;

use crate::cube::{
    CubeTensor, KernelRuntime, UNITS, address_type, cubes, empty, left_to_round, planes, rounded, row_sum, sigmoid,
    storage, vector_size,
};
use crate::precision::Precision;

/// What the normalised row is multiplied by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Factor {
    /// `1 + w`
    Offset,
    /// `w * SiLU(z)`
    Silu,
    /// `w * sigmoid(z)`
    Sigmoid,
}

/// Rows of `elements` in `width` vectors: `x * rsqrt(mean(x^2) + eps)` times `factor`; the weights are `streams` rows, which
/// follow one another from row to row.
#[cube(launch_unchecked, address_type = "dynamic")]
fn rms_norm<X: Float, W: Float, Z: Float, O: Float, N: Size>(
    x: &Array<Vector<X, N>>,
    weight: &Array<Vector<W, N>>,
    z: &Array<Vector<Z, N>>,
    out: &mut Array<Vector<O, N>>,
    rows: usize,
    streams: usize,
    elements: u32,
    eps: f32,
    #[comptime] width: usize,
    #[comptime] lanes: u32,
    #[comptime] factor: Factor,
    #[comptime] planes: bool,
    #[comptime] to: Precision,
    #[define(X, W, Z, O)] _dtypes: [StorageType; 4],
) {
    let lane = (UNIT_POS % lanes) as usize;
    let row = CUBE_POS * comptime!((UNITS / lanes) as usize) + (UNIT_POS / lanes) as usize;
    let live = row < rows;
    let start = row * width;
    let steps = comptime!(width.div_ceil(lanes as usize));
    let mut values = Array::<Vector<f32, N>>::new(steps);
    let mut squares = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..steps {
        let at = lane + i * lanes as usize;
        let mut value = Vector::<f32, N>::new(0.0f32);
        if live && at < width {
            value = Vector::cast_from(x[start + at]);
        }
        values[i] = value;
        squares += value * value;
    }
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..N::value() {
        sum += squares[i];
    }
    let sum = row_sum(sum, lanes, UNITS, planes);
    let mean = sum / f32::cast_from(elements);
    let scale = Vector::<f32, N>::new(1.0f32 / f32::sqrt(mean + eps));
    #[unroll]
    for i in 0..steps {
        let at = lane + i * lanes as usize;
        if live && at < width {
            let w = Vector::<f32, N>::cast_from(weight[row % streams * width + at]);
            let mut y = values[i] * scale;
            if comptime!(factor == Factor::Offset) {
                y = y * (w + Vector::new(1.0f32));
            } else {
                let gate = Vector::<f32, N>::cast_from(z[start + at]);
                if comptime!(factor == Factor::Silu) {
                    y = y * w * (gate * sigmoid::<N>(gate));
                } else {
                    y = y * w * sigmoid::<N>(gate);
                }
            }
            out[start + at] = Vector::cast_from(rounded::<N>(y, to));
        }
    }
}

/// `x` and `z` `[..., n]`, `weight` `[n]` or `[streams, n]` for rows that alternate between streams, contiguous; without `z`
/// the factor is `1 + w`.
pub(crate) fn launch<R: KernelRuntime>(
    x: CubeTensor<R>,
    weight: CubeTensor<R>,
    z: Option<(CubeTensor<R>, Factor)>,
    eps: f32,
    to: Precision,
) -> CubeTensor<R> {
    let shape = x.meta.shape().clone();
    let width = *weight.meta.shape().last().unwrap_or(&1);
    let streams = weight.meta.num_elements() / width;
    let rows = x.meta.num_elements() / width;
    let out = empty(&x, shape, storage::<R>(to));
    let (z, factor) = z.unwrap_or_else(|| (x.clone(), Factor::Offset));
    let dtypes: [DType; 4] = [x.dtype, weight.dtype, z.dtype, out.dtype];
    let size = vector_size(&x, width, &dtypes);
    let vectors = width / size;
    let lanes = vectors.next_power_of_two().min(UNITS as usize) as u32;
    let client = x.client.clone();
    // SAFETY: every access is guarded by the row count and the width, which the operands' shapes give.
    unsafe {
        rms_norm::launch_unchecked::<R>(
            &client,
            cubes(&client, rows.div_ceil((UNITS / lanes) as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[&x, &z, &out]),
            size,
            x.into_array_arg(),
            weight.into_array_arg(),
            z.into_array_arg(),
            out.clone().into_array_arg(),
            rows,
            streams,
            width as u32,
            eps,
            vectors,
            lanes,
            factor,
            planes(&client),
            left_to_round(to, out.dtype),
            dtypes.map(Into::into),
        );
    }
    out
}
