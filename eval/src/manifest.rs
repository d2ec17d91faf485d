//! Corpus manifests: which streams exist, where they lie, and which of them a mode selects.
//!
//! A manifest is a UTF-8 JSON object `{corpus_id, streams: [{id, domain, path, bytes?, sha256?}], modes}`. The modes
//! `quick` and `full` must exist; any further mode is allowed. Every mode is checked, whichever one is selected.
//! Unknown fields are ignored, and named in [`Manifest::unknown`]. Selection order is the order of the mode's list.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use crate::files::read_regular;

/// Fields of a manifest and of a stream.
const FIELDS: [&str; 3] = ["corpus_id", "streams", "modes"];
const STREAM_FIELDS: [&str; 5] = ["id", "domain", "path", "bytes", "sha256"];

/// Modes every manifest must define.
pub const REQUIRED_MODES: [&str; 2] = ["quick", "full"];

/// Why a manifest is refused.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The file cannot be read.
    #[error("cannot read the manifest {path}: {source}", path = path.display())]
    Read {
        /// The manifest.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file breaks a rule.
    #[error("{path}: {source}", path = path.display())]
    In {
        /// The manifest.
        path: PathBuf,
        /// The rule.
        source: Box<ManifestError>,
    },
    /// The file is not JSON.
    #[error("the manifest is not valid JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// A value has another type than the schema asks for.
    #[error("manifest field `{field}` must be {expected}")]
    Type {
        /// Path of the field, such as `streams[3].id`.
        field: String,
        /// The expected type.
        expected: &'static str,
    },
    /// A required field or mode is absent.
    #[error("the manifest has no `{field}`")]
    Missing {
        /// Path of the field.
        field: String,
    },
    /// A string or list is empty.
    #[error("manifest field `{field}` is empty")]
    Empty {
        /// Path of the field.
        field: String,
    },
    /// Two streams share an id.
    #[error("stream id `{id}` occurs twice in `streams`")]
    DuplicateStream {
        /// The id.
        id: String,
    },
    /// A mode names a stream that does not exist.
    #[error("mode `{mode}` names the unknown stream `{id}`")]
    UnknownStream {
        /// The mode.
        mode: String,
        /// The id.
        id: String,
    },
    /// A mode names a stream twice.
    #[error("mode `{mode}` names the stream `{id}` twice")]
    RepeatedStream {
        /// The mode.
        mode: String,
        /// The id.
        id: String,
    },
    /// A stream's path leaves the manifest's directory.
    #[error("stream `{id}`: path `{path}` must be relative to the manifest and must not contain `..`")]
    Path {
        /// The stream.
        id: String,
        /// The path as written.
        path: String,
    },
    /// `sha256` is not 64 lower-case hexadecimal digits.
    #[error("stream `{id}`: sha256 must be 64 lower-case hexadecimal digits, not `{value}`")]
    Hash {
        /// The stream.
        id: String,
        /// The value as written.
        value: String,
    },
    /// The selected mode does not exist.
    #[error("the manifest has no mode `{mode}`; it has {available}")]
    UnknownMode {
        /// The mode asked for.
        mode: String,
        /// The modes that exist, comma-separated.
        available: String,
    },
}

/// One stream of a corpus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamEntry {
    /// Unique id.
    pub id: String,
    /// Aggregation label.
    pub domain: String,
    /// Normalised path below the manifest's directory, with `/` between components.
    pub path: String,
    /// Length of the file in bytes, when the manifest states it.
    pub bytes: Option<u64>,
    /// SHA-256 of the file in lower-case hexadecimal, when the manifest states it.
    pub sha256: Option<String>,
}

/// A checked manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Identity of the corpus; a changed corpus takes a new one.
    pub corpus_id: String,
    /// All streams, in file order.
    pub streams: Vec<StreamEntry>,
    /// Fields that no rule knows and nothing reads, such as `streams[].license`, each once.
    pub unknown: BTreeSet<String>,
    /// Mode name to stream indices, in selection order.
    modes: BTreeMap<String, Vec<usize>>,
}

