//! One unit per vector of a gathered row.

use burn::tensor::DType;
use cubecl::prelude::*;

use crate::cube::{
    CubeTensor, KernelRuntime, UNITS, address_type, cubes, empty, left_to_round, rounded, storage, vector_size,
};
use crate::precision::Precision;

#[cube(launch_unchecked, address_type = "dynamic")]
fn gather<X: Float, O: Float, N: Size>(
    table: &Array<Vector<X, N>>,
    ids: &Array<u32>,
    out: &mut Array<Vector<O, N>>,
    count: usize,
    width: usize,
    #[comptime] to: Precision,
    #[define(X, O)] _dtypes: [StorageType; 2],
) {
    if ABSOLUTE_POS < count {
        let row = ids[ABSOLUTE_POS / width] as usize;
        let value = Vector::<f32, N>::cast_from(table[row * width + ABSOLUTE_POS % width]);
        out[ABSOLUTE_POS] = Vector::cast_from(rounded::<N>(value, to));
    }
}

/// Rows `ids` of `table` `[rows, width]`, contiguous, as `[batch, ids.len() / batch, width]`.
///
/// # Panics
/// When an id is not a row: the gather reads unchecked.
pub(crate) fn launch<R: KernelRuntime>(
    table: CubeTensor<R>,
    ids: &[u32],
    batch: usize,
    to: Precision,
) -> CubeTensor<R> {
    let (rows, width) = (table.meta.shape()[0], table.meta.shape()[1]);
    assert!(
        ids.iter().all(|&id| (id as usize) < rows),
        "token id beyond the {rows} rows of the table"
    );
    let out = empty(&table, [batch, ids.len() / batch, width], storage::<R>(to));
    let dtypes: [DType; 2] = [table.dtype, out.dtype];
    let size = vector_size(&table, width, &dtypes);
    let count = ids.len() * width / size;
    let client = table.client.clone();
    let ids_handle = client.create_from_slice(bytemuck::cast_slice(ids));
    // SAFETY: positions beyond the count do nothing and every id was checked above.
    unsafe {
        gather::launch_unchecked::<R>(
            &client,
            cubes(&client, count.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            address_type(&[&table, &out]),
            size,
            table.into_array_arg(),
            ArrayArg::from_raw_parts(ids_handle, ids.len()),
            out.clone().into_array_arg(),
            count,
            width / size,
            left_to_round(to, out.dtype),
            dtypes.map(Into::into),
        );
    }
    out
}
