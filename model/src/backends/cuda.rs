//! NVIDIA cards through CubeCL, with cuBLASLt and the hand-written kernels.

use std::path::PathBuf;
use std::time::UNIX_EPOCH;

use burn::backend::Cuda;
use burn::backend::cuda::CudaDevice;
use perplexity_kernels::cuda::card::{self, Card};
use perplexity_kernels::cuda::gemm;
use perplexity_kv::options::KvOptions;

use super::DeviceFacts;
use crate::bench::{self, Operations, PassShape};
use crate::route::Route;
use crate::scorer::{ModelError, Scorer, ScorerOptions, WindowScorer};
use crate::source::TextSource;

/// Looks at card `index`, and keeps its compiled kernels between runs from here on.
///
/// # Errors
/// [`ModelError::Device`] when it cannot be used.
pub fn facts(index: usize) -> Result<DeviceFacts, ModelError> {
    let card = card::card(index).map_err(|error| ModelError::Device {
        device: format!("cuda:{index}"),
        reason: error.to_string(),
    })?;
    if let Some(folder) = kernel_folder(&card) {
        card::keep_compiled_kernels(&folder);
    }
    let device = CudaDevice::new(index);
    let library = gemm::availability(&device).err().map(|error| error.to_string());
    let kernels = (!perplexity_kernels::cuda::is_hopper(&device)).then(|| {
        "prompt attention, mixtures of experts and FP8 products have fast kernels for Hopper cards only (H100, H200): portable \
         ones run instead"
            .into()
    });
    Ok(DeviceFacts {
        name: Some(card.name),
        free_bytes: Some(card.free),
        multiplies_fp8: perplexity_kernels::cuda::multiplies_fp8(&device),
        slower: library.into_iter().chain(kernels).collect(),
    })
}

/// Loads the model of `source` onto card `index`.
///
/// # Errors
/// See [`ModelError`].
pub fn load(source: &dyn TextSource, options: &ScorerOptions, index: usize) -> Result<Box<dyn Scorer>, ModelError> {
    facts(index)?;
    let device = CudaDevice::new(index);
    Ok(Box::new(WindowScorer::<Cuda<f32, i32>>::load(
        source, options, &device,
    )?))
}

/// A folder of the user's cache for kernels of this very program file on this kind of card; `None` without a cache.
fn kernel_folder(card: &Card) -> Option<PathBuf> {
    let cache = match std::env::var_os("XDG_CACHE_HOME") {
        Some(folder) if !folder.is_empty() => PathBuf::from(folder),
        _ => PathBuf::from(std::env::var_os("HOME")?).join(".cache"),
    };
    let program = std::fs::metadata(std::env::current_exe().ok()?).ok()?;
    let changed = program.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
    let (major, minor) = card.capability;
    let build = format!("{:x}-{changed:x}-sm{major}{minor}", program.len());
    Some(cache.join("burn-perplexity").join("kernels").join(build))
}

/// Measures the operations of a pass of `source` on card `index`; see [`mod@bench`].
///
/// # Errors
/// See [`ModelError`].
pub fn measure(
    source: &dyn TextSource,
    route: Route,
    shape: PassShape,
    kv: Option<&KvOptions>,
    index: usize,
) -> Result<Operations, ModelError> {
    bench::measure::<Cuda<f32, i32>>(source, route, shape, kv, &CudaDevice::new(index))
}
