//! The parts of a report. `docs/report.md` describes each field.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::aggregate::Aggregate;
use crate::evaluate::ReferenceKind;
use crate::statistics::{KlDetail, KlFigures};
use crate::top_tokens::Provenance;
use crate::uncertainty::Uncertainty;
use crate::windows::WindowKind;

/// Which figure this is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metric {
    /// `fixed-window truncated-context causal perplexity`.
    pub name: String,
    /// `natural`.
    pub log_base: String,
}

impl Default for Metric {
    fn default() -> Self {
        Self {
            name: "fixed-window truncated-context causal perplexity".into(),
            log_base: "natural".into(),
        }
    }
}

/// What produced the report.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    /// Program name.
    pub name: String,
    /// Program version.
    pub version: String,
    /// Source revision, when known.
    pub commit: Option<String>,
    /// Target triple.
    pub target: Option<String>,
    /// Compiled features.
    pub features: Vec<String>,
}

/// What was scored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// Absolute path.
    pub path: String,
    /// Architecture name.
    pub architecture: String,
    /// Public model name.
    pub name: String,
    /// SHA-256 that identifies the prefill arithmetic.
    pub prefill_signature: String,
    /// Weight formats in use.
    pub formats: Vec<String>,
    /// Size in bytes.
    pub bytes: Option<u64>,
    /// SHA-256 of the artifact's header, or of a checkpoint's configuration and index.
    pub header_sha256: Option<String>,
    /// SHA-256 of the tokenizer.
    pub tokenizer_sha256: Option<String>,
}

/// Where the text came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Corpus {
    /// Corpus identity.
    pub id: String,
    /// Selected mode.
    pub mode: String,
    /// Absolute path of the manifest or text.
    pub source: String,
    /// Streams in the plan.
    pub stream_count: u64,
}

