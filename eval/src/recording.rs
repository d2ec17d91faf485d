//! The files of a run: what is recorded while scoring and what is compared with.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::corpus::CorpusPlan;
use crate::divergence::Position;
use crate::evaluate::{EvaluateError, Job, KlSource, Options, ReferenceKind, SaveLogits, SaveTopTokens, all_jobs};
use crate::files::{PendingFile, absolute, check_apart, sketch_sha256};
use crate::fingerprint::fingerprint;
use crate::hidden::{self, SaveHidden};
use crate::llama_base::{self, LlamaBaseError, Shape};
use crate::scorer::{HiddenStates, Row, ScoreRequest, WindowScores};
use crate::tokens_json;
use crate::top_tokens::{self, Header, MAX_TOP_K, Record, TopTokenError, WindowKey, WindowName};
use crate::windows::WindowKind;

/// Open files; none by default.
#[derive(Default)]
pub(crate) struct Files<'a> {
    plan: Option<&'a CorpusPlan>,
    public_tokens: usize,
    save: Option<top_tokens::Writer>,
    save_k: usize,
    reference: Option<Reference<'a>>,
    /// Which file is compared with.
    reference_sha256: Option<String>,
    logits_out: Option<llama_base::Writer>,
    logits_reference: Option<llama_base::Reader>,
    save_hidden: Option<hidden::Writer>,
    /// Values of a saved hidden state; 0 when none are saved.
    hidden_size: usize,
    hidden_reference: Option<HiddenReference<'a>>,
    tokens: Option<(PathBuf, PendingFile)>,
    /// A row of the logit base.
    row: Vec<f32>,
}

/// A reference and the windows it must hold, of which a shard scores some.
struct Reference<'a> {
    reader: top_tokens::Reader,
    windows: Box<dyn Iterator<Item = Job> + 'a>,
}

/// Hidden states to compare with, and how well this run's output head gives back what their own run scored.
struct HiddenReference<'a> {
    reader: hidden::Reader,
    windows: Box<dyn Iterator<Item = Job> + 'a>,
    /// Log-probabilities of the current window's targets in the reference's own run.
    targets: std::vec::IntoIter<f32>,
    /// Largest change of one of them by this run's head.
    head_error: f64,
}

impl fmt::Debug for Files<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Files").finish_non_exhaustive()
    }
}

impl<'a> Files<'a> {
    /// Checks what needs neither plan nor model.
    pub(crate) fn check(options: &'a Options) -> Result<(), EvaluateError> {
        let rows = options.logits_out.is_some() || options.logits_reference.is_some() || options.kl_hidden.is_some();
        let scores =
            options.save_top_tokens.is_some() || options.kl_reference.is_some() || options.save_hidden.is_some();
        if rows && scores {
            let message = "whole rows (logit bases, a comparison with hidden states) and recorded scores (top tokens, hidden \
                           states) cannot be used in one run; run twice";
            return Err(EvaluateError::Combination(message));
        }
        if options.logits_reference.is_some() && options.kl_hidden.is_some() {
            let message = "a run is compared with one reference; run twice";
            return Err(EvaluateError::Combination(message));
        }
        let recorded =
            options.save_top_tokens.is_some() || options.save_hidden.is_some() || options.logits_out.is_some();
        if !options.shard.is_whole() && options.logits_reference.is_some() {
            let message = "a logit base is compared with all windows: run without a shard";
            return Err(EvaluateError::Combination(message));
        }
        if !options.shard.is_whole() && recorded {
            let message = "a reference must hold all windows: record it without a shard";
            return Err(EvaluateError::Combination(message));
        }
        if let Some(SaveTopTokens {
            per_position: asked, ..
        }) = options.save_top_tokens
            && !(1..=MAX_TOP_K).contains(&asked)
        {
            return Err(EvaluateError::TopK {
                asked,
                limit: MAX_TOP_K.into(),
            });
        }
        let read = [
            ("the top-token reference", options.kl_reference.as_deref()),
            ("the logit base", options.logits_reference.as_deref()),
            ("the hidden-state reference", options.kl_hidden.as_deref()),
        ];
        let written = [
            (
                "the recorded hidden states",
                options.save_hidden.as_ref().map(|save| save.path.as_path()),
            ),
            (
                "the recorded reference",
                options.save_top_tokens.as_ref().map(|save| save.path.as_path()),
            ),
            ("the tokens file", options.save_tokens.as_deref()),
            (
                "the recorded logit base",
                options.logits_out.as_ref().map(|save| save.path.as_path()),
            ),
        ];
        let named = |files: &[(&'static str, Option<&'a Path>)]| -> Vec<(&'static str, &'a Path)> {
            files.iter().filter_map(|&(role, path)| Some((role, path?))).collect()
        };
        check_apart(&named(&read), &named(&written))?;
        Ok(())
    }

