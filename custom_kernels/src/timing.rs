//! Where the time goes: a switch and one accumulator per operation. Off, a call costs one relaxed load.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// What is timed; the CPU implementation reports these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Rounding on its own.
    Round,
    /// Embedding rows.
    EmbedTokens,
    /// Products with a weight, residual included.
    Project,
    /// Gate and up products with their activation.
    Swiglu,
    /// Router of a mixture of experts and its choice.
    RouteExperts,
    /// Routed experts, their sum included.
    ExpertFeedForward,
    /// Narrowing the inputs of a product.
    QuantizeRows,
    /// Both RMS norms.
    Norm,
    /// Rotary embedding.
    Rotary,
    /// Causal convolution and SiLU.
    Convolution,
    /// Decay and write strength of the delta rule.
    DeltaGates,
    /// The gated delta rule.
    DeltaRule,
    /// Writing rows into the KV cache.
    AppendRows,
    /// Causal attention.
    Attention,
    /// The attention's output gate.
    SigmoidGate,
    /// Output head and its reduction.
    ScoreHead,
}

/// Every operation, in declaration order.
pub const OPERATIONS: [Operation; 16] = [
    Operation::Round,
    Operation::EmbedTokens,
    Operation::Project,
    Operation::Swiglu,
    Operation::RouteExperts,
    Operation::ExpertFeedForward,
    Operation::QuantizeRows,
    Operation::Norm,
    Operation::Rotary,
    Operation::Convolution,
    Operation::DeltaGates,
    Operation::DeltaRule,
    Operation::AppendRows,
    Operation::Attention,
    Operation::SigmoidGate,
    Operation::ScoreHead,
];

static ENABLED: AtomicBool = AtomicBool::new(false);
static NANOSECONDS: [AtomicU64; OPERATIONS.len()] = [const { AtomicU64::new(0) }; OPERATIONS.len()];

/// Starts from zero, or stops.
pub fn enable(on: bool) {
    for counter in &NANOSECONDS {
        counter.store(0, Relaxed);
    }
    ENABLED.store(on, Relaxed);
}

/// Time spent in each operation since [`enable`], as seen by the calling threads.
pub fn spent() -> Vec<(Operation, Duration)> {
    OPERATIONS
        .iter()
        .map(|&op| (op, Duration::from_nanos(NANOSECONDS[op as usize].load(Relaxed))))
        .collect()
}

pub(crate) fn timed<R>(operation: Operation, run: impl FnOnce() -> R) -> R {
    if !ENABLED.load(Relaxed) {
        return run();
    }
    let start = Instant::now();
    let result = run();
    NANOSECONDS[operation as usize].fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
    result
}
