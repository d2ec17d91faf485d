//! Launches `packed_experts.cu`: packed experts in exact integers.

use burn::tensor::DType;
use cubecl::server::KernelArguments;

use super::CudaTensor;
use super::precise::upload;
use super::source::{CudaSource, word};
use crate::cube::{PackedJob, empty};
use crate::ops::packed_experts::{UNIT, UNIT_BYTES};

/// Rows of one tile, all of one expert.
const TILE_ROWS: usize = 64;
/// Rows of one block of the kernels that take a warp per row.
const WARP_ROWS: usize = 8;
/// Groups of 16 matrix rows of one block of the product.
const GROUPS: usize = 8;
/// Blocks of 16 columns in one chunk of a row's integers.
const CHUNK_BLOCKS: usize = 4;
/// Chunks in flight.
const STAGES: usize = 3;
/// Tiles that a grid's second axis holds.
const MAX_TILES: usize = 65_535;

/// The activations of the experts.
#[derive(Clone, Copy, PartialEq)]
enum Activations {
    Sixteen,
    Four,
}

impl Activations {
    /// Digits to base 256 of a number.
    fn digits(self) -> usize {
        match self {
            Self::Sixteen => 3,
            Self::Four => 1,
        }
    }

    /// Bytes of a chunk of integers, and of one in shared memory.
    fn chunk_bytes(self) -> (usize, usize) {
        match self {
            Self::Sixteen => (192, 208),
            Self::Four => (80, 80),
        }
    }

    fn source(self, entry: &'static str, shared_bytes: usize) -> CudaSource {
        CudaSource {
            entry,
            text: CudaSource::text(
                &[("DIGITS", &self.digits().to_string())],
                include_str!("packed_experts.cu"),
            ),
            threads: 256,
            shared_bytes,
        }
    }
}

/// Whose matrices a product takes: their place in a record, the factors of its even and odd rows.
struct Matrices {
    offset: usize,
    rows: usize,
    columns: usize,
    factors: [u64; 2],
    scatter: bool,
}

