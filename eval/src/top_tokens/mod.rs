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
//! Readers of this format stop at the footer, so the trailer, which says which model and settings made the file, disturbs
//! none of them. A file is written as `FILE.partial` and renamed when complete; one without a footer is refused.

mod error;

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::aggregate::LOGPROB_ROUNDING;
use crate::corpus::CorpusPlan;
use crate::files::PendingFile;
use crate::foreign::{PREFIX_LEN, describe};

pub use error::TopTokenError;

/// Most tokens per position that a file may hold.
pub const MAX_TOP_K: u32 = 64;
/// Most positions of one record.
pub const MAX_POSITIONS: u64 = 1 << 24;
const MAGIC: &[u8; 8] = b"NINFTOPK";
const VERSION: u32 = 1;
const MAX_STRING: usize = 4096;
const FOOTER: u32 = u32::MAX;
const TRAILER_MAGIC: &[u8; 8] = b"TOPKINFO";
/// Longest trailer that is believed.
const MAX_TRAILER: u64 = 1 << 20;
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
            bytes.extend((text.len() as u32).to_le_bytes());
            bytes.extend(text.as_bytes());
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

/// What made a file, as its trailer says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// Rows of the head in the softmax.
    pub public_tokens: u64,
    /// Public model name.
    pub artifact: String,
    /// SHA-256 that identifies the prefill arithmetic.
    pub prefill_signature: String,
    /// Recorded name of the KV format.
    pub kv_dtype: String,
    /// Numerical route.
    pub route: String,
}

/// The fields that identify a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowKey {
    /// Stream index in selection order.
    pub stream: u32,
    /// First target, as a stream token index.
    pub target_begin: u64,
    /// End of the targets.
    pub target_end: u64,
    /// Fingerprint of the window's input tokens.
    pub fingerprint: u64,
}

impl WindowKey {
    fn difference(&self, found: &Self) -> Option<String> {
        [
            ("stream", u64::from(self.stream), u64::from(found.stream)),
            ("target begin", self.target_begin, found.target_begin),
            ("target end", self.target_end, found.target_end),
        ]
        .into_iter()
        .find(|(_, expected, found)| expected != found)
        .map(|(field, expected, found)| format!("{field} {found}, expected {expected}"))
        .or_else(|| {
            let differs = self.fingerprint != found.fingerprint;
            differs.then(|| {
                format!(
                    "fingerprint {:016x}, expected {:016x}",
                    found.fingerprint, self.fingerprint
                )
            })
        })
    }
}

/// A window's name in messages.
#[derive(Debug, Clone, Copy)]
pub struct WindowName<'a> {
    /// Stream id.
    pub stream: &'a str,
    /// Index within the stream.
    pub window: usize,
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
pub struct Writer {
    file: PendingFile,
    path: PathBuf,
    provenance: Option<Provenance>,
}

impl Writer {
    /// Creates `path.partial` and writes the header.
    ///
    /// # Errors
    /// When a field of the header is out of range or the file cannot be created.
    pub fn create(path: &Path, header: &Header, provenance: Option<Provenance>) -> Result<Self, TopTokenError> {
        check_header(path, header)?;
        let io = |source| TopTokenError::Io {
            path: path.to_owned(),
            source,
        };
        let mut file = PendingFile::create(path, ".partial").map_err(io)?;
        file.write_all(&header.to_bytes()).map_err(io)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            provenance,
        })
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
        let mut bytes = Vec::with_capacity(28 + 4 * (logprobs.len() + top_ids.len() + top_logprobs.len()));
        bytes.extend(key.stream.to_le_bytes());
        for word in [key.target_begin, key.target_end, key.fingerprint] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(logprobs.iter().flat_map(|value| value.to_le_bytes()));
        bytes.extend(top_ids.iter().flat_map(|id| id.to_le_bytes()));
        bytes.extend(top_logprobs.iter().flat_map(|value| value.to_le_bytes()));
        self.file.write_all(&bytes).map_err(|source| TopTokenError::Io {
            path: self.path.clone(),
            source,
        })
    }

    /// Writes footer and trailer and gives the file its name.
    ///
    /// # Errors
    /// When the file cannot be written; nothing is left behind then.
    pub fn finish(mut self) -> Result<(), TopTokenError> {
        let path = self.path;
        let mut write = || {
            self.file.write_all(&FOOTER.to_le_bytes())?;
            if let Some(provenance) = &self.provenance {
                let text = serde_json::to_vec(provenance)?;
                self.file.write_all(&text)?;
                self.file.write_all(&(text.len() as u32).to_le_bytes())?;
                self.file.write_all(TRAILER_MAGIC)?;
            }
            Ok(())
        };
        write()
            .and_then(|()| self.file.commit())
            .map_err(|source| TopTokenError::Io { path, source })
    }
}

