//! One unit walks `RUN` tokens of one vector of channels with the last `W` inputs in registers.

use burn::tensor::DType;
use cubecl::prelude::*;

use crate::cube::{
    CubeTensor, KernelRuntime, UNITS, address_type, cubes, empty, left_to_round, rounded, sigmoid, storage, vector_size,
};
use crate::precision::Precision;

/// Tokens per unit: the `W - 1` inputs read twice cost less than a tenth, and a window still gives thousands of cubes.
const RUN: usize = 32;

/// Tokens whose inputs a unit has in flight.
const BLOCK: usize = 4;

/// `channels` counts vectors; `x` `[batch, tokens, channels]`, `weight` `[channels, W]`, `tail` `[batch, W - 1, channels]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn conv_silu<X: Float, W: Float, T: Float, O: Float, N: Size>(
    x: &Array<Vector<X, N>>,
    weight: &Array<W>,
    tail: &Array<Vector<T, N>>,
    out: &mut Array<Vector<O, N>>,
    next_tail: &mut Array<Vector<T, N>>,
    count: usize,
    tokens: usize,
    channels: usize,
    #[comptime] width: usize,
    #[comptime] run: usize,
    #[comptime] to: Precision,
    #[define(X, W, T, O)] _dtypes: [StorageType; 4],
) {
    if ABSOLUTE_POS < count {
        let channel = ABSOLUTE_POS % channels;
        let runs = tokens.div_ceil(run);
        let first = ((ABSOLUTE_POS / channels) % runs) * run;
        let batch = ABSOLUTE_POS / (channels * runs);
        let before = comptime!(width - 1);
        let mut taps = Array::<Vector<f32, N>>::new(width);
        let mut inputs = Array::<Vector<f32, N>>::new(width);
        #[unroll]
        for j in 0..width {
            let mut tap = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for n in 0..N::value() {
                tap[n] = f32::cast_from(weight[(channel * N::value() + n) * width + j]);
            }
            taps[j] = tap;
            inputs[j] = Vector::new(0.0f32);
        }
        #[unroll]
        for j in 0..before {
            // The input `before - j` tokens before the run: of this pass, or of the tail.
            if first + j >= before {
                inputs[j + 1] = Vector::cast_from(x[(batch * tokens + first + j - before) * channels + channel]);
            } else {
                inputs[j + 1] = Vector::cast_from(tail[(batch * before + first + j) * channels + channel]);
            }
        }
        let mut end = first + run;
        if end > tokens {
            end = tokens;
        }
        // Inputs of a block of tokens are asked for together: one at a time would wait for the memory at every token.
        let mut t = first;
        while t < end {
            let mut block = Array::<Vector<f32, N>>::new(BLOCK);
            #[unroll]
            for i in 0..BLOCK {
                let mut input = Vector::<f32, N>::new(0.0f32);
                if t + i < end {
                    input = Vector::cast_from(x[(batch * tokens + t + i) * channels + channel]);
                }
                block[i] = input;
            }
            #[unroll]
            for i in 0..BLOCK {
                if t + i < end {
                    let mut sum = Vector::<f32, N>::new(0.0f32);
                    #[unroll]
                    for j in 0..before {
                        inputs[j] = inputs[j + 1];
                        sum += taps[j] * inputs[j];
                    }
                    inputs[before] = block[i];
                    sum += taps[before] * block[i];
                    let value = sum * sigmoid::<N>(sum);
                    out[(batch * tokens + t + i) * channels + channel] = Vector::cast_from(rounded::<N>(value, to));
                }
            }
            t += BLOCK;
        }
        if end == tokens {
            #[unroll]
            for j in 0..before {
                next_tail[(batch * before + j) * channels + channel] = Vector::cast_from(inputs[j + 1]);
            }
        }
    }
}

/// `x` `[batch, tokens, channels]`, `weight` `[channels, W]`, `tail` `[batch, W - 1, channels]`,
/// contiguous; returns the result and the next tail, stored as `x` is.
pub(crate) fn launch<R: KernelRuntime>(
    x: CubeTensor<R>,
    weight: CubeTensor<R>,
    tail: CubeTensor<R>,
    to: Precision,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let shape = x.meta.shape().clone();
    let (batch, tokens, channels, width) = (shape[0], shape[1], shape[2], weight.meta.shape()[1]);
    let out = empty(&x, shape, storage::<R>(to));
    let next = empty(&x, tail.meta.shape().clone(), tail.dtype);
    let dtypes: [DType; 4] = [x.dtype, weight.dtype, tail.dtype, out.dtype];
    let size = vector_size(&x, channels, &dtypes);
    let channels = channels / size;
    let count = batch * tokens.div_ceil(RUN) * channels;
    let client = x.client.clone();
    // SAFETY: positions beyond the count do nothing; all other indices follow from the operands' shapes.
    unsafe {
        conv_silu::launch_unchecked::<R>(
            &client,
            cubes(&client, count.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[&x, &out]),
            size,
            x.into_array_arg(),
            weight.into_array_arg(),
            tail.into_array_arg(),
            out.clone().into_array_arg(),
            next.clone().into_array_arg(),
            count,
            tokens,
            channels,
            width,
            RUN,
            left_to_round(to, out.dtype),
            dtypes.map(Into::into),
        );
    }
    (out, next)
}