    /// Opens everything: references first, so that a refused one leaves nothing behind.
    pub(crate) fn open(plan: &'a CorpusPlan, options: &Options, public_tokens: usize) -> Result<Self, EvaluateError> {
        let mut files = Self {
            plan: Some(plan),
            public_tokens,
            ..Self::default()
        };
        if let Some((path, _)) = reference(options) {
            let sha256 = sketch_sha256(path).map_err(|source| TopTokenError::Io {
                path: path.to_owned(),
                source,
            })?;
            files.reference_sha256 = Some(sha256);
        }
        if let Some(path) = &options.kl_reference {
            let mut reader = top_tokens::Reader::open(path)?;
            reader.check_run(plan, public_tokens)?;
            reader.check_windows(all_jobs(plan).map(|job| key(plan, &job)))?;
            files.reference = Some(Reference {
                reader,
                windows: Box::new(all_jobs(plan)),
            });
        }
        if let Some(path) = &options.kl_hidden {
            let mut reader = hidden::Reader::open(path)?;
            reader.check_run(plan, public_tokens, all_jobs(plan).map(|job| key(plan, &job)))?;
            files.hidden_reference = Some(HiddenReference {
                reader,
                windows: Box::new(all_jobs(plan)),
                targets: Vec::new().into_iter(),
                head_error: 0.0,
            });
        }
        if options.logits_out.is_some() || options.logits_reference.is_some() {
            let [stream] = &plan.streams[..] else {
                return Err(EvaluateError::Combination(
                    "a logit base holds one stream; score one at a time",
                ));
            };
            if plan.protocol.kind() != WindowKind::LlamaChunks {
                return Err(EvaluateError::Combination(
                    "a logit base needs llama.cpp chunks as windows",
                ));
            }
            let context = plan.protocol.context();
            let tokens = &stream.tokens[..context * stream.windows.len()];
            if let Some(path) = &options.logits_reference {
                let mut reader = llama_base::Reader::open(path)?;
                reader.check_run(context, public_tokens, tokens)?;
                files.row = vec![0.0; public_tokens];
                files.logits_reference = Some(reader);
            }
            if let Some(SaveLogits { path, row_width: width }) = &options.logits_out {
                let word = |field, n: usize| {
                    let value = i64::try_from(n).unwrap_or(i64::MAX);
                    u32::try_from(n).map_err(|_| LlamaBaseError::Header {
                        path: path.clone(),
                        field,
                        value,
                    })
                };
                let shape = Shape {
                    context: word("context", context)?,
                    vocabulary: width.map_or_else(|| word("vocabulary", public_tokens), Ok)?,
                    chunks: word("chunks", stream.windows.len())?,
                };
                files.logits_out = Some(llama_base::Writer::create(path, shape, tokens)?);
            }
        }
        if let Some(path) = &options.save_tokens {
            let file = tokens_json::write(path, plan, public_tokens).map_err(tokens_file(path))?;
            files.tokens = Some((path.clone(), file));
        }
        if let Some(SaveTopTokens {
            path,
            per_position: top_k,
        }) = &options.save_top_tokens
        {
            if *top_k as usize > public_tokens {
                return Err(EvaluateError::TopK {
                    asked: *top_k,
                    limit: public_tokens as u64,
                });
            }
            let header = Header::of(plan, *top_k).ok_or(EvaluateError::Combination(
                "a top-token reference holds contexts below 2^32 tokens only",
            ))?;
            files.save = Some(top_tokens::Writer::create(path, &header, options.provenance.clone())?);
            files.save_k = *top_k as usize;
        }
        if let Some(save) = &options.save_hidden {
            let header = hidden::Header::of(plan, save, public_tokens).ok_or(EvaluateError::Combination(
                "a hidden-state reference holds contexts below 2^32 tokens only",
            ))?;
            let writer = hidden::Writer::create(&save.path, &header, options.provenance.clone())?;
            files.save_hidden = Some(writer);
            files.hidden_size = save.hidden_size as usize;
        }
        Ok(files)
    }

    /// Checks what only the model can say: whether its hidden states are those of the files.
    pub(crate) fn check_hidden_size(&self, options: &Options, found: Option<usize>) -> Result<(), EvaluateError> {
        let reference = self
            .hidden_reference
            .as_ref()
            .map(|reference| reference.reader.header().hidden_size);
        let saved = options.save_hidden.as_ref().map(|save| save.hidden_size);
        match reference.or(saved) {
            Some(expected) if found != Some(expected as usize) => Err(EvaluateError::HiddenSize {
                expected: expected as usize,
                found,
            }),
            _ => Ok(()),
        }
    }

