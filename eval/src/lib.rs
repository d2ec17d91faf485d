//! Corpora, window plans, scoring, statistics and reports. Knows no tensors.

pub mod aggregate;
pub mod corpus;
pub mod evaluate;
pub mod files;
pub mod fingerprint;
pub mod humanize;
pub mod manifest;
pub mod output;
pub mod progress;
pub mod scorer;
pub mod shard;
pub mod text;
pub mod uncertainty;
pub mod windows;
