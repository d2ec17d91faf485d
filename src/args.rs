//! Arguments as typed. What they mean together is decided in `options.rs`.
//!
//! Long options only. A later occurrence of a single-value option replaces an earlier one.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use perplexity_eval::shard::Shard;

use crate::flash_next::FlashNextArgs;
use crate::log::Level;
use crate::route::SoftmaxRows;
use crate::unbuilt::Unbuilt;

const ABOUT: &str = "Perplexity of text under a quantised Qwen3.5-family model, offline";

const LONG_ABOUT: &str = "\
Perplexity of text under a quantised Qwen3.5-family model, offline.

Text is cut into windows; every window starts from an empty state and scores its target tokens. \
The table goes to standard output, the log to standard error, and the unrounded result to report.json. \
Without an artifact the program scores the demo model that ships in the repository.";

const EXAMPLES: &str = "\
Examples:
  burn-perplexity
          score the demo model on the demo texts
  burn-perplexity model.ninfer --corpus eval/corpora/open-1m/manifest.json --quick
          one stream of each domain of the shipped corpus
  burn-perplexity ./Qwen3.5-0.8B --text notes.txt --context 2048 --disjoint
          a Hugging Face checkpoint on one file, in back-to-back windows
  burn-perplexity convert ./Qwen3.5-0.8B model.ninfer --recipe q8
          make an artifact
  burn-perplexity q8.ninfer --text notes.txt --kv-dtype k=fp8,v=nvfp4 --kl-reference reference.bin
          what a KV-cache format costs, against a recorded run

Exit codes:
  0  done
  1  the work failed: a damaged or unsuitable file, a model or device at fault; for `gate` also a verdict other than accept
  2  wrong usage: options that do not fit, a named file or mode that does not exist, a file that is no regular one, an output
     in the way";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "burn-perplexity",
    version,
    about = ABOUT,
    long_about = LONG_ABOUT,
    after_help = EXAMPLES,
    args_conflicts_with_subcommands = true,
    args_override_self = true,
    disable_help_subcommand = true,
    max_term_width = 110
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) score: ScoreArgs,
}

/// Everything but scoring, which needs no command word.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make an artifact from a Hugging Face checkpoint
    Convert(ConvertArgs),
    /// Make an artifact of a published geometry with random weights, for benchmarks and tests
    Synth(SynthArgs),
    /// Measure the operations of the forward pass and the speed of scoring
    Bench(BenchArgs),
    /// Show what an artifact or a checkpoint holds
    Inspect(InspectArgs),
    /// Compare two reports window by window
    Compare(CompareArgs),
    /// Join the reports of all shards of a run into the report of the whole
    Merge(MergeArgs),
    /// Judge whether a fast path may replace an exact one, from a report of each
    Gate(GateArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell to complete in
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write one page per command
    Man {
        /// Write the pages of all commands into this directory instead
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        dir: Option<PathBuf>,
    },
}

/// Arguments of a scoring run, in the order of the help text.
#[derive(Debug, Args)]
pub(crate) struct ScoreArgs {
    #[command(flatten)]
    pub(crate) input: InputArgs,
    #[command(flatten)]
    pub(crate) protocol: ProtocolArgs,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) kv: KvArgs,
    #[command(flatten)]
    pub(crate) route: RouteArgs,
    #[command(flatten)]
    pub(crate) rope: RopeArgs,
    #[command(flatten)]
    pub(crate) flash_next: FlashNextArgs,
    #[command(flatten)]
    pub(crate) unbuilt: Unbuilt,
    #[command(flatten)]
    pub(crate) comparison: ComparisonArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Input")]