/// Settings of the model side, as they ran; the caller fills them in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Backend that computed.
    pub backend: String,
    /// First device.
    pub device: i64,
    /// All devices, one pipeline stage or replica each.
    pub devices: Vec<i64>,
    /// The device's own name.
    pub device_name: Option<String>,
    /// Numerical route: `normal`, `exact`, `reproducible`, `reference` or `lossless`.
    pub route: String,
    /// Versions of the numeric contracts, by name; for instance the rounding contract or the library a route reproduces.
    pub numeric_contract: BTreeMap<String, String>,
    /// Tokens per prefill pass, as it ran.
    pub prefill_chunk_tokens: u64,
    /// Positions per tile of the output head.
    pub score_tile_tokens: u64,
    /// Number type of the logits.
    pub logits_dtype: String,
    /// Recorded name of the KV format that ran.
    pub kv_dtype: String,
    /// KV format as asked for.
    pub kv_dtype_requested: String,
    /// Bytes of KV per token over all layers, scales included.
    pub kv_bytes_per_token: Option<f64>,
    /// Bytes of KV of the longest window, exact copies of windowed formats not counted.
    pub kv_bytes_total: Option<f64>,
    /// Whether windowed formats read first and recent tokens from exact copies; `None` without such a format.
    pub kv_window: Option<bool>,
    /// What attention imitates: `format`, decoded rows alone, or `kernel`, an engine's roundings too; `None` without a
    /// codec.
    pub kv_emulation: Option<String>,
    /// Where K and V scales came from, for formats that store them.
    pub kv_scales_source: Option<String>,
    /// YaRN from context over native window.
    pub rope_yarn: bool,
    /// YaRN factor as it ran; 1 is none.
    pub rope_yarn_factor: f64,
    /// Linear position factor; 1 is none.
    pub rope_scaling_factor: f64,
    /// Positions up to here keep their angles; 0 is the native window.
    pub rope_scaling_original_context: u64,
    /// Fast prompt-attention kernel.
    pub fast_prefill_kernel: bool,
    /// Original INT8 prefill kernel.
    pub original_int8_prefill_kernel: bool,
    /// Original NVFP4 prefill kernel.
    pub original_nvfp4_prefill_kernel: bool,
    /// 8-bit P·V: `auto`, `on` or `off`; `None` where there is no such choice.
    pub prefill_8bit_pv: Option<String>,
    /// 16-bit activations in every linear, whatever the artifact permits.
    pub a16_activations: bool,
    /// Inputs of projections that were narrowed, by format: `fp8`, `nvfp4`, `int8`.
    pub narrowed_activations: BTreeMap<String, Vec<String>>,
    /// Prefill through the vendor's matrix library.
    pub prefill_cublas: bool,
    /// That library for attention and GDN input projections too.
    pub prefill_cublas_projections: bool,
    /// Whether an input was narrowed to 8-bit integers.
    pub prefill_a8: bool,
    /// 8-bit activations in the decode MLP; no effect on scoring.
    pub mlp_a8_decode: bool,
    /// Output head requantised to this format.
    pub lm_head_format: Option<String>,
    /// Embedding requantised to this format.
    pub embedding_format: Option<String>,
    /// Draft experts at 4 bits; no effect on scoring.
    pub mtp_experts_q4: bool,
    /// GDN state in half precision.
    pub gdn_state_fp16: bool,
    /// Every operation correctly rounded.
    pub lossless: bool,
    /// Lossless plus the declared lossy steps.
    pub reference: bool,
    /// No fast path, fixed reduction orders.
    pub reproducible: bool,
    /// Fast paths that ran: `kv_decoded_f16`, `fp8_products`.
    pub fast_paths: Vec<String>,
    /// 4-bit expert activations.
    pub expert_a4_activations: bool,
    /// Whether markers such as `<|im_start|>` in the text become single tokens.
    pub special_tokens_in_text: String,
    /// Ids put before every stream.
    pub prefix_tokens: Vec<u32>,
    /// Any further setting, by option name.
    pub options: BTreeMap<String, Value>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            backend: String::new(),
            device: 0,
            devices: Vec::new(),
            device_name: None,
            route: "normal".into(),
            numeric_contract: BTreeMap::new(),
            prefill_chunk_tokens: 0,
            score_tile_tokens: 0,
            logits_dtype: String::new(),
            kv_dtype: String::new(),
            kv_dtype_requested: String::new(),
            kv_bytes_per_token: None,
            kv_bytes_total: None,
            kv_window: None,
            kv_emulation: None,
            kv_scales_source: None,
            rope_yarn: false,
            rope_yarn_factor: 1.0,
            rope_scaling_factor: 1.0,
            rope_scaling_original_context: 0,
            fast_prefill_kernel: false,
            original_int8_prefill_kernel: false,
            original_nvfp4_prefill_kernel: false,
            prefill_8bit_pv: None,
            a16_activations: false,
            narrowed_activations: BTreeMap::new(),
            prefill_cublas: false,
            prefill_cublas_projections: false,
            prefill_a8: false,
            mlp_a8_decode: false,
            lm_head_format: None,
            embedding_format: None,
            mtp_experts_q4: false,
            gdn_state_fp16: false,
            lossless: false,
            reference: false,
            reproducible: false,
            fast_paths: Vec::new(),
            expert_a4_activations: false,
            special_tokens_in_text: String::new(),
            prefix_tokens: Vec::new(),
            options: BTreeMap::new(),
        }
    }
}

/// Protocol and settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Execution {
    /// `causal_scoring`.
    pub purpose: String,
    /// Longest input of a window.
    pub context_tokens: u64,
    /// Targets per later window; the context when windows do not overlap.
    pub stride_tokens: u64,
    /// `sliding`, `disjoint` or `llama-chunks`.
    pub windows: WindowKind,
    /// Most windows of a stream; `null` for all.
    #[serde(default)]
    pub window_limit: Option<u64>,
    /// Windows per batch.
    pub batch_windows: u64,
    /// Settings of the model side.
    #[serde(flatten)]
    pub settings: Settings,
}

/// What the figures were divided by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Denominators {
    /// Rows of the head in the softmax.
    pub softmax_rows: u64,
    /// Tokens read.
    pub input_tokens: u64,
    /// Tokens scored.
    pub scored_tokens: u64,
    /// Windows scored.
    pub windows: u64,
    /// UTF-8 bytes of the texts.
    pub bytes: u64,
    /// Whitespace-separated words of the texts.
    pub words: u64,
}

impl Denominators {
    pub(crate) fn new(softmax_rows: u64, streams: &[StreamReport]) -> Self {
        let sum = |value: fn(&StreamReport) -> u64| streams.iter().map(value).sum();
        Self {
            softmax_rows,
            input_tokens: sum(|s| s.input_tokens),
            scored_tokens: sum(|s| s.figures.scored_tokens),
            windows: sum(|s| s.windows.len() as u64),
            bytes: sum(|s| s.text.bytes),
            words: sum(|s| s.text.words),
        }
    }
}

