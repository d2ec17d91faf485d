//! Paths and files: absolute lexically normal paths, reading regular files only, writing through a temporary name, and which
//! files of a run may not meet.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Component, Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::text::hex;

/// What the name of a recorded file ends in until it is complete.
pub const PARTIAL: &str = ".partial";
/// What the name of any other file ends in until it is complete.
pub const TEMPORARY: &str = ".tmp";

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

/// Opens a regular file. Anything else is refused before it is opened: a pipe would wait for a writer, a device need not end.
///
/// # Errors
/// When there is no such file, it cannot be opened, or it is a directory, a pipe or a device.
pub fn open_regular(path: &Path) -> io::Result<File> {
    match irregular(&fs::metadata(path)?) {
        None => File::open(path),
        Some(kind) => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("it is {kind}, not a regular file"),
        )),
    }
}

/// The bytes of a regular file.
///
/// # Errors
/// See [`open_regular`].
pub fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// SHA-256 of a file's length (64 bits, little-endian), its first and its last MiB: tells files apart that are too long to be
/// read for that alone.
///
/// # Errors
/// When it cannot be read.
pub fn sketch_sha256(path: &Path) -> io::Result<String> {
    const END: u64 = 1 << 20;
    let mut file = open_regular(path)?;
    let length = file.metadata()?.len();
    let mut hash = Sha256::new();
    hash.update(length.to_le_bytes());
    for begin in [0, length.saturating_sub(END)] {
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(begin))?;
        (&file).take(END).read_to_end(&mut bytes)?;
        hash.update(&bytes);
    }
    Ok(hex(&hash.finalize()))
}

/// What a file is when it is no regular one.
pub fn irregular(found: &Metadata) -> Option<&'static str> {
    #[cfg(unix)]
    use std::os::unix::fs::FileTypeExt;
    let kind = found.file_type();
    match () {
        () if kind.is_file() => None,
        () if kind.is_dir() => Some("a directory"),
        #[cfg(unix)]
        () if kind.is_fifo() => Some("a pipe"),
        #[cfg(unix)]
        () if kind.is_socket() => Some("a socket"),
        () => Some("a device"),
    }
}

/// A file that cannot be written as asked.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FilesError {
    /// It is an input or another output of the same run.
    #[error("{role} {path:?} is also {other}; a run replaces no file it needs, name another")]
    Meets {
        /// What is to be written.
        role: &'static str,
        /// Where to.
        path: PathBuf,
        /// What is there.
        other: &'static str,
    },
    /// A name that it has until it is complete is an input or another output of the same run.
    #[error(
        "{role} {path:?} reserves the name {temporary:?} until it is complete, and that is {other}; a run replaces no file it \
         needs, name another"
    )]
    Reserves {
        /// What is to be written.
        role: &'static str,
        /// Where to.
        path: PathBuf,
        /// Its name until then.
        temporary: PathBuf,
        /// What is there.
        other: &'static str,
    },
    /// It lies in a directory that is read.
    #[error("{role} {path:?} lies in the checkpoint {checkpoint:?}, which a run leaves as it is; name another folder")]
    InCheckpoint {
        /// What is to be written.
        role: &'static str,
        /// Where to.
        path: PathBuf,
        /// The directory.
        checkpoint: PathBuf,
    },
    /// It would be where the report's directory is, or in it.
    #[error("{role} {path:?} and the output directory {directory:?} are in each other's way; name a file beside it")]
    MeetsDirectory {
        /// What is to be written.
        role: &'static str,
        /// Where to.
        path: PathBuf,
        /// The directory, which holds the report alone.
        directory: PathBuf,
    },
    /// It exists and is never overwritten.
    #[error("{role} {path:?} exists already; remove it or name another file")]
    Exists {
        /// What is to be written.
        role: &'static str,
        /// Where to.
        path: PathBuf,
    },
    /// It, or the name that it has until it is complete, exists and cannot be replaced.
    #[error("{role} {path:?} is {kind}; name a file")]
    NotRegular {
        /// What is to be written.
        role: &'static str,
        /// Where to.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// Its folder does not exist.
    #[error("folder of {role} {folder:?} does not exist")]
    NoFolder {
        /// What is to be written.
        role: &'static str,
        /// The folder.
        folder: PathBuf,
    },
}