pub(crate) struct InputArgs {
    /// A .ninfer artifact or a Hugging Face checkpoint directory [default: the demo model]
    #[arg(value_name = "ARTIFACT", value_hint = ValueHint::AnyPath, help_heading = None)]
    pub(crate) artifact: Option<PathBuf>,
    /// Score the streams of a corpus manifest
    #[arg(long, value_name = "MANIFEST", value_hint = ValueHint::FilePath, conflicts_with = "text")]
    pub(crate) corpus: Option<PathBuf>,
    /// Score one UTF-8 file as one stream
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) text: Option<PathBuf>,
    /// Score the manifest's `quick` mode; the same as --mode quick
    #[arg(long, conflicts_with_all = ["mode", "text"])]
    pub(crate) quick: bool,
    /// The manifest's mode to score [default: full]
    #[arg(long, value_name = "NAME", conflicts_with = "text")]
    pub(crate) mode: Option<String>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Protocol")]
pub(crate) struct ProtocolArgs {
    /// Tokens of a window, at least 2 [default: 4096; the demo: 1024]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = digits::<u32>)]
    pub(crate) context: Option<u32>,
    /// Tokens a window advances by, from 1 to context - 1 [default: 2048; the demo: 512]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = digits::<u32>)]
    pub(crate) stride: Option<u32>,
    /// Back-to-back windows, each scored from its second token; a partial last window is dropped and --stride is not used
    #[arg(long)]
    pub(crate) disjoint: bool,
    /// Back-to-back windows scored in their second half, as llama-perplexity does; for --save-logits and --kl-base
    #[arg(long, conflicts_with = "disjoint")]
    pub(crate) llama_chunks: bool,
    /// Score only the first N windows of every stream
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = digits::<u32>)]
    pub(crate) chunks: Option<u32>,
    /// Score only windows I, I + N, I + 2N, ... of the run, counted from 0; join the N reports with `merge`
    #[arg(long, value_name = "I/N")]
    pub(crate) shard: Option<Shard>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Model and device")]
