//! Any Vulkan device through CubeCL's portable kernels, software rendering included; float32 storage.

use burn::backend::Vulkan;
use burn::backend::wgpu::WgpuDevice;
use perplexity_kernels::cube;
use perplexity_kv::options::KvOptions;

use super::DeviceFacts;
use crate::bench::{self, Operations, PassShape};
use crate::route::Route;
use crate::scorer::{ModelError, Scorer, ScorerOptions, WindowScorer};
use crate::source::TextSource;

/// Looks for a device, which says nothing of itself that a plan could use.
///
/// # Errors
/// [`ModelError::Device`] when the Vulkan loader finds none.
pub fn facts() -> Result<DeviceFacts, ModelError> {
    if cube::has_vulkan_device() {
        return Ok(DeviceFacts::default());
    }
    Err(ModelError::Device {
        device: "vulkan:0".to_owned(),
        reason:
            "the Vulkan loader finds no device; install a driver, such as mesa-vulkan-drivers for software rendering"
                .to_owned(),
    })
}

/// Loads the model of `source` onto the device that the Vulkan loader puts first.
///
/// # Errors
/// See [`ModelError`].
pub fn load(source: &dyn TextSource, options: &ScorerOptions) -> Result<Box<dyn Scorer>, ModelError> {
    facts()?;
    let device = WgpuDevice::DefaultDevice;
    Ok(Box::new(WindowScorer::<Vulkan<f32, i32, u8>>::load(
        source, options, &device,
    )?))
}

/// Measures the operations of a pass of `source`; see [`mod@bench`].
///
/// # Errors
/// See [`ModelError`].
pub fn measure(
    source: &dyn TextSource,
    route: Route,
    shape: PassShape,
    kv: Option<&KvOptions>,
) -> Result<Operations, ModelError> {
    facts()?;
    bench::measure::<Vulkan<f32, i32, u8>>(source, route, shape, kv, &WgpuDevice::DefaultDevice)
}
