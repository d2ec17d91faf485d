//! The files of an artifact as one logical payload.

use super::{ArtifactError, ENTRY_MAGIC, HEADER_BYTES, PAYLOAD_ALIGNMENT, VOLUME_MAGIC, VolumeFile};
use crate::formats::align_up;
use memmap2::{Advice, Mmap};
use std::borrow::Cow;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The entry file, mapped, with its header read.
pub(super) struct Entry {
    path: PathBuf,
    map: Mmap,
    id: [u8; 16],
    json_bytes: u64,
}

fn map(path: &Path) -> std::io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: the map is read-only and this program never writes to an artifact it reads. As with any mapped file, the
    // user must not truncate or overwrite it meanwhile; writers therefore publish by renaming.
    unsafe { Mmap::map(&file) }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

impl Entry {
    /// Maps the file and checks its header (F01 to F04).
    pub(super) fn open(path: &Path) -> Result<Self, ArtifactError> {
        let owned = || path.to_owned();
        let io = |source| ArtifactError::Io { path: owned(), source };
        let bytes = std::fs::metadata(path).map_err(io)?.len();
        if bytes < HEADER_BYTES {
            return Err(ArtifactError::TooShort { path: owned(), bytes });
        }
        let map = map(path).map_err(io)?;
        let header = map
            .get(..HEADER_BYTES as usize)
            .ok_or_else(|| ArtifactError::TooShort { path: owned(), bytes })?;
        if header[..8] != ENTRY_MAGIC {
            return Err(match header[..8].split_last() {
                Some((2, rest)) if rest == &ENTRY_MAGIC[..7] => ArtifactError::Version2 { path: owned() },
                _ => ArtifactError::NotAnEntry { path: owned() },
            });
        }
        let json_bytes = u64_at(header, 8);
        let available = map.len() as u64 - HEADER_BYTES;
        if json_bytes == 0 || json_bytes > available {
            return Err(ArtifactError::DirectoryLength {
                path: owned(),
                json_bytes,
                available,
            });
        }
        let mut id = [0; 16];
        id.copy_from_slice(&header[16..32]);
        Ok(Self {
            path: owned(),
            map,
            id,
            json_bytes,
        })
    }

    /// Header and directory text.
    pub(super) fn head(&self) -> &[u8] {
        &self.map[..(HEADER_BYTES + self.json_bytes) as usize]
    }

    /// The directory text.
    pub(super) fn json(&self) -> &[u8] {
        &self.map[HEADER_BYTES as usize..][..self.json_bytes as usize]
    }

    pub(super) fn id(&self) -> [u8; 16] {
        self.id
    }
}

/// One file's share of the payload.
struct Segment {
    path: PathBuf,
    /// Payload offset of its first byte.
    begin: u64,
    bytes: u64,
    /// Where it starts in the file.
    start: u64,
    map: OnceLock<Mmap>,
}

/// All files; continuations are opened when a range first touches them.
pub(super) struct Volumes {
    id: [u8; 16],
    segments: Vec<Segment>,
    payload: u64,
}

impl Volumes {
    /// Checks the entry's length against the directory (F05) and lays out the payload.
    pub(super) fn new(entry: Entry, files: &[VolumeFile]) -> Result<Self, ArtifactError> {
        let overflow = || ArtifactError::Overflow {
            what: "a payload position",
        };
        let entry_start = align_up(HEADER_BYTES + entry.json_bytes, PAYLOAD_ALIGNMENT).ok_or_else(overflow)?;
        let mut segments = Vec::with_capacity(files.len());
        let mut begin = 0u64;
        for (index, file) in files.iter().enumerate() {
            let (path, start) = match &file.path {
                Some(name) if index > 0 => (entry.path.with_file_name(name), PAYLOAD_ALIGNMENT),
                _ => (entry.path.clone(), entry_start),
            };
            start.checked_add(file.payload_bytes).ok_or_else(overflow)?;
            segments.push(Segment {
                path,
                begin,
                bytes: file.payload_bytes,
                start,
                map: OnceLock::new(),
            });
            begin = begin.checked_add(file.payload_bytes).ok_or_else(overflow)?;
        }
        let (id, actual) = (entry.id, entry.map.len() as u64);
        if let Some(first) = segments.first() {
            let expected = first.start + first.bytes;
            if actual != expected {
                return Err(ArtifactError::EntryLength {
                    path: entry.path,
                    actual,
                    expected,
                });
            }
            first.map.get_or_init(|| entry.map);
        }
        Ok(Self {
            id,
            segments,
            payload: begin,
        })
    }

