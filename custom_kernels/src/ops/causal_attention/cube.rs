//! Portable online-softmax attention: one cube per query row and head.
//!
//! Keys go by in tiles of as many rows as the cube has units. Each unit scores one key of the tile; then, the tile's
//! maximum and sum being known, each unit adds the weighted values of its features. Running maximum `m`, sum `l` and
//! output are rescaled by `exp(m_old - m_new)` when a tile raises the maximum. Rows in codes are decoded where they are
//! read.

use burn::tensor::DType;
use cubecl::prelude::*;

use crate::cube::{CubeTensor, KernelRuntime, address_type, cubes, empty, left_to_round, rounded, storage};
use crate::ops::coded_rows::cube::{scale_of, value_of};
use crate::ops::coded_rows::{CodedSides, ROW, RowFormat};
use crate::precision::Precision;

/// Units of a cube and keys of a tile.
const TILE: u32 = 64;

/// Score of a key that is not visible: finite, as not every runtime can write an infinity.
const LOWEST: f32 = f32::MIN;

/// `query . key` for the key whose words begin at `place`, decoded to `precision`.
#[cube]
fn coded_score<C: Numeric>(
    query: &SharedMemory<f32>,
    keys: &Array<C>,
    place: usize,
    #[comptime] format: RowFormat,
    #[comptime] precision: Precision,
) -> f32 {
    let per_word = comptime!((32 / format.code_bits()) as usize);
    let words = comptime!(format.scales().0 / per_word);
    let mut dot = 0.0f32;
    for group in 0..comptime!(ROW / format.scales().0) {
        let scale = scale_of::<C>(keys, place, group, format);
        for w in 0..words {
            let word = u32::cast_from(keys[place + group * words + w]);
            let feature = (group * words + w) * per_word;
            #[unroll]
            for i in 0..per_word {
                dot += query[feature + i] * value_of(word, comptime!(i as u32), scale, format, precision);
            }
        }
    }
    dot
}

/// Value `feature` of the row whose words begin at `place`, decoded to `precision`.
#[cube]
fn coded_value<C: Numeric>(
    values: &Array<C>,
    place: usize,
    feature: usize,
    #[comptime] format: RowFormat,
    #[comptime] precision: Precision,
) -> f32 {
    let per_word = comptime!((32 / format.code_bits()) as usize);
    let scale = scale_of::<C>(values, place, feature / comptime!(format.scales().0), format);
    let word = u32::cast_from(values[place + feature / per_word]);
    value_of(word, (feature % per_word) as u32, scale, format, precision)
}

