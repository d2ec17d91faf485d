//! Reference files hold one record per window behind a header of their own; what is common to them is here.
//!
//! All integers little-endian, no padding: u32 stream, u64 target_begin, u64 target_end, u64 fingerprint of the window's input,
//! then as many bytes per position as the kind of file says; a footer u32 `FFFFFFFF`; optionally a trailer, JSON
//! [`Provenance`], its u32 length, `TOPKINFO`. A file is written as `FILE.partial` and renamed when complete.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::files::{PARTIAL, PendingFile, open_regular};
use crate::foreign::{FileKind, PREFIX_LEN, describe, identify};
use crate::top_tokens::TopTokenError;

/// Most positions of one record.
pub const MAX_POSITIONS: u64 = 1 << 24;
const MAX_STRING: usize = 4096;
const FOOTER: u32 = u32::MAX;
const TRAILER_MAGIC: &[u8; 8] = b"TOPKINFO";
/// Longest trailer that is believed.
const MAX_TRAILER: u64 = 1 << 20;
/// Stream, targets and fingerprint.
const KEY_BYTES: u64 = 28;

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

impl WindowName<'_> {
    /// The record's place in a file, for messages.
    pub(crate) fn place(&self) -> String {
        format!("window {} of stream `{}`", self.window, self.stream)
    }
}

/// Bytes of a file with this header, these windows of so many positions each, and so many bytes per position; without a
/// trailer.
pub(crate) fn file_bytes(header: u64, windows: impl Iterator<Item = u64>, per_position: u64) -> u64 {
    header
        + windows
            .map(|positions| KEY_BYTES + positions * per_position)
            .sum::<u64>()
        + 4
}

/// Checks what headers have in common: a `(field, value, limit)` from 1 to its limit, and two strings.
pub(crate) fn check_header(
    path: &Path,
    (field, value, limit): (&'static str, u32, u32),
    corpus_id: &str,
    mode: &str,
) -> Result<(), TopTokenError> {
    let error = |field, value, limit| TopTokenError::Header {
        path: path.to_owned(),
        field,
        value,
        limit,
    };
    if !(1..=limit).contains(&value) {
        return Err(error(field, value.into(), limit.into()));
    }
    for (field, text) in [("length of the corpus id", corpus_id), ("length of the mode", mode)] {
        if text.len() > MAX_STRING {
            return Err(error(field, text.len() as u64, MAX_STRING as u64));
        }
    }
    Ok(())
}

/// The bytes of a string in a header.
pub(crate) fn string_bytes(text: &str) -> impl Iterator<Item = u8> + '_ {
    (text.len() as u32).to_le_bytes().into_iter().chain(text.bytes())
}

/// Writes a file record by record.
#[derive(Debug)]
pub(crate) struct RecordWriter {
    file: PendingFile,
    path: PathBuf,
    provenance: Option<Provenance>,
}

