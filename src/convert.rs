//! `convert`: a Hugging Face checkpoint becomes an artifact.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use perplexity_eval::files::{Named, check_apart, check_folders};
use perplexity_eval::humanize::{bytes, count, duration};
use perplexity_eval::progress::bar;
use perplexity_eval::text::Text;
use perplexity_model::convert::{ConvertOptions, Progress, Recipe, Summary, convert};
use perplexity_model::qwen4_exp::volume_path;
use perplexity_model::source::{self, TextSource};
use perplexity_model::tokenizer::{AddedTokens, TextTokenizer};
use serde_json::json;

use crate::args::ConvertArgs;
use crate::log::Log;
use crate::options::{UsageError, positive, require_directory, require_file};
use crate::{Failure, limit_threads};

/// Cells of the progress bar; with the rest of the line it fits 80 columns.
const BAR_CELLS: usize = 16;
/// Tokens of a calibration window, or fewer in a model with fewer positions.
const CALIBRATION_WINDOW: usize = 1024;
/// No estimate before this share is done: it would only frighten.
const ESTIMATE_FROM: f64 = 0.05;

/// Writes the artifact that `args` ask for.
pub(crate) fn run(args: &ConvertArgs, log: &Log) -> Result<(), Failure> {
    limit_threads(positive("--threads", args.threads)?)?;
    let mut options = ConvertOptions {
        name: args.name.clone(),
        ..ConvertOptions::new(recipe(&args.recipe)?)
    };
    require_directory("checkpoint", &args.checkpoint)?;
    check_folders(&[("OUT.ninfer", &args.out)]).map_err(UsageError::Files)?;
    let recipe_file = Some(("--recipe", Path::new(&args.recipe)));
    let text = args.calibrate.as_deref().map(|path| ("--calibrate", path));
    check_new(&args.out, [recipe_file, text])?;
    let volume = volume_path(&args.out);
    if volume.exists() {
        let source = source::open(&args.checkpoint).map_err(Failure::failed)?;
        if source.config().flash_next.is_some() {
            return Err(UsageError::ArtifactExists(volume).into());
        }
    }
    if let Some(text) = &args.calibrate {
        if !options.recipe.permits_a4() {
            let recipe = options.recipe.name().to_owned();
            return Err(UsageError::NothingToCalibrate { recipe }.into());
        }
        require_file("--calibrate", text)?;
        calibrate(&args.checkpoint, text, &mut options, log)?;
    }
    log.info(format_args!(
        "converting {} | recipe {}",
        args.checkpoint.display(),
        options.recipe.name()
    ));
    for rule in options.recipe.describe() {
        log.debug(rule);
    }
    let began = Instant::now();
    log.begin_progress("reading the checkpoint");
    let mut show = |progress| log.progress(|| progress_line("converting", progress, began.elapsed().as_secs_f64()));
    let summary = convert(&args.checkpoint, &args.out, &options, &mut show).map_err(Failure::failed)?;
    log.clear_progress();
    log_summary(log, "converted", &summary, began.elapsed().as_secs_f64());
    Ok(())
}

