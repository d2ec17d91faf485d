//! A scoring run, in the order that finds a mistake before the expensive part: texts, configuration and tokenizer, windows,
//! output directory, weights, scores, report.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use perplexity_eval::corpus::{CorpusError, CorpusPlan, CorpusText};
use perplexity_eval::evaluate::{self, Evaluation, Progress, Results, Snapshot, StreamResult, Totals};
use perplexity_eval::files::Named;
use perplexity_eval::hidden::{self, SaveHidden};
use perplexity_eval::humanize::{bytes, duration};
use perplexity_eval::manifest::ManifestError;
use perplexity_eval::output::{self, OutputDirectory, OutputError, RunName};
use perplexity_eval::report::{Artifact, Build, Report, RunInfo, Settings};
use perplexity_eval::resume::{self, Dropped, Resumable, State};
use perplexity_eval::scorer::{
    CausalScorer, HiddenStates, Row, RowVisitor, ScoreError, ScoreRequest, WindowScores, WindowTokens,
};
use perplexity_eval::top_tokens::Provenance;
use perplexity_eval::{progress, table};
use perplexity_model::backends;
use perplexity_model::config::TextConfig;
use perplexity_model::inspect::Inspection;
use perplexity_model::memory::Residency;
use perplexity_model::qwen4_exp::{Statistics, volume_path};
use perplexity_model::rope::RopeExtension;
use perplexity_model::rows::{self, Precision, Reference};
use perplexity_model::scorer::{Ask, ModelError, Scorer, ScorerOptions, Window};
use perplexity_model::signature::prefill_signature;
use perplexity_model::source::{self, TextSource};
use perplexity_model::tokenizer::{AddedTokens, TOKENIZER, TextTokenizer};
use sha2::{Digest, Sha256};

use crate::Failure;
use crate::flash_next;
use crate::log::Log;
use crate::memory::{CardPlan, Load, look_at};
use crate::options::{Device, Input, ScoreOptions, UsageError};
use crate::precision::Narrowing;

