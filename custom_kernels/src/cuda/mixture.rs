//! Launches `mixture.cu`: a mixture of experts without a look at its routing from the host.

use burn::tensor::DType;
use cubecl::server::KernelArguments;

use super::attention::map;
use super::source::{CudaSource, word};
use super::{CudaTensor, gemm};
use crate::cube::{MixtureOperands, empty};
use crate::ops::sigmoid_gate::cube::{self as gate, Gate};
use crate::precision::Precision;

/// Warps of 32 rows' kernels: one row each.
const ROWS: usize = 8;
/// Rows of one tile of the grouped product; also of one box of a weight.
const TILE_ROWS: usize = 128;
/// Elements of one 128-byte swizzle row.
const PANEL: usize = 64;
/// Steps in flight, each of one box of rows and two of the weight.
const STAGES: usize = 4;
/// Experts whose tables leave room for the tiles in shared memory.
const MAX_EXPERTS: usize = 1024;
/// Lanes of a warp, one for each chosen expert.
const MAX_TOP_K: usize = 32;

/// The defines of the kernel text.
struct Kernels {
    experts: usize,
    top_k: usize,
}

impl Kernels {
    fn source(&self, entry: &'static str, gated: bool, threads: u32, shared_bytes: usize) -> CudaSource {
        CudaSource {
            entry,
            text: CudaSource::text(
                &[
                    ("EXPERTS", &self.experts.to_string()),
                    ("TOP_K", &self.top_k.to_string()),
                    ("GATED", if gated { "1" } else { "0" }),
                ],
                include_str!("mixture.cu"),
            ),
            threads,
            shared_bytes,
        }
    }

    /// `rows` `[choices, width]` in sorted order times the matrices of `stack` `[experts * matrix_rows, width]`, each its
    /// own expert's; `gated` for `SiLU(gate) * up` of matrices of gate rows, then up rows.
    fn product(&self, rows: &CudaTensor, stack: &CudaTensor, offsets: &CudaTensor, gated: bool) -> CudaTensor {
        let (choices, width) = (rows.meta.shape()[0], rows.meta.shape()[1]);
        let matrix_rows = stack.meta.shape()[0] / self.experts;
        let outputs = if gated { matrix_rows / 2 } else { matrix_rows };
        let out = empty(rows, [choices, outputs], DType::BF16);
        let boxes = |x: &CudaTensor| {
            let count = x.meta.shape()[0];
            let strides = [count * width, count * width, width, 1];
            map(x, [1, 1, count, width], strides, [1, 1, TILE_ROWS, PANEL])
        };
        let kernel = self.source("grouped_product", gated, 384, STAGES * 3 * TILE_ROWS * PANEL * 2 + 1024);
        let arguments = KernelArguments::new()
            .with_tensor_maps(vec![boxes(rows), boxes(stack)])
            .with_buffers(bindings([offsets, &out]));
        let info = vec![word(outputs, width), matrix_rows as u64];
        let blocks = rows
            .client
            .properties()
            .hardware
            .num_streaming_multiprocessors
            .unwrap_or(132) as usize;
        // SAFETY: reads go through the tensor maps; writes are guarded by the rows and outputs of an expert.
        unsafe { kernel.launch(&rows.client, (blocks, 1, 1), arguments, info) };
        out
    }
}

fn bindings<const N: usize>(tensors: [&CudaTensor; N]) -> Vec<cubecl::server::Binding> {
    tensors.map(|t| t.handle.clone().binding()).to_vec()
}

/// See [`crate::cube::KernelRuntime::choose_experts`]; `None` for sizes the kernel is not for.
pub(super) fn choose(logits: &CudaTensor, top_k: usize) -> Option<[CudaTensor; 2]> {
    let [rows, experts] = *logits.meta.shape().as_slice() else {
        return None;
    };
    if logits.dtype != DType::F32 || experts > MAX_EXPERTS || top_k > MAX_TOP_K.min(experts) || rows == 0 {
        return None;
    }
    let ids = empty(logits, [rows, top_k], DType::I32);
    let weights = empty(logits, [rows, top_k], DType::F32);
    let arguments = KernelArguments::new().with_buffers(bindings([logits, &ids, &weights]));
    let kernel = Kernels { experts, top_k }.source("choose_experts", false, 256, 0);
    // SAFETY: the kernel guards its rows; a row has `experts` logits and `top_k` results.
    unsafe {
        kernel.launch(
            &logits.client,
            (rows.div_ceil(ROWS), 1, 1),
            arguments,
            vec![rows as u64],
        )
    };
    Some([ids, weights])
}

