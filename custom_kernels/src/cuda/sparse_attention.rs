//! Launches `sparse_attention.cu`: the choice of blocks, and attention over those that queries name.

use burn::tensor::DType;
use cubecl::server::KernelArguments;
use rayon::prelude::*;

use super::CudaTensor;
use super::precise::upload;
use super::source::{CudaSource, word};
use crate::cube::empty;
use crate::cube_backend::read;
use crate::ops::sparse_attention::BlockSelection;

/// Warps of a query's block of threads, 16 keys each at a time.
const WARPS: usize = 4;
/// Gathers in flight, keys and values.
const STAGES: usize = 2;
/// Query heads of a key head that one fragment holds.
const MAX_GROUP: usize = 16;
/// The widest head whose queries and outputs stay in registers.
const MAX_DIM: usize = 256;
/// Blocks of a window whose scores fit in shared memory beside the query.
const MAX_BLOCKS: usize = 48 * 1024;
/// A grid's second and third axes.
const MAX_GRID: usize = 65_535;

/// Bytes of shared memory that a block of threads may have.
fn shared_memory(x: &CudaTensor) -> usize {
    x.client.properties().hardware.max_shared_memory_size
}

fn source(entry: &'static str, dim: usize, group: usize, threads: u32, shared_bytes: usize) -> CudaSource {
    CudaSource {
        entry,
        text: CudaSource::text(
            &[("DIM", &dim.to_string()), ("GROUP", &group.to_string())],
            include_str!("sparse_attention.cu"),
        ),
        threads,
        shared_bytes,
    }
}

/// See [`crate::cube::KernelRuntime::sparse_attention`]; `None` for types and sizes the kernel is not for.
pub(super) fn attend(
    q: &CudaTensor,
    keys: &CudaTensor,
    values: &CudaTensor,
    selection: &BlockSelection,
) -> Option<CudaTensor> {
    let [batch, tokens, heads, dim] = *q.meta.shape().as_slice() else {
        return None;
    };
    let [_, kv_heads, capacity, _] = *keys.meta.shape().as_slice() else {
        return None;
    };
    let group = heads / kv_heads;
    let narrow = [q, keys, values].iter().all(|x| x.dtype == DType::BF16);
    if !narrow || dim % 16 != 0 || dim > MAX_DIM || group > MAX_GROUP || batch.max(kv_heads) > MAX_GRID {
        return None;
    }
    let stage = 2 * 16 * WARPS * (2 * dim + 16);
    // The warps' maxima, sums and outputs take the place of the keys and values in the end.
    let joined = 4 * (2 * WARPS * 16 + WARPS * group * dim);
    let shared = (STAGES * stage).max(joined);
    if shared > shared_memory(q) {
        return None;
    }
    let visible = selection.first_position + tokens;
    assert!(
        selection.blocks.len() == batch * tokens && visible <= capacity,
        "a list of blocks per query, and keys for every position"
    );
    let longest = selection.blocks.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let mut lists = vec![0; batch * tokens * longest];
    let pairs = lists.par_chunks_exact_mut(longest).zip(&selection.blocks);
    pairs.enumerate().for_each(|(query, (list, blocks))| {
        let complete = (selection.first_position + query % tokens + 1) / selection.ratio;
        assert!(
            blocks.iter().all(|block| (*block as usize) < complete),
            "only complete blocks are chosen"
        );
        list[..blocks.len()].copy_from_slice(blocks);
    });
    let counts: Vec<u32> = selection.blocks.iter().map(|blocks| blocks.len() as u32).collect();
    let (lists, counts) = (upload(q, &lists, DType::U32), upload(q, &counts, DType::U32));
    let out = empty(q, q.meta.shape().clone(), DType::BF16);
    let kernel = source("sparse_attention", dim, group, 32 * WARPS as u32, shared);
    let buffers = [q, keys, values, &lists, &counts, &out].map(|x| x.handle.clone().binding());
    // Powers of two take the place of those of e.
    let scale = (f64::from(dim as u32).sqrt().recip() * std::f64::consts::LOG2_E) as f32;
    let info = vec![
        word(tokens, capacity),
        word(longest, selection.ratio),
        word(selection.first_position, 0),
        u64::from(scale.to_bits()),
    ];
    let arguments = KernelArguments::new().with_buffers(buffers.to_vec());
    // SAFETY: a list per query, whose blocks lie within the keys; rows beyond the last key are not read.
    unsafe { kernel.launch(&q.client, (tokens, kv_heads, batch), arguments, info) };
    Some(out)
}

/// See [`crate::cube::KernelRuntime::choose_blocks`]; `None` for sizes the kernel is not for.
pub(super) fn choose(
    q: &CudaTensor,
    keys: &CudaTensor,
    first_position: usize,
    ratio: usize,
    count: usize,
) -> Option<BlockSelection> {
    let [batch, tokens, heads, width] = *q.meta.shape().as_slice() else {
        return None;
    };
    let blocks = keys.meta.shape()[1];
    let complete = |token: usize| (first_position + token + 1) / ratio;
    // Few sizes, because each is compiled by itself.
    let scores = blocks.next_power_of_two().clamp(1024, MAX_BLOCKS);
    let shared = 4 * (heads * width + scores);
    if blocks > MAX_BLOCKS || count == 0 || batch > MAX_GRID || shared > shared_memory(q) {
        return None;
    }
    assert!(complete(tokens - 1) <= blocks, "a key for every complete block");
    let out = empty(q, [batch * tokens, count], DType::U32);
    let kernel = source("choose_blocks", 16, 1, 256, shared);
    let buffers = [q, keys, &out].map(|x| x.handle.clone().binding());
    let info = vec![
        word(tokens, blocks),
        word(heads, width),
        word(first_position, ratio),
        word(count, 0),
    ];
    let arguments = KernelArguments::new().with_buffers(buffers.to_vec());
    // SAFETY: a key for every complete block, `count` places per query, shared memory for every block's score.
    unsafe { kernel.launch(&q.client, (tokens, batch, 1), arguments, info) };
    let chosen: Vec<u32> = read(out);
    let list = |(query, blocks): (usize, &[u32])| blocks[..count.min(complete(query % tokens))].to_vec();
    Some(BlockSelection {
        ratio,
        first_position,
        blocks: chosen.par_chunks_exact(count).enumerate().map(list).collect(),
    })
}