/// Scores what `options` name, writes `report.json` and returns the table for standard output.
pub(crate) fn run(options: &ScoreOptions, log: &Log) -> Result<Vec<u8>, Failure> {
    let began = Instant::now();
    let elsewhere = match (options.device.index(), cfg!(feature = "cuda")) {
        (None, true) => "; --device cuda:0 scores on a card",
        _ => "",
    };
    log.info(format_args!("device | {}{elsewhere}", options.device));
    log.info("preparing corpus");
    let text = read(&options.input)?;
    let mut notes = text.notes.clone();
    let source = source::open(&options.artifact).map_err(Failure::failed)?;
    check_apart(options, &text, source.as_ref())?;
    notes.extend(source.notes());
    notes.extend(options.flash_next.notes());
    let options = &options.for_model(source.config());
    let context = options.protocol.context();
    let extension = options
        .rope
        .extension(source.config(), context)
        .map_err(UsageError::Rope)?;
    options.precision.check(source.config())?;
    options
        .flash_next
        .check(source.as_ref())
        .map_err(UsageError::FlashNext)?;
    options.kv.check(source.config()).map_err(UsageError::Kv)?;
    let tokenizer = TextTokenizer::from_source(source.as_ref(), AddedTokens::Match).map_err(Failure::failed)?;
    let model = Inspection::of_source(&options.artifact, source.as_ref()).map_err(Failure::failed)?;
    let signature = prefill_signature(source.as_ref(), tokenizer.public_tokens()).map_err(Failure::failed)?;
    log.debug(format_args!("prefill signature {signature}"));
    let limit = options.chunks.map(usize::from);
    let plan = text
        .plan(options.protocol, limit, |text| tokenizer.encode(text))
        .map_err(Failure::failed)?;
    let read_and_tokenize_seconds = began.elapsed().as_secs_f64();
    log.info(progress::corpus_line(&plan, read_and_tokenize_seconds));
    let shard = options.evaluation.shard;
    if shard.below(plan.windows()) == 0 {
        let windows = plan.windows();
        log.warning(format_args!(
            "shard {shard} holds none of the {windows} windows: nothing is scored"
        ));
    }
    let longest = longest_feed(&plan);
    log.info(options.kv.line(source.config(), longest));

    let head_rows = source.config().vocab_size;
    let softmax_rows = options
        .numerics
        .softmax_rows
        .count(tokenizer.public_tokens(), head_rows);
    let provenance = Provenance {
        public_tokens: softmax_rows as u64,
        artifact: model.name.clone(),
        prefill_signature: signature.clone(),
        kv_dtype: options.kv.described(),
        route: options.numerics.route.name().into(),
    };
    let load_options = options
        .precision
        .load_options(source.as_ref())
        .map_err(Failure::failed)?;
    let facts = look_at(options.device)?;
    notes.extend(facts.iter().flat_map(|(facts, _)| facts.slower.clone()));
    notes.extend(options.precision.notes(&load_options));
    notes.extend(options.prefill.note(&options.kv, source.config()));
    notes.extend(options.rope.note(extension, context));
    for note in &notes {
        log.warning(note);
    }
    let card = Load {
        device: options.device,
        route: options.numerics.route,
        kv: &options.kv,
        prefill: options.prefill,
        activations: &load_options.activations,
        tokens: longest,
        batch: options.batch.map(usize::from),
        budget: options.memory_budget,
    };
    let card = CardPlan::make(&card, facts.as_ref(), source.as_ref())?;
    if let Some(card) = &card {
        log.info(card.line());
    }
    let hidden_size = u32::try_from(source.config().hidden_size).map_err(Failure::failed)?;
    let logits = match options.numerics.route.logits(source.config()) {
        Precision::Bf16 => hidden::Precision::Bf16,
        Precision::Full | Precision::F16 => hidden::Precision::F32,
    };
    let of_model = |save: SaveHidden| SaveHidden {
        hidden_size,
        logits,
        ..save
    };
    let evaluation = evaluate::Options {
        provenance: Some(provenance),
        batch: card.as_ref().map_or(options.evaluation.batch, |card| card.plan.batch),
        save_hidden: options.evaluation.save_hidden.clone().map(of_model),
        ..options.evaluation.clone()
    };
    let artifact = artifact(options, source.as_ref(), &model, &signature)?;
    log.info(format_args!("activations | {}", Narrowing::described(&load_options)));
    let mut settings = settings(options, source.config(), extension, longest);
    options.precision.record(&mut settings, &load_options);
    options
        .flash_next
        .record(&mut settings, source.as_ref(), options.numerics.route);
    if let Some(card) = &card {
        card.record(options, source.config(), &mut settings);
    }
    let state = options.resume.as_ref().map(|path| {
        let identity = resume::identity(&plan, &artifact, &settings, &evaluation);
        (path.clone(), identity)
    });
    let output = output_path(options, &plan, &model.name, &signature)?;
    let prepared = evaluate::prepare(&plan, &evaluation, softmax_rows).map_err(Failure::failed)?;
    if let Some(save) = &evaluation.save_hidden {
        let header = hidden::Header::of(&plan, save, softmax_rows);
        let size = bytes(header.map_or(0, |header| header.file_bytes(&plan)));
        log.info(format_args!(
            "hidden states | {size} in {} | {}",
            save.precision.name(),
            save.path.display()
        ));
    }
    let state = match &state {
        Some((path, identity)) => Some(open_state(path, identity, log)?),
        None => None,
    };
    let directory = claim(options, &output)?;
    let load = Instant::now();
    log.info(format_args!("loading weights | {}", bytes(model.bytes)));
    let mut load_options = load_options;
    load_options.residency = card.as_ref().map_or(Residency::Dense, |card| card.plan.residency);
    let scorer_options = ScorerOptions {
        route: options.numerics.route,
        kv: options.kv.codec().cloned(),
        rope: extension,
        load: load_options,
        delta_state_f16: options.precision.delta_state_f16(),
        prefill_chunk: options.prefill.effective(&options.kv, source.config()),
        batch: evaluation.batch,
        threads: options.threads.map(usize::from),
        public_tokens: softmax_rows,
        flash_next: options.flash_next.options().clone(),
    };
    let mut scorer = load_model(options.device, source.as_ref(), &scorer_options)?;
    let statistics = Arc::clone(&scorer.statistics);
    let load_seconds = load.elapsed().as_secs_f64();
    let speed = bytes((model.bytes as f64 / load_seconds) as u64);
    let size = bytes(model.bytes);
    log.info(format_args!(
        "weights ready | {size} | {} | {speed}/s",
        duration(load_seconds)
    ));
    let profile = options.flash_next.write_profile(source.config(), &plan, shard);
    profile.map_err(|error| Failure::failed(format!("--ngram-hot-profile-out: {error}")))?;

    let (results, remembered) = evaluate_plan(prepared, &mut scorer, state, log)?;
    log.clear_progress();
    log.info(progress::complete_line(&results));
    notes.extend(flash_next::notes(
        *statistics.lock().unwrap_or_else(PoisonError::into_inner),
    ));

    let info = RunInfo {
        build: build(),
        command_line: std::env::args_os()
            .map(|arg| arg.to_string_lossy().into_owned())
            .collect(),
        artifact,
        settings,
        load_seconds,
        read_and_tokenize_seconds,
        total_seconds: began.elapsed().as_secs_f64(),
        notes,
    };
    let table = finish(&plan, &results, info, directory)?;
    if let Some(scorer) = remembered {
        scorer.finish().map_err(Failure::failed)?;
    }
    Ok(table)
}