/// A file with the option, or the role, it was named by.
pub type Named<'a> = (&'static str, &'a Path);

/// Checks that the `outputs` are regular or new files, apart from `inputs`, from each other, and not in a checkpoint: what a
/// run writes may replace an older file of its own kind, never an input, a device, or another result of the same run. That
/// holds for the names with [`PARTIAL`] and [`TEMPORARY`] as well, both of them whatever kind of file the output is.
///
/// # Errors
/// The first output that cannot be written as asked.
pub fn check_apart(inputs: &[Named<'_>], outputs: &[Named<'_>]) -> Result<(), FilesError> {
    for (index, &(role, path)) in outputs.iter().enumerate() {
        for path in [
            path.to_owned(),
            with_suffix(path, PARTIAL),
            with_suffix(path, TEMPORARY),
        ] {
            if let Some(kind) = path.metadata().ok().as_ref().and_then(irregular) {
                return Err(FilesError::NotRegular { role, path, kind });
            }
        }
        let place = place(path);
        for &(other, other_path) in inputs.iter().chain(&outputs[..index]) {
            if self::place(other_path) == place {
                let path = path.to_owned();
                return Err(FilesError::Meets { role, path, other });
            }
            check_reserved((role, path), (other, other_path))?;
        }
        for &other in &outputs[..index] {
            check_reserved(other, (role, path))?;
        }
        let checkpoint = inputs
            .iter()
            .find(|(_, input)| input.is_dir() && place.starts_with(self::place(input)));
        if let Some((_, checkpoint)) = checkpoint {
            return Err(FilesError::InCheckpoint {
                role,
                path: path.to_owned(),
                checkpoint: checkpoint.to_path_buf(),
            });
        }
    }
    Ok(())
}

/// Checks that `other` is not what the output is called before it is complete.
fn check_reserved((role, path): Named<'_>, (other, other_path): Named<'_>) -> Result<(), FilesError> {
    let reserved = [PARTIAL, TEMPORARY].map(|suffix| with_suffix(path, suffix));
    let place_of_other = place(other_path);
    match reserved.into_iter().find(|name| place(name) == place_of_other) {
        None => Ok(()),
        Some(temporary) => Err(FilesError::Reserves {
            role,
            path: path.to_owned(),
            temporary,
            other,
        }),
    }
}

/// Checks that the `outputs` are neither the directory of the report nor above or in it: it holds the report alone, and no
/// directory can take the place of a file.
///
/// # Errors
/// The first output that is.
pub fn check_directory(directory: &Path, outputs: &[Named<'_>]) -> Result<(), FilesError> {
    let of_report = place(directory);
    for &(role, path) in outputs {
        let place = place(path);
        if of_report.starts_with(&place) || place.starts_with(&of_report) {
            let (path, directory) = (path.to_owned(), directory.to_owned());
            return Err(FilesError::MeetsDirectory { role, path, directory });
        }
    }
    Ok(())
}

/// Checks that the folders of `outputs` exist.
///
/// # Errors
/// The first output whose folder does not.
pub fn check_folders(outputs: &[Named<'_>]) -> Result<(), FilesError> {
    for &(role, path) in outputs {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
            let folder = folder.to_owned();
            return Err(FilesError::NoFolder { role, folder });
        }
    }
    Ok(())
}

/// Where a path leads, whether or not there is something yet: what exists of it resolved by the system, the rest lexically.
fn place(path: &Path) -> PathBuf {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let known = |above: &Path| Some((above.canonicalize().ok()?, whole.strip_prefix(above).ok()?.to_owned()));
    let Some((known, rest)) = whole.ancestors().find_map(known) else {
        return whole;
    };
    absolute(&known.join(rest)).unwrap_or(whole)
}

/// Whether two paths lead to one file, by a link of either kind too.
pub fn same_file(a: &Path, b: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let identity = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
        matches!((identity(a), identity(b)), (Ok(a), Ok(b)) if a == b)
    }
    #[cfg(not(unix))]
    {
        matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
    }
}

