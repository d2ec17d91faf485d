//! Continuing an interrupted run: a scorer that remembers.
//!
//! [`Resumable`] stands between the evaluation and a model and appends the scores of every batch to a state file. When a run
//! starts with a state file, its batches are answered from it until it is exhausted; everything behind the scores (sums,
//! comparisons, references) is computed anew, so the results are those of an uninterrupted run, times aside.
//!
//! Little-endian: `PPLSTATE`, u32 version, u32 length and text of the run's identity; then per batch u64 length of the
//! payload, u64 hash of the request, u64 hash of these two words, payload, u64 hash of the payload. The payload holds u32
//! windows and per window four vectors, each u32 length and 32-bit words.
//!
//! A file that ends within a batch, as a killed run leaves it, loses that batch. A batch whose hashes disagree with it is
//! damaged: it and everything behind it are dropped. [`State::dropped`] says which it was.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::corpus::CorpusPlan;
use crate::evaluate::Options;
use crate::files::{lock, open_regular};
use crate::fingerprint::Fnv;
use crate::report::{Artifact, Settings};
use crate::scorer::{CausalScorer, HiddenStates, RowVisitor, ScoreError, ScoreRequest, WindowScores, WindowTokens};

const MAGIC: &[u8; 8] = b"PPLSTATE";
const VERSION: u32 = 2;
/// Length and two hashes before a payload, hash after it.
const FRAME_OVERHEAD: u64 = 32;

/// Why a state file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    /// The system refuses.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is something else.
    #[error("{path} is not a state file of this version; remove it or name another", path = path.display())]
    Kind {
        /// The file.
        path: PathBuf,
    },
    /// Another run is using the file.
    #[error("another run is writing {path}; name another file", path = path.display())]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// The file belongs to another run.
    #[error(
        "{path} belongs to a run with another `{field}`; remove it, or run with the settings of the interrupted run",
        path = path.display()
    )]
    Identity {
        /// The file.
        path: PathBuf,
        /// The first field that differs.
        field: String,
    },
    /// A batch differs from the one recorded.
    #[error("{path}: batch {batch} was recorded for other windows or another request; remove the file", path = path.display())]
    Batch {
        /// The file.
        path: PathBuf,
        /// Number of the batch.
        batch: u64,
    },
    /// A batch passes its checksum but cannot be decoded.
    #[error("{path}: batch {batch} is damaged; remove the file", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Number of the batch.
        batch: u64,
    },
}

/// Everything on which a run's scores depend, as JSON: two runs may share a state file exactly if these are equal.
pub fn identity(plan: &CorpusPlan, artifact: &Artifact, settings: &Settings, options: &Options) -> String {
    let streams: Vec<Value> = plan
        .streams
        .iter()
        .map(|s| json!({"id": s.id, "tokens_sha256": s.tokens_sha256, "windows": s.windows.len()}))
        .collect();
    json!({
        "corpus": {"id": plan.id, "mode": plan.mode, "streams": streams},
        "protocol": {
            "windows": plan.protocol.kind().name(),
            "context": plan.protocol.context(),
            "stride": plan.protocol.stride(),
        },
        "artifact": artifact,
        "settings": settings,
        "batch": options.batch,
        "shard": options.shard.to_string(),
    })
    .to_string()
}

/// What was cut off the end of a state file; its windows are scored again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dropped {
    /// Where the first batch that cannot be used begins, in bytes.
    pub begin: u64,
    /// Bytes from there on.
    pub bytes: u64,
    /// Whether that batch is damaged; else the file ends within it.
    pub damaged: bool,
}

/// A state file, open and checked.
#[derive(Debug)]
pub struct State {
    path: PathBuf,
    file: File,
    /// Recorded batches that are still to be asked for.
    recorded: BufReader<File>,
    recorded_batches: u64,
    answered: u64,
    dropped: Option<Dropped>,
}

