//! The logical parameters of a text model: names, shapes, required formats and inputs.
//!
//! Qwen3.8-Flash-Next has its own list. Order of the others: embedding, head, final norm, then block by block its norms, mixer and feed-forward. With `P` =
//! `text/layers/<i>/`, `q = Hq D`, `kv = Hkv D`, `Kd = Nk Dk`, `Vd = Nv Dv`, `C = 2 Kd + Vd`; matrices are `[out, in]`.

mod flash_next;

pub(crate) use flash_next::in_checkpoint;
pub use flash_next::{EXPERT_BANK, NGRAM_SCALE, expert_matrix};

use crate::config::{AttentionConfig, DeltaNetConfig, FeedForwardConfig, LayerType, MoeConfig, TextConfig};

/// The formats a parameter may be stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequiredFormat {
    /// Any format whose shape rules fit.
    Any,
    /// `bf16` only.
    Bf16,
    /// `fp32` only.
    Fp32,
    /// `nvfp4_mul` only.
    Nvfp4Mul,
}

/// One named weight of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Full name, such as `text/layers/3/attention/query`.
    pub name: String,
    /// What it is, without block and expert number: `attention/query`, `moe/experts/gate`, `token_embedding`.
    pub role: &'static str,
    /// The block it belongs to.
    pub layer: Option<usize>,
    /// The routed expert it belongs to.
    pub expert: Option<usize>,
    /// Extents in C order.
    pub shape: Vec<usize>,
    /// Formats an artifact may store it in.
    pub format: RequiredFormat,
    /// The activation it multiplies, if it is a projection.
    pub input: Option<String>,
}

impl Parameter {
    /// Number of elements, or `None` when it does not fit.
    pub fn elements(&self) -> Option<usize> {
        self.shape
            .iter()
            .try_fold(1usize, |product, extent| product.checked_mul(*extent))
    }

    fn global(role: &'static str, shape: Vec<usize>) -> Self {
        Self {
            name: format!("text/{role}"),
            role,
            layer: None,
            expert: None,
            shape,
            format: RequiredFormat::Any,
            input: None,
        }
    }

    fn of_layer(layer: usize, role: &'static str, shape: Vec<usize>) -> Self {
        let name = format!("text/layers/{layer}/{role}");
        Self {
            name,
            layer: Some(layer),
            ..Self::global(role, shape)
        }
    }

    /// A projection of expert `expert`; `role` is `moe/experts/<projection>`.
    fn of_expert(layer: usize, expert: usize, role: &'static str, shape: Vec<usize>) -> Self {
        let projection = role.rsplit('/').next().unwrap_or(role);
        let name = format!("text/layers/{layer}/moe/experts/{expert}/{projection}");
        Self {
            name,
            expert: Some(expert),
            ..Self::of_layer(layer, role, shape)
        }
    }

    fn exactly(mut self, format: RequiredFormat) -> Self {
        self.format = format;
        self
    }

    /// Multiplies the activation `input` of its block, or of the whole model.
    fn reads(mut self, input: &str) -> Self {
        self.input = Some(match self.layer {
            Some(layer) => format!("text/layers/{layer}/{input}"),
            None => format!("text/{input}"),
        });
        self
    }
}

/// Every parameter of `config`, in declaration order; lazily, so that a senseless size costs nothing.
pub fn parameters(config: &TextConfig) -> Box<dyn Iterator<Item = Parameter> + '_> {
    match &config.flash_next {
        Some(dims) => Box::new(flash_next::parameters(config, dims)),
        None => Box::new(family_parameters(config)),
    }
}

fn family_parameters(config: &TextConfig) -> impl Iterator<Item = Parameter> + '_ {
    let embedding = vec![config.vocab_size, config.hidden_size];
    [
        Parameter::global("token_embedding", embedding.clone()),
        Parameter::global("output_head", embedding).reads("final_hidden"),
        Parameter::global("final_norm", vec![config.hidden_size]).exactly(RequiredFormat::Bf16),
    ]
    .into_iter()
    .chain((0..config.layer_types.len()).flat_map(|layer| layer_parameters(config, layer)))
}

fn layer_parameters(config: &TextConfig, layer: usize) -> impl Iterator<Item = Parameter> + '_ {
    let norm = |role| {
        std::iter::once(Parameter::of_layer(layer, role, vec![config.hidden_size]).exactly(RequiredFormat::Bf16))
    };
    // The configuration's parser guarantees the group that a block's kind needs.
    let mixer = match (config.layer_types[layer], &config.attention, &config.delta_net) {
        (LayerType::FullAttention, Some(attention), _) => attention_parameters(config, attention, layer),
        (LayerType::LinearAttention, _, Some(delta_net)) => delta_net_parameters(config, delta_net, layer),
        (kind, _, _) => panic!("a configuration with a {} block has no such group", kind.name()),
    };
    norm("input_norm")
        .chain(mixer)
        .chain(norm("post_attention_norm"))
        .chain(feed_forward_parameters(config, layer))
}

