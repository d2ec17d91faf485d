//! Rounding to a precision and changing the storage type, element by element.

use burn::tensor::DType;
use cubecl::prelude::*;

use crate::cube::{
    CubeTensor, KernelRuntime, UNITS, address_type, cubes, empty, left_to_round, rounded, storage, vector_size,
};
use crate::precision::Precision;

#[cube(launch_unchecked, address_type = "dynamic")]
fn round<X: Float, O: Float, N: Size>(
    x: &Array<Vector<X, N>>,
    out: &mut Array<Vector<O, N>>,
    vectors: usize,
    #[comptime] to: Precision,
    #[define(X, O)] _dtypes: [StorageType; 2],
) {
    if ABSOLUTE_POS < vectors {
        let value = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]);
        out[ABSOLUTE_POS] = Vector::cast_from(rounded::<N>(value, to));
    }
}

/// `x` contiguous.
pub(crate) fn launch<R: KernelRuntime>(x: CubeTensor<R>, to: Precision) -> CubeTensor<R> {
    let dtype = storage::<R>(to);
    if x.dtype == dtype && left_to_round(to, dtype) == Precision::Full {
        return x;
    }
    let count = x.meta.num_elements();
    let out = empty(&x, x.meta.shape().clone(), dtype);
    let dtypes: [DType; 2] = [x.dtype, dtype];
    let size = vector_size(&x, count, &dtypes);
    let client = x.client.clone();
    // SAFETY: positions beyond the number of elements do nothing.
    unsafe {
        round::launch_unchecked::<R>(
            &client,
            cubes(&client, (count / size).div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[&x, &out]),
            size,
            x.into_array_arg(),
            out.clone().into_array_arg(),
            count / size,
            left_to_round(to, dtype),
            dtypes.map(Into::into),
        );
    }
    out
}