impl State {
    /// Opens the state of the run with this identity, or begins one; needs no model.
    ///
    /// # Errors
    /// When the file cannot be used, belongs to another run, or is in use.
    pub fn open(path: &Path, identity: &str) -> Result<Self, ResumeError> {
        let io = |source| ResumeError::Io {
            path: path.to_owned(),
            source,
        };
        if path.exists() {
            // Opening a pipe would wait.
            open_regular(path).map_err(io)?;
        }
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(io)?;
        lock(&file).map_err(|error| match error.kind() {
            io::ErrorKind::ResourceBusy => ResumeError::Busy { path: path.to_owned() },
            _ => io(error),
        })?;
        let length = file.metadata().map_err(io)?.len();
        let mut header = MAGIC.to_vec();
        header.extend(VERSION.to_le_bytes());
        header.extend(
            u32::try_from(identity.len())
                .map_err(|_| io(io::ErrorKind::InvalidInput.into()))?
                .to_le_bytes(),
        );
        header.extend(identity.as_bytes());
        let mut recorded = BufReader::new(File::open(path).map_err(io)?);
        let (mut batches, mut dropped) = (0, None);
        if length == 0 {
            file.write_all(&header).and_then(|()| file.sync_all()).map_err(io)?;
        } else {
            check_header(&mut recorded, path, length, identity)?;
            (batches, dropped) = scan(&mut recorded, header.len() as u64, length).map_err(io)?;
            if let Some(Dropped { begin, .. }) = dropped {
                file.set_len(begin).map_err(io)?;
            }
        }
        recorded.seek(SeekFrom::Start(header.len() as u64)).map_err(io)?;
        file.seek(SeekFrom::End(0)).map_err(io)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            recorded,
            recorded_batches: batches,
            answered: 0,
            dropped,
        })
    }

    /// Batches that will be answered without the model.
    pub fn recorded_batches(&self) -> u64 {
        self.recorded_batches
    }

    /// What was cut off on opening.
    pub fn dropped(&self) -> Option<Dropped> {
        self.dropped
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn replay(&mut self, key: u64) -> Result<Vec<WindowScores>, ResumeError> {
        let batch = self.answered;
        let io = |source| ResumeError::Io {
            path: self.path.clone(),
            source,
        };
        let length = read_u64(&mut self.recorded).map_err(io)?;
        if read_u64(&mut self.recorded).map_err(io)? != key {
            return Err(ResumeError::Batch {
                path: self.path.clone(),
                batch,
            });
        }
        read_u64(&mut self.recorded).map_err(io)?;
        // The length was checked against the file when it was opened.
        let mut payload = vec![0; length as usize];
        self.recorded.read_exact(&mut payload).map_err(io)?;
        read_u64(&mut self.recorded).map_err(io)?;
        self.answered += 1;
        decode(&payload).ok_or(ResumeError::Damaged {
            path: self.path.clone(),
            batch,
        })
    }

    fn append(&mut self, key: u64, scores: &[WindowScores]) -> Result<(), ResumeError> {
        let payload = encode(scores);
        let mut frame = Vec::with_capacity(payload.len() + FRAME_OVERHEAD as usize);
        let length = payload.len() as u64;
        for word in [length, key, head_hash(length, key)] {
            frame.extend(word.to_le_bytes());
        }
        frame.extend(&payload);
        frame.extend(Fnv::new().bytes(&payload).finish().to_le_bytes());
        let written = self.file.write_all(&frame).and_then(|()| self.file.sync_data());
        written.map_err(|source| ResumeError::Io {
            path: self.path.clone(),
            source,
        })
    }
}

/// Answers from a state file, then from a model, appending what the model says.
pub struct Resumable<'a> {
    inner: &'a mut dyn CausalScorer,
    state: State,
}

impl<'a> Resumable<'a> {
    /// Continues with `inner` where `state` ends.
    pub fn new(inner: &'a mut dyn CausalScorer, state: State) -> Self {
        Self { inner, state }
    }

    /// Removes the state file of a run that is complete.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn finish(self) -> Result<(), ResumeError> {
        let State { path, .. } = &self.state;
        std::fs::remove_file(path).map_err(|source| ResumeError::Io {
            path: path.clone(),
            source,
        })
    }
}

impl CausalScorer for Resumable<'_> {
    fn public_tokens(&self) -> usize {
        self.inner.public_tokens()
    }

    fn softmax_rows(&self) -> usize {
        self.inner.softmax_rows()
    }

    fn hidden_size(&self) -> Option<usize> {
        self.inner.hidden_size()
    }

    fn score(&mut self, windows: &[WindowTokens], ask: &ScoreRequest) -> Result<Vec<WindowScores>, ScoreError> {
        if ask.hidden {
            // As whole rows, hidden states are too large to remember.
            return self.inner.score(windows, ask);
        }
        let key = request_key(windows, ask);
        if self.state.answered < self.state.recorded_batches {
            return self.state.replay(key).map_err(|error| ScoreError(Box::new(error)));
        }
        let scores = self.inner.score(windows, ask)?;
        // A failure of the moment must not be remembered.
        let sound = scores.len() == windows.len()
            && windows.iter().zip(&scores).all(|(w, s)| {
                let all = [&s.logprobs, &s.top_logprobs, &s.candidate_logprobs];
                s.logprobs.len() == w.positions() && all.into_iter().flatten().all(|v| v.is_finite())
            });
        if sound {
            self.state
                .append(key, &scores)
                .map_err(|error| ScoreError(Box::new(error)))?;
        }
        Ok(scores)
    }

    fn score_rows(
        &mut self,
        window: &WindowTokens,
        reference: Option<&HiddenStates>,
        row: &mut RowVisitor<'_>,
    ) -> Result<(), ScoreError> {
        self.inner.score_rows(window, reference, row)
    }
}

