//! One unit per vector of columns; codes and scales are cut out of 32-bit words.

use burn::tensor::DType;
use cubecl::prelude::*;

use super::{ExpandError, Packing, Planes, validate};
use crate::cube::{CubeTensor, KernelRuntime, UNITS, address_type, cubes, empty, vector_size};

/// Byte `at` of `words`.
#[cube]
fn byte(words: &Array<u32>, at: usize) -> u32 {
    (words[at / 4] >> (8 * (at % 4) as u32)) & 0xff
}

/// The 16 bits at the even byte `at`.
#[cube]
fn half_word(words: &Array<u32>, at: usize) -> u32 {
    (words[at / 4] >> (8 * (at % 4) as u32)) & 0xffff
}

/// E2M1 in the low four bits: 0, 0.5, then `(1 + m / 2) 2^(e - 1)`.
#[cube]
fn e2m1(code: u32) -> f32 {
    let (e, m) = ((code >> 1) & 3, code & 1);
    let normal = f32::reinterpret(((e + 126) << 23) | (m << 22));
    let size = select(e == 0, 0.5f32 * f32::cast_from(m), normal);
    select(code & 8 != 0, -size, size)
}

/// E4M3: `m / 512`, then `(1 + m / 8) 2^(e - 7)`.
#[cube]
fn e4m3(code: u32) -> f32 {
    let (e, m) = ((code >> 3) & 15, code & 7);
    let normal = f32::reinterpret(((e + 120) << 23) | (m << 20));
    let size = select(e == 0, f32::cast_from(m) / 512.0f32, normal);
    select(code & 0x80 != 0, -size, size)
}

/// IEEE half of a scale, finite: `m / 2^24`, then `(1 + m / 1024) 2^(e - 15)`.
#[cube]
fn half_float(bits: u32) -> f32 {
    let (e, m) = ((bits >> 10) & 31, bits & 1023);
    let normal = f32::reinterpret(((e + 112) << 23) | (m << 13));
    let size = select(e == 0, f32::cast_from(m) / 16_777_216.0f32, normal);
    select(bits & 0x8000 != 0, -size, size)
}

/// The value at row `n`, column `k`.
#[cube]
fn value(
    words: &Array<u32>,
    n: usize,
    k: usize,
    #[comptime] packing: Packing,
    #[comptime] planes: Planes,
    #[comptime] columns: usize,
) -> f32 {
    match comptime!(packing) {
        Packing::Grouped { bits } => {
            let group = n * planes.groups + k / planes.group;
            let lane = k % planes.group;
            let mut code = byte(
                words,
                group * 32 + lane / comptime!(if bits == 8 { 1usize } else { 2usize }),
            );
            if comptime!(bits != 8) {
                code = (code >> (4 * (lane % 2) as u32)) & 15;
            }
            if comptime!(bits == 5) {
                code |= ((byte(words, planes.high + group * 8 + lane / 8) >> (lane % 8) as u32) & 1) << 4;
            }
            if comptime!(bits == 6) {
                code |= ((byte(words, planes.high + group * 16 + lane / 4) >> (2 * (lane % 4) as u32)) & 3) << 4;
            }
            let sign = comptime!(1u32 << (bits - 1));
            let signed = f32::cast_from(code ^ sign) - f32::cast_from(sign);
            half_float(half_word(words, planes.scales + 2 * group)) * signed
        }
        Packing::Nvfp4 => {
            let at = n * columns + k;
            let code = (byte(words, at / 2) >> (4 * (at % 2) as u32)) & 15;
            let g = k / planes.group;
            let tile = (n / 128) * comptime!(planes.groups / 4) + g / 4;
            let place = tile * 512 + (n % 32) * 16 + (n % 128 / 32) * 4 + g % 4;
            let scale = e4m3(byte(words, planes.scales + place));
            e2m1(code) * scale / f32::reinterpret(words[comptime!(planes.matrix_scale / 4)])
        }
        Packing::Fp8Row => {
            let scale = f32::reinterpret(half_word(words, planes.scales + 2 * n) << 16);
            e4m3(byte(words, n * columns + k)) * scale
        }
        Packing::Fp8Tile => {
            let tile = n / 128 * planes.groups + k / 128;
            let scale = f32::reinterpret(words[comptime!(planes.scales / 4) + tile]);
            e4m3(byte(words, n * columns + k)) * scale
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn expand<O: Float, N: Size>(
    words: &Array<u32>,
    out: &mut Array<Vector<O, N>>,
    vectors: usize,
    per_row: usize,
    #[comptime] packing: Packing,
    #[comptime] planes: Planes,
    #[comptime] columns: usize,
    #[define(O)] _dtype: StorageType,
) {
    if ABSOLUTE_POS < vectors {
        let n = ABSOLUTE_POS / per_row;
        let k = (ABSOLUTE_POS % per_row) * N::value();
        let mut result = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for i in 0..N::value() {
            result[i] = value(words, n, k + i, packing, planes, columns);
        }
        out[ABSOLUTE_POS] = Vector::cast_from(result);
    }
}

/// Values `[rows, columns]` of type `dtype` from `packed`, `u32` words of the matrix's `bytes`, the last one filled up.
///
/// # Errors
/// When `bytes` is not the length of such a matrix.
pub(crate) fn launch<R: KernelRuntime>(
    packed: &CubeTensor<R>,
    bytes: usize,
    packing: Packing,
    rows: usize,
    columns: usize,
    dtype: DType,
) -> Result<CubeTensor<R>, ExpandError> {
    let planes = validate(packing, rows, columns, bytes)?;
    assert!(
        4 * packed.meta.num_elements() >= bytes,
        "packed words shorter than their {bytes} bytes"
    );
    let out = empty(packed, [rows, columns], dtype);
    let size = vector_size(packed, columns, &[dtype]);
    let vectors = rows * columns / size;
    let client = packed.client.clone();
    // SAFETY: positions beyond the matrix do nothing; the planes' offsets were checked against the length.
    unsafe {
        expand::launch_unchecked::<R>(
            &client,
            cubes(&client, vectors.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[packed, &out]),
            size,
            packed.clone().into_array_arg(),
            out.clone().into_array_arg(),
            vectors,
            columns / size,
            packing,
            planes,
            columns,
            dtype.into(),
        );
    }
    Ok(out)
}
