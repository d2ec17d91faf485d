//! From a manifest or a text file to planned streams: read, verify, tokenise, cut into windows.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::files::absolute;
use crate::manifest::{Manifest, ManifestError};
use crate::text::{Text, TextError, hex};
use crate::windows::{Protocol, WindowError, WindowKind, WindowPlan};

/// Why a corpus cannot be scored.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    /// The manifest is at fault.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// A text file is at fault.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A path cannot be made absolute, or names no file.
    #[error("cannot resolve the path {path}: {source}", path = path.display())]
    Path {
        /// The path as given.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The tokenizer failed.
    #[error("stream `{id}`: cannot tokenise: {message}")]
    Tokenise {
        /// The stream.
        id: String,
        /// The tokenizer's message.
        message: String,
    },
    /// The stream gives no window.
    #[error("stream `{id}`: {source}")]
    Window {
        /// The stream.
        id: String,
        /// What the plan asks for.
        source: WindowError,
    },
}

/// The selected texts, read and verified; nothing here needs a tokenizer.
#[derive(Debug, Clone)]
pub struct CorpusText {
    /// Corpus identity.
    pub id: String,
    /// Selected mode; `custom` for a single text.
    pub mode: String,
    /// Absolute path of the manifest or text.
    pub source: PathBuf,
    /// The streams, in selection order.
    pub streams: Vec<StreamText>,
    /// What was ignored on reading, in words.
    pub notes: Vec<String>,
}

/// One text of a corpus.
#[derive(Debug, Clone)]
pub struct StreamText {
    /// Stream id.
    pub id: String,
    /// Aggregation label.
    pub domain: String,
    /// Path as reported: relative to the manifest, or absolute for a single text.
    pub path: String,
    /// Where it was read.
    pub file: PathBuf,
    /// The validated text.
    pub text: Text,
}

impl StreamText {
    /// A byte-order mark is text, and said.
    fn note(&self) -> Option<String> {
        let id = &self.id;
        let note = format!("stream {id} begins with a byte-order mark, which is scored as text");
        self.text.byte_order_mark.then_some(note)
    }
}

impl CorpusText {
    /// Reads the streams that `mode` selects and verifies the lengths and hashes that the manifest states.
    ///
    /// # Errors
    /// When the manifest or one of the selected texts is refused.
    pub fn from_manifest(manifest_path: &Path, mode: &str) -> Result<Self, CorpusError> {
        let source = resolve(manifest_path)?;
        let manifest = Manifest::read(manifest_path)?;
        let directory = source.parent().unwrap_or(Path::new("/"));
        let mut streams = Vec::new();
        for entry in manifest.select(mode)? {
            let file = directory.join(&entry.path);
            let text = Text::read(&file)?;
            text.verify(&entry.id, &file, entry.bytes, entry.sha256.as_deref())?;
            streams.push(StreamText {
                id: entry.id.clone(),
                domain: entry.domain.clone(),
                path: entry.path.clone(),
                file,
                text,
            });
        }
        let ignored = |field: &String| format!("the manifest's field `{field}` is not known and was ignored");
        let mut notes: Vec<String> = manifest.unknown.iter().map(ignored).collect();
        notes.extend(streams.iter().filter_map(StreamText::note));
        Ok(Self {
            notes,
            id: manifest.corpus_id,
            mode: mode.into(),
            source,
            streams,
        })
    }

    /// One text file as a corpus of one stream: id `custom-<file name>`, mode and domain `custom`.
    ///
    /// # Errors
    /// When the text is refused.
    pub fn from_text(path: &Path) -> Result<Self, CorpusError> {
        let source = resolve(path)?;
        let text = Text::read(path)?;
        let name = source
            .file_name()
            .map_or_else(|| "text".into(), |name| name.to_string_lossy().into_owned());
        let stream = StreamText {
            id: name.clone(),
            domain: "custom".into(),
            path: source.display().to_string(),
            file: source.clone(),
            text,
        };
        Ok(Self {
            notes: stream.note().into_iter().collect(),
            id: format!("custom-{name}"),
            mode: "custom".into(),
            source,
            streams: vec![stream],
        })
    }

