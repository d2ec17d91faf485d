//! Arguments as resolved: defaults filled in, combinations checked, files found. Everything that can be refused before a
//! weight is read is refused here.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use crate::args::ScoreArgs;

/// The demo: a small trained model and texts that ship in the repository.
const DEMO_ARTIFACT: &str = "tests/data/demo.ninfer";
const DEMO_CORPUS: &str = "eval/corpora/open-1m/manifest.json";
const DEMO_MODE: &str = "demo";
/// The protocol of the published golden values.
const DEMO_CONTEXT: u32 = 1024;
const DEMO_STRIDE: u32 = 512;

const DEFAULT_CONTEXT: u32 = 4096;
const DEFAULT_STRIDE: u32 = 2048;
const DEFAULT_PREFILL_CHUNK: u32 = 1024;
/// Passes are whole tiles of prompt attention.
const PREFILL_CHUNK_MULTIPLE: u32 = 128;

/// KV representations that exist but are not in this build.
const OTHER_KV_FORMATS: [&str; 10] = [
    "int8", "fp8", "nvfp4", "k8v4", "vq2", "k4v2", "rk8v4", "rk4v4", "rk4v4-e8", "rk2v4-e8",
];

/// A command line that cannot be carried out as typed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum UsageError {
    #[error("--{0} is not in this build")]
    OptionNotBuilt(&'static str),
    #[error("{option} {value} is not in this build{hint}")]
    ValueNotBuilt {
        option: &'static str,
        value: String,
        hint: &'static str,
    },
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
    #[error("{what} {path:?} does not exist")]
    Missing { what: &'static str, path: PathBuf },
    #[error("{what} {path:?} is a directory, expected a file")]
    NotAFile { what: &'static str, path: PathBuf },
    #[error("--output {path:?}: {problem}")]
    Output { path: PathBuf, problem: &'static str },
}

/// Where the text comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Input {
    Corpus { manifest: PathBuf, mode: String },
    Text(PathBuf),
}

/// How streams are cut into windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Sliding { context: usize, stride: usize },
    Disjoint { context: usize },
}

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Device {
    NdArray,
    Flex,
    Cuda(usize),
    Vulkan(usize),
}

/// Where results are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    Normal,
    Exact,
}

/// A scoring run, ready to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ScoreOptions {
    pub(crate) artifact: PathBuf,
    pub(crate) input: Input,
    pub(crate) protocol: Protocol,
    pub(crate) device: Device,
    pub(crate) threads: Option<NonZeroUsize>,
    /// Windows per forward pass; `None` lets the device decide.
    pub(crate) batch: Option<NonZeroUsize>,
    pub(crate) kv_dtype: String,
    pub(crate) prefill_chunk: usize,
    pub(crate) route: Route,
    pub(crate) output: Option<PathBuf>,
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
        let (context, stride);
        let (artifact, input) = match source(args)? {
            Some(given) => {
                (context, stride) = (DEFAULT_CONTEXT, DEFAULT_STRIDE);
                given
            }
            None => {
                (context, stride) = (DEMO_CONTEXT, DEMO_STRIDE);
                demo(working_directory)?
            }
        };
        let protocol = protocol(args, context, stride)?;
        let options = Self {
            protocol,
            device: device(&args.device.device)?,
            threads: threads(args.device.threads)?,
            batch: batch(&args.device.batch)?,
            kv_dtype: kv_dtype(&args.kv.kv_dtype)?,
            prefill_chunk: prefill_chunk(args.route.prefill_chunk)?,
            route: route(&args.route.route)?,
            output: args.output.output.clone(),
            artifact,
            input,
        };
        if !options.artifact.exists() {
            return Err(UsageError::Missing {
                what: "artifact",
                path: options.artifact,
            });
        }
        match &options.input {
            Input::Corpus { manifest, .. } => require_file("--corpus", manifest)?,
            Input::Text(path) => require_file("--text", path)?,
        }
        if let Some(path) = &options.output {
            check_output(path)?;
        }
        Ok(options)
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
    let find = |name: &'static str| {
        working_directory
            .ancestors()
            .map(|folder| folder.join(name))
            .find(|path| path.is_file())
            .ok_or(UsageError::NoDemo { missing: name })
    };
    Ok((
        find(DEMO_ARTIFACT)?,
        Input::Corpus {
            manifest: find(DEMO_CORPUS)?,
            mode: DEMO_MODE.to_owned(),
        },
    ))
}

fn protocol(args: &ScoreArgs, default_context: u32, default_stride: u32) -> Result<Protocol, UsageError> {
    let context = args.protocol.context.unwrap_or(default_context);
    if context < 2 {
        let expected = "a window predicts at least one token from another, so 2 or more".to_owned();
        return Err(UsageError::OutOfRange {
            option: "--context",
            value: context,
            expected,
        });
    }
    if args.protocol.disjoint {
        return Ok(Protocol::Disjoint {
            context: context as usize,
        });
    }
    let stride = args.protocol.stride.unwrap_or(default_stride);
    if stride == 0 || stride >= context {
        let last = context - 1;
        let expected =
            format!("1 to {last} with --context {context}; pass --stride, or --disjoint for windows without overlap");
        return Err(UsageError::OutOfRange {
            option: "--stride",
            value: stride,
            expected,
        });
    }
    Ok(Protocol::Sliding {
        context: context as usize,
        stride: stride as usize,
    })
}

