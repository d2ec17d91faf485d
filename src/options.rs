//! Arguments as resolved: defaults filled in, combinations checked, files found. Everything that can be refused before a
//! weight is read is refused here.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use perplexity_eval::evaluate::{self, EvaluateError, SaveLogits, SaveTopTokens};
use perplexity_eval::files::{self, FilesError, Named, irregular};
use perplexity_eval::hidden::{Precision, SaveHidden};
use perplexity_eval::manifest::ManifestError;
use perplexity_eval::output::{self, OutputError};
use perplexity_eval::report::FILE_NAME;
use perplexity_eval::windows::{Protocol, WindowError, WindowKind};

use perplexity_model::config::TextConfig;
use perplexity_model::route::Route;

use crate::args::{ScoreArgs, digits};
use crate::flash_next::{self, FlashNext, FlashNextUsageError};
use crate::kv::{KvCache, KvUsageError};
use crate::memory::{self, MemoryError};
use crate::precision::Narrowing;
use crate::prefill::Prefill;
use crate::rope::{Rope, RopeUsageError};
use crate::route::{Numerics, RouteUsageError};

/// The demo: a small trained model and texts that ship in the repository.
const DEMO_ARTIFACT: &str = "tests/data/demo.ninfer";
const DEMO_CORPUS: &str = "eval/corpora/open-1m/manifest.json";
const DEMO_MODE: &str = "demo";
/// The protocol of the published golden values.
const DEMO_CONTEXT: u32 = 1024;
const DEMO_STRIDE: u32 = 512;

const DEFAULT_CONTEXT: u32 = 4096;
/// Stays what it is whatever the context, so that two runs with the same options are the same protocol.
const DEFAULT_STRIDE: u32 = 2048;
/// Threads beyond which a machine only waits for itself.
const MOST_THREADS: u32 = 512;
/// Tokens per position of a written reference: the most that its readers take.
const TOP_TOKENS: u32 = 64;