fn check_header(path: &Path, header: &Header) -> Result<(), TopTokenError> {
    let invalid = |field, value, limit| TopTokenError::Header {
        path: path.to_owned(),
        field,
        value,
        limit,
    };
    if header.top_k == 0 || header.top_k > MAX_TOP_K {
        return Err(invalid("top_k", u64::from(header.top_k), u64::from(MAX_TOP_K)));
    }
    for (field, text) in [
        ("length of the corpus id", &header.corpus_id),
        ("length of the mode", &header.mode),
    ] {
        if text.len() > MAX_STRING {
            return Err(invalid(field, text.len() as u64, MAX_STRING as u64));
        }
    }
    Ok(())
}

/// Reads a file record by record, in the order of this run's windows.
#[derive(Debug)]
pub struct Reader {
    file: BufReader<File>,
    path: PathBuf,
    header: Header,
    provenance: Option<Provenance>,
}

impl Reader {
    /// Opens a file and checks its header; needs no model, so a bad file is noticed early.
    ///
    /// # Errors
    /// When the file cannot be read or is not a reference of version 1.
    pub fn open(path: &Path) -> Result<Self, TopTokenError> {
        let io = |source| TopTokenError::Io {
            path: path.to_owned(),
            source,
        };
        let mut file = BufReader::new(File::open(path).map_err(io)?);
        let mut prefix = Vec::new();
        (&mut file)
            .take(PREFIX_LEN as u64)
            .read_to_end(&mut prefix)
            .map_err(io)?;
        let kind = crate::foreign::identify(&prefix);
        if kind != Some(crate::foreign::FileKind::TopTokens) {
            return Err(TopTokenError::Kind {
                path: path.to_owned(),
                found: describe(&prefix),
            });
        }
        let provenance = read_trailer(&mut file).map_err(io)?;
        file.seek(SeekFrom::Start(MAGIC.len() as u64)).map_err(io)?;
        let mut fields = Fields { file: &mut file, path };
        let version = fields.u32("the header")?;
        if version != VERSION {
            return Err(TopTokenError::Version {
                path: path.to_owned(),
                version,
            });
        }
        let header = Header {
            top_k: fields.u32("the header")?,
            context: fields.u32("the header")?,
            stride: fields.u32("the header")?,
            corpus_id: fields.string("corpus id")?,
            mode: fields.string("mode")?,
        };
        check_header(path, &header)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            header,
            provenance,
        })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// What made the file, when it says so.
    pub fn provenance(&self) -> Option<&Provenance> {
        self.provenance.as_ref()
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
                path: self.path.clone(),
                recorded: self.header.protocol(),
                run,
            });
        }
        let public = public_tokens as u64;
        let recorded = self.provenance.as_ref().map(|p| p.public_tokens).filter(|&n| n > 0);
        match recorded {
            Some(recorded) if recorded != public => Err(TopTokenError::Vocabulary {
                path: self.path.clone(),
                recorded,
                public,
            }),
            None if u64::from(self.header.top_k) > public => Err(TopTokenError::Vocabulary {
                path: self.path.clone(),
                recorded: self.header.top_k.into(),
                public,
            }),
            _ => Ok(()),
        }
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
        let place = format!("window {} of stream `{}`", name.window, name.stream);
        let positions = self.read_key(expected, name, &place)?;
        // The range equals this run's own, so the sizes are those of a window that is in memory already.
        let k = self.header.top_k as usize;
        let mut fields = Fields {
            file: &mut self.file,
            path: &self.path,
        };
        let logprobs = fields.words(positions, &place)?.map(f32::from_bits).collect();
        let top_ids = fields.words(positions * k, &place)?.collect();
        let top_logprobs = fields.words(positions * k, &place)?.map(f32::from_bits).collect();
        let record = Record {
            logprobs,
            top_ids,
            top_logprobs,
        };
        match fault(&record, k, public_tokens) {
            None => Ok(record),
            Some((position, what)) => Err(TopTokenError::Value {
                path: self.path.clone(),
                stream: name.stream.into(),
                window: name.window,
                position,
                what,
            }),
        }
    }

    /// Passes over the record of a window that this run does not score.
    ///
    /// # Errors
    /// When the file ends or the record belongs to another window.
    pub fn skip(&mut self, expected: &WindowKey, name: WindowName<'_>) -> Result<(), TopTokenError> {
        let place = format!("window {} of stream `{}`", name.window, name.stream);
        let positions = self.read_key(expected, name, &place)?;
        let bytes = positions as u64 * (4 + 8 * u64::from(self.header.top_k));
        let io = |source| TopTokenError::Io {
            path: self.path.clone(),
            source,
        };
        let skipped = io::copy(&mut (&mut self.file).take(bytes), &mut io::sink()).map_err(io)?;
        if skipped < bytes {
            return Err(TopTokenError::Truncated {
                path: self.path.clone(),
                place,
            });
        }
        Ok(())
    }

    /// Checks that the file ends here; what follows the footer is not examined.
    ///
    /// # Errors
    /// When it is truncated or holds more windows.
    pub fn finish(mut self) -> Result<(), TopTokenError> {
        let mut fields = Fields {
            file: &mut self.file,
            path: &self.path,
        };
        match fields.u32("the footer")? {
            FOOTER => Ok(()),
            _ => Err(TopTokenError::TooManyWindows { path: self.path }),
        }
    }

    fn read_key(&mut self, expected: &WindowKey, name: WindowName<'_>, place: &str) -> Result<usize, TopTokenError> {
        let mut fields = Fields {
            file: &mut self.file,
            path: &self.path,
        };
        let (path, stream, window) = (self.path.clone(), name.stream.to_owned(), name.window);
        let index = fields.u32(place)?;
        if index == FOOTER {
            return Err(TopTokenError::TooFewWindows { path, stream, window });
        }
        let found = WindowKey {
            stream: index,
            target_begin: fields.u64(place)?,
            target_end: fields.u64(place)?,
            fingerprint: fields.u64(place)?,
        };
        let (begin, end) = (found.target_begin, found.target_end);
        if end <= begin || end - begin > MAX_POSITIONS {
            return Err(TopTokenError::Range {
                path,
                stream,
                window,
                begin,
                end,
            });
        }
        match expected.difference(&found) {
            Some(difference) => Err(TopTokenError::Tokens {
                path,
                stream,
                window,
                difference,
            }),
            None => Ok((end - begin) as usize),
        }
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

/// The trailer, when the file ends with one.
fn read_trailer(file: &mut BufReader<File>) -> io::Result<Option<Provenance>> {
    let length = file.seek(SeekFrom::End(0))?;
    let Some(tail_at) = length.checked_sub(4 + TRAILER_MAGIC.len() as u64) else {
        return Ok(None);
    };
    file.seek(SeekFrom::Start(tail_at))?;
    let mut tail = [0; 12];
    file.read_exact(&mut tail)?;
    let [a, b, c, d, magic @ ..] = tail;
    let size = u64::from(u32::from_le_bytes([a, b, c, d]));
    let Some(begin) = tail_at
        .checked_sub(size)
        .filter(|_| &magic == TRAILER_MAGIC && size <= MAX_TRAILER)
    else {
        return Ok(None);
    };
    file.seek(SeekFrom::Start(begin))?;
    let mut text = vec![0; size as usize];
    file.read_exact(&mut text)?;
    // Bytes after the footer are free: whatever does not parse is another program's.
    Ok(serde_json::from_slice(&text).ok())
}

/// Little-endian fields; an end of file is a truncation of `place`.
struct Fields<'a> {
    file: &'a mut BufReader<File>,
    path: &'a Path,
}

