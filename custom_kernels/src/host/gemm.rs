//! `y += x W^T` in float32, each element a sum over `k` in ascending order: [`DEPTH`] products fused one by one from zero,
//! then added to `y`, then the next [`DEPTH`]. The order depends on `k` alone, so that neither the number of rows, nor
//! their place in a block, nor the thread count can change a bit.
//!
//! `W` is stored in panels of [`COLUMNS`] rows, `[k][COLUMNS]`; `x` is repacked per block into tiles of [`ROWS`] rows,
//! `[k][ROWS]`; [`tile`] keeps `ROWS x COLUMNS` sums in registers.

use std::sync::Arc;

use rayon::prelude::*;

use super::math::round_all;
use super::simd::{AVX2, AVX512, multiply_add, per_instruction_set};
use crate::precision::Precision;

/// Rows of `x` per register tile: with two 512-bit columns 12 sums, enough to hide the latency of a fused multiply-add.
pub const ROWS: usize = 6;
/// Rows of `W` per panel: two 512-bit vectors.
pub const COLUMNS: usize = 32;
/// Products per partial sum: one panel of this depth, 64 KB, and its tiles stay in the second-level cache.
const DEPTH: usize = 512;
/// Rows of `x` per task: sixteen tiles, 192 KB at full depth.
pub(crate) const BLOCK: usize = 16 * ROWS;

/// The sums of one register tile.
pub(crate) type Tile = [[f32; COLUMNS]; ROWS];

/// A matrix `[n, k]`, its rows in panels of [`COLUMNS`], the last one padded with zeros.
#[derive(Clone)]
pub struct Panels {
    values: Arc<[f32]>,
    shape: [usize; 2],
}

impl std::fmt::Debug for Panels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Panels")
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

impl Panels {
    /// Packs `values` `[n, k]`, C order.
    pub fn pack(values: &[f32], shape: [usize; 2]) -> Self {
        let [n, k] = shape;
        let mut panels = vec![0.0; n.div_ceil(COLUMNS) * COLUMNS * k];
        for (row, source) in values.chunks_exact(k.max(1)).enumerate() {
            let panel = &mut panels[row / COLUMNS * COLUMNS * k..];
            for (target, &value) in panel[row % COLUMNS..].iter_mut().step_by(COLUMNS).zip(source) {
                *target = value;
            }
        }
        Self {
            values: panels.into(),
            shape,
        }
    }

    /// `[n, k]`.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// The values in C order.
    pub fn unpack(&self) -> Vec<f32> {
        (0..self.shape[0]).flat_map(|row| self.row(row)).collect()
    }

    /// Row `row`, `k` values.
    pub fn row(&self, row: usize) -> impl Iterator<Item = f32> + '_ {
        let k = self.shape[1];
        self.values[row / COLUMNS * COLUMNS * k + row % COLUMNS..]
            .iter()
            .step_by(COLUMNS)
            .take(k)
            .copied()
    }

    pub(crate) fn panel(&self, index: usize) -> &[f32] {
        let size = COLUMNS * self.shape[1];
        &self.values[index * size..][..size]
    }
}

/// `y[m, n] += x[m, k] W^T`, then rounds `y`.
pub fn accumulate(x: &[f32], weight: &Panels, y: &mut [f32], to: Precision) {
    let [n, k] = weight.shape;
    y.par_chunks_mut(BLOCK * n)
        .zip(x.par_chunks(BLOCK * k))
        .for_each(|(y, x)| {
            accumulate_block(x, weight, y, 0, n);
            round_block(y, to);
        });
}

per_instruction_set! {
    /// Rows of one task, at most [`BLOCK`]: `y[m, columns] += x[m, k] W[first..first + columns]^T`;
    /// `first` is a multiple of [`COLUMNS`].
    pub(crate) fn accumulate_block(x: &[f32], weight: &Panels, y: &mut [f32], first: usize, columns: usize)
        = accumulate_block_body;
}

#[inline(always)]
fn accumulate_block_body<const LEVEL: u8>(x: &[f32], weight: &Panels, y: &mut [f32], first: usize, columns: usize) {
    let k = weight.shape[1];
    let rows = x.len() / k.max(1);
    let mut packed = vec![0.0; rows.div_ceil(ROWS) * ROWS * k.min(DEPTH)];
    for start in (0..k).step_by(DEPTH) {
        let depth = DEPTH.min(k - start);
        let tiles = &mut packed[..rows.div_ceil(ROWS) * ROWS * depth];
        pack_rows(x, k, start, depth, tiles);
        for (index, column) in (0..columns).step_by(COLUMNS).enumerate() {
            let panel = &weight.panel(first / COLUMNS + index)[start * COLUMNS..][..depth * COLUMNS];
            let width = COLUMNS.min(columns - column);
            for (tile_index, a) in tiles.chunks_exact(depth * ROWS).enumerate() {
                let mut sums = [[0.0; COLUMNS]; ROWS];
                tile::<LEVEL>(a, panel, COLUMNS, &mut sums);
                let first_row = tile_index * ROWS;
                for (row, sums) in (first_row..rows).zip(&sums) {
                    for (y, sum) in y[row * columns + column..][..width].iter_mut().zip(sums) {
                        *y += sum;
                    }
                }
            }
        }
    }
}

