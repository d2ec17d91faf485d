//! Portable delta rule: one cube per value head walks the tokens, one unit per column of the state.
//!
//! The recurrent form, float32 throughout. A unit holds its column of the state; queries and keys, which every column
//! needs, pass through shared memory normalised.

use burn::tensor::DType;
use cubecl::prelude::*;

use super::{DeltaHeads, L2_EPSILON};
use crate::cube::{CubeTensor, KernelRuntime, address_type, cubes, empty, left_to_round, rounded, storage};
use crate::precision::Precision;

#[cube(launch_unchecked, address_type = "dynamic")]
fn delta<X: Float, O: Float>(
    qkv: &Array<X>,
    g: &Array<f32>,
    beta: &Array<f32>,
    state: &Array<f32>,
    out: &mut Array<O>,
    next: &mut Array<f32>,
    count: usize,
    tokens: usize,
    #[comptime] heads: DeltaHeads,
    #[comptime] to: Precision,
    #[define(X, O)] _dtypes: [StorageType; 2],
) {
    let column = UNIT_POS as usize;
    let key_dim = comptime!(heads.key_dim);
    let value_dim = comptime!(heads.value_dim);
    let value_heads = comptime!(heads.value_heads);
    let channels = comptime!(heads.channels());
    let key_width = comptime!(heads.key_heads * heads.key_dim);
    let loads = comptime!(heads.key_dim.div_ceil(heads.value_dim));
    let mut query = SharedMemory::<f32>::new(key_dim);
    let mut key = SharedMemory::<f32>::new(key_dim);
    if CUBE_POS < count {
        let head = CUBE_POS % value_heads;
        let batch = CUBE_POS / value_heads;
        let key_head = head / comptime!(heads.value_heads / heads.key_heads);
        let state_start = CUBE_POS * key_dim * value_dim + column;
        let mut s = Array::<f32>::new(key_dim);
        for i in 0..key_dim {
            s[i] = state[state_start + i * value_dim];
        }
        for t in 0..tokens {
            let row = batch * tokens + t;
            #[unroll]
            for i in 0..loads {
                let feature = i * value_dim + column;
                if feature < key_dim {
                    query[feature] = f32::cast_from(qkv[row * channels + key_head * key_dim + feature]);
                    key[feature] = f32::cast_from(qkv[row * channels + key_width + key_head * key_dim + feature]);
                }
            }
            sync_cube();
            let decay = f32::exp(g[row * value_heads + head]);
            let mut query_squares = 0.0f32;
            let mut key_squares = 0.0f32;
            let mut read = 0.0f32;
            for i in 0..key_dim {
                query_squares += query[i] * query[i];
                key_squares += key[i] * key[i];
                s[i] *= decay;
                read += key[i] * s[i];
            }
            let key_scale = 1.0f32 / f32::sqrt(key_squares + L2_EPSILON);
            let query_scale = 1.0f32 / f32::sqrt((query_squares + L2_EPSILON) * f32::cast_from(key_dim));
            let v = f32::cast_from(qkv[row * channels + 2 * key_width + head * value_dim + column]);
            let u = beta[row * value_heads + head] * (v - read * key_scale) * key_scale;
            let mut o = 0.0f32;
            for i in 0..key_dim {
                s[i] += key[i] * u;
                o += query[i] * s[i];
            }
            let value = rounded::<Const<1>>(Vector::new(o * query_scale), to);
            out[(row * value_heads + head) * value_dim + column] = O::cast_from(value[0]);
            sync_cube();
        }
        for i in 0..key_dim {
            next[state_start + i * value_dim] = s[i];
        }
    }
}

/// `qkv` `[batch, tokens, channels]`, `g`, `beta` float32 `[batch, tokens, value_heads]`, `state` float32
/// `[batch, value_heads, key_dim, value_dim]`, contiguous; returns the output and the next state.
pub(crate) fn launch<R: KernelRuntime>(
    qkv: CubeTensor<R>,
    g: CubeTensor<R>,
    beta: CubeTensor<R>,
    state: CubeTensor<R>,
    heads: DeltaHeads,
    to: Precision,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let (batch, tokens) = (qkv.meta.shape()[0], qkv.meta.shape()[1]);
    let out = empty(
        &qkv,
        [batch, tokens, heads.value_heads, heads.value_dim],
        storage::<R>(to),
    );
    let next = empty(&qkv, state.meta.shape().clone(), DType::F32);
    let dtypes: [DType; 2] = [qkv.dtype, out.dtype];
    let count = batch * heads.value_heads;
    let client = qkv.client.clone();
    // SAFETY: cubes beyond the count do nothing; all indices follow from the geometry the operands have by contract.
    unsafe {
        delta::launch_unchecked::<R>(
            &client,
            cubes(&client, count),
            CubeDim::new_1d(heads.value_dim as u32),
            address_type(&[&qkv, &out, &state]),
            qkv.into_array_arg(),
            g.into_array_arg(),
            beta.into_array_arg(),
            state.into_array_arg(),
            out.clone().into_array_arg(),
            next.clone().into_array_arg(),
            count,
            tokens,
            heads,
            left_to_round(to, out.dtype),
            dtypes.map(Into::into),
        );
    }
    (out, next)
}
