//! The operations a backend must offer to evaluate a Qwen3.5-family model.
//!
//! One folder per operation under `ops/`: `mod.rs` opens with the formula and holds the plain reference in burn tensor
//! operations, `host.rs` the CPU implementation on slices, `precise.rs` the formula in f64 for the routes that promise its
//! rounding, `cube.rs` the CubeCL kernel; `cuda/precise/` repeats the formulas in f64 on a card.
//! [`EvaluatorBackend`] gathers them; its method bodies are the references, so that any burn backend can evaluate, and a
//! backend overrides what it does better.

pub mod backend;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub mod cube;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub mod cube_backend;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod evaluation;
pub mod host;
mod host_precise;
pub mod numeric;
pub mod ops;
pub mod precise;
pub mod precision;

pub use backend::EvaluatorBackend;
pub use evaluation::Evaluation;
pub use precision::Precision;
