//! Shared by the artifact tests: temporary folders, a small example directory, files around a directory.

#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Directory of an invented two-layer hybrid model with every text format, 283,912 bytes of payload.
pub(crate) const SMALL_DIRECTORY: &str = include_str!("../data/small_directory.json");

/// The small directory without white space (its only string with a space is `invented example`).
pub(crate) fn minified() -> String {
    let mut quoted = false;
    SMALL_DIRECTORY
        .chars()
        .filter(|character| {
            quoted ^= *character == '"';
            quoted || !character.is_whitespace()
        })
        .collect()
}

/// A folder removed at the end of a test.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!(
            "perplexity-artifact-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Names of the files in it, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) const ID: [u8; 16] = [0xA5; 16];

/// An entry file: header, directory padded with spaces to `json_bytes`, payload at the next multiple of 4096.
pub(crate) fn entry_bytes(json: &str, json_bytes: usize, payload: &[u8]) -> Vec<u8> {
    let mut bytes = b"NINFER\x00\x03".to_vec();
    bytes.extend((json_bytes as u64).to_le_bytes());
    bytes.extend(ID);
    bytes.extend(json.as_bytes());
    bytes.resize(32 + json_bytes, b' ');
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    bytes.extend(payload);
    bytes
}

/// A continuation volume.
pub(crate) fn volume_bytes(index: u64, id: [u8; 16], payload: &[u8]) -> Vec<u8> {
    let mut bytes = b"NINPRT\x00\x03".to_vec();
    bytes.extend(index.to_le_bytes());
    bytes.extend(id);
    bytes.resize(4096, 0);
    bytes.extend(payload);
    bytes
}

/// Writes the small example, payload all zero, and returns its path.
pub(crate) fn write_small(folder: &Folder) -> PathBuf {
    let path = folder.join("small.ninfer");
    std::fs::write(&path, entry_bytes(&minified(), 12_256, &vec![0; 283_912])).unwrap();
    path
}

/// Deterministic pseudo-random numbers (SplitMix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Below `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Roughly normal values of unit scale.
    pub(crate) fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count)
            .map(|_| (0..4).map(|_| (self.next() >> 40) as f32 / 16_777_216.0 - 0.5).sum())
            .collect()
    }
}

pub(crate) fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}
