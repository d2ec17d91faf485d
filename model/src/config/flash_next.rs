//! What the record of Qwen3.8-Flash-Next (`qwen4_exp`) has beyond the family's: hyper-connections, the indexer of its
//! sparse attention, the n-gram embedding and its table.
//!
//! The record is closed and complete: attention, linear attention and experts are always there. Every `full_attention`
//! layer is sparse attention with an indexer; checkpoints call it by other names.

use serde_json::{Map, Value, json};

use super::artifact::{self, Record};
use super::hugging_face::copy;
use super::{ConfigError, LayerType, TextConfig};
use crate::ngram::{BLOCK_BYTES, NgramHash, VolumeGeometry};

/// `architectures[0]` and `model_type`.
pub(super) const NAMES: (&str, &str) = ("Qwen4ExpForCausalLM", "qwen4_exp_text");
/// The member that describes the n-gram volume.
pub(super) const TABLE: &str = "ngram_table";
/// The only format of a volume's rows.
const ROW_FORMAT: &str = "fp8_e4m3fn";
/// The class default of the hash's seed, which checkpoints omit.
const DEFAULT_SEED: u64 = 1234;
/// The class default of a checkpoint's number of table shards.
const DEFAULT_PARTS: u64 = 512;

const MEMBERS: [&str; 20] = [
    "hc_count",
    "hc_lowrank",
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
    "output_gate_type",
    "norm_topk_prob",
    "ple_layer_ids",
    "ple_embed_dim",
    "ple_conv_kernel_size",
    "ngram_size",
    "heads_per_ngram",
    "ngram_vocab_size_base",
    "make_ngram_vocab_size_divisible_by",
    "seed",
    "split_ngram_parts",
    "eos_token_id",
    TABLE,
];

/// Dimensions of Qwen3.8-Flash-Next beyond those of the family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlashNextConfig {
    /// Residual streams `S` of the hyper-connections.
    pub streams: usize,
    /// Inner width `R` of the hyper-connections' mixing weights.
    pub low_rank: usize,
    /// The indexer of the attention layers.
    pub indexer: IndexerConfig,
    /// Activation of the Gated DeltaNet's output gate.
    pub output_gate: OutputGate,
    /// The layer that takes the n-gram embedding in.
    pub ple: PleConfig,
    /// The n-gram hash.
    pub ngram: NgramConfig,
    /// Which n-gram volume belongs to an artifact; `None` for a checkpoint, which has the table among its weights.
    pub volume_id: Option<[u8; 16]>,
}

/// Dimensions of the indexer, which has one key head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexerConfig {
    /// Query heads.
    pub num_heads: usize,
    /// Features per head.
    pub head_dim: usize,
    /// Tokens a query attends to at most, beside the incomplete block; a multiple of `ratio`.
    pub budget: usize,
    /// Tokens per block.
    pub ratio: usize,
}

/// Activation of an output gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputGate {
    /// `sigmoid(z)`.
    Sigmoid,
    /// `z sigmoid(z)`.
    Silu,
}

impl OutputGate {
    /// `sigmoid` or `silu`, as configurations spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sigmoid => "sigmoid",
            Self::Silu => "silu",
        }
    }
}

/// Where and how the n-gram embedding enters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PleConfig {
    /// The block before whose mixer it enters, counted from 0; a linear-attention block.
    pub layer: usize,
    /// Width of the embedding, all heads together.
    pub embed_dim: usize,
    /// Taps of the dilated convolution.
    pub conv_kernel_size: usize,
}

/// The n-gram hash's parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgramConfig {
    /// Longest n-gram; orders 2 to this one are looked up.
    pub size: usize,
    /// Rows looked up per order.
    pub heads_per_order: usize,
    /// Lower bound of every head's number of rows.
    pub vocab_base: u64,
    /// The table's rows are padded to a multiple of this.
    pub divisible_by: u64,
    /// Seed of the multipliers.
    pub seed: u64,
    /// Shards of the table in a checkpoint.
    pub parts: usize,
    /// The token that ends an n-gram's history.
    pub eos_token_id: u32,
}

