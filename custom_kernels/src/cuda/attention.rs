//! Launches `attention.cu`.

use burn::tensor::DType;
use cubecl::prelude::*;
use cubecl::server::{KernelArguments, TensorMapBinding, TensorMapMeta};
use cubecl::zspace::{Shape, Strides, metadata::Metadata};

use super::CudaTensor;
use super::source::{CudaSource, word};
use crate::cube::empty;

/// Query rows of one block and its threads: one producing warpgroup, two of 64 rows.
const BLOCK_M: usize = 128;
const THREADS: u32 = 384;
/// Elements of one 128-byte swizzle row.
const PANEL: usize = 64;
const STAGES: usize = 2;

/// Keys of one tile, as in the kernel text.
fn block_n(head_dim: usize) -> usize {
    if head_dim == 256 { 80 } else { 128 }
}

/// How the kernel text names a 16-bit float, quotes included.
fn operand(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::BF16 => Some("\"bf16\""),
        DType::F16 => Some("\"f16\""),
        _ => None,
    }
}

/// `q` `[batch, tokens, heads, head_dim]`, `keys`, `values` `[batch, kv_heads, capacity, head_dim]`, bfloat16 or half,
/// `q` as `keys`, contiguous; `None` for other types and head sizes.
pub(super) fn launch(q: &CudaTensor, keys: &CudaTensor, values: &CudaTensor, first: usize) -> Option<CudaTensor> {
    let shape = q.meta.shape().clone();
    let (batch, tokens, heads, head_dim) = (shape[0], shape[1], shape[2], shape[3]);
    let (kv_heads, capacity) = (keys.meta.shape()[1], keys.meta.shape()[2]);
    let (score_type, value_type) = (operand(keys.dtype)?, operand(values.dtype)?);
    let fits = q.dtype == keys.dtype && matches!(head_dim, 64 | 128 | 256);
    if !fits || tokens.div_ceil(BLOCK_M) > u16::MAX as usize || batch > u16::MAX as usize {
        return None;
    }
    let visible = first + tokens;
    let block_n = block_n(head_dim);
    let out = empty(q, shape, DType::BF16);
    let kernel = CudaSource {
        entry: "attention_kernel",
        text: CudaSource::text(
            &[
                ("HEAD_DIM", &head_dim.to_string()),
                ("SCORE_TYPE", score_type),
                ("VALUE_TYPE", value_type),
            ],
            include_str!("attention.cu"),
        ),
        threads: THREADS,
        shared_bytes: (BLOCK_M + 2 * STAGES * block_n) * head_dim * 2 + 1024,
    };
    let cache = [batch, kv_heads, visible, head_dim];
    let cache_strides = [kv_heads * capacity * head_dim, capacity * head_dim, head_dim, 1];
    let query_strides = [tokens * heads * head_dim, heads * head_dim, head_dim, 1];
    let maps = vec![
        map(
            q,
            [batch, tokens, heads, head_dim],
            query_strides,
            [1, BLOCK_M, 1, PANEL],
        ),
        map(keys, cache, cache_strides, [1, 1, block_n, PANEL]),
        map(values, cache, cache_strides, [1, 1, block_n, PANEL]),
    ];
    let arguments = KernelArguments::new()
        .with_tensor_maps(maps)
        .with_buffer(out.handle.clone().binding());
    let scale = std::f32::consts::LOG2_E / (head_dim as f32).sqrt();
    let info = vec![
        word(tokens, visible),
        word(heads, heads / kv_heads),
        word(first, scale.to_bits() as usize),
    ];
    // SAFETY: reads go through the tensor maps, bounded by `visible` rows; writes are guarded by the token count.
    unsafe { kernel.launch(&q.client, (heads, batch, tokens.div_ceil(BLOCK_M)), arguments, info) };
    Some(out)
}

/// `shape` seen through `strides` (elements), copied in boxes of `tile`.
pub(super) fn map(x: &CudaTensor, shape: [usize; 4], strides: [usize; 4], tile: [usize; 4]) -> TensorMapBinding {
    let meta = TensorMapMeta {
        format: TensorMapFormat::Tiled(TiledArgs {
            tile_size: Shape::from(tile),
        }),
        metadata: Metadata::new(Shape::from(shape), Strides::new(&strides)),
        elem_stride: Strides::new(&[1, 1, 1, 1]),
        interleave: TensorMapInterleave::None,
        swizzle: TensorMapSwizzle::B128,
        prefetch: TensorMapPrefetch::B256,
        oob_fill: OobFill::Zero,
        storage_ty: x.dtype.into(),
    };
    TensorMapBinding::new(x.handle.clone().binding(), meta)
}