/// Opens `path` for this process alone, emptied. What an interrupted run left there is taken over; a file that a living one
/// writes is refused.
fn claim(path: &Path) -> io::Result<File> {
    loop {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
        lock(&file)?;
        // Opened and locked are two steps: in between the other run may have given its file the final name.
        if is_at(&file, path)? {
            file.set_len(0)?;
            return Ok(file);
        }
    }
}

/// Keeps other runs off an open file until it is closed.
///
/// # Errors
/// `ResourceBusy` when another run has it.
pub(crate) fn lock(file: &File) -> io::Result<()> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(io::Error::new(io::ErrorKind::ResourceBusy, "another run is writing it")),
        // Some network file systems have no locks.
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Whether `path` still names the open file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let found = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        found => found?,
    };
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let open = file.metadata()?;
        Ok((open.dev(), open.ino()) == (found.dev(), found.ino()))
    }
    #[cfg(not(unix))]
    {
        let _ = (file, found);
        Ok(true)
    }
}

/// A buffered file under a temporary name, which appears under its own name only when [`commit`](Self::commit)ted and
/// is removed when dropped before. While it exists no other run can write the same file; what a killed run left behind under
/// the temporary name is taken over by the next one.
#[derive(Debug)]
pub struct PendingFile {
    writer: Option<BufWriter<File>>,
    temporary: PathBuf,
    path: PathBuf,
}

