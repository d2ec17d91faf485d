//! How long each operation of the forward pass takes on a model's own shapes and weights, and what of the device's ability
//! that is.
//!
//! An operation is called through [`EvaluatorBackend`], alone, on random activations, with the stored weights of the first
//! layer of its kind. Its arithmetic is that of its formula and its traffic what it cannot avoid, every operand read and
//! every result written once; neither counts what an implementation does in addition. Both are compared with what the
//! device reaches on a copy and on a large matrix product, measured here too.

use std::time::{Duration, Instant};

use burn::tensor::{Distribution, Tensor};
use perplexity_kernels::{EvaluatorBackend, Precision};
use perplexity_kv::options::KvOptions;
use serde::Serialize;

use crate::route::Route;
use crate::scorer::ModelError;
use crate::source::TextSource;

mod operations;

/// A pass to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassShape {
    /// Windows that share the pass.
    pub batch: usize,
    /// Tokens of each window in the pass.
    pub tokens: usize,
    /// Tokens of each window before the pass.
    pub before: usize,
}

impl PassShape {
    /// Rows of every product.
    pub fn rows(&self) -> usize {
        self.batch * self.tokens
    }
}

/// What the device reaches at best.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ceilings {
    /// Bytes read and written per second by an elementwise operation on a large tensor.
    pub copy_bytes_per_second: f64,
    /// Floating-point operations per second of a square matrix product.
    pub product_flops_per_second: f64,
    /// Rows and columns of that product.
    pub product_size: usize,
}

/// One operation of the pass.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OperationTime {
    /// What it is.
    pub name: &'static str,
    /// How often a pass runs it.
    pub calls: usize,
    /// Median seconds of one call.
    pub seconds: f64,
    /// Floating-point operations of one call; 0 where traffic is all that counts.
    pub flops: f64,
    /// Bytes of the operands and results of one call.
    pub bytes: f64,
}

impl OperationTime {
    /// Seconds of a whole pass.
    pub fn seconds_per_pass(&self) -> f64 {
        self.calls as f64 * self.seconds
    }

    /// Floating-point operations per second.
    pub fn flops_per_second(&self) -> f64 {
        self.flops / self.seconds
    }

    /// Bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes / self.seconds
    }
}

/// Operations of a pass and the device's ceilings.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Operations {
    /// The device's best.
    pub ceilings: Ceilings,
    /// In the order of the forward pass.
    pub operations: Vec<OperationTime>,
}

/// Measures every operation of one pass of the model `source` on `device`, with a cache in the formats of `kv` where the
/// device keeps it packed, else of rows as they are.
///
/// # Errors
/// When a weight cannot be loaded.
pub(crate) fn measure<B: EvaluatorBackend>(
    source: &dyn TextSource,
    route: Route,
    shape: PassShape,
    kv: Option<&KvOptions>,
    device: &B::Device,
) -> Result<Operations, ModelError> {
    let ceilings = ceilings::<B>(device);
    let operations = operations::measure::<B>(source, route, shape, kv, device)?;
    Ok(Operations { ceilings, operations })
}

/// Samples of one median.
const SAMPLES: usize = 5;
/// Calls are repeated until a sample is at least this long, so that neither the clock nor the wait for the device counts.
const SAMPLE: Duration = Duration::from_millis(20);
/// Most calls of a sample.
const MOST_CALLS: usize = 1 << 10;

/// Median seconds of one call of `run`.
fn median<B: EvaluatorBackend>(device: &B::Device, mut run: impl FnMut()) -> f64 {
    let mut sample = |calls: usize| {
        let start = Instant::now();
        for _ in 0..calls {
            run();
        }
        // A device that fails here failed in `run`, whose results nobody reads.
        B::sync(device).expect("the device answers");
        start.elapsed()
    };
    // The first call compiles kernels, the second tells how long one takes.
    sample(1);
    let once = sample(1).max(Duration::from_nanos(1));
    let calls = (SAMPLE.as_nanos().div_ceil(once.as_nanos()) as usize).clamp(1, MOST_CALLS);
    let mut seconds: Vec<f64> = (0..SAMPLES)
        .map(|_| sample(calls).as_secs_f64() / calls as f64)
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[SAMPLES / 2]
}

/// Elements of the copied tensor: 256 MiB of float32, beyond every cache.
const COPIED: usize = 1 << 26;
/// Sizes of the square product; the largest one that a sample has time for is used.
const PRODUCT: [usize; 4] = [1024, 2048, 4096, 8192];
/// A product of this many seconds is large enough.
const LONG_PRODUCT: f64 = 0.01;

fn ceilings<B: EvaluatorBackend>(device: &B::Device) -> Ceilings {
    let x = Tensor::<B, 2>::ones([COPIED >> 12, 1 << 12], device);
    let bytes = 2 * size(&x);
    let seconds = median::<B>(device, || drop(x.clone().mul_scalar(2.0)));
    let mut ceilings = Ceilings {
        copy_bytes_per_second: bytes as f64 / seconds,
        product_flops_per_second: 0.0,
        product_size: 0,
    };
    drop(x);
    for n in PRODUCT {
        // Multiples of 1/64 are bfloat16.
        let values = (0..n * n).map(|at| ((at * 2_654_435_761) % 127) as f32 / 64.0 - 1.0);
        let weight = B::weight(values.collect(), [n, n], Precision::Bf16, device);
        let x = random::<B, 3>([1, n, n], Precision::Bf16, device);
        let seconds = median::<B>(device, || drop(B::project(x.clone(), &weight, Precision::Bf16)));
        let flops = 2.0 * (n as f64).powi(3) / seconds;
        if flops > ceilings.product_flops_per_second {
            ceilings.product_flops_per_second = flops;
            ceilings.product_size = n;
        }
        if seconds > LONG_PRODUCT {
            break;
        }
    }
    ceilings
}

/// Standard normal values in the type that results of precision `to` have on the device.
fn random<B: EvaluatorBackend, const D: usize>(shape: [usize; D], to: Precision, device: &B::Device) -> Tensor<B, D> {
    B::round(Tensor::random(shape, Distribution::Normal(0.0, 1.0), device), to)
}

/// Bytes of a tensor.
fn size<B: EvaluatorBackend, const D: usize>(tensor: &Tensor<B, D>) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
}
