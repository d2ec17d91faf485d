//! One file per codec. A file declares its variants and holds the coders that no earlier file has.

pub mod bf16;
pub mod fp8;
pub mod int8;
pub mod k4v2;
pub mod k8v4;
pub mod kivi;
pub mod nvfp4;
pub mod rk2v4_e8;
pub mod rk4v4;
pub mod rk4v4_e8;
pub mod rk8v4;
pub mod turbo;
pub mod vq2;
