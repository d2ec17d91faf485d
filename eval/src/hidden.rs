//! Hidden-state references: each scored position's final hidden state, from which the output head gives the whole distribution
//! again, so that another run can be compared over the whole vocabulary.
//!
//! All integers little-endian, no padding.
//!
//! | part | fields |
//! |---|---|
//! | header | `PPLHIDDN`, u32 version 2, u32 hidden size, u32 bytes per value, u32 bytes per logit, u32 context, u32 stride, u64 public tokens, corpus id, mode (each u32 length + bytes) |
//! | record | as in every reference; then f32 target log-probabilities, and the states `[positions, hidden size]` in bf16 or f32 |
//! | footer, trailer | as in every reference |
//!
//! Values have the precision in which the run has them: bf16 when its route rounds there, otherwise f32. Nothing is lost, and
//! logits are made again with the precision that they had, so a model compared with its own file gives exactly 0.

use std::path::{Path, PathBuf};

use crate::aggregate::LOGPROB_ROUNDING;
use crate::corpus::CorpusPlan;
use crate::foreign::FileKind;
use crate::records::{
    Provenance, RecordReader, RecordWriter, WindowKey, WindowName, check_header, file_bytes, string_bytes,
};
use crate::top_tokens::TopTokenError;

const MAGIC: &[u8; 8] = b"PPLHIDDN";
const VERSION: u32 = 2;
/// Most values of a hidden state that are believed.
const MAX_HIDDEN: u32 = 1 << 20;

/// How values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// 16 bits.
    Bf16,
    /// 32 bits.
    F32,
}

impl Precision {
    fn of_bytes(bytes: u32) -> Option<Self> {
        [Self::Bf16, Self::F32]
            .into_iter()
            .find(|precision| precision.bytes() == bytes)
    }

    /// Bytes of a value.
    pub fn bytes(self) -> u32 {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }
}

/// A hidden-state reference to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveHidden {
    /// Where to.
    pub path: PathBuf,
    /// Values of a hidden state.
    pub hidden_size: u32,
    /// How they are stored; what the run has must fit.
    pub precision: Precision,
    /// Precision of the run's logits.
    pub logits: Precision,
}

/// The header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Values of a hidden state.
    pub hidden_size: u32,
    /// How they are stored.
    pub precision: Precision,
    /// Precision of their run's logits.
    pub logits: Precision,
    /// Longest input.
    pub context: u32,
    /// Targets per later window; the context when windows do not overlap.
    pub stride: u32,
    /// Rows of the head in the softmax.
    pub public_tokens: u64,
    /// Corpus identity.
    pub corpus_id: String,
    /// Corpus mode.
    pub mode: String,
}

impl Header {
    /// The header of a run over `plan` that saves its states so; `None` when its context exceeds 32 bits.
    pub fn of(plan: &CorpusPlan, save: &SaveHidden, public_tokens: usize) -> Option<Self> {
        let unplanned = Self {
            hidden_size: save.hidden_size,
            precision: save.precision,
            logits: save.logits,
            context: 0,
            stride: 0,
            public_tokens: 0,
            corpus_id: String::new(),
            mode: String::new(),
        };
        unplanned.over(plan, public_tokens)
    }

    /// The same states over `plan`.
    fn over(self, plan: &CorpusPlan, public_tokens: usize) -> Option<Self> {
        Some(Self {
            context: plan.protocol.context().try_into().ok()?,
            stride: plan.protocol.stride().try_into().ok()?,
            public_tokens: public_tokens as u64,
            corpus_id: plan.id.clone(),
            mode: plan.recorded_mode(),
            ..self
        })
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        let Self { context, stride, .. } = self;
        let [value, logit] = [self.precision, self.logits].map(Precision::bytes);
        for word in [VERSION, self.hidden_size, value, logit, *context, *stride] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.public_tokens.to_le_bytes());
        bytes.extend(string_bytes(&self.corpus_id).chain(string_bytes(&self.mode)));
        bytes
    }

    fn per_position(&self) -> u64 {
        4 + u64::from(self.hidden_size) * u64::from(self.precision.bytes())
    }

    /// Bytes of the file of a run over `plan`, without its trailer.
    pub fn file_bytes(&self, plan: &CorpusPlan) -> u64 {
        let windows = plan.streams.iter().flat_map(|stream| stream.windows.iter());
        let positions = windows.map(|window| window.positions() as u64);
        file_bytes(self.to_bytes().len() as u64, positions, self.per_position())
    }

    fn protocol(&self) -> String {
        let Self {
            context,
            stride,
            corpus_id,
            mode,
            hidden_size,
            ..
        } = self;
        format!(
            "corpus `{corpus_id}`, mode `{mode}`, context {context}, stride {stride}, hidden states of {hidden_size} values"
        )
    }
}

/// Writes a file record by record.
#[derive(Debug)]
pub struct Writer {
    records: RecordWriter,
    precision: Precision,
}

impl Writer {
    /// Creates `path.partial` and writes the header.
    ///
    /// # Errors
    /// When a field of the header is out of range or the file cannot be created.
    pub fn create(path: &Path, header: &Header, provenance: Option<Provenance>) -> Result<Self, TopTokenError> {
        check(path, header)?;
        Ok(Self {
            records: RecordWriter::create(path, &header.to_bytes(), provenance)?,
            precision: header.precision,
        })
    }

