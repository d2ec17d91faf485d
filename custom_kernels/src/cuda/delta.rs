//! Launches `delta.cu`: what needs no state for all chunks at once, then the walk over the chunks.

use burn::tensor::DType;
use cubecl::server::KernelArguments;

use super::CudaTensor;
use super::source::{CudaSource, word};
use crate::cube::empty;
use crate::ops::gated_delta_rule::{CHUNK, DeltaHeads};

/// The head size the kernels are written for.
const DIM: usize = 128;
/// Value columns of one scanning block.
const COLUMNS: usize = 64;
/// Value heads per key head up to which one block prepares a chunk.
const MAX_GROUP: usize = 4;
/// Words of the two triangular matrices of one chunk: 16 fragments of 32 lanes, 16 bytes each.
const FRAGMENT_WORDS: usize = 16 * 32 * 4;

/// Padded rows of the kernel text, in elements: q and k tiles, 64-column tiles, float matrices.
const ROW: usize = DIM + 8;
const COLUMN_ROW: usize = COLUMNS + 8;
const FLOAT_ROW: usize = CHUNK + 4;

/// `qkv` `[batch, tokens, channels]` bfloat16, the rest float32, contiguous; `None` for other types and head sizes.
pub(super) fn launch(
    qkv: &CudaTensor,
    g: &CudaTensor,
    beta: &CudaTensor,
    state: &CudaTensor,
    heads: DeltaHeads,
) -> Option<(CudaTensor, CudaTensor)> {
    let (batch, tokens) = (qkv.meta.shape()[0], qkv.meta.shape()[1]);
    let group = heads.value_heads / heads.key_heads;
    let fits = qkv.dtype == DType::BF16 && heads.key_dim == DIM && heads.value_dim == DIM && group <= MAX_GROUP;
    if !fits || batch > u16::MAX as usize {
        return None;
    }
    let chunks = tokens.div_ceil(CHUNK);
    let rows = batch * heads.value_heads;
    let solved = empty(qkv, [rows * chunks, FRAGMENT_WORDS], DType::U32);
    let scores = empty(qkv, [rows * chunks, FRAGMENT_WORDS], DType::U32);
    let factors = empty(qkv, [rows * chunks, CHUNK, 4], DType::F32);
    let decay = empty(qkv, [rows, chunks], DType::F32);
    let out = empty(qkv, [batch, tokens, heads.value_heads, DIM], DType::BF16);
    let next = empty(qkv, state.meta.shape().clone(), DType::F32);

    let text = CudaSource::text(&[("GROUP", &group.to_string())], include_str!("delta.cu"));
    let prepare = CudaSource {
        entry: "delta_prepare",
        text: text.clone(),
        threads: 64 * group as u32,
        shared_bytes: 2 * CHUNK * FLOAT_ROW * 4 + (2 * CHUNK * ROW * 2).max(group * CHUNK * FLOAT_ROW * 4),
    };
    let scan = CudaSource {
        entry: "delta_scan",
        text,
        threads: 128,
        shared_bytes: 4 * CHUNK * ROW * 2 + (DIM + 2 * CHUNK) * COLUMN_ROW * 2,
    };
    let channels = heads.channels() as u64;
    let keys_at = (heads.key_heads * DIM) as u64;
    let info = vec![
        channels,
        channels,
        channels,
        0,
        keys_at,
        2 * keys_at,
        word(tokens, chunks),
        word(heads.key_heads, group),
        1, // the state is always read
    ];
    let bindings = |tensors: &[&CudaTensor]| {
        KernelArguments::new().with_buffers(tensors.iter().map(|t| t.handle.clone().binding()).collect())
    };
    // SAFETY: every row is guarded by the token count, the other extents follow from the shapes checked above.
    unsafe {
        prepare.launch(
            &qkv.client,
            (chunks, heads.key_heads, batch),
            bindings(&[qkv, qkv, g, beta, &solved, &scores, &factors, &decay]),
            info.clone(),
        );
        scan.launch(
            &qkv.client,
            (DIM / COLUMNS, heads.value_heads, batch),
            bindings(&[qkv, qkv, qkv, &solved, &scores, &factors, &decay, state, &next, &out]),
            info,
        );
    }
    Some((out, next))
}
