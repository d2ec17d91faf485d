//! `Flex`, the fast CPU backend.

use std::collections::BTreeMap;

use burn_flex::{Flex, FlexDevice};
use perplexity_kv::options::KvOptions;

use crate::bench::{self, Operations, PassShape};
use crate::calibrate;
use crate::route::Route;
use crate::scorer::{ModelError, Scorer, ScorerOptions, WindowScorer};
use crate::source::TextSource;

/// Divisors of 4-bit activations by input; see [`calibrate::activation_divisors`].
///
/// # Errors
/// See [`ModelError`].
pub fn activation_divisors(
    source: &dyn TextSource,
    windows: &[&[u32]],
    progress: &mut dyn FnMut(usize),
) -> Result<BTreeMap<String, f32>, ModelError> {
    calibrate::activation_divisors::<Flex>(source, windows, &FlexDevice, progress)
}

/// Loads the model of `source`.
///
/// # Errors
/// See [`ModelError`].
pub fn load(source: &dyn TextSource, options: &ScorerOptions) -> Result<Box<dyn Scorer>, ModelError> {
    Ok(Box::new(WindowScorer::<Flex>::load(source, options, &FlexDevice)?))
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
    bench::measure::<Flex>(source, route, shape, kv, &FlexDevice)
}