fn device(text: &str) -> Result<Device, UsageError> {
    let unknown = || UsageError::UnknownValue {
        option: "--device",
        value: text.to_owned(),
        expected: "ndarray, flex, cuda:N, vulkan:N or auto".to_owned(),
    };
    let not_built = |hint| UsageError::ValueNotBuilt {
        option: "--device",
        value: text.to_owned(),
        hint,
    };
    let index = |digits: &str| digits.parse::<usize>().map_err(|_| unknown());
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
        Device::NdArray if !cfg!(feature = "ndarray") => Err(not_built("; build with --features ndarray")),
        Device::Flex if !cfg!(feature = "flex") => Err(not_built("; build with --features flex")),
        Device::Cuda(_) | Device::Vulkan(_) => Err(not_built("")),
        device => Ok(device),
    }
}

pub(crate) fn threads(typed: Option<u32>) -> Result<Option<NonZeroUsize>, UsageError> {
    let positive = |n: u32| {
        let expected = "at least 1".to_owned();
        NonZeroUsize::new(n as usize).ok_or(UsageError::OutOfRange {
            option: "--threads",
            value: n,
            expected,
        })
    };
    typed.map(positive).transpose()
}

fn batch(text: &str) -> Result<Option<NonZeroUsize>, UsageError> {
    if text == "auto" {
        return Ok(None);
    }
    let unknown = |_| UsageError::UnknownValue {
        option: "--batch",
        value: text.to_owned(),
        expected: "auto or a number of windows, at least 1".to_owned(),
    };
    text.parse::<NonZeroUsize>().map(Some).map_err(unknown)
}

fn kv_dtype(text: &str) -> Result<String, UsageError> {
    let option = "--kv-dtype";
    match text {
        "bf16" => Ok(text.to_owned()),
        _ if OTHER_KV_FORMATS.contains(&text) => Err(UsageError::ValueNotBuilt {
            option,
            value: text.to_owned(),
            hint: "; bf16 is",
        }),
        _ => Err(UsageError::UnknownValue {
            option,
            value: text.to_owned(),
            expected: "bf16".to_owned(),
        }),
    }
}

fn prefill_chunk(typed: Option<u32>) -> Result<usize, UsageError> {
    let tokens = typed.unwrap_or(DEFAULT_PREFILL_CHUNK);
    if tokens == 0 || !tokens.is_multiple_of(PREFILL_CHUNK_MULTIPLE) {
        let expected = format!("a multiple of {PREFILL_CHUNK_MULTIPLE}");
        return Err(UsageError::OutOfRange {
            option: "--prefill-chunk",
            value: tokens,
            expected,
        });
    }
    Ok(tokens as usize)
}

fn route(text: &str) -> Result<Route, UsageError> {
    match text {
        "normal" => Ok(Route::Normal),
        "exact" => Ok(Route::Exact),
        _ => Err(UsageError::UnknownValue {
            option: "--route",
            value: text.to_owned(),
            expected: "normal or exact".to_owned(),
        }),
    }
}

fn require_file(what: &'static str, path: &Path) -> Result<(), UsageError> {
    if path.is_dir() {
        return Err(UsageError::NotAFile {
            what,
            path: path.to_owned(),
        });
    }
    // A pipe or a device is no regular file and still a text.
    if path.exists() {
        Ok(())
    } else {
        Err(UsageError::Missing {
            what,
            path: path.to_owned(),
        })
    }
}