impl NgramConfig {
    /// Rows looked up per token.
    pub fn heads(&self) -> usize {
        (self.size - 1) * self.heads_per_order
    }
}

/// Reads the whole record of a model of this kind.
pub(super) fn parse(record: &Record) -> Result<TextConfig, ConfigError> {
    record.refuse_unknown(&[
        &artifact::COMMON,
        &artifact::ATTENTION,
        &artifact::LINEAR_ATTENTION,
        &artifact::MOE_FFN,
        &MEMBERS,
    ])?;
    let layers = record.count("num_hidden_layers")?;
    let layer_types = artifact::layer_types(record, layers)?;
    let attention = artifact::attention(record)?;
    let delta_net = artifact::delta_net(record)?;
    let feed_forward = artifact::moe(record)?;
    let vocab_size = record.count("vocab_size")?;
    for (field, supported) in [("tie_word_embeddings", false), ("norm_topk_prob", true)] {
        if record.boolean(field)? != supported {
            return Err(record.invalid(field, format!("{supported}")));
        }
    }
    let indexer = indexer(record)?;
    if attention.rotary_dim() > indexer.head_dim {
        return Err(record.invalid(
            "indexer_head_dim",
            format!("at least the {} rotated features", attention.rotary_dim()),
        ));
    }
    let streams = record.count("hc_count")?;
    if streams < 2 {
        return Err(record.invalid("hc_count", "at least 2 streams"));
    }
    let hidden_size = record.count("hidden_size")?;
    artifact::require_product("hc_count * hidden_size", &[streams, hidden_size])?;
    let ngram = ngram(record, vocab_size)?;
    let ple = ple(record, &layer_types, ngram.heads())?;
    let mut config = TextConfig {
        hidden_size,
        vocab_size,
        max_position_embeddings: record.count("max_position_embeddings")?,
        tie_word_embeddings: false,
        rms_norm_eps: record.positive_f32("rms_norm_eps")?,
        layer_types,
        attention: Some(attention),
        delta_net: Some(delta_net),
        feed_forward,
        flash_next: Some(Box::new(FlashNextConfig {
            streams,
            low_rank: record.count("hc_lowrank")?,
            indexer,
            output_gate: output_gate(record)?,
            ple,
            ngram,
            volume_id: None,
        })),
    };
    if let (Some(table), Some(flash_next)) = (record.members.get(TABLE), &mut config.flash_next) {
        let geometry = flash_next.geometry(vocab_size);
        flash_next.volume_id = Some(volume_id(table, &geometry)?);
    }
    Ok(config)
}

fn indexer(record: &Record) -> Result<IndexerConfig, ConfigError> {
    if record.count("indexer_kv_heads")? != 1 {
        return Err(record.invalid("indexer_kv_heads", "1"));
    }
    let indexer = IndexerConfig {
        num_heads: record.count("indexer_n_heads")?,
        head_dim: record.count("indexer_head_dim")?,
        budget: record.count("indexer_budget")?,
        ratio: record.count("indexer_compress_ratio")?,
    };
    artifact::require_multiple(
        ("indexer_budget", indexer.budget),
        ("indexer_compress_ratio", indexer.ratio),
    )?;
    Ok(indexer)
}

fn output_gate(record: &Record) -> Result<OutputGate, ConfigError> {
    match record.string("output_gate_type")? {
        "sigmoid" => Ok(OutputGate::Sigmoid),
        "silu" => Ok(OutputGate::Silu),
        _ => Err(record.invalid("output_gate_type", "`sigmoid` or `silu`")),
    }
}

