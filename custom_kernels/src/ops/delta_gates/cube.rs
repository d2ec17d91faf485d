//! One unit per token and value head.

use burn::tensor::DType;
use cubecl::prelude::*;

use super::SOFTPLUS_IDENTITY;
use crate::cube::{CubeTensor, KernelRuntime, UNITS, address_type, cubes, empty};

#[cube(launch_unchecked, address_type = "dynamic")]
fn gates<A: Float, P: Float>(
    a: &Array<A>,
    b: &Array<A>,
    a_log: &Array<P>,
    dt_bias: &Array<P>,
    g: &mut Array<f32>,
    beta: &mut Array<f32>,
    count: usize,
    heads: usize,
    #[define(A, P)] _dtypes: [StorageType; 2],
) {
    if ABSOLUTE_POS < count {
        let head = ABSOLUTE_POS % heads;
        let u = f32::cast_from(a[ABSOLUTE_POS]) + f32::cast_from(dt_bias[head]);
        let mut softplus = u;
        if u <= SOFTPLUS_IDENTITY {
            softplus = f32::log1p(f32::exp(u));
        }
        g[ABSOLUTE_POS] = -(f32::exp(f32::cast_from(a_log[head])) * softplus);
        beta[ABSOLUTE_POS] = 1.0f32 / (1.0f32 + f32::exp(-f32::cast_from(b[ABSOLUTE_POS])));
    }
}

/// `a`, `b` `[batch, tokens, value_heads]` of one type, `a_log`, `dt_bias` `[value_heads]` of one type, contiguous.
pub(crate) fn launch<R: KernelRuntime>(
    a: CubeTensor<R>,
    b: CubeTensor<R>,
    a_log: CubeTensor<R>,
    dt_bias: CubeTensor<R>,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let shape = a.meta.shape().clone();
    let (count, heads) = (a.meta.num_elements(), a_log.meta.num_elements());
    let g = empty(&a, shape.clone(), DType::F32);
    let beta = empty(&a, shape, DType::F32);
    let dtypes: [DType; 2] = [a.dtype, a_log.dtype];
    let client = a.client.clone();
    // SAFETY: positions beyond the count do nothing; heads index the two parameter vectors.
    unsafe {
        gates::launch_unchecked::<R>(
            &client,
            cubes(&client, count.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[&a]),
            a.into_array_arg(),
            b.into_array_arg(),
            a_log.into_array_arg(),
            dt_bias.into_array_arg(),
            g.clone().into_array_arg(),
            beta.clone().into_array_arg(),
            count,
            heads,
            dtypes.map(Into::into),
        );
    }
    (g, beta)
}
