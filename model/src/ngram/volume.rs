//! The n-gram volume (`.ngram`): a header block, then the table's rows in blocks.
//!
//! | bytes | content |
//! |---|---|
//! | 0..8 | magic `NINFERNG` |
//! | 8..12, 12..16 | version 1, header bytes 4096, u32 |
//! | 16..24 | rows, u64 |
//! | 24..28, 28..32, 32..36 | bytes per row, rows per block, block bytes 4096, u32 |
//! | 36..44 | blocks, u64 |
//! | 44..60 | volume id |
//! | 60..4096 | zero |
//! | 4096 (1 + b) | block `b`: whole rows, then zeros |
//!
//! Numbers are little-endian. A row is one E4M3FN code per element; the scale of all rows is a weight of the artifact.
//! There is no checksum, so a volume is known by its size, geometry and id alone.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use memmap2::{Advice, Mmap, MmapMut};
use perplexity_kernels::numeric::{e4m3fn_to_f32, round_bf16};
use rayon::prelude::*;

use super::NgramTable;
use super::memory::{Kept, RowMemory, read_profile};
use crate::artifact::{ArtifactError, PendingFile};
use crate::experts::CacheStatistics;

/// Bytes of the header and of a block.
pub const BLOCK_BYTES: usize = 4096;
const MAGIC: [u8; 8] = *b"NINFERNG";
const VERSION: u32 = 1;
/// Used bytes of the header.
const HEADER_FIELDS: usize = 60;
/// The flag of reads past the page cache, where the platform has it.
const DIRECT: Option<i32> = if !cfg!(target_os = "linux") {
    None
} else if cfg!(any(target_arch = "aarch64", target_arch = "arm")) {
    Some(0x1_0000)
} else if cfg!(any(
    target_arch = "x86_64",
    target_arch = "x86",
    target_arch = "riscv64"
)) {
    Some(0x4000)
} else {
    None
};

/// Size and division of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeGeometry {
    /// Rows, padding included.
    pub rows: u64,
    /// Bytes, and elements, of a row; from 1 to [`BLOCK_BYTES`].
    pub row_bytes: usize,
}

impl VolumeGeometry {
    /// Rows that fit a block.
    pub fn rows_per_block(&self) -> u64 {
        (BLOCK_BYTES / self.row_bytes) as u64
    }

    /// Blocks behind the header.
    pub fn blocks(&self) -> u64 {
        self.rows.div_ceil(self.rows_per_block())
    }

    /// Length of the file.
    pub fn file_bytes(&self) -> u64 {
        BLOCK_BYTES as u64 * (1 + self.blocks())
    }

    /// Offset of row `row` in the file.
    pub fn offset(&self, row: u64) -> u64 {
        let (block, in_block) = (row / self.rows_per_block(), row % self.rows_per_block());
        BLOCK_BYTES as u64 * (1 + block) + in_block * self.row_bytes as u64
    }

    /// The header block of the volume called `id`.
    pub fn header(&self, id: [u8; 16]) -> [u8; BLOCK_BYTES] {
        let mut header = [0; BLOCK_BYTES];
        let mut at = 0;
        for (_, bytes) in self.fields(id) {
            header[at..at + bytes.len()].copy_from_slice(&bytes);
            at += bytes.len();
        }
        debug_assert_eq!(at, HEADER_FIELDS);
        header
    }

