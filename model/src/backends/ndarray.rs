//! `NdArray`, the reference CPU backend.

use burn_ndarray::{NdArray, NdArrayDevice};

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
