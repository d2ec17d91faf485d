//! Two operands, one result, element by element: `x * sigmoid(y)` and `SiLU(x) * y`.

use burn::tensor::DType;
use cubecl::prelude::*;

use crate::cube::{
    CubeTensor, KernelRuntime, UNITS, address_type, cubes, empty, left_to_round, rounded, sigmoid, storage, vector_size,
};
use crate::precision::Precision;

/// What to compute from `x` and `y`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Gate {
    /// `x * sigmoid(y)`
    Sigmoid,
    /// `SiLU(x) * y`
    Swiglu,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn two_operands<X: Float, Y: Float, O: Float, N: Size>(
    x: &Array<Vector<X, N>>,
    y: &Array<Vector<Y, N>>,
    out: &mut Array<Vector<O, N>>,
    vectors: usize,
    #[comptime] what: Gate,
    #[comptime] to: Precision,
    #[define(X, Y, O)] _dtypes: [StorageType; 3],
) {
    if ABSOLUTE_POS < vectors {
        let a = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]);
        let b = Vector::<f32, N>::cast_from(y[ABSOLUTE_POS]);
        let value = match comptime!(what) {
            Gate::Sigmoid => a * sigmoid::<N>(b),
            Gate::Swiglu => a * sigmoid::<N>(a) * b,
        };
        out[ABSOLUTE_POS] = Vector::cast_from(rounded::<N>(value, to));
    }
}

/// `x`, `y` contiguous, of one shape.
pub(crate) fn launch<R: KernelRuntime>(x: CubeTensor<R>, y: CubeTensor<R>, what: Gate, to: Precision) -> CubeTensor<R> {
    let count = x.meta.num_elements();
    let out = empty(&x, x.meta.shape().clone(), storage::<R>(to));
    let dtypes: [DType; 3] = [x.dtype, y.dtype, out.dtype];
    let size = vector_size(&x, count, &dtypes);
    let client = x.client.clone();
    // SAFETY: positions beyond the common number of elements do nothing.
    unsafe {
        two_operands::launch_unchecked::<R>(
            &client,
            cubes(&client, (count / size).div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[&x, &y, &out]),
            size,
            x.into_array_arg(),
            y.into_array_arg(),
            out.clone().into_array_arg(),
            count / size,
            what,
            left_to_round(to, out.dtype),
            dtypes.map(Into::into),
        );
    }
    out
}