/// Wall-clock times.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Loading the model.
    pub load_seconds: f64,
    /// Reading and tokenising.
    pub read_and_tokenize_seconds: f64,
    /// Scoring.
    pub score_seconds: f64,
    /// Everything up to the report.
    pub total_seconds: f64,
    /// Scored tokens over scoring time; `null` when the clock saw no time.
    pub scored_tokens_per_second: Option<f64>,
}

/// Sums and what follows from them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Tokens scored.
    pub scored_tokens: u64,
    /// `-Σ logprob` in nats.
    pub total_nll: f64,
    /// Per token; `null` without tokens.
    pub mean_nll: Option<f64>,
    /// `exp(mean_nll)`; `null` beyond the range of f64.
    pub perplexity: Option<f64>,
    /// `mean_nll / ln 2`.
    pub bits_per_token: Option<f64>,
    /// Of the mean, tokens taken as independent.
    pub standard_error_mean_nll: Option<f64>,
    /// Of the perplexity, by error propagation.
    pub standard_error_perplexity: Option<f64>,
    /// `Σ (nll - mean)²`, from which standard errors of joined parts follow.
    pub squared_deviations: f64,
}

impl Figures {
    pub(crate) fn aggregate(&self) -> Aggregate {
        Aggregate {
            scored_tokens: self.scored_tokens,
            total_nll: self.total_nll,
            squared_deviations: self.squared_deviations,
        }
    }
}

impl From<&Aggregate> for Figures {
    fn from(sum: &Aggregate) -> Self {
        Self {
            scored_tokens: sum.scored_tokens,
            total_nll: sum.total_nll,
            mean_nll: sum.mean_nll(),
            perplexity: sum.perplexity(),
            bits_per_token: sum.bits_per_token(),
            standard_error_mean_nll: sum.standard_error(),
            standard_error_perplexity: sum.perplexity_standard_error(),
            squared_deviations: sum.squared_deviations,
        }
    }
}

/// Figures that do not depend on the tokenizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TextFigures {
    /// UTF-8 bytes of the text.
    pub bytes: u64,
    /// Whitespace-separated words of the text.
    pub words: u64,
    /// `Σ nll / (bytes · ln 2)`; `null` unless every token but each stream's first was scored.
    pub bits_per_byte: Option<f64>,
    /// `exp(Σ nll / words)`; `null` likewise.
    pub word_perplexity: Option<f64>,
}

impl TextFigures {
    /// Sizes without figures, which follow from what was scored.
    pub(crate) fn of_stream(bytes: u64, words: u64) -> Self {
        Self {
            bytes,
            words,
            bits_per_byte: None,
            word_perplexity: None,
        }
    }

    fn new(sum: &Aggregate, size: TextSize) -> Self {
        Self {
            bytes: size.bytes,
            words: size.words,
            bits_per_byte: size.whole.then(|| sum.bits_per_byte(size.bytes)).flatten(),
            word_perplexity: size.whole.then(|| sum.word_perplexity(size.words)).flatten(),
        }
    }
}

/// Size of a text or of several, and whether all of it was scored.
#[derive(Debug, Clone, Copy)]
struct TextSize {
    bytes: u64,
    words: u64,
    whole: bool,
}

impl TextSize {
    fn of<'a>(streams: impl Iterator<Item = &'a StreamReport>) -> Self {
        streams.fold(
            Self {
                bytes: 0,
                words: 0,
                whole: true,
            },
            |sum, stream| Self {
                bytes: sum.bytes + stream.text.bytes,
                words: sum.words + stream.text.words,
                whole: sum.whole && stream.unscored_tokens == 1,
            },
        )
    }
}

/// One scored window.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WindowReport {
    /// Index within the stream.
    pub index: u64,
    /// First token fed.
    pub input_begin: u64,
    /// End of the input.
    pub input_end: u64,
    /// First token scored.
    pub target_begin: u64,
    /// End of the scored tokens.
    pub target_end: u64,
    /// Index of the first scored token within the input.
    pub first_target: u64,
    /// Its share of the batch's time.
    pub seconds: f64,
    /// Mean over everything scored up to and with this window.
    pub running_mean_nll: f64,
    /// Sums.
    #[serde(flatten)]
    pub figures: Figures,
    /// Comparison with the reference.
    pub kl_divergence: Option<KlFigures>,
}

