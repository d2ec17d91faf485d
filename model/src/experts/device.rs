//! Packed experts on a device that multiplies them as they are stored.
//!
//! | residency | on the device | the others |
//! |---|---|---|
//! | device | all records | |
//! | host | as many as the cache holds | records in memory |
//! | disk | as many as the cache holds | records in the artifact's files |
//!
//! The cache holds the first experts, because a pass takes a block's experts in ascending order. The others go there a few
//! at a time. Where an expert comes from changes no result.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::{Int, Tensor};
use perplexity_kernels::EvaluatorBackend;
use perplexity_kernels::backend::PackedExperts;
use rayon::prelude::*;

use super::{CacheStatistics, ExpertBank, Residency};
use crate::artifact::ArtifactError;

/// Bytes of records that go to the device at a time.
const BATCH_BYTES: usize = 256 << 20;

/// The experts of one bank.
pub struct DeviceExperts<B: EvaluatorBackend> {
    bank: ExpertBank,
    four_bit: bool,
    /// Records of experts `0..resident`.
    kept: Option<Tensor<B, 1, Int>>,
    resident: usize,
    /// Records of the others, with residency `host`.
    records: Option<Vec<Box<[u8]>>>,
    hits: AtomicU64,
    misses: AtomicU64,
    device: B::Device,
}

impl<B: EvaluatorBackend> std::fmt::Debug for DeviceExperts<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceExperts")
            .field("bank", &self.bank)
            .field("resident", &self.resident)
            .finish_non_exhaustive()
    }
}

impl<B: EvaluatorBackend> DeviceExperts<B> {
    /// Whether `device` multiplies the experts of `bank`: 4-bit activations have one scale for gate and up there.
    pub fn fit(bank: &ExpertBank, four_bit: bool, device: &B::Device) -> bool {
        let alike = |expert: usize| bank.input_scales(expert).is_some_and(|scales| scales[0] == scales[1]);
        B::multiplies_packed_experts(device) && (!four_bit || (0..bank.geometry().experts).all(alike))
    }

    /// The experts of `bank`; with residency `host` or `disk` at most `cache_bytes` of records stay on the device.
    ///
    /// # Errors
    /// When a record that is needed now cannot be read, or holds a scale that is negative or not a number.
    pub fn new(
        bank: ExpertBank,
        four_bit: bool,
        residency: Residency,
        cache_bytes: u64,
        device: &B::Device,
    ) -> Result<Self, ArtifactError> {
        let geometry = *bank.geometry();
        let resident = match residency {
            Residency::Device => geometry.experts,
            _ => geometry.experts.min((cache_bytes / geometry.stride as u64) as usize),
        };
        let checked = |expert: usize| bank.checked_record(expert);
        let first: Vec<Cow<'_, [u8]>> = (0..resident).into_par_iter().map(checked).collect::<Result<_, _>>()?;
        let kept = upload::<B>(first.iter().map(|record| &**record), geometry.stride, device);
        drop(first);
        let records = match residency {
            Residency::Host => Some(
                (resident..geometry.experts)
                    .into_par_iter()
                    .map(|expert| checked(expert).map(|record| record.into_owned().into_boxed_slice()))
                    .collect::<Result<_, _>>()?,
            ),
            _ => None,
        };
        Ok(Self {
            bank,
            four_bit,
            kept: Some(kept).filter(|_| resident > 0),
            resident,
            records,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            device: device.clone(),
        })
    }

    /// Outputs `[rows, top_k, hidden]` of the rows of `x` `[rows, hidden]`, bfloat16, whose choices are `ids`
    /// `[rows, top_k]`.
    ///
    /// # Errors
    /// When a record cannot be read, or holds a scale that is negative or not a number.
    ///
    /// # Panics
    /// When `x` is not stored in bfloat16.
    pub fn outputs(&self, x: &Tensor<B, 2>, ids: &[u32], top_k: usize) -> Result<Tensor<B, 3>, ArtifactError> {
        let geometry = *self.bank.geometry();
        let mut counts = vec![0; geometry.experts];
        ids.iter().for_each(|id| counts[*id as usize] += 1);
        let mut next: Vec<usize> = counts
            .iter()
            .scan(0, |sum, count| Some(std::mem::replace(sum, *sum + count)))
            .collect();
        let mut choices = vec![0; ids.len()];
        for (place, id) in (0..).zip(ids) {
            let next = &mut next[*id as usize];
            choices[*next] = place;
            *next += 1;
        }
        let (used, all) = (|expert: &usize| counts[*expert] > 0, 0..geometry.experts);
        let hits = (0..self.resident).filter(used).count();
        let cold: Vec<usize> = (self.resident..geometry.experts).filter(used).collect();
        self.hits.fetch_add(hits as u64, Ordering::Relaxed);
        self.misses.fetch_add(cold.len() as u64, Ordering::Relaxed);

        let span = |experts: Range<usize>| {
            let before = |end: usize| counts[..end].iter().sum::<usize>();
            before(experts.start)..before(experts.end)
        };
        let multiply = |records: &Tensor<B, 1, Int>, experts: &[usize], outputs: Option<Tensor<B, 3>>| {
            let (first, last) = (experts[0], experts[experts.len() - 1]);
            let scales = |expert: &usize| self.bank.input_scales(*expert).unwrap_or_default();
            let scales: Option<Vec<_>> = self.four_bit.then(|| experts.iter().map(scales).collect());
            let factors = |(at, expert): (usize, &usize)| {
                let m = self.bank.multipliers(*expert);
                match &scales {
                    Some(scales) => std::array::from_fn(|i| m[i] * scales[at][i]),
                    None => m,
                }
            };
            let factors: Vec<[f32; 3]> = experts.iter().enumerate().map(factors).collect();
            let counts: Vec<usize> = experts.iter().map(|expert| counts[*expert]).collect();
            let experts = PackedExperts {
                records,
                stride: geometry.stride,
                inner: geometry.inner,
                factors: &factors,
                scales: scales.as_deref(),
                counts: &counts,
                choices: &choices[span(first..last + 1)],
                top_k,
            };
            let written = B::packed_experts(x, &experts, outputs);
            Some(written.expect("the device was asked, and the rows are bfloat16"))
        };

        let mut outputs = None;
        if let Some(kept) = &self.kept {
            let experts: Vec<usize> = all.take(self.resident).collect();
            outputs = multiply(kept, &experts, outputs);
        }
        for experts in cold.chunks((BATCH_BYTES / geometry.stride).max(1)) {
            let record = |expert: &usize| match &self.records {
                Some(records) => Ok(Cow::Borrowed(&*records[expert - self.resident])),
                None => self.bank.checked_record(*expert),
            };
            let read: Vec<Cow<'_, [u8]>> = experts.par_iter().map(record).collect::<Result<_, ArtifactError>>()?;
            let records = upload::<B>(read.iter().map(|record| &**record), geometry.stride, &self.device);
            outputs = multiply(&records, experts, outputs);
        }
        Ok(outputs.expect("every row has chosen experts"))
    }

    /// Hits and misses so far.
    pub fn statistics(&self) -> CacheStatistics {
        CacheStatistics {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
        }
    }
}

/// Records one after the other on the device.
fn upload<'a, B: EvaluatorBackend>(
    records: impl ExactSizeIterator<Item = &'a [u8]>,
    stride: usize,
    device: &B::Device,
) -> Tensor<B, 1, Int> {
    let bytes = records.len() * stride;
    let mut pieces = records.enumerate().map(|(at, record)| (at * stride, record));
    B::records(bytes, &mut pieces, device).expect("the device was asked")
}