    /// The header's fields in order, by the names that messages use.
    fn fields(&self, id: [u8; 16]) -> [(&'static str, Vec<u8>); 9] {
        let word = |value: u64| (value as u32).to_le_bytes().to_vec();
        [
            ("magic", MAGIC.to_vec()),
            ("version", word(VERSION.into())),
            ("header_bytes", word(BLOCK_BYTES as u64)),
            ("rows", self.rows.to_le_bytes().to_vec()),
            ("row_bytes", word(self.row_bytes as u64)),
            ("rows_per_block", word(self.rows_per_block())),
            ("block_bytes", word(BLOCK_BYTES as u64)),
            ("blocks", self.blocks().to_le_bytes().to_vec()),
            ("volume_id", id.to_vec()),
        ]
    }
}

/// A volume, or another table, that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The file cannot be opened or read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error(transparent)]
    Write(#[from] Box<ArtifactError>),
    /// The default volume is not there.
    #[error("{} does not exist: the model looks n-grams up in it; name the volume with --ngram-volume", path.display())]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The file has another length than the geometry.
    #[error("{} has {found} bytes: the n-gram volume of this model has {expected}", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// The geometry's.
        expected: u64,
    },
    /// A header field is not the artifact's.
    #[error("{}: {field} of the n-gram volume is {found}: this model's has {expected}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// Its value.
        found: String,
        /// The value that belongs to the model.
        expected: String,
    },
    /// The header's unused bytes are not zero.
    #[error("{}: byte {at} of the n-gram volume's header is {word}: expected 0", path.display())]
    Padding {
        /// The file.
        path: PathBuf,
        /// The byte.
        at: usize,
        /// Its value.
        word: u8,
    },
    /// Reads past the page cache where there are none.
    #[error("{} cannot be read past the page cache ({source}): use another --ngram-io", path.display())]
    Direct {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// Memory that the system does not lock.
    #[error(
        "{}: {bytes} bytes of it cannot be locked in memory ({source}); raise `ulimit -l` or leave --ngram-lock out",
        path.display()
    )]
    Lock {
        /// The volume.
        path: PathBuf,
        /// How much was asked for.
        bytes: usize,
        /// The system's reason.
        source: io::Error,
    },
    /// A line of a profile that is no row of the table.
    #[error("{}, line {line}: {found:?} is no row of the n-gram table, which has {rows}", path.display())]
    Profile {
        /// The profile.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What it says.
        found: String,
        /// Rows of the table.
        rows: u64,
    },
    /// A table that is not the one the artifact was made with.
    #[error("{}: {what} of its n-gram table is {found}: this model's is {expected}", path.display())]
    Table {
        /// Where the table is.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// The table's.
        found: String,
        /// The artifact's.
        expected: String,
    },
    /// A row that the table does not have.
    #[error("the n-gram table has {rows} rows: row {row} does not exist")]
    Row {
        /// The row.
        row: u64,
        /// Rows of the table.
        rows: u64,
    },
    /// A word of a row that is not a number.
    #[error("element {element} of row {row} of the n-gram table is not a finite number (word {word:#04x})")]
    Word {
        /// The row.
        row: u64,
        /// The element.
        element: usize,
        /// The stored word, or its nearest bfloat16.
        word: u16,
    },
}

/// How a volume's rows are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Access {
    /// From a map of the file; the system keeps what it has room for.
    #[default]
    Mapped,
    /// Block by block from the file, each block once per pass, this many reads at a time.
    Reads {
        /// From 1 to 1024.
        depth: usize,
        /// Whether they go past the system's page cache.
        direct: bool,
    },
    /// From memory that holds the whole file.
    Memory {
        /// Whether the system may not move it to a swap device.
        locked: bool,
    },
}

/// How a volume is used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableOptions {
    /// How rows that are not kept are read.
    pub access: Access,
    /// The rows that are.
    pub kept: Kept,
}

impl From<Access> for TableOptions {
    fn from(access: Access) -> Self {
        let kept = Kept::Nothing;
        Self { access, kept }
    }
}

/// An opened volume.
#[derive(Debug)]
pub struct Volume {
    path: PathBuf,
    rows: Rows,
    memory: RowMemory,
    geometry: VolumeGeometry,
    scale: f32,
}

#[derive(Debug)]
enum Rows {
    Bytes(Mmap),
    File { file: File, depth: usize },
}

