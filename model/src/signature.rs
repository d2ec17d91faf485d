//! The prefill signature: a hash of what decides the cost and the code path of scoring, but not of weight values.
//!
//! SHA-256, as 64 lowercase hex digits, of one compact JSON object with keys in byte order: implementation,
//! architecture, dimensions, and for every text parameter in byte order of its name where it lies in which kind of
//! parent and which activations it permits. Ids, offsets and names of the model are not in it, so artifacts with equal
//! signatures differ at most in their weights.
//!
//! A checkpoint has no parents; each tensor counts as one. Formats that artifacts do not have count on from 11: `fp16`,
//! then FP8 with other scales.

use std::collections::HashMap;
use std::fmt::Write;

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::config::{AttentionConfig, FeedForwardConfig, FlashNextConfig, LayerType, TextConfig};
use crate::parameters::{Parameter, parameters};
use crate::source::{ActivationPolicy, SourceError, StoredPart, TextSource};

/// The prefill signature of `source`, whose tokenizer has `public_tokens` ids.
///
/// # Errors
/// When the storage of a parameter cannot be told.
pub fn prefill_signature(source: &dyn TextSource, public_tokens: usize) -> Result<String, SourceError> {
    let digest = Sha256::digest(signature_text(source, public_tokens)?);
    Ok(digest.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    }))
}

