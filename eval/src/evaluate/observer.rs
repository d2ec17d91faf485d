//! Who watches an evaluation, and what there is to see.

use super::StreamResult;
use crate::aggregate::Aggregate;
use crate::corpus::CorpusPlan;

/// What will be scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Totals {
    /// Streams.
    pub streams: usize,
    /// Scored tokens.
    pub tokens: u64,
    /// Windows.
    pub windows: u64,
}

/// State after a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Snapshot {
    /// What will be scored.
    pub totals: Totals,
    /// Windows scored so far.
    pub windows: u64,
    /// Everything scored so far.
    pub running: Aggregate,
    /// Standard error of its mean, clustered by window.
    pub standard_error: Option<f64>,
    /// Mean divergence of the current stream so far, when comparing.
    pub stream_kl: Option<f64>,
    /// Seconds since scoring began.
    pub elapsed: f64,
}

/// Hears how an evaluation proceeds; every method may be left out.
pub trait Progress {
    /// Scoring begins.
    fn started(&mut self, _totals: Totals) {}
    /// The first window of a stream is about to be scored.
    fn stream_started(&mut self, _plan: &CorpusPlan, _stream: usize) {}
    /// A batch was scored.
    fn batch_scored(&mut self, _snapshot: &Snapshot) {}
    /// The last window of a stream was scored.
    fn stream_finished(&mut self, _plan: &CorpusPlan, _stream: usize, _result: &StreamResult) {}
}

/// Hears nothing.
impl Progress for () {}
