//! `NdArray`, the reference CPU backend.

use burn_ndarray::{NdArray, NdArrayDevice};
use perplexity_kv::options::KvOptions;

use crate::bench::{self, Operations, PassShape};
use crate::route::Route;
use crate::scorer::{ModelError, Scorer, ScorerOptions, WindowScorer};
use crate::source::TextSource;

/// Loads the model of `source`.
///
/// # Errors
/// See [`ModelError`].
pub fn load(source: &dyn TextSource, options: &ScorerOptions) -> Result<Box<dyn Scorer>, ModelError> {
    Ok(Box::new(WindowScorer::<NdArray<f32>>::load(
        source,
        options,
        &NdArrayDevice::Cpu,
    )?))
}

/// Measures the operations of a pass of `source`; see [`mod@bench`].
///
/// # Errors
/// See [`ModelError`].
pub fn measure(
    source: &dyn TextSource,
    route: Route,
    shape: PassShape,
    kv: Option<&KvOptions>,
) -> Result<Operations, ModelError> {
    bench::measure::<NdArray<f32>>(source, route, shape, kv, &NdArrayDevice::Cpu)
}