pub(crate) struct DeviceArgs {
    /// ndarray, flex, cuda:N, vulkan:N or auto; a bare N means cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto", allow_negative_numbers = true)]
    pub(crate) device: String,
    /// CPU threads [default: one per core]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = digits::<u32>)]
    pub(crate) threads: Option<u32>,
    /// Windows per forward pass: a number or auto, on a card as many as fit and fill it
    #[arg(long, value_name = "N", default_value = "auto", allow_negative_numbers = true)]
    pub(crate) batch: String,
    /// Round the output head to 4 bits on loading (q4_g64_fp16)
    #[arg(long, conflicts_with = "lm_head_q6")]
    pub(crate) lm_head_q4: bool,
    /// Round the output head to 6 bits on loading (q6_g64_fp16)
    #[arg(long)]
    pub(crate) lm_head_q6: bool,
    /// Round the token embedding to 4 bits on loading (q4_g64_fp16)
    #[arg(long, conflicts_with = "embedding_q6")]
    pub(crate) embedding_q4: bool,
    /// Round the token embedding to 6 bits on loading (q6_g64_fp16)
    #[arg(long)]
    pub(crate) embedding_q6: bool,
    /// Keep the Gated DeltaNet state in FP16, rounded every 64 tokens
    #[arg(long)]
    pub(crate) gdn_state_fp16: bool,
    /// Memory of the card that the run may take, such as 40GiB [default: what is free on it]
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory_budget: Option<String>,
}

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "KV cache")]
pub(crate) struct KvArgs {
    #[arg(long, value_name = "SPEC", help = crate::kv::dtype_help())]
    pub(crate) kv_dtype: Option<String>,
    /// Whether vq2, k4v2 and kivi* read first and recent tokens from exact copies, as is their definition [default: on]
    #[arg(long, value_name = "SWITCH", value_enum)]
    pub(crate) kv_window: Option<Switch>,
    /// What attention imitates [default: format, or kernel with an option of the kernels below]
    #[arg(long, value_name = "LEVEL", value_enum)]
    pub(crate) kv_emulation: Option<EmulationLevel>,
    /// Imitate the original prompt-attention kernel; with --kv-dtype int8
    #[arg(long, conflicts_with_all = ["fast_prefill_kernel", "prefill_8bit_pv"])]
    pub(crate) use_original_int8_prefill_kernel: bool,
    /// Imitate the original prompt-attention kernel; with --kv-dtype nvfp4
    #[arg(long, conflicts_with = "prefill_8bit_pv")]
    pub(crate) use_original_nvfp4_prefill_kernel: bool,
    /// Imitate the fast prompt-attention kernel; with --kv-dtype int8 and rk*
    #[arg(long)]
    pub(crate) fast_prefill_kernel: bool,
    /// Imitate 8-bit P x V in prompt attention
    #[arg(long, overrides_with = "no_prefill_8bit_pv")]
    pub(crate) prefill_8bit_pv: bool,
    /// Imitate FP16 P x V in prompt attention
    #[arg(long, overrides_with = "prefill_8bit_pv")]
    pub(crate) no_prefill_8bit_pv: bool,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

/// What attention over the stored rows imitates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EmulationLevel {
    /// Exact attention on decoded rows: what the codec loses
    Format,
    /// With the query and probability forms of the engine's kernels: what the engine loses
    Kernel,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Prefill and numerical route")]
pub(crate) struct RouteArgs {
    /// Tokens per prefill pass and window, a multiple of 128; whole waves of prompt attention with int8, nvfp4, fp8 and k8v4 KV
    /// [default: 1024; on a card 5120; Qwen3.8-Flash-Next: 16384; --lossless and --reference: the whole window, and they refuse
    /// less]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = digits::<u32>)]
    pub(crate) prefill_chunk: Option<u32>,
    /// Tokens of such a wave, a multiple of 128 [default: 128 floor(170 / heads), the card of published figures]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = digits::<u32>)]
    pub(crate) attention_wave: Option<u32>,
    /// normal: bf16 at the model's boundaries; exact: float32 without rounding in between [default: normal]
    #[arg(long, value_name = "ROUTE")]
    pub(crate) route: Option<String>,
    /// The bf16 model of transformers 5.24.0, every operation of it correctly rounded; float32 logits. On the CPU or
    /// cuda:N, with a bf16 KV cache and no codec
    #[arg(long)]
    pub(crate) lossless: bool,
    /// Route normal as it is meant: every boundary evaluated in f64 and rounded once, with the loss of the KV codec and no
    /// other. On the CPU or cuda:N, without kernel emulation
    #[arg(long)]
    pub(crate) reference: bool,
    /// Route normal with the same bits for every pass size, batch and number of threads. On the CPU, without kernel
    /// emulation
    #[arg(long)]
    pub(crate) reproducible: bool,
    /// Rows of the output head in the softmax [default: public; --lossless: all]
    #[arg(long, value_name = "ROWS", value_enum)]
    pub(crate) softmax_rows: Option<SoftmaxRows>,
    /// 16-bit activations in every projection, whatever the model permits
    #[arg(long)]
    pub(crate) a16_activations: bool,
    /// No 8-bit integer activations; FP8 and NVFP4 ones stay
    #[arg(long)]
    pub(crate) no_prefill_a8: bool,
    /// How 4-bit activations are rounded: as the engine does or as ModelOpt does
    #[arg(long, value_name = "RULE", value_enum, default_value = "engine")]
    pub(crate) a4_rounding: A4Rounding,
    /// 8-bit activations while decoding: accepted, without effect on scoring
    #[arg(long)]
    pub(crate) mlp_a8_decode: bool,
}

/// The order of operations that makes 4-bit activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum A4Rounding {
    /// Scale from the divisor times the largest magnitude
    Engine,
    /// Scale from the largest magnitude over six input scales
    Modelopt,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "RoPE")]
pub(crate) struct RopeArgs {
    /// YaRN at a fixed factor, from 1 to 4; windows may be that many times the native one, at most 1048576 [default: 1]
    #[arg(
        long,
        value_name = "F",
        allow_negative_numbers = true,
        conflicts_with_all = ["rope_yarn", "rope_scaling_factor"],
        value_parser = decimal
    )]
    pub(crate) rope_yarn_factor: Option<f64>,
    /// YaRN at factor context / native window, where that is above 1
    #[arg(long, conflicts_with = "rope_scaling_factor")]
    pub(crate) rope_yarn: bool,
    /// Positions past the original context advance by 1 / F, from 1 to 32; windows up to 4 times the native one [default: 1]
    #[arg(long, value_name = "F", allow_negative_numbers = true, value_parser = decimal)]
    pub(crate) rope_scaling_factor: Option<f64>,
    /// The last position that keeps its angles [default: the native window]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        requires = "rope_scaling_factor",
        value_parser = digits::<u32>
    )]
    pub(crate) rope_scaling_original_context: Option<u32>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Comparison files")]
