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

/// Records whose reading begins before they are needed.
const AHEAD: usize = 8;

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

    /// As messages name it.
    pub(crate) fn option(self) -> &'static str {
        match self {
            Self::Device => "expert residency device",
            Self::Host => "expert residency host",
            Self::Disk => "expert residency disk",
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

/// An expert in a form that rows can be multiplied by.
pub trait Ready: Send + Sync {
    /// Bytes that it takes in memory.
    fn bytes(&self) -> u64;
}

impl Ready for IntegerExpert {
    fn bytes(&self) -> u64 {
        self.matrices.iter().map(|matrix| matrix.bytes() as u64).sum()
    }
}

/// Makes an expert ready from its number and its record.
type Unpack<E> = dyn Fn(&ExpertBank, usize, &[u8]) -> Result<E, ArtifactError> + Send + Sync;

/// The experts of one bank.
pub struct ExpertStore<E> {
    bank: ExpertBank,
    unpack: Box<Unpack<E>>,
    /// Packed records, with residency `host`.
    records: Option<Vec<Box<[u8]>>>,
    ready: Vec<OnceLock<Arc<E>>>,
    /// Bytes that may still be kept.
    room: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
}

impl<E> std::fmt::Debug for ExpertStore<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExpertStore")
            .field("bank", &self.bank)
            .finish_non_exhaustive()
    }
}

impl ExpertStore<IntegerExpert> {
    /// The experts of `bank` as integers; see [`ExpertStore::new`].
    ///
    /// # Errors
    /// As [`ExpertStore::new`].
    pub fn integers(bank: ExpertBank, residency: Residency, cache_bytes: u64) -> Result<Self, ArtifactError> {
        Self::new(bank, residency, cache_bytes, |bank, expert, record| {
            let matrix = |projection| {
                IntegerMatrix::unpack(bank.geometry(), record, projection).map_err(|source| bank.refused(source))
            };
            let [gate, up, down] = Projection::ALL.map(matrix);
            Ok(IntegerExpert {
                matrices: [gate?, up?, down?],
                multipliers: bank.multipliers(expert),
            })
        })
    }
}

impl<E: Ready> ExpertStore<E> {
    /// The experts of `bank`, made ready by `unpack`; with residency `host` or `disk` at most `cache_bytes` of them stay so.
    ///
    /// # Errors
    /// When a record that is needed now cannot be read or unpacked.
    pub fn new(
        bank: ExpertBank,
        residency: Residency,
        cache_bytes: u64,
        unpack: impl Fn(&ExpertBank, usize, &[u8]) -> Result<E, ArtifactError> + Send + Sync + 'static,
    ) -> Result<Self, ArtifactError> {
        let experts = bank.geometry().experts;
        let records = match residency {
            Residency::Host => {
                (0..experts.min(AHEAD)).for_each(|expert| bank.will_need(expert));
                let copy = |expert: usize| {
                    if expert + AHEAD < experts {
                        bank.will_need(expert + AHEAD);
                    }
                    bank.record(expert).map(|record| record.into_owned().into_boxed_slice())
                };
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
            unpack: Box::new(unpack),
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

    /// Hands over the given experts, one after the other; those that are not ready are read ahead, and the next one is made
    /// ready while `multiply` has the one before.
    ///
    /// # Errors
    /// When a record cannot be read or unpacked.
    pub fn each<T: Send>(
        &self,
        experts: &[usize],
        multiply: impl Fn(usize, &E) -> T + Sync,
        mut take: impl FnMut(usize, T),
    ) -> Result<(), ArtifactError> {
        let get = |at: usize| experts.get(at).map(|expert| self.get(*expert)).transpose();
        let read = |at: usize| {
            let cold = |expert: &&usize| self.records.is_none() && self.ready[**expert].get().is_none();
            if let Some(expert) = experts.get(at).filter(cold) {
                self.bank.will_need(*expert);
            }
        };
        (0..AHEAD).for_each(read);
        let mut current = get(0)?;
        for at in 0..experts.len() {
            read(at + AHEAD);
            let (result, next) = rayon::join(|| current.as_ref().map(|expert| multiply(at, expert)), || get(at + 1));
            if let Some(result) = result {
                take(at, result);
            }
            current = next?;
        }
        Ok(())
    }

    /// Expert `expert`, ready.
    ///
    /// # Errors
    /// When its record cannot be read or holds a scale that is negative or not a number.
    pub fn get(&self, expert: usize) -> Result<Arc<E>, ArtifactError> {
        if let Some(ready) = self.ready[expert].get() {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(Arc::clone(ready));
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        let read;
        let record: &[u8] = match &self.records {
            Some(records) => &records[expert],
            None => {
                read = self.bank.record(expert)?;
                &read
            }
        };
        let unpacked = Arc::new((self.unpack)(&self.bank, expert, record)?);
        let bytes = unpacked.bytes();
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
}
