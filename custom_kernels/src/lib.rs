//! The operations a backend must offer to evaluate a Qwen3.5-family model.
//!
//! One folder per operation under `ops/`: `mod.rs` opens with the formula and holds the plain reference in burn tensor
//! operations, `host.rs` the CPU implementation on slices, `cube.rs` the CubeCL kernel.