impl Volume {
    /// Opens `path` and compares it with what the artifact says of its volume; `scale` multiplies every code.
    ///
    /// # Errors
    /// On a missing file, another length, another value in any header field, a header byte that should be zero, memory
    /// that cannot be had or locked, a profile that is none.
    pub fn open(
        path: &Path,
        geometry: VolumeGeometry,
        id: [u8; 16],
        scale: f32,
        options: &TableOptions,
    ) -> Result<Self, VolumeError> {
        let failed = |source| VolumeError::Io {
            path: path.into(),
            source,
        };
        let lock = |map: &MmapMut| {
            map.lock().map_err(|source| VolumeError::Lock {
                path: path.into(),
                bytes: map.len(),
                source,
            })
        };
        let file = File::open(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => VolumeError::Missing { path: path.into() },
            _ => failed(source),
        })?;
        let (found, expected) = (file.metadata().map_err(failed)?.len(), geometry.file_bytes());
        if found != expected {
            return Err(VolumeError::Size {
                path: path.into(),
                found,
                expected,
            });
        }
        let mut header = [0; BLOCK_BYTES];
        file.read_exact_at(&mut header, 0).map_err(failed)?;
        check_header(path, &header, &geometry, id)?;
        let rows = match options.access {
            Access::Mapped => {
                // SAFETY: the map is read-only and every access is bounds-checked; a file that another process truncates
                // while it is mapped is outside what a program can guard against.
                let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
                // Rows are far apart; reading ahead would fetch what nobody asks for. A system without the advice does.
                let _ = map.advise(Advice::Random);
                Rows::Bytes(map)
            }
            Access::Reads { depth, direct: false } => Rows::File { file, depth },
            Access::Reads { depth, direct: true } => {
                let opened = match DIRECT {
                    Some(flag) => OpenOptions::new().read(true).custom_flags(flag).open(path),
                    None => Err(io::ErrorKind::Unsupported.into()),
                };
                // Some file systems take the flag and then refuse the reads.
                let tried = opened.and_then(|file| {
                    let mut block = MmapMut::map_anon(BLOCK_BYTES)?;
                    file.read_exact_at(&mut block, 0)?;
                    Ok(file)
                });
                let path = || path.to_owned();
                let file = tried.map_err(|source| VolumeError::Direct { path: path(), source })?;
                Rows::File { file, depth }
            }
            Access::Memory { locked } => {
                let mut map = MmapMut::map_anon(expected as usize).map_err(failed)?;
                file.read_exact_at(&mut map, 0).map_err(failed)?;
                if locked {
                    lock(&map)?;
                }
                Rows::Bytes(map.make_read_only().map_err(failed)?)
            }
        };
        let mut volume = Self {
            path: path.into(),
            rows,
            memory: RowMemory::nothing(geometry.row_bytes),
            geometry,
            scale,
        };
        volume.memory = match &options.kept {
            Kept::Nothing => RowMemory::nothing(geometry.row_bytes),
            Kept::Cache { bytes } => RowMemory::cache(geometry.row_bytes, *bytes, geometry.rows),
            Kept::Hot { profile, bytes, locked } => {
                let rows = read_profile(profile, geometry.rows, geometry.row_bytes, *bytes)?;
                let mut codes = MmapMut::map_anon((rows.len() * geometry.row_bytes).max(1)).map_err(failed)?;
                volume.fetch(&rows, &mut codes)?;
                if *locked {
                    lock(&codes)?;
                }
                RowMemory::hot(geometry.row_bytes, rows, codes)
            }
        };
        Ok(volume)
    }

    /// The codes of `rows`, one after the other, from where they lie; every row exists.
    fn fetch(&self, rows: &[u64], out: &mut [u8]) -> Result<(), VolumeError> {
        let (geometry, width) = (self.geometry, self.geometry.row_bytes);
        match &self.rows {
            // Nearly every row is in a page of its own: threads wait for theirs side by side.
            Rows::Bytes(map) => {
                let places = rows.par_iter().zip(out.par_chunks_exact_mut(width));
                places
                    .with_min_len(256)
                    .for_each(|(row, out)| out.copy_from_slice(&map[geometry.offset(*row) as usize..][..width]));
            }
            Rows::File { file, depth } => {
                let mut blocks: Vec<u64> = rows.iter().map(|row| row / geometry.rows_per_block()).collect();
                blocks.sort_unstable();
                blocks.dedup();
                let bytes = self.read_blocks(file, *depth, &blocks)?;
                for (row, out) in rows.iter().zip(out.chunks_exact_mut(width)) {
                    let at = blocks.partition_point(|block| *block < row / geometry.rows_per_block());
                    let within = (row % geometry.rows_per_block()) as usize * width;
                    out.copy_from_slice(&bytes[at * BLOCK_BYTES + within..][..width]);
                }
            }
        }
        Ok(())
    }

    /// The given blocks, one after the other, `depth` of them at a time.
    fn read_blocks(&self, file: &File, depth: usize, blocks: &[u64]) -> Result<MmapMut, VolumeError> {
        let failed = |source| VolumeError::Io {
            path: self.path.clone(),
            source,
        };
        // A map is aligned as reads past the page cache ask.
        let mut bytes = MmapMut::map_anon((blocks.len() * BLOCK_BYTES).max(1)).map_err(failed)?;
        let share = blocks.len().div_ceil(depth).max(1);
        let read = |blocks: &[u64], bytes: &mut [u8]| {
            let places = blocks.iter().zip(bytes.chunks_exact_mut(BLOCK_BYTES));
            let mut reads = places.map(|(block, bytes)| file.read_exact_at(bytes, BLOCK_BYTES as u64 * (1 + block)));
            reads.try_for_each(|read| read.map_err(failed))
        };
        std::thread::scope(|scope| {
            let parts = blocks.chunks(share).zip(bytes.chunks_mut(share * BLOCK_BYTES));
            let readers: Vec<_> = parts
                .map(|(blocks, bytes)| scope.spawn(move || read(blocks, bytes)))
                .collect();
            let mut joined = readers.into_iter().map(|reader| reader.join());
            joined.try_for_each(|part| part.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })?;
        Ok(bytes)
    }
}