fn check_header(file: &mut impl Read, path: &Path, length: u64, identity: &str) -> Result<(), ResumeError> {
    let kind = || ResumeError::Kind { path: path.to_owned() };
    let mut fixed = [0; 16];
    file.read_exact(&mut fixed).map_err(|_| kind())?;
    let [version, size] =
        [8, 12].map(|at| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]));
    if !fixed.starts_with(MAGIC) || version != VERSION || u64::from(size) > length {
        return Err(kind());
    }
    let mut recorded = vec![0; size as usize];
    file.read_exact(&mut recorded).map_err(|_| kind())?;
    if recorded == identity.as_bytes() {
        return Ok(());
    }
    let [a, b] = [&recorded[..], identity.as_bytes()].map(|text| serde_json::from_slice::<Value>(text).ok());
    let field = a
        .zip(b)
        .and_then(|(a, b)| difference(&a, &b))
        .unwrap_or_else(|| "identity".into());
    Err(ResumeError::Identity {
        path: path.to_owned(),
        field,
    })
}

/// Path of the first value that differs.
fn difference(a: &Value, b: &Value) -> Option<String> {
    let below = |name: String, a: &Value, b: &Value| {
        difference(a, b).map(|rest| {
            if rest.is_empty() {
                name.clone()
            } else {
                format!("{name}.{rest}")
            }
        })
    };
    match (a, b) {
        (Value::Object(x), Value::Object(y)) if x.keys().eq(y.keys()) => {
            x.iter().find_map(|(name, value)| below(name.clone(), value, &y[name]))
        }
        (Value::Array(x), Value::Array(y)) if x.len() == y.len() => x
            .iter()
            .zip(y)
            .enumerate()
            .find_map(|(i, (a, b))| below(i.to_string(), a, b)),
        _ => (a != b).then(String::new),
    }
}

/// The number of sound batches from `begin` on, and what comes after them.
fn scan(file: &mut BufReader<File>, begin: u64, length: u64) -> io::Result<(u64, Option<Dropped>)> {
    let (mut batches, mut end) = (0, begin);
    file.seek(SeekFrom::Start(begin))?;
    while end < length {
        let rest = length - end;
        let dropped = |damaged| {
            Some(Dropped {
                begin: end,
                bytes: rest,
                damaged,
            })
        };
        if rest < FRAME_OVERHEAD {
            return Ok((batches, dropped(false)));
        }
        let (size, key) = (read_u64(file)?, read_u64(file)?);
        if read_u64(file)? != head_hash(size, key) {
            return Ok((batches, dropped(true)));
        }
        if size > rest - FRAME_OVERHEAD {
            return Ok((batches, dropped(false)));
        }
        let mut payload = vec![0; size as usize];
        file.read_exact(&mut payload)?;
        if read_u64(file)? != Fnv::new().bytes(&payload).finish() {
            return Ok((batches, dropped(true)));
        }
        batches += 1;
        end += FRAME_OVERHEAD + size;
    }
    Ok((batches, None))
}

/// Hash of the words in front of a payload.
fn head_hash(length: u64, key: u64) -> u64 {
    Fnv::new()
        .bytes(&length.to_le_bytes())
        .bytes(&key.to_le_bytes())
        .finish()
}

fn read_u64(file: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn request_key(windows: &[WindowTokens], ask: &ScoreRequest) -> u64 {
    let hash = Fnv::new()
        .count(windows.len())
        .count(ask.top_k)
        .count(ask.candidates_per_position);
    let windows = windows.iter().fold(hash, |hash, window| {
        hash.count(window.tokens.len())
            .count(window.first_target)
            .words(&window.tokens)
    });
    ask.candidates
        .iter()
        .fold(windows, |hash, ids| hash.count(ids.len()).words(ids))
        .finish()
}

fn encode(scores: &[WindowScores]) -> Vec<u8> {
    let mut out = (scores.len() as u32).to_le_bytes().to_vec();
    let mut vector = |words: &mut dyn ExactSizeIterator<Item = u32>| {
        out.extend((words.len() as u32).to_le_bytes());
        words.for_each(|word| out.extend(word.to_le_bytes()));
    };
    for s in scores {
        vector(&mut s.logprobs.iter().map(|v| v.to_bits()));
        vector(&mut s.top_ids.iter().copied());
        vector(&mut s.top_logprobs.iter().map(|v| v.to_bits()));
        vector(&mut s.candidate_logprobs.iter().map(|v| v.to_bits()));
    }
    out
}

fn decode(payload: &[u8]) -> Option<Vec<WindowScores>> {
    let (windows, mut rest) = payload.split_first_chunk::<4>()?;
    let floats = |values: Vec<u32>| values.into_iter().map(f32::from_bits).collect();
    let mut scores = Vec::new();
    for _ in 0..u32::from_le_bytes(*windows) {
        scores.push(WindowScores {
            logprobs: floats(take_vector(&mut rest)?),
            top_ids: take_vector(&mut rest)?,
            top_logprobs: floats(take_vector(&mut rest)?),
            candidate_logprobs: floats(take_vector(&mut rest)?),
            hidden: Vec::new(),
        });
    }
    rest.is_empty().then_some(scores)
}

/// A vector from the front of `bytes`.
fn take_vector(bytes: &mut &[u8]) -> Option<Vec<u32>> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (values, rest) = rest.split_at_checked((u32::from_le_bytes(*length) as usize).checked_mul(4)?)?;
    *bytes = rest;
    Some(
        values
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&word| u32::from_le_bytes(word))
            .collect(),
    )
}
