//! The tokens file: every window's input tokens, targets and fingerprint as JSON, for programs that score the same windows
//! themselves and write a reference. Windows come in scoring order, one per line.

use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::corpus::CorpusPlan;
use crate::files::{PARTIAL, PendingFile};
use crate::fingerprint::fingerprint;
use crate::windows::WindowKind;

/// Number of this schema.
pub const SCHEMA_VERSION: u32 = 1;

/// Everything before the windows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokensHeader {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Corpus identity.
    pub corpus_id: String,
    /// Corpus mode.
    pub mode: String,
    /// Longest input.
    pub context: u64,
    /// Targets per later window.
    pub stride: u64,
    /// How streams are cut.
    pub windows_kind: WindowKind,
    /// Rows of the head in the softmax.
    pub public_tokens: u64,
}

/// One window.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokensWindow {
    /// Stream index in selection order.
    pub stream_index: u64,
    /// Stream id.
    pub stream_id: String,
    /// Index within the stream.
    pub index: u64,
    /// First token fed.
    pub input_begin: u64,
    /// End of the input.
    pub input_end: u64,
    /// First token scored.
    pub target_begin: u64,
    /// End of the scored tokens.
    pub target_end: u64,
    /// Index of the first scored token within `tokens`.
    pub first_target: u64,
    /// Input ids.
    pub tokens: Vec<u32>,
    /// The scored ids, the last of `tokens`.
    pub targets: Vec<u32>,
    /// Fingerprint of `tokens` as 16 hexadecimal digits: many readers cannot hold such a number.
    pub fingerprint: String,
}

/// A whole file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokensFile {
    /// Everything before the windows.
    #[serde(flatten)]
    pub header: TokensHeader,
    /// The windows in scoring order.
    pub windows: Vec<TokensWindow>,
}

/// Writes the windows of a plan, one at a time, into a file that gets the name `path` when it is committed.
///
/// # Errors
/// When the file cannot be written; nothing is left behind then.
pub fn write(path: &Path, plan: &CorpusPlan, public_tokens: usize) -> io::Result<PendingFile> {
    let mut file = PendingFile::create(path, PARTIAL)?;
    let header = TokensHeader {
        schema_version: SCHEMA_VERSION,
        corpus_id: plan.id.clone(),
        mode: plan.mode.clone(),
        context: plan.protocol.context() as u64,
        stride: plan.protocol.stride() as u64,
        windows_kind: plan.protocol.kind(),
        public_tokens: public_tokens as u64,
    };
    let header = serde_json::to_string(&header)?;
    write!(file, "{},\n\"windows\":[", header.trim_end_matches('}'))?;
    let mut separator = "\n";
    for (stream_index, stream) in plan.streams.iter().enumerate() {
        for (index, window) in stream.windows.iter().enumerate() {
            let tokens = &stream.tokens[window.input_begin..window.input_end];
            let line = TokensWindow {
                stream_index: stream_index as u64,
                stream_id: stream.id.clone(),
                index: index as u64,
                input_begin: window.input_begin as u64,
                input_end: window.input_end as u64,
                target_begin: window.target_begin as u64,
                target_end: window.target_end() as u64,
                first_target: window.first_target() as u64,
                tokens: tokens.to_vec(),
                targets: tokens[window.first_target()..].to_vec(),
                fingerprint: format!("{:016x}", fingerprint(tokens)),
            };
            file.write_all(separator.as_bytes())?;
            serde_json::to_writer(&mut file, &line)?;
            separator = ",\n";
        }
    }
    file.write_all(b"\n]}\n")?;
    file.flush()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::windows::Protocol;

    #[test]
    fn the_worked_example() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens.json");
        let protocol = Protocol::new(WindowKind::Sliding, 6, 2).unwrap();
        let stream = ("demo}.txt".into(), "custom".into(), (101..111).collect());
        let plan = CorpusPlan::from_tokens("custom-demo}", protocol, [stream]).unwrap();
        write(&path, &plan, 1000).unwrap().commit().unwrap();
        let whole = std::fs::read(&path).unwrap();
        let file: TokensFile = serde_json::from_slice(&whole).unwrap();
        // Cut or continued, it is no tokens file; the last byte is a newline.
        assert!(serde_json::from_slice::<TokensFile>(&whole[..whole.len() - 2]).is_err());
        assert!(serde_json::from_slice::<TokensFile>(&[&whole[..], b"x"].concat()).is_err());
        assert_eq!(
            (file.header.corpus_id.as_str(), file.header.windows_kind),
            ("custom-demo}", WindowKind::Sliding)
        );
        let prints: Vec<&str> = file.windows.iter().map(|w| w.fingerprint.as_str()).collect();
        assert_eq!(prints, ["6b0f9c4409432cca", "28c0ad2d5a75f5ee", "ac20a6949f0ed482"]);
        let second = &file.windows[1];
        assert_eq!(
            (
                second.input_begin,
                second.input_end,
                second.target_begin,
                second.target_end
            ),
            (2, 8, 6, 8)
        );
        assert_eq!((second.first_target, second.index), (4, 1));
        assert_eq!(second.tokens, [103, 104, 105, 106, 107, 108]);
        assert_eq!(second.targets, [107, 108]);
    }
}
