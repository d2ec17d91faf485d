//! One unit per vector of columns; codes and scales are cut out of 32-bit words.

use burn::tensor::DType;
use cubecl::prelude::*;

use super::{ExpandError, Packing, Planes, validate};
use crate::cube::{CubeTensor, KernelRuntime, UNITS, address_type, cubes, empty, vector_size};

/// The bits of a float32 that is no number.
pub(crate) const NAN: u32 = 0x7fc0_0000;

/// `words` from byte `at` on, as far as its word reaches.
#[cube]
fn bytes_from(words: &Array<u32>, at: usize) -> u32 {
    words[at / 4] >> (8 * (at % 4) as u32)
}

/// E2M1 in the low four bits: 0, 0.5, then `(1 + m / 2) 2^(e - 1)`.
#[cube]
pub(crate) fn e2m1(code: u32) -> f32 {
    let (e, m) = ((code >> 1) & 3, code & 1);
    let normal = f32::reinterpret(((e + 126) << 23) | (m << 22));
    let size = select(e == 0, 0.5f32 * f32::cast_from(m), normal);
    select(code & 8 != 0, -size, size)
}

/// E4M3: `m / 512`, then `(1 + m / 8) 2^(e - 7)`; NaN where all of both are ones.
#[cube]
pub(crate) fn e4m3(code: u32) -> f32 {
    let (e, m) = ((code >> 3) & 15, code & 7);
    let normal = f32::reinterpret(select(
        e == 15 && m == 7,
        u32::cast_from(NAN),
        ((e + 120) << 23) | (m << 20),
    ));
    let size = select(e == 0, f32::cast_from(m) / 512.0f32, normal);
    select(code & 0x80 != 0, -size, size)
}

/// IEEE half: `m / 2^24`, then `(1 + m / 1024) 2^(e - 15)`, infinity, NaN.
#[cube]
pub(crate) fn half_float(bits: u32) -> f32 {
    let (e, m) = ((bits >> 10) & 31, bits & 1023);
    let normal = f32::reinterpret(select(e == 31, 255u32 << 23, (e + 112) << 23) | (m << 13));
    let size = select(e == 0, f32::cast_from(m) / 16_777_216.0f32, normal);
    select(bits & 0x8000 != 0, -size, size)
}

/// The float32 scale of a tile, or the bfloat16 scale of a row.
#[cube]
fn fp8_scale(words: &Array<u32>, n: usize, k: usize, planes: &KernelPlanes, #[comptime] packing: Packing) -> f32 {
    match comptime!(packing) {
        Packing::Fp8Tile => f32::reinterpret(words[planes.scales / 4 + n / 128 * planes.groups + k / 128]),
        _ => f32::reinterpret(bytes_from(words, planes.scales + 2 * n) << 16),
    }
}