/// The state file of the run, and what of it had to be dropped.
fn open_state(path: &Path, identity: &str, log: &Log) -> Result<State, Failure> {
    let state = State::open(path, identity).map_err(Failure::failed)?;
    let (batches, name) = (state.recorded_batches(), path.display());
    match state.dropped() {
        Some(Dropped { begin, bytes, damaged: true }) => log.warning(format_args!(
            "{name} is damaged at byte {begin}: it and the {bytes} bytes from there on are dropped and scored again; the \
             {batches} batches before are sound"
        )),
        Some(Dropped { bytes, .. }) => log.info(format_args!(
            "{name} ends within a batch: its {bytes} bytes are dropped and scored again"
        )),
        None => {}
    }
    Ok(state)
}

/// Scores what was prepared; with a state file from where it ends. The file stays until the report is written.
fn evaluate_plan<'a>(
    prepared: Evaluation<'_>,
    scorer: &'a mut Adapter,
    state: Option<State>,
    log: &Log,
) -> Result<(Results, Option<Resumable<'a>>), Failure> {
    let mut observer = Observer(log);
    let Some(state) = state else {
        let results = prepared.run(scorer, &mut observer).map_err(Failure::failed)?;
        return Ok((results, None));
    };
    if state.recorded_batches() > 0 {
        let (batches, path) = (state.recorded_batches(), state.path().display());
        log.info(format_args!("continuing | {batches} batches are in {path}"));
    }
    let mut scorer = Resumable::new(scorer, state);
    let results = prepared.run(&mut scorer, &mut observer).map_err(Failure::failed)?;
    Ok((results, Some(scorer)))
}

fn finish(plan: &CorpusPlan, results: &Results, info: RunInfo, directory: OutputDirectory) -> Result<Vec<u8>, Failure> {
    let report = Report::build(plan, results, info);
    let path = directory.write(&report).map_err(Failure::failed)?;
    let mut text = Vec::new();
    table::write(&mut text, &report, &path).map_err(Failure::failed)?;
    Ok(text)
}

/// Most tokens that a window of the run feeds; its last token is a target only.
fn longest_feed(plan: &CorpusPlan) -> usize {
    let windows = plan.streams.iter().flat_map(|stream| stream.windows.iter());
    windows.map(|window| window.input_tokens() - 1).max().unwrap_or(0)
}

fn read(input: &Input) -> Result<CorpusText, Failure> {
    match input {
        Input::Corpus { manifest, mode } => CorpusText::from_manifest(manifest, mode),
        Input::Text(path) => CorpusText::from_text(path),
    }
    .map_err(|error| match error {
        CorpusError::Manifest(unknown @ ManifestError::UnknownMode { .. }) => UsageError::Mode(unknown).into(),
        other => Failure::failed(other),
    })
}

/// Refuses outputs that would replace a text or a file of the model, which only now are known.
fn check_apart(options: &ScoreOptions, text: &CorpusText, source: &dyn TextSource) -> Result<(), UsageError> {
    let mut volumes: Vec<PathBuf> = Vec::new();
    if source.artifact().is_some() {
        let names: Vec<String> = source.files().into_iter().map(|file| file.name).collect();
        volumes.extend(names.iter().map(|name| options.artifact.with_file_name(name)));
        // A second copy has the same volumes beside its entry.
        if let Some(copy) = &options.flash_next.options().expert_stripe {
            volumes.extend(names.iter().skip(1).map(|name| copy.with_file_name(name)));
        }
        if source.config().flash_next.is_some() {
            volumes.push(volume_path(&options.artifact));
        }
    }
    let texts = text
        .streams
        .iter()
        .map(|stream| ("a text of the corpus", stream.file.as_path()));
    let volumes = volumes.iter().map(|path| ("a file of the artifact", path.as_path()));
    let others: Vec<Named<'_>> = texts.chain(volumes).collect();
    Ok(options.check_apart(&others)?)
}

