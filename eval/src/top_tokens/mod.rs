//! Top-token reference files: each scored position's most probable tokens, one record per window.
//!
//! All integers little-endian, no padding.
//!
//! | part | fields |
//! |---|---|
//! | header | `NINFTOPK`, u32 version 1, u32 top_k, u32 context, u32 stride, corpus id, mode (each u32 length + bytes) |
//! | record | u32 stream, u64 target_begin, u64 target_end, u64 fingerprint of the input, f32 target log-probabilities, i32 top ids, f32 top log-probabilities |
//! | footer | u32 `FFFFFFFF` |
//! | trailer, optional | JSON [`Provenance`], its u32 length, `TOPKINFO` |
//!
//! Other readers of this format stop at the footer, so the trailer, which says which model and settings made the file,
//! disturbs none of them. A file is written as `FILE.partial` and renamed when complete; one without a footer, or with
//! anything but a trailer behind it, is refused.

mod error;

use std::path::Path;

use crate::aggregate::LOGPROB_ROUNDING;
use crate::corpus::CorpusPlan;
use crate::foreign::FileKind;
use crate::records::{RecordReader, RecordWriter, check_header, string_bytes};

pub use crate::records::{MAX_POSITIONS, Provenance, WindowKey, WindowName};
pub use error::TopTokenError;

/// Most tokens per position that a file may hold.
pub const MAX_TOP_K: u32 = 64;
const MAGIC: &[u8; 8] = b"NINFTOPK";
const VERSION: u32 = 1;
/// Probabilities of distinct tokens may exceed one by rounding, not by more.
const MAX_MASS: f64 = 1.0 + 1e-3;

/// The header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Tokens per position, `1..=MAX_TOP_K`.
    pub top_k: u32,
    /// Longest input.
    pub context: u32,
    /// Targets per later window; the context when windows do not overlap.
    pub stride: u32,
    /// Corpus identity.
    pub corpus_id: String,
    /// Corpus mode.
    pub mode: String,
}

impl Header {
    /// The header of a run over `plan`; `None` when its context exceeds 32 bits.
    pub fn of(plan: &CorpusPlan, top_k: u32) -> Option<Self> {
        Some(Self {
            top_k,
            context: plan.protocol.context().try_into().ok()?,
            stride: plan.protocol.stride().try_into().ok()?,
            corpus_id: plan.id.clone(),
            mode: plan.recorded_mode(),
        })
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for word in [VERSION, self.top_k, self.context, self.stride] {
            bytes.extend(word.to_le_bytes());
        }
        for text in [&self.corpus_id, &self.mode] {
            bytes.extend(string_bytes(text));
        }
        bytes
    }

    fn protocol(&self) -> String {
        let Self {
            context,
            stride,
            corpus_id,
            mode,
            ..
        } = self;
        format!("corpus `{corpus_id}`, mode `{mode}`, context {context}, stride {stride}")
    }
}

/// The scores of one window.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// Log-probabilities of the targets, `[positions]`.
    pub logprobs: Vec<f32>,
    /// Most probable tokens, `[positions, top_k]`.
    pub top_ids: Vec<u32>,
    /// Their log-probabilities, same layout.
    pub top_logprobs: Vec<f32>,
}

/// Writes a file record by record.
#[derive(Debug)]
pub struct Writer(RecordWriter);

impl Writer {
    /// Creates `path.partial` and writes the header.
    ///
    /// # Errors
    /// When a field of the header is out of range or the file cannot be created.
    pub fn create(path: &Path, header: &Header, provenance: Option<Provenance>) -> Result<Self, TopTokenError> {
        check(path, header)?;
        Ok(Self(RecordWriter::create(path, &header.to_bytes(), provenance)?))
    }

    /// Appends one window; `logprobs [positions]`, `top_ids` and `top_logprobs [positions, top_k]`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(
        &mut self,
        key: &WindowKey,
        logprobs: &[f32],
        top_ids: &[u32],
        top_logprobs: &[f32],
    ) -> Result<(), TopTokenError> {
        let floats = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let ids = top_ids.iter().flat_map(|id| id.to_le_bytes());
        self.0
            .write(key, floats(logprobs).into_iter().chain(ids).chain(floats(top_logprobs)))
    }

    /// Writes footer and trailer and gives the file its name.
    ///
    /// # Errors
    /// When the file cannot be written; nothing is left behind then.
    pub fn finish(self) -> Result<(), TopTokenError> {
        self.0.finish()
    }
}

fn check(path: &Path, header: &Header) -> Result<(), TopTokenError> {
    check_header(
        path,
        ("top_k", header.top_k, MAX_TOP_K),
        &header.corpus_id,
        &header.mode,
    )
}

