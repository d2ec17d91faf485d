//! The text configuration: every number the forward pass needs, taken from the artifact or checkpoint.
//!
//! [`TextConfig::from_artifact`] is strict: a closed record in which an unknown or half-given group is an error.
//! [`TextConfig::from_hugging_face`] is lenient about what does not concern the text forward pass, refuses by name what
//! the forward pass would get wrong, and hands the rest, rewritten as an artifact record, to the strict parser.

use serde_json::Value;

mod artifact;
mod flash_next;
mod hugging_face;

pub(crate) use artifact::shorten;
pub use flash_next::{FlashNextConfig, IndexerConfig, NgramConfig, OutputGate, PleConfig};

/// A text configuration that cannot be used; fields are written as a path, such as `rope_parameters.rope_theta`.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// The configuration is not a JSON object.
    #[error("the text configuration is not a JSON object")]
    NotAnObject,
    /// The text is not JSON.
    #[error("the text configuration is not valid JSON: {0}")]
    Json(String),
    /// A field that the model needs is absent.
    #[error("the text configuration lacks `{field}`: expected {expected}")]
    Missing {
        /// The absent field.
        field: String,
        /// What it has to hold.
        expected: String,
    },
    /// A field that the record does not have, or not with this feed-forward kind.
    #[error("the text configuration has the unexpected member `{field}`")]
    Unknown {
        /// The member.
        field: String,
    },
    /// A field holds a value of the wrong kind or range.
    #[error("`{field}` of the text configuration is {found}: expected {expected}")]
    Invalid {
        /// The field.
        field: String,
        /// Its JSON text.
        found: String,
        /// What it has to hold.
        expected: String,
    },
    /// Fields that are right one by one do not fit one another.
    #[error("the text configuration is inconsistent: {0}")]
    Inconsistent(String),
    /// A feature that would change the numbers and is not implemented.
    #[error("`{field}` = {found} is not supported: {supported}")]
    Unsupported {
        /// The field.
        field: String,
        /// Its JSON text.
        found: String,
        /// What is supported instead.
        supported: String,
    },
}

/// What mixes tokens in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerType {
    /// Gated DeltaNet (`linear_attention`).
    LinearAttention,
    /// Gated grouped-query attention (`full_attention`).
    FullAttention,
}

impl LayerType {
    /// `linear_attention` or `full_attention`, as configurations spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::LinearAttention => "linear_attention",
            Self::FullAttention => "full_attention",
        }
    }
}

/// Dimensions of the gated full attention.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionConfig {
    /// Query heads `Hq`.
    pub num_heads: usize,
    /// Key and value heads `Hkv`; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Features per head `D`.
    pub head_dim: usize,
    /// Rotary base `theta`.
    pub rope_theta: f32,
    /// Share of `head_dim` that rotates.
    pub partial_rotary_factor: f32,
    /// Rotary pairs per position axis; they sum to `rotary_dim() / 2`.
    pub mrope_section: [usize; 3],
}

impl AttentionConfig {
    /// Rotated features `R = trunc(D * factor)`, the product taken in f64.
    pub fn rotary_dim(&self) -> usize {
        (self.head_dim as f64 * f64::from(self.partial_rotary_factor)) as usize
    }

    /// The position axis of rotary pair `pair`: axis 1 if `pair % 3 == 1` and `pair < 3 * mrope_section[1]`, axis 2 if
    /// `pair % 3 == 2` and `pair < 3 * mrope_section[2]`, otherwise axis 0. Text gives all axes the same position.
    pub fn rotary_axis(&self, pair: usize) -> usize {
        match pair % 3 {
            1 if pair < self.mrope_section[1].saturating_mul(3) => 1,
            2 if pair < self.mrope_section[2].saturating_mul(3) => 2,
            _ => 0,
        }
    }
}

/// Dimensions of the Gated DeltaNet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeltaNetConfig {
    /// Query and key heads `Nk`.
    pub num_key_heads: usize,
    /// Features per key head `Dk`.
    pub key_head_dim: usize,
    /// Value heads `Nv`; a multiple of `num_key_heads`.
    pub num_value_heads: usize,
    /// Features per value head `Dv`.
    pub value_head_dim: usize,
    /// Width `W` of the causal convolution.
    pub conv_kernel_dim: usize,
}

