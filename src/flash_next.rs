//! Qwen3.8-Flash-Next in a run: what was typed, what the model is given, what the report says.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use perplexity_eval::report::Settings;
use perplexity_model::config::TextConfig;
use perplexity_model::experts::{CacheStatistics, Residency};
use perplexity_model::ngram::Access;
use perplexity_model::qwen4_exp::{FlashNextOptions, volume_path};
use perplexity_model::route::Route;
use perplexity_model::source::TextSource;

/// Tokens per prefill pass unless asked otherwise: a pass reads nearly every expert, however short it is.
pub(crate) const PREFILL_CHUNK: usize = 16_384;
/// Positions per tile of the output head, in float32 in every route.
const HEAD_TILE: u64 = 64;
/// Reads in flight unless asked otherwise, and at most.
const DEFAULT_READS: u32 = 64;
const MOST_READS: u32 = 1024;
const MIB: u64 = 1 << 20;
/// Unpacked experts kept with residency host or disk unless asked otherwise.
const DEFAULT_CACHE_MIB: u32 = 4096;

#[derive(Debug, Args)]
#[command(next_help_heading = "Qwen3.8-Flash-Next")]
pub(crate) struct FlashNextArgs {
    /// The n-gram volume [default: the artifact's path with .ngram appended]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    ngram_volume: Option<PathBuf>,
    /// Score without n-grams, a non-standard mode
    #[arg(long, conflicts_with = "ngram_volume")]
    no_ngram_table: bool,
    /// Where the table's rows are: disk, in the volume; ram, all of them in memory
    #[arg(
        long,
        value_name = "WHERE",
        value_enum,
        default_value = "disk",
        conflicts_with = "no_ngram_table"
    )]
    ngram_residency: TableResidency,
    /// How rows are read from the volume: mmap or buffered [default: mmap]
    #[arg(long, value_name = "HOW", value_enum, conflicts_with = "no_ngram_table")]
    ngram_io: Option<TableIo>,
    /// Reads in flight with --ngram-io buffered, from 1 to 1024 [default: 64]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        conflicts_with = "no_ngram_table"
    )]
    ngram_io_depth: Option<u32>,
    /// Keep the rows of --ngram-residency ram from being moved to a swap device
    #[arg(long, conflicts_with = "no_ngram_table")]
    ngram_lock: bool,
    /// Round the activations of routed experts to 4 bits, where the artifact has scales for them
    #[arg(long)]
    expert_a4_activations: bool,
    /// Where routed experts are: device, ready for multiplication; host, packed in memory; disk, packed in the artifact
    #[arg(long, value_name = "WHERE", value_enum, default_value = "device")]
    expert_residency: Where,
    /// MiB for experts kept ready with --expert-residency host or disk; auto is 4096 [default: auto]
    #[arg(long, value_name = "N|auto", value_parser = cache_mib, allow_negative_numbers = true)]
    expert_cache_mib: Option<u32>,
}

/// A number of MiB as typed, or `auto`.
fn cache_mib(typed: &str) -> Result<u32, &'static str> {
    match typed {
        "auto" => Ok(DEFAULT_CACHE_MIB),
        number => number.parse().map_err(|_| "expected a number of MiB, or auto"),
    }
}

/// Where routed experts are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Where {
    Device,
    Host,
    Disk,
}

/// Where the rows of the n-gram table are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TableResidency {
    Disk,
    Ram,
}

/// How rows are read from the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TableIo {
    Mmap,
    Buffered,
}

/// Options that do not fit the model or one another.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FlashNextUsageError {
    #[error("{option} is for Qwen3.8-Flash-Next; this model is {architecture}")]
    OtherModel {
        option: &'static str,
        architecture: &'static str,
    },
    #[error("--expert-cache-mib needs --expert-residency host or disk: on the device every expert is ready")]
    NoCache,
    #[error("{option} needs {other}")]
    Needs { option: &'static str, other: &'static str },
    #[error("--ngram-io-depth {0} is out of range: from 1 to {MOST_READS}")]
    Depth(u32),
    #[error("--expert-a4-activations needs a route that rounds; route exact does not")]
    ExactRoute,
}

/// What a run does with the parts that other models do not have.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FlashNext {
    options: FlashNextOptions,
    /// The first of the options that was typed.
    given: Option<&'static str>,
}

impl FlashNext {
    /// Resolves what was typed.
    ///
    /// # Errors
    /// When options do not fit one another.
    pub(crate) fn resolve(args: &FlashNextArgs, route: Route) -> Result<Self, FlashNextUsageError> {
        let residency = match args.expert_residency {
            Where::Device => Residency::Device,
            Where::Host => Residency::Host,
            Where::Disk => Residency::Disk,
        };
        if residency == Residency::Device && args.expert_cache_mib.is_some() {
            return Err(FlashNextUsageError::NoCache);
        }
        if args.expert_a4_activations && route == Route::Exact {
            return Err(FlashNextUsageError::ExactRoute);
        }
        let ngram_access = access(args)?;
        let given = [
            ("--ngram-volume", args.ngram_volume.is_some()),
            ("--ngram-residency", args.ngram_residency != TableResidency::Disk),
            ("--ngram-io", args.ngram_io.is_some()),
            ("--no-ngram-table", args.no_ngram_table),
            ("--expert-a4-activations", args.expert_a4_activations),
            ("--expert-residency", residency != Residency::Device),
        ];
        Ok(Self {
            options: FlashNextOptions {
                ngram_volume: args.ngram_volume.clone(),
                ngram_access,
                without_ngrams: args.no_ngram_table,
                four_bit_experts: args.expert_a4_activations,
                residency,
                expert_cache_bytes: u64::from(args.expert_cache_mib.unwrap_or(DEFAULT_CACHE_MIB)) * MIB,
            },
            given: given.iter().find(|(_, given)| *given).map(|(option, _)| *option),
        })
    }