/// A command line that cannot be carried out as typed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UsageError {
    #[error("--{0} is not in this build")]
    OptionNotBuilt(&'static str),
    #[error("--device {0} is not in this build; build with --features {feature}", feature = .0.feature())]
    DeviceNotBuilt(Device),
    #[error("--device vulkan:{0}: only vulkan:0 can be chosen, the device that the Vulkan loader puts first")]
    VulkanDevice(usize),
    #[error(transparent)]
    Kv(#[from] KvUsageError),
    #[error(transparent)]
    Route(#[from] RouteUsageError),
    #[error(transparent)]
    FlashNext(#[from] FlashNextUsageError),
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error(transparent)]
    Rope(#[from] RopeUsageError),
    #[error("{option} {value:?} is not known; expected {expected}")]
    UnknownValue {
        option: &'static str,
        value: String,
        expected: String,
    },
    #[error("{option} {value} is out of range: {expected}")]
    OutOfRange {
        option: &'static str,
        value: u32,
        expected: String,
    },
    #[error("--{0} is not in this build for Qwen3.8-Flash-Next")]
    NotForFlashNext(&'static str),
    #[error("bench does not measure Qwen3.8-Flash-Next in this build")]
    NoBench,
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("no text to score: pass --corpus MANIFEST or --text FILE")]
    NoText,
    #[error("no model to score {0} with: pass the artifact or the checkpoint directory first")]
    NoArtifact(&'static str),
    #[error("{option} needs --corpus MANIFEST")]
    NeedsCorpus { option: &'static str },
    #[error(
        "no artifact given and no demo found: {missing} is in neither the working directory nor a folder above it; run inside a clone of the repository, or pass ARTIFACT and --corpus MANIFEST or --text FILE"
    )]
    NoDemo { missing: &'static str },
    #[error(
        "no tokenizer given and no demo found: {missing} is in neither the working directory nor a folder above it; pass --tokenizer MODEL"
    )]
    NoTokenizer { missing: &'static str },
    #[error("--calibrate is for recipes with 4-bit activations; {recipe} permits none")]
    NothingToCalibrate { recipe: String },
    #[error("no recipe given: pass --recipe NAME or FILE")]
    NoRecipe,
    #[error("{option} is not for --preset {preset}")]
    NotForPreset { option: &'static str, preset: &'static str },
    #[error("{0:?} exists already; an artifact is never overwritten")]
    ArtifactExists(PathBuf),
    #[error("{what} {path:?} does not exist")]
    Missing { what: &'static str, path: PathBuf },
    #[error("{what} {path:?} is {kind}, expected {expected}")]
    Kind {
        what: &'static str,
        path: PathBuf,
        kind: &'static str,
        expected: &'static str,
    },
    #[error("{0}; pass --context and --stride, or --disjoint for windows without overlap")]
    Windows(#[from] WindowError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error("--mode: {0}")]
    Mode(ManifestError),
    #[error(transparent)]
    Comparison(#[from] EvaluateError),
}

/// Where the text comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Input {
    Corpus { manifest: PathBuf, mode: String },
    Text(PathBuf),
}

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Device {
    NdArray,
    Flex,
    Cuda(usize),
    Vulkan(usize),
}

impl Device {
    /// The cargo feature that builds it in.
    fn feature(self) -> &'static str {
        match self {
            Self::NdArray => "ndarray",
            Self::Flex => "flex",
            Self::Cuda(_) => "cuda",
            Self::Vulkan(_) => "vulkan",
        }
    }

    fn is_built(self) -> bool {
        match self {
            Self::NdArray => cfg!(feature = "ndarray"),
            Self::Flex => cfg!(feature = "flex"),
            Self::Cuda(_) => cfg!(feature = "cuda"),
            Self::Vulkan(_) => cfg!(feature = "vulkan"),
        }
    }

    /// Number of the card; `None` on the CPU.
    pub(crate) fn index(self) -> Option<usize> {
        match self {
            Self::NdArray | Self::Flex => None,
            Self::Cuda(n) | Self::Vulkan(n) => Some(n),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NdArray => f.write_str("ndarray"),
            Self::Flex => f.write_str("flex"),
            Self::Cuda(n) => write!(f, "cuda:{n}"),
            Self::Vulkan(n) => write!(f, "vulkan:{n}"),
        }
    }
}

/// A scoring run, ready to start.
#[derive(Debug, Clone)]
pub(crate) struct ScoreOptions {
    pub(crate) artifact: PathBuf,
    pub(crate) input: Input,
    pub(crate) protocol: Protocol,
    /// Windows of each stream to score; `None` for all.
    pub(crate) chunks: Option<NonZeroUsize>,
    pub(crate) device: Device,
    pub(crate) threads: Option<NonZeroUsize>,
    /// Windows per forward pass as typed; `None` for as many as serve the device.
    pub(crate) batch: Option<NonZeroUsize>,
    /// Bytes of the card's memory that may be taken, as typed.
    pub(crate) memory_budget: Option<u64>,
    /// The files to compare with and to write, and the windows per forward pass of a CPU.
    pub(crate) evaluation: evaluate::Options,
    pub(crate) kv: KvCache,
    /// Whether the pass size, and with it the batch, is left to the model.
    default_pass: [bool; 2],
    pub(crate) flash_next: FlashNext,
    pub(crate) prefill: Prefill,
    pub(crate) rope: Rope,
    pub(crate) precision: Narrowing,
    pub(crate) numerics: Numerics,
    pub(crate) output: Option<PathBuf>,
    /// Where finished windows are kept until the run is done.
    pub(crate) resume: Option<PathBuf>,
}

impl ScoreOptions {
    /// Resolves what was typed, looking for the demo from `working_directory` upwards.
    ///
    /// # Errors
    /// The first thing that makes the command line unusable.
    pub(crate) fn resolve(args: &ScoreArgs, working_directory: &Path) -> Result<Self, UsageError> {
        if let Some(option) = args.unbuilt.given.first() {
            return Err(UsageError::OptionNotBuilt(option));
        }
        let ((artifact, input), context, stride) = match source(args)? {
            Some(given) => (given, DEFAULT_CONTEXT, DEFAULT_STRIDE),
            None => (demo(working_directory)?, DEMO_CONTEXT, DEMO_STRIDE),
        };
        let context = args.protocol.context.unwrap_or(context) as usize;
        let stride = args.protocol.stride.unwrap_or(stride) as usize;
        let kind = match (args.protocol.disjoint, args.protocol.llama_chunks) {
            (false, false) => WindowKind::Sliding,
            (true, _) => WindowKind::Disjoint,
            (false, true) => WindowKind::LlamaChunks,
        };
        let device = device(&args.device.device)?;
        let protocol = Protocol::new(kind, context, stride)?;
        let numerics = Numerics::resolve(args, context, device)?;
        let route = numerics.route;
        let prefill = match route.is_precise() {
            true => Prefill::whole_window(&args.route, device, context)?,
            false => Prefill::resolve(&args.route, device)?,
        };
        let batch = batch(&args.device.batch)?;
        let comparison = &args.comparison;
        let evaluation = evaluate::Options {
            // Without a choice, as many as fill one prefill pass: on a CPU a larger product is no faster.
            batch: batch.map_or((prefill.tokens / protocol.context()).max(1), usize::from),
            shard: args.protocol.shard.unwrap_or_default(),
            save_top_tokens: comparison.save_top_tokens.clone().map(|path| SaveTopTokens {
                path,
                per_position: TOP_TOKENS,
            }),
            kl_reference: comparison.kl_reference.clone(),
            save_tokens: comparison.save_tokens.clone(),
            logits_out: comparison
                .save_logits
                .clone()
                .map(|path| SaveLogits { path, row_width: None }),
            logits_reference: comparison.kl_base.clone(),
            // Width and precision of the logits are the model's, which is opened later.
            save_hidden: comparison.save_hidden.clone().map(|path| SaveHidden {
                path,
                hidden_size: 0,
                precision: hidden_precision(route),
                logits: Precision::F32,
            }),
            kl_hidden: comparison.kl_hidden.clone(),
            ..evaluate::Options::default()
        };
        let options = Self {
            protocol,
            chunks: positive("--chunks", args.protocol.chunks)?,
            device,
            batch,
            memory_budget: memory::budget(args.device.memory_budget.as_deref(), device)?,
            threads: threads(args.device.threads)?,
            evaluation,
            kv: KvCache::resolve(&args.kv, route)?,
            default_pass: [args.route.prefill_chunk.is_none(), args.device.batch == "auto"],
            flash_next: FlashNext::resolve(&args.flash_next, route)?,
            prefill,
            rope: Rope::resolve(&args.rope)?,
            precision: Narrowing::resolve(&args.device, &args.route, route.narrows_activations()),
            numerics,
            output: args.output.output.clone(),
            resume: args.output.resume.clone(),
            artifact,
            input,
        };
        require_model("artifact", &options.artifact)?;
        match &options.input {
            Input::Corpus { manifest, .. } => require_file("--corpus", manifest)?,
            Input::Text(path) => require_file("--text", path)?,
        }
        if let Some(path) = &options.output {
            output::check(path)?;
            options.check_directory(path)?;
        }
        let evaluation = &options.evaluation;
        let flash_next = &args.flash_next;
        for (option, path) in [
            ("--kl-reference", &evaluation.kl_reference),
            ("--kl-base", &evaluation.logits_reference),
            ("--kl-hidden", &evaluation.kl_hidden),
            ("--ngram-volume", &flash_next.ngram_volume),
            ("--ngram-hot-profile", &flash_next.ngram_hot_profile),
            ("--expert-stripe", &flash_next.expert_stripe),
        ] {
            path.as_deref().map_or(Ok(()), |path| require_file(option, path))?;
        }
        if let Some(path) = &flash_next.ngram_table {
            require_model("--ngram-table", path)?;
        }
        options.flash_next.check_copy(&options.artifact)?;
        let text = match &options.input {
            Input::Corpus { manifest, .. } => ("the corpus manifest", manifest.as_path()),
            Input::Text(path) => ("the text", path.as_path()),
        };
        options.check_apart(&[text])?;
        files::check_folders(&options.outputs())?;
        if let Some(SaveLogits { path, .. }) = options.evaluation.logits_out.as_ref().filter(|save| save.path.exists())
        {
            let (role, path) = ("--save-logits", path.clone());
            return Err(FilesError::Exists { role, path }.into());
        }
        options.evaluation.check()?;
        Ok(options)
    }

    /// Refuses outputs beside the report that would be in the way of its directory.
    ///
    /// # Errors
    /// The first output that would.
    pub(crate) fn check_directory(&self, directory: &Path) -> Result<(), FilesError> {
        files::check_directory(directory, &self.outputs())
    }

    /// The options with the defaults of the model at hand.
    pub(crate) fn for_model(&self, config: &TextConfig) -> Self {
        let mut options = self.clone();
        let [default_chunk, default_batch] = self.default_pass;
        if config.flash_next.is_some() && default_chunk {
            options.prefill.tokens = flash_next::PREFILL_CHUNK;
            if default_batch {
                options.evaluation.batch = (options.prefill.tokens / self.protocol.context()).max(1);
            }
        }
        options
    }

    /// Refuses outputs that would replace one another, the model, a reference or one of `others`.
    ///
    /// # Errors
    /// The first output that would.
    pub(crate) fn check_apart(&self, others: &[Named<'_>]) -> Result<(), FilesError> {
        let evaluation = &self.evaluation;
        let read: [Option<Named<'_>>; 4] = [
            Some(("the artifact", &self.artifact)),
            evaluation.kl_reference.as_deref().map(|path| ("--kl-reference", path)),
            evaluation.logits_reference.as_deref().map(|path| ("--kl-base", path)),
            evaluation.kl_hidden.as_deref().map(|path| ("--kl-hidden", path)),
        ];
        let read = read.into_iter().flatten().chain(self.flash_next.inputs());
        let read: Vec<Named<'_>> = read.chain(others.iter().copied()).collect();
        let report = self.output.as_ref().map(|folder| folder.join(FILE_NAME));
        let report = report.as_deref().map(|path| ("the report", path));
        let written: Vec<Named<'_>> = report.into_iter().chain(self.outputs()).collect();
        files::check_apart(&read, &written)
    }

    /// The files beside the report that the run writes.
    fn outputs(&self) -> Vec<Named<'_>> {
        let evaluation = &self.evaluation;
        let written: [Option<Named<'_>>; 5] = [
            evaluation
                .save_top_tokens
                .as_ref()
                .map(|save| ("--save-top-tokens", save.path.as_path())),
            evaluation.save_tokens.as_deref().map(|path| ("--save-tokens", path)),
            evaluation
                .logits_out
                .as_ref()
                .map(|save| ("--save-logits", save.path.as_path())),
            evaluation
                .save_hidden
                .as_ref()
                .map(|save| ("--save-hidden", save.path.as_path())),
            self.resume.as_deref().map(|path| ("--resume", path)),
        ];
        written.into_iter().flatten().chain(self.flash_next.output()).collect()
    }
}

/// The model and text that were named; `None` when neither was.
fn source(args: &ScoreArgs) -> Result<Option<(PathBuf, Input)>, UsageError> {
    let typed = &args.input;
    let input = match (&typed.corpus, &typed.text) {
        (Some(manifest), _) => {
            let mode = if typed.quick {
                "quick"
            } else {
                typed.mode.as_deref().unwrap_or("full")
            };
            Some(Input::Corpus {
                manifest: manifest.clone(),
                mode: mode.to_owned(),
            })
        }
        (None, Some(text)) => Some(Input::Text(text.clone())),
        (None, None) if typed.quick => return Err(UsageError::NeedsCorpus { option: "--quick" }),
        (None, None) if typed.mode.is_some() => return Err(UsageError::NeedsCorpus { option: "--mode" }),
        (None, None) => None,
    };
    match (&typed.artifact, input) {
        (Some(artifact), Some(input)) => Ok(Some((artifact.clone(), input))),
        (Some(_), None) => Err(UsageError::NoText),
        (None, Some(Input::Corpus { .. })) => Err(UsageError::NoArtifact("the corpus")),
        (None, Some(Input::Text(_))) => Err(UsageError::NoArtifact("the text")),
        (None, None) => Ok(None),
    }
}

fn demo(working_directory: &Path) -> Result<(PathBuf, Input), UsageError> {
    Ok((
        find_demo(working_directory)?,
        Input::Corpus {
            manifest: find_above(working_directory, DEMO_CORPUS)?,
            mode: DEMO_MODE.to_owned(),
        },
    ))
}

/// The demo artifact, in the working directory or a folder above it.
pub(crate) fn find_demo(working_directory: &Path) -> Result<PathBuf, UsageError> {
    find_above(working_directory, DEMO_ARTIFACT)
}

fn find_above(working_directory: &Path, name: &'static str) -> Result<PathBuf, UsageError> {
    working_directory
        .ancestors()
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
        .ok_or(UsageError::NoDemo { missing: name })
}

pub(crate) fn device(text: &str) -> Result<Device, UsageError> {
    let unknown = || UsageError::UnknownValue {
        option: "--device",
        value: text.to_owned(),
        expected: "ndarray, flex, cuda:N, vulkan:N or auto".to_owned(),
    };
    let index = |text: &str| digits(text).map_err(|_| unknown());
    let device = match text {
        "auto" if cfg!(feature = "flex") => Device::Flex,
        "auto" | "ndarray" => Device::NdArray,
        "flex" => Device::Flex,
        _ => match text.split_once(':') {
            Some(("cuda", n)) => Device::Cuda(index(n)?),
            Some(("vulkan", n)) => Device::Vulkan(index(n)?),
            Some(_) => return Err(unknown()),
            None => Device::Cuda(index(text)?),
        },
    };
    match device {
        device if !device.is_built() => Err(UsageError::DeviceNotBuilt(device)),
        Device::Vulkan(n) if n > 0 => Err(UsageError::VulkanDevice(n)),
        device => Ok(device),
    }
}

pub(crate) fn positive(option: &'static str, typed: Option<u32>) -> Result<Option<NonZeroUsize>, UsageError> {
    let check = |n: u32| {
        let expected = "at least 1".to_owned();
        NonZeroUsize::new(n as usize).ok_or(UsageError::OutOfRange {
            option,
            value: n,
            expected,
        })
    };
    typed.map(check).transpose()
}

pub(crate) fn threads(typed: Option<u32>) -> Result<Option<NonZeroUsize>, UsageError> {
    if let Some(value) = typed.filter(|n| *n > MOST_THREADS) {
        return Err(UsageError::OutOfRange {
            option: "--threads",
            value,
            expected: format!("at most {MOST_THREADS}"),
        });
    }
    positive("--threads", typed)
}

/// Windows per forward pass; `None` for `auto`.
fn batch(text: &str) -> Result<Option<NonZeroUsize>, UsageError> {
    let unknown = || UsageError::UnknownValue {
        option: "--batch",
        value: text.to_owned(),
        expected: "auto or a number of windows, at least 1".to_owned(),
    };
    match text {
        "auto" => Ok(None),
        _ => digits(text)
            .ok()
            .and_then(NonZeroUsize::new)
            .map(Some)
            .ok_or_else(unknown),
    }
}

/// Hidden states are saved as the route has them: rounded to bf16, or not at all.
fn hidden_precision(route: Route) -> Precision {
    match route {
        Route::Exact => Precision::F32,
        _ => Precision::Bf16,
    }
}

/// A file that is read must be there, and end: a pipe or a device is refused before anything waits for it.
pub(crate) fn require_file(what: &'static str, path: &Path) -> Result<(), UsageError> {
    match kind(what, path)? {
        None => Ok(()),
        Some(kind) => Err(UsageError::Kind {
            what,
            path: path.to_owned(),
            kind,
            expected: "a file",
        }),
    }
}

/// A model is a file or the directory of a checkpoint.
pub(crate) fn require_model(what: &'static str, path: &Path) -> Result<(), UsageError> {
    match kind(what, path)? {
        Some(kind) if !path.is_dir() => Err(UsageError::Kind {
            what,
            path: path.to_owned(),
            kind,
            expected: "a file or a directory",
        }),
        _ => Ok(()),
    }
}

/// A checkpoint is a directory.
pub(crate) fn require_directory(what: &'static str, path: &Path) -> Result<(), UsageError> {
    match kind(what, path)? {
        _ if path.is_dir() => Ok(()),
        kind => Err(UsageError::Kind {
            what,
            path: path.to_owned(),
            kind: kind.unwrap_or("a file"),
            expected: "a directory",
        }),
    }
}

/// What a path names when it is no regular file.
fn kind(what: &'static str, path: &Path) -> Result<Option<&'static str>, UsageError> {
    match path.metadata() {
        Ok(found) => Ok(irregular(&found)),
        // Whatever else the system has against it, opening will say.
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Ok(None),
        Err(_) => Err(UsageError::Missing {
            what,
            path: path.to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use crate::route::SoftmaxRows;
    use clap::{CommandFactory, Parser};

    /// A clone of the repository in small: the demo's two files, a text and an empty folder below them.
    fn clone() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in [DEMO_ARTIFACT, DEMO_CORPUS, "below/a.txt"] {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        }
        root
    }

    fn resolve_in(folder: &Path, line: &str) -> Result<ScoreOptions, UsageError> {
        let cli = Cli::try_parse_from(std::iter::once("burn-perplexity").chain(line.split_whitespace())).unwrap();
        ScoreOptions::resolve(&cli.score, folder)
    }

    fn resolve(line: &str) -> Result<ScoreOptions, UsageError> {
        let root = clone();
        let line = line.replace("MODEL", root.path().join(DEMO_ARTIFACT).to_str().unwrap());
        resolve_in(
            root.path(),
            &line.replace("TEXT", root.path().join("below/a.txt").to_str().unwrap()),
        )
    }

    #[test]
    fn the_command_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    fn refusal(line: &str) -> String {
        resolve(line).unwrap_err().to_string()
    }

    fn sliding(context: usize, stride: usize) -> Protocol {
        Protocol::new(WindowKind::Sliding, context, stride).unwrap()
    }

    #[test]
    fn without_arguments_the_demo_is_found_from_a_folder_below() {
        let root = clone();
        let options = resolve_in(&root.path().join("below"), "").unwrap();
        assert_eq!(options.artifact, root.path().join(DEMO_ARTIFACT));
        let manifest = root.path().join(DEMO_CORPUS);
        assert_eq!(
            options.input,
            Input::Corpus {
                manifest,
                mode: "demo".into()
            }
        );
        assert_eq!(options.protocol, sliding(1024, 512));
    }

    #[test]
    fn outside_a_clone_the_message_says_what_to_pass() {
        let nowhere = tempfile::tempdir().unwrap();
        let message = resolve_in(nowhere.path(), "").unwrap_err().to_string();
        assert!(message.contains(DEMO_ARTIFACT), "{message}");
        assert!(
            message.contains("pass ARTIFACT and --corpus MANIFEST or --text FILE"),
            "{message}"
        );
    }

    #[test]
    fn the_demo_takes_options() {
        let options = resolve("--context 256 --disjoint --route exact --device ndarray --batch 3 --threads 2").unwrap();
        assert_eq!(options.protocol, Protocol::new(WindowKind::Disjoint, 256, 512).unwrap());
        assert_eq!(
            (options.numerics.route, options.device),
            (Route::Exact, Device::NdArray)
        );
        assert_eq!((options.evaluation.batch, options.threads), (3, NonZeroUsize::new(2)));
    }

    #[test]
    fn a_model_and_a_text_come_in_pairs() {
        assert!(refusal("MODEL").starts_with("no text to score"));
        assert!(refusal("--text TEXT").starts_with("no model to score the text with"));
        assert!(refusal("--corpus TEXT").starts_with("no model to score the corpus with"));
        assert_eq!(refusal("MODEL --quick"), "--quick needs --corpus MANIFEST");
        assert_eq!(refusal("MODEL --mode m"), "--mode needs --corpus MANIFEST");
    }

    #[test]
    fn the_mode_defaults_to_full() {
        let mode = |line: &str| match resolve(line).unwrap().input {
            Input::Corpus { mode, .. } => mode,
            Input::Text(_) => unreachable!("a corpus was given"),
        };
        assert_eq!(mode("MODEL --corpus TEXT"), "full");
        assert_eq!(mode("MODEL --corpus TEXT --quick"), "quick");
        assert_eq!(mode("MODEL --corpus TEXT --mode demo"), "demo");
    }

    #[test]
    fn defaults_are_the_published_ones() {
        let options = resolve("MODEL --text TEXT").unwrap();
        assert_eq!(options.protocol, sliding(4096, 2048));
        assert_eq!((options.prefill.tokens, options.kv.recorded().as_str()), (1024, "bf16"));
        assert_eq!(
            (options.evaluation.batch, options.threads, options.chunks),
            (1, None, None)
        );
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        for line in ["--context 1", "--context 1 --disjoint", "--context 0"] {
            assert!(refusal(line).starts_with("context must be at least 2 tokens"), "{line}");
        }
        // The default stride stays 2048, whatever the context.
        for line in [
            "MODEL --text TEXT --context 2048",
            "--stride 4096 --context 4096",
            "--stride 0",
        ] {
            let message = refusal(line);
            assert!(
                message.starts_with("stride must be at least 1 and less than the context"),
                "{message}"
            );
            assert!(message.contains("--disjoint"), "{message}");
        }
        assert_eq!(refusal("--threads 0"), "--threads 0 is out of range: at least 1");
        assert_eq!(refusal("--chunks 0"), "--chunks 0 is out of range: at least 1");
        assert_eq!(
            refusal("--prefill-chunk 0"),
            "--prefill-chunk 0 is out of range: a multiple of 128"
        );
        assert_eq!(
            refusal("--prefill-chunk 100"),
            "--prefill-chunk 100 is out of range: a multiple of 128"
        );
        assert_eq!(
            refusal("--attention-wave 64"),
            "--attention-wave 64 is out of range: a multiple of 128"
        );
        assert!(resolve("MODEL --text TEXT --context 2048 --disjoint").is_ok());
        assert!(resolve("MODEL --text TEXT --context 2 --stride 1").is_ok());
    }

    #[test]
    fn what_is_not_built_is_said_and_what_is_unknown_lists_the_known() {
        assert_eq!(refusal("--devices 0,1"), "--devices is not in this build");
        assert_eq!(
            refusal("--fast-path a --fast-path b"),
            "--fast-path is not in this build"
        );
        assert!(refusal("--kv-dtype int7").starts_with("--kv-dtype: unknown KV codec `int7`; accepted: "));
        for line in [
            "--device tpu",
            "--device cuda:x",
            "--device -1",
            "--route fast",
            "--batch 0",
            "--batch x",
        ] {
            assert!(refusal(line).contains("expected"), "{line}");
        }
    }

    #[test]
    fn routes_take_what_they_can_and_say_why_not() {
        let numerics = |line: &str| resolve(line).unwrap().numerics;
        let rows = |line: &str| numerics(line).softmax_rows;
        assert_eq!(numerics("").route, Route::Normal);
        assert_eq!(
            numerics("--reproducible --prefill-chunk 128").route,
            Route::Reproducible
        );
        let lossless = numerics("--lossless --prefill-chunk 2048");
        assert_eq!(
            (lossless.route, resolve("--lossless").unwrap().prefill.tokens),
            (Route::Lossless, 1024)
        );
        assert_eq!(resolve("--reference --context 700").unwrap().prefill.tokens, 700);
        assert_eq!(rows("--lossless"), SoftmaxRows::All);
        assert_eq!(rows("--lossless --softmax-rows public"), SoftmaxRows::Public);
        assert_eq!(rows("--reference"), SoftmaxRows::Public);
        assert_eq!(rows("--softmax-rows all"), SoftmaxRows::All);
        for (line, words) in [
            (
                "--lossless --reference",
                "--lossless and --reference are different routes",
            ),
            (
                "--route exact --reproducible",
                "--route exact and --reproducible are different",
            ),
            (
                "--lossless --prefill-chunk 512",
                "less than the window of 1024 tokens: --lossless sees",
            ),
            (
                "--reference --prefill-chunk 896",
                "--reference sees a window in one pass",
            ),
            ("--lossless --kv-dtype int8", "--lossless keeps keys and values in bf16"),
            ("--lossless --kv-window off", "--lossless keeps keys and values in bf16"),
            (
                "--lossless --kv-emulation kernel",
                "--lossless keeps keys and values in bf16",
            ),
            (
                "--reference --kv-emulation kernel",
                "--reference reads a codec's rows by its definition",
            ),
            (
                "--reproducible --kv-dtype nvfp4 --prefill-8bit-pv",
                "depends on the pass",
            ),
        ] {
            let message = refusal(line);
            assert!(message.contains(words), "{line}: {message}");
        }
        assert_eq!(resolve("--lossless --kv-dtype bf16").unwrap().kv.codec(), None);
        assert!(resolve("--reference --kv-dtype nvfp4").unwrap().kv.codec().is_some());
        if cfg!(feature = "cuda") {
            assert_eq!(numerics("--lossless --device cuda:0").route, Route::Lossless);
            assert!(refusal("--reproducible --device cuda:0").ends_with("pass --device flex or ndarray"));
        }
        if cfg!(feature = "vulkan") {
            let words = "no f64 there; pass --device cuda:N, flex or ndarray";
            assert!(refusal("--reference --device vulkan:0").ends_with(words));
        }
    }

    #[test]
    fn a_device_of_another_build_names_the_feature() {
        if !cfg!(feature = "cuda") {
            let message = "--device cuda:0 is not in this build; build with --features cuda";
            assert_eq!(refusal("--device cuda:0"), message);
            assert_eq!(refusal("--device 0"), message);
        }
        if !cfg!(feature = "vulkan") {
            assert!(refusal("--device vulkan:0").ends_with("build with --features vulkan"));
        }
    }

    #[test]
    fn the_folder_of_a_state_file_must_exist() {
        assert!(refusal("--resume nowhere/state").contains("folder of --resume \"nowhere\" does not exist"));
        assert!(resolve("--resume state").is_ok());
    }

    #[test]
    fn small_windows_share_a_pass() {
        let batch = |line: &str| resolve(line).unwrap().evaluation.batch;
        assert_eq!(batch("--context 1024"), 1);
        assert_eq!(batch("--context 100 --stride 50"), 10);
        assert_eq!(batch("--context 100 --stride 50 --prefill-chunk 256"), 2);
        assert_eq!(batch("--context 100 --stride 50 --batch 1"), 1);
    }

    #[test]
    fn comparison_files_are_checked_first() {
        assert!(refusal("--kl-reference nowhere.bin").contains("nowhere.bin"));
        let root = clone();
        let line = "--save-top-tokens new.bin --save-tokens new.bin";
        assert!(matches!(
            resolve_in(root.path(), line),
            Err(UsageError::Files(FilesError::Meets { .. }))
        ));
        // What is in the file is looked at when the work begins.
        assert!(resolve("--kl-reference TEXT").is_ok());
    }

    #[test]
    fn later_values_win_and_repeated_flags_are_harmless() {
        let line = "--context 64 --context 128 --stride 32 --stride 16 --route normal --route exact";
        let options = resolve(line).unwrap();
        assert_eq!(
            (options.protocol, options.numerics.route),
            (sliding(128, 16), Route::Exact)
        );
        assert!(resolve("--disjoint --disjoint").is_ok());
    }

    #[test]
    fn output_directories_must_be_missing_or_empty() {
        let root = clone();
        let out = |name: &str| resolve_in(root.path(), &format!("--output {}", root.path().join(name).display()));
        assert!(out("new/nested").is_ok());
        std::fs::create_dir(root.path().join("empty")).unwrap();
        assert!(out("empty").is_ok());
        assert!(matches!(
            out("below"),
            Err(UsageError::Output(OutputError::NotEmpty { .. }))
        ));
        assert!(matches!(
            out("below/a.txt"),
            Err(UsageError::Output(OutputError::NotADirectory { .. }))
        ));
    }

    #[test]
    fn missing_files_are_named() {
        for (line, name) in [
            ("nowhere.ninfer --text TEXT", "nowhere.ninfer"),
            ("MODEL --text nowhere.txt", "nowhere.txt"),
            ("MODEL --corpus nowhere.json", "nowhere.json"),
        ] {
            let message = refusal(line);
            assert!(
                message.contains(name) && message.contains("does not exist"),
                "{message}"
            );
        }
    }
}