fn attention_parameters(config: &TextConfig, attention: &AttentionConfig, layer: usize) -> Vec<Parameter> {
    let hidden = config.hidden_size;
    let queries = attention.num_heads * attention.head_dim;
    let keys = attention.num_kv_heads * attention.head_dim;
    let projection = |role, rows| Parameter::of_layer(layer, role, vec![rows, hidden]).reads("mixer_input");
    let norm = |role| Parameter::of_layer(layer, role, vec![attention.head_dim]).exactly(RequiredFormat::Bf16);
    vec![
        projection("attention/query", queries),
        projection("attention/key", keys),
        projection("attention/gate", queries),
        projection("attention/value", keys),
        norm("attention/query_norm"),
        norm("attention/key_norm"),
        Parameter::of_layer(layer, "attention/output", vec![hidden, queries]).reads("attention/gated_output"),
    ]
}

fn delta_net_parameters(config: &TextConfig, delta_net: &DeltaNetConfig, layer: usize) -> Vec<Parameter> {
    let hidden = config.hidden_size;
    let heads = delta_net.num_value_heads;
    let projection = |role, rows| Parameter::of_layer(layer, role, vec![rows, hidden]).reads("mixer_input");
    let exact = |role, shape, format| Parameter::of_layer(layer, role, shape).exactly(format);
    vec![
        projection("gdn/query", delta_net.key_dim()),
        projection("gdn/key", delta_net.key_dim()),
        projection("gdn/value", delta_net.value_dim()),
        projection("gdn/z", delta_net.value_dim()),
        projection("gdn/a_projection", heads),
        projection("gdn/b_projection", heads),
        exact("gdn/a_log", vec![heads], RequiredFormat::Fp32),
        exact("gdn/dt_bias", vec![heads], RequiredFormat::Fp32),
        exact(
            "gdn/convolution",
            vec![delta_net.conv_kernel_dim, delta_net.conv_dim()],
            RequiredFormat::Bf16,
        ),
        exact("gdn/norm", vec![delta_net.value_head_dim], RequiredFormat::Bf16),
        Parameter::of_layer(layer, "gdn/output", vec![hidden, delta_net.value_dim()]).reads("gdn/gated_output"),
    ]
}

fn feed_forward_parameters(config: &TextConfig, layer: usize) -> Box<dyn Iterator<Item = Parameter>> {
    let hidden = config.hidden_size;
    let of_layer = move |role, rows, columns| Parameter::of_layer(layer, role, vec![rows, columns]);
    match config.feed_forward {
        FeedForwardConfig::Dense {
            intermediate_size: inner,
        } => Box::new(
            [
                of_layer("mlp/gate", inner, hidden).reads("ffn_input"),
                of_layer("mlp/up", inner, hidden).reads("ffn_input"),
                of_layer("mlp/down", hidden, inner).reads("mlp/product"),
            ]
            .into_iter(),
        ),
        FeedForwardConfig::Moe(MoeConfig {
            num_experts,
            moe_intermediate_size: inner,
            shared_expert_intermediate_size: shared,
            ..
        }) => {
            let routing = [
                of_layer("moe/router", num_experts, hidden).reads("ffn_input"),
                of_layer("moe/shared_score", 1, hidden).reads("ffn_input"),
            ];
            let experts = (0..num_experts).flat_map(move |expert| {
                let product = format!("moe/experts/{expert}/product");
                let of_expert = |role, rows, columns| Parameter::of_expert(layer, expert, role, vec![rows, columns]);
                [
                    of_expert("moe/experts/gate", inner, hidden).reads("ffn_input"),
                    of_expert("moe/experts/up", inner, hidden).reads("ffn_input"),
                    of_expert("moe/experts/down", hidden, inner).reads(&product),
                ]
            });
            let shared = [
                of_layer("moe/shared/gate", shared, hidden).reads("ffn_input"),
                of_layer("moe/shared/up", shared, hidden).reads("ffn_input"),
                of_layer("moe/shared/down", hidden, shared).reads("moe/shared/product"),
            ];
            Box::new(routing.into_iter().chain(experts).chain(shared))
        }
    }
}