    /// Refuses options that the model has no use for.
    ///
    /// # Errors
    /// The first one typed.
    pub(crate) fn check(&self, config: &TextConfig) -> Result<(), FlashNextUsageError> {
        match self.given {
            Some(option) if config.flash_next.is_none() => Err(FlashNextUsageError::OtherModel {
                option,
                architecture: config.architecture(),
            }),
            _ => Ok(()),
        }
    }

    /// What the model is given.
    pub(crate) fn options(&self) -> &FlashNextOptions {
        &self.options
    }

    /// Puts the model's part into the report.
    pub(crate) fn record(&self, settings: &mut Settings, source: &dyn TextSource, route: Route) {
        if source.config().flash_next.is_none() {
            return;
        }
        settings.score_tile_tokens = HEAD_TILE;
        settings.logits_dtype = "f32".into();
        settings.expert_a4_activations = self.options.four_bit_experts;
        let arithmetic = match (source.artifact().is_some(), route, self.options.four_bit_experts) {
            (true, Route::Exact, _) => "float32, decoded weights",
            (true, _, true) => "exact integers, 4-bit activations",
            (true, _, false) => "exact integers, 16-bit activations",
            (false, ..) => "float32 products of the checkpoint's weights",
        };
        let volume = match (&self.options.ngram_volume, source.artifact()) {
            _ if self.options.without_ngrams => "none".to_owned(),
            (Some(path), _) => path.display().to_string(),
            (None, Some(artifact)) => volume_path(artifact.path()).display().to_string(),
            (None, None) => "the checkpoint's own table".to_owned(),
        };
        let mut set = |option: &str, value: serde_json::Value| drop(settings.options.insert(option.into(), value));
        set("expert_arithmetic", arithmetic.into());
        set("expert_residency", self.options.residency.name().into());
        if self.options.residency != Residency::Device {
            set("expert_cache_bytes", self.options.expert_cache_bytes.into());
        }
        set("ngram_volume", volume.into());
        if source.artifact().is_some() && !self.options.without_ngrams {
            let access = match self.options.ngram_access {
                Access::Mapped => "disk, mmap".to_owned(),
                Access::Reads { depth } => format!("disk, buffered, {depth} reads in flight"),
                Access::Memory { locked: false } => "ram".to_owned(),
                Access::Memory { locked: true } => "ram, locked".to_owned(),
            };
            set("ngram_access", access.into());
        }
        set("no_ngram_table", self.options.without_ngrams.into());
    }

    /// What the report notes before the run.
    pub(crate) fn notes(&self) -> Option<String> {
        let without = "scored without n-grams (--no-ngram-table): not the model as published";
        self.options.without_ngrams.then(|| without.to_owned())
    }
}

/// How the rows of the n-gram volume are read.
fn access(args: &FlashNextArgs) -> Result<Access, FlashNextUsageError> {
    let needs = |option, other| Err(FlashNextUsageError::Needs { option, other });
    let in_memory = args.ngram_residency == TableResidency::Ram;
    if args.ngram_lock && !in_memory {
        return needs("--ngram-lock", "--ngram-residency ram");
    }
    if args.ngram_io.is_some() && in_memory {
        return needs("--ngram-io", "--ngram-residency disk");
    }
    match (args.ngram_io, args.ngram_io_depth) {
        (_, Some(_)) if in_memory => needs("--ngram-io-depth", "--ngram-residency disk"),
        _ if in_memory => Ok(Access::Memory {
            locked: args.ngram_lock,
        }),
        (Some(TableIo::Buffered), depth) => match depth.unwrap_or(DEFAULT_READS) {
            depth @ 1..=MOST_READS => Ok(Access::Reads { depth: depth as usize }),
            depth => Err(FlashNextUsageError::Depth(depth)),
        },
        (_, Some(_)) => needs("--ngram-io-depth", "--ngram-io buffered"),
        _ => Ok(Access::Mapped),
    }
}

/// What the report notes of the cache of experts after the run.
pub(crate) fn cache_note(statistics: CacheStatistics) -> Option<String> {
    let uses = statistics.hits + statistics.misses;
    (statistics.misses > 0).then(|| {
        let share = 100.0 * statistics.hits as f64 / uses as f64;
        format!(
            "expert cache: {} of {uses} uses were ready, {share:.1} %",
            statistics.hits
        )
    })
}
