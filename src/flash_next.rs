//! Qwen3.8-Flash-Next in a run: what was typed, what the model is given, what the report says.

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum, ValueHint};
use perplexity_eval::corpus::CorpusPlan;
use perplexity_eval::files::{Named, PendingFile, TEMPORARY, same_file};
use perplexity_eval::report::Settings;
use perplexity_eval::shard::Shard;
use perplexity_model::config::TextConfig;
use perplexity_model::experts::{CacheStatistics, Residency};
use perplexity_model::ngram::{Access, Kept, NgramHash, TableOptions};
use perplexity_model::qwen4_exp::{FlashNextOptions, Statistics, volume_path};
use perplexity_model::route::Route;
use perplexity_model::source::TextSource;

use crate::args::digits;

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
/// Rows kept with residency ram-hot unless asked otherwise.
const DEFAULT_HOT_MIB: u32 = 4096;

#[derive(Debug, Args)]
#[command(next_help_heading = "Qwen3.8-Flash-Next")]
pub(crate) struct FlashNextArgs {
    /// The n-gram volume [default: the artifact's path with .ngram appended]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) ngram_volume: Option<PathBuf>,
    /// The n-gram table elsewhere: a volume, or the checkpoint that the artifact was converted from
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath, conflicts_with = "ngram_volume")]
    pub(crate) ngram_table: Option<PathBuf>,
    /// Score without n-grams, a non-standard mode
    #[arg(long, conflicts_with_all = ["ngram_volume", "ngram_table"])]
    no_ngram_table: bool,
    /// Where the table's rows are: disk, in the volume; ram, all of them in memory; ram-hot, those of a profile in memory
    /// [default: disk]
    #[arg(long, value_name = "WHERE", value_enum, conflicts_with = "no_ngram_table")]
    ngram_residency: Option<TableResidency>,
    /// How rows are read from the volume: mmap, buffered, or direct, past the system's page cache [default: mmap]
    #[arg(long, value_name = "HOW", value_enum, conflicts_with = "no_ngram_table")]
    ngram_io: Option<TableIo>,
    /// Reads in flight with --ngram-io buffered or direct, from 1 to 1024 [default: 64]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        conflicts_with = "no_ngram_table",
        value_parser = digits::<u32>
    )]
    ngram_io_depth: Option<u32>,
    /// MiB for rows kept in memory: those last read, or those of ram-hot [default: disk 0, ram-hot 4096]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        conflicts_with = "no_ngram_table",
        value_parser = digits::<u32>
    )]
    ngram_ram_mib: Option<u32>,
    /// The rows to keep with ram-hot, a text with one row number per line, the most wanted first
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath, conflicts_with = "no_ngram_table")]
    pub(crate) ngram_hot_profile: Option<PathBuf>,
    /// Write the rows that this run looks up as such a profile
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "no_ngram_table")]
    ngram_hot_profile_out: Option<PathBuf>,
    /// Keep the rows of --ngram-residency ram or ram-hot from being moved to a swap device
    #[arg(long, conflicts_with = "no_ngram_table")]
    ngram_lock: bool,
    /// Round the activations of routed experts to 4 bits, where the artifact has scales for them
    #[arg(long, conflicts_with = "a16_activations")]
    pub(crate) expert_a4_activations: bool,
    /// Where routed experts are: device, ready for multiplication; host, packed in memory; disk, packed in the artifact
    /// [default: device]
    #[arg(long, value_name = "WHERE", value_enum)]
    expert_residency: Option<Where>,
    /// MiB for experts kept ready with --expert-residency host or disk; auto is 4096 [default: auto]
    #[arg(long, value_name = "N|auto", value_parser = cache_mib, allow_negative_numbers = true)]
    expert_cache_mib: Option<u32>,
    /// A second copy of the artifact on another disk, from which every other expert is read
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) expert_stripe: Option<PathBuf>,
}

/// A number of MiB as typed, or `auto`.
fn cache_mib(typed: &str) -> Result<u32, &'static str> {
    match typed {
        "auto" => Ok(DEFAULT_CACHE_MIB),
        number => digits(number).map_err(|_| "expected a number of MiB, or auto"),
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
    RamHot,
}