/// Values at row `n`, columns `k..k + N`; `N` divides both the columns and the reach of a scale.
#[cube]
fn values<N: Size>(
    words: &Array<u32>,
    n: usize,
    k: usize,
    columns: usize,
    planes: &KernelPlanes,
    #[comptime] packing: Packing,
) -> Vector<f32, N> {
    let size = N::value().comptime();
    let mut result = Vector::<f32, N>::new(0.0f32);
    match comptime!(packing) {
        Packing::Grouped { bits } => {
            let width = comptime!(if bits == 8 { 32usize } else { 64usize });
            let group = n * planes.groups + k / width;
            let lane = k % width;
            let scale = half_float(bytes_from(words, planes.scales + 2 * group) & 0xffff);
            let sign = comptime!(1u32 << (bits - 1));
            let first = group * 32 + lane / comptime!(if bits == 8 { 1usize } else { 2usize });
            let mut word = bytes_from(words, first);
            let mut high = 0u32;
            if comptime!(bits == 5) {
                high = bytes_from(words, planes.high + group * 8 + lane / 8) >> (lane % 8) as u32;
            }
            if comptime!(bits == 6) {
                high = bytes_from(words, planes.high + group * 16 + lane / 4) >> (2 * (lane % 4)) as u32;
            }
            if comptime!(bits != 8) {
                word = word >> (4 * (lane % 2)) as u32;
            }
            #[unroll]
            for i in 0..size {
                if comptime!(bits == 8 && i > 0 && i % 4 == 0) {
                    word = bytes_from(words, first + i);
                }
                let shift = comptime!(if bits == 8 { 8 * (i % 4) as u32 } else { 4 * i as u32 });
                let mut code = (word >> shift) & comptime!(if bits == 8 { 0xffu32 } else { 15u32 });
                if comptime!(bits == 5) {
                    code |= ((high >> comptime!(i as u32)) & 1) << 4;
                }
                if comptime!(bits == 6) {
                    code |= ((high >> comptime!(2 * i as u32)) & 3) << 4;
                }
                result[i] = scale * (f32::cast_from(code ^ sign) - f32::cast_from(sign));
            }
        }
        Packing::Nvfp4 { .. } => {
            let g = k / 16;
            let tile = (n / 128) * (planes.groups / 4) + g / 4;
            let place = tile * 512 + (n % 32) * 16 + (n % 128 / 32) * 4 + g % 4;
            let scale = e4m3(bytes_from(words, planes.scales + place) & 0xff);
            let divisor = f32::reinterpret(words[planes.divisors / 4 + n / planes.divisor_rows]);
            let at = n * columns + k;
            let word = bytes_from(words, at / 2) >> (4 * (at % 2)) as u32;
            #[unroll]
            for i in 0..size {
                result[i] = e2m1((word >> comptime!(4 * i as u32)) & 15) * scale / divisor;
            }
        }
        Packing::Fp8Row | Packing::Fp8Tile => {
            let scale = fp8_scale(words, n, k, planes, packing);
            let first = n * columns + k;
            let mut word = bytes_from(words, first);
            #[unroll]
            for i in 0..size {
                if comptime!(i > 0 && i % 4 == 0) {
                    word = bytes_from(words, first + i);
                }
                result[i] = e4m3((word >> comptime!(8 * (i % 4) as u32)) & 0xff) * scale;
            }
        }
        Packing::Bf16 => {
            let first = 2 * (n * columns + k);
            #[unroll]
            for i in 0..size {
                result[i] = f32::reinterpret(bytes_from(words, first + 2 * i) << 16);
            }
        }
    }
    result
}

/// [`Planes`] as the kernel reads them: numbers, so that one kernel serves every shape.
#[derive(CubeType, CubeLaunch)]
struct KernelPlanes {
    groups: usize,
    high: usize,
    scales: usize,
    divisors: usize,
    divisor_rows: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn expand<O: Float, N: Size>(
    words: &Array<u32>,
    rows: &Array<u32>,
    out: &mut Array<Vector<O, N>>,
    vectors: usize,
    columns: usize,
    planes: &KernelPlanes,
    #[comptime] packing: Packing,
    #[comptime] gather: bool,
    #[define(O)] _dtype: StorageType,
) {
    if ABSOLUTE_POS < vectors {
        let per_row = columns / N::value();
        let mut n = ABSOLUTE_POS / per_row;
        let k = (ABSOLUTE_POS % per_row) * N::value();
        if comptime!(gather) {
            n = rows[n] as usize;
        }
        out[ABSOLUTE_POS] = Vector::cast_from(values::<N>(words, n, k, columns, planes, packing));
    }
}

/// A matrix in packed form on the device.
#[derive(Debug, Clone)]
pub(crate) struct Packed<R: KernelRuntime> {
    /// The bytes as `u32` words, the last one filled up.
    pub(crate) words: CubeTensor<R>,
    packing: Packing,
    planes: Planes,
    /// `[rows, columns]`.
    pub(crate) shape: [usize; 2],
}

impl<R: KernelRuntime> Packed<R> {
    /// `words` hold a matrix of this packing and shape.
    ///
    /// # Errors
    /// When there is no such matrix or the words are fewer than it has.
    pub(crate) fn new(words: CubeTensor<R>, packing: Packing, shape: [usize; 2]) -> Result<Self, ExpandError> {
        let planes = packing.planes(shape[0], shape[1])?;
        validate(
            packing,
            shape[0],
            shape[1],
            planes.bytes.min(4 * words.meta.num_elements()),
        )?;
        // Which divisor belongs to a row is a number of the planes: one kernel for any count.
        let packing = packing.kind();
        Ok(Self {
            words,
            packing,
            planes,
            shape,
        })
    }

