//! The only place where the model meets concrete backends: one file each, so that each is compiled once.

#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "flex")]
pub mod flex;
#[cfg(feature = "ndarray")]
pub mod ndarray;
#[cfg(feature = "vulkan")]
pub mod vulkan;

/// What a device says of itself before anything is loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its own name.
    pub name: Option<String>,
    /// Bytes of its memory that nobody uses.
    pub free_bytes: Option<u64>,
    /// Whether rows narrowed to FP8 meet FP8 weights code by code.
    pub multiplies_fp8: bool,
    /// Why it is slower than such a device can be, one sentence each.
    pub slower: Vec<String>,
}
