//! Artifacts, checkpoints, numeric formats and the text forward passes of the Qwen3.5 family and Qwen3.8-Flash-Next.

pub mod activations;
mod any_model;
pub mod artifact;
pub mod backends;
pub mod bindings;
pub mod calibrate;
pub mod checkpoint;
pub mod config;
pub mod convert;
pub mod experts;
pub mod flash_next_tiny;
pub mod formats;
pub mod inspect;
pub mod layers;
pub mod memory;
pub mod ngram;
pub mod parameters;
pub mod qwen3_5;
pub mod qwen4_exp;
pub mod rope;
pub mod route;
pub mod rows;
pub mod scorer;
pub mod signature;
pub mod source;
pub mod stored;
pub mod tokenizer;