/// Columns `start..start + depth` of `x` `[rows, k]` as tiles `[depth][ROWS]`; missing rows keep what the tile held, which
/// no result reads.
#[inline(always)]
fn pack_rows(x: &[f32], k: usize, start: usize, depth: usize, tiles: &mut [f32]) {
    for (row, source) in x.chunks_exact(k).enumerate() {
        let tile = &mut tiles[row / ROWS * ROWS * depth..];
        for (target, &value) in tile[row % ROWS..]
            .iter_mut()
            .step_by(ROWS)
            .zip(&source[start..start + depth])
        {
            *target = value;
        }
    }
}

per_instruction_set! {
    /// [`tile`] as a function of its own: inlined into a large loop its sums leave the registers.
    pub(crate) fn multiply_tile(a: &[f32], b: &[f32], stride: usize, sums: &mut Tile) = tile;
}

/// `sums[r][c] += a[p][r] * b[p][c]` for every `p` in order; `a` is `[depth][ROWS]`, row `p` of `b` starts at
/// `p * stride`.
#[inline(always)]
pub(crate) fn tile<const LEVEL: u8>(a: &[f32], b: &[f32], stride: usize, sums: &mut Tile) {
    match LEVEL {
        AVX512 => part::<LEVEL, COLUMNS>(a, b, stride, sums),
        AVX2 => part::<LEVEL, 16>(a, b, stride, sums),
        _ => part::<LEVEL, 8>(a, b, stride, sums),
    }
}

/// The same, `WIDTH` columns at a time so that their sums fit the registers.
#[inline(always)]
fn part<const LEVEL: u8, const WIDTH: usize>(a: &[f32], b: &[f32], stride: usize, sums: &mut Tile) {
    for column in (0..COLUMNS).step_by(WIDTH) {
        let mut part = [[0.0f32; WIDTH]; ROWS];
        for r in 0..ROWS {
            part[r].copy_from_slice(&sums[r][column..column + WIDTH]);
        }
        for (a, b) in a.as_chunks::<ROWS>().0.iter().zip(b[column..].chunks(stride)) {
            let b: &[f32; WIDTH] = b.first_chunk().expect("a row of b is COLUMNS wide");
            for (a, part) in a.iter().zip(&mut part) {
                for (b, part) in b.iter().zip(part) {
                    *part = multiply_add::<LEVEL>(*a, *b, *part);
                }
            }
        }
        for r in 0..ROWS {
            sums[r][column..column + WIDTH].copy_from_slice(&part[r]);
        }
    }
}

per_instruction_set! {
    /// Rounds a block in place.
    pub(crate) fn round_block(values: &mut [f32], to: Precision) = round_block_body;
}

#[inline(always)]
fn round_block_body<const LEVEL: u8>(values: &mut [f32], to: Precision) {
    round_all(values, to);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small integers: every order of summation is exact.
    fn integers(count: usize, modulus: usize) -> Vec<f32> {
        (0..count)
            .map(|i| ((i * 7 + i / 5) % modulus) as f32 - (modulus / 2) as f32)
            .collect()
    }

    #[test]
    fn every_size_equals_the_plain_triple_loop() {
        for (m, n, k) in [
            (1, 1, 1),
            (5, 31, 3),
            (6, 32, 64),
            (7, 33, 65),
            (97, 64, 513),
            (129, 40, 127),
        ] {
            let (x, w) = (integers(m * k, 11), integers(n * k, 13));
            let mut y = vec![1.0; m * n];
            accumulate(&x, &Panels::pack(&w, [n, k]), &mut y, Precision::Full);
            for i in 0..m {
                for j in 0..n {
                    let want: f32 = 1.0 + (0..k).map(|p| x[i * k + p] * w[j * k + p]).sum::<f32>();
                    assert_eq!(y[i * n + j], want, "[{i}, {j}] of {m} x {n} x {k}");
                }
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_neighbours() {
        let (n, k) = (70, 600);
        let x: Vec<f32> = (0..100 * k)
            .map(|i| ((i * 2_654_435_761) % 1009) as f32 / 1009.0 - 0.4)
            .collect();
        let w = Panels::pack(&x[..n * k], [n, k]);
        let mut all = vec![0.0; 100 * n];
        accumulate(&x, &w, &mut all, Precision::Full);
        for row in [0, 5, 6, 95, 96, 99] {
            let mut alone = vec![0.0; n];
            accumulate(&x[row * k..][..k], &w, &mut alone, Precision::Full);
            assert_eq!(alone, all[row * n..][..n], "row {row}");
        }
    }

    #[test]
    fn packing_is_undone_by_unpacking() {
        let values = integers(33 * 5, 17);
        let panels = Panels::pack(&values, [33, 5]);
        assert_eq!(panels.unpack(), values);
        assert_eq!(panels.row(32).collect::<Vec<_>>(), values[32 * 5..]);
    }
}
