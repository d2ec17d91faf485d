//! Any Vulkan device through CubeCL's portable kernels, software rendering included; float32 storage.

use burn::backend::Vulkan;
use burn::backend::wgpu::WgpuDevice;

use super::DeviceFacts;
use crate::bench::{self, Operations, PassShape};
use crate::route::Route;
use crate::scorer::{ModelError, Scorer, ScorerOptions, WindowScorer};
use crate::source::TextSource;

/// What the device says of itself: nothing that a plan could use.
pub fn facts() -> DeviceFacts {
    DeviceFacts::default()
}

/// Loads the model of `source` onto the device that the Vulkan loader puts first.
///
/// # Errors
/// See [`ModelError`].
pub fn load(source: &dyn TextSource, options: &ScorerOptions) -> Result<Box<dyn Scorer>, ModelError> {
    let device = WgpuDevice::DefaultDevice;
    Ok(Box::new(WindowScorer::<Vulkan<f32, i32, u8>>::load(
        source, options, &device,
    )?))
}

/// Measures the operations of a pass of `source`; see [`mod@bench`].
///
/// # Errors
/// See [`ModelError`].
pub fn measure(source: &dyn TextSource, route: Route, shape: PassShape) -> Result<Operations, ModelError> {
    bench::measure::<Vulkan<f32, i32, u8>>(source, route, shape, &WgpuDevice::DefaultDevice)
}