impl Manifest {
    /// Reads and checks a manifest file.
    ///
    /// # Errors
    /// When the file cannot be read or breaks a rule of the schema; the message names it.
    pub fn read(path: &Path) -> Result<Self, ManifestError> {
        let bytes = read_regular(path).map_err(|source| ManifestError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&bytes).map_err(|source| ManifestError::In {
            path: path.to_owned(),
            source: Box::new(source),
        })
    }

    /// Checks a manifest held in memory.
    ///
    /// # Errors
    /// When it breaks a rule of the schema.
    pub fn parse(json: &[u8]) -> Result<Self, ManifestError> {
        let root: Value = serde_json::from_slice(json)?;
        if !root.is_object() {
            return Err(ManifestError::Type {
                field: "(root)".into(),
                expected: "an object",
            });
        }
        let mut unknown = unknown(&root, &FIELDS, "");
        let corpus_id = string(&root, "corpus_id", "corpus_id")?;
        let mut streams = Vec::new();
        let mut index_of = BTreeMap::new();
        for (i, value) in array(&root, "streams", "streams")?.iter().enumerate() {
            let entry = stream(value, &format!("streams[{i}]"))?;
            unknown.extend(self::unknown(value, &STREAM_FIELDS, "streams[]."));
            if index_of.insert(entry.id.clone(), i).is_some() {
                return Err(ManifestError::DuplicateStream { id: entry.id });
            }
            streams.push(entry);
        }
        let listed = field(&root, "modes", "modes")?.as_object().ok_or(ManifestError::Type {
            field: "modes".into(),
            expected: "an object",
        })?;
        let mut modes = BTreeMap::new();
        for (mode, ids) in listed {
            modes.insert(mode.clone(), selection(mode, ids, &index_of)?);
        }
        for required in REQUIRED_MODES {
            if !modes.contains_key(required) {
                return Err(ManifestError::Missing {
                    field: format!("modes.{required}"),
                });
            }
        }
        Ok(Self {
            corpus_id,
            streams,
            unknown,
            modes,
        })
    }

    /// Names of all modes in bytewise order.
    pub fn modes(&self) -> impl Iterator<Item = &str> {
        self.modes.keys().map(String::as_str)
    }

    /// The streams of a mode, in selection order.
    ///
    /// # Errors
    /// When the mode does not exist.
    pub fn select(&self, mode: &str) -> Result<Vec<&StreamEntry>, ManifestError> {
        match self.modes.get(mode) {
            Some(indices) => Ok(indices.iter().map(|&i| &self.streams[i]).collect()),
            None => Err(ManifestError::UnknownMode {
                mode: mode.into(),
                available: self.modes().collect::<Vec<_>>().join(", "),
            }),
        }
    }
}

/// Names of the fields of `object` that are not in `known`.
fn unknown(object: &Value, known: &[&str], at: &str) -> BTreeSet<String> {
    let fields = object.as_object().into_iter().flat_map(|fields| fields.keys());
    fields
        .filter(|name| !known.contains(&name.as_str()))
        .map(|name| format!("{at}{name}"))
        .collect()
}

fn field<'a>(object: &'a Value, name: &str, path: &str) -> Result<&'a Value, ManifestError> {
    object
        .get(name)
        .ok_or_else(|| ManifestError::Missing { field: path.into() })
}

fn array<'a>(object: &'a Value, name: &str, path: &str) -> Result<&'a Vec<Value>, ManifestError> {
    let items = field(object, name, path)?
        .as_array()
        .ok_or_else(|| ManifestError::Type {
            field: path.into(),
            expected: "an array",
        })?;
    if items.is_empty() {
        Err(ManifestError::Empty { field: path.into() })
    } else {
        Ok(items)
    }
}

