//! The output directory: named by the user, or by what is run and when; claimed before the expensive part.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::files::{PendingFile, TEMPORARY, with_suffix};
use crate::report::{FILE_NAME, Report, ReportError};

/// Why a directory cannot take the results.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// It holds files already.
    #[error("the output directory {path} is not empty; name a new or empty one", path = path.display())]
    NotEmpty {
        /// The directory.
        path: PathBuf,
    },
    /// The name belongs to a file.
    #[error("the output directory {path} is a file; name a directory", path = path.display())]
    NotADirectory {
        /// The file.
        path: PathBuf,
    },
    /// Another run has it.
    #[error("another run is writing to the output directory {path}; name another", path = path.display())]
    Busy {
        /// The directory.
        path: PathBuf,
    },
    /// The system refuses.
    #[error("cannot use the output directory {path}: {source}; name another with --output", path = path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Checks, without creating anything, that `path` is absent or an empty directory. What a killed run left of its report does
/// not count.
///
/// # Errors
/// When it is a file or has entries.
pub fn check(path: &Path) -> Result<(), OutputError> {
    let failed = |source| OutputError::Io {
        path: path.to_owned(),
        source,
    };
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(failed(source)),
        Ok(found) if !found.is_dir() => Err(OutputError::NotADirectory { path: path.to_owned() }),
        Ok(_) => {
            let pending = with_suffix(Path::new(FILE_NAME), TEMPORARY);
            for entry in fs::read_dir(path).map_err(failed)? {
                if entry.map_err(failed)?.file_name() != pending {
                    return Err(OutputError::NotEmpty { path: path.to_owned() });
                }
            }
            Ok(())
        }
    }
}

/// A directory that waits for its report, which no other run can write meanwhile. Dropped without one, it is removed again
/// if this run made it.
#[derive(Debug)]
pub struct OutputDirectory {
    path: PathBuf,
    report: Option<PendingFile>,
    created: bool,
}

impl OutputDirectory {
    /// Takes `path`, creating it with its parents unless it is an empty directory.
    ///
    /// # Errors
    /// When it is a file, has entries, cannot be created, or another run has it.
    pub fn claim(path: &Path) -> Result<Self, OutputError> {
        check(path)?;
        let created = !path.exists();
        fs::create_dir_all(path).map_err(|source| io_error(path, source))?;
        let directory = Self::hold(path.to_owned(), created)?;
        // A run that had it may have finished since the first check.
        check(path)?;
        Ok(directory)
    }

    /// Makes a new directory: `path`, or the first of `path-2`, `path-3`, ... that does not exist, so that runs that start in
    /// the same second do not meet.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn create(path: &Path) -> Result<Self, OutputError> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(|source| io_error(parent, source))?;
        }
        for number in 1u64.. {
            let path = match number {
                1 => path.to_owned(),
                _ => with_suffix(path, &format!("-{number}")),
            };
            match fs::create_dir(&path) {
                Ok(()) => return Self::hold(path, true),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => return Err(io_error(&path, source)),
            }
        }
        unreachable!("there are fewer directories than numbers")
    }

    fn hold(path: PathBuf, created: bool) -> Result<Self, OutputError> {
        let report = PendingFile::create(&path.join(FILE_NAME), TEMPORARY).map_err(|source| match source.kind() {
            io::ErrorKind::ResourceBusy => OutputError::Busy { path: path.clone() },
            _ => io_error(&path, source),
        })?;
        Ok(Self {
            path,
            report: Some(report),
            created,
        })
    }

    /// Writes the report and returns its path.
    ///
    /// # Errors
    /// When a figure is not finite or the file cannot be written; nothing is left behind then.
    pub fn write(mut self, report: &Report) -> Result<PathBuf, ReportError> {
        let path = self.path.join(FILE_NAME);
        if let Some(file) = self.report.take() {
            report.store(file, &path)?;
        }
        self.created = false;
        Ok(path)
    }
}

impl Drop for OutputDirectory {
    fn drop(&mut self) {
        drop(self.report.take());
        if self.created {
            // Fails when something is in it, and then it should stay.
            let _ = fs::remove_dir(&self.path);
        }
    }
}

fn io_error(path: &Path, source: io::Error) -> OutputError {
    let path = path.to_owned();
    OutputError::Io { path, source }
}

/// What names the default directory.
#[derive(Debug, Clone, Copy)]
pub struct RunName<'a> {
    /// Public model name.
    pub artifact: &'a str,
    /// Prefill signature.
    pub prefill_signature: &'a str,
    /// Recorded name of the KV format, used as it is.
    pub kv: &'a str,
    /// Corpus identity.
    pub corpus_id: &'a str,
    /// Corpus mode.
    pub mode: &'a str,
}