/// The directory that is asked for, or one named after the run; no other output is in its way.
fn output_path(options: &ScoreOptions, plan: &CorpusPlan, name: &str, signature: &str) -> Result<PathBuf, UsageError> {
    if let Some(path) = &options.output {
        return Ok(path.clone());
    }
    let shard = options.evaluation.shard;
    let mode = match shard.is_whole() {
        true => plan.mode.clone(),
        false => format!("{}-shard-{}-of-{}", plan.mode, shard.index(), shard.count()),
    };
    let run = RunName {
        artifact: name,
        prefill_signature: signature,
        kv: &options.kv.directory_name(),
        corpus_id: &plan.id,
        mode: &mode,
    };
    let path = output::default_directory(&run, SystemTime::now());
    options.check_directory(&path)?;
    Ok(path)
}

fn claim(options: &ScoreOptions, path: &Path) -> Result<OutputDirectory, Failure> {
    let claimed = match options.output {
        Some(_) => OutputDirectory::claim(path),
        None => OutputDirectory::create(path),
    };
    // What is in the way is wrong usage; what the system refuses is not.
    claimed.map_err(|error| match error {
        OutputError::Io { .. } => Failure::failed(error),
        in_the_way => UsageError::Output(in_the_way).into(),
    })
}

fn load_model(device: Device, source: &dyn TextSource, options: &ScorerOptions) -> Result<Adapter, Failure> {
    Ok(Adapter {
        scorer: load_scorer(source, options, device)?,
        statistics: Arc::default(),
    })
}

/// The model of `source` on `device`.
pub(crate) fn load_scorer(
    source: &dyn TextSource,
    options: &ScorerOptions,
    device: Device,
) -> Result<Box<dyn Scorer>, Failure> {
    let loaded = match device {
        #[cfg(feature = "ndarray")]
        Device::NdArray => backends::ndarray::load(source, options),
        #[cfg(feature = "flex")]
        Device::Flex => backends::flex::load(source, options),
        #[cfg(feature = "cuda")]
        Device::Cuda(n) => backends::cuda::load(source, options, n),
        #[cfg(feature = "vulkan")]
        Device::Vulkan(_) => backends::vulkan::load(source, options),
        #[allow(unreachable_patterns, reason = "not every build has every device")]
        other => return Err(UsageError::DeviceNotBuilt(other).into()),
    };
    loaded.map_err(Failure::failed)
}

/// The model's scorer behind the evaluation's interface; neither package knows the other.
struct Adapter {
    scorer: Box<dyn Scorer>,
    /// What was ready when needed so far, for whoever asks while the evaluation holds the scorer.
    statistics: Arc<Mutex<Statistics>>,
}

impl CausalScorer for Adapter {
    fn public_tokens(&self) -> usize {
        self.scorer.public_tokens()
    }

    fn score(&mut self, windows: &[WindowTokens], ask: &ScoreRequest) -> Result<Vec<WindowScores>, ScoreError> {
        let windows: Vec<Window> = windows
            .iter()
            .map(|window| Window {
                tokens: window.tokens.clone(),
                first_target: window.first_target,
            })
            .collect();
        let ask = Ask {
            top_k: ask.top_k,
            candidates_per_position: ask.candidates_per_position,
            candidates: ask.candidates.clone(),
            hidden: ask.hidden,
        };
        let scores = self
            .scorer
            .score(&windows, &ask)
            .map_err(|error: ModelError| ScoreError(error.into()))?;
        *self.statistics.lock().unwrap_or_else(PoisonError::into_inner) = self.scorer.statistics();
        let adapt = |scores: perplexity_model::scorer::Scores| WindowScores {
            logprobs: scores.logprobs,
            top_ids: scores.top_ids,
            top_logprobs: scores.top_logprobs,
            candidate_logprobs: scores.candidate_logprobs,
            hidden: scores.hidden,
        };
        Ok(scores.into_iter().map(adapt).collect())
    }

    fn hidden_size(&self) -> Option<usize> {
        self.scorer.hidden_size()
    }

    fn score_rows(
        &mut self,
        window: &WindowTokens,
        reference: Option<&HiddenStates>,
        row: &mut RowVisitor<'_>,
    ) -> Result<(), ScoreError> {
        let window = Window {
            tokens: window.tokens.clone(),
            first_target: window.first_target,
        };
        let reference = reference.map(|states| Reference {
            states: &states.values,
            precision: tensor_precision(states.precision),
            logits: tensor_precision(states.logits),
        });
        let mut visit = |position: rows::Row<'_>| {
            let rows::Row {
                logprob,
                run,
                reference,
            } = position;
            row(Row {
                logprob,
                run,
                reference,
            })
            .map_err(|error| error.0)
        };
        self.scorer
            .rows(&window, reference.as_ref(), &mut visit)
            .map_err(|error| ScoreError(error.into()))
    }
}

