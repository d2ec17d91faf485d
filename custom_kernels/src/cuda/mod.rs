//! What NVIDIA cards do better than the portable kernels: dense products through cuBLASLt, attention and the delta rule
//! as hand-written kernels on tensor cores.
//!
//! The `.cu` texts are compiled by NVRTC when first launched, through CubeCL's own launcher, so that they share its
//! stream, memory and compiled-kernel cache.

mod attention;
pub mod card;
mod delta;
pub mod gemm;
mod mixture;
mod packed_experts;
pub mod precise;
mod source;
mod sparse_attention;
mod upload;
mod wide_rows;

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use burn::tensor::DType;
use burn_cubecl::{CubeBackend, element::BoolElement};
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::ComputeClient;
use cubecl::server::Handle;
use cudarc::driver::{result::device as driver_device, sys::CUdevice_attribute};

use crate::cube::{CubeTensor, KernelRuntime, MixtureOperands, PackedJob};
use crate::ops::sparse_attention::BlockSelection;
use crate::ops::{gated_delta_rule::DeltaHeads, round};
use crate::precise::Precise;
use crate::precision::Precision;

/// A tensor of the CUDA runtime.
pub(crate) type CudaTensor = CubeTensor<CudaRuntime>;

/// Hopper: `wgmma` and the bulk copy engine as the attention kernel uses them exist there only.
const HOPPER: i32 = 9;
/// Ampere: `mma.sync` on bfloat16 and `cp.async`, which the other kernels need.
const AMPERE: i32 = 8;

impl KernelRuntime for CudaRuntime {
    const NARROW: bool = true;

    fn precise<BT: BoolElement>(_device: &CudaDevice) -> Option<&'static dyn Precise<CubeBackend<Self, f32, i32, BT>>> {
        Some(&precise::CARD)
    }

    fn upload(
        client: &ComputeClient<Self>,
        size: usize,
        pieces: &mut dyn Iterator<Item = (usize, &[u8])>,
        device: &CudaDevice,
    ) -> Handle {
        upload::upload(client, size, pieces, device)
    }

    fn linear(
        x: &CudaTensor,
        weight: &CudaTensor,
        addend: Option<&CudaTensor>,
        factor: f32,
        dtype: DType,
    ) -> Option<CudaTensor> {
        if let (DType::F32, DType::BF16, None, DType::F32) = (x.dtype, weight.dtype, addend, dtype)
            && factor == 1.0
            && compute_capability(&x.device) >= AMPERE
            && let Some(y) = wide_rows::launch(x, weight)
        {
            return Some(y);
        }
        if x.dtype == DType::F32 && weight.dtype == DType::BF16 {
            let weight = round::cube::launch(weight.clone(), Precision::Full);
            return gemm::linear(x, &weight, addend, factor, dtype);
        }
        gemm::linear(x, weight, addend, factor, dtype)
    }

    fn multiplies_e4m3(device: &CudaDevice) -> bool {
        multiplies_fp8(device)
    }

    fn linear_e4m3(
        x: (&CudaTensor, &CudaTensor),
        weight: (&CudaTensor, &CudaTensor),
        shape: [usize; 2],
        addend: Option<&CudaTensor>,
    ) -> Option<CudaTensor> {
        gemm::linear_e4m3(x, weight, shape, addend)
    }

    fn mixture_of_experts(operands: &MixtureOperands<'_, Self>) -> Option<[CudaTensor; 3]> {
        (compute_capability(&operands.x.device) == HOPPER).then(|| mixture::launch(operands))?
    }

    fn choose_experts(logits: &CudaTensor, top_k: usize) -> Option<[CudaTensor; 2]> {
        (compute_capability(&logits.device) == HOPPER).then(|| mixture::choose(logits, top_k))?
    }

    fn multiplies_packed_experts(device: &CudaDevice) -> bool {
        compute_capability(device) >= AMPERE
    }

    fn packed_experts(job: &PackedJob<'_, Self>, outputs: Option<CudaTensor>) -> Option<CudaTensor> {
        (compute_capability(&job.x.device) >= AMPERE).then(|| packed_experts::launch(job, outputs))?
    }

    fn combine_experts(operands: [&CudaTensor; 4]) -> Option<CudaTensor> {
        packed_experts::combine(operands)
    }

    fn causal_attention(
        q: &CudaTensor,
        keys: &CudaTensor,
        values: &CudaTensor,
        first_position: usize,
    ) -> Option<CudaTensor> {
        (compute_capability(&q.device) == HOPPER).then(|| attention::launch(q, keys, values, first_position))?
    }

    fn sparse_attention(
        q: &CudaTensor,
        keys: &CudaTensor,
        values: &CudaTensor,
        selection: &BlockSelection,
    ) -> Option<CudaTensor> {
        (compute_capability(&q.device) >= AMPERE).then(|| sparse_attention::attend(q, keys, values, selection))?
    }

    fn choose_blocks(
        q: &CudaTensor,
        keys: &CudaTensor,
        first_position: usize,
        ratio: usize,
        count: usize,
    ) -> Option<BlockSelection> {
        (compute_capability(&q.device) >= AMPERE)
            .then(|| sparse_attention::choose(q, keys, first_position, ratio, count))?
    }

    fn gated_delta_rule(
        qkv: &CudaTensor,
        g: &CudaTensor,
        beta: &CudaTensor,
        state: &CudaTensor,
        heads: DeltaHeads,
    ) -> Option<(CudaTensor, CudaTensor)> {
        (compute_capability(&qkv.device) >= AMPERE).then(|| delta::launch(qkv, g, beta, state, heads))?
    }
}

/// Whether `device` has the kernels for Hopper.
pub fn is_hopper(device: &CudaDevice) -> bool {
    compute_capability(device) == HOPPER
}

/// Whether `device` multiplies E4M3 codes with a scale per row, a feature of Hopper and its cuBLASLt.
pub fn multiplies_fp8(device: &CudaDevice) -> bool {
    is_hopper(device) && gemm::availability(device).is_ok()
}

/// The major compute capability of a device; 0 when the driver does not say.
pub fn compute_capability(device: &CudaDevice) -> i32 {
    static KNOWN: LazyLock<Mutex<HashMap<usize, i32>>> = LazyLock::new(Default::default);
    let mut known = KNOWN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    *known.entry(device.index).or_insert_with(|| {
        let ask = || {
            let handle = driver_device::get(device.index as i32)?;
            // SAFETY: the handle was just returned by the driver.
            unsafe {
                driver_device::get_attribute(handle, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
            }
        };
        ask().unwrap_or(0)
    })
}
