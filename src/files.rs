//! The files of a run must not meet: what is written may replace an older file of its own kind, never an input, a
//! device, or another result of the same run.

use std::path::{Path, PathBuf};

/// A file that cannot be written as asked.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum FilesError {
    #[error("{option} {path:?} is also {other}; a run replaces no file it needs, name another")]
    Meets {
        option: &'static str,
        path: PathBuf,
        other: &'static str,
    },
    #[error(
        "{option} {path:?} lies in the checkpoint {checkpoint:?}, which a run leaves as it is; name another folder"
    )]
    InCheckpoint {
        option: &'static str,
        path: PathBuf,
        checkpoint: PathBuf,
    },
    #[error("{option} {path:?} exists and is no regular file; name a file")]
    NotRegular { option: &'static str, path: PathBuf },
}

/// A file with the option (or the role) it was named by.
pub(crate) type Named<'a> = (&'static str, &'a Path);

/// Checks that the `outputs` are regular or new files, apart from `inputs`, from each other, and not in a checkpoint.
///
/// # Errors
/// The first output that cannot be written as asked.
pub(crate) fn check_apart(inputs: &[Named], outputs: &[Named]) -> Result<(), FilesError> {
    for (index, &(option, path)) in outputs.iter().enumerate() {
        if path.metadata().is_ok_and(|found| !found.is_file()) {
            let path = path.to_owned();
            return Err(FilesError::NotRegular { option, path });
        }
        let place = place(path);
        let mut others = inputs.iter().chain(&outputs[..index]);
        if let Some(&(other, _)) = others.find(|(_, other)| self::place(other) == place) {
            let path = path.to_owned();
            return Err(FilesError::Meets { option, path, other });
        }
        let checkpoint = inputs
            .iter()
            .find(|(_, input)| input.is_dir() && place.starts_with(self::place(input)));
        if let Some((_, checkpoint)) = checkpoint {
            return Err(FilesError::InCheckpoint {
                option,
                path: path.to_owned(),
                checkpoint: checkpoint.to_path_buf(),
            });
        }
    }
    Ok(())
}

/// Where a path leads, whether or not there is a file yet.
fn place(path: &Path) -> PathBuf {
    let of_new_file = || {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new(".")).canonicalize().ok()?;
        Some(folder.join(path.file_name()?))
    };
    path.canonicalize()
        .ok()
        .or_else(of_new_file)
        .unwrap_or_else(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_replace_no_input_and_no_other_output() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("text.txt"), "text").unwrap();
        std::fs::write(at("old.bin"), "old").unwrap();
        std::fs::create_dir(at("checkpoint")).unwrap();
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
                option: "--resume",
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
            Err(FilesError::NotRegular { .. })
        ));
        assert_eq!(
            check_apart(&inputs, &[("--save-tokens", &at("old.bin")), ("--resume", &at("new"))]),
            Ok(())
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_device_is_not_replaced() {
        let device = Path::new("/dev/null");
        assert!(matches!(
            check_apart(&[], &[("--save-tokens", device)]),
            Err(FilesError::NotRegular { .. })
        ));
    }
}
