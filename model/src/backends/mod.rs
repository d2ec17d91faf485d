//! The only place where the model meets concrete backends: one file each, so that each is compiled once.

#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "flex")]
pub mod flex;
#[cfg(feature = "ndarray")]
pub mod ndarray;
#[cfg(feature = "vulkan")]
pub mod vulkan;
