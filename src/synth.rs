//! `synth`: an artifact of a published geometry with random weights.

use std::path::Path;
use std::time::Instant;

use perplexity_eval::humanize::bytes;
use perplexity_model::flash_next_tiny::{self, TinyOptions};
use perplexity_model::qwen4_exp::volume_path;
use perplexity_model::source;
use perplexity_model::synth::{Preset, SynthOptions, synth};

use crate::args::SynthArgs;
use crate::convert::{check_new, log_summary, progress_line, recipe};
use crate::log::Log;
use crate::options::{UsageError, find_demo, positive};
use crate::{Failure, limit_threads};

/// More layers than any published model has; the directory grows with every one.
const MOST_LAYERS: u32 = 1024;

/// Bounds of `--ngram-base`: below, heads would share rows; above, row numbers of heads that are added up grow past those
/// that the published hash gives.
const NGRAM_BASES: [u32; 2] = [1000, 20_000_000];
/// The model whose weights come from a formula.
const TINY: &str = "flash-next-tiny";

/// The help text of `--preset`.
pub(crate) fn preset_help() -> String {
    format!("The geometry: {}", names())
}

fn names() -> String {
    let names: Vec<&str> = Preset::ALL.iter().map(|preset| preset.name).collect();
    format!("{}, {TINY}", names.join(", "))
}

/// Writes the artifact that `args` ask for.
pub(crate) fn run(args: &SynthArgs, working_directory: &Path, log: &Log) -> Result<(), Failure> {
    limit_threads(positive("--threads", args.threads)?)?;
    let recipe_file = args.recipe.as_ref().map(|name| ("--recipe", Path::new(name)));
    let tokenizer = args.tokenizer.as_deref().map(|path| ("--tokenizer", path));
    check_new(&args.out, [recipe_file, tokenizer])?;
    let volume = volume_path(&args.out);
    let has_volume = args.preset == TINY || Preset::named(&args.preset).is_some_and(|preset| preset.has_ngrams());
    if has_volume && volume.exists() {
        return Err(UsageError::ArtifactExists(volume).into());
    }
    if args.preset == TINY {
        return tiny(args, log);
    }
    let preset = Preset::named(&args.preset).ok_or_else(|| UsageError::UnknownValue {
        option: "--preset",
        value: args.preset.clone(),
        expected: names(),
    })?;
    let within = |option, value: Option<u32>, [low, high]: [u32; 2]| match value {
        Some(value) if !(low..=high).contains(&value) => Err(UsageError::OutOfRange {
            option,
            value,
            expected: format!("from {low} to {high}"),
        }),
        _ => Ok(()),
    };
    within("--layers", args.layers, [preset.fewest_layers() as u32, MOST_LAYERS])?;
    within("--ngram-base", args.ngram_base, NGRAM_BASES)?;
    if args.ngram_base.is_some() && !preset.has_ngrams() {
        return Err(UsageError::NotForPreset {
            option: "--ngram-base",
            preset: preset.name,
        }
        .into());
    }
    let Some(name) = &args.recipe else {
        return Err(UsageError::NoRecipe.into());
    };
    let options = SynthOptions {
        layers: args.layers.map(|layers| layers as usize),
        ngram_base: args.ngram_base.map(u64::from),
        seed: args.seed.unwrap_or(0),
        ..SynthOptions::new(preset, recipe(name)?)
    };
    let tokenizer = match &args.tokenizer {
        Some(path) => path.clone(),
        None => find_demo(working_directory).map_err(|error| match error {
            UsageError::NoDemo { missing } => UsageError::NoTokenizer { missing },
            other => other,
        })?,
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

/// Writes the tiny Qwen3.8-Flash-Next, of which there is one.
fn tiny(args: &SynthArgs, log: &Log) -> Result<(), Failure> {
    let given = [
        ("--recipe", args.recipe.is_some()),
        ("--layers", args.layers.is_some()),
        ("--ngram-base", args.ngram_base.is_some()),
        ("--seed", args.seed.is_some()),
        ("--tokenizer", args.tokenizer.is_some()),
    ];
    if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
        return Err(UsageError::NotForPreset { option, preset: TINY }.into());
    }
    flash_next_tiny::write(&args.out, &TinyOptions::default()).map_err(Failure::failed)?;
    for file in [args.out.clone(), volume_path(&args.out)] {
        let size = std::fs::metadata(&file).map_err(Failure::failed)?.len();
        log.info(format_args!("wrote {} | {}", file.display(), bytes(size)));
    }
    Ok(())
}
