//! Artifacts, checkpoints, numeric formats and the text forward pass of the Qwen3.5 family.

pub mod artifact;
pub mod backends;
pub mod bindings;
pub mod checkpoint;
pub mod config;
pub mod convert;
pub mod formats;
pub mod inspect;
pub mod layers;
pub mod parameters;
pub mod qwen3_5;
pub mod route;
pub mod rows;
pub mod scorer;
pub mod signature;
pub mod source;
pub mod tokenizer;