impl RecordWriter {
    pub(crate) fn create(path: &Path, header: &[u8], provenance: Option<Provenance>) -> Result<Self, TopTokenError> {
        let io = |source| TopTokenError::Io {
            path: path.to_owned(),
            source,
        };
        let mut file = PendingFile::create(path, PARTIAL).map_err(io)?;
        file.write_all(header).map_err(io)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            provenance,
        })
    }

    /// Appends a record with this payload.
    pub(crate) fn write(&mut self, key: &WindowKey, payload: impl Iterator<Item = u8>) -> Result<(), TopTokenError> {
        let mut bytes = key.stream.to_le_bytes().to_vec();
        for word in [key.target_begin, key.target_end, key.fingerprint] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(payload);
        self.file.write_all(&bytes).map_err(|source| TopTokenError::Io {
            path: self.path.clone(),
            source,
        })
    }

    /// The error of a value that the file cannot hold.
    pub(crate) fn bad_value(&self, name: WindowName<'_>, position: usize, what: String) -> TopTokenError {
        bad_value(&self.path, name, position, what)
    }

    /// Writes footer and trailer and gives the file its name.
    pub(crate) fn finish(mut self) -> Result<(), TopTokenError> {
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

/// Reads a file record by record, in the order of this run's windows. Fields are little-endian; an end of file within one is a
/// truncation of the place that is named.
#[derive(Debug)]
pub(crate) struct RecordReader {
    file: BufReader<File>,
    path: PathBuf,
    provenance: Option<Provenance>,
    /// Where the footer ends: at the trailer, or at the end of the file.
    end: u64,
    /// Payload bytes of a position.
    per_position: u64,
}

impl RecordReader {
    /// Opens a file of this kind, `name`d for messages, and stands behind its eight bytes of magic.
    pub(crate) fn open(path: &Path, kind: FileKind, name: &'static str) -> Result<Self, TopTokenError> {
        let io = |source| TopTokenError::Io {
            path: path.to_owned(),
            source,
        };
        let mut file = BufReader::new(open_regular(path).map_err(io)?);
        let mut prefix = Vec::new();
        (&mut file)
            .take(PREFIX_LEN as u64)
            .read_to_end(&mut prefix)
            .map_err(io)?;
        if identify(&prefix) != Some(kind) {
            return Err(TopTokenError::Kind {
                path: path.to_owned(),
                name,
                found: describe(&prefix),
            });
        }
        let (provenance, end) = read_trailer(&mut file).map_err(io)?;
        file.seek(SeekFrom::Start(8)).map_err(io)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            provenance,
            end,
            per_position: 0,
        })
    }

    /// States the payload once the header is read.
    pub(crate) fn with_payload(self, per_position: u64) -> Self {
        Self { per_position, ..self }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn provenance(&self) -> Option<&Provenance> {
        self.provenance.as_ref()
    }

    /// Compares a recorded vocabulary with this run's; `least` is what a file that records none needs.
    pub(crate) fn check_vocabulary(&self, recorded: Option<u64>, least: u64, public: u64) -> Result<(), TopTokenError> {
        let stated = self.provenance.as_ref().map(|p| p.public_tokens);
        let fits = match recorded.or(stated).filter(|&n| n > 0) {
            Some(recorded) => (recorded == public, recorded),
            None => (least <= public, least),
        };
        match fits {
            (true, _) => Ok(()),
            (false, recorded) => Err(TopTokenError::Vocabulary {
                path: self.path.clone(),
                recorded,
                public,
            }),
        }
    }

    /// Compares every record with this run's windows and the length of the file with them, before the first is read.
    pub(crate) fn check_windows<'w>(
        &mut self,
        windows: impl Iterator<Item = (WindowKey, WindowName<'w>)>,
    ) -> Result<(), TopTokenError> {
        let first = self.position()?;
        for (key, name) in windows {
            self.skip(&key, name)?;
        }
        if self.u32("the footer")? != FOOTER {
            return Err(TopTokenError::TooManyWindows {
                path: self.path.clone(),
            });
        }
        let end = self.position()?;
        if end != self.end {
            return Err(TopTokenError::Trailing {
                path: self.path.clone(),
                bytes: self.end.saturating_sub(end),
            });
        }
        self.file
            .seek(SeekFrom::Start(first))
            .map(|_| ())
            .map_err(|source| self.io(source))
    }

    /// Passes over the record of a window that this run does not score.
    pub(crate) fn skip(&mut self, expected: &WindowKey, name: WindowName<'_>) -> Result<(), TopTokenError> {
        let positions = self.read_key(expected, name)?;
        let bytes = positions as u64 * self.per_position;
        let at = self.position()?;
        if at.checked_add(bytes).is_none_or(|next| next > self.end) {
            return Err(TopTokenError::Truncated {
                path: self.path.clone(),
                place: name.place(),
            });
        }
        // Both are below the file's length.
        self.file.seek_relative(bytes as i64).map_err(|source| self.io(source))
    }

    /// Reads the identity of the next record, which must be that of the window `expected`, and returns its positions. The
    /// range equals this run's own, so what follows has the size of a window that is in memory already.
    pub(crate) fn read_key(&mut self, expected: &WindowKey, name: WindowName<'_>) -> Result<usize, TopTokenError> {
        let place = &name.place();
        let (path, stream, window) = (self.path.clone(), name.stream.to_owned(), name.window);
        let index = self.u32(place)?;
        if index == FOOTER {
            return Err(TopTokenError::TooFewWindows { path, stream, window });
        }
        let found = WindowKey {
            stream: index,
            target_begin: self.u64(place)?,
            target_end: self.u64(place)?,
            fingerprint: self.u64(place)?,
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

    /// The error of a value that cannot be right.
    pub(crate) fn bad_value(&self, name: WindowName<'_>, position: usize, what: String) -> TopTokenError {
        bad_value(&self.path, name, position, what)
    }

    fn io(&self, source: io::Error) -> TopTokenError {
        TopTokenError::Io {
            path: self.path.clone(),
            source,
        }
    }

    fn position(&mut self) -> Result<u64, TopTokenError> {
        self.file.stream_position().map_err(|source| self.io(source))
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8], place: &str) -> Result<(), TopTokenError> {
        self.file.read_exact(bytes).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => TopTokenError::Truncated {
                path: self.path.clone(),
                place: place.into(),
            },
            _ => self.io(source),
        })
    }

    pub(crate) fn u32(&mut self, place: &str) -> Result<u32, TopTokenError> {
        let mut bytes = [0; 4];
        self.fill(&mut bytes, place)?;
        Ok(u32::from_le_bytes(bytes))
    }

    pub(crate) fn u64(&mut self, place: &str) -> Result<u64, TopTokenError> {
        let mut bytes = [0; 8];
        self.fill(&mut bytes, place)?;
        Ok(u64::from_le_bytes(bytes))
    }

    pub(crate) fn words(&mut self, count: usize, place: &str) -> Result<Vec<u32>, TopTokenError> {
        let mut bytes = vec![0; count * 4];
        self.fill(&mut bytes, place)?;
        let (words, _) = bytes.as_chunks::<4>();
        Ok(words.iter().map(|&word| u32::from_le_bytes(word)).collect())
    }

    pub(crate) fn floats(&mut self, count: usize, place: &str) -> Result<Vec<f32>, TopTokenError> {
        Ok(self.words(count, place)?.into_iter().map(f32::from_bits).collect())
    }

    pub(crate) fn string(&mut self, field: &'static str) -> Result<String, TopTokenError> {
        let length = self.u32("the header")? as usize;
        if length > MAX_STRING {
            let (value, limit) = (length as u64, MAX_STRING as u64);
            return Err(TopTokenError::Header {
                path: self.path.clone(),
                field,
                value,
                limit,
            });
        }
        let mut bytes = vec![0; length];
        self.fill(&mut bytes, "the header")?;
        String::from_utf8(bytes).map_err(|_| TopTokenError::Text {
            path: self.path.clone(),
            field,
        })
    }
}

fn bad_value(path: &Path, name: WindowName<'_>, position: usize, what: String) -> TopTokenError {
    TopTokenError::Value {
        path: path.to_owned(),
        stream: name.stream.into(),
        window: name.window,
        position,
        what,
    }
}

/// The trailer, when the file ends with one, and where what precedes it ends.
fn read_trailer(file: &mut BufReader<File>) -> io::Result<(Option<Provenance>, u64)> {
    let length = file.seek(SeekFrom::End(0))?;
    let none = (None, length);
    let Some(tail_at) = length.checked_sub(4 + TRAILER_MAGIC.len() as u64) else {
        return Ok(none);
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
        return Ok(none);
    };
    file.seek(SeekFrom::Start(begin))?;
    let mut text = vec![0; size as usize];
    file.read_exact(&mut text)?;
    Ok(serde_json::from_slice(&text).map_or(none, |provenance| (Some(provenance), begin)))
}
