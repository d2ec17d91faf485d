//! Geometries of the published models.
//!
//! All have 256-wide attention heads of which a quarter rotates, 128-wide delta-net heads, a convolution over 4 tokens,
//! and full attention in every fourth layer.

use crate::config::{
    AttentionConfig, DeltaNetConfig, FeedForwardConfig, FlashNextConfig, IndexerConfig, LayerType, MoeConfig,
    NgramConfig, OutputGate, PleConfig, TextConfig,
};

/// Every how many layers one is full attention; it is the last of its group.
const FULL_ATTENTION_INTERVAL: usize = 4;
/// Rows of the embedding, and ids of the tokenizer, of every published model.
const PUBLISHED_VOCABULARY: (usize, usize) = (248_320, 248_077);

/// One geometry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preset {
    /// Name on the command line.
    pub name: &'static str,
    /// Layers unless told otherwise.
    pub layers: usize,
    hidden_size: usize,
    /// Attention heads: of queries, of keys and values.
    heads: (usize, usize),
    /// Delta-net heads: of keys, of values.
    delta_heads: (usize, usize),
    feed_forward: FeedForwardConfig,
    tied: bool,
    /// Rows of the embedding, and ids that the tokenizer has.
    vocabulary: (usize, usize),
    positions: usize,
    /// Whether it is Qwen3.8-Flash-Next, of which there is one geometry.
    flash_next: bool,
}

impl Preset {
    /// The published lower bound of every head's rows of the n-gram table: 320,001,536 rows, a volume of 52.4 GB.
    pub const PUBLISHED_NGRAM_BASE: u64 = 20_000_000;
    /// The same unless told otherwise: a volume of 2.6 GB.
    pub const NGRAM_BASE: u64 = 1_000_000;

    /// Every preset, from small to large.
    pub const ALL: [Self; 7] = [
        // The demo model's: small enough for a test.
        Self {
            vocabulary: (8320, 8195),
            positions: 32_768,
            ..Self::dense("demo", 8, 256, (2, 1), (1, 2), 512, true)
        },
        Self::dense("qwen3.5-0.8b", 24, 1024, (8, 2), (16, 16), 3584, true),
        Self::dense("qwen3.5-2b", 24, 2048, (8, 2), (16, 16), 6144, true),
        Self::dense("qwen3.5-9b", 32, 4096, (16, 4), (16, 32), 12_288, false),
        Self::dense("qwen3.8-27b", 64, 5120, (24, 4), (16, 48), 17_408, false),
        Self {
            feed_forward: FeedForwardConfig::Moe(MoeConfig {
                num_experts: 256,
                num_experts_per_tok: 8,
                moe_intermediate_size: 512,
                shared_expert_intermediate_size: 512,
            }),
            ..Self::dense("qwen3.6-35b-a3b", 40, 2048, (16, 2), (16, 32), 0, false)
        },
        Self {
            feed_forward: FeedForwardConfig::Moe(MoeConfig {
                num_experts: 512,
                num_experts_per_tok: 10,
                moe_intermediate_size: 640,
                shared_expert_intermediate_size: 640,
            }),
            flash_next: true,
            ..Self::dense("qwen3.8-flash-next", 48, 2560, (24, 2), (16, 48), 0, false)
        },
    ];

    const fn dense(
        name: &'static str,
        layers: usize,
        hidden_size: usize,
        heads: (usize, usize),
        delta_heads: (usize, usize),
        intermediate_size: usize,
        tied: bool,
    ) -> Self {
        Self {
            name,
            layers,
            hidden_size,
            heads,
            delta_heads,
            feed_forward: FeedForwardConfig::Dense { intermediate_size },
            tied,
            vocabulary: PUBLISHED_VOCABULARY,
            positions: 262_144,
            flash_next: false,
        }
    }

    /// The preset of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|preset| preset.name == name)
    }

    /// Ids that the tokenizer has; the embedding has more rows.
    pub fn public_tokens(&self) -> usize {
        self.vocabulary.1
    }

    /// Whether its artifacts have an n-gram volume beside them.
    pub fn has_ngrams(&self) -> bool {
        self.flash_next
    }

    /// The fewest layers that a configuration of this kind has.
    pub fn fewest_layers(&self) -> usize {
        // N-grams enter in the second one.
        if self.flash_next { 2 } else { 1 }
    }

    /// The configuration with this many layers; `ngram_base` bounds every head's rows of an n-gram table from below.
    pub fn config(&self, layers: usize, ngram_base: u64) -> TextConfig {
        let kind = |layer: usize| match (layer + 1) % FULL_ATTENTION_INTERVAL {
            0 => LayerType::FullAttention,
            _ => LayerType::LinearAttention,
        };
        TextConfig {
            hidden_size: self.hidden_size,
            vocab_size: self.vocabulary.0,
            max_position_embeddings: self.positions,
            tie_word_embeddings: self.tied,
            rms_norm_eps: 1e-6,
            layer_types: (0..layers).map(kind).collect(),
            attention: Some(AttentionConfig {
                num_heads: self.heads.0,
                num_kv_heads: self.heads.1,
                head_dim: 256,
                rope_theta: 1e7,
                partial_rotary_factor: 0.25,
                mrope_section: [11, 11, 10],
            }),
            delta_net: Some(DeltaNetConfig {
                num_key_heads: self.delta_heads.0,
                key_head_dim: 128,
                num_value_heads: self.delta_heads.1,
                value_head_dim: 128,
                conv_kernel_dim: 4,
            }),
            feed_forward: self.feed_forward.clone(),
            flash_next: self.flash_next.then(|| Box::new(flash_next(ngram_base))),
        }
    }
}

/// What the published Qwen3.8-Flash-Next has beyond the family.
fn flash_next(ngram_base: u64) -> FlashNextConfig {
    FlashNextConfig {
        streams: 4,
        low_rank: 320,
        indexer: IndexerConfig {
            num_heads: 4,
            head_dim: 128,
            budget: 2048,
            ratio: 4,
        },
        output_gate: OutputGate::Sigmoid,
        ple: PleConfig {
            layer: 1,
            embed_dim: 2560,
            conv_kernel_size: 4,
        },
        ngram: NgramConfig {
            size: 3,
            heads_per_order: 8,
            vocab_base: ngram_base,
            divisible_by: 128,
            seed: 1234,
            parts: 128,
            eos_token_id: 248_044,
        },
        volume_id: None,
    }
}
