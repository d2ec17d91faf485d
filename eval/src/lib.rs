//! Corpora, window plans, scoring, statistics and reports. Knows no tensors.

pub mod scorer;
