//! One unit per pair of vectors of a head: a rotated pair, or two vectors that pass unchanged.

use burn::tensor::DType;
use cubecl::prelude::*;

use crate::cube::{
    CubeTensor, KernelRuntime, UNITS, address_type, cubes, empty, left_to_round, rounded, storage, vector_size,
};
use crate::precision::Precision;

/// `head_dim` and `half` count vectors; `x` `[batch, tokens, heads, head_dim]`, tables `[positions, half]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn rotate<X: Float, O: Float, N: Size>(
    x: &Array<Vector<X, N>>,
    cos: &Array<Vector<f32, N>>,
    sin: &Array<Vector<f32, N>>,
    out: &mut Array<Vector<O, N>>,
    count: usize,
    tokens: usize,
    heads: usize,
    first_position: usize,
    #[comptime] head_dim: usize,
    #[comptime] half: usize,
    #[comptime] to: Precision,
    #[define(X, O)] _dtypes: [StorageType; 2],
) {
    // Units of a head: `half` rotated pairs, then the vectors that pass.
    let per_head = comptime!(head_dim - half);
    if ABSOLUTE_POS < count {
        let unit = ABSOLUTE_POS % per_head;
        let head = ABSOLUTE_POS / per_head;
        let start = head * head_dim;
        if unit < half {
            let position = first_position + (head / heads) % tokens;
            let c = cos[position * half + unit];
            let s = sin[position * half + unit];
            let a = Vector::<f32, N>::cast_from(x[start + unit]);
            let b = Vector::<f32, N>::cast_from(x[start + half + unit]);
            out[start + unit] = Vector::cast_from(rounded::<N>(a * c - b * s, to));
            out[start + half + unit] = Vector::cast_from(rounded::<N>(b * c + a * s, to));
        } else {
            let value = Vector::<f32, N>::cast_from(x[start + half + unit]);
            out[start + half + unit] = Vector::cast_from(value);
        }
    }
}

/// `x` `[batch, tokens, heads, head_dim]`, `cos`, `sin` `[positions, half]` float32, all contiguous.
///
/// Unrotated features keep their value: the result is stored in 16 bits only where `x` is.
pub(crate) fn launch<R: KernelRuntime>(
    x: CubeTensor<R>,
    cos: CubeTensor<R>,
    sin: CubeTensor<R>,
    first_position: usize,
    to: Precision,
) -> CubeTensor<R> {
    let shape = x.meta.shape().clone();
    let (tokens, heads, head_dim, half) = (shape[1], shape[2], shape[3], cos.meta.shape()[1]);
    let dtype = if x.dtype == storage::<R>(to) {
        x.dtype
    } else {
        DType::F32
    };
    let out = empty(&x, shape.clone(), dtype);
    let dtypes: [DType; 2] = [x.dtype, dtype];
    let mut size = vector_size(&x, half, &[DType::F32]);
    while head_dim % size != 0 {
        size /= 2;
    }
    let (head_dim, half) = (head_dim / size, half / size);
    let count = shape[0] * tokens * heads * (head_dim - half);
    let client = x.client.clone();
    // SAFETY: positions beyond the count do nothing; the table covers `first_position + tokens` rows by contract.
    unsafe {
        rotate::launch_unchecked::<R>(
            &client,
            cubes(&client, count.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[&x, &out]),
            size,
            x.into_array_arg(),
            cos.into_array_arg(),
            sin.into_array_arg(),
            out.clone().into_array_arg(),
            count,
            tokens,
            heads,
            first_position,
            head_dim,
            half,
            left_to_round(to, dtype),
            dtypes.map(Into::into),
        );
    }
    out
}
