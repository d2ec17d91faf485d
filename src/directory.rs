//! The directory of a report: created before the expensive part, removed again when the run fails.

use std::path::PathBuf;

use perplexity_eval::output;

use crate::Failure;

/// A new or empty directory that waits for a report.
pub(crate) struct OutputDirectory {
    path: PathBuf,
    /// Whether this run made it.
    created: bool,
}

impl OutputDirectory {
    /// Creates `path`, or takes it when it is empty.
    ///
    /// # Errors
    /// When it cannot take the report.
    pub(crate) fn prepare(path: PathBuf) -> Result<Self, Failure> {
        let created = !path.exists();
        output::prepare(&path).map_err(Failure::failed)?;
        Ok(Self { path, created })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// The run succeeded.
    pub(crate) fn keep(mut self) -> PathBuf {
        self.created = false;
        std::mem::take(&mut self.path)
    }
}

impl Drop for OutputDirectory {
    fn drop(&mut self) {
        if self.created {
            // Fails when something is in it, and then it should stay.
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}
