//! Prefill passes: how many tokens of a window go through the model at once.
//!
//! An engine's prompt attention works on blocks of 128 query rows of one head, one block per multiprocessor of its card. A
//! wave is as many tokens as fit there at once, `128 floor(multiprocessors / heads)`. With an INT8, NVFP4, FP8 or K8V4 KV
//! cache the engine rounds a pass down to whole waves; a pass below one wave keeps its size. A report is comparable only
//! with the same passes, so they are rounded here too, wherever they run.

use perplexity_model::config::TextConfig;
use serde_json::Value;

use perplexity_eval::report::Settings;

use crate::args::RouteArgs;
use crate::kv::KvCache;
use crate::options::{Device, UsageError};

const DEFAULT_TOKENS: u32 = 1024;
/// A pass of 1,024 tokens is too short to keep a card busy between two readings of scores. Rounded down to the waves of 24 or 16
/// heads this still holds the default window: a second pass of its last tokens would cost 3 %.
const DEFAULT_TOKENS_ON_CARDS: u32 = 5120;
/// Query rows of one block of prompt attention.
const BLOCK: u32 = 128;
/// Multiprocessors of the card that published figures come from: waves of 896 tokens at 24 heads, 1,280 at 16.
const MULTIPROCESSORS: usize = 170;

/// Passes as typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prefill {
    pub(crate) tokens: usize,
    wave: Option<usize>,
    /// Whether a pass is a whole window, whatever the waves.
    whole: bool,
}

impl Prefill {
    /// Resolves what was typed.
    ///
    /// # Errors
    /// When a size is no multiple of 128.
    pub(crate) fn resolve(args: &RouteArgs, device: Device) -> Result<Self, UsageError> {
        let wave = args
            .attention_wave
            .map(|tokens| whole_blocks("--attention-wave", tokens));
        Ok(Self {
            wave: wave.transpose()?,
            ..Self::of(args.prefill_chunk, device)?
        })
    }

    /// Passes of `tokens`, or of the device's default size, in the engine's waves.
    ///
    /// # Errors
    /// When the size is no multiple of 128.
    pub(crate) fn of(tokens: Option<u32>, device: Device) -> Result<Self, UsageError> {
        let default = match device.index() {
            Some(_) => DEFAULT_TOKENS_ON_CARDS,
            None => DEFAULT_TOKENS,
        };
        Ok(Self {
            tokens: whole_blocks("--prefill-chunk", tokens.unwrap_or(default))?,
            wave: None,
            whole: false,
        })
    }

    /// One pass for every window of `context` tokens; the size typed is checked all the same.
    ///
    /// # Errors
    /// As [`Self::resolve`].
    pub(crate) fn whole_window(args: &RouteArgs, device: Device, context: usize) -> Result<Self, UsageError> {
        Ok(Self {
            tokens: context,
            whole: true,
            ..Self::resolve(args, device)?
        })
    }

    /// Tokens per pass as it runs.
    pub(crate) fn effective(self, kv: &KvCache, config: &TextConfig) -> usize {
        match self.wave(kv, config) {
            Some(wave) if self.tokens >= wave => self.tokens / wave * wave,
            _ => self.tokens,
        }
    }

    /// What was typed without effect.
    pub(crate) fn note(self, kv: &KvCache, config: &TextConfig) -> Option<String> {
        let unused = self.wave.is_some() && self.wave(kv, config).is_none();
        let note = "--attention-wave has no effect: passes are whole waves with an int8, nvfp4, fp8 or k8v4 KV cache, \
                    outside --lossless and --reference";
        unused.then(|| note.into())
    }

    /// Fills in what the report says.
    pub(crate) fn record(self, settings: &mut Settings, kv: &KvCache, config: &TextConfig) {
        settings.prefill_chunk_tokens = self.effective(kv, config) as u64;
        settings.options.insert("prefill-chunk".into(), self.tokens.into());
        let wave = self.wave(kv, config).map_or(Value::Null, Value::from);
        settings.options.insert("attention-wave".into(), wave);
    }

    /// Tokens of a wave, where passes are whole waves.
    fn wave(self, kv: &KvCache, config: &TextConfig) -> Option<usize> {
        let attention = config.attention.as_ref()?;
        let default = BLOCK as usize * (MULTIPROCESSORS / attention.num_heads).max(1);
        (kv.prefills_in_waves() && !self.whole).then(|| self.wave.unwrap_or(default))
    }
}

fn whole_blocks(option: &'static str, tokens: u32) -> Result<usize, UsageError> {
    if tokens == 0 || !tokens.is_multiple_of(BLOCK) {
        return Err(UsageError::OutOfRange {
            option,
            value: tokens,
            expected: format!("a multiple of {BLOCK}"),
        });
    }
    Ok(tokens as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::Parser;
    use perplexity_model::config::{AttentionConfig, FeedForwardConfig};
    use perplexity_model::route::Route;

    fn effective(heads: usize, line: &str) -> usize {
        let cli = Cli::try_parse_from(std::iter::once("burn-perplexity").chain(line.split_whitespace())).unwrap();
        let config = TextConfig {
            hidden_size: 1,
            vocab_size: 1,
            max_position_embeddings: 1,
            tie_word_embeddings: true,
            rms_norm_eps: 1e-6,
            layer_types: Vec::new(),
            attention: Some(AttentionConfig {
                num_heads: heads,
                num_kv_heads: 1,
                head_dim: 256,
                rope_theta: 1e7,
                partial_rotary_factor: 0.25,
                mrope_section: [11, 11, 10],
            }),
            delta_net: None,
            feed_forward: FeedForwardConfig::Dense { intermediate_size: 1 },
            flash_next: None,
        };
        let kv = KvCache::resolve(&cli.score.kv, Route::Normal).unwrap();
        Prefill::resolve(&cli.score.route, Device::Flex)
            .unwrap()
            .effective(&kv, &config)
    }

    /// Published: 24 heads on 170 multiprocessors run 4,096 as 3,584 and 1,024 as 896, and keep 4,480.
    #[test]
    fn passes_are_whole_waves_with_the_formats_of_fast_prompt_attention() {
        for format in ["int8", "fp8", "nvfp4", "nvfp4@single", "k8v4", "bf16;3=int8"] {
            for (typed, runs) in [
                ("", 896),
                ("--prefill-chunk 4096", 3584),
                ("--prefill-chunk 4480", 4480),
            ] {
                assert_eq!(
                    effective(24, &format!("--kv-dtype {format} {typed}")),
                    runs,
                    "{format} {typed}"
                );
            }
        }
        assert_eq!(
            effective(24, "--kv-dtype int8 --prefill-chunk 256"),
            256,
            "below one wave"
        );
        assert_eq!(effective(16, "--kv-dtype int8 --prefill-chunk 2048"), 1280);
        assert_eq!(effective(24, "--kv-dtype int8 --attention-wave 640"), 640);
        assert_eq!(effective(24, "--kv-dtype int8 --attention-wave 128"), 1024);
        assert_eq!(
            effective(400, "--kv-dtype int8"),
            1024,
            "more heads than multiprocessors"
        );
    }

    #[test]
    fn other_formats_keep_the_pass() {
        for format in [
            "bf16",
            "vq2",
            "k4v2",
            "rk4v4",
            "int8 --use-original-int8-prefill-kernel",
        ] {
            assert_eq!(
                effective(24, &format!("--kv-dtype {format} --prefill-chunk 4096")),
                4096,
                "{format}"
            );
        }
    }
}
