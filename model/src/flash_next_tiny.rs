//! A tiny Qwen3.8-Flash-Next with weights from a formula, small enough for a CPU and shaped so that every path of the
//! full model runs: sparse attention beyond 11 tokens, padded expert records, several blocks in the n-gram volume, tails.
//!
//! ```text
//! h(name)  = FNV-1a, 64 bits;   u_i = mix64(h(name) + i);   t_i = ((u_i >> 40) - 2^23) / 2^23
//! weight_i = bf16(f32(base + scale t_i))                              in C order, base and scale by role
//! code_i   = u_i & 15                   of "<expert matrix>/codes"
//! block scale word = 0x30 + u_i mod 16  of "<expert matrix>/scales"
//! matrix multiplier = 0.05 + 0.01 ((e + r) mod 3), input scale = (0.002, 0.002, 0.001)[r] (1 + 0.25 (e mod 4))
//! table word_i = (u_i & 0x80) | ((u_i >> 8) mod 0x50)                 of "ngram/table"
//! ```

use std::collections::BTreeMap;
use std::path::Path;

use perplexity_kernels::numeric::round_bf16;
use serde_json::{Value, json};

use crate::artifact::{Binding, Component, PendingFile, Use, Writer, WriterOptions};
use crate::config::{FlashNextConfig, TextConfig};
use crate::formats::nvfp4_expert::{self, MatrixWords, Projection};
use crate::formats::{self, EncodeMethod, Format, FormatError};
use crate::ngram::{VolumeError, VolumeWriter, mix64};
use crate::parameters::{EXPERT_BANK, Parameter, RequiredFormat, expert_matrix, parameters};
use crate::qwen4_exp::volume_path;
use crate::source::ActivationPolicy;
use crate::tokenizer::{CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG};

/// The id of the volume, `00 01 .. 0f`.
const VOLUME_ID: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// What to vary.
#[derive(Debug, Clone, Copy)]
pub struct TinyOptions {
    /// How matrices of any format are stored: bf16, q8 or FP8 rows.
    pub dense: Format,
    /// Whether the experts permit 4-bit activations and have the scales for them.
    pub four_bit: bool,
    /// Whether all rows of the n-gram table are zero.
    pub zero_table: bool,
    /// Whether the indexers' queries are zero, so that all blocks have equal scores.
    pub zero_index_queries: bool,
    /// Volume limit and id.
    pub writer: WriterOptions,
}

impl Default for TinyOptions {
    fn default() -> Self {
        Self {
            dense: Format::Bf16,
            four_bit: true,
            zero_table: false,
            zero_index_queries: false,
            writer: WriterOptions::default(),
        }
    }
}