/// See [`crate::cube::KernelRuntime::packed_experts`]; `None` for types and sizes the kernels are not for.
pub(super) fn launch(job: &PackedJob<'_, super::CudaRuntime>, outputs: Option<CudaTensor>) -> Option<CudaTensor> {
    let (x, inner) = (job.x, job.inner);
    let [rows, hidden] = *x.meta.shape().as_slice() else {
        return None;
    };
    let mut tiles: Vec<[u32; 4]> = Vec::new();
    let mut first = 0;
    for (expert, count) in job.counts.iter().enumerate() {
        for start in (0..*count).step_by(TILE_ROWS) {
            let rows = TILE_ROWS.min(count - start);
            tiles.push([expert as u32, (first + start) as u32, rows as u32, 0]);
        }
        first += count;
    }
    let choices = job.choices.len();
    if x.dtype != DType::BF16
        || hidden % UNIT != 0
        || inner % UNIT != 0
        || tiles.len() > MAX_TILES
        || i32::try_from(rows * job.top_k).is_err()
    {
        return None;
    }
    assert_eq!(first, choices, "every choice has its expert");
    assert!(
        job.choices.iter().all(|place| (*place as usize) < rows * job.top_k),
        "a choice is a place in [rows, top_k]"
    );
    let outputs = outputs.unwrap_or_else(|| empty(x, [rows, job.top_k, hidden], DType::BF16));
    if tiles.is_empty() {
        return Some(outputs);
    }
    let activations = match job.scales {
        Some(_) => Activations::Four,
        None => Activations::Sixteen,
    };
    let scales = job.scales.unwrap_or(job.factors);
    let order = upload(x, job.choices, DType::U32);
    let scales = upload(x, scales.as_flattened(), DType::F32);
    let factors = upload(x, job.factors.as_flattened(), DType::F32);
    let tile_count = tiles.len();
    let tiles = upload(x, tiles.as_flattened(), DType::U32);
    let run = |entry, shared_bytes, grid: usize, buffers: &[&CudaTensor], info: Vec<u64>| {
        let buffers = buffers.iter().map(|t| t.handle.clone().binding()).collect();
        let arguments = KernelArguments::new().with_buffers(buffers);
        // SAFETY: tiles are rows of the choices, which lie in `[rows, top_k]`; experts of the tiles have records; units and
        // chunks beyond the last are neither read nor written.
        unsafe {
            activations
                .source(entry, shared_bytes)
                .launch(&x.client, (grid, tile_count, 1), arguments, info);
        }
    };
    let integers = |width: usize| {
        let words = (width / UNIT).div_ceil(CHUNK_BLOCKS) * activations.chunk_bytes().0 / 4;
        (empty(x, [choices, words], DType::U32), empty(x, [choices], DType::I32))
    };
    let warps = TILE_ROWS / WARP_ROWS;
    let product = |rows: &CudaTensor, largest: &CudaTensor, matrices: &Matrices, out: &CudaTensor| {
        let (groups, blocks) = (matrices.rows / UNIT, matrices.columns / UNIT);
        let stage = TILE_ROWS * activations.chunk_bytes().1 + GROUPS * CHUNK_BLOCKS * UNIT_BYTES;
        let [even, odd] = matrices.factors;
        let info = vec![
            job.stride as u64,
            matrices.offset as u64,
            word(blocks, groups),
            even | odd << 32,
            u64::from(matrices.scatter),
        ];
        let buffers = [job.records, rows, largest, &order, &tiles, &factors, out];
        run(
            "expert_product",
            STAGES * stage,
            groups.div_ceil(GROUPS),
            &buffers,
            info,
        );
    };

    let (encoded, largest) = integers(hidden);
    let info = vec![word(hidden / UNIT, job.top_k)];
    let buffers = [x, &order, &tiles, &scales, &encoded, &largest];
    run("encode_rows", 0, warps, &buffers, info);
    let gate_up = empty(x, [choices, 2 * inner], DType::BF16);
    let matrices = Matrices {
        offset: 0,
        rows: 2 * inner,
        columns: hidden,
        factors: [0, 1],
        scatter: false,
    };
    product(&encoded, &largest, &matrices, &gate_up);
    drop(encoded);
    let (encoded, largest) = integers(inner);
    let info = vec![word(inner / UNIT, job.top_k)];
    let buffers = [&gate_up, &tiles, &scales, &encoded, &largest];
    run("activate_rows", 0, warps, &buffers, info);
    let matrices = Matrices {
        offset: 2 * inner / UNIT * (hidden / UNIT) * UNIT_BYTES,
        rows: hidden,
        columns: inner,
        factors: [2, 2],
        scatter: true,
    };
    product(&encoded, &largest, &matrices, &outputs);
    Some(outputs)
}

/// See [`crate::cube::KernelRuntime::combine_experts`]: outputs, weights, shared, scores; `None` for other types.
pub(super) fn combine(operands: [&CudaTensor; 4]) -> Option<CudaTensor> {
    let [outputs, weights, shared, scores] = operands;
    let [rows, top_k, hidden] = *outputs.meta.shape().as_slice() else {
        return None;
    };
    let types = operands.map(|t| t.dtype);
    if types != [DType::BF16, DType::F32, DType::BF16, DType::F32] || hidden % 8 != 0 || rows == 0 {
        return None;
    }
    let y = empty(shared, shared.meta.shape().clone(), DType::BF16);
    let buffers = [outputs, weights, shared, scores, &y].map(|t| t.handle.clone().binding());
    let arguments = KernelArguments::new().with_buffers(buffers.to_vec());
    let info = vec![word(rows, hidden / 8), top_k as u64];
    // SAFETY: one warp per row of every operand.
    unsafe {
        Activations::Sixteen.source("combine", 0).launch(
            &outputs.client,
            (rows.div_ceil(WARP_ROWS), 1, 1),
            arguments,
            info,
        );
    }
    Some(y)
}
