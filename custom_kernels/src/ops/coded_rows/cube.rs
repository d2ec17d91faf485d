//! A row per 32 units, eight consecutive values each; scales are agreed on between the units of a group of values.
//!
//! No rounding may depend on a compiler that merges a product and a sum into one rounded step: sums that follow a product
//! are taken of limited values or of integers, and the squared errors of NVFP4 pass through [`opaque`].

use burn::tensor::DType;
use cubecl::prelude::*;

use super::{NVFP4_TARGETS, ROW, RowCoding, RowFormat};
use crate::cube::{
    CubeTensor, KernelRuntime, UNITS, address_type, contiguous, cubes, empty, left_to_round, planes, rounded, storage,
};
use crate::ops::expand_weight::cube::{e2m1, e4m3, half_float};
use crate::ops::hadamard::cube::{GROUP, HELD, exchange, load, transform};
use crate::ops::quantize_rows::cube::encode_e4m3;
use crate::precision::Precision;

/// Largest magnitudes of the bits of infinities, beyond which are those of NaN.
const INFINITY: u32 = 0x7f80_0000;
/// 1.5 * 2^23, to whose bits adding `x` adds the nearest integer, ties to even.
const WHOLE: f32 = 12_582_912.0;
const WHOLE_BITS: u32 = WHOLE.to_bits();

/// Word of `x` in half precision, `x >= 0`; `0x7E00` for NaN.
#[cube]
fn encode_half(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    // Adding 0.5 leaves a multiple of 2^-24.
    let small = u32::reinterpret(x + 0.5f32) - 0x3f00_0000;
    let normal = ((bits + 0xfff + ((bits >> 13) & 1)) >> 13) - 0x1_c000;
    let word = select(bits < 0x3880_0000, small, normal);
    let word = select(bits >= 0x477f_f000, 0x7c00u32, word);
    select(bits > INFINITY, 0x7e00u32, word)
}

/// Word of `y` in E2M1, saturating; keeps the sign of zeros.
#[cube]
fn encode_e2m1(y: f32) -> u32 {
    let size = f32::abs(y);
    // Midpoints between neighbours; a tie belongs to the even word.
    let above = u32::cast_from(size > 0.25f32)
        + u32::cast_from(size > 1.25f32)
        + u32::cast_from(size > 2.5f32)
        + u32::cast_from(size > 5.0f32);
    let reached = u32::cast_from(size >= 0.75f32) + u32::cast_from(size >= 1.75f32) + u32::cast_from(size >= 3.5f32);
    (above + reached) | ((u32::reinterpret(y) >> 28) & 8)
}

/// `x` as no compiler sees through it; `zero` is 0.
#[cube]
fn opaque(x: f32, zero: u32) -> f32 {
    f32::reinterpret(u32::reinterpret(x) ^ zero)
}

/// Bits of the largest magnitude of `lanes` units' values: those of a NaN when one is.
#[cube]
fn largest(y: &Array<f32>, shared: &mut SharedMemory<u32>, #[comptime] lanes: u32, #[comptime] planes: bool) -> u32 {
    let mut top = 0u32;
    #[unroll]
    for i in 0..HELD {
        top = max(top, u32::reinterpret(y[i]) & 0x7fff_ffff);
    }
    #[unroll]
    for stage in 0..comptime!(lanes.ilog2()) {
        top = max(top, exchange(top, shared, comptime!(1u32 << stage), planes));
    }
    top
}

/// Codes of this unit's values and the word of the scale they share with others.
#[cube]
fn absmax(
    y: &Array<f32>,
    codes: &mut Array<u32>,
    shared: &mut SharedMemory<u32>,
    #[comptime] group: usize,
    #[comptime] bits: u32,
    #[comptime] planes: bool,
) -> u32 {
    let most = comptime!(((1u32 << (bits - 1)) - 1) as f32);
    let top = largest(y, shared, comptime!((group / HELD) as u32), planes);
    let word = encode_half(f32::reinterpret(top) / most);
    let scale = half_float(word);
    let factor = select(scale > 0.0f32, 1.0f32 / scale, 0.0f32);
    #[unroll]
    for i in 0..HELD {
        let limited = max(min(y[i] * factor, most), -most);
        let code = u32::reinterpret(limited + WHOLE) - WHOLE_BITS;
        codes[i] = select(factor == 0.0f32, 0u32, code & comptime!((1u32 << bits) - 1));
    }
    word
}

