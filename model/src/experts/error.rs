//! What can be wrong with packed experts.

use std::path::PathBuf;

use crate::artifact::ArtifactError;

/// Packed experts that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ExpertError {
    /// The artifact, or its copy, cannot be read or holds what its formats do not allow.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// A bank in pieces.
    #[error("{parameter} is {found}: a bank of experts is one whole object")]
    NotWhole {
        /// The parameter.
        parameter: String,
        /// What it is bound to.
        found: String,
    },
    /// A second copy that cannot be opened.
    #[error("the second copy of the experts: {0}")]
    Copy(ArtifactError),
    /// A second copy that is another artifact.
    #[error("{}: {what} is {found}: a second copy of the experts has the artifact's, {expected}", path.display())]
    Other {
        /// The copy.
        path: PathBuf,
        /// What differs.
        what: String,
        /// The copy's.
        found: String,
        /// The artifact's.
        expected: String,
    },
}