/// One scored stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StreamReport {
    /// Stream id.
    pub id: String,
    /// Aggregation label.
    pub domain: String,
    /// Relative to the manifest, or absolute for a single text.
    pub path: String,
    /// SHA-256 of the text.
    pub sha256: String,
    /// SHA-256 of the token ids as 32-bit little-endian integers.
    pub tokens_sha256: String,
    /// Tokens read.
    pub input_tokens: u64,
    /// Tokens not scored.
    pub unscored_tokens: u64,
    /// Time of its windows.
    pub seconds: f64,
    /// Sums.
    #[serde(flatten)]
    pub figures: Figures,
    /// Tokenizer-independent figures.
    #[serde(flatten)]
    pub text: TextFigures,
    /// The scored windows.
    pub windows: Vec<WindowReport>,
    /// Comparison with the reference.
    pub kl_divergence: Option<KlDetail>,
}

impl StreamReport {
    /// Sets the tokenizer-independent figures from the stream's sum.
    pub(crate) fn measure_text(&mut self, sum: &Aggregate) {
        self.text = TextFigures::new(sum, TextSize::of(std::iter::once(&*self)));
    }
}

/// One domain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DomainReport {
    /// Its name.
    pub domain: String,
    /// Sums.
    #[serde(flatten)]
    pub figures: Figures,
    /// Tokenizer-independent figures.
    #[serde(flatten)]
    pub text: TextFigures,
    /// Comparison with the reference.
    pub kl_divergence: Option<KlDetail>,
}

impl DomainReport {
    pub(crate) fn new(name: &str, sum: &Aggregate, streams: &[StreamReport], kl: Option<KlDetail>) -> Self {
        Self {
            domain: name.into(),
            figures: sum.into(),
            text: TextFigures::new(sum, TextSize::of(streams.iter().filter(|s| s.domain == name))),
            kl_divergence: kl,
        }
    }
}

/// The comparison over everything.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KlReport {
    /// Figures, order statistics and breakdowns.
    #[serde(flatten)]
    pub detail: KlDetail,
    /// What the figures mean.
    pub definition: String,
    /// Absolute path of the reference.
    pub reference: String,
    /// SHA-256 of its length and of its first and last MiB.
    #[serde(default)]
    pub reference_sha256: Option<String>,
    /// What the reference holds of each position.
    #[serde(default)]
    pub reference_kind: ReferenceKind,
    /// Its tokens per position; `null` for whole rows.
    pub reference_top_tokens: Option<u32>,
    /// Largest change of a target's log-probability when this run's head is applied to the reference's hidden states.
    #[serde(default)]
    pub reference_head_error: Option<f64>,
    /// What made it, when it says so.
    pub reference_provenance: Option<Provenance>,
    /// This run's `mean_nll` less `mean_delta_nll`.
    pub reference_mean_nll: Option<f64>,
    /// This run's perplexity over the reference's, `exp(mean_delta_nll)`.
    pub perplexity_ratio: Option<f64>,
    /// Uncertainty of the means that respects the dependence of tokens.
    pub uncertainty: KlUncertainty,
}

/// Uncertainty of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KlUncertainty {
    /// Of `mean_kl`.
    pub mean_kl: Uncertainty,
    /// Of `mean_delta_nll`.
    pub mean_delta_nll: Uncertainty,
}

/// A top-token reference that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopTokensReport {
    /// Absolute path.
    pub path: String,
    /// Tokens per position.
    pub per_position: u32,
}

/// A hidden-state reference that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HiddenStatesReport {
    /// Absolute path.
    pub path: String,
    /// Values of a hidden state.
    pub hidden_size: u32,
    /// `bf16` or `f32`.
    pub precision: String,
}

/// Everything.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OverallReport {
    /// Sums.
    #[serde(flatten)]
    pub figures: Figures,
    /// Tokenizer-independent figures.
    #[serde(flatten)]
    pub text: TextFigures,
    /// Uncertainty of `mean_nll` that respects the dependence of tokens.
    pub uncertainty: Uncertainty,
    /// The bootstrap interval carried over to the perplexity.
    pub perplexity_interval_95: Option<[f64; 2]>,
}

impl OverallReport {
    pub(crate) fn new(sum: &Aggregate, streams: &[StreamReport], uncertainty: Uncertainty) -> Self {
        let interval = uncertainty.bootstrap_interval_95.map(|interval| interval.map(f64::exp));
        Self {
            figures: sum.into(),
            text: TextFigures::new(sum, TextSize::of(streams.iter())),
            uncertainty,
            perplexity_interval_95: interval.filter(|interval| interval.iter().all(|x| x.is_finite())),
        }
    }
}

/// The share of the windows that was scored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardReport {
    /// Position of the share.
    pub index: u64,
    /// Number of shares.
    pub count: u64,
}