    /// Tokenises every stream in one call each, without special tokens, and plans its windows; at most the first
    /// `limit` windows of every stream. Each text is freed as soon as it is tokenised.
    ///
    /// # Errors
    /// When the tokenizer fails or a stream is too short.
    pub fn plan<E: std::fmt::Display>(
        self,
        protocol: Protocol,
        limit: Option<usize>,
        mut encode: impl FnMut(&str) -> Result<Vec<u32>, E>,
    ) -> Result<CorpusPlan, CorpusError> {
        let mut streams = Vec::with_capacity(self.streams.len());
        for StreamText {
            id, domain, path, text, ..
        } in self.streams
        {
            let tokens = match encode(&text.text) {
                Ok(tokens) => tokens,
                Err(error) => {
                    return Err(CorpusError::Tokenise {
                        id,
                        message: error.to_string(),
                    });
                }
            };
            let planned = protocol.plan(tokens.len()).and_then(|plan| match limit {
                Some(limit) => plan.first(limit),
                None => Ok(plan),
            });
            let windows = match planned {
                Ok(windows) => windows,
                Err(source) => return Err(CorpusError::Window { id, source }),
            };
            streams.push(StreamPlan {
                id,
                domain,
                path,
                bytes: text.text.len() as u64,
                words: text.words,
                sha256: text.sha256,
                tokens_sha256: tokens_sha256(&tokens),
                tokens,
                windows,
            });
        }
        Ok(CorpusPlan {
            id: self.id,
            mode: self.mode,
            source: self.source,
            protocol,
            limit,
            streams,
        })
    }
}

fn resolve(path: &Path) -> Result<PathBuf, CorpusError> {
    absolute(path).map_err(|source| CorpusError::Path {
        path: path.to_owned(),
        source,
    })
}

/// SHA-256 of the ids as four little-endian bytes each.
fn tokens_sha256(tokens: &[u32]) -> String {
    let mut hash = Sha256::new();
    for token in tokens {
        hash.update(token.to_le_bytes());
    }
    hex(&hash.finalize())
}

/// Everything that will be scored.
#[derive(Debug, Clone)]
pub struct CorpusPlan {
    /// Corpus identity.
    pub id: String,
    /// Selected mode.
    pub mode: String,
    /// Absolute path of the manifest or text.
    pub source: PathBuf,
    /// Window kind, context and stride.
    pub protocol: Protocol,
    /// Most windows of a stream; `None` for all.
    pub limit: Option<usize>,
    /// The streams, in selection order.
    pub streams: Vec<StreamPlan>,
}

/// One tokenised stream and its windows.
#[derive(Debug, Clone)]
pub struct StreamPlan {
    /// Stream id.
    pub id: String,
    /// Aggregation label.
    pub domain: String,
    /// Path as reported.
    pub path: String,
    /// Length of the text in bytes.
    pub bytes: u64,
    /// Runs of non-whitespace characters in the text.
    pub words: u64,
    /// SHA-256 of the text.
    pub sha256: String,
    /// SHA-256 of the ids, each as four little-endian bytes.
    pub tokens_sha256: String,
    /// Token ids.
    pub tokens: Vec<u32>,
    /// The windows.
    pub windows: WindowPlan,
}

impl StreamPlan {
    /// Whether every token but the first is scored, so that the whole text is a valid denominator.
    pub fn is_whole(&self) -> bool {
        self.windows.scored_tokens() + 1 == self.tokens.len()
    }
}

impl CorpusPlan {
    /// A plan from token ids, for callers that do their own reading.
    ///
    /// # Errors
    /// When a stream is too short.
    pub fn from_tokens(
        id: &str,
        protocol: Protocol,
        streams: impl IntoIterator<Item = (String, String, Vec<u32>)>,
    ) -> Result<Self, CorpusError> {
        let mut planned = Vec::new();
        for (id, domain, tokens) in streams {
            let windows = match protocol.plan(tokens.len()) {
                Ok(windows) => windows,
                Err(source) => return Err(CorpusError::Window { id, source }),
            };
            planned.push(StreamPlan {
                path: id.clone(),
                id,
                domain,
                bytes: 0,
                words: 0,
                sha256: String::new(),
                tokens_sha256: tokens_sha256(&tokens),
                tokens,
                windows,
            });
        }
        Ok(Self {
            id: id.into(),
            mode: "custom".into(),
            source: PathBuf::new(),
            protocol,
            limit: None,
            streams: planned,
        })
    }