impl NgramTable for Volume {
    fn read(&self, rows: &[u64], out: &mut [f32]) -> Result<(), VolumeError> {
        let VolumeGeometry { rows: all, row_bytes } = self.geometry;
        if let Some(&row) = rows.iter().find(|row| **row >= all) {
            return Err(VolumeError::Row { row, rows: all });
        }
        let mut codes = vec![0; rows.len() * row_bytes];
        let missing = self.memory.take(rows, &mut codes);
        if missing.len() == rows.len() {
            self.fetch(rows, &mut codes)?;
        } else if !missing.is_empty() {
            let wanted: Vec<u64> = missing.iter().map(|index| rows[*index]).collect();
            let mut read = vec![0; wanted.len() * row_bytes];
            self.fetch(&wanted, &mut read)?;
            for (index, read) in missing.iter().zip(read.chunks_exact(row_bytes)) {
                codes[index * row_bytes..][..row_bytes].copy_from_slice(read);
            }
        }
        self.memory.keep(rows, &codes, &missing);
        rows.par_iter()
            .zip(codes.par_chunks_exact(row_bytes))
            .zip(out.par_chunks_exact_mut(row_bytes))
            .with_min_len(256)
            .try_for_each(|((row, codes), out)| decode_row(*row, codes, self.scale, out))
    }

    fn statistics(&self) -> CacheStatistics {
        self.memory.statistics()
    }
}