/// Refuses an artifact that exists already, or whose temporary name is that of a file that is read.
pub(crate) fn check_new(out: &Path, read: [Option<Named<'_>>; 2]) -> Result<(), UsageError> {
    if out.exists() {
        return Err(UsageError::ArtifactExists(out.to_owned()));
    }
    let files = read.into_iter().flatten().filter(|(_, path)| path.is_file());
    Ok(check_apart(&files.collect::<Vec<_>>(), &[("OUT.ninfer", out)])?)
}

/// What was written, under its notes; `done` says how it was made.
pub(crate) fn log_summary(log: &Log, done: &str, summary: &Summary, seconds: f64) {
    for note in &summary.notes {
        log.warning(note);
    }
    log.info(format_args!(
        "{done} {} | {} objects | {} | {:.3} bits per weight | {} | {}",
        summary.name,
        summary.objects,
        bytes(summary.bytes),
        summary.bits_per_weight,
        duration(seconds),
        byte_rate(summary.bytes, seconds),
    ));
    for file in &summary.files {
        log.info(format_args!("wrote {}", file.display()));
    }
}

/// Takes the activation divisors from a pass of the checkpoint over `text`.
fn calibrate(checkpoint: &Path, text: &Path, options: &mut ConvertOptions, log: &Log) -> Result<(), Failure> {
    let read = Text::read(text).map_err(Failure::failed)?;
    let source = source::open(checkpoint).map_err(Failure::failed)?;
    if source.config().flash_next.is_some() {
        return Err(UsageError::NotForFlashNext("calibrate").into());
    }
    let tokenizer = TextTokenizer::from_source(source.as_ref(), AddedTokens::Match).map_err(Failure::failed)?;
    let ids = tokenizer.encode(&read.text).map_err(Failure::failed)?;
    let window = CALIBRATION_WINDOW.min(source.config().max_position_embeddings);
    let windows: Vec<&[u32]> = ids.chunks(window).collect();
    let began = Instant::now();
    log.info(format_args!(
        "calibrating on {} | {} tokens",
        text.display(),
        count(ids.len() as u64)
    ));
    log.begin_progress("loading the checkpoint");
    let mut show = |tokens: usize| {
        log.progress(|| {
            let all = ids.len();
            let share = tokens as f64 / all as f64;
            format!(
                "calibrating | {} {:.0} % | {tokens} of {all} tokens",
                bar(share, BAR_CELLS),
                100.0 * share
            )
        });
    };
    let divisors = activation_divisors(source.as_ref(), &windows, &mut show)?;
    log.clear_progress();
    let (inputs, seconds) = (divisors.len(), began.elapsed().as_secs_f64());
    log.info(format_args!("calibrated {inputs} inputs | {}", duration(seconds)));
    options.calibration = json!({
        "text": text.file_name().map(|name| name.to_string_lossy()),
        "sha256": read.sha256,
        "tokens": ids.len(),
        "window": window,
        "rule": "448 * 6 / max|x|",
    });
    options.activation_divisors = divisors;
    Ok(())
}

#[cfg(feature = "flex")]
fn activation_divisors(
    source: &dyn TextSource,
    windows: &[&[u32]],
    progress: &mut dyn FnMut(usize),
) -> Result<BTreeMap<String, f32>, Failure> {
    perplexity_model::backends::flex::activation_divisors(source, windows, progress).map_err(Failure::failed)
}

#[cfg(not(feature = "flex"))]
fn activation_divisors(
    _: &dyn TextSource,
    _: &[&[u32]],
    _: &mut dyn FnMut(usize),
) -> Result<BTreeMap<String, f32>, Failure> {
    Err(UsageError::OptionNotBuilt("calibrate").into())
}

/// A built-in recipe by name, or the mix of a TOML file.
pub(crate) fn recipe(typed: &str) -> Result<Recipe, Failure> {
    if let Some(recipe) = Recipe::named(typed) {
        return Ok(recipe);
    }
    if !Path::new(typed).is_file() {
        let expected = format!("a TOML file or one of {}", Recipe::NAMES.join(", "));
        return Err(UsageError::UnknownValue {
            option: "--recipe",
            value: typed.to_owned(),
            expected,
        }
        .into());
    }
    let text =
        std::fs::read_to_string(typed).map_err(|error| Failure::failed(format!("cannot read {typed}: {error}")))?;
    Recipe::from_toml(&text).map_err(|error| Failure::failed(format!("{typed}: {error}")))
}

/// `converting | [####            ] 25 % | 4.2 GiB of 16.8 GiB | 310 MiB/s | ETA 41.5s`
pub(crate) fn progress_line(doing: &str, progress: Progress, seconds: f64) -> String {
    let share = if progress.all_bytes == 0 {
        1.0
    } else {
        progress.bytes as f64 / progress.all_bytes as f64
    };
    let eta = if share < ESTIMATE_FROM {
        f64::NAN
    } else {
        seconds * (1.0 - share) / share
    };
    format!(
        "{doing} | {} {:.0} % | {} of {} | {} | ETA {}",
        bar(share, BAR_CELLS),
        share * 100.0,
        bytes(progress.bytes),
        bytes(progress.all_bytes),
        byte_rate(progress.bytes, seconds),
        duration(eta)
    )
}

fn byte_rate(n: u64, seconds: f64) -> String {
    format!("{}/s", bytes((n as f64 / seconds) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_shows_share_rate_and_remaining_time() {
        let progress = Progress {
            objects: 1,
            all_objects: 4,
            bytes: 1 << 30,
            all_bytes: 4 << 30,
        };
        let expected = "converting | [####            ] 25 % | 1.00 GiB of 4.00 GiB | 102.4 MiB/s | ETA 30.0s";
        assert_eq!(progress_line("converting", progress, 10.0), expected);
        let early = Progress {
            bytes: 1 << 20,
            ..progress
        };
        assert!(progress_line("converting", early, 1.0).ends_with("ETA n/a"));
    }
}