pub(crate) struct ComparisonArgs {
    /// Record each position's 64 most probable tokens, to compare later runs with
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) save_top_tokens: Option<PathBuf>,
    /// KL divergence of this run from one recorded with --save-top-tokens
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) kl_reference: Option<PathBuf>,
    /// Write each window's tokens, targets and fingerprint as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) save_tokens: Option<PathBuf>,
    /// Record all logits as a base file of llama-perplexity; needs one stream and --llama-chunks
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "llama_chunks")]
    pub(crate) save_logits: Option<PathBuf>,
    /// Full KL divergence of this run from such a base file; needs one stream and --llama-chunks
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "llama_chunks")]
    pub(crate) kl_base: Option<PathBuf>,
    /// Record each position's final hidden state, for --kl-hidden; the log states the size first (2 bytes per value in route
    /// normal: 10 GB per million tokens of a 27B model)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) save_hidden: Option<PathBuf>,
    /// Exact KL divergence in both directions over the whole vocabulary, this run's output head applied to recorded hidden
    /// states
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) kl_hidden: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Output and logging")]
pub(crate) struct OutputArgs {
    /// Directory for report.json; missing or empty [default: a new one under profiles/perplexity]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) output: Option<PathBuf>,
    /// Keep finished windows in FILE until the run is done; a run that was interrupted continues from it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["save_logits", "kl_base", "save_hidden", "kl_hidden"])]
    pub(crate) resume: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

#[derive(Debug, Args)]
pub(crate) struct LogArgs {
    /// trace, debug, info, warning, error, critical or off
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub(crate) log_level: Level,
}

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// A Hugging Face checkpoint directory
    #[arg(value_name = "CHECKPOINT", value_hint = ValueHint::DirPath)]
    pub(crate) checkpoint: PathBuf,
    /// The artifact to write; continuation volumes go beside it
    #[arg(value_name = "OUT.ninfer", value_hint = ValueHint::FilePath)]
    pub(crate) out: PathBuf,
    /// A recipe's name, or a TOML file with an own mix
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) recipe: String,
    /// Score this UTF-8 text with the checkpoint and set the divisors of 4-bit activations by what it shows
    #[arg(long, value_name = "TEXT", value_hint = ValueHint::FilePath)]
    pub(crate) calibrate: Option<PathBuf>,
    /// Public model name in the artifact [default: the checkpoint directory's name]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// CPU threads [default: one per core]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = digits::<u32>)]
    pub(crate) threads: Option<u32>,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

