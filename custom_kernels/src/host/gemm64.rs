//! `y = x W^T` with f64 sums, each over `k` in ascending order. A product of two float32 values is exact in f64, so that
//! the bits are the same with and without fused multiply-add, and whatever the number of rows or threads.

use rayon::prelude::*;

use super::gemm::{COLUMNS, Panels, ROWS};
use super::simd::{AVX512, BASE, per_instruction_set};

/// Rows of `x` per task.
const BLOCK: usize = 8 * ROWS;

/// `x` `[m, k]` times `weight` `[n, k]`; returns `[m, n]`.
pub fn product(x: &[f32], weight: &Panels) -> Vec<f64> {
    let [n, k] = weight.shape();
    let mut y = vec![0.0; x.len() / k * n];
    y.par_chunks_mut(BLOCK * n)
        .zip(x.par_chunks(BLOCK * k))
        .for_each(|(y, x)| block(x, weight, y));
    y
}

per_instruction_set! {
    fn block(x: &[f32], weight: &Panels, y: &mut [f64]) = block_body;
}

#[inline(always)]
fn block_body<const LEVEL: u8>(x: &[f32], weight: &Panels, y: &mut [f64]) {
    let [n, k] = weight.shape();
    let rows = x.len() / k;
    // Tiles [k][ROWS]; rows beyond the last stay zero.
    let mut tiles = vec![0.0f64; rows.div_ceil(ROWS) * ROWS * k];
    for (row, source) in x.chunks_exact(k).enumerate() {
        let tile = &mut tiles[row / ROWS * ROWS * k..];
        for (target, &value) in tile[row % ROWS..].iter_mut().step_by(ROWS).zip(source) {
            *target = value.into();
        }
    }
    for column in (0..n).step_by(COLUMNS) {
        let panel = weight.panel(column / COLUMNS);
        let width = COLUMNS.min(n - column);
        for (index, a) in tiles.chunks_exact(ROWS * k).enumerate() {
            let mut sums = [[0.0; COLUMNS]; ROWS];
            if LEVEL == AVX512 {
                tile::<LEVEL, 16>(a, panel, &mut sums);
            } else {
                tile::<LEVEL, 8>(a, panel, &mut sums);
            }
            for (row, sums) in (index * ROWS..rows).zip(&sums) {
                y[row * n + column..][..width].copy_from_slice(&sums[..width]);
            }
        }
    }
}

/// `sums[r][c] = sum_p a[p][r] * b[p][c]`, `WIDTH` columns at a time so that their sums fit the registers.
#[inline(always)]
fn tile<const LEVEL: u8, const WIDTH: usize>(a: &[f64], b: &[f32], sums: &mut [[f64; COLUMNS]; ROWS]) {
    for column in (0..COLUMNS).step_by(WIDTH) {
        let mut part = [[0.0f64; WIDTH]; ROWS];
        for (a, b) in a.as_chunks::<ROWS>().0.iter().zip(b.as_chunks::<COLUMNS>().0) {
            let b: [f64; WIDTH] = std::array::from_fn(|c| f64::from(b[column + c]));
            for r in 0..ROWS {
                for c in 0..WIDTH {
                    part[r][c] = multiply_add::<LEVEL>(a[r], b[c], part[r][c]);
                }
            }
        }
        for (sums, part) in sums.iter_mut().zip(&part) {
            sums[column..][..WIDTH].copy_from_slice(part);
        }
    }
}

/// `a * b + c`, fused where the level has it.
#[inline(always)]
fn multiply_add<const LEVEL: u8>(a: f64, b: f64, c: f64) -> f64 {
    if LEVEL == BASE { a * b + c } else { a.mul_add(b, c) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_equals_the_plain_loop_bit_for_bit() {
        for (m, n, k) in [(1, 1, 1), (5, 31, 3), (6, 32, 64), (49, 70, 130), (97, 33, 257)] {
            let value = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 1009.0 - 0.4;
            let x: Vec<f32> = (0..m * k).map(value).collect();
            let w: Vec<f32> = (0..n * k).map(|i| value(i + 77)).collect();
            let y = product(&x, &Panels::pack(&w, [n, k]));
            for (i, y) in y.iter().enumerate() {
                let pairs = x[i / n * k..][..k].iter().zip(&w[i % n * k..][..k]);
                let want = pairs.fold(0.0, |sum, (&x, &w)| sum + f64::from(x) * f64::from(w));
                assert_eq!(*y, want, "{i} of {m} x {n} x {k}");
            }
        }
    }
}