/// How rows are read from the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TableIo {
    Mmap,
    Buffered,
    Direct,
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
    #[error("{option} is for a volume; {path:?} is a checkpoint, whose rows come from its own files")]
    CheckpointTable { option: &'static str, path: PathBuf },
    #[error("{option} is for an artifact; this model is a checkpoint")]
    Checkpoint { option: &'static str },
    #[error("--expert-stripe {0:?} is the artifact itself; name a second copy of it, on another disk")]
    SameCopy(PathBuf),
}

/// What a run does with the parts that other models do not have.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FlashNext {
    options: FlashNextOptions,
    /// Where to write the rows that the run looks up.
    profile_out: Option<PathBuf>,
    /// The options that were typed, and whether they are for an artifact alone; those first.
    given: Vec<(&'static str, bool)>,
}

impl FlashNext {
    /// Resolves what was typed.
    ///
    /// # Errors
    /// When options do not fit one another.
    pub(crate) fn resolve(args: &FlashNextArgs, route: Route) -> Result<Self, FlashNextUsageError> {
        let residency = match args.expert_residency {
            None | Some(Where::Device) => Residency::Device,
            Some(Where::Host) => Residency::Host,
            Some(Where::Disk) => Residency::Disk,
        };
        if residency == Residency::Device && args.expert_cache_mib.is_some() {
            return Err(FlashNextUsageError::NoCache);
        }
        if args.expert_a4_activations && route == Route::Exact {
            return Err(FlashNextUsageError::ExactRoute);
        }
        let ngram_rows = rows(args)?;
        let of_volume = [
            ("--ngram-residency", args.ngram_residency.is_some()),
            ("--ngram-io", args.ngram_io.is_some()),
            ("--ngram-io-depth", args.ngram_io_depth.is_some()),
            ("--ngram-ram-mib", args.ngram_ram_mib.is_some()),
            ("--ngram-lock", args.ngram_lock),
            ("--ngram-hot-profile", args.ngram_hot_profile.is_some()),
        ];
        if let (Some(path), Some((option, _))) = (
            args.ngram_table.as_ref().filter(|path| path.is_dir()),
            of_volume.iter().find(|(_, given)| *given),
        ) {
            let path = path.clone();
            return Err(FlashNextUsageError::CheckpointTable { option, path });
        }
        let of_artifact = [
            ("--ngram-volume", args.ngram_volume.is_some()),
            ("--ngram-table", args.ngram_table.is_some()),
            ("--expert-a4-activations", args.expert_a4_activations),
            ("--expert-residency", args.expert_residency.is_some()),
            ("--expert-stripe", args.expert_stripe.is_some()),
        ];
        let of_both = [
            ("--no-ngram-table", args.no_ngram_table),
            ("--ngram-hot-profile-out", args.ngram_hot_profile_out.is_some()),
        ];
        let of_artifact = of_volume.iter().chain(&of_artifact).map(|typed| (typed, true));
        let of_both = of_both.iter().map(|typed| (typed, false));
        Ok(Self {
            options: FlashNextOptions {
                ngram_table: args.ngram_volume.clone().or_else(|| args.ngram_table.clone()),
                ngram_rows,
                without_ngrams: args.no_ngram_table,
                four_bit_experts: args.expert_a4_activations,
                residency,
                expert_cache_bytes: u64::from(args.expert_cache_mib.unwrap_or(DEFAULT_CACHE_MIB)) * MIB,
                expert_stripe: args.expert_stripe.clone(),
            },
            profile_out: args.ngram_hot_profile_out.clone(),
            given: (of_artifact.chain(of_both))
                .filter(|((_, given), _)| *given)
                .map(|((option, _), for_artifact)| (*option, for_artifact))
                .collect(),
        })
    }

    /// Files that the run reads beside the model.
    pub(crate) fn inputs(&self) -> Vec<Named<'_>> {
        let profile = match &self.options.ngram_rows.kept {
            Kept::Hot { profile, .. } => Some(("--ngram-hot-profile", profile.as_path())),
            _ => None,
        };
        let table = self
            .options
            .ngram_table
            .as_deref()
            .map(|path| ("the n-gram table", path));
        let stripe = self
            .options
            .expert_stripe
            .as_deref()
            .map(|path| ("--expert-stripe", path));
        profile.into_iter().chain(table).chain(stripe).collect()
    }

    /// The file that the run writes beside the report.
    pub(crate) fn output(&self) -> Option<Named<'_>> {
        self.profile_out
            .as_deref()
            .map(|path| ("--ngram-hot-profile-out", path))
    }

    /// Writes the rows that the windows of `plan` in `shard` look up, most wanted first, if that was asked for.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write_profile(&self, config: &TextConfig, plan: &CorpusPlan, shard: Shard) -> std::io::Result<()> {
        let (Some(path), Some(dims)) = (&self.profile_out, &config.flash_next) else {
            return Ok(());
        };
        let hash = NgramHash::new(&dims.ngram, config.vocab_size);
        let mut counts: HashMap<u64, u64> = HashMap::new();
        let windows = plan
            .streams
            .iter()
            .flat_map(|stream| stream.windows.iter().map(move |w| (stream, w)));
        for (_, (stream, window)) in (0..).zip(windows).filter(|(number, _)| shard.contains(*number)) {
            // The last token of a window is never fed.
            let fed = &stream.tokens[window.input_begin..window.input_end - 1];
            let rows = hash.rows_of(&mut hash.begin(), fed);
            rows.into_iter().for_each(|row| *counts.entry(row).or_default() += 1);
        }
        let mut rows: Vec<(u64, u64)> = counts.into_iter().collect();
        rows.sort_unstable_by_key(|(row, count)| (std::cmp::Reverse(*count), *row));
        let mut file = PendingFile::create(path, TEMPORARY)?;
        writeln!(file, "# rows of the n-gram table, the most wanted first")?;
        rows.iter().try_for_each(|(row, _)| writeln!(file, "{row}"))?;
        file.commit()
    }

    /// Refuses options that the model has no use for.
    ///
    /// # Errors
    /// The first one typed.
    pub(crate) fn check(&self, source: &dyn TextSource) -> Result<(), FlashNextUsageError> {
        let (config, checkpoint) = (source.config(), source.artifact().is_none());
        match (config.flash_next.is_some(), self.given.as_slice()) {
            (false, [(option, _), ..]) => Err(FlashNextUsageError::OtherModel {
                option,
                architecture: config.architecture(),
            }),
            (true, [(option, true), ..]) if checkpoint => Err(FlashNextUsageError::Checkpoint { option }),
            _ => Ok(()),
        }
    }

    /// Refuses the artifact as its own second copy.
    ///
    /// # Errors
    /// When both are one file.
    pub(crate) fn check_copy(&self, artifact: &Path) -> Result<(), FlashNextUsageError> {
        let same = |copy: &&PathBuf| same_file(copy, artifact);
        match self.options.expert_stripe.as_ref().filter(same) {
            Some(copy) => Err(FlashNextUsageError::SameCopy(copy.clone())),
            None => Ok(()),
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
        settings.expert_a4_activations = self.options.four_bit_experts;
        let arithmetic = match (source.artifact().is_some(), route, self.options.four_bit_experts) {
            (true, Route::Exact, _) => "float32, decoded weights",
            (true, Route::Lossless, _) => "f64, decoded weights rounded to bfloat16",
            (true, _, true) => "exact integers, 4-bit activations",
            (true, _, false) => "exact integers, 16-bit activations",
            (false, Route::Lossless | Route::Reference, _) => "f64 products of the checkpoint's weights",
            (false, ..) => "float32 products of the checkpoint's weights",
        };
        let volume = match (&self.options.ngram_table, source.artifact()) {
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
        if let Some(path) = &self.options.expert_stripe {
            set("expert_stripe", path.display().to_string().into());
        }
        let is_volume = !self.options.ngram_table.as_ref().is_some_and(|path| path.is_dir());
        if source.artifact().is_some() && !self.options.without_ngrams && is_volume {
            let TableOptions { access, kept } = &self.options.ngram_rows;
            let hot = matches!(kept, Kept::Hot { .. });
            let whence = if hot { "ram-hot" } else { "disk" };
            let lock = |locked: bool| if locked { ", locked" } else { "" };
            let access = match access {
                Access::Mapped => format!("{whence}, mmap"),
                Access::Reads { depth, direct } => {
                    let how = if *direct { "direct" } else { "buffered" };
                    format!("{whence}, {how}, {depth} reads in flight")
                }
                Access::Memory { locked } => format!("ram{}", lock(*locked)),
            };
            match kept {
                Kept::Nothing => set("ngram_access", access.into()),
                Kept::Cache { bytes } => {
                    set("ngram_access", access.into());
                    set("ngram_ram_bytes", (*bytes).into());
                }
                Kept::Hot { profile, bytes, locked } => {
                    set("ngram_access", format!("{access}{}", lock(*locked)).into());
                    set("ngram_ram_bytes", (*bytes).into());
                    set("ngram_hot_profile", profile.display().to_string().into());
                }
            }
        }
        set("no_ngram_table", self.options.without_ngrams.into());
    }

    /// What the report notes before the run.
    pub(crate) fn notes(&self) -> Option<String> {
        let without = "scored without n-grams (--no-ngram-table): not the model as published";
        self.options.without_ngrams.then(|| without.to_owned())
    }
}

/// How the rows of the n-gram volume are read and kept.
fn rows(args: &FlashNextArgs) -> Result<TableOptions, FlashNextUsageError> {
    let needs = |option, other| Err(FlashNextUsageError::Needs { option, other });
    let residency = args.ngram_residency.unwrap_or(TableResidency::Disk);
    if args.ngram_lock && residency == TableResidency::Disk {
        return needs("--ngram-lock", "--ngram-residency ram or ram-hot");
    }
    if residency == TableResidency::Ram {
        let of_files = [
            ("--ngram-io", args.ngram_io.is_some()),
            ("--ngram-io-depth", args.ngram_io_depth.is_some()),
            ("--ngram-ram-mib", args.ngram_ram_mib.is_some()),
        ];
        if let Some((option, _)) = of_files.iter().find(|(_, given)| *given) {
            return needs(option, "--ngram-residency disk or ram-hot");
        }
    }
    let bytes = |default: u32| u64::from(args.ngram_ram_mib.unwrap_or(default)) * MIB;
    let locked = args.ngram_lock;
    let kept = match (residency, &args.ngram_hot_profile) {
        (TableResidency::RamHot, None) => return needs("--ngram-residency ram-hot", "--ngram-hot-profile"),
        (TableResidency::RamHot, Some(profile)) => Kept::Hot {
            profile: profile.clone(),
            bytes: bytes(DEFAULT_HOT_MIB),
            locked,
        },
        (_, Some(_)) => return needs("--ngram-hot-profile", "--ngram-residency ram-hot"),
        (_, None) => match bytes(0) {
            0 => Kept::Nothing,
            bytes => Kept::Cache { bytes },
        },
    };
    let access = match (args.ngram_io, args.ngram_io_depth) {
        _ if residency == TableResidency::Ram => Access::Memory { locked },
        (Some(io @ (TableIo::Buffered | TableIo::Direct)), depth) => match depth.unwrap_or(DEFAULT_READS) {
            depth @ 1..=MOST_READS => Access::Reads {
                depth: depth as usize,
                direct: io == TableIo::Direct,
            },
            depth => return Err(FlashNextUsageError::Depth(depth)),
        },
        (_, Some(_)) => return needs("--ngram-io-depth", "--ngram-io buffered or direct"),
        _ => Access::Mapped,
    };
    Ok(TableOptions { access, kept })
}

/// What the report notes of caches after the run.
pub(crate) fn notes(statistics: Statistics) -> Vec<String> {
    let share = |what: &str, of: CacheStatistics| {
        let uses = of.hits + of.misses;
        let share = 100.0 * of.hits as f64 / uses as f64;
        format!("{what}: {} of {uses} uses were ready, {share:.1} %", of.hits)
    };
    let Statistics { experts, rows } = statistics;
    let experts = (experts.misses > 0).then(|| share("expert cache", experts));
    let rows = (rows.hits + rows.misses > 0).then(|| share("n-gram rows in memory", rows));
    experts.into_iter().chain(rows).collect()
}
