//! Products in f64: operands widened tile by tile, and what becomes of the result before it is rounded.

use burn::tensor::DType;

use super::{Card, THREADS, Weight, each, kind, launch, target};
use crate::cube::empty;
use crate::cuda::{CudaTensor, gemm};
use crate::evaluation::Steps;
use crate::precise::{OUTPUT_TILE, ROW_TILE, Rounding};
use crate::precision::Precision;

const PRODUCT: &str = text!("product.cu");

/// Rows `first..first + count` of `x`, `width` elements each, as f64 `[1, count, width]`.
pub(super) fn widen(x: &CudaTensor, first: usize, count: usize, width: usize) -> CudaTensor {
    let out = empty(x, [1, count, width], DType::F64);
    let info = [kind(x.dtype) as usize, first, width, count * width, 0, 1].map(|value| value as u64);
    // SAFETY: the rows are rows of `x`; the ids are not read.
    unsafe {
        launch(
            PRODUCT,
            "f64_widen",
            [(count * width).div_ceil(4 * THREADS), 1, 1],
            &[x, x, &out],
            &info,
        )
    };
    out
}

/// The rows of `x` that `choices`, divided by `per_row`, name, as f64 `[1, choices, width]`.
pub(super) fn gather(x: &CudaTensor, choices: &CudaTensor, per_row: usize, width: usize) -> CudaTensor {
    let count = choices.meta.num_elements();
    let out = empty(x, [1, count, width], DType::F64);
    let info = [kind(x.dtype) as usize, 0, width, count * width, 1, per_row].map(|value| value as u64);
    // SAFETY: choices are places in `[rows, per_row]`.
    unsafe {
        launch(
            PRODUCT,
            "f64_widen",
            [(count * width).div_ceil(4 * THREADS), 1, 1],
            &[x, choices, &out],
            &info,
        )
    };
    out
}

/// Rows `first..first + count` of a matrix in f64.
pub(super) fn matrix(weight: &Weight, first: usize, count: usize) -> CudaTensor {
    let (rows, first) = weight.rows(first, count);
    widen(&rows, first, count, weight.shape()[1])
}

pub(super) fn whole(weight: &Weight) -> CudaTensor {
    matrix(weight, 0, weight.shape()[0])
}

/// What becomes of a product, as the kernel text numbers it.
#[derive(Clone, Copy)]
pub(super) enum Finish<'a> {
    /// Rounded.
    Plain,
    /// Added to a residual of the shape of the result.
    Added(&'a CudaTensor),
    /// `SiLU(product) * other`.
    Gated(&'a CudaTensor),
    /// The same as a hidden row of an expert, the elements of `other` lying `offset` behind those of the product.
    Expert { other: &'a CudaTensor, offset: usize },
}

/// A tile `[rows, columns]` of products, rows `distance` apart, on its way to row `first_row` and column `first_column` of
/// `out` `[.., stride]`, rounded to `to`.
pub(super) struct Tile<'a> {
    pub(super) product: &'a CudaTensor,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) distance: usize,
    pub(super) first_row: usize,
    pub(super) first_column: usize,
    pub(super) stride: usize,
    pub(super) out: &'a CudaTensor,
    pub(super) to: Precision,
}

impl Tile<'_> {
    pub(super) fn finish(&self, finish: Finish<'_>, steps: Steps) {
        let (what, other, offset) = match finish {
            Finish::Plain => (0, self.product, 0),
            Finish::Added(residual) => (1, residual, 0),
            Finish::Gated(other) => (2, other, 0),
            Finish::Expert { other, offset } => (3, other, offset),
        };
        let info = [
            self.columns as u64,
            self.distance as u64,
            self.stride as u64,
            self.first_row as u64,
            self.first_column as u64,
            what,
            kind(other.dtype),
            offset as u64,
            each(steps),
            target(self.to),
            kind(self.out.dtype),
        ];
        let grid = [self.rows, self.columns.div_ceil(THREADS), 1];
        // SAFETY: the tile lies within product and result, which its makers sized for it.
        unsafe { launch(PRODUCT, "f64_finish", grid, &[self.product, other, self.out], &info) };
    }
}

/// Outputs per tile of a matrix of `outputs`: equal parts in whole 128s.
pub(super) fn output_tile(outputs: usize) -> usize {
    outputs.div_ceil(outputs.div_ceil(OUTPUT_TILE)).next_multiple_of(128)
}

impl Card {
    /// `x` `[batch, m, k]` times `weight` `[batch, n, k]`: `[batch, m, n]`, all f64.
    pub(super) fn product(&self, x: &CudaTensor, weight: &CudaTensor) -> CudaTensor {
        if self.library
            && let Some(y) = gemm::product_f64(x, weight)
        {
            return y;
        }
        let (batch, m, k) = (x.meta.shape()[0], x.meta.shape()[1], x.meta.shape()[2]);
        let n = weight.meta.shape()[1];
        let out = empty(x, [batch, m, n], DType::F64);
        let info = [m, n, k].map(|value| value as u64);
        // SAFETY: rows and columns beyond the matrices are taken for zeros and not written.
        unsafe {
            launch(
                PRODUCT,
                "f64_product",
                [m.div_ceil(16), n.div_ceil(16), batch],
                &[x, weight, &out],
                &info,
            )
        };
        out
    }

    /// `x` `[rows, in]` times `weight`, and `other` if there is one, tile by tile into `out` `[rows, out]`.
    pub(super) fn multiply(
        &self,
        x: &CudaTensor,
        weight: &Weight,
        other: Option<&Weight>,
        add: Option<&CudaTensor>,
        out: &CudaTensor,
        how: Rounding,
    ) {
        let [outputs, width] = weight.shape();
        let rows = x.meta.num_elements() / width;
        for first_row in (0..rows).step_by(ROW_TILE) {
            let count = ROW_TILE.min(rows - first_row);
            let x = widen(x, first_row, count, width);
            let step = output_tile(outputs);
            for first_column in (0..outputs).step_by(step) {
                let columns = step.min(outputs - first_column);
                let of = |weight: &Weight| self.product(&x, &matrix(weight, first_column, columns));
                let (own, other) = (of(weight), other.map(of));
                let tile = Tile {
                    product: &own,
                    rows: count,
                    columns,
                    distance: columns,
                    first_row,
                    first_column,
                    stride: outputs,
                    out,
                    to: how.to,
                };
                let finish = match (&other, add) {
                    (Some(other), _) => Finish::Gated(other),
                    (None, Some(residual)) => Finish::Added(residual),
                    (None, None) => Finish::Plain,
                };
                tile.finish(finish, how.steps);
            }
        }
    }
}
