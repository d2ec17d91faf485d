//! The files of a run: what is recorded while scoring and what is compared with.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::corpus::CorpusPlan;
use crate::divergence::Position;
use crate::evaluate::{EvaluateError, Job, KlSource, Options, SaveLogits, SaveTopTokens, all_jobs};
use crate::files::absolute;
use crate::fingerprint::fingerprint;
use crate::llama_base::{self, LlamaBaseError, Shape};
use crate::scorer::{ScoreRequest, WindowScores};
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
    logits_out: Option<llama_base::Writer>,
    logits_reference: Option<llama_base::Reader>,
    /// A row of the logit base.
    row: Vec<f32>,
}

/// A reference and the windows it must hold, of which a shard scores some.
struct Reference<'a> {
    reader: top_tokens::Reader,
    windows: Box<dyn Iterator<Item = Job> + 'a>,
}

impl fmt::Debug for Reference<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reader.fmt(f)
    }
}

impl<'a> Files<'a> {
    /// Checks what needs neither plan nor model.
    pub(crate) fn check(options: &Options) -> Result<(), EvaluateError> {
        let rows = options.logits_out.is_some() || options.logits_reference.is_some();
        if rows && (options.save_top_tokens.is_some() || options.kl_reference.is_some()) {
            let message = "logit bases and top-token references cannot be used in one run; run twice";
            return Err(EvaluateError::Combination(message));
        }
        if !options.shard.is_whole() && (options.save_top_tokens.is_some() || rows) {
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
        let written: Vec<&PathBuf> = [
            options.save_top_tokens.as_ref().map(|save| &save.path),
            options.save_tokens.as_ref(),
            options.logits_out.as_ref().map(|save| &save.path),
        ]
        .into_iter()
        .flatten()
        .collect();
        let read = [options.kl_reference.as_ref(), options.logits_reference.as_ref()]
            .into_iter()
            .flatten();
        for (i, path) in written.iter().copied().chain(read).enumerate() {
            if written.iter().take(i).any(|other| same_file(other, path)) {
                return Err(EvaluateError::SameFile { path: path.clone() });
            }
        }
        if let Some(path) = &options.kl_reference {
            top_tokens::Reader::open(path)?;
        }
        if let Some(path) = &options.logits_reference {
            llama_base::Reader::open(path)?;
        }
        Ok(())
    }

    /// Opens everything: references first, so that a refused one leaves nothing behind.
    pub(crate) fn open(plan: &'a CorpusPlan, options: &Options, public_tokens: usize) -> Result<Self, EvaluateError> {
        let mut files = Self {
            plan: Some(plan),
            public_tokens,
            ..Self::default()
        };
        if let Some(path) = &options.kl_reference {
            let reader = top_tokens::Reader::open(path)?;
            reader.check_run(plan, public_tokens)?;
            files.reference = Some(Reference {
                reader,
                windows: Box::new(all_jobs(plan)),
            });
        }
        if options.logits_out.is_some() || options.logits_reference.is_some() {
            let [stream] = &plan.streams[..] else {
                return Err(EvaluateError::Combination(
                    "a logit base holds one text; score one text at a time",
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
            let write = tokens_json::write(path, plan, public_tokens);
            write.map_err(|source| EvaluateError::TokensFile {
                path: path.clone(),
                source,
            })?;
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
        Ok(files)
    }

    /// Whether positions are compared.
    pub(crate) fn compares(&self) -> bool {
        self.reference.is_some() || self.logits_reference.is_some()
    }

    /// What is compared with.
    pub(crate) fn source(&self, options: &Options) -> Result<Option<KlSource>, EvaluateError> {
        let Some(path) = options.kl_reference.as_ref().or(options.logits_reference.as_ref()) else {
            return Ok(None);
        };
        let reader = self.reference.as_ref().map(|reference| &reference.reader);
        Ok(Some(KlSource {
            path: resolve(path)?,
            top_tokens: reader.map(|reader| reader.header().top_k),
            provenance: reader.and_then(|reader| reader.provenance().cloned()),
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

    /// Whether whole rows are needed.
    pub(crate) fn wants_rows(&self) -> bool {
        self.logits_out.is_some() || self.logits_reference.is_some()
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
                ..ScoreRequest::default()
            };
        };
        ScoreRequest {
            // The run's own most probable token is needed for the agreement.
            top_k: self.save_k.max(1),
            candidates_per_position: reference.reader.header().top_k as usize,
            candidates: records.iter().map(|record| record.top_ids.clone()).collect(),
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
        let (Some(writer), Some(plan)) = (&mut self.save, self.plan) else {
            return Ok(());
        };
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
    pub(crate) fn take_row(&mut self, row: &[f32], target: u32) -> Result<Option<Position>, LlamaBaseError> {
        if let Some(writer) = &mut self.logits_out {
            writer.write_row(row)?;
        }
        let Some(reader) = &mut self.logits_reference else {
            return Ok(None);
        };
        reader.read_row(&mut self.row)?;
        let target = target as usize;
        let agree = most_probable(&self.row) == most_probable(row);
        Ok(Some(Position::of_rows(
            [self.row[target], row[target]],
            agree,
            &self.row,
            row,
        )))
    }

    /// Completes what was recorded and checks that the reference ends here.
    pub(crate) fn finish(self) -> Result<(), EvaluateError> {
        if let (Some(mut reference), Some(plan)) = (self.reference, self.plan) {
            for window in reference.windows.by_ref() {
                let (key, name) = key(plan, &window);
                reference.reader.skip(&key, name)?;
            }
            reference.reader.finish()?;
        }
        if let Some(writer) = self.save {
            writer.finish()?;
        }
        if let Some(writer) = self.logits_out {
            writer.finish()?;
        }
        Ok(())
    }
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

/// Whether two paths name one file, which need not exist.
fn same_file(a: &Path, b: &Path) -> bool {
    let resolve = |path: &Path| path.canonicalize().or_else(|_| absolute(path)).ok();
    match (resolve(a), resolve(b)) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}