/// As [`absmax`].
#[cube]
fn fp8(y: &Array<f32>, codes: &mut Array<u32>, shared: &mut SharedMemory<u32>, #[comptime] planes: bool) -> u32 {
    let top = largest(y, shared, GROUP, planes);
    let scale = max(
        min(f32::reinterpret(top) / 448.0f32, 65504.0f32),
        1.0f32 / 16_777_216.0f32,
    );
    let word = encode_half(scale);
    let factor = 1.0f32 / half_float(word);
    let (zero, nan) = (top == 0, top > INFINITY);
    #[unroll]
    for i in 0..HELD {
        let code = select(nan, 0x7fu32, encode_e4m3(y[i] * factor));
        codes[i] = select(zero, 0u32, code);
    }
    select(zero, 0u32, select(nan, 0x7e00u32, word))
}

/// As [`absmax`].
#[cube]
fn nvfp4(
    y: &Array<f32>,
    codes: &mut Array<u32>,
    shared: &mut SharedMemory<u32>,
    zero: u32,
    #[comptime] targets: usize,
    #[comptime] planes: bool,
) -> u32 {
    let top = largest(y, shared, 2u32, planes);
    let second = UNIT_POS % 2 == 1;
    let mut best = 0u32;
    let mut best_error = 0.0f32;
    let mut candidate = Array::<u32>::new(HELD);
    let mut squares = Array::<f32>::new(HELD);
    #[unroll]
    for t in 0..targets {
        let raw = f32::reinterpret(top) * comptime!(1.0f32 / NVFP4_TARGETS[t]);
        let word = encode_e4m3(max(min(raw, 448.0f32), 1.0f32 / 512.0f32));
        let scale = e4m3(word);
        let factor = 1.0f32 / scale;
        let mut sum = 0.0f32;
        #[unroll]
        for i in 0..HELD {
            let code = encode_e2m1(y[i] * factor);
            // The product of six significant bits is exact.
            let difference = y[i] - e2m1(code) * scale;
            candidate[i] = code;
            squares[i] = opaque(difference * difference, zero);
            sum += squares[i];
        }
        // In index order: the second unit of the group goes on from the sum of the first.
        let mut error = f32::reinterpret(exchange(u32::reinterpret(sum), shared, 1u32, planes));
        #[unroll]
        for i in 0..HELD {
            error += squares[i];
        }
        let of_second = f32::reinterpret(exchange(u32::reinterpret(error), shared, 1u32, planes));
        error = select(second, error, of_second);
        if comptime!(t == 0) {
            best = word;
            best_error = error;
            #[unroll]
            for i in 0..HELD {
                codes[i] = candidate[i];
            }
        } else {
            let better = error < best_error;
            best = select(better, word, best);
            best_error = select(better, error, best_error);
            #[unroll]
            for i in 0..HELD {
                codes[i] = select(better, candidate[i], codes[i]);
            }
        }
    }
    let (none, nan) = (top == 0, top > INFINITY);
    #[unroll]
    for i in 0..HELD {
        codes[i] = select(none || nan, 0u32, codes[i]);
    }
    select(none, 0u32, select(nan, 0x7fu32, best))
}

