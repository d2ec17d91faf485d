//! Corpora, window plans, scoring, statistics and reports. Knows no tensors.
//!
//! Read texts, plan windows, score them with anything that implements [`scorer::CausalScorer`], build a report:
//!
//! ```
//! use perplexity_eval::corpus::CorpusText;
//! use perplexity_eval::evaluate::{Options, evaluate};
//! use perplexity_eval::report::{Report, RunInfo};
//! use perplexity_eval::scorer::{CausalScorer, ScoreError, ScoreRequest, WindowScores, WindowTokens};
//! use perplexity_eval::windows::{Protocol, WindowKind};
//!
//! /// Gives each of the 256 bytes the same probability.
//! struct Uniform;
//!
//! impl CausalScorer for Uniform {
//!     fn public_tokens(&self) -> usize {
//!         256
//!     }
//!     fn score(&mut self, windows: &[WindowTokens], _: &ScoreRequest) -> Result<Vec<WindowScores>, ScoreError> {
//!         let score = |w: &WindowTokens| vec![-(256f32.ln()); w.positions()];
//!         Ok(windows.iter().map(|w| WindowScores { logprobs: score(w), ..Default::default() }).collect())
//!     }
//! }
//!
//! let directory = tempfile::tempdir()?;
//! std::fs::write(directory.path().join("notes.txt"), "It was a dark and stormy night")?;
//! let protocol = Protocol::new(WindowKind::Sliding, 16, 8)?;
//! let plan = CorpusText::from_text(&directory.path().join("notes.txt"))?
//!     .plan(protocol, None, |text| Ok::<_, String>(text.bytes().map(u32::from).collect()))?;
//! let results = evaluate(&plan, &mut Uniform, &Options { batch: 2, ..Options::default() }, &mut ())?;
//! assert!((results.overall.perplexity().unwrap() - 256.0).abs() < 1e-3);
//! Report::build(&plan, &results, RunInfo::default()).write(directory.path())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod aggregate;
pub mod compare;
pub mod corpus;
pub mod divergence;
pub mod evaluate;
mod exact_json;
pub mod files;
pub mod fingerprint;
pub mod foreign;
pub mod gate;
pub mod hidden;
pub mod humanize;
pub mod llama_base;
pub mod manifest;
pub mod merge;
pub mod output;
pub mod progress;
mod recording;
mod records;
pub mod report;
pub mod resume;
pub mod scorer;
pub mod shard;
pub mod statistics;
pub mod table;
pub mod text;
pub mod tokens_json;
pub mod top_tokens;
pub mod uncertainty;
pub mod windows;
