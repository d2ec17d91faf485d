//! The logical parameters of Qwen3.8-Flash-Next.
//!
//! Order: embedding, head, final mixer, then block by block the mixer's hyper-connection, the n-gram injection where it
//! is, the mixer, the feed-forward's hyper-connection and the experts. With `S` streams of width `H`, `W = S H` and the
//! hyper-connections' inner width `R`. There are no other norms between blocks and none at the end.
//!
//! An artifact stores the routed experts of a block as one bank, `moe/experts` `[E, H, I]`; a checkpoint has their
//! matrices one by one, and the table of the n-grams among its tensors, whose scale is then not a parameter of its own.

use super::{Parameter, RequiredFormat, attention_parameters, delta_net_parameters};
use crate::config::{FeedForwardConfig, FlashNextConfig, LayerType, MoeConfig, TextConfig};
use crate::formats::nvfp4_expert::Projection;

/// The role of a bank of routed experts.
pub const EXPERT_BANK: &str = "moe/experts";
/// The role of the scale of the n-gram table.
pub const NGRAM_SCALE: &str = "ple/ngram_scale";

/// Every parameter of a model with `dims`, in declaration order.
pub(super) fn parameters<'a>(
    config: &'a TextConfig,
    dims: &'a FlashNextConfig,
) -> impl Iterator<Item = Parameter> + 'a {
    let embedding = vec![config.vocab_size, config.hidden_size];
    let width = dims.residual_width(config.hidden_size);
    [
        Parameter::global("token_embedding", embedding.clone()).exactly(RequiredFormat::Bf16),
        Parameter::global("output_head", embedding).reads("final_hidden"),
        Parameter::global("final_mixer/norm", vec![width]).exactly(RequiredFormat::Bf16),
        Parameter::global("final_mixer/down", vec![dims.low_rank, width]).reads("final_mixer/input"),
        Parameter::global("final_mixer/up", vec![width, dims.low_rank]).reads("final_mixer/mix_activation"),
    ]
    .into_iter()
    .chain((0..config.layer_types.len()).flat_map(move |layer| layer_parameters(config, dims, layer)))
}

/// The name of one matrix of routed expert `expert` of block `layer`.
pub fn expert_matrix(layer: usize, expert: usize, projection: Projection) -> String {
    let projection = match projection {
        Projection::Gate => "gate",
        Projection::Up => "up",
        Projection::Down => "down",
    };
    format!("text/layers/{layer}/{EXPERT_BANK}/{expert}/{projection}")
}

/// What a checkpoint has in place of `parameter`.
pub(crate) fn in_checkpoint(parameter: Parameter) -> Vec<Parameter> {
    match (parameter.role, parameter.layer, &*parameter.shape) {
        (EXPERT_BANK, Some(layer), &[experts, hidden, inner]) => (0..experts)
            .flat_map(|expert| {
                let matrix = |role, shape| Parameter::of_expert(layer, expert, role, shape);
                [
                    matrix("moe/experts/gate", vec![inner, hidden]).reads("ffn_input"),
                    matrix("moe/experts/up", vec![inner, hidden]).reads("ffn_input"),
                    matrix("moe/experts/down", vec![hidden, inner]).reads(&format!("moe/experts/{expert}/product")),
                ]
            })
            .collect(),
        (NGRAM_SCALE, ..) => Vec::new(),
        _ => vec![parameter],
    }
}

fn layer_parameters(config: &TextConfig, dims: &FlashNextConfig, layer: usize) -> Vec<Parameter> {
    const ATTENTION: HyperConnection = HyperConnection {
        roles: ["attn_hc/norm", "attn_hc/down", "attn_hc/up", "attn_hc/inject"],
        inputs: ["attn_hc/input", "attn_hc/mix_activation"],
    };
    const FEED_FORWARD: HyperConnection = HyperConnection {
        roles: ["mlp_hc/norm", "mlp_hc/down", "mlp_hc/up", "mlp_hc/inject"],
        inputs: ["mlp_hc/input", "mlp_hc/mix_activation"],
    };
    let mut parameters = Vec::from(hyper_connection(config, dims, layer, &ATTENTION));
    if layer == dims.ple.layer {
        parameters.extend(ple_parameters(config, dims, layer));
    }
    // The configuration's parser guarantees both groups.
    match (config.layer_types[layer], &config.attention, &config.delta_net) {
        (LayerType::FullAttention, Some(attention), _) => {
            parameters.extend(attention_parameters(config, attention, layer));
            parameters.extend(indexer_parameters(config, dims, layer));
        }
        (LayerType::LinearAttention, _, Some(delta_net)) => {
            parameters.extend(delta_net_parameters(config, delta_net, layer));
        }
        (kind, _, _) => panic!("a configuration with a {} block has no such group", kind.name()),
    }
    parameters.extend(hyper_connection(config, dims, layer, &FEED_FORWARD));
    parameters.extend(expert_parameters(config, layer));
    parameters
}