    /// All values, `[rows, columns]` of type `dtype`.
    pub(crate) fn values(&self, dtype: DType) -> CubeTensor<R> {
        self.expand(None, dtype)
    }

    /// Rows `ids` only, `[ids.len(), columns]` of type `dtype`.
    ///
    /// # Panics
    /// When an id is not a row: the kernel reads unchecked.
    pub(crate) fn rows(&self, ids: &[u32], dtype: DType) -> CubeTensor<R> {
        let rows = self.shape[0];
        assert!(
            ids.iter().all(|&id| (id as usize) < rows),
            "row beyond the {rows} rows of the matrix"
        );
        self.expand(Some(ids), dtype)
    }

    fn expand(&self, ids: Option<&[u32]>, dtype: DType) -> CubeTensor<R> {
        let (words, [rows, columns]) = (&self.words, self.shape);
        let rows = ids.map_or(rows, <[u32]>::len);
        let out = empty(words, [rows, columns], dtype);
        let size = vector_size(words, columns, &[dtype]);
        let vectors = rows * columns / size;
        let client = words.client.clone();
        let ids_arg = match ids {
            Some(ids) => {
                let handle = client.create_from_slice(bytemuck::cast_slice(ids));
                // SAFETY: just made of that many ids.
                unsafe { ArrayArg::from_raw_parts(handle, ids.len()) }
            }
            // Not read.
            None => words.clone().into_array_arg(),
        };
        let planes = &self.planes;
        // SAFETY: positions beyond the matrix do nothing; the planes lie within the words and the ids within the rows.
        unsafe {
            expand::launch_unchecked::<R>(
                &client,
                cubes(&client, vectors.div_ceil(UNITS as usize)),
                CubeDim::new_1d(UNITS),
                address_type(&[words, &out]),
                size,
                words.clone().into_array_arg(),
                ids_arg,
                out.clone().into_array_arg(),
                vectors,
                columns,
                KernelPlanesLaunch::new(
                    planes.groups,
                    planes.high,
                    planes.scales,
                    planes.divisors,
                    planes.divisor_rows,
                ),
                self.packing,
                ids.is_some(),
                dtype.into(),
            );
        }
        out
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn find_non_numbers<X: Float, N: Size>(
    x: &Array<Vector<X, N>>,
    found: &mut Array<u32>,
    vectors: usize,
    units: usize,
    #[define(X)] _dtype: StorageType,
) {
    let mut i = ABSOLUTE_POS;
    let mut any = 0u32;
    while i < vectors {
        let value = Vector::<f32, N>::cast_from(x[i]);
        #[unroll]
        for lane in 0..N::value() {
            let exponent = u32::reinterpret(value[lane]) & 0x7f80_0000;
            any |= select(exponent == 0x7f80_0000, 1u32, 0u32);
        }
        i += units;
    }
    if any != 0 {
        // Whoever comes first or last writes the same word.
        found[0] = 1;
    }
}

/// Whether every element of `x`, contiguous, is a finite number. Waits for the device.
pub(crate) fn all_finite<R: KernelRuntime>(x: &CubeTensor<R>) -> bool {
    let client = x.client.clone();
    let found = client.create_from_slice(bytemuck::cast_slice(&[0u32]));
    let count = x.meta.num_elements();
    let size = vector_size(x, count, &[x.dtype]);
    let groups = (count / size).div_ceil(UNITS as usize).clamp(1, 4096);
    // SAFETY: units step through the vectors and write the one flag.
    unsafe {
        find_non_numbers::launch_unchecked::<R>(
            &client,
            cubes(&client, groups),
            CubeDim::new_1d(UNITS),
            address_type(&[x]),
            size,
            x.clone().into_array_arg(),
            ArrayArg::from_raw_parts(found.clone(), 1),
            count / size,
            groups * UNITS as usize,
            x.dtype.into(),
        );
    }
    let answer = client.read_one(found).expect("the device's memory can be read");
    answer[..4] == [0; 4]
}