impl DeltaNetConfig {
    /// Width of all queries (or keys), `Kd = Nk * Dk`.
    pub fn key_dim(&self) -> usize {
        self.num_key_heads * self.key_head_dim
    }

    /// Width of all values, `Vd = Nv * Dv`.
    pub fn value_dim(&self) -> usize {
        self.num_value_heads * self.value_head_dim
    }

    /// Convolution channels, `C = 2 Kd + Vd`.
    pub fn conv_dim(&self) -> usize {
        2 * self.key_dim() + self.value_dim()
    }
}

/// The feed-forward half of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FeedForwardConfig {
    /// SwiGLU of one width.
    Dense {
        /// Inner width `I`.
        intermediate_size: usize,
    },
    /// Routed SwiGLU experts plus one gated shared expert.
    Moe(MoeConfig),
}

/// Dimensions of the mixture of experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoeConfig {
    /// Experts `E`.
    pub num_experts: usize,
    /// Experts per token `K`; at least 1, at most `num_experts`.
    pub num_experts_per_tok: usize,
    /// Inner width of a routed expert.
    pub moe_intermediate_size: usize,
    /// Inner width of the shared expert.
    pub shared_expert_intermediate_size: usize,
}

/// A text model of the family.
#[derive(Debug, Clone, PartialEq)]
pub struct TextConfig {
    /// Residual width `H`.
    pub hidden_size: usize,
    /// Rows of the embedding and of the output head; at least the tokenizer's id count.
    pub vocab_size: usize,
    /// Native position capacity.
    pub max_position_embeddings: usize,
    /// Whether the checkpoint shares head and embedding (descriptive).
    pub tie_word_embeddings: bool,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// One entry per block.
    pub layer_types: Vec<LayerType>,
    /// Present when any block is full attention.
    pub attention: Option<AttentionConfig>,
    /// Present when any block is linear attention.
    pub delta_net: Option<DeltaNetConfig>,
    /// The feed-forward kind of every block.
    pub feed_forward: FeedForwardConfig,
    /// What Qwen3.8-Flash-Next has beyond the family; `None` for any other model.
    pub flash_next: Option<Box<FlashNextConfig>>,
}

impl TextConfig {
    /// Reads `components.text.config` of an artifact.
    ///
    /// # Errors
    /// Every rule of the closed record; the first field at fault is named.
    pub fn from_artifact(config: &Value) -> Result<Self, ConfigError> {
        let config = artifact::parse(config)?;
        match &config.flash_next {
            Some(flash_next) if flash_next.volume_id.is_none() => Err(ConfigError::Missing {
                field: flash_next::TABLE.into(),
                expected: "the n-gram volume's geometry and id".into(),
            }),
            _ => Ok(config),
        }
    }

    /// Reads the `config.json` of a Hugging Face checkpoint, its text fields nested under `text_config` or not.
    ///
    /// # Errors
    /// A missing or wrong field, or a feature outside this model family, by name.
    pub fn from_hugging_face(config: &Value) -> Result<Self, ConfigError> {
        artifact::parse(&hugging_face::to_artifact_record(config)?)
    }

    /// The artifact record of this configuration; [`TextConfig::from_artifact`] reads it back unchanged.
    pub fn to_artifact(&self) -> Value {
        artifact::record(self)
    }

    /// Layers with full attention, which are those with a KV cache, ascending.
    pub fn attention_layers(&self) -> Vec<usize> {
        let layers = self.layer_types.iter().enumerate();
        layers
            .filter(|(_, kind)| **kind == LayerType::FullAttention)
            .map(|(layer, _)| layer)
            .collect()
    }

    /// `Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM` or `Qwen4ExpForCausalLM`.
    pub fn architecture(&self) -> &'static str {
        match (&self.flash_next, &self.feed_forward) {
            (Some(_), _) => flash_next::NAMES.0,
            (None, FeedForwardConfig::Dense { .. }) => artifact::DENSE.0,
            (None, FeedForwardConfig::Moe { .. }) => artifact::MOE.0,
        }
    }
}
