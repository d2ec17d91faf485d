//! Paths and files: absolute lexically normal paths, and writing through a temporary name.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Component, Path, PathBuf};

/// `path` made absolute, without `.` and with `..` resolved lexically.
pub fn absolute(path: &Path) -> io::Result<PathBuf> {
    let mut normal = PathBuf::new();
    for component in std::path::absolute(path)?.components() {
        match component {
            Component::CurDir => {}
            // The parent of the root is the root.
            Component::ParentDir => drop(normal.pop()),
            other => normal.push(other),
        }
    }
    Ok(normal)
}

/// `path` with `suffix` appended to its name.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path.as_os_str());
    name.push(suffix);
    PathBuf::from(name)
}

/// A buffered file under a temporary name, which appears under its own name only when [`commit`](Self::commit)ted and
/// is removed when dropped before.
#[derive(Debug)]
pub struct PendingFile {
    writer: Option<BufWriter<File>>,
    temporary: PathBuf,
    path: PathBuf,
}

impl PendingFile {
    /// Opens `path` + `suffix` for writing, emptying it if it exists.
    ///
    /// # Errors
    /// When the file cannot be created, for instance because the directory does not exist.
    pub fn create(path: &Path, suffix: &str) -> io::Result<Self> {
        if path.is_dir() {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "is a directory"));
        }
        let temporary = with_suffix(path, suffix);
        let writer = Some(BufWriter::new(File::create(&temporary)?));
        Ok(Self {
            writer,
            temporary,
            path: path.to_owned(),
        })
    }

    /// Flushes, waits for the disk and renames.
    ///
    /// # Errors
    /// When any of the three fails; the temporary file is then removed.
    pub fn commit(mut self) -> io::Result<()> {
        if let Some(writer) = self.writer.take() {
            let stored = writer
                .into_inner()
                .map_err(io::IntoInnerError::into_error)
                .and_then(|file| file.sync_all())
                .and_then(|()| std::fs::rename(&self.temporary, &self.path));
            if stored.is_err() {
                // The first failure is the one to report.
                let _ = std::fs::remove_file(&self.temporary);
            }
            stored?;
        }
        Ok(())
    }
}

impl Write for PendingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.writer {
            Some(writer) => writer.write(bytes),
            None => Err(io::Error::other("the file is closed")),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.as_mut().map_or(Ok(()), Write::flush)
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        if let Some(writer) = self.writer.take() {
            drop(writer.into_parts());
            // Nothing can be done about a file that cannot be removed.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_become_absolute_and_lexically_normal() {
        assert_eq!(absolute(Path::new("/a/./b/../c")).unwrap(), Path::new("/a/c"));
        assert_eq!(absolute(Path::new("/../a")).unwrap(), Path::new("/a"));
        assert!(absolute(Path::new("a")).unwrap().is_absolute());
    }

    #[test]
    fn nothing_appears_before_commit_and_nothing_remains_without_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let names = || std::fs::read_dir(dir.path()).unwrap().count();
        let mut file = PendingFile::create(&path, ".partial").unwrap();
        file.write_all(b"abc").unwrap();
        assert!(!path.exists() && dir.path().join("out.partial").exists());
        drop(file);
        assert_eq!(names(), 0);
        let mut file = PendingFile::create(&path, ".partial").unwrap();
        file.write_all(b"abc").unwrap();
        file.commit().unwrap();
        assert_eq!((names(), std::fs::read(&path).unwrap()), (1, b"abc".to_vec()));
        assert!(PendingFile::create(dir.path(), ".partial").is_err());
    }
}
