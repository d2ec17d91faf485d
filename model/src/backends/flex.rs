//! `Flex`, the fast CPU backend.

use burn_flex::{Flex, FlexDevice};

use crate::scorer::{ModelError, Scorer, ScorerOptions, WindowScorer};
use crate::source::TextSource;

/// Loads the model of `source`.
///
/// # Errors
/// See [`ModelError`].
pub fn load(source: &dyn TextSource, options: &ScorerOptions) -> Result<Box<dyn Scorer>, ModelError> {
    Ok(Box::new(WindowScorer::<Flex>::load(source, options, &FlexDevice)?))
}