fn check_output(path: &Path) -> Result<(), UsageError> {
    let refuse = |problem| {
        Err(UsageError::Output {
            path: path.to_owned(),
            problem,
        })
    };
    if !path.exists() {
        return Ok(());
    }
    if !path.is_dir() {
        return refuse("is a file, expected a directory that is missing or empty");
    }
    match std::fs::read_dir(path).map(|mut entries| entries.next().is_none()) {
        Ok(true) => Ok(()),
        Ok(false) => refuse("is not empty; a report never goes beside older files"),
        Err(_) => refuse("cannot be read"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
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
        assert_eq!(
            options.protocol,
            Protocol::Sliding {
                context: 1024,
                stride: 512
            }
        );
    }

    #[test]
    fn outside_a_clone_the_message_says_what_to_pass() {
        let nowhere = tempfile::tempdir().unwrap();
        let error = resolve_in(nowhere.path(), "").unwrap_err();
        assert_eq!(error, UsageError::NoDemo { missing: DEMO_ARTIFACT });
        assert!(
            error
                .to_string()
                .contains("pass ARTIFACT and --corpus MANIFEST or --text FILE")
        );
    }

    #[test]
    fn the_demo_takes_options() {
        let options = resolve("--context 256 --disjoint --route exact --device ndarray --batch 3 --threads 2").unwrap();
        assert_eq!(options.protocol, Protocol::Disjoint { context: 256 });
        assert_eq!((options.route, options.device), (Route::Exact, Device::NdArray));
        assert_eq!(
            (options.batch, options.threads),
            (NonZeroUsize::new(3), NonZeroUsize::new(2))
        );
    }

    #[test]
    fn a_model_and_a_text_come_in_pairs() {
        assert_eq!(resolve("MODEL"), Err(UsageError::NoText));
        assert_eq!(resolve("--text TEXT"), Err(UsageError::NoArtifact("the text")));
        assert_eq!(resolve("--corpus TEXT"), Err(UsageError::NoArtifact("the corpus")));
        assert_eq!(
            resolve("MODEL --quick"),
            Err(UsageError::NeedsCorpus { option: "--quick" })
        );
        assert_eq!(
            resolve("MODEL --mode m"),
            Err(UsageError::NeedsCorpus { option: "--mode" })
        );
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
        assert_eq!(
            options.protocol,
            Protocol::Sliding {
                context: 4096,
                stride: 2048
            }
        );
        assert_eq!((options.prefill_chunk, options.kv_dtype.as_str()), (1024, "bf16"));
        assert_eq!((options.batch, options.threads), (None, None));
    }

    #[test]
    fn windows_out_of_range_are_refused() {
        let refused = |line: &str| match resolve(&format!("MODEL --text TEXT {line}")) {
            Err(UsageError::OutOfRange { option, value, .. }) => (option, value),
            other => panic!("{line}: {other:?}"),
        };
        assert_eq!(refused("--context 1"), ("--context", 1));
        assert_eq!(refused("--context 1 --disjoint"), ("--context", 1));
        // The default stride stays 2048, whatever the context.
        assert_eq!(refused("--context 2048"), ("--stride", 2048));
        assert_eq!(refused("--stride 4096"), ("--stride", 4096));
        assert_eq!(refused("--stride 0"), ("--stride", 0));
        assert_eq!(refused("--threads 0"), ("--threads", 0));
        assert_eq!(refused("--prefill-chunk 0"), ("--prefill-chunk", 0));
        assert_eq!(refused("--prefill-chunk 100"), ("--prefill-chunk", 100));
        assert!(resolve("MODEL --text TEXT --context 2048 --disjoint").is_ok());
        assert!(resolve("MODEL --text TEXT --context 2 --stride 1").is_ok());
    }

    #[test]
    fn what_is_not_built_is_said_and_what_is_unknown_lists_the_known() {
        let error = |line: &str| resolve(line).unwrap_err().to_string();
        assert_eq!(error("--rope-yarn-factor 2"), "--rope-yarn-factor is not in this build");
        assert_eq!(error("--lossless"), "--lossless is not in this build");
        assert_eq!(
            error("--kv-dtype int8"),
            "--kv-dtype int8 is not in this build; bf16 is"
        );
        assert_eq!(
            error("--kv-dtype int7"),
            "--kv-dtype \"int7\" is not known; expected bf16"
        );
        assert_eq!(error("--device cuda:0"), "--device cuda:0 is not in this build");
        assert_eq!(error("--device 0"), "--device 0 is not in this build");
        for unknown in [
            "--device tpu",
            "--device cuda:x",
            "--device -1",
            "--route fast",
            "--batch 0",
            "--batch x",
        ] {
            assert!(error(unknown).contains("expected"), "{unknown}");
        }
    }

    #[test]
    fn later_values_win_and_repeated_flags_are_harmless() {
        let options =
            resolve("--context 64 --context 128 --stride 32 --stride 16 --route normal --route exact").unwrap();
        assert_eq!(
            options.protocol,
            Protocol::Sliding {
                context: 128,
                stride: 16
            }
        );
        assert_eq!(options.route, Route::Exact);
        assert!(resolve("--disjoint --disjoint").is_ok());
        assert_eq!(
            resolve("--fast-path a --fast-path b"),
            Err(UsageError::OptionNotBuilt("fast-path"))
        );
    }

    #[test]
    fn output_directories_must_be_missing_or_empty() {
        let root = clone();
        let out = |name: &str| resolve_in(root.path(), &format!("--output {}", root.path().join(name).display()));
        assert!(out("new/nested").is_ok());
        std::fs::create_dir(root.path().join("empty")).unwrap();
        assert!(out("empty").is_ok());
        assert!(matches!(out("below"), Err(UsageError::Output { .. })));
        assert!(matches!(out("below/a.txt"), Err(UsageError::Output { .. })));
    }

    #[test]
    fn missing_files_are_named() {
        let missing = |line: &str, name: &str| {
            let error = resolve(line).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("does not exist"), "{error}");
        };
        missing("nowhere.ninfer --text TEXT", "nowhere.ninfer");
        missing("MODEL --text nowhere.txt", "nowhere.txt");
        missing("MODEL --corpus nowhere.json", "nowhere.json");
    }
}