    /// Whether positions are compared.
    pub(crate) fn compares(&self) -> bool {
        self.reference.is_some() || self.logits_reference.is_some() || self.hidden_reference.is_some()
    }

    /// What is compared with.
    pub(crate) fn source(&self, options: &Options) -> Result<Option<KlSource>, EvaluateError> {
        let Some((path, kind)) = reference(options) else {
            return Ok(None);
        };
        let top_tokens = self.reference.as_ref().map(|reference| &reference.reader);
        let hidden = self.hidden_reference.as_ref();
        let of_states = hidden.and_then(|reference| reference.reader.provenance());
        Ok(Some(KlSource {
            path: resolve(path)?,
            sha256: self.reference_sha256.clone(),
            kind,
            top_tokens: top_tokens.map(|reader| reader.header().top_k),
            head_error: hidden.map(|reference| reference.head_error),
            provenance: top_tokens.and_then(|reader| reader.provenance()).or(of_states).cloned(),
        }))
    }

    /// The top-token reference that is written.
    pub(crate) fn saved(options: &Options) -> Result<Option<SaveTopTokens>, EvaluateError> {
        let Some(save) = &options.save_top_tokens else {
            return Ok(None);
        };
        Ok(Some(SaveTopTokens {
            path: resolve(&save.path)?,
            ..*save
        }))
    }

    /// The hidden-state reference that is written.
    pub(crate) fn saved_hidden(options: &Options) -> Result<Option<SaveHidden>, EvaluateError> {
        let Some(save) = &options.save_hidden else {
            return Ok(None);
        };
        Ok(Some(SaveHidden {
            path: resolve(&save.path)?,
            ..save.clone()
        }))
    }

    /// Hidden values that a window of so many positions must have.
    pub(crate) fn hidden_values(&self, positions: usize) -> usize {
        positions * self.hidden_size
    }

    /// Whether whole rows are needed.
    pub(crate) fn wants_rows(&self) -> bool {
        self.logits_out.is_some() || self.logits_reference.is_some() || self.hidden_reference.is_some()
    }

    /// The hidden states that a window is compared with; `None` without such a reference.
    pub(crate) fn read_hidden(&mut self, job: &Job) -> Result<Option<HiddenStates>, TopTokenError> {
        let (Some(reference), Some(plan)) = (&mut self.hidden_reference, self.plan) else {
            return Ok(None);
        };
        for window in reference.windows.by_ref() {
            let (key, name) = key(plan, &window);
            if (window.stream, window.index) == (job.stream, job.index) {
                let record = reference.reader.read(&key, name)?;
                reference.targets = record.logprobs.into_iter();
                let header = reference.reader.header();
                return Ok(Some(HiddenStates {
                    values: record.states,
                    precision: header.precision,
                    logits: header.logits,
                }));
            }
            reference.reader.skip(&key, name)?;
        }
        Ok(None)
    }

    /// The records of the batch's windows; empty without a reference.
    pub(crate) fn read_references(&mut self, batch: &[Job]) -> Result<Vec<Record>, TopTokenError> {
        let (Some(reference), Some(plan)) = (&mut self.reference, self.plan) else {
            return Ok(Vec::new());
        };
        let mut records = Vec::with_capacity(batch.len());
        for job in batch {
            // Windows of other shards come in between; the iterator holds every window, so it cannot end before this one.
            for window in reference.windows.by_ref() {
                let (key, name) = key(plan, &window);
                if (window.stream, window.index) == (job.stream, job.index) {
                    records.push(reference.reader.read(&key, name, self.public_tokens)?);
                    break;
                }
                reference.reader.skip(&key, name)?;
            }
        }
        Ok(records)
    }

    /// What to ask of the model for a batch with these records.
    pub(crate) fn request(&self, records: &[Record]) -> ScoreRequest {
        let Some(reference) = &self.reference else {
            return ScoreRequest {
                top_k: self.save_k,
                hidden: self.save_hidden.is_some(),
                ..ScoreRequest::default()
            };
        };
        ScoreRequest {
            // The run's own most probable token is needed for the agreement.
            top_k: self.save_k.max(1),
            candidates_per_position: reference.reader.header().top_k as usize,
            candidates: records.iter().map(|record| record.top_ids.clone()).collect(),
            hidden: self.save_hidden.is_some(),
        }
    }

