//! Launches `wide_rows.cu`.

use burn::tensor::DType;
use cubecl::server::KernelArguments;

use super::CudaTensor;
use super::source::CudaSource;
use crate::cube::empty;

/// Rows of one block.
const BLOCK_ROWS: usize = 64;
/// Reduction length of one stage: `in` must be a multiple.
const STEP: usize = 64;
/// Outputs whose accumulators fit the registers.
const MAX_OUTPUTS: usize = 64;

/// `x` `[..., in]` float32, `weight` `[out, in]` bfloat16, contiguous; `None` for shapes the kernel is not for.
pub(super) fn launch(x: &CudaTensor, weight: &CudaTensor) -> Option<CudaTensor> {
    let (outputs, width) = (weight.meta.shape()[0], weight.meta.shape()[1]);
    let rows = x.meta.num_elements() / width;
    if outputs > MAX_OUTPUTS || width % STEP != 0 || rows == 0 || u32::try_from(rows).is_err() {
        return None;
    }
    let mut shape = x.meta.shape().clone();
    *shape.last_mut()? = outputs;
    let out = empty(x, shape, DType::F32);
    let padded = outputs.next_multiple_of(16);
    let kernel = CudaSource {
        entry: "project_wide_rows",
        text: CudaSource::text(&[("OUTPUTS", &padded.to_string())], include_str!("wide_rows.cu")),
        threads: 128,
        shared_bytes: 0,
    };
    let arguments = KernelArguments::new().with_buffers([x, weight, &out].map(|t| t.handle.clone().binding()).to_vec());
    let info = vec![rows as u64 | ((width as u64) << 32), outputs as u64];
    // SAFETY: rows and outputs beyond the matrices are read at their last ones and not written.
    unsafe { kernel.launch(&x.client, (rows.div_ceil(BLOCK_ROWS), 1, 1), arguments, info) };
    Some(out)
}
