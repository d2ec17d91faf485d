//! `lanes` units per row, four codes per word.

use burn::tensor::DType;
use cubecl::prelude::*;

use super::E4M3_MAX;
use crate::cube::{CubeTensor, KernelRuntime, UNITS, address_type, cubes, empty};

/// E4M3 code of `y`, at most 448 in size; see [`crate::numeric::f32_to_e4m3fn`].
#[cube]
fn encode_e4m3(y: f32) -> u32 {
    let bits = u32::reinterpret(y);
    let size = min(f32::abs(y), E4M3_MAX);
    // Adding 2^14 leaves a multiple of 2^-9, rounded to nearest even.
    let small = u32::reinterpret(size + 16384.0f32) & 0xf;
    let size_bits = u32::reinterpret(size);
    let normal = ((size_bits + 0x7_ffff + ((size_bits >> 20) & 1)) >> 20) - 960;
    select(size < 0.015625f32, small, normal) | ((bits >> 24) & 0x80)
}

/// `width` counts vectors of four.
#[cube(launch_unchecked, address_type = "dynamic")]
fn quantize<X: Float>(
    x: &Array<Vector<X, Const<4>>>,
    codes: &mut Array<u32>,
    scales: &mut Array<f32>,
    rows: usize,
    #[comptime] width: usize,
    #[comptime] lanes: u32,
    #[define(X)] _dtype: StorageType,
) {
    let lane = (UNIT_POS % lanes) as usize;
    let row = CUBE_POS * comptime!((UNITS / lanes) as usize) + (UNIT_POS / lanes) as usize;
    let live = row < rows;
    let steps = comptime!(width.div_ceil(lanes as usize));
    let mut values = Array::<Vector<f32, Const<4>>>::new(steps);
    let mut top = 0.0f32;
    #[unroll]
    for i in 0..steps {
        let at = lane + i * lanes as usize;
        let mut value = Vector::<f32, Const<4>>::new(0.0f32);
        if live && at < width {
            value = Vector::cast_from(x[row * width + at]);
        }
        values[i] = value;
        #[unroll]
        for j in 0..4usize {
            top = max(top, f32::abs(value[j]));
        }
    }
    let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
    #[unroll]
    for i in 0..comptime!(lanes.ilog2()) {
        sync_cube();
        shared[UNIT_POS as usize] = top;
        sync_cube();
        top = max(top, shared[(UNIT_POS ^ comptime!(1u32 << i)) as usize]);
    }
    let scale = top / E4M3_MAX;
    let inverse = select(scale > 0.0f32, 1.0f32 / scale, 0.0f32);
    if live && lane == 0 {
        scales[row] = scale;
    }
    #[unroll]
    for i in 0..steps {
        let at = lane + i * lanes as usize;
        if live && at < width {
            let mut word = 0u32;
            #[unroll]
            for j in 0..4usize {
                word |= encode_e4m3(values[i][j] * inverse) << comptime!(8 * j as u32);
            }
            codes[row * width + at] = word;
        }
    }
}

/// Codes `[rows, width / 4]` of four per word and scales `[rows]` of `x` `[..., width]`, contiguous; `width` a multiple of 4.
pub(crate) fn launch<R: KernelRuntime>(x: &CubeTensor<R>, width: usize) -> (CubeTensor<R>, CubeTensor<R>) {
    let rows = x.meta.num_elements() / width;
    let codes = empty(x, [rows, width / 4], DType::U32);
    let scales = empty(x, [rows], DType::F32);
    let vectors = width / 4;
    let lanes = vectors.next_power_of_two().min(UNITS as usize) as u32;
    let client = x.client.clone();
    // SAFETY: every access is guarded by the row count and the width, which the operand's shape gives.
    unsafe {
        quantize::launch_unchecked::<R>(
            &client,
            cubes(&client, rows.div_ceil((UNITS / lanes) as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[x, &codes]),
            x.clone().into_array_arg(),
            codes.clone().into_array_arg(),
            scales.clone().into_array_arg(),
            rows,
            vectors,
            lanes,
            x.dtype.into(),
        );
    }
    (codes, scales)
}
