//! Splits a range of elements of a matrix into pieces of rows and works on them in parallel when it is large.

use super::FormatError;
use rayon::prelude::*;

/// Elements below which one thread is faster than handing out work (about 30 us of decoding).
const PARALLEL_MIN: usize = 1 << 16;

/// Elements one task takes at least.
const TASK_MIN: usize = 1 << 13;

/// Calls `piece(row, column, out)` for each row part of the elements `[begin, begin + out.len())` of a matrix with
/// `columns` columns; `out` receives the elements from `(row, column)` on and never crosses a row.
pub(super) fn for_each_row<F>(columns: usize, begin: usize, out: &mut [f32], piece: F) -> Result<(), FormatError>
where
    F: Fn(usize, usize, &mut [f32]) -> Result<(), FormatError> + Sync,
{
    let (mut row, column) = (begin / columns, begin % columns);
    let mut rest = out;
    if column != 0 {
        let first;
        (first, rest) = rest.split_at_mut(rest.len().min(columns - column));
        piece(row, column, first)?;
        row += 1;
    }
    if rest.len() < PARALLEL_MIN {
        return rest
            .chunks_mut(columns)
            .enumerate()
            .try_for_each(|(at, out)| piece(row + at, 0, out));
    }
    rest.par_chunks_mut(columns)
        .enumerate()
        .with_min_len(TASK_MIN.div_ceil(columns))
        .try_for_each(|(at, out)| piece(row + at, 0, out))
}

/// The first NaN or infinity of `values`, as an error with its element index counted from `first`.
pub(super) fn require_finite(values: &[f32], first: u64) -> Result<(), FormatError> {
    // Summing what is left of the exponent test lets the common case run without a branch per value.
    if values.iter().fold(true, |finite, value| finite & value.is_finite()) {
        return Ok(());
    }
    let at = values.iter().position(|value| !value.is_finite()).unwrap_or(0);
    Err(FormatError::NonFinite {
        index: first + at as u64,
        value: values[at],
    })
}

/// Largest magnitude of `values`, 0 for none.
pub(super) fn max_magnitude(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max: f32, value| max.max(value.abs()))
}
