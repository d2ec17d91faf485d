//! What the forward tests share: the fixtures' files and small helpers.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::collections::HashMap;
use std::path::PathBuf;

use perplexity_model::checkpoint::CheckpointSource;
use perplexity_model::config::TextConfig;
use perplexity_model::scorer::{Ask, Scorer, Window};
use perplexity_model::source::{SourceError, TextSource};
use safetensors::SafeTensors;

/// In the tree that cargo runs the tests in, which need not be the one they were built in.
pub fn data(path: &str) -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    PathBuf::from(package).join("../tests/data").join(path)
}

pub fn checkpoint(path: &str) -> CheckpointSource {
    CheckpointSource::open(&data(path)).unwrap()
}

pub fn json(path: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(data(path)).unwrap()).unwrap()
}

/// Tensors of a safetensors file as floats: float32, bfloat16 and int64.
pub fn tensors(path: &str) -> HashMap<String, Vec<f32>> {
    let bytes = std::fs::read(data(path)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .filter_map(|(name, view)| {
            let values = match view.dtype() {
                safetensors::Dtype::F32 => view
                    .data()
                    .as_chunks::<4>()
                    .0
                    .iter()
                    .map(|b| f32::from_le_bytes(*b))
                    .collect(),
                safetensors::Dtype::BF16 => view
                    .data()
                    .as_chunks::<2>()
                    .0
                    .iter()
                    .map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16))
                    .collect(),
                safetensors::Dtype::I64 => view
                    .data()
                    .as_chunks::<8>()
                    .0
                    .iter()
                    .map(|b| i64::from_le_bytes(*b) as f32)
                    .collect(),
                _ => return None,
            };
            Some((name.to_owned(), values))
        })
        .collect()
}

/// Total negative log-likelihood, summed in f64.
pub fn total_nll(scorer: &mut dyn Scorer, windows: &[Window]) -> f64 {
    let scores = scorer.score(windows, &Ask::default()).unwrap();
    scores
        .iter()
        .flat_map(|scores| &scores.logprobs)
        .map(|&lp| -f64::from(lp))
        .sum()
}

/// The sliding plan: windows of at most `context` tokens, each token but the first scored once, `stride` at a time.
pub fn sliding(ids: &[u32], context: usize, stride: usize) -> Vec<Window> {
    let first = ids.len().min(context);
    let mut windows = vec![Window {
        tokens: ids[..first].to_vec(),
        first_target: 1,
    }];
    let mut previous = first;
    while previous < ids.len() {
        let end = ids.len().min(previous + stride);
        let begin = end.saturating_sub(context);
        windows.push(Window {
            tokens: ids[begin..end].to_vec(),
            first_target: previous - begin,
        });
        previous = end;
    }
    windows
}

/// A source of generated weights; single parameters can be replaced.
pub struct Generated {
    pub config: TextConfig,
    pub replaced: HashMap<String, f32>,
}

impl Generated {
    pub fn new(config: TextConfig) -> Self {
        Self {
            config,
            replaced: HashMap::new(),
        }
    }

    /// Every element of `name` becomes `value`.
    pub fn with(mut self, name: &str, value: f32) -> Self {
        self.replaced.insert(name.into(), value);
        self
    }
}

impl TextSource for Generated {
    fn config(&self) -> &TextConfig {
        &self.config
    }

    fn name(&self) -> &str {
        "generated"
    }

    fn load(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>, SourceError> {
        let count = expected.iter().product();
        if let Some(&value) = self.replaced.get(name) {
            return Ok(vec![value; count]);
        }
        let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
        });
        let scale = if expected.len() == 1 {
            0.5
        } else {
            (expected[1] as f32).sqrt().recip()
        };
        let mut state = seed | 1;
        Ok((0..count)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                // bfloat16 values, as a checkpoint holds them.
                let value = ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale * 1.7;
                f32::from_bits(value.to_bits() & 0xffff_0000)
            })
            .collect())
    }

    fn resource(&self, _: &str) -> Result<Option<Vec<u8>>, SourceError> {
        Ok(None)
    }
}
