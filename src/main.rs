//! burn-perplexity: perplexity of text under a quantised Qwen3.5-family model, offline.
//!
//! The program only joins the parts: arguments, device, corpus, model, report. `perplexity-model` computes,
//! `perplexity-eval` decides what is computed and what the numbers mean.

mod args;
mod bench;
mod compare;
mod convert;
mod flash_next;
mod gate;
mod inspect;
mod kv;
mod log;
mod memory;
mod merge;
mod options;
mod precision;
mod prefill;
mod rope;
mod route;
mod score;
mod synth;
mod terminal;
mod unbuilt;

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use args::{Cli, Command};
use log::{Level, Log};
use options::{ScoreOptions, UsageError};

/// Why a command ended early; decides the exit code.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The command line cannot be carried out as typed, or names a file that is not there: exit code 2.
    #[error("{0}; try '--help'")]
    Usage(#[from] UsageError),
    /// The work could not be done: exit code 1.
    #[error(transparent)]
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

impl Failure {
    /// Any error met while working.
    pub(crate) fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Failed(error.into())
    }
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Help and version come this way too, for standard output and with exit code 0; a wrong command line exits with 2.
        Err(message) => {
            let _ = message.print();
            return ExitCode::from(u8::try_from(message.exit_code()).unwrap_or(2));
        }
    };
    let log = Log::stderr(log_level(&cli));
    match run(cli, &log) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            log.error(&failure);
            ExitCode::from(match failure {
                Failure::Failed(_) => 1,
                Failure::Usage(_) => 2,
            })
        }
    }
}

fn log_level(cli: &Cli) -> Level {
    match &cli.command {
        Some(Command::Convert(args)) => args.log.log_level,
        Some(Command::Synth(args)) => args.log.log_level,
        Some(Command::Bench(args)) => args.log.log_level,
        Some(Command::Inspect(args)) => args.log.log_level,
        Some(Command::Compare(args)) => args.log.log_level,
        Some(Command::Merge(args)) => args.log.log_level,
        Some(Command::Gate(args)) => args.log.log_level,
        Some(Command::Completions { .. } | Command::Man { .. }) => Level::Info,
        None => cli.score.output.log.log_level,
    }
}

fn run(cli: Cli, log: &Log) -> Result<(), Failure> {
    match cli.command {
        Some(Command::Convert(args)) => convert::run(&args, log),
        Some(Command::Synth(args)) => synth::run(&args, &working_directory()?, log),
        Some(Command::Bench(args)) => print(&bench::run(&args, log)?),
        Some(Command::Inspect(args)) => print(&inspect::run(&args)?),
        Some(Command::Compare(args)) => print(&compare::run(&args)?),
        Some(Command::Merge(args)) => print(&merge::run(&args)?),
        Some(Command::Gate(args)) => print(&gate::run(&args)?),
        Some(Command::Completions { shell }) => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "burn-perplexity", &mut script);
            print(&script)
        }
        Some(Command::Man { dir: None }) => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Cli::command())
                .render(&mut page)
                .map_err(Failure::failed)?;
            print(&page)
        }
        Some(Command::Man { dir: Some(dir) }) => std::fs::create_dir_all(&dir)
            .and_then(|()| clap_mangen::generate_to(Cli::command(), &dir))
            .map_err(|error| Failure::failed(format!("cannot write the manual pages into {}: {error}", dir.display()))),
        None => {
            let options = ScoreOptions::resolve(&cli.score, &working_directory()?)?;
            print(&score::run(&options, log)?)
        }
    }
}

fn working_directory() -> Result<PathBuf, Failure> {
    std::env::current_dir().map_err(|error| Failure::failed(format!("cannot find the working directory: {error}")))
}

/// Limits the CPU threads that every computation shares; one per core without a limit.
pub(crate) fn limit_threads(threads: Option<NonZeroUsize>) -> Result<(), Failure> {
    let Some(threads) = threads else { return Ok(()) };
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads.get())
        .build_global()
        .map_err(Failure::failed)
}

/// `value` as indented JSON with a newline at the end.
pub(crate) fn json(value: &impl serde::Serialize) -> Result<Vec<u8>, Failure> {
    let mut text = serde_json::to_vec_pretty(value).map_err(Failure::failed)?;
    text.push(b'\n');
    Ok(text)
}

/// Writes a finished result to standard output. A reader that has seen enough (`| head`) is no failure.
fn print(text: &[u8]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::failed(format!("cannot write standard output: {error}")))
        }
        _ => Ok(()),
    }
}
