//! The two passes over all streams, element by element.

use burn::tensor::DType;
use cubecl::prelude::*;

use crate::cube::{
    CubeTensor, KernelRuntime, UNITS, address_type, cubes, empty, left_to_round, rounded, sigmoid, storage, vector_size,
};
use crate::precision::Precision;

/// `1/S sum_s sigmoid(u_s) * normal_s`; rows of `width` vectors.
#[cube(launch_unchecked, address_type = "dynamic")]
fn mix_streams<U: Float, M: Float, O: Float, N: Size>(
    u: &Array<Vector<U, N>>,
    normal: &Array<Vector<M, N>>,
    out: &mut Array<Vector<O, N>>,
    vectors: usize,
    #[comptime] width: usize,
    #[comptime] streams: usize,
    #[comptime] to: Precision,
    #[define(U, M, O)] _dtypes: [StorageType; 3],
) {
    if ABSOLUTE_POS < vectors {
        let first = ABSOLUTE_POS / width * comptime!(width * streams) + ABSOLUTE_POS % width;
        let mut sum = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for stream in 0..streams {
            let at = first + stream * width;
            sum += sigmoid::<N>(Vector::cast_from(u[at])) * Vector::cast_from(normal[at]);
        }
        let mean = sum / Vector::new(f32::cast_from(comptime!(streams as u32)));
        out[ABSOLUTE_POS] = Vector::cast_from(rounded::<N>(mean, to));
    }
}

/// `stream + weight y`; rows of `width` vectors.
#[cube(launch_unchecked, address_type = "dynamic")]
fn write_streams<X: Float, Y: Float, O: Float, N: Size>(
    streams: &Array<Vector<X, N>>,
    y: &Array<Vector<Y, N>>,
    weights: &Array<f32>,
    out: &mut Array<Vector<O, N>>,
    vectors: usize,
    #[comptime] width: usize,
    #[comptime] count: usize,
    #[comptime] to: Precision,
    #[define(X, Y, O)] _dtypes: [StorageType; 3],
) {
    if ABSOLUTE_POS < vectors {
        let row = ABSOLUTE_POS / width;
        let own = Vector::<f32, N>::cast_from(y[row / count * width + ABSOLUTE_POS % width]);
        let sum = Vector::<f32, N>::cast_from(streams[ABSOLUTE_POS]) + own * Vector::new(weights[row]);
        out[ABSOLUTE_POS] = Vector::cast_from(rounded::<N>(sum, to));
    }
}

/// `u` and `normal` `[.., S, width]`; returns `[rows, width]` in `shape`.
pub(crate) fn mix<R: KernelRuntime>(
    u: CubeTensor<R>,
    normal: CubeTensor<R>,
    shape: [usize; 3],
    streams: usize,
    to: Precision,
) -> CubeTensor<R> {
    let width = shape[2];
    let out = empty(&u, shape, storage::<R>(to));
    let dtypes: [DType; 3] = [u.dtype, normal.dtype, out.dtype];
    let size = vector_size(&u, width, &dtypes);
    let vectors = out.meta.num_elements() / size;
    let client = u.client.clone();
    // SAFETY: positions beyond the result do nothing; every other has its element in each stream.
    unsafe {
        mix_streams::launch_unchecked::<R>(
            &client,
            cubes(&client, vectors.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[&u, &normal, &out]),
            size,
            u.into_array_arg(),
            normal.into_array_arg(),
            out.clone().into_array_arg(),
            vectors,
            width / size,
            streams,
            left_to_round(to, out.dtype),
            dtypes.map(Into::into),
        );
    }
    out
}

/// `streams` `[.., count * width]`, `y` `[.., width]`, float32 `weights` `[.., count]`.
pub(crate) fn write<R: KernelRuntime>(
    streams: CubeTensor<R>,
    y: CubeTensor<R>,
    weights: CubeTensor<R>,
    [count, width]: [usize; 2],
    to: Precision,
) -> CubeTensor<R> {
    let out = empty(&streams, streams.meta.shape().clone(), storage::<R>(to));
    let dtypes: [DType; 3] = [streams.dtype, y.dtype, out.dtype];
    let size = vector_size(&streams, width, &dtypes);
    let vectors = out.meta.num_elements() / size;
    let client = streams.client.clone();
    // SAFETY: positions beyond the result do nothing; every other has its row's weight and output.
    unsafe {
        write_streams::launch_unchecked::<R>(
            &client,
            cubes(&client, vectors.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[&streams, &y, &out]),
            size,
            streams.into_array_arg(),
            y.into_array_arg(),
            weights.into_array_arg(),
            out.clone().into_array_arg(),
            vectors,
            width / size,
            count,
            left_to_round(to, out.dtype),
            dtypes.map(Into::into),
        );
    }
    out
}