impl Fields<'_> {
    fn bytes<const N: usize>(&mut self, place: &str) -> Result<[u8; N], TopTokenError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, place)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8], place: &str) -> Result<(), TopTokenError> {
        self.file.read_exact(bytes).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => TopTokenError::Truncated {
                path: self.path.to_owned(),
                place: place.into(),
            },
            _ => TopTokenError::Io {
                path: self.path.to_owned(),
                source,
            },
        })
    }

    fn u32(&mut self, place: &str) -> Result<u32, TopTokenError> {
        self.bytes(place).map(u32::from_le_bytes)
    }

    fn u64(&mut self, place: &str) -> Result<u64, TopTokenError> {
        self.bytes(place).map(u64::from_le_bytes)
    }

    fn words(&mut self, count: usize, place: &str) -> Result<impl Iterator<Item = u32> + use<>, TopTokenError> {
        let mut bytes = vec![0; count * 4];
        self.fill(&mut bytes, place)?;
        let (words, _) = bytes.as_chunks::<4>();
        Ok(words
            .iter()
            .map(|&word| u32::from_le_bytes(word))
            .collect::<Vec<_>>()
            .into_iter())
    }

    fn string(&mut self, field: &'static str) -> Result<String, TopTokenError> {
        let length = self.u32("the header")? as usize;
        if length > MAX_STRING {
            let (value, limit) = (length as u64, MAX_STRING as u64);
            return Err(TopTokenError::Header {
                path: self.path.to_owned(),
                field,
                value,
                limit,
            });
        }
        let mut bytes = vec![0; length];
        self.fill(&mut bytes, "the header")?;
        String::from_utf8(bytes).map_err(|_| TopTokenError::Text {
            path: self.path.to_owned(),
            field,
        })
    }
}