fn ngram(record: &Record, vocab_size: usize) -> Result<NgramConfig, ConfigError> {
    let ngram = NgramConfig {
        size: record.count("ngram_size")?,
        heads_per_order: record.count("heads_per_ngram")?,
        vocab_base: record.count("ngram_vocab_size_base")? as u64,
        divisible_by: record.count("make_ngram_vocab_size_divisible_by")? as u64,
        seed: record.unsigned("seed")?,
        parts: record.count("split_ngram_parts")?,
        eos_token_id: u32::try_from(record.unsigned("eos_token_id")?)
            .ok()
            .filter(|id| (*id as usize) < vocab_size)
            .ok_or_else(|| record.invalid("eos_token_id", format!("an id below `vocab_size` = {vocab_size}")))?,
    };
    // Bounds that keep a senseless number from computing primes for hours; the published ones are 3 and 8.
    const MOST: usize = 64;
    for (field, value, least) in [
        ("ngram_size", ngram.size, 2),
        ("heads_per_ngram", ngram.heads_per_order, 1),
    ] {
        if !(least..=MOST).contains(&value) {
            return Err(record.invalid(field, format!("from {least} to {MOST}")));
        }
    }
    Ok(ngram)
}

fn ple(record: &Record, layer_types: &[LayerType], heads: usize) -> Result<PleConfig, ConfigError> {
    const EXPECTED: &str = "an array of one block number, counted from 1, of a linear-attention block";
    let ids = record.get("ple_layer_ids", EXPECTED)?.as_array().map(Vec::as_slice);
    let layer = match ids {
        Some([id]) => id.as_u64().and_then(|id| usize::try_from(id).ok()?.checked_sub(1)),
        _ => None,
    };
    let layer = layer.filter(|layer| layer_types.get(*layer) == Some(&LayerType::LinearAttention));
    let embed_dim = record.count("ple_embed_dim")?;
    artifact::require_multiple(
        ("ple_embed_dim", embed_dim),
        ("(ngram_size - 1) * heads_per_ngram", heads),
    )?;
    if embed_dim / heads > BLOCK_BYTES {
        return Err(record.invalid(
            "ple_embed_dim",
            format!("at most {BLOCK_BYTES} features for each of the {heads} heads"),
        ));
    }
    let conv_kernel_size = record.count("ple_conv_kernel_size")?;
    if conv_kernel_size < 2 {
        return Err(record.invalid("ple_conv_kernel_size", "at least 2 taps"));
    }
    Ok(PleConfig {
        layer: layer.ok_or_else(|| record.invalid("ple_layer_ids", EXPECTED))?,
        embed_dim,
        conv_kernel_size,
    })
}

/// The id of a volume whose description must be the one that the hash implies.
fn volume_id(table: &Value, geometry: &VolumeGeometry) -> Result<[u8; 16], ConfigError> {
    let members = table.as_object().ok_or_else(|| ConfigError::Invalid {
        field: TABLE.into(),
        found: artifact::shorten(table),
        expected: "an object".into(),
    })?;
    let record = Record {
        members,
        prefix: "ngram_table.",
    };
    let numbers = table_numbers(geometry);
    let known: Vec<&str> = numbers.iter().map(|(field, _)| *field).collect();
    record.refuse_unknown(&[&known, &["format", "volume_id"]])?;
    if record.string("format")? != ROW_FORMAT {
        return Err(record.invalid("format", format!("`{ROW_FORMAT}`")));
    }
    for (field, value) in numbers {
        if record.unsigned(field)? != value {
            return Err(record.invalid(field, format!("{value}, by the n-gram hash of this configuration")));
        }
    }
    parse_id(record.string("volume_id")?).ok_or_else(|| record.invalid("volume_id", "32 hex digits"))
}