/// See [`crate::cube::KernelRuntime::mixture_of_experts`]; `None` for types and sizes the kernels are not for.
pub(super) fn launch(m: &MixtureOperands<'_, super::CudaRuntime>) -> Option<[CudaTensor; 3]> {
    let shape = m.x.meta.shape().clone();
    let width = *shape.last()?;
    let rows = m.x.meta.num_elements() / width;
    let (experts, top_k) = (m.router.meta.shape()[0], m.top_k);
    let inner = m.gate_up.meta.shape()[0] / experts / 2;
    let choices = rows * top_k;
    let narrow = [
        m.residual,
        m.x,
        m.router,
        m.gate_up,
        m.down,
        m.shared_gate,
        m.shared_up,
        m.shared_down,
        m.shared_score,
    ];
    if narrow.iter().any(|t| t.dtype != DType::BF16)
        || width % 8 != 0
        || inner % 8 != 0
        || experts > MAX_EXPERTS
        || top_k > MAX_TOP_K.min(experts)
        || rows == 0
        // Positions are 32-bit numbers, signed in a tensor map's coordinates.
        || i32::try_from(choices.max(experts * width.max(2 * inner))).is_err()
    {
        return None;
    }
    let product = |x: &CudaTensor, weight: &CudaTensor, dtype| gemm::linear(x, weight, None, 1.0, dtype);
    let logits = product(m.x, m.router, DType::F32)?;
    let shared = [m.shared_gate, m.shared_up].map(|weight| product(m.x, weight, DType::BF16));
    let [Some(shared_gate), Some(shared_up)] = shared else {
        return None;
    };
    let shared = gate::launch(shared_gate, shared_up, Gate::Swiglu, Precision::Bf16);
    let shared = product(&shared, m.shared_down, DType::F32)?;

    let kernels = Kernels { experts, top_k };
    let client = &m.x.client;
    let ids = empty(m.x, [rows, top_k], DType::I32);
    let weights = empty(m.x, [rows, top_k], DType::F32);
    let offsets = empty(m.x, [experts + 1], DType::U32);
    let order = empty(m.x, [choices], DType::U32);
    let position = empty(m.x, [choices], DType::U32);
    let sorted = empty(m.x, [choices, width], DType::BF16);
    let run = |entry, threads, blocks, buffers, info| {
        let arguments = KernelArguments::new().with_buffers(buffers);
        // SAFETY: every kernel guards its rows and experts, whose numbers the shapes give.
        unsafe {
            kernels
                .source(entry, false, threads, 0)
                .launch(client, (blocks, 1, 1), arguments, vec![info]);
        }
    };
    let buffers = bindings([&logits, &ids, &weights]);
    run("choose_experts", 256, rows.div_ceil(ROWS), buffers, rows as u64);
    let buffers = bindings([&ids, &offsets, &order, &position]);
    run("sort_choices", 1024, experts, buffers, choices as u64);
    let buffers = bindings([m.x, &order, &sorted]);
    let info = word(choices, width / 8);
    run("gather_rows", 256, choices.div_ceil(ROWS), buffers, info);
    let hidden = kernels.product(&sorted, m.gate_up, &offsets, true);
    drop(sorted);
    let outputs = kernels.product(&hidden, m.down, &offsets, false);
    let y = empty(m.x, shape, DType::BF16);
    let buffers = bindings([
        &outputs,
        &position,
        &weights,
        &shared,
        m.x,
        m.shared_score,
        m.residual,
        &y,
    ]);
    run(
        "combine_experts",
        256,
        rows.div_ceil(ROWS),
        buffers,
        word(rows, width / 8),
    );
    Some([y, ids, weights])
}
