//! Rows of the n-gram table kept in memory in front of the volume, packed as they are stored:
//!
//! | kept | which rows |
//! |---|---|
//! | cache | row `r` stands in place `r mod places`; whatever was read last |
//! | hot | those of a profile, most wanted first, read when the table is opened |
//!
//! A profile is a text: one row number per line, the most wanted first; empty lines and lines that begin with `#` say
//! nothing. Where a row comes from changes no result.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use memmap2::MmapMut;

use super::volume::VolumeError;
use crate::experts::CacheStatistics;

/// Bytes per kept row beside its codes: its number.
const TAG_BYTES: u64 = size_of::<u64>() as u64;
/// A place without a row.
const EMPTY: u64 = u64::MAX;

/// Which rows stay in memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Kept {
    /// None.
    #[default]
    Nothing,
    /// As many of those read as these bytes hold.
    Cache {
        /// Row numbers included.
        bytes: u64,
    },
    /// As many of a profile as these bytes hold.
    Hot {
        /// The profile.
        profile: PathBuf,
        /// Row numbers included.
        bytes: u64,
        /// Whether the system may not move them to a swap device.
        locked: bool,
    },
}

/// Kept rows of one table.
#[derive(Debug)]
pub(super) struct RowMemory {
    row_bytes: usize,
    rows: Rows,
    hits: AtomicU64,
    misses: AtomicU64,
}

#[derive(Debug)]
enum Rows {
    Nothing,
    /// Row number and codes of every place.
    Cache(Mutex<(Vec<u64>, Vec<u8>)>),
    /// Ascending row numbers, and their codes.
    Hot(Vec<u64>, MmapMut),
}

impl RowMemory {
    pub(super) fn nothing(row_bytes: usize) -> Self {
        Self::of(row_bytes, Rows::Nothing)
    }

    /// An empty cache of at most `bytes`.
    pub(super) fn cache(row_bytes: usize, bytes: u64, all: u64) -> Self {
        let places = places(row_bytes, bytes).min(all) as usize;
        let rows = match places {
            0 => Rows::Nothing,
            _ => Rows::Cache(Mutex::new((vec![EMPTY; places], vec![0; places * row_bytes]))),
        };
        Self::of(row_bytes, rows)
    }

    /// The given rows, ascending, with their codes.
    pub(super) fn hot(row_bytes: usize, rows: Vec<u64>, codes: MmapMut) -> Self {
        Self::of(row_bytes, Rows::Hot(rows, codes))
    }

    fn of(row_bytes: usize, rows: Rows) -> Self {
        let (hits, misses) = Default::default();
        Self {
            row_bytes,
            rows,
            hits,
            misses,
        }
    }

    /// Writes the codes of those of `rows` that are here to their places in `out`; returns the places of the others.
    pub(super) fn take(&self, rows: &[u64], out: &mut [u8]) -> Vec<usize> {
        let width = self.row_bytes;
        let places = rows.iter().zip(out.chunks_exact_mut(width)).enumerate();
        let missing: Vec<usize> = match &self.rows {
            Rows::Nothing => return (0..rows.len()).collect(),
            Rows::Cache(cache) => {
                let (tags, codes) = &*cache.lock().unwrap_or_else(PoisonError::into_inner);
                let missing = places.filter_map(|(index, (&row, out))| {
                    let place = (row % tags.len() as u64) as usize;
                    if tags[place] != row {
                        return Some(index);
                    }
                    out.copy_from_slice(&codes[place * width..][..width]);
                    None
                });
                missing.collect()
            }
            Rows::Hot(numbers, codes) => {
                let missing = places.filter_map(|(index, (row, out))| match numbers.binary_search(row) {
                    Ok(place) => {
                        out.copy_from_slice(&codes[place * width..][..width]);
                        None
                    }
                    Err(_) => Some(index),
                });
                missing.collect()
            }
        };
        let hits = rows.len() - missing.len();
        self.hits.fetch_add(hits as u64, Ordering::Relaxed);
        self.misses.fetch_add(missing.len() as u64, Ordering::Relaxed);
        missing
    }

    /// Keeps those of `rows` that were just read, if the memory takes new ones.
    pub(super) fn keep(&self, rows: &[u64], codes: &[u8], read: &[usize]) {
        let Rows::Cache(cache) = &self.rows else { return };
        let (tags, kept) = &mut *cache.lock().unwrap_or_else(PoisonError::into_inner);
        let width = self.row_bytes;
        for &index in read {
            let place = (rows[index] % tags.len() as u64) as usize;
            tags[place] = rows[index];
            kept[place * width..][..width].copy_from_slice(&codes[index * width..][..width]);
        }
    }

    /// How many rows were here, and how many were not; zeros without a memory.
    pub(super) fn statistics(&self) -> CacheStatistics {
        CacheStatistics {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
        }
    }
}

/// Rows that `bytes` hold.
fn places(row_bytes: usize, bytes: u64) -> u64 {
    bytes / (row_bytes as u64 + TAG_BYTES)
}

/// The rows of the profile that `bytes` hold, ascending; `all` rows are in the table.
///
/// # Errors
/// When the file cannot be read, or a line is no row of the table.
pub(super) fn read_profile(path: &Path, all: u64, row_bytes: usize, bytes: u64) -> Result<Vec<u64>, VolumeError> {
    let text = std::fs::read_to_string(path).map_err(|source| VolumeError::Io {
        path: path.into(),
        source,
    })?;
    let mut wanted = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let row = line.parse::<u64>().ok().filter(|row| *row < all);
        wanted.push(row.ok_or_else(|| VolumeError::Profile {
            path: path.into(),
            line: number + 1,
            found: line.chars().take(40).collect(),
            rows: all,
        })?);
    }
    // A row that occurs again takes no second place.
    let mut seen = HashSet::new();
    wanted.retain(|row| seen.insert(*row));
    wanted.truncate(usize::try_from(places(row_bytes, bytes)).unwrap_or(usize::MAX));
    wanted.sort_unstable();
    Ok(wanted)
}
