//! Eight consecutive values per unit: three stages in registers, the others between the units of a group of 32.

use burn::tensor::DType;
use cubecl::prelude::*;

use crate::cube::{
    CubeTensor, KernelRuntime, UNITS, address_type, cubes, empty, left_to_round, planes, rounded, storage,
};
use crate::precision::Precision;

/// Consecutive values of a unit.
pub(crate) const HELD: usize = 8;
/// Units that exchange values, and the values that they hold together.
pub(crate) const GROUP: u32 = 32;
pub(crate) const REACH: usize = GROUP as usize * HELD;

/// The word of unit `UNIT_POS ^ mask` of the same group of 32. All units of the cube take part.
#[cube]
pub(crate) fn exchange(
    value: u32,
    shared: &mut SharedMemory<u32>,
    #[comptime] mask: u32,
    #[comptime] planes: bool,
) -> u32 {
    if comptime!(planes) {
        plane_shuffle_xor(value, mask)
    } else {
        sync_cube();
        shared[UNIT_POS as usize] = value;
        sync_cube();
        shared[(UNIT_POS ^ mask) as usize]
    }
}

/// [`HELD`] values from vector `2 * at` on as float32, zeros where not `live`.
#[cube]
pub(crate) fn load<X: Float>(x: &Array<Vector<X, Const<4>>>, at: usize, live: bool) -> Array<f32> {
    let mut y = Array::<f32>::new(HELD);
    #[unroll]
    for half in 0..2usize {
        let mut value = Vector::<f32, Const<4>>::new(0.0f32);
        if live {
            value = Vector::cast_from(x[2 * at + half]);
        }
        #[unroll]
        for i in 0..4usize {
            y[4 * half + i] = value[i];
        }
    }
    y
}

/// `H y` over blocks of `block` values, up to [`REACH`]; 1 leaves them as they are.
#[cube]
pub(crate) fn transform(
    y: &mut Array<f32>,
    shared: &mut SharedMemory<u32>,
    #[comptime] block: usize,
    #[comptime] planes: bool,
) {
    #[unroll]
    for stage in 0..comptime!(block.ilog2()) {
        let stride = comptime!(1usize << stage);
        if comptime!(stride < HELD) {
            #[unroll]
            for i in 0..HELD {
                if comptime!(i & stride == 0) {
                    let (low, high) = (y[i], y[comptime!(i + stride)]);
                    y[i] = low + high;
                    y[comptime!(i + stride)] = low - high;
                }
            }
        } else {
            let mask = comptime!((stride / HELD) as u32);
            let upper = UNIT_POS & mask != 0;
            #[unroll]
            for i in 0..HELD {
                let own = y[i];
                let other = f32::reinterpret(exchange(u32::reinterpret(own), shared, mask, planes));
                y[i] = select(upper, other - own, own + other);
            }
        }
    }
    if comptime!(block > 1) {
        #[unroll]
        for i in 0..HELD {
            y[i] = y[i] * comptime!(1.0 / (block as f32).sqrt());
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn hadamard<X: Float, O: Float>(
    x: &Array<Vector<X, Const<4>>>,
    out: &mut Array<Vector<O, Const<4>>>,
    parts: usize,
    #[comptime] block: usize,
    #[comptime] planes: bool,
    #[comptime] to: Precision,
    #[define(X, O)] _dtypes: [StorageType; 2],
) {
    let live = ABSOLUTE_POS < parts;
    let mut shared = SharedMemory::<u32>::new(comptime!(UNITS as usize));
    let mut y = load::<X>(x, ABSOLUTE_POS, live);
    transform(&mut y, &mut shared, block, planes);
    if live {
        #[unroll]
        for half in 0..2usize {
            let mut value = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll]
            for i in 0..4usize {
                value[i] = y[4 * half + i];
            }
            out[2 * ABSOLUTE_POS + half] = Vector::cast_from(rounded::<Const<4>>(value, to));
        }
    }
}

/// `x` contiguous, its last axis a multiple of `block`; `None` for blocks that a group of units does not hold.
pub(crate) fn launch<R: KernelRuntime>(x: &CubeTensor<R>, block: usize, to: Precision) -> Option<CubeTensor<R>> {
    if !block.is_power_of_two() || !(HELD..=REACH).contains(&block) {
        return None;
    }
    let out = empty(x, x.meta.shape().clone(), storage::<R>(to));
    let dtypes: [DType; 2] = [x.dtype, out.dtype];
    let parts = x.meta.num_elements() / HELD;
    let client = x.client.clone();
    // SAFETY: parts beyond the count are neither read nor written.
    unsafe {
        hadamard::launch_unchecked::<R>(
            &client,
            cubes(&client, parts.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[x, &out]),
            x.clone().into_array_arg(),
            out.clone().into_array_arg(),
            parts,
            block,
            planes(&client),
            left_to_round(to, out.dtype),
            dtypes.map(Into::into),
        );
    }
    Some(out)
}
