//! Runs the binary and reads what it left behind.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

/// What a run gave.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// A folder of the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The trained demo model as an artifact.
pub(crate) fn demo_artifact() -> PathBuf {
    repository("tests/data/demo.ninfer")
}

/// The same model as the Hugging Face checkpoint it was converted from.
pub(crate) fn demo_checkpoint() -> PathBuf {
    repository("tests/data/demo_hf")
}

/// A tiny random model whose tokens 0 to 255 are the bytes, so that a text's length is its token count.
pub(crate) fn byte_model() -> PathBuf {
    repository("tests/data/fixtures/dense")
}

/// A tiny random mixture of 16 experts, 4 per token; its `text.txt` and `golden.json` are in the same folder.
pub(crate) fn moe_model() -> PathBuf {
    repository("tests/data/fixtures/moe")
}

/// A working directory of its own for every test.
pub(crate) struct Dir(tempfile::TempDir);

impl Dir {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file and returns its path.
    pub(crate) fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// Every file below the directory, relative, sorted.
    pub(crate) fn files(&self) -> Vec<String> {
        fn walk(folder: &Path, root: &Path, found: &mut Vec<String>) {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    walk(&path, root, found);
                } else {
                    found.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
                }
            }
        }
        let mut found = Vec::new();
        walk(self.0.path(), self.0.path(), &mut found);
        found.sort();
        found
    }

    /// Runs the program here.
    pub(crate) fn run<S: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Run {
        let output = Command::new(env!("CARGO_BIN_EXE_burn-perplexity"))
            .args(args)
            .current_dir(self.0.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        Run {
            code: output.status.code().expect("not ended by a signal"),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Scores `text` with `model`; the protocol and further options as typed on one line.
    pub(crate) fn score(&self, model: &Path, text: &Path, options: &str) -> Run {
        let mut args = vec![model.to_str().unwrap(), "--text", text.to_str().unwrap()];
        args.extend(options.split_whitespace());
        self.run(args)
    }

    /// Scores a text that must succeed, and returns its report.
    pub(crate) fn report(&self, model: &Path, text: &Path, options: &str) -> Value {
        let out = self.path(&format!("out-{}", self.files().len()));
        let run = self.score(model, text, &format!("{options} --output {}", out.display()));
        assert_eq!(run.code, 0, "{}", run.stderr);
        read_report(&out)
    }
}

/// `report.json` of an output directory.
pub(crate) fn read_report(directory: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(directory.join("report.json")).unwrap()).unwrap()
}

/// A number of a report by its JSON pointer.
pub(crate) fn number(report: &Value, pointer: &str) -> f64 {
    let value = report
        .pointer(pointer)
        .unwrap_or_else(|| panic!("no {pointer} in {report}"));
    value.as_f64().unwrap_or_else(|| panic!("{pointer} is {value}"))
}

/// The negative log-likelihood of every window, in scoring order.
pub(crate) fn window_nlls(report: &Value) -> Vec<f64> {
    let streams = report["streams"].as_array().unwrap().iter();
    streams
        .flat_map(|stream| stream["windows"].as_array().unwrap())
        .map(|window| window["total_nll"].as_f64().unwrap())
        .collect()
}
