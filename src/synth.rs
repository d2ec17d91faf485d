//! `synth`: an artifact of a published geometry with random weights.

use std::path::Path;
use std::time::Instant;

use perplexity_model::source;
use perplexity_model::synth::{Preset, SynthOptions, synth};

use crate::args::SynthArgs;
use crate::convert::{log_summary, progress_line, recipe};
use crate::log::Log;
use crate::options::{UsageError, find_demo, positive};
use crate::{Failure, limit_threads};

/// More layers than any published model has; the directory grows with every one.
const MOST_LAYERS: u32 = 1024;

/// The help text of `--preset`.
pub(crate) fn preset_help() -> String {
    let names: Vec<&str> = Preset::ALL.iter().map(|preset| preset.name).collect();
    format!("The geometry: {}", names.join(", "))
}

/// Writes the artifact that `args` ask for.
pub(crate) fn run(args: &SynthArgs, working_directory: &Path, log: &Log) -> Result<(), Failure> {
    limit_threads(positive("--threads", args.threads)?)?;
    let preset = Preset::named(&args.preset).ok_or_else(|| UsageError::UnknownValue {
        option: "--preset",
        value: args.preset.clone(),
        expected: Preset::ALL.map(|preset| preset.name).join(", "),
    })?;
    if let Some(value) = args.layers.filter(|layers| *layers > MOST_LAYERS) {
        return Err(UsageError::OutOfRange {
            option: "--layers",
            value,
            expected: format!("at most {MOST_LAYERS}"),
        }
        .into());
    }
    let options = SynthOptions {
        layers: positive("--layers", args.layers)?.map(usize::from),
        seed: args.seed,
        ..SynthOptions::new(preset, recipe(&args.recipe)?)
    };
    if args.out.exists() {
        return Err(UsageError::ArtifactExists(args.out.clone()).into());
    }
    let tokenizer = match &args.tokenizer {
        Some(path) => path.clone(),
        None => find_demo(working_directory)?,
    };
    let tokenizer = source::open(&tokenizer).map_err(Failure::failed)?;
    log.info(format_args!(
        "drawing {} | recipe {} | seed {}",
        options.preset.name,
        options.recipe.name(),
        options.seed
    ));
    let began = Instant::now();
    log.begin_progress("planning");
    let mut show = |progress| log.progress(|| progress_line("drawing", progress, began.elapsed().as_secs_f64()));
    let summary = synth(tokenizer.as_ref(), &args.out, &options, &mut show).map_err(Failure::failed)?;
    log.clear_progress();
    log_summary(log, "drew", &summary, began.elapsed().as_secs_f64());
    Ok(())
}
