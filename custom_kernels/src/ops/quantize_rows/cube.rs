//! FP8: `lanes` units per row, four codes per word. NVFP4: one unit per group of 16.
//!
//! NVFP4 codes times their group's scale have 6 significant bits: bfloat16 holds them exactly, and the divisor that all rows
//! share is left to the product.

use burn::tensor::DType;
use cubecl::prelude::*;

use super::{ActivationFormat, E4M3_MAX, NVFP4_GROUP, Nvfp4Rounding};
use crate::cube::{CubeTensor, KernelRuntime, UNITS, address_type, cubes, empty};
use crate::numeric::E2M1_MAX;
use crate::ops::expand_weight::cube::{NAN, e4m3};

/// The bits of an infinite float32.
const INFINITY: u32 = 0x7f80_0000;

/// `value` where `x` is neither infinite nor NaN, else the float32 of these bits.
#[cube]
fn finite_or(value: f32, x: f32, #[comptime] bits: u32) -> f32 {
    let finite = (u32::reinterpret(x) & INFINITY) != INFINITY;
    f32::reinterpret(select(finite, u32::reinterpret(value), u32::cast_from(bits)))
}

/// E4M3 code of `y`, at most 448 in size; see [`crate::numeric::f32_to_e4m3fn`].
#[cube]
pub(crate) fn encode_e4m3(y: f32) -> u32 {
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
            // A row with a value that is no number has an infinite maximum.
            top = max(top, finite_or(f32::abs(value[j]), value[j], INFINITY));
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
    // Up to 2^-128, whose bits these are, there is no finite inverse.
    let inverse = select(u32::reinterpret(scale) > 0x0020_0000, 1.0f32 / scale, 0.0f32);
    if live && lane == 0 {
        // The product of such a row is no number either.
        scales[row] = finite_or(scale, top, NAN);
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

/// `values[row, at] = code * scale`; `width` counts words.
#[cube(launch_unchecked, address_type = "dynamic")]
fn decode(
    codes: &Array<u32>,
    scales: &Array<f32>,
    values: &mut Array<Vector<f32, Const<4>>>,
    words: usize,
    width: usize,
) {
    if ABSOLUTE_POS < words {
        let (word, scale) = (codes[ABSOLUTE_POS], scales[ABSOLUTE_POS / width]);
        let mut value = Vector::<f32, Const<4>>::new(0.0f32);
        #[unroll]
        for j in 0..4usize {
            value[j] = e4m3((word >> comptime!(8 * j as u32)) & 0xff) * scale;
        }
        values[ABSOLUTE_POS] = value;
    }
}

/// `x` `[..., width]` as FP8 represents it, float32; contiguous, `width` a multiple of 4.
pub(crate) fn fp8_values<R: KernelRuntime>(x: &CubeTensor<R>, width: usize) -> CubeTensor<R> {
    let (codes, scales) = launch(x, width);
    let values = empty(x, x.meta.shape().clone(), DType::F32);
    let words = codes.meta.num_elements();
    let client = x.client.clone();
    // SAFETY: positions beyond the words do nothing; every word has its row's scale.
    unsafe {
        decode::launch_unchecked::<R>(
            &client,
            cubes(&client, words.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[&codes, &values]),
            codes.into_array_arg(),
            scales.into_array_arg(),
            values.clone().into_array_arg(),
            words,
            width / 4,
        );
    }
    values
}

/// Nearest E2M1 value of `y`, ties to even, at most 6 in size.
#[cube]
fn e2m1_value(y: f32) -> f32 {
    let size = f32::abs(y);
    // Steps of 0.5 below 2, of 1 below 4, of 2 above; adding 2^22, 2^23, 2^24 leaves a multiple of the step, ties to even.
    let small = (size + 4_194_304.0f32) - 4_194_304.0f32;
    let middle = (size + 8_388_608.0f32) - 8_388_608.0f32;
    let large = (size + 16_777_216.0f32) - 16_777_216.0f32;
    let value = select(size < 2.0f32, small, select(size < 4.0f32, middle, large));
    let value = min(value, E2M1_MAX);
    select(y < 0.0f32, -value, value)
}

/// One group of 16, four vectors; `scaled` gives the values, else codes times their group's scale alone.
#[cube(launch_unchecked, address_type = "dynamic")]
fn nvfp4_groups<X: Float, O: Float>(
    x: &Array<Vector<X, Const<4>>>,
    out: &mut Array<Vector<O, Const<4>>>,
    groups: usize,
    divisor: f32,
    #[comptime] model_opt: bool,
    #[comptime] scaled: bool,
    #[define(X, O)] _dtypes: [StorageType; 2],
) {
    if ABSOLUTE_POS < groups {
        let first = ABSOLUTE_POS * 4;
        let mut values = Array::<Vector<f32, Const<4>>>::new(4usize);
        let mut top = 0.0f32;
        #[unroll]
        for i in 0..4usize {
            values[i] = Vector::cast_from(x[first + i]);
            #[unroll]
            for j in 0..4usize {
                let size = f32::abs(values[i][j]);
                top = select(size > top, size, top);
            }
        }
        let unit = 1.0f32 / divisor;
        let word = if comptime!(model_opt) {
            top / (E2M1_MAX * unit)
        } else {
            (top * divisor) / E2M1_MAX
        };
        let scale = e4m3(encode_e4m3(word) & 0x7f);
        let step = if comptime!(model_opt) { scale * unit } else { scale };
        #[unroll]
        for i in 0..4usize {
            let mut result = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll]
            for j in 0..4usize {
                let value = values[i][j];
                let y = if comptime!(model_opt) {
                    value / step
                } else {
                    (value * divisor) / step
                };
                let code = e2m1_value(y);
                let narrow = if comptime!(scaled && model_opt) {
                    code * step
                } else if comptime!(scaled) {
                    code * step / divisor
                } else {
                    code * scale
                };
                let narrow = select(step > 0.0f32, narrow, 0.0f32);
                result[j] = finite_or(narrow, value, NAN);
            }
            out[first + i] = Vector::cast_from(result);
        }
    }
}

/// `x` `[..., width]` in NVFP4 groups, contiguous, `width` a multiple of 16: its values in float32, or with `dtype` bfloat16
/// those times the reciprocal of [`nvfp4_factor`].
pub(crate) fn nvfp4<R: KernelRuntime>(
    x: &CubeTensor<R>,
    divisor: f32,
    rounding: Nvfp4Rounding,
    dtype: DType,
) -> CubeTensor<R> {
    let out = empty(x, x.meta.shape().clone(), dtype);
    let groups = x.meta.num_elements() / NVFP4_GROUP;
    let client = x.client.clone();
    // SAFETY: positions beyond the groups do nothing.
    unsafe {
        nvfp4_groups::launch_unchecked::<R>(
            &client,
            cubes(&client, groups.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[x, &out]),
            x.clone().into_array_arg(),
            out.clone().into_array_arg(),
            groups,
            divisor,
            rounding == Nvfp4Rounding::ModelOpt,
            dtype == DType::F32,
            [x.dtype.into(), dtype.into()],
        );
    }
    out
}

/// What codes times their group's scale are multiplied by: `1 / d`.
pub(crate) fn nvfp4_factor(divisor: f32) -> f32 {
    1.0 / divisor
}

/// `x` `[..., width]`, contiguous, as `format` represents it, float32; `None` where there is no kernel for it.
pub(crate) fn values<R: KernelRuntime>(
    x: &CubeTensor<R>,
    width: usize,
    format: ActivationFormat,
) -> Option<CubeTensor<R>> {
    match format {
        ActivationFormat::Fp8 if width.is_multiple_of(4) => Some(fp8_values(x, width)),
        ActivationFormat::Nvfp4 { divisor, rounding } if width.is_multiple_of(NVFP4_GROUP) => {
            Some(nvfp4(x, divisor, rounding, DType::F32))
        }
        _ => None,
    }
}