/// `profiles/perplexity/<name>/<signature>/<kv>/<corpus>/<mode>/<UTC YYYYMMDD-HHMMSS>`, relative to the working directory.
pub fn default_directory(run: &RunName<'_>, now: SystemTime) -> PathBuf {
    let mut path = PathBuf::from("profiles/perplexity");
    path.push(sanitised(run.artifact));
    path.push(sanitised(run.prefill_signature));
    path.push(run.kv);
    path.push(sanitised(run.corpus_id));
    path.push(sanitised(run.mode));
    path.push(utc_stamp(now));
    path
}

/// Every byte outside `A-Z a-z 0-9 - _ .` becomes `-`; an empty name becomes `unknown`. A name of dots only would leave
/// the directory, so its dots are replaced too.
pub fn sanitised(name: &str) -> String {
    if name.is_empty() {
        return "unknown".into();
    }
    let dots = name.bytes().all(|b| b == b'.');
    let safe = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_') || (b == b'.' && !dots);
    name.bytes()
        .map(|b| if safe(b) { char::from(b) } else { '-' })
        .collect()
}

/// `YYYYMMDD-HHMMSS` in UTC.
pub fn utc_stamp(time: SystemTime) -> String {
    let seconds = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO)
        .as_secs();
    let (year, month, day) = civil_date(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

/// Year, month, day of a number of days since 1970-01-01 in the proleptic Gregorian calendar. Years are counted from
/// March, so that the leap day is a year's last.
fn civil_date(days: u64) -> (u64, u64, u64) {
    // Days from 0000-03-01 to 1970-01-01.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // March to January have 153 days per five months.
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sanitised_bytewise() {
        assert_eq!(sanitised("Qwen3.5-27B_x"), "Qwen3.5-27B_x");
        assert_eq!(sanitised("a/b c\u{e9}"), "a-b-c--");
        assert_eq!(sanitised(""), "unknown");
        assert_eq!(sanitised(".."), "--");
    }

    #[test]
    fn stamps_are_utc() {
        let at = |seconds| utc_stamp(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "19700101-000000");
        assert_eq!(at(951_782_400), "20000229-000000");
        assert_eq!(at(951_868_799), "20000229-235959");
        assert_eq!(at(1_000_000_000), "20010909-014640");
        assert_eq!(at(1_234_567_890), "20090213-233130");
        assert_eq!(at(4_107_542_400), "21000301-000000");
    }

    #[test]
    fn the_default_directory_names_the_run() {
        let run = RunName {
            artifact: "demo 27b",
            prefill_signature: "0f3c",
            kv: "fp8-e4m3-r256",
            corpus_id: "custom-a/b.txt",
            mode: "",
        };
        assert_eq!(
            default_directory(&run, SystemTime::UNIX_EPOCH),
            Path::new("profiles/perplexity/demo-27b/0f3c/fp8-e4m3-r256/custom-a-b.txt/unknown/19700101-000000")
        );
    }

    #[test]
    fn only_new_or_empty_directories_are_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let new = dir.path().join("a/b");
        drop(OutputDirectory::claim(&new).unwrap());
        assert!(!new.exists(), "a run without a report leaves no directory");
        fs::create_dir_all(&new).unwrap();
        drop(OutputDirectory::claim(&new).unwrap());
        assert!(new.exists(), "a directory of the user's stays");
        fs::write(new.join("x"), "").unwrap();
        assert!(matches!(
            OutputDirectory::claim(&new),
            Err(OutputError::NotEmpty { .. })
        ));
        assert!(matches!(
            OutputDirectory::claim(&new.join("x")),
            Err(OutputError::NotADirectory { .. })
        ));
        assert!(matches!(
            OutputDirectory::claim(&new.join("x/y")),
            Err(OutputError::Io { .. })
        ));
        assert!(check(&dir.path().join("absent")).is_ok() && !dir.path().join("absent").exists());
    }

    #[test]
    fn two_runs_share_no_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let first = OutputDirectory::claim(&path).unwrap();
        assert!(matches!(OutputDirectory::claim(&path), Err(OutputError::Busy { .. })));
        drop(first);
        // A killed run leaves an unlocked beginning.
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("report.json.tmp"), "{").unwrap();
        assert!(OutputDirectory::claim(&path).is_ok());
    }

    #[test]
    fn runs_of_one_second_get_directories_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/19700101-000000");
        let runs: Vec<_> = (0..3).map(|_| OutputDirectory::create(&path).unwrap()).collect();
        let names: Vec<_> = runs
            .iter()
            .map(|run| run.path.file_name().unwrap().to_owned())
            .collect();
        assert_eq!(names, ["19700101-000000", "19700101-000000-2", "19700101-000000-3"]);
    }
}