    /// Size of the logical payload.
    pub(super) fn payload_bytes(&self) -> u64 {
        self.payload
    }

    /// The payload of one file, which is opened and checked (F06 to F08) the first time.
    fn segment(&self, index: usize) -> Result<&[u8], ArtifactError> {
        Ok(&self.map(index)?[self.segments[index].start as usize..])
    }

    fn map(&self, index: usize) -> Result<&Mmap, ArtifactError> {
        let segment = &self.segments[index];
        match segment.map.get() {
            Some(map) => Ok(map),
            None => {
                let map = self.open(index as u64, segment)?;
                Ok(segment.map.get_or_init(|| map))
            }
        }
    }

    /// Opens and checks every file.
    pub(super) fn open_all(&self) -> Result<(), ArtifactError> {
        (0..self.segments.len()).try_for_each(|index| self.map(index).map(drop))
    }

    /// Has the system begin to read payload bytes `[offset, offset + bytes)`; a hint, so that what fails is left to
    /// whoever reads them.
    pub(super) fn will_need(&self, offset: u64, bytes: u64) {
        let end = offset.saturating_add(bytes);
        for (index, segment) in self.segments.iter().enumerate() {
            let (begin, end) = (offset.max(segment.begin), end.min(segment.begin + segment.bytes));
            if let (true, Ok(map)) = (begin < end, self.map(index)) {
                let start = segment.start + (begin - segment.begin);
                let _ = map.advise_range(Advice::WillNeed, start as usize, (end - begin) as usize);
            }
        }
    }

    fn open(&self, index: u64, segment: &Segment) -> Result<Mmap, ArtifactError> {
        let path = || segment.path.clone();
        let missing = |source| ArtifactError::MissingVolume { path: path(), source };
        let expected = segment.start + segment.bytes;
        let actual = std::fs::metadata(&segment.path).map_err(missing)?.len();
        if actual < HEADER_BYTES {
            return Err(ArtifactError::VolumeLength {
                path: path(),
                actual,
                expected,
            });
        }
        let map = map(&segment.path).map_err(missing)?;
        let header = &map[..HEADER_BYTES as usize];
        if header[..8] != VOLUME_MAGIC || u64_at(header, 8) != index || header[16..32] != self.id {
            return Err(ArtifactError::ForeignVolume { path: path(), index });
        }
        let actual = map.len() as u64;
        if actual != expected {
            return Err(ArtifactError::VolumeLength {
                path: path(),
                actual,
                expected,
            });
        }
        Ok(map)
    }

    /// Payload bytes `[offset, offset + bytes)`: borrowed when one file holds them all, else joined.
    pub(super) fn read(&self, offset: u64, bytes: u64) -> Result<Cow<'_, [u8]>, ArtifactError> {
        if offset > self.payload || bytes > self.payload - offset {
            return Err(ArtifactError::PayloadRange {
                offset,
                bytes,
                payload: self.payload,
            });
        }
        if bytes == 0 {
            return Ok(Cow::Borrowed(&[]));
        }
        let first = self.segments.partition_point(|segment| segment.begin <= offset) - 1;
        let mut joined = Vec::new();
        let (mut position, mut left) = (offset, bytes);
        for index in first..self.segments.len() {
            let segment = &self.segments[index];
            let local = position - segment.begin;
            let taken = left.min(segment.bytes - local);
            let range = local as usize..(local + taken) as usize;
            let piece = self.segment(index)?.get(range).ok_or(ArtifactError::Truncated {
                offset: position,
                got: 0,
                wanted: taken,
            })?;
            if taken == bytes {
                return Ok(Cow::Borrowed(piece));
            }
            if joined.is_empty() {
                joined.reserve_exact(bytes as usize);
            }
            joined.extend_from_slice(piece);
            position += taken;
            left -= taken;
            if left == 0 {
                break;
            }
        }
        Ok(Cow::Owned(joined))
    }

    /// Whether `[offset, offset + bytes)` lies in one file.
    pub(super) fn in_one_file(&self, offset: u64, bytes: u64) -> bool {
        let after = self.segments.partition_point(|segment| segment.begin <= offset);
        after > 0 && {
            let segment = &self.segments[after - 1];
            offset - segment.begin <= segment.bytes && bytes <= segment.bytes - (offset - segment.begin)
        }
    }
}
