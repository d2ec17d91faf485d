//! Artifacts, checkpoints, numeric formats and the text forward pass of the Qwen3.5 family.

pub mod artifact;
pub mod checkpoint;
pub mod config;
pub mod formats;
pub mod parameters;
pub mod source;
pub mod tokenizer;
