//! What can be known of a card before anything is put on it, and where its compiled kernels are kept between runs.

use std::path::Path;

use cubecl::config::cache::CacheConfig;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cudarc::driver::{result as driver, sys as cuda};
use cudarc::nvrtc;

/// A card that can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    /// Its own name.
    pub name: String,
    /// Major and minor compute capability.
    pub capability: (i32, i32),
    /// Bytes of its memory.
    pub memory: u64,
    /// Bytes nobody uses now.
    pub free: u64,
}

/// Why a card cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CardError {
    /// A library that the NVIDIA driver or CUDA installs.
    #[error("{library} was not found: {needed}")]
    LibraryMissing {
        /// File name.
        library: &'static str,
        /// What it is part of, in words.
        needed: &'static str,
    },
    /// Another number than the driver's.
    #[error("there is no card {index}: the driver finds {count}")]
    NoSuchCard {
        /// The number asked for.
        index: usize,
        /// Cards found.
        count: usize,
    },
    /// A driver call failed.
    #[error("{call} failed: {code}")]
    Call {
        /// The function.
        call: &'static str,
        /// What it answered.
        code: String,
    },
}

/// Looks at card `index`.
///
/// # Errors
/// When a library is missing, there is no such card, or the driver refuses.
pub fn card(index: usize) -> Result<Card, CardError> {
    let missing = |library, needed| Err(CardError::LibraryMissing { library, needed });
    // SAFETY: these only try to open the libraries.
    let (has_driver, has_compiler) = unsafe { (cuda::is_culib_present(), nvrtc::sys::is_culib_present()) };
    if !has_driver {
        return missing(
            "libcuda.so",
            "the NVIDIA driver is not installed, or not on the loader's path",
        );
    }
    if !has_compiler {
        return missing(
            "libnvrtc.so",
            "install CUDA's run-time compiler and put it on the loader's path",
        );
    }
    let failed = |call| {
        move |code: driver::DriverError| CardError::Call {
            call,
            code: format!("{code:?}"),
        }
    };
    driver::init().map_err(failed("cuInit"))?;
    let count = driver::device::get_count().map_err(failed("cuDeviceGetCount"))?;
    let count = usize::try_from(count).unwrap_or(0);
    if index >= count {
        return Err(CardError::NoSuchCard { index, count });
    }
    let device = driver::device::get(index as i32).map_err(failed("cuDeviceGet"))?;
    let attribute = |attribute| {
        // SAFETY: the handle was just returned by the driver.
        unsafe { driver::device::get_attribute(device, attribute) }.map_err(failed("cuDeviceGetAttribute"))
    };
    use cuda::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let capability = (attribute(MAJOR)?, attribute(MINOR)?);
    // SAFETY: the primary context of an existing device; it is what CubeCL uses too and stays for it.
    let (free, memory) = unsafe {
        let context = driver::primary_ctx::retain(device).map_err(failed("cuDevicePrimaryCtxRetain"))?;
        driver::ctx::set_current(context).map_err(failed("cuCtxSetCurrent"))?;
        driver::mem_get_info().map_err(failed("cuMemGetInfo"))?
    };
    Ok(Card {
        name: driver::device::get_name(device).map_err(failed("cuDeviceGetName"))?,
        capability,
        memory: memory as u64,
        free: free as u64,
    })
}

/// Keeps compiled kernels under `folder` from now on, unless a `cubecl.toml` names a place. To be called before the first
/// tensor is made; later calls have no effect. The files know kernels by name only: `folder` must be another one for every
/// build of this program and every kind of card.
pub fn keep_compiled_kernels(folder: &Path) {
    if CubeClRuntimeConfig::storage().lock().is_some() {
        return;
    }
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config
        .compilation
        .cache
        .get_or_insert(CacheConfig::File(folder.to_owned()));
    CubeClRuntimeConfig::set(config);
}