/// `rows` `[batch, tokens, heads, 256]` into `cache` `[batch, heads, capacity, words]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn encode<X: Float>(
    rows: &Array<Vector<X, Const<4>>>,
    cache: &mut Array<u32>,
    count: usize,
    tokens: usize,
    heads: usize,
    capacity: usize,
    at: usize,
    zero: u32,
    #[comptime] coding: RowCoding,
    #[comptime] planes: bool,
    #[define(X)] _dtype: StorageType,
) {
    let lane = UNIT_POS % GROUP;
    let row = ABSOLUTE_POS / GROUP as usize;
    let live = row < count;
    let mut shared = SharedMemory::<u32>::new(comptime!(UNITS as usize));
    let mut y = load::<X>(rows, ABSOLUTE_POS, live);
    transform(&mut y, &mut shared, comptime!(coding.block), planes);
    let mut codes = Array::<u32>::new(HELD);
    #[unroll]
    for i in 0..HELD {
        codes[i] = 0u32;
    }
    let scale = match comptime!(coding.format) {
        RowFormat::Absmax { group, bits } => {
            absmax(&y, &mut codes, &mut shared, comptime!(group), comptime!(bits), planes)
        }
        RowFormat::Fp8 => fp8(&y, &mut codes, &mut shared, planes),
        RowFormat::Nvfp4 { targets } => nvfp4(&y, &mut codes, &mut shared, zero, comptime!(targets), planes),
    };
    // Neighbouring scales share a word, which the first unit of the first of them writes.
    let group = comptime!(coding.format.scales().0);
    let scale_bits = comptime!(coding.format.scales().1);
    let sharing = comptime!((group / HELD) as u32);
    let per_word = comptime!((32 / scale_bits).min((ROW / group) as u32));
    let mut scales = scale << ((lane / sharing) % per_word * scale_bits);
    #[unroll]
    for stage in 0..comptime!(per_word.ilog2()) {
        scales |= exchange(scales, &mut shared, comptime!(sharing << stage), planes);
    }
    if live {
        let head = row % heads;
        let token = (row / heads) % tokens;
        let batch = row / (heads * tokens);
        let place = ((batch * heads + head) * capacity + at + token) * comptime!(coding.format.words());
        let bits = comptime!(coding.format.code_bits());
        let words = comptime!(HELD * bits as usize / 32);
        #[unroll]
        for w in 0..words {
            let mut word = 0u32;
            #[unroll]
            for i in 0..comptime!(HELD / words) {
                word |= codes[w * comptime!(HELD / words) + i] << comptime!(bits * i as u32);
            }
            cache[place + lane as usize * words + w] = word;
        }
        let reach = comptime!(sharing * per_word);
        if lane % reach == 0 {
            cache[place + comptime!(coding.format.code_words()) + (lane / reach) as usize] = scales;
        }
    }
}

/// Scale `index` of the row whose words begin at `place`.
#[cube]
pub(crate) fn scale_of<W: Numeric>(words: &Array<W>, place: usize, index: usize, #[comptime] format: RowFormat) -> f32 {
    let bits = comptime!(format.scales().1);
    let per_word = comptime!((32 / bits) as usize);
    let word = u32::cast_from(words[place + comptime!(format.code_words()) + index / per_word]);
    let scale = (word >> ((index % per_word) as u32 * bits)) & comptime!((1u32 << bits) - 1);
    if comptime!(bits == 8) {
        e4m3(scale)
    } else {
        half_float(scale)
    }
}

/// Code `index` of `word` times the scale, rounded to `to`.
#[cube]
pub(crate) fn value_of(
    word: u32,
    index: u32,
    scale: f32,
    #[comptime] format: RowFormat,
    #[comptime] to: Precision,
) -> f32 {
    let bits = comptime!(format.code_bits());
    let code = (word >> (index * bits)) & comptime!((1u32 << bits) - 1);
    let number = match comptime!(format) {
        RowFormat::Absmax { .. } => {
            let sign = comptime!(1u32 << (bits - 1));
            f32::cast_from(code ^ sign) - f32::cast_from(sign)
        }
        RowFormat::Fp8 => e4m3(code),
        RowFormat::Nvfp4 { .. } => e2m1(code),
    };
    rounded::<Const<1>>(Vector::new(number * scale), to)[0]
}