fn table_numbers(geometry: &VolumeGeometry) -> [(&'static str, u64); 7] {
    [
        ("rows", geometry.rows),
        ("row_bytes", geometry.row_bytes as u64),
        ("rows_per_block", geometry.rows_per_block()),
        ("block_bytes", BLOCK_BYTES as u64),
        ("header_bytes", BLOCK_BYTES as u64),
        ("blocks", geometry.blocks()),
        ("file_bytes", geometry.file_bytes()),
    ]
}

fn parse_id(digits: &str) -> Option<[u8; 16]> {
    if digits.len() != 32 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u128::from_str_radix(digits, 16).ok().map(u128::to_be_bytes)
}

impl FlashNextConfig {
    /// Elements, and bytes in a volume, of a table row.
    pub fn row_width(&self) -> usize {
        self.ple.embed_dim / self.ngram.heads()
    }

    /// Width `W` of the residual streams together.
    pub fn residual_width(&self, hidden_size: usize) -> usize {
        self.streams * hidden_size
    }

    /// The volume that holds this model's table.
    pub fn geometry(&self, vocab_size: usize) -> VolumeGeometry {
        VolumeGeometry {
            rows: NgramHash::new(&self.ngram, vocab_size).rows(),
            row_bytes: self.row_width(),
        }
    }

    /// Adds the members of this kind to the record of `vocab_size` rows.
    pub(super) fn record(&self, record: &mut Value) {
        let vocab_size = record["vocab_size"].as_u64().unwrap_or(0) as usize;
        let members = json!({
            "hc_count": self.streams,
            "hc_lowrank": self.low_rank,
            "indexer_n_heads": self.indexer.num_heads,
            "indexer_kv_heads": 1,
            "indexer_head_dim": self.indexer.head_dim,
            "indexer_budget": self.indexer.budget,
            "indexer_compress_ratio": self.indexer.ratio,
            "output_gate_type": self.output_gate.name(),
            "norm_topk_prob": true,
            "ple_layer_ids": [self.ple.layer + 1],
            "ple_embed_dim": self.ple.embed_dim,
            "ple_conv_kernel_size": self.ple.conv_kernel_size,
            "ngram_size": self.ngram.size,
            "heads_per_ngram": self.ngram.heads_per_order,
            "ngram_vocab_size_base": self.ngram.vocab_base,
            "make_ngram_vocab_size_divisible_by": self.ngram.divisible_by,
            "seed": self.ngram.seed,
            "split_ngram_parts": self.ngram.parts,
            "eos_token_id": self.ngram.eos_token_id,
        });
        for (field, value) in members.as_object().into_iter().flatten() {
            record[field] = value.clone();
        }
        if let Some(id) = self.volume_id {
            let mut table = json!({"format": ROW_FORMAT});
            for (field, value) in table_numbers(&self.geometry(vocab_size)) {
                table[field] = value.into();
            }
            table["volume_id"] = format!("{:032x}", u128::from_be_bytes(id)).into();
            record[TABLE] = table;
        }
    }
}

/// Checkpoints name the sparse attention itself.
pub(super) fn rename_layer_types(layer_types: &mut Value) {
    for name in layer_types.as_array_mut().into_iter().flatten() {
        if matches!(name.as_str(), Some("qwen_sparse_attention" | "indexed_attention")) {
            *name = LayerType::FullAttention.name().into();
        }
    }
}

/// Copies the members of this kind from a checkpoint's configuration; what it omits has the class's default.
pub(super) fn copy_members(root: &Map<String, Value>, text: &Map<String, Value>, record: &mut Map<String, Value>) {
    for field in MEMBERS.into_iter().filter(|field| *field != TABLE) {
        copy(text, field, record);
    }
    if !record.contains_key("output_gate_type") {
        let activation = text.get("hidden_act").filter(|name| !name.is_null());
        record.insert("output_gate_type".into(), activation.cloned().unwrap_or("silu".into()));
    }
    for (field, default) in [
        ("norm_topk_prob", json!(true)),
        ("seed", json!(DEFAULT_SEED)),
        ("split_ngram_parts", json!(DEFAULT_PARTS)),
    ] {
        record.entry(field).or_insert(default);
    }
    if !record.contains_key("eos_token_id") {
        copy(root, "eos_token_id", record);
    }
    // Of a list of stop tokens the first one ends an n-gram's history.
    if let Some(first) = record.get("eos_token_id").and_then(|ids| ids.as_array()?.first()) {
        let first = first.clone();
        record.insert("eos_token_id".into(), first);
    }
}