    /// Appends one window; `logprobs [positions]`, `states [positions, hidden_size]`.
    ///
    /// # Errors
    /// When the file cannot be written, or a value is not finite or does not fit the precision.
    pub fn write(
        &mut self,
        key: &WindowKey,
        name: WindowName<'_>,
        logprobs: &[f32],
        states: &[f32],
    ) -> Result<(), TopTokenError> {
        let mut bytes: Vec<u8> = logprobs.iter().flat_map(|value| value.to_le_bytes()).collect();
        let width = (states.len() / logprobs.len().max(1)).max(1);
        for (i, &value) in states.iter().enumerate() {
            let bits = value.to_bits();
            let fits = match self.precision {
                Precision::Bf16 => bits & 0xffff == 0,
                Precision::F32 => true,
            };
            if !value.is_finite() || !fits {
                let what = format!(
                    "a hidden value is {value}, which {} does not hold",
                    self.precision.name()
                );
                return Err(self.records.bad_value(name, i / width, what));
            }
            match self.precision {
                Precision::Bf16 => bytes.extend(((bits >> 16) as u16).to_le_bytes()),
                Precision::F32 => bytes.extend(bits.to_le_bytes()),
            }
        }
        self.records.write(key, bytes.into_iter())
    }

    /// Writes footer and trailer and gives the file its name.
    ///
    /// # Errors
    /// When the file cannot be written; nothing is left behind then.
    pub fn finish(self) -> Result<(), TopTokenError> {
        self.records.finish()
    }
}

fn check(path: &Path, header: &Header) -> Result<(), TopTokenError> {
    check_header(
        path,
        ("hidden size", header.hidden_size, MAX_HIDDEN),
        &header.corpus_id,
        &header.mode,
    )
}

/// The states of one window.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// Log-probabilities of the targets, `[positions]`.
    pub logprobs: Vec<f32>,
    /// Hidden states, `[positions, hidden_size]`.
    pub states: Vec<f32>,
}

/// Reads a file record by record, in the order of this run's windows.
#[derive(Debug)]
pub struct Reader {
    records: RecordReader,
    header: Header,
}

impl Reader {
    /// Opens a file and checks its header.
    ///
    /// # Errors
    /// When the file cannot be read or is not a hidden-state reference of this version.
    pub fn open(path: &Path) -> Result<Self, TopTokenError> {
        let mut records = RecordReader::open(path, FileKind::Hidden, "a hidden-state reference")?;
        let place = "the header";
        let invalid = |field, value: u32, limit: u32| TopTokenError::Header {
            path: path.to_owned(),
            field,
            value: value.into(),
            limit: limit.into(),
        };
        let version = records.u32(place)?;
        if version != VERSION {
            return Err(TopTokenError::Version {
                path: path.to_owned(),
                name: "a hidden-state reference",
                reads: VERSION,
                version,
            });
        }
        let hidden_size = records.u32(place)?;
        let mut precision = |field| {
            let bytes = records.u32(place)?;
            Precision::of_bytes(bytes).ok_or_else(|| invalid(field, bytes, 4))
        };
        let (precision, logits) = (precision("bytes per value")?, precision("bytes per logit")?);
        let header = Header {
            hidden_size,
            precision,
            logits,
            context: records.u32(place)?,
            stride: records.u32(place)?,
            public_tokens: records.u64(place)?,
            corpus_id: records.string("corpus id")?,
            mode: records.string("mode")?,
        };
        check(path, &header)?;
        Ok(Self {
            records: records.with_payload(header.per_position()),
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

    /// Compares corpus, protocol, vocabulary and every window with this run, whose hidden states have `hidden_size` values when
    /// that is known.
    ///
    /// # Errors
    /// When anything differs, or the file has another length than its windows.
    pub fn check_run<'w>(
        &mut self,
        plan: &CorpusPlan,
        public_tokens: usize,
        windows: impl Iterator<Item = (WindowKey, WindowName<'w>)>,
    ) -> Result<(), TopTokenError> {
        let public = public_tokens as u64;
        self.records
            .check_vocabulary(Some(self.header.public_tokens), 1, public)?;
        let run = self.header.clone().over(plan, public_tokens);
        if run.as_ref() != Some(&self.header) {
            let run = run.map_or_else(|| "a context beyond 32 bits".into(), |header| header.protocol());
            return Err(TopTokenError::Protocol {
                path: self.records.path().to_owned(),
                recorded: self.header.protocol(),
                run,
            });
        }
        self.records.check_windows(windows)
    }

    /// Reads the record of the window `expected`.
    ///
    /// # Errors
    /// When the file ends, the record belongs to another window, or a value cannot be right.
    pub fn read(&mut self, expected: &WindowKey, name: WindowName<'_>) -> Result<Record, TopTokenError> {
        let positions = self.records.read_key(expected, name)?;
        let (width, place) = (self.header.hidden_size as usize, &name.place());
        let logprobs = self.records.floats(positions, place)?;
        let states = match self.header.precision {
            Precision::F32 => self.records.floats(positions * width, place)?,
            Precision::Bf16 => {
                let mut bytes = vec![0; positions * width * 2];
                self.records.fill(&mut bytes, place)?;
                let (halves, _) = bytes.as_chunks::<2>();
                let widen = |&half: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(half)) << 16);
                halves.iter().map(widen).collect()
            }
        };
        let is_logprob = |value: &f32| value.is_finite() && *value <= LOGPROB_ROUNDING;
        if let Some(position) = logprobs.iter().position(|value| !is_logprob(value)) {
            let what = format!("{} is not a log-probability", logprobs[position]);
            return Err(self.records.bad_value(name, position, what));
        }
        if let Some(at) = states.iter().position(|value| !value.is_finite()) {
            let what = format!("a hidden value is {}", states[at]);
            return Err(self.records.bad_value(name, at / width, what));
        }
        Ok(Record { logprobs, states })
    }

    /// Passes over the record of a window that this run does not score.
    ///
    /// # Errors
    /// When the file ends or the record belongs to another window.
    pub fn skip(&mut self, expected: &WindowKey, name: WindowName<'_>) -> Result<(), TopTokenError> {
        self.records.skip(expected, name)
    }
}
