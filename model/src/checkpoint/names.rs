//! Which elements of which checkpoint tensor make up a logical parameter.

use std::ops::Range;

use crate::config::{FeedForwardConfig, TextConfig};
use crate::parameters::Parameter;

/// Elements of a tensor, in the order of the parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Selection {
    /// A flat element range.
    Range(Range<usize>),
    /// Of `2 * blocks` blocks of `block` elements, every second one: the even ones (`half` 0) or the odd ones (1).
    EverySecond { block: usize, half: usize, blocks: usize },
    /// `[channels, 1, taps]` read as `[taps, channels]`.
    TapMajor { channels: usize, taps: usize },
}

impl Selection {
    /// The consecutive element ranges of the tensor that make up the parameter; `None` when its elements are scattered.
    pub(super) fn runs(&self) -> Option<Vec<Range<usize>>> {
        match self {
            Self::Range(range) => Some(vec![range.clone()]),
            Self::EverySecond { block, half, blocks } => {
                let run = |number: usize| (2 * number + half) * block..(2 * number + half + 1) * block;
                Some((0..*blocks).map(run).collect())
            }
            Self::TapMajor { .. } => None,
        }
    }
}

/// A tensor that may hold a parameter.
#[derive(Debug, Clone)]
pub(super) struct Origin {
    /// Name without the checkpoint's prefix; `lm_head.weight` has none.
    pub(super) tensor: String,
    pub(super) shape: Vec<usize>,
    pub(super) selection: Selection,
}

impl Origin {
    fn whole(tensor: String, shape: &[usize]) -> Self {
        Self::rows(tensor, shape, 0..shape[0])
    }

    /// Rows of the first axis. Saturating: a shape too large to exist fails the comparison with the file's shape.
    fn rows(tensor: String, shape: &[usize], rows: Range<usize>) -> Self {
        let row = shape[1..]
            .iter()
            .fold(1usize, |product, extent| product.saturating_mul(*extent));
        let range = rows.start.saturating_mul(row)..rows.end.saturating_mul(row);
        Self {
            tensor,
            shape: shape.to_vec(),
            selection: Selection::Range(range),
        }
    }
}

/// Name of the output head, which has no prefix.
pub(super) const LM_HEAD: &str = "lm_head.weight";
/// Name of the indexer's projection in a block.
const INDEXER: &str = "self_attn.indexer.index_qk_proj.weight";
/// Name of the embedding behind the prefix.
pub(super) const EMBEDDING: &str = "embed_tokens.weight";

