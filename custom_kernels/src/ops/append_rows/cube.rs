//! One unit per vector of a row, written in place.

use burn::tensor::DType;
use cubecl::prelude::*;

use crate::cube::{CubeTensor, KernelRuntime, UNITS, address_type, cubes, vector_size};

/// `head_dim` counts vectors; `rows` `[batch, tokens, heads, head_dim]`, `cache` `[batch, heads, capacity, head_dim]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn append<X: Float, C: Float, N: Size>(
    rows: &Array<Vector<X, N>>,
    cache: &mut Array<Vector<C, N>>,
    count: usize,
    tokens: usize,
    heads: usize,
    capacity: usize,
    at: usize,
    #[comptime] head_dim: usize,
    #[define(X, C)] _dtypes: [StorageType; 2],
) {
    if ABSOLUTE_POS < count {
        let feature = ABSOLUTE_POS % head_dim;
        let row = ABSOLUTE_POS / head_dim;
        let head = row % heads;
        let token = (row / heads) % tokens;
        let batch = row / (heads * tokens);
        cache[((batch * heads + head) * capacity + at + token) * head_dim + feature] =
            Vector::cast_from(rows[ABSOLUTE_POS]);
    }
}

/// Writes into `cache`, which no other tensor may share; `rows` contiguous.
pub(crate) fn launch<R: KernelRuntime>(cache: CubeTensor<R>, rows: CubeTensor<R>, at: usize) -> CubeTensor<R> {
    let shape = rows.meta.shape().clone();
    let (tokens, heads, head_dim, capacity) = (shape[1], shape[2], shape[3], cache.meta.shape()[2]);
    let dtypes: [DType; 2] = [rows.dtype, cache.dtype];
    let size = vector_size(&rows, head_dim, &dtypes);
    let count = rows.meta.num_elements() / size;
    let client = rows.client.clone();
    // SAFETY: positions beyond the count do nothing; `at + tokens <= capacity` by contract.
    unsafe {
        append::launch_unchecked::<R>(
            &client,
            cubes(&client, count.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[&rows, &cache]),
            size,
            rows.into_array_arg(),
            cache.clone().into_array_arg(),
            count,
            tokens,
            heads,
            capacity,
            at,
            head_dim / size,
            dtypes.map(Into::into),
        );
    }
    cache
}