struct HyperConnection {
    /// Norm, down, up, inject.
    roles: [&'static str; 4],
    /// Of down and inject; of up.
    inputs: [&'static str; 2],
}

fn hyper_connection(
    config: &TextConfig,
    dims: &FlashNextConfig,
    layer: usize,
    names: &HyperConnection,
) -> [Parameter; 4] {
    let width = dims.residual_width(config.hidden_size);
    let [norm, down, up, inject] = names.roles;
    let matrix = |role, rows, columns| Parameter::of_layer(layer, role, vec![rows, columns]);
    [
        Parameter::of_layer(layer, norm, vec![width]).exactly(RequiredFormat::Bf16),
        matrix(down, dims.low_rank, width).reads(names.inputs[0]),
        matrix(up, width, dims.low_rank).reads(names.inputs[1]),
        matrix(inject, dims.streams, width).reads(names.inputs[0]),
    ]
}

fn indexer_parameters(config: &TextConfig, dims: &FlashNextConfig, layer: usize) -> [Parameter; 4] {
    let width = dims.indexer.head_dim;
    let projection = |role, rows| Parameter::of_layer(layer, role, vec![rows, config.hidden_size]).reads("mixer_input");
    let norm = |role| Parameter::of_layer(layer, role, vec![width]).exactly(RequiredFormat::Bf16);
    [
        projection("attention/index_query", dims.indexer.num_heads * width),
        projection("attention/index_key", width),
        norm("attention/index_query_norm"),
        norm("attention/index_key_norm"),
    ]
}

fn ple_parameters(config: &TextConfig, dims: &FlashNextConfig, layer: usize) -> [Parameter; 7] {
    let width = dims.residual_width(config.hidden_size);
    let exact = |role, shape| Parameter::of_layer(layer, role, shape).exactly(RequiredFormat::Bf16);
    let projection = |role, rows| {
        let shape = vec![rows, dims.ple.embed_dim];
        Parameter::of_layer(layer, role, shape).reads("ple/embeddings")
    };
    [
        projection("ple/key_projection", width),
        projection("ple/value_projection", config.hidden_size),
        exact("ple/key_norm", vec![width]),
        exact("ple/query_norm", vec![width]),
        exact("ple/conv_norm", vec![width]),
        exact("ple/convolution", vec![dims.ple.conv_kernel_size, width]),
        exact(NGRAM_SCALE, vec![1]),
    ]
}

fn expert_parameters(config: &TextConfig, layer: usize) -> Vec<Parameter> {
    let hidden = config.hidden_size;
    let FeedForwardConfig::Moe(MoeConfig {
        num_experts,
        moe_intermediate_size: inner,
        shared_expert_intermediate_size: shared,
        ..
    }) = config.feed_forward
    else {
        panic!("a configuration of this kind has experts");
    };
    let of_layer = |role, rows, columns| Parameter::of_layer(layer, role, vec![rows, columns]);
    vec![
        of_layer("moe/router", num_experts, hidden).reads("ffn_input"),
        of_layer("moe/shared_score", 1, hidden).reads("ffn_input"),
        of_layer("moe/shared/gate", shared, hidden).reads("ffn_input"),
        of_layer("moe/shared/up", shared, hidden).reads("ffn_input"),
        of_layer("moe/shared/down", hidden, shared).reads("moe/shared/product"),
        Parameter::of_layer(layer, EXPERT_BANK, vec![num_experts, hidden, inner])
            .exactly(RequiredFormat::Nvfp4Mul)
            .reads("ffn_input"),
    ]
}