/// `C` is the type of the rows, of their words where they are `coded`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn attention<Q: Float, C: Numeric, O: Float>(
    q: &Array<Q>,
    keys: &Array<C>,
    values: &Array<C>,
    out: &mut Array<O>,
    rows: usize,
    tokens: usize,
    heads: usize,
    group: usize,
    capacity: usize,
    first_position: usize,
    scale: f32,
    #[comptime] head_dim: usize,
    #[comptime] tile: u32,
    #[comptime] coded: Option<CodedSides>,
    #[comptime] to: Precision,
    #[define(Q, C, O)] _dtypes: [StorageType; 3],
) {
    let unit = UNIT_POS as usize;
    let width = comptime!(tile as usize);
    let owned = comptime!(head_dim.div_ceil(tile as usize));
    let mut query = SharedMemory::<f32>::new(head_dim);
    let mut weights = SharedMemory::<f32>::new(width);
    let mut reduce = SharedMemory::<f32>::new(width);
    if CUBE_POS < rows {
        let head = CUBE_POS % heads;
        let token = (CUBE_POS / heads) % tokens;
        let batch = CUBE_POS / (heads * tokens);
        let cache = (batch * (heads / group) + head / group) * capacity;
        #[unroll]
        for i in 0..owned {
            let feature = i * width + unit;
            if feature < head_dim {
                query[feature] = f32::cast_from(q[CUBE_POS * head_dim + feature]);
            }
        }
        let mut output = Array::<f32>::new(owned);
        #[unroll]
        for i in 0..owned {
            output[i] = 0.0f32;
        }
        let lowest = f32::cast_from(LOWEST);
        let mut m = lowest;
        let mut l = 0.0f32;
        let visible = first_position + token + 1;
        let tiles = visible.div_ceil(width);
        sync_cube();
        for t in 0..tiles {
            let key = t * width + unit;
            let mut score = lowest;
            if key < visible {
                let dot = match comptime!(coded) {
                    Some(sides) => {
                        let place = (cache + key) * comptime!(sides.keys.words());
                        coded_score::<C>(&query, keys, place, comptime!(sides.keys), comptime!(sides.precision))
                    }
                    None => {
                        let mut dot = 0.0f32;
                        for feature in 0..head_dim {
                            dot += query[feature] * f32::cast_from(keys[(cache + key) * head_dim + feature]);
                        }
                        dot
                    }
                };
                score = dot * scale;
            }
            reduce[unit] = score;
            sync_cube();
            let mut top = m;
            for i in 0..width {
                top = max(top, reduce[i]);
            }
            weights[unit] = f32::exp(score - top);
            sync_cube();
            let rescale = f32::exp(m - top);
            m = top;
            l *= rescale;
            #[unroll]
            for i in 0..owned {
                output[i] *= rescale;
            }
            let mut count = visible - t * width;
            if count > width {
                count = width;
            }
            for i in 0..count {
                let weight = weights[i];
                l += weight;
                let row = cache + t * width + i;
                #[unroll]
                for j in 0..owned {
                    let feature = j * width + unit;
                    if feature < head_dim {
                        let value = match comptime!(coded) {
                            Some(sides) => {
                                let place = row * comptime!(sides.values.words());
                                let precision = comptime!(sides.precision);
                                coded_value::<C>(values, place, feature, comptime!(sides.values), precision)
                            }
                            None => f32::cast_from(values[row * head_dim + feature]),
                        };
                        output[j] += weight * value;
                    }
                }
            }
            sync_cube();
        }
        #[unroll]
        for i in 0..owned {
            let feature = i * width + unit;
            if feature < head_dim {
                let value = rounded::<Const<1>>(Vector::new(output[i] / l), to);
                out[CUBE_POS * head_dim + feature] = O::cast_from(value[0]);
            }
        }
    }
}

/// `q` `[batch, tokens, heads, head_dim]`, `keys`, `values` `[batch, kv_heads, capacity, head_dim]` of one type, or words
/// `[batch, kv_heads, capacity, words]` where they are `coded`: contiguous.
pub(crate) fn launch<R: KernelRuntime>(
    q: CubeTensor<R>,
    keys: CubeTensor<R>,
    values: CubeTensor<R>,
    first_position: usize,
    coded: Option<CodedSides>,
    to: Precision,
) -> CubeTensor<R> {
    let shape = q.meta.shape().clone();
    let (batch, tokens, heads, head_dim) = (shape[0], shape[1], shape[2], shape[3]);
    let (kv_heads, capacity) = (keys.meta.shape()[1], keys.meta.shape()[2]);
    let widths = [&keys, &values].map(|rows| rows.meta.shape()[3]);
    assert!(
        coded.is_none_or(|sides| head_dim == ROW && widths == [sides.keys.words(), sides.values.words()])
            && first_position + tokens <= capacity,
        "{tokens} queries {head_dim} wide after {first_position}, rows of {widths:?} elements or words of {coded:?}"
    );
    let out = empty(&q, shape, storage::<R>(to));
    let row_type = coded.map_or(keys.dtype, |_| DType::U32);
    let dtypes: [DType; 3] = [q.dtype, row_type, out.dtype];
    let rows = batch * tokens * heads;
    let client = q.client.clone();
    // SAFETY: rows beyond the count do nothing; keys stop at the query's own position, below `capacity` by contract.
    unsafe {
        attention::launch_unchecked::<R>(
            &client,
            cubes(&client, rows),
            CubeDim::new_1d(TILE),
            address_type(&[&q, &keys, &out]),
            q.into_array_arg(),
            keys.into_array_arg(),
            values.into_array_arg(),
            out.clone().into_array_arg(),
            rows,
            tokens,
            heads,
            heads / kv_heads,
            capacity,
            first_position,
            1.0 / (head_dim as f32).sqrt(),
            head_dim,
            TILE,
            coded,
            left_to_round(to, out.dtype),
            dtypes.map(Into::into),
        );
    }
    out
}