/// `cache` `[rows / visible, capacity, words]` to `out` `[rows / visible, visible, 256]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn decode<O: Float>(
    cache: &Array<u32>,
    out: &mut Array<Vector<O, Const<4>>>,
    rows: usize,
    visible: usize,
    capacity: usize,
    #[comptime] format: RowFormat,
    #[comptime] to: Precision,
    #[define(O)] _dtype: StorageType,
) {
    let row = ABSOLUTE_POS / GROUP as usize;
    if row < rows {
        let lane = (UNIT_POS % GROUP) as usize;
        let place = (row / visible * capacity + row % visible) * comptime!(format.words());
        let scale = scale_of::<u32>(cache, place, lane / comptime!(format.scales().0 / HELD), format);
        let words = comptime!(HELD * format.code_bits() as usize / 32);
        #[unroll]
        for half in 0..2usize {
            let word = cache[place + lane * words + comptime!(half * words / 2)];
            let mut value = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll]
            for i in 0..4usize {
                let index = comptime!((if words == 1 { 4 * half + i } else { i }) as u32);
                value[i] = value_of(word, index, scale, format, to);
            }
            out[2 * ABSOLUTE_POS + half] = Vector::cast_from(value);
        }
    }
}

/// Codes `rows` `[batch, tokens, heads, 256]`, contiguous, into `cache` `[batch, heads, capacity, words]`, which no other
/// tensor may share, from row `at` on.
pub(crate) fn append<R: KernelRuntime>(
    cache: CubeTensor<R>,
    rows: CubeTensor<R>,
    at: usize,
    coding: RowCoding,
) -> CubeTensor<R> {
    let shape = rows.meta.shape().clone();
    let (tokens, heads, capacity) = (shape[1], shape[2], cache.meta.shape()[2]);
    assert!(
        shape[3] == ROW && cache.meta.shape()[3] == coding.format.words() && at + tokens <= capacity,
        "rows {shape:?} from {at} on and a cache {:?} of {coding:?}",
        cache.meta.shape()
    );
    let count = rows.meta.num_elements() / ROW;
    let dtype: DType = rows.dtype;
    let client = rows.client.clone();
    // SAFETY: rows beyond the count are neither read nor written; the cache has room for the others, as checked above.
    unsafe {
        encode::launch_unchecked::<R>(
            &client,
            cubes(&client, (count * GROUP as usize).div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[&rows, &cache]),
            rows.into_array_arg(),
            cache.clone().into_array_arg(),
            count,
            tokens,
            heads,
            capacity,
            at,
            0,
            coding,
            planes(&client),
            dtype.into(),
        );
    }
    cache
}

/// The first `visible` rows of `cache` `[batch, heads, capacity, words]` as decoded, `[batch, heads, visible, 256]`.
pub(crate) fn decoded<R: KernelRuntime>(
    cache: CubeTensor<R>,
    visible: usize,
    format: RowFormat,
    to: Precision,
) -> CubeTensor<R> {
    let cache = contiguous(cache);
    let shape = cache.meta.shape().clone();
    let (batch, heads, capacity) = (shape[0], shape[1], shape[2]);
    assert!(
        shape[3] == format.words() && visible <= capacity,
        "{visible} rows of a cache {shape:?} of {format:?}"
    );
    let out = empty(&cache, [batch, heads, visible, ROW], storage::<R>(to));
    let rows = batch * heads * visible;
    let client = cache.client.clone();
    // SAFETY: rows beyond the count do nothing; the others lie in the cache, as checked above.
    unsafe {
        decode::launch_unchecked::<R>(
            &client,
            cubes(&client, (rows * GROUP as usize).div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[&cache, &out]),
            cache.clone().into_array_arg(),
            out.clone().into_array_arg(),
            rows,
            visible,
            capacity,
            format,
            left_to_round(to, out.dtype),
            out.dtype.into(),
        );
    }
    out
}