#[derive(Debug, Args)]
pub(crate) struct SynthArgs {
    /// The artifact to write; continuation volumes go beside it
    #[arg(value_name = "OUT.ninfer", value_hint = ValueHint::FilePath)]
    pub(crate) out: PathBuf,
    #[arg(long, value_name = "NAME", help = crate::synth::preset_help())]
    pub(crate) preset: String,
    /// A recipe's name, or a TOML file with an own mix; flash-next-tiny has one of its own
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) recipe: Option<String>,
    /// Number of layers; every fourth is full attention [default: the geometry's]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = digits::<u32>)]
    pub(crate) layers: Option<u32>,
    /// Least rows of each of the 16 heads of an n-gram table; published are 20000000, 52.4 GB [default: 1000000]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = digits::<u32>)]
    pub(crate) ngram_base: Option<u32>,
    /// Chooses the weights [default: 0]
    #[arg(long, value_name = "N", value_parser = digits::<u64>)]
    pub(crate) seed: Option<u64>,
    /// The artifact or checkpoint whose tokenizer to use [default: the demo model]
    #[arg(long, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    pub(crate) tokenizer: Option<PathBuf>,
    /// CPU threads [default: one per core]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = digits::<u32>)]
    pub(crate) threads: Option<u32>,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// A .ninfer artifact or a Hugging Face checkpoint directory
    #[arg(value_name = "ARTIFACT", value_hint = ValueHint::AnyPath)]
    pub(crate) artifact: PathBuf,
    /// ndarray, flex, cuda:N, vulkan:N or auto; a bare N means cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto", allow_negative_numbers = true)]
    pub(crate) device: String,
    /// CPU threads [default: one per core]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = digits::<u32>)]
    pub(crate) threads: Option<u32>,
    /// Tokens of a window, one measurement each
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_value = "1024", value_parser = digits::<u32>)]
    pub(crate) context: Vec<u32>,
    /// Windows per forward pass, one measurement each
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_value = "1", value_parser = digits::<u32>)]
    pub(crate) batch: Vec<u32>,
    /// Representation of stored keys and values; repeat it for one measurement each [default: bf16]
    #[arg(long, value_name = "SPEC")]
    pub(crate) kv_dtype: Vec<String>,
    /// Tokens per prefill pass, a multiple of 128 [default: 1024; on a card 5120]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = digits::<u32>)]
    pub(crate) prefill_chunk: Option<u32>,
    /// Numerical route, as of a scoring run
    #[arg(long, value_name = "ROUTE", default_value = "normal")]
    pub(crate) route: String,
    /// Score with 16-bit activations in every projection, whatever the model permits
    #[arg(long)]
    pub(crate) a16_activations: bool,
    /// Memory of the card that scoring may take, such as 40GiB [default: what is free on it]
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory_budget: Option<String>,
    /// Timed runs of each measurement, after one that is not timed; the median counts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = digits::<u32>)]
    pub(crate) runs: u32,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A .ninfer artifact or a Hugging Face checkpoint directory
    #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) path: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// report.json of the first run
    #[arg(value_name = "FIRST", value_hint = ValueHint::FilePath)]
    pub(crate) first: PathBuf,
    /// report.json of the second run; differences are second minus first
    #[arg(value_name = "SECOND", value_hint = ValueHint::FilePath)]
    pub(crate) second: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

#[derive(Debug, Args)]
pub(crate) struct MergeArgs {
    /// report.json of every shard, in any order
    #[arg(value_name = "REPORT", value_hint = ValueHint::FilePath, required = true)]
    pub(crate) reports: Vec<PathBuf>,
    /// Directory for the joined report.json; missing or empty
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) output: PathBuf,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

#[derive(Debug, Args)]
pub(crate) struct GateArgs {
    /// report.json of the exact run
    #[arg(value_name = "EXACT", value_hint = ValueHint::FilePath)]
    pub(crate) exact: PathBuf,
    /// report.json of the fast run, compared with the same reference
    #[arg(value_name = "FAST", value_hint = ValueHint::FilePath)]
    pub(crate) fast: PathBuf,
    /// Harmless growth of the mean divergence, relative to the exact run's [default: 0.05]
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true, value_parser = decimal)]
    pub(crate) relative_kl: Option<f64>,
    /// Harmless change of the mean negative log-likelihood in nats [default: 0.001]
    #[arg(long, value_name = "NATS", allow_negative_numbers = true, value_parser = decimal)]
    pub(crate) nll: Option<f64>,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// A whole number as digits alone.
///
/// # Errors
/// On a sign, any other character, and a number beyond the type.
pub(crate) fn digits<T: FromStr>(text: &str) -> Result<T, String> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.then(|| text.parse().ok()).flatten();
    number.ok_or_else(|| format!("expected a whole number below 2^{}, digits alone", 8 * size_of::<T>()))
}

/// A number with a decimal point or without.
///
/// # Errors
/// On a leading `+`, which whole numbers do not have either, and on what is no number.
pub(crate) fn decimal(text: &str) -> Result<f64, &'static str> {
    let number = (!text.starts_with('+')).then(|| text.parse().ok()).flatten();
    number.ok_or("expected a number, without a plus sign")
}