impl PendingFile {
    /// Opens `path` + `suffix` for writing, which is [`PARTIAL`] or [`TEMPORARY`].
    ///
    /// # Errors
    /// When the file cannot be created, for instance because the directory does not exist, or another run is writing it.
    pub fn create(path: &Path, suffix: &str) -> io::Result<Self> {
        if path.is_dir() {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "is a directory"));
        }
        let temporary = with_suffix(path, suffix);
        let writer = Some(BufWriter::new(claim(&temporary)?));
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
        let Some(writer) = self.writer.take() else {
            return Ok(());
        };
        let stored = writer
            .into_inner()
            .map_err(io::IntoInnerError::into_error)
            // The lock is held until the file has its name.
            .and_then(|file| file.sync_all().and_then(|()| fs::rename(&self.temporary, &self.path)));
        if stored.is_err() {
            // The first failure is the one to report.
            let _ = fs::remove_file(&self.temporary);
        }
        stored
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
            // Nothing can be done about a file that cannot be removed; the lock is held until it is.
            let _ = fs::remove_file(&self.temporary);
            drop(writer.into_parts());
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
        let mut file = PendingFile::create(&path, PARTIAL).unwrap();
        file.write_all(b"abc").unwrap();
        assert!(!path.exists() && dir.path().join("out.partial").exists());
        drop(file);
        assert_eq!(names(), 0);
        let mut file = PendingFile::create(&path, PARTIAL).unwrap();
        file.write_all(b"abc").unwrap();
        file.commit().unwrap();
        assert_eq!((names(), std::fs::read(&path).unwrap()), (1, b"abc".to_vec()));
        assert!(PendingFile::create(dir.path(), PARTIAL).is_err());
    }

    #[test]
    fn two_runs_never_write_one_file_and_a_stale_one_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        fs::write(dir.path().join("out.partial"), "left by a run that was killed").unwrap();
        let mut first = PendingFile::create(&path, PARTIAL).unwrap();
        let refused = PendingFile::create(&path, PARTIAL).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ResourceBusy);
        first.write_all(b"first").unwrap();
        first.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"first");
        drop(PendingFile::create(&path, PARTIAL).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"first");
    }

    #[test]
    fn outputs_replace_no_input_and_no_other_output() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("text.txt"), "text").unwrap();
        fs::write(at("old.bin"), "old").unwrap();
        fs::create_dir(at("checkpoint")).unwrap();
        let (text, checkpoint) = (at("text.txt"), at("checkpoint"));
        let inputs = [("the artifact", checkpoint.as_path()), ("the text", text.as_path())];

        let around = at("checkpoint").join("..").join("text.txt");
        assert!(matches!(
            check_apart(&inputs, &[("--save-tokens", &around)]),
            Err(FilesError::Meets { other: "the text", .. })
        ));
        assert!(matches!(
            check_apart(&inputs, &[("--save-tokens", &at("new")), ("--resume", &at("new"))]),
            Err(FilesError::Meets {
                role: "--resume",
                other: "--save-tokens",
                ..
            })
        ));
        assert!(matches!(
            check_apart(&inputs, &[("--save-tokens", &at("checkpoint").join("config.json"))]),
            Err(FilesError::InCheckpoint { .. })
        ));
        assert!(matches!(
            check_apart(&inputs, &[("--save-tokens", &at("checkpoint"))]),
            Err(FilesError::NotRegular {
                kind: "a directory",
                ..
            })
        ));
        let good = [at("old.bin"), at("new")];
        let good = [("--save-tokens", good[0].as_path()), ("--resume", good[1].as_path())];
        assert_eq!((check_apart(&inputs, &good), check_folders(&good)), (Ok(()), Ok(())));
        assert!(matches!(
            check_folders(&[("--resume", &at("nowhere").join("state"))]),
            Err(FilesError::NoFolder { role: "--resume", .. })
        ));
    }

    #[test]
    fn the_names_that_outputs_have_until_they_are_complete_are_theirs_alone() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let reference = at("q.partial");
        let inputs = [("the reference", reference.as_path())];
        let refused = |outputs: &[(&'static str, &str)]| {
            let outputs: Vec<_> = outputs.iter().map(|(role, name)| (*role, at(name))).collect();
            let outputs: Vec<Named<'_>> = outputs.iter().map(|(role, path)| (*role, path.as_path())).collect();
            match check_apart(&inputs, &outputs) {
                Err(FilesError::Reserves {
                    role,
                    path,
                    temporary,
                    other,
                }) => Some((role, path, temporary, other)),
                other => {
                    assert_eq!(other, Ok(()));
                    None
                }
            }
        };
        assert_eq!(
            refused(&[("--save-tokens", "q")]),
            Some(("--save-tokens", at("q"), at("q.partial"), "the reference"))
        );
        let (hidden, tokens) = (("--save-hidden", "n"), ("--save-tokens", "n.tmp"));
        let expected = Some(("--save-hidden", at("n"), at("n.tmp"), "--save-tokens"));
        assert_eq!(refused(&[hidden, tokens]), expected);
        assert_eq!(refused(&[tokens, hidden]), expected);
        assert_eq!(refused(&[("--save-tokens", "n.tmpx"), hidden]), None);
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(&reference, at("m.tmp")).unwrap();
            fs::write(&reference, "kept").unwrap();
            assert_eq!(
                refused(&[("--save-tokens", "m")]),
                Some(("--save-tokens", at("m"), at("m.tmp"), "the reference"))
            );
        }
    }

    #[cfg(unix)]
    #[test]
    fn devices_are_neither_read_nor_replaced() {
        let device = Path::new("/dev/zero");
        assert!(matches!(
            check_apart(&[], &[("--save-tokens", device)]),
            Err(FilesError::NotRegular { kind: "a device", .. })
        ));
        let message = read_regular(device).unwrap_err().to_string();
        assert_eq!(message, "it is a device, not a regular file");
        assert!(
            open_regular(&std::env::temp_dir())
                .unwrap_err()
                .to_string()
                .contains("a directory")
        );
    }
}