/// The tensors that may hold `parameter`, the usual one first.
pub(super) fn origins(config: &TextConfig, parameter: &Parameter) -> Vec<Origin> {
    let shape = &parameter.shape;
    let layer = |tensor: &str| match parameter.layer {
        Some(layer) => format!("layers.{layer}.{tensor}"),
        None => tensor.to_owned(),
    };
    let whole = |tensor: &str| vec![Origin::whole(layer(tensor), shape)];
    let expert = |fused: &str, separate: &str, experts: usize, fused_rows: usize, first_row: usize| {
        let number = parameter.expert.unwrap_or(0);
        let (rows, columns) = (shape[0], shape[1]);
        let begin = number
            .saturating_mul(fused_rows)
            .saturating_add(first_row)
            .saturating_mul(columns);
        let fused = Origin {
            tensor: layer(&format!("mlp.experts.{fused}")),
            shape: vec![experts, fused_rows, columns],
            selection: Selection::Range(begin..begin.saturating_add(rows.saturating_mul(columns))),
        };
        vec![
            fused,
            Origin::whole(layer(&format!("mlp.experts.{number}.{separate}.weight")), shape),
        ]
    };
    let experts = match &config.feed_forward {
        FeedForwardConfig::Moe(moe) => moe.num_experts,
        FeedForwardConfig::Dense { .. } => 0,
    };
    match parameter.role {
        "token_embedding" => whole(EMBEDDING),
        "output_head" if config.tie_word_embeddings => whole(EMBEDDING),
        "output_head" => whole(LM_HEAD),
        "final_norm" => whole("norm.weight"),
        "input_norm" => whole("input_layernorm.weight"),
        "post_attention_norm" => whole("post_attention_layernorm.weight"),
        "attention/query" => vec![query_or_gate(config, layer("self_attn.q_proj.weight"), shape, 0)],
        "attention/gate" => vec![query_or_gate(config, layer("self_attn.q_proj.weight"), shape, 1)],
        "attention/key" => whole("self_attn.k_proj.weight"),
        "attention/value" => whole("self_attn.v_proj.weight"),
        "attention/query_norm" => whole("self_attn.q_norm.weight"),
        "attention/key_norm" => whole("self_attn.k_norm.weight"),
        "attention/output" => whole("self_attn.o_proj.weight"),
        "gdn/query" => vec![mixed(config, layer("linear_attn.in_proj_qkv.weight"), shape, 0)],
        "gdn/key" => vec![mixed(config, layer("linear_attn.in_proj_qkv.weight"), shape, 1)],
        "gdn/value" => vec![mixed(config, layer("linear_attn.in_proj_qkv.weight"), shape, 2)],
        "gdn/z" => whole("linear_attn.in_proj_z.weight"),
        "gdn/a_projection" => whole("linear_attn.in_proj_a.weight"),
        "gdn/b_projection" => whole("linear_attn.in_proj_b.weight"),
        "gdn/a_log" => whole("linear_attn.A_log"),
        "gdn/dt_bias" => whole("linear_attn.dt_bias"),
        "gdn/norm" => whole("linear_attn.norm.weight"),
        "gdn/output" => whole("linear_attn.out_proj.weight"),
        "gdn/convolution" => vec![tap_major(layer("linear_attn.conv1d.weight"), shape)],
        "mlp/gate" => whole("mlp.gate_proj.weight"),
        "mlp/up" => whole("mlp.up_proj.weight"),
        "mlp/down" => whole("mlp.down_proj.weight"),
        "moe/router" => whole("mlp.gate.weight"),
        "moe/shared_score" => whole("mlp.shared_expert_gate.weight"),
        "moe/experts/gate" => expert("gate_up_proj", "gate_proj", experts, shape[0].saturating_mul(2), 0),
        "moe/experts/up" => expert("gate_up_proj", "up_proj", experts, shape[0].saturating_mul(2), shape[0]),
        "moe/experts/down" => expert("down_proj", "down_proj", experts, shape[0], 0),
        "moe/shared/gate" => whole("mlp.shared_expert.gate_proj.weight"),
        "moe/shared/up" => whole("mlp.shared_expert.up_proj.weight"),
        "moe/shared/down" => whole("mlp.shared_expert.down_proj.weight"),
        "final_mixer/norm" => whole("hyper_connection_mixer.hc_norm.weight"),
        "final_mixer/down" => whole("hyper_connection_mixer.input_mix_weight_down.weight"),
        "final_mixer/up" => whole("hyper_connection_mixer.input_mix_weight_up.weight"),
        "attn_hc/norm" => whole("attn_hyper_connection.hc_norm.weight"),
        "attn_hc/down" => whole("attn_hyper_connection.input_mix_weight_down.weight"),
        "attn_hc/up" => whole("attn_hyper_connection.input_mix_weight_up.weight"),
        "attn_hc/inject" => whole("attn_hyper_connection.block_inject_weight.weight"),
        "mlp_hc/norm" => whole("mlp_hyper_connection.hc_norm.weight"),
        "mlp_hc/down" => whole("mlp_hyper_connection.input_mix_weight_down.weight"),
        "mlp_hc/up" => whole("mlp_hyper_connection.input_mix_weight_up.weight"),
        "mlp_hc/inject" => whole("mlp_hyper_connection.block_inject_weight.weight"),
        "attention/index_query" => vec![indexer(config, layer(INDEXER), shape, 0)],
        "attention/index_key" => vec![indexer(config, layer(INDEXER), shape, 1)],
        "attention/index_query_norm" => whole("self_attn.indexer.q_layernorm.weight"),
        "attention/index_key_norm" => whole("self_attn.indexer.k_layernorm.weight"),
        "ple/key_projection" => whole("ple.key_proj.weight"),
        "ple/value_projection" => whole("ple.value_proj.weight"),
        "ple/key_norm" => whole("ple.norm_key.weight"),
        "ple/query_norm" => whole("ple.norm_query.weight"),
        "ple/conv_norm" => whole("ple.norm_conv.weight"),
        "ple/convolution" => vec![tap_major(layer("ple.conv1d.weight"), shape)],
        role => unreachable!("the parameter list has no role {role}"),
    }
}

/// `q_proj` holds, head by head, the head's query rows and then its gate rows.
fn query_or_gate(config: &TextConfig, tensor: String, shape: &[usize], half: usize) -> Origin {
    let head_dim = config.attention.as_ref().map_or(1, |attention| attention.head_dim);
    let (rows, columns) = (shape[0], shape[1]);
    let selection = Selection::EverySecond {
        block: head_dim.saturating_mul(columns),
        half,
        blocks: rows / head_dim,
    };
    Origin {
        tensor,
        shape: vec![rows.saturating_mul(2), columns],
        selection,
    }
}

/// A depthwise convolution `[channels, 1, taps]`.
fn tap_major(tensor: String, shape: &[usize]) -> Origin {
    let (taps, channels) = (shape[0], shape[1]);
    Origin {
        tensor,
        shape: vec![channels, 1, taps],
        selection: Selection::TapMajor { channels, taps },
    }
}

/// `index_qk_proj` holds all index query rows, then the index key's.
fn indexer(config: &TextConfig, tensor: String, shape: &[usize], part: usize) -> Origin {
    let (heads, width) = config
        .flash_next
        .as_ref()
        .map_or((0, 0), |dims| (dims.indexer.num_heads, dims.indexer.head_dim));
    let first = part * heads.saturating_mul(width);
    let rows = heads.saturating_add(1).saturating_mul(width);
    Origin::rows(tensor, &[rows, shape[1]], first..first.saturating_add(shape[0]))
}

/// `in_proj_qkv` holds all query rows, all key rows, all value rows.
fn mixed(config: &TextConfig, tensor: String, shape: &[usize], part: usize) -> Origin {
    let (keys, channels) = config
        .delta_net
        .as_ref()
        .map_or((0, 0), |delta_net| (delta_net.key_dim(), delta_net.conv_dim()));
    let first = part * keys;
    Origin::rows(tensor, &[channels, shape[1]], first..first + shape[0])
}
