//! The text configuration: every number the forward pass needs, taken from the artifact or checkpoint.

/// What mixes tokens in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerType {
    /// Gated DeltaNet (`linear_attention`).
    LinearAttention,
    /// Gated grouped-query attention (`full_attention`).
    FullAttention,
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
    Moe {
        /// Experts `E`.
        num_experts: usize,
        /// Experts per token `K`.
        num_experts_per_tok: usize,
        /// Inner width of a routed expert.
        moe_intermediate_size: usize,
        /// Inner width of the shared expert.
        shared_expert_intermediate_size: usize,
    },
}

/// A `qwen3_5` text model.
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
}