/// A tiny model that cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum TinyError {
    /// The artifact.
    #[error(transparent)]
    Artifact(#[from] crate::artifact::ArtifactError),
    /// A weight.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The volume.
    #[error(transparent)]
    Volume(#[from] VolumeError),
}

/// The 64-bit FNV-1a hash of `name`.
pub fn fnv1a64(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |h, byte| {
        (h ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
    })
}

/// `u_i` of `name`, from `i = 0` on.
pub fn words(name: &str) -> impl Iterator<Item = u64> {
    let h = fnv1a64(name);
    (0..).map(move |i| mix64(h.wrapping_add(i)))
}

/// `count` weights `bf16(base + scale t_i)` of `name`.
pub fn weights(name: &str, base: f64, scale: f64, count: usize) -> Vec<f32> {
    let value = |u: u64| {
        let t = ((u >> 40) as f64 - 8_388_608.0) / 8_388_608.0;
        round_bf16((base + scale * t) as f32)
    };
    words(name).take(count).map(value).collect()
}

/// The configuration.
pub fn config() -> TextConfig {
    let record = json!({
        "architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text",
        "hidden_size": 32, "vocab_size": 96, "num_hidden_layers": 4, "max_position_embeddings": 4096,
        "tie_word_embeddings": false, "rms_norm_eps": 1e-6,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4,
        "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "norm_topk_prob": true,
        "hc_count": 4, "hc_lowrank": 8,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 8, "indexer_compress_ratio": 4,
        "output_gate_type": "sigmoid",
        "ple_layer_ids": [2], "ple_embed_dim": 48, "ple_conv_kernel_size": 4,
        "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 1009,
        "make_ngram_vocab_size_divisible_by": 16, "seed": 1234, "split_ngram_parts": 2, "eos_token_id": 95,
    });
    let config = TextConfig::from_hugging_face(&record);
    config.unwrap_or_else(|error| unreachable!("the record above is complete: {error}"))
}

/// The same with the volume's id, as the artifact records it.
fn with_volume(mut config: TextConfig) -> TextConfig {
    if let Some(dims) = &mut config.flash_next {
        dims.volume_id = Some(VOLUME_ID);
    }
    config
}

/// Writes the artifact `path` and its volume beside it.
///
/// # Errors
/// When a file exists already or cannot be written.
pub fn write(path: &Path, options: &TinyOptions) -> Result<(), TinyError> {
    let config = with_volume(config());
    let mut writer = Writer::new(options.writer);
    let mut contents: Vec<(usize, Vec<u8>)> = Vec::new();
    let mut roles = BTreeMap::new();
    for (role, text) in resources() {
        let object = writer.declare_resource(&format!("resource/text/{role}"), text.len() as u64)?;
        contents.push((object, text.into_bytes()));
        roles.insert(role.to_owned(), object);
    }
    let component = Component {
        config: config.to_artifact(),
        target: None,
        resources: roles,
        proposal: None,
    };
    writer.set_component("text", component);
    writer.metadata_mut().insert("name".into(), "flash-next-tiny".into());
    for parameter in parameters(&config) {
        let (format, bytes) = stored(&parameter, options)?;
        let shape: Vec<u64> = parameter.shape.iter().map(|extent| *extent as u64).collect();
        let object = writer.declare_tensor(&format!("weight/{}", parameter.name), format, &shape, 1)?;
        contents.push((object, bytes));
        writer.bind(&parameter.name, Binding::Whole { object });
        let is_bank = parameter.role == EXPERT_BANK;
        if is_bank && options.four_bit {
            let name = parameter.name.replace("experts", "expert_input_scales");
            let object = writer.declare_tensor(&format!("weight/{name}"), Format::Fp32, &[shape[0], 3], 1)?;
            let scales = (0..shape[0] as usize).flat_map(input_scales);
            contents.push((object, scales.flat_map(f32::to_le_bytes).collect()));
            writer.bind(&name, Binding::Whole { object });
        }
        if let Some(input) = parameter.input {
            let policy = match is_bank && options.four_bit {
                true => ActivationPolicy::AllowA4,
                false => ActivationPolicy::A16Only,
            };
            writer.add_use(Use {
                parameter: parameter.name,
                input,
                policy: Some(policy),
                auxiliaries: BTreeMap::new(),
            });
        }
    }
    let mut stream = writer.begin(path)?;
    for (object, bytes) in contents {
        stream.append(object, &bytes)?;
    }
    if let Some(dims) = &config.flash_next {
        stream.accompany(write_volume(
            &volume_path(path),
            dims,
            config.vocab_size,
            options.zero_table,
        )?);
    }
    stream.finish()?;
    Ok(())
}

/// Writes the volume; it has no name yet.
fn write_volume(
    path: &Path,
    dims: &FlashNextConfig,
    vocab_size: usize,
    zero: bool,
) -> Result<PendingFile, VolumeError> {
    let geometry = dims.geometry(vocab_size);
    let mut volume = VolumeWriter::create(path, geometry, VOLUME_ID)?;
    let mut words = words("ngram/table").map(|u| {
        if zero {
            0
        } else {
            (u & 0x80) as u8 | ((u >> 8) % 0x50) as u8
        }
    });
    for _ in 0..geometry.rows {
        let row: Vec<u8> = words.by_ref().take(geometry.row_bytes).collect();
        volume.append(&row)?;
    }
    volume.complete()
}

/// The scales of expert `expert`'s inputs.
fn input_scales(expert: usize) -> [f32; 3] {
    [0.002, 0.002, 0.001].map(|base: f64| (base * (1.0 + 0.25 * (expert % 4) as f64)) as f32)
}

/// A parameter's format and encoded bytes.
fn stored(parameter: &Parameter, options: &TinyOptions) -> Result<(Format, Vec<u8>), FormatError> {
    let shape: Vec<u64> = parameter.shape.iter().map(|extent| *extent as u64).collect();
    if parameter.role == EXPERT_BANK {
        return Ok((Format::Nvfp4Mul, bank(parameter.layer.unwrap_or(0), &shape)?));
    }
    let kept = matches!(
        parameter.role,
        "moe/router" | "moe/shared_score" | "gdn/a_projection" | "gdn/b_projection"
    );
    let format = match parameter.format {
        RequiredFormat::Fp32 => Format::Fp32,
        RequiredFormat::Any if !kept => options.dense,
        _ => Format::Bf16,
    };
    let method = match format {
        Format::Q8G32Fp16 => EncodeMethod::GroupedAbsmax,
        Format::Fp8E4m3fnRowBf16 => EncodeMethod::Fp8RowMaxabs,
        _ => EncodeMethod::CastDirect,
    };
    let (base, scale) = rule(parameter.role);
    let mut values = weights(&parameter.name, base, scale, parameter.shape.iter().product());
    if options.zero_index_queries && parameter.role == "attention/index_query" {
        values.fill(0.0);
    }
    Ok((format, formats::encode(format, method, &shape, &values)?))
}

/// Base and scale of the weights of a role.
fn rule(role: &str) -> (f64, f64) {
    match role {
        "token_embedding" => (0.0, 1.0),
        "output_head" => (0.0, 0.3),
        "gdn/norm" => (1.0, 0.2),
        "gdn/a_log" | "gdn/dt_bias" => (0.0, 1.0),
        "gdn/convolution" => (0.0, 0.5),
        "ple/convolution" => (0.0, 0.3),
        "ple/ngram_scale" => (0.125, 0.0),
        "moe/router" => (0.0, 0.3),
        "moe/shared_score" => (0.0, 0.2),
        _ if role.ends_with("norm") => (0.0, 0.2),
        _ if role.contains("hc/") || role.starts_with("final_mixer/") => match role.rsplit('/').next() {
            Some("down") => (0.0, 0.5),
            Some("up") => (0.0, 0.7),
            _ => (0.0, 0.3),
        },
        _ => (0.0, 0.25),
    }
}

/// The packed experts of block `layer`.
fn bank(layer: usize, shape: &[u64]) -> Result<Vec<u8>, FormatError> {
    let geometry = nvfp4_expert::Geometry::new(shape)?;
    let stored = |expert: usize, projection: Projection| {
        let name = expert_matrix(layer, expert, projection);
        let (rows, columns) = geometry.matrix(projection);
        let codes: Vec<u8> = words(&format!("{name}/codes"))
            .take(rows * columns)
            .map(|u| (u & 15) as u8)
            .collect();
        let codes: Vec<u8> = codes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|pair| pair[0] | pair[1] << 4)
            .collect();
        let scales: Vec<u8> = words(&format!("{name}/scales"))
            .take(rows * columns / nvfp4_expert::UNIT)
            .map(|u| 0x30 + (u % 16) as u8)
            .collect();
        (codes, scales)
    };
    let all: Vec<(Vec<u8>, Vec<u8>)> = (0..geometry.experts)
        .flat_map(|expert| Projection::ALL.map(|projection| stored(expert, projection)))
        .collect();
    nvfp4_expert::pack::<FormatError>(shape, |expert, projection| {
        let (codes, scales) = &all[3 * expert + projection as usize];
        Ok(MatrixWords {
            codes,
            scales,
            multiplier: (0.05 + 0.01 * ((expert + projection as usize) % 3) as f64) as f32,
        })
    })
}

/// One token per printable ASCII character, ids in order of the byte-level alphabet, then the end of text.
fn resources() -> [(&'static str, String); 4] {
    let characters = ('!'..='~').chain(['\u{120}']);
    let vocabulary: serde_json::Map<String, Value> = characters
        .enumerate()
        .map(|(id, character)| (character.to_string(), id.into()))
        .collect();
    let end = json!({
        "id": 95, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    });
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [end.clone()],
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    [
        (TOKENIZER, tokenizer.to_string()),
        (
            TOKENIZER_CONFIG,
            json!({"added_tokens_decoder": {"95": end}}).to_string(),
        ),
        (CHAT_TEMPLATE, "{# no chat template #}".to_owned()),
        (GENERATION_CONFIG, json!({"eos_token_id": 95}).to_string()),
    ]
}