fn tensor_precision(stored: hidden::Precision) -> Precision {
    match stored {
        hidden::Precision::Bf16 => Precision::Bf16,
        hidden::Precision::F32 => Precision::Full,
    }
}

/// Puts the evaluation's progress into the log.
struct Observer<'a>(&'a Log);

impl Progress for Observer<'_> {
    fn started(&mut self, totals: Totals) {
        self.0.info(progress::start_line(totals));
    }

    fn stream_started(&mut self, plan: &CorpusPlan, stream: usize) {
        let line = progress::stream_begin_line(plan, stream);
        self.0.debug(&line);
        self.0.begin_progress(&line);
    }

    fn batch_scored(&mut self, snapshot: &Snapshot) {
        let line = || progress::progress_line(snapshot);
        if self.0.on_console() {
            self.0.progress(|| remaining_time_first(&line()));
        } else {
            self.0.progress(line);
        }
    }

    fn stream_finished(&mut self, plan: &CorpusPlan, stream: usize, result: &StreamResult) {
        self.0.clear_progress();
        self.0.info(progress::stream_line(plan, stream, result));
        if let Some(line) = progress::stream_kl_line(plan, stream, result) {
            self.0.info(line);
        }
    }
}

/// The same line with the remaining time in front, where a narrow console does not cut it off.
fn remaining_time_first(line: &str) -> String {
    match line.rsplit_once(" | ETA ") {
        Some((rest, eta)) => format!("ETA {eta} | {rest}"),
        None => line.to_owned(),
    }
}

/// What the report says of the model.
fn artifact(
    options: &ScoreOptions,
    source: &dyn TextSource,
    model: &Inspection,
    signature: &str,
) -> Result<Artifact, Failure> {
    let path = options.artifact.canonicalize().unwrap_or(options.artifact.clone());
    Ok(Artifact {
        path: path.display().to_string(),
        architecture: model.architecture.into(),
        name: model.name.clone(),
        prefill_signature: signature.into(),
        formats: model.formats.clone(),
        bytes: Some(model.bytes),
        header_sha256: source.header_sha256().map_err(Failure::failed)?,
        tokenizer_sha256: tokenizer_sha256(source)?,
    })
}

/// Which vocabulary made the tokens.
fn tokenizer_sha256(source: &dyn TextSource) -> Result<Option<String>, Failure> {
    let file = source.resource(TOKENIZER).map_err(Failure::failed)?;
    Ok(file.map(|bytes| Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()))
}

fn build() -> Build {
    let features = [
        ("ndarray", cfg!(feature = "ndarray")),
        ("flex", cfg!(feature = "flex")),
        ("cuda", cfg!(feature = "cuda")),
        ("vulkan", cfg!(feature = "vulkan")),
    ];
    Build {
        name: env!("CARGO_PKG_NAME").into(),
        version: env!("CARGO_PKG_VERSION").into(),
        commit: None,
        target: Some(format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)),
        features: features
            .iter()
            .filter(|(_, on)| *on)
            .map(|(name, _)| (*name).into())
            .collect(),
    }
}

fn settings(options: &ScoreOptions, config: &TextConfig, rope: RopeExtension, longest: usize) -> Settings {
    let index = options.device.index().and_then(|n| i64::try_from(n).ok());
    let mut settings = Settings {
        backend: options.device.to_string(),
        device: index.unwrap_or(0),
        devices: index.into_iter().collect(),
        special_tokens_in_text: "matched".into(),
        ..Settings::default()
    };
    // The head runs once per pass.
    settings.score_tile_tokens = options.prefill.effective(&options.kv, config) as u64;
    options.numerics.record(&mut settings, config);
    options.kv.record(&mut settings, config, longest);
    options.prefill.record(&mut settings, &options.kv, config);
    options.rope.record(&mut settings, rope);
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_console_keeps_the_remaining_time() {
        let line = "scoring | 1/2 tokens | PPL 4.9 | elapsed 1.0s | ETA 2.0s";
        assert_eq!(
            remaining_time_first(line),
            "ETA 2.0s | scoring | 1/2 tokens | PPL 4.9 | elapsed 1.0s"
        );
    }
}