    /// Tokens of all streams.
    pub fn input_tokens(&self) -> u64 {
        self.streams.iter().map(|s| s.tokens.len() as u64).sum()
    }

    /// Scored tokens of all windows.
    pub fn scored_tokens(&self) -> u64 {
        self.streams.iter().map(|s| s.windows.scored_tokens() as u64).sum()
    }

    /// Windows of all streams.
    pub fn windows(&self) -> u64 {
        self.streams.iter().map(|s| s.windows.len() as u64).sum()
    }

    /// Mode as written to reference files: only sliding windows have a stride below the context, so disjoint windows
    /// need no mark, but chunks scored in their second half do.
    pub fn recorded_mode(&self) -> String {
        match self.protocol.kind() {
            WindowKind::LlamaChunks => format!("{}+llama-chunks", self.mode),
            WindowKind::Sliding | WindowKind::Disjoint => self.mode.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn bytes_as_tokens(text: &str) -> Result<Vec<u32>, String> {
        Ok(text.bytes().map(u32::from).collect())
    }

    #[test]
    fn a_text_file_becomes_one_custom_stream() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes.txt");
        fs::write(&path, "0123456789").unwrap();
        let corpus = CorpusText::from_text(&dir.path().join("./notes.txt")).unwrap();
        assert_eq!(
            (corpus.id.as_str(), corpus.mode.as_str()),
            ("custom-notes.txt", "custom")
        );
        assert_eq!(corpus.source, absolute(&path).unwrap());
        let protocol = Protocol::new(WindowKind::Sliding, 6, 2).unwrap();
        let plan = corpus.plan(protocol, None, bytes_as_tokens).unwrap();
        assert_eq!((plan.input_tokens(), plan.scored_tokens(), plan.windows()), (10, 9, 3));
        let stream = &plan.streams[0];
        assert_eq!(
            (stream.id.as_str(), stream.domain.as_str(), stream.bytes),
            ("notes.txt", "custom", 10)
        );
        assert!(stream.is_whole());
    }

    #[test]
    fn stated_hashes_are_checked_for_selected_streams_only() {
        let dir = tempfile::tempdir().unwrap();
        let manifest = dir.path().join("manifest.json");
        fs::write(dir.path().join("a.txt"), "abc").unwrap();
        let zero = "0".repeat(64);
        fs::write(
            &manifest,
            format!(
                r#"{{"corpus_id":"c","streams":[{{"id":"a","domain":"d","path":"a.txt","bytes":3}},
                {{"id":"b","domain":"d","path":"a.txt","sha256":"{zero}"}},
                {{"id":"gone","domain":"d","path":"gone.txt"}}],
                "modes":{{"quick":["a"],"full":["a","b"],"demo":["gone"]}}}}"#
            ),
        )
        .unwrap();
        assert_eq!(CorpusText::from_manifest(&manifest, "quick").unwrap().streams.len(), 1);
        let message = CorpusText::from_manifest(&manifest, "full").unwrap_err().to_string();
        assert!(
            message.starts_with("stream `b`: ") && message.contains(&zero),
            "{message}"
        );
        let message = CorpusText::from_manifest(&manifest, "demo").unwrap_err().to_string();
        assert!(message.contains("gone.txt"), "{message}");
    }

    #[test]
    fn errors_name_the_stream() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t");
        fs::write(&path, "x").unwrap();
        let corpus = CorpusText::from_text(&path).unwrap();
        let protocol = Protocol::new(WindowKind::Sliding, 6, 2).unwrap();
        let message = corpus
            .clone()
            .plan(protocol, None, bytes_as_tokens)
            .unwrap_err()
            .to_string();
        assert!(message.starts_with("stream `t`: a text of 1 token(s)"), "{message}");
        let message = corpus
            .clone()
            .plan(protocol, None, |_| Err("no merges"))
            .unwrap_err()
            .to_string();
        assert_eq!(message, "stream `t`: cannot tokenise: no merges");
        fs::write(&path, "0123456789").unwrap();
        let corpus = CorpusText::from_text(&path).unwrap();
        let message = corpus.plan(protocol, Some(4), bytes_as_tokens).unwrap_err().to_string();
        assert!(message.starts_with("stream `t`: the first 4 window(s)"), "{message}");
    }
}