fn string(object: &Value, name: &str, path: &str) -> Result<String, ManifestError> {
    non_empty(field(object, name, path)?, path)
}

fn non_empty(value: &Value, path: &str) -> Result<String, ManifestError> {
    match value.as_str() {
        None => Err(ManifestError::Type {
            field: path.into(),
            expected: "a string",
        }),
        Some("") => Err(ManifestError::Empty { field: path.into() }),
        Some(text) => Ok(text.into()),
    }
}

fn stream(value: &Value, at: &str) -> Result<StreamEntry, ManifestError> {
    if !value.is_object() {
        return Err(ManifestError::Type {
            field: at.into(),
            expected: "an object",
        });
    }
    let id = string(value, "id", &format!("{at}.id"))?;
    let domain = string(value, "domain", &format!("{at}.domain"))?;
    let written = string(value, "path", &format!("{at}.path"))?;
    let path = normalise(&written).ok_or(ManifestError::Path {
        id: id.clone(),
        path: written,
    })?;
    let bytes = match value.get("bytes") {
        None | Some(Value::Null) => None,
        Some(number) => Some(number.as_u64().ok_or(ManifestError::Type {
            field: format!("{at}.bytes"),
            expected: "a non-negative integer",
        })?),
    };
    let sha256 = match value.get("sha256") {
        None | Some(Value::Null) => None,
        Some(hash) => {
            let hash = non_empty(hash, &format!("{at}.sha256"))?;
            if hash.len() != 64 || !hash.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
                return Err(ManifestError::Hash { id, value: hash });
            }
            Some(hash)
        }
    };
    Ok(StreamEntry {
        id,
        domain,
        path,
        bytes,
        sha256,
    })
}

