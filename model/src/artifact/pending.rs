//! A file of an artifact while it is written: under the temporary name `NAME.tmp`, which one run at a time can have.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::ArtifactError;

/// A file that gets its name from [`publish`]. Dropped before, it is removed.
#[derive(Debug)]
pub(crate) struct PendingFile {
    file: File,
    target: PathBuf,
    temporary: PathBuf,
    /// Whether it has its final name.
    named: bool,
    /// Whether it stays when it is dropped.
    kept: bool,
}

impl PendingFile {
    /// Opens `target` + `.tmp`, empty. What a killed run left there is taken over.
    ///
    /// # Errors
    /// When `target` exists, another run is writing it, or the file cannot be created.
    pub(crate) fn create(target: &Path) -> Result<Self, ArtifactError> {
        let target = target.to_owned();
        if target.exists() {
            return Err(ArtifactError::Exists { path: target });
        }
        let mut name = target.file_name().unwrap_or_default().to_owned();
        // Always the same, so that a rerun takes over what a killed one left.
        name.push(".tmp");
        let temporary = target.with_file_name(name);
        let io = |source| ArtifactError::Io {
            path: temporary.clone(),
            source,
        };
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&temporary)
            .map_err(io)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(ArtifactError::Busy { path: target }),
            // Some network file systems have no locks.
            Err(TryLockError::Error(error)) if error.kind() != io::ErrorKind::Unsupported => return Err(io(error)),
            _ => {}
        }
        // The run that held the lock may just have given this very file its name.
        if target.exists() {
            return Err(ArtifactError::Exists { path: target });
        }
        file.set_len(0).map_err(io)?;
        Ok(Self {
            file,
            target,
            temporary,
            named: false,
            kept: false,
        })
    }

    /// Gives the file its final length; what is not written is zero.
    pub(crate) fn set_len(&self, bytes: u64) -> Result<(), ArtifactError> {
        self.file.set_len(bytes).map_err(|source| self.io(source))
    }

    /// Waits until the disk has it.
    pub(crate) fn sync(&self) -> Result<(), ArtifactError> {
        self.file.sync_all().map_err(|source| self.io(source))
    }

    /// What went wrong with the file.
    pub(crate) fn io(&self, source: io::Error) -> ArtifactError {
        ArtifactError::Io {
            path: self.temporary.clone(),
            source,
        }
    }
}

impl Write for PendingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for PendingFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        if !self.kept {
            // Nothing can be done about a failure here; a temporary name is one that no reader looks for.
            let _ = fs::remove_file(if self.named { &self.target } else { &self.temporary });
        }
    }
}

/// Gives complete files their names, the first file last, and returns the names. On the disk already, they need nothing but
/// renaming: a run killed meanwhile leaves whole files only.
///
/// # Errors
/// When a name is taken by now or renaming fails; none of the files is left then.
pub(crate) fn publish(mut files: Vec<PendingFile>) -> Result<Vec<PathBuf>, ArtifactError> {
    for file in files.iter_mut().rev() {
        if file.target.exists() {
            let path = file.target.clone();
            return Err(ArtifactError::Exists { path });
        }
        fs::rename(&file.temporary, &file.target).map_err(|source| file.io(source))?;
        file.named = true;
    }
    files.iter_mut().for_each(|file| file.kept = true);
    Ok(files.iter().map(|file| file.target.clone()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_get_their_names_together_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let names = || {
            let entries = fs::read_dir(folder.path()).unwrap();
            let mut names: Vec<_> = entries
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        let written = |name: &str| {
            let mut file = PendingFile::create(&at(name)).unwrap();
            file.write_all(name.as_bytes()).unwrap();
            file
        };
        // Longer than what is written over it.
        fs::write(at("b.tmp"), "left by a run that was killed").unwrap();
        let files = vec![written("a"), written("b")];
        assert_eq!(names(), ["a.tmp", "b.tmp"]);
        assert!(matches!(PendingFile::create(&at("b")), Err(ArtifactError::Busy { .. })));
        assert_eq!(names(), ["a.tmp", "b.tmp"], "a refused run removes nothing");
        assert_eq!(publish(files).unwrap(), [at("a"), at("b")]);
        assert_eq!(names(), ["a", "b"]);
        assert_eq!(fs::read(at("b")).unwrap(), b"b");
        assert!(matches!(
            PendingFile::create(&at("b")),
            Err(ArtifactError::Exists { .. })
        ));

        drop(written("c"));
        let files = vec![written("c"), written("d")];
        fs::write(at("c"), "another's").unwrap();
        assert!(matches!(publish(files), Err(ArtifactError::Exists { .. })));
        assert_eq!(names(), ["a", "b", "c"]);
        assert_eq!(fs::read(at("c")).unwrap(), b"another's");
    }
}
