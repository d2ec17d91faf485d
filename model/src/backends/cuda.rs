//! NVIDIA cards through CubeCL, with cuBLASLt and the hand-written kernels.

use burn::backend::Cuda;
use burn::backend::cuda::CudaDevice;

use crate::scorer::{ModelError, Scorer, ScorerOptions, WindowScorer};
use crate::source::TextSource;

/// Loads the model of `source` onto card `index`.
///
/// # Errors
/// See [`ModelError`].
pub fn load(source: &dyn TextSource, options: &ScorerOptions, index: usize) -> Result<Box<dyn Scorer>, ModelError> {
    let device = CudaDevice::new(index);
    Ok(Box::new(WindowScorer::<Cuda<f32, i32>>::load(
        source, options, &device,
    )?))
}