/// Decodes the codes of one row, `bf16(e4m3fn(c) * scale)`; the product is exact before it is rounded.
pub(crate) fn decode_row(row: u64, codes: &[u8], scale: f32, out: &mut [f32]) -> Result<(), VolumeError> {
    for (element, (&word, out)) in codes.iter().zip(out).enumerate() {
        *out = round_bf16(e4m3fn_to_f32(word) * scale);
        if out.is_nan() {
            let word = word.into();
            return Err(VolumeError::Word { row, element, word });
        }
    }
    Ok(())
}

fn check_header(path: &Path, map: &[u8], geometry: &VolumeGeometry, id: [u8; 16]) -> Result<(), VolumeError> {
    let mut at = 0;
    for (field, expected) in geometry.fields(id) {
        let found = &map[at..at + expected.len()];
        at += expected.len();
        if found != expected {
            return Err(VolumeError::Header {
                path: path.into(),
                field,
                found: shown(field, found),
                expected: shown(field, &expected),
            });
        }
    }
    match map[HEADER_FIELDS..BLOCK_BYTES].iter().position(|&byte| byte != 0) {
        Some(offset) => Err(VolumeError::Padding {
            path: path.into(),
            at: HEADER_FIELDS + offset,
            word: map[HEADER_FIELDS + offset],
        }),
        None => Ok(()),
    }
}

/// Text and ids in hex, numbers in decimal.
fn shown(field: &str, bytes: &[u8]) -> String {
    if matches!(field, "magic" | "volume_id") {
        return bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    }
    let value = bytes
        .iter()
        .rev()
        .fold(0u64, |value, &byte| value << 8 | u64::from(byte));
    value.to_string()
}

/// Writes a volume row by row, under a temporary name until it is published.
#[derive(Debug)]
pub(crate) struct VolumeWriter {
    file: BufWriter<PendingFile>,
    geometry: VolumeGeometry,
    written: u64,
}

impl VolumeWriter {
    /// Begins `path` with the header.
    ///
    /// # Errors
    /// When the file cannot be created; an existing `path` is never overwritten.
    pub(crate) fn create(path: &Path, geometry: VolumeGeometry, id: [u8; 16]) -> Result<Self, VolumeError> {
        let mut writer = Self {
            file: BufWriter::new(PendingFile::create(path).map_err(Box::new)?),
            geometry,
            written: 0,
        };
        writer.put(&geometry.header(id))?;
        Ok(writer)
    }

    /// Appends one row's codes.
    ///
    /// # Errors
    /// When it cannot be written, or all rows are there.
    pub(crate) fn append(&mut self, codes: &[u8]) -> Result<(), VolumeError> {
        debug_assert_eq!(codes.len(), self.geometry.row_bytes);
        if self.written == self.geometry.rows {
            let (row, rows) = (self.written, self.geometry.rows);
            return Err(VolumeError::Row { row, rows });
        }
        self.put(codes)?;
        self.written += 1;
        if self.written.is_multiple_of(self.geometry.rows_per_block()) || self.written == self.geometry.rows {
            let in_block = (self.written - 1) % self.geometry.rows_per_block() + 1;
            let used = in_block as usize * self.geometry.row_bytes;
            self.put(&[0; BLOCK_BYTES][used..])?;
        }
        Ok(())
    }

    /// The whole file, on the disk and without its name yet.
    ///
    /// # Errors
    /// When a row is missing, or the file cannot be written.
    pub(crate) fn complete(mut self) -> Result<PendingFile, VolumeError> {
        if self.written != self.geometry.rows {
            let (row, rows) = (self.written, self.geometry.rows);
            return Err(VolumeError::Row { row, rows });
        }
        self.file.flush().map_err(|source| self.failed(source))?;
        let (file, _) = self.file.into_parts();
        file.sync().map_err(Box::new)?;
        Ok(file)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), VolumeError> {
        self.file.write_all(bytes).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> VolumeError {
        VolumeError::Write(Box::new(self.file.get_ref().io(source)))
    }
}