    /// Compares a window with its record.
    pub(crate) fn compare(&self, record: &Record, scores: &WindowScores, ask: &ScoreRequest) -> Vec<Position> {
        let k = ask.candidates_per_position;
        let position = |j: usize| {
            Position::of_top_tokens(
                [record.logprobs[j], scores.logprobs[j]],
                record.top_ids[j * k] == scores.top_ids[j * ask.top_k],
                &record.top_logprobs[j * k..][..k],
                &scores.candidate_logprobs[j * k..][..k],
            )
        };
        (0..record.logprobs.len()).map(position).collect()
    }

    /// Records a window.
    pub(crate) fn save(&mut self, job: &Job, scores: &WindowScores, ask: &ScoreRequest) -> Result<(), TopTokenError> {
        let Some(plan) = self.plan else { return Ok(()) };
        if let Some(writer) = &mut self.save_hidden {
            let (key, name) = key(plan, job);
            writer.write(&key, name, &scores.logprobs, &scores.hidden)?;
        }
        let Some(writer) = &mut self.save else { return Ok(()) };
        // A request is never narrower than what is saved, and wider only if nothing is.
        debug_assert_eq!(ask.top_k, self.save_k);
        writer.write(
            &key(plan, job).0,
            &scores.logprobs,
            &scores.top_ids,
            &scores.top_logprobs,
        )
    }

    /// Records and compares a position's whole row.
    pub(crate) fn take_row(&mut self, row: Row<'_>, target: u32) -> Result<Option<Position>, LlamaBaseError> {
        let Row {
            logprob,
            run,
            reference: given,
        } = row;
        if let Some(writer) = &mut self.logits_out {
            writer.write_row(run)?;
        }
        let target = target as usize;
        if let Some(reference) = &mut self.hidden_reference {
            // One per row: the record holds as many as the window has positions.
            let recorded = reference.targets.next().unwrap_or(given[target]);
            let error = (f64::from(recorded) - f64::from(given[target])).abs();
            reference.head_error = reference.head_error.max(error);
            let agree = most_probable(given) == most_probable(run);
            return Ok(Some(Position::of_rows([recorded, logprob], agree, given, run)));
        }
        let Some(reader) = &mut self.logits_reference else {
            return Ok(None);
        };
        reader.read_row(&mut self.row)?;
        let agree = most_probable(&self.row) == most_probable(run);
        let targets = [self.row[target], logprob];
        Ok(Some(Position::of_base_row(targets, agree, &self.row, run)))
    }

    /// Gives what was recorded its names.
    pub(crate) fn finish(self) -> Result<(), EvaluateError> {
        if let Some(writer) = self.save {
            writer.finish()?;
        }
        if let Some(writer) = self.save_hidden {
            writer.finish()?;
        }
        if let Some(writer) = self.logits_out {
            writer.finish()?;
        }
        if let Some((path, file)) = self.tokens {
            file.commit().map_err(tokens_file(&path))?;
        }
        Ok(())
    }
}

fn tokens_file(path: &Path) -> impl FnOnce(std::io::Error) -> EvaluateError {
    let path = path.to_owned();
    |source| EvaluateError::TokensFile { path, source }
}

/// What a run is compared with.
fn reference(options: &Options) -> Option<(&Path, ReferenceKind)> {
    let Options {
        kl_reference,
        logits_reference,
        kl_hidden,
        ..
    } = options;
    let by_kind = [
        (kl_reference, ReferenceKind::TopTokens),
        (logits_reference, ReferenceKind::LogitBase),
        (kl_hidden, ReferenceKind::HiddenStates),
    ];
    by_kind
        .into_iter()
        .find_map(|(path, kind)| Some((path.as_deref()?, kind)))
}

/// `path` made absolute.
fn resolve(path: &Path) -> Result<PathBuf, EvaluateError> {
    let resolved = absolute(path);
    Ok(resolved.map_err(|source| TopTokenError::Io {
        path: path.to_owned(),
        source,
    })?)
}

fn key<'a>(plan: &'a CorpusPlan, job: &Job) -> (WindowKey, WindowName<'a>) {
    let stream = &plan.streams[job.stream];
    let key = WindowKey {
        // FFFFFFFFh is the footer; no selection comes near it.
        stream: job.stream as u32,
        target_begin: job.window.target_begin as u64,
        target_end: job.window.target_end() as u64,
        fingerprint: fingerprint(&stream.tokens[job.window.input_begin..job.window.input_end]),
    };
    (
        key,
        WindowName {
            stream: &stream.id,
            window: job.index,
        },
    )
}

/// Index of the greatest value, the first among equals.
fn most_probable(row: &[f32]) -> usize {
    row.iter()
        .enumerate()
        .fold(0, |best, (i, value)| if *value > row[best] { i } else { best })
}
