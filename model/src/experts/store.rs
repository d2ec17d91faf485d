//! Which experts of a bank are kept ready for multiplication, and where the others wait.
//!
//! | residency | experts | others |
//! |---|---|---|
//! | device | all, unpacked | |
//! | host | as many as the cache holds | packed records in memory |
//! | disk | as many as the cache holds | packed records in the artifact's files |
//!
//! A pass visits a block's experts in ascending order, so that replacing the least recently used one would always
//! replace the one that is needed next: the cache keeps what it has. Where an expert comes from changes no result.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rayon::prelude::*;

use super::ExpertBank;
use super::arithmetic::{IntegerExpert, IntegerMatrix};
use crate::artifact::ArtifactError;
use crate::formats::nvfp4_expert::Projection;

/// Where the routed experts are while a model runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Residency {
    /// Ready for multiplication.
    #[default]
    Device,
    /// Packed, in memory.
    Host,
    /// Packed, in the artifact's files.
    Disk,
}

impl Residency {
    /// `device`, `host` or `disk`, as options and reports spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Disk => "disk",
        }
    }
}

/// How often an expert was there when it was needed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// Uses of an expert that was ready.
    pub hits: u64,
    /// Uses of an expert that had to be unpacked.
    pub misses: u64,
}

impl std::ops::AddAssign for CacheStatistics {
    fn add_assign(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
    }
}

/// The experts of one bank.
#[derive(Debug)]
pub struct ExpertStore {
    bank: ExpertBank,
    /// Packed records, with residency `host`.
    records: Option<Vec<Box<[u8]>>>,
    ready: Vec<OnceLock<Arc<IntegerExpert>>>,
    /// Bytes that may still be kept.
    room: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
}

impl ExpertStore {
    /// The experts of `bank`; with residency `host` or `disk` at most `cache_bytes` of unpacked ones are kept.
    ///
    /// # Errors
    /// When a record that is needed now cannot be read or unpacked.
    pub fn new(bank: ExpertBank, residency: Residency, cache_bytes: u64) -> Result<Self, ArtifactError> {
        let experts = bank.geometry().experts;
        let records = match residency {
            Residency::Host => {
                let copy = |expert| bank.record(expert).map(|record| record.into_owned().into_boxed_slice());
                Some((0..experts).map(copy).collect::<Result<_, _>>()?)
            }
            _ => None,
        };
        let room = match residency {
            Residency::Device => u64::MAX,
            _ => cache_bytes,
        };
        let store = Self {
            bank,
            records,
            ready: (0..experts).map(|_| OnceLock::new()).collect(),
            room: room.into(),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        };
        if residency == Residency::Device {
            (0..experts)
                .into_par_iter()
                .try_for_each(|expert| store.get(expert).map(drop))?;
            store.misses.store(0, Ordering::Relaxed);
        }
        Ok(store)
    }

    /// The bank behind the store.
    pub fn bank(&self) -> &ExpertBank {
        &self.bank
    }

    /// Expert `expert`, unpacked.
    ///
    /// # Errors
    /// When its record cannot be read or holds a scale that is negative or not a number.
    pub fn get(&self, expert: usize) -> Result<Arc<IntegerExpert>, ArtifactError> {
        if let Some(ready) = self.ready[expert].get() {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(Arc::clone(ready));
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        let unpacked = Arc::new(self.unpack(expert)?);
        let bytes = unpacked.matrices.iter().map(|matrix| matrix.bytes() as u64).sum();
        let take = |room: u64| room.checked_sub(bytes);
        if self
            .room
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .is_ok()
        {
            // Another thread may have come first with the same expert; then both hold equal values.
            let _ = self.ready[expert].set(Arc::clone(&unpacked));
        }
        Ok(unpacked)
    }

    /// Hits and misses so far.
    pub fn statistics(&self) -> CacheStatistics {
        CacheStatistics {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
        }
    }

    fn unpack(&self, expert: usize) -> Result<IntegerExpert, ArtifactError> {
        let read;
        let record: &[u8] = match &self.records {
            Some(records) => &records[expert],
            None => {
                read = self.bank.record(expert)?;
                &read
            }
        };
        let matrix = |projection| {
            IntegerMatrix::unpack(self.bank.geometry(), record, projection).map_err(|source| self.bank.refused(source))
        };
        Ok(IntegerExpert {
            matrices: [
                matrix(Projection::Gate)?,
                matrix(Projection::Up)?,
                matrix(Projection::Down)?,
            ],
            multipliers: self.bank.multipliers(expert),
        })
    }
}