/// Reads a file record by record, in the order of this run's windows.
#[derive(Debug)]
pub struct Reader {
    records: RecordReader,
    header: Header,
}

impl Reader {
    /// Opens a file and checks its header; needs no model, so a bad file is noticed early.
    ///
    /// # Errors
    /// When the file cannot be read or is not a reference of version 1.
    pub fn open(path: &Path) -> Result<Self, TopTokenError> {
        let name = "a top-token reference of version 1";
        let mut records = RecordReader::open(path, FileKind::TopTokens, name)?;
        let version = records.u32("the header")?;
        if version != VERSION {
            return Err(TopTokenError::Version {
                name: "a top-token reference",
                reads: VERSION,
                path: path.to_owned(),
                version,
            });
        }
        let header = Header {
            top_k: records.u32("the header")?,
            context: records.u32("the header")?,
            stride: records.u32("the header")?,
            corpus_id: records.string("corpus id")?,
            mode: records.string("mode")?,
        };
        check(path, &header)?;
        Ok(Self {
            records: records.with_payload(4 + 8 * u64::from(header.top_k)),
            header,
        })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// What made the file, when it says so.
    pub fn provenance(&self) -> Option<&Provenance> {
        self.records.provenance()
    }

    /// Compares corpus, mode, context, stride and, when recorded, the vocabulary with this run.
    ///
    /// # Errors
    /// When any of them differs.
    pub fn check_run(&self, plan: &CorpusPlan, public_tokens: usize) -> Result<(), TopTokenError> {
        let run = Header::of(plan, self.header.top_k);
        if run.as_ref() != Some(&self.header) {
            let run = run.map_or_else(|| "a context beyond 32 bits".into(), |header| header.protocol());
            return Err(TopTokenError::Protocol {
                path: self.records.path().to_owned(),
                recorded: self.header.protocol(),
                run,
            });
        }
        self.records
            .check_vocabulary(None, self.header.top_k.into(), public_tokens as u64)
    }

    /// Compares every record with this run's windows and the length of the file with them, before the first is read.
    ///
    /// # Errors
    /// When a record belongs to another window, or there are fewer, more, or bytes that belong to no record.
    pub fn check_windows<'w>(
        &mut self,
        windows: impl Iterator<Item = (WindowKey, WindowName<'w>)>,
    ) -> Result<(), TopTokenError> {
        self.records.check_windows(windows)
    }

    /// Reads the record of the window `expected`, whose ids must be below `public_tokens`.
    ///
    /// # Errors
    /// When the file ends, the record belongs to another window, or a value cannot be right.
    pub fn read(
        &mut self,
        expected: &WindowKey,
        name: WindowName<'_>,
        public_tokens: usize,
    ) -> Result<Record, TopTokenError> {
        let positions = self.records.read_key(expected, name)?;
        let (k, place) = (self.header.top_k as usize, &name.place());
        let record = Record {
            logprobs: self.records.floats(positions, place)?,
            top_ids: self.records.words(positions * k, place)?,
            top_logprobs: self.records.floats(positions * k, place)?,
        };
        match fault(&record, k, public_tokens) {
            None => Ok(record),
            Some((position, what)) => Err(self.records.bad_value(name, position, what)),
        }
    }

    /// Passes over the record of a window that this run does not score.
    ///
    /// # Errors
    /// When the file ends or the record belongs to another window.
    pub fn skip(&mut self, expected: &WindowKey, name: WindowName<'_>) -> Result<(), TopTokenError> {
        self.records.skip(expected, name)
    }
}

/// The first position whose values cannot be right, and why.
fn fault(record: &Record, k: usize, public_tokens: usize) -> Option<(usize, String)> {
    let is_logprob = |value: f32| value.is_finite() && value <= LOGPROB_ROUNDING;
    record.logprobs.iter().enumerate().find_map(|(position, &target)| {
        let ids = &record.top_ids[position * k..][..k];
        let values = &record.top_logprobs[position * k..][..k];
        if let Some(value) = values.iter().chain([&target]).find(|&&v| !is_logprob(v)) {
            return Some((position, format!("{value} is not a log-probability")));
        }
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= public_tokens) {
            let id = id as i32;
            return Some((
                position,
                format!("token {id} is outside this model's {public_tokens} public tokens"),
            ));
        }
        let mass: f64 = values.iter().map(|&v| f64::from(v).exp()).sum();
        (mass > MAX_MASS).then(|| (position, format!("the tokens' probabilities add up to {mass}")))
    })
}