/// Drops `.` components; `None` for absolute paths, any `..`, and paths without a name. A backslash separates
/// components on some systems only, so it is refused everywhere.
fn normalise(path: &str) -> Option<String> {
    if path.contains(['\\', '\0']) || path.as_bytes().get(1) == Some(&b':') {
        return None;
    }
    let mut parts = Vec::new();
    for component in Path::new(path).components() {
        match component {
            Component::Normal(part) => parts.push(part.to_str()?),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    if parts.is_empty() { None } else { Some(parts.join("/")) }
}

fn selection(mode: &str, ids: &Value, index_of: &BTreeMap<String, usize>) -> Result<Vec<usize>, ManifestError> {
    let path = format!("modes.{mode}");
    let ids = ids.as_array().ok_or_else(|| ManifestError::Type {
        field: path.clone(),
        expected: "an array",
    })?;
    if ids.is_empty() {
        return Err(ManifestError::Empty { field: path });
    }
    let mut seen = BTreeSet::new();
    let mut indices = Vec::with_capacity(ids.len());
    for (i, id) in ids.iter().enumerate() {
        let id = non_empty(id, &format!("{path}[{i}]"))?;
        let Some(&index) = index_of.get(&id) else {
            return Err(ManifestError::UnknownStream { mode: mode.into(), id });
        };
        if !seen.insert(index) {
            return Err(ManifestError::RepeatedStream { mode: mode.into(), id });
        }
        indices.push(index);
    }
    Ok(indices)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn good() -> Value {
        json!({
            "corpus_id": "c", "note": "ignored",
            "streams": [
                {"id": "a", "domain": "x", "path": "data/./a.txt", "bytes": 3},
                {"id": "b", "domain": "y", "path": "b.txt"}
            ],
            "modes": {"quick": ["b"], "full": ["b", "a"], "demo": ["a"]}
        })
    }

    fn parse(value: &Value) -> Result<Manifest, ManifestError> {
        Manifest::parse(value.to_string().as_bytes())
    }

    fn refusal(change: impl FnOnce(&mut Value)) -> String {
        let mut value = good();
        change(&mut value);
        parse(&value).expect_err("must be refused").to_string()
    }

    #[test]
    fn selection_follows_the_mode_and_paths_are_normalised() {
        let manifest = parse(&good()).unwrap();
        let ids = |mode| {
            manifest
                .select(mode)
                .unwrap()
                .iter()
                .map(|s| s.id.as_str())
                .collect::<Vec<_>>()
        };
        assert_eq!(ids("full"), ["b", "a"]);
        assert_eq!(ids("demo"), ["a"]);
        assert_eq!(manifest.select("full").unwrap()[1].path, "data/a.txt");
        assert!(manifest.unknown.iter().eq(["note"]));
        assert_eq!(
            manifest.select("huge").unwrap_err().to_string(),
            "the manifest has no mode `huge`; it has demo, full, quick"
        );
    }

    #[test]
    fn unknown_fields_are_named_once() {
        let mut value = good();
        value["streams"][0]["sha265"] = json!("typo");
        value["streams"][1]["sha265"] = json!("typo");
        let manifest = parse(&value).unwrap();
        assert!(manifest.unknown.iter().eq(["note", "streams[].sha265"]));
    }

    #[test]
    fn each_broken_rule_has_its_own_message() {
        type Change = Box<dyn FnOnce(&mut Value)>;
        let cases: [(&str, Change); 17] = [
            (
                "the manifest has no `corpus_id`",
                Box::new(|v| drop(v.as_object_mut().unwrap().remove("corpus_id"))),
            ),
            (
                "manifest field `corpus_id` is empty",
                Box::new(|v| v["corpus_id"] = json!("")),
            ),
            (
                "manifest field `corpus_id` must be a string",
                Box::new(|v| v["corpus_id"] = json!(1)),
            ),
            (
                "manifest field `streams` must be an array",
                Box::new(|v| v["streams"] = json!({})),
            ),
            (
                "manifest field `streams` is empty",
                Box::new(|v| v["streams"] = json!([])),
            ),
            (
                "manifest field `streams[1]` must be an object",
                Box::new(|v| v["streams"][1] = json!("b")),
            ),
            (
                "the manifest has no `streams[1].id`",
                Box::new(|v| v["streams"][1] = json!({})),
            ),
            (
                "stream id `a` occurs twice in `streams`",
                Box::new(|v| v["streams"][1]["id"] = json!("a")),
            ),
            (
                "manifest field `streams[0].bytes` must be a non-negative",
                Box::new(|v| v["streams"][0]["bytes"] = json!(-1)),
            ),
            (
                "stream `a`: sha256 must be 64 lower-case",
                Box::new(|v| v["streams"][0]["sha256"] = json!("AB")),
            ),
            (
                "the manifest has no `modes.quick`",
                Box::new(|v| drop(v["modes"].as_object_mut().unwrap().remove("quick"))),
            ),
            (
                "manifest field `modes.demo` is empty",
                Box::new(|v| v["modes"]["demo"] = json!([])),
            ),
            (
                "mode `demo` names the unknown stream `z`",
                Box::new(|v| v["modes"]["demo"] = json!(["z"])),
            ),
            (
                "mode `full` names the stream `a` twice",
                Box::new(|v| v["modes"]["full"] = json!(["a", "a"])),
            ),
            (
                "stream `a`: path `/a` must be relative",
                Box::new(|v| v["streams"][0]["path"] = json!("/a")),
            ),
            (
                "stream `a`: path `x/../a` must be relative",
                Box::new(|v| v["streams"][0]["path"] = json!("x/../a")),
            ),
            (
                "stream `a`: path `C:a` must be relative",
                Box::new(|v| v["streams"][0]["path"] = json!("C:a")),
            ),
        ];
        for (expected, change) in cases {
            let message = refusal(change);
            assert!(
                message.starts_with(expected),
                "{message:?} should start with {expected:?}"
            );
        }
        assert!(matches!(Manifest::parse(b"[]"), Err(ManifestError::Type { .. })));
        assert!(matches!(Manifest::parse(b"{"), Err(ManifestError::Json(_))));
    }
}