/// The text that is hashed.
///
/// # Errors
/// As [`prefill_signature`].
pub fn signature_text(source: &dyn TextSource, public_tokens: usize) -> Result<String, SourceError> {
    let config = source.config();
    let mut members = vec![("architecture", quoted(config.architecture()))];
    if let Some(attention) = &config.attention {
        let AttentionConfig {
            num_heads,
            num_kv_heads,
            head_dim,
            ..
        } = attention;
        members.push(("attention", format!("[{num_heads},{num_kv_heads},{head_dim}]")));
    }
    members.push(("ffn", feed_forward(&config.feed_forward)));
    if let Some(dims) = &config.flash_next {
        members.push(("flash_next", flash_next(dims)));
    }
    if let Some(gdn) = &config.delta_net {
        let extents = [
            gdn.num_key_heads,
            gdn.key_head_dim,
            gdn.num_value_heads,
            gdn.value_head_dim,
            gdn.conv_kernel_dim,
        ];
        members.push(("gdn", list(extents)));
    }
    members.push(("hidden_size", config.hidden_size.to_string()));
    let implementation = match config.flash_next {
        Some(_) => "qwen4_exp-prefill-1",
        None => "qwen3_5-prefill-1",
    };
    members.push(("implementation", quoted(implementation)));
    members.push((
        "layer_types",
        list(
            config
                .layer_types
                .iter()
                .map(|kind| u8::from(*kind == LayerType::LinearAttention)),
        ),
    ));
    members.push(("num_hidden_layers", config.layer_types.len().to_string()));
    members.push(("public_token_count", public_tokens.to_string()));
    members.push(("rms_norm_eps", number(f64::from(config.rms_norm_eps))));
    if let Some(attention) = &config.attention {
        members.push(("rope", rope(attention)));
    }
    members.push(("vocab_size", config.vocab_size.to_string()));
    members.push(("weights", weights(source, config)?));
    let members: Vec<String> = members
        .iter()
        .map(|(key, value)| format!("\"{key}\":{value}"))
        .collect();
    Ok(format!("{{{}}}", members.join(",")))
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn list(items: impl IntoIterator<Item = impl ToString>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    format!("[{}]", items.join(","))
}

fn feed_forward(feed_forward: &FeedForwardConfig) -> String {
    match feed_forward {
        FeedForwardConfig::Dense { intermediate_size } => list([*intermediate_size]),
        FeedForwardConfig::Moe(moe) => list([
            moe.num_experts,
            moe.num_experts_per_tok,
            moe.moe_intermediate_size,
            moe.shared_expert_intermediate_size,
        ]),
    }
}

/// Streams and their inner width, the indexer, the n-gram injection and its table.
fn flash_next(dims: &FlashNextConfig) -> String {
    list([
        dims.streams,
        dims.low_rank,
        dims.indexer.num_heads,
        dims.indexer.head_dim,
        dims.indexer.budget,
        dims.indexer.ratio,
        dims.ple.layer,
        dims.ple.embed_dim,
        dims.ple.conv_kernel_size,
        dims.ngram.size,
        dims.ngram.heads_per_order,
        dims.ngram.vocab_base as usize,
    ])
}

/// `[theta, rotated features, [axis of each pair]]`.
fn rope(attention: &AttentionConfig) -> String {
    let rotary_dim = attention.rotary_dim();
    let axes = list((0..rotary_dim / 2).map(|pair| attention.rotary_axis(pair)));
    format!("[{},{rotary_dim},{axes}]", number(f64::from(attention.rope_theta)))
}

fn weights(source: &dyn TextSource, config: &TextConfig) -> Result<String, SourceError> {
    let mut sorted: Vec<Parameter> = parameters(config).collect();
    sorted.sort_unstable_by(|left, right| left.name.cmp(&right.name));
    let mut parents: HashMap<String, usize> = HashMap::new();
    let mut items = Vec::with_capacity(sorted.len());
    for parameter in &sorted {
        let stored = source.stored(&parameter.name)?;
        let parts = list(stored.parts.iter().map(|part| {
            let next = parents.len();
            let parent = *parents.entry(part.object.clone()).or_insert(next);
            part_record(part, parent, stored.elements)
        }));
        let mut uses = Vec::new();
        if let (Some(input), Some(policy)) = (&parameter.input, stored.policy) {
            let number = match policy {
                ActivationPolicy::A16Only => 0,
                ActivationPolicy::AllowA8 => 1,
                ActivationPolicy::AllowA4 => 2,
            };
            uses.push(format!(
                "[{},{number},{}]",
                quoted(input),
                stored.activation_divisor.is_some()
            ));
        }
        items.push(format!(
            "{{\"parts\":{parts},\"role\":{},\"shape\":{},\"uses\":{}}}",
            quoted(&parameter.name),
            list(&parameter.shape),
            list(uses)
        ));
    }
    Ok(list(items))
}

/// `[parent, begin, end, format, layout, parent shape, padded columns, group size]`.
fn part_record(part: &StoredPart, parent: usize, elements: u64) -> String {
    const PADDING: usize = 128;
    let (begin, end) = part.range.unwrap_or((0, elements));
    let columns = match part.object_shape.as_slice() {
        [_, columns] => *columns,
        _ => 0,
    };
    let padded = columns.next_multiple_of(PADDING);
    let (format, layout, padded_columns, group) = match part.format {
        "q4_g64_fp16" => (0, 0, padded, 64),
        "q5_g64_fp16" => (1, 0, padded, 64),
        "q6_g64_fp16" => (2, 0, padded, 64),
        "q8_g32_fp16" => (3, 0, padded, 32),
        "bf16" => (4, 1, columns, 0),
        "fp32" => (5, 1, columns, 0),
        "int32" => (6, 1, columns, 0),
        "nvfp4" => (7, 2, columns, 16),
        "fp8_e4m3fn_row_bf16" => (8, 3, columns, columns),
        "nvfp4_mul" => (9, 4, 0, 16),
        "fp8_e4m3fn_block128_f32" => (10, 5, 0, 0),
        "fp8_e4m3fn_row_f32" => (12, 3, columns, columns),
        "fp8_e4m3fn_row_fp16" => (13, 3, columns, columns),
        "fp8_e4m3fn_tensor" => (14, 3, columns, 0),
        "fp8_e4m3fn_block128_bf16" => (15, 5, 0, 0),
        "fp8_e4m3fn_block128_fp16" => (16, 5, 0, 0),
        _ => (11, 1, columns, 0),
    };
    format!(
        "[{parent},{begin},{end},{format},{layout},{},{padded_columns},{group}]",
        list(&part.object_shape)
    )
}

/// The shortest digits that read back as `value`: plain with `.0` or a fraction from 1e-4 up to 1e15, otherwise with an
/// exponent of at least two digits.
fn number(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..15).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') {
            plain
        } else {
            format!("{plain}.0")
        };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_a_point_or_an_exponent_of_two_digits() {
        for (value, text) in [
            (1e7, "10000000.0"),
            (0.25, "0.25"),
            (f64::from(1e-6f32), "9.999999974752427e-07"),
            (1e-6, "1e-06"),
            (1e-5, "1e-05"),
            (1e-4, "0.0001"),
            (1e15, "1e+15"),
            (123_456_789_012_345.0, "123456789012345.0"),
            (1.5e-100, "1.5e-100"),
        ] {
            assert_eq!(number(value), text);
        }
    }
}
