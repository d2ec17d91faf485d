//! The safetensors files of a checkpoint: which ones count, their headers, their bytes.
//!
//! Exactly the files that the index names are read, or the single file when there is no index. Every header is checked
//! against its file's length, and the index against every header, before anything is computed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::CheckpointError;
use crate::source::SourceFile;

const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// A tensor of one shard.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    pub(super) shard: usize,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Byte range in the shard's file.
    begin: usize,
    end: usize,
}

impl Tensor {
    pub(super) fn bytes(&self) -> usize {
        self.end - self.begin
    }

    #[cfg(test)]
    pub(super) fn unplaced(dtype: Dtype, shape: Vec<usize>) -> Self {
        Self {
            shard: 0,
            dtype,
            shape,
            begin: 0,
            end: 0,
        }
    }
}

struct Shard {
    path: PathBuf,
    map: Mmap,
}

/// All shards of a checkpoint and the tensors in them.
pub(super) struct Shards {
    shards: Vec<Shard>,
    pub(super) tensors: HashMap<String, Tensor>,
    pub(super) notes: Vec<String>,
}

impl Shards {
    pub(super) fn open(directory: &Path) -> Result<Self, CheckpointError> {
        let present = safetensors_files(directory)?;
        let index = read_index(directory)?;
        let names: BTreeSet<String> = match &index {
            Some(index) => index.values().cloned().collect(),
            None => BTreeSet::from([single_file(directory, &present)?]),
        };
        if index.is_some() && present.contains(SINGLE) && !names.contains(SINGLE) {
            return Err(CheckpointError::AmbiguousFiles {
                directory: directory.into(),
                found: format!("{SINGLE} and an index that names other files"),
            });
        }
        let mut notes = Vec::new();
        let stray: Vec<&str> = present.difference(&names).map(String::as_str).collect();
        if !stray.is_empty() {
            notes.push(format!(
                "weight files that are not part of the model were ignored: {}",
                stray.join(", ")
            ));
        }

        let mut shards = Vec::new();
        let mut tensors = HashMap::new();
        for name in &names {
            let path = directory.join(name);
            let (shard, found) = open_shard(&path, shards.len(), || {
                index.iter().flatten().filter(|(_, shard)| *shard == name).count()
            })?;
            shards.push(shard);
            let mut unlisted = Vec::new();
            for (tensor, place) in found {
                match &index {
                    Some(index) if index.get(&tensor) != Some(name) => unlisted.push(tensor),
                    _ => drop(tensors.insert(tensor, place)),
                }
            }
            unlisted.sort();
            if let Some(first) = unlisted.first() {
                notes.push(format!(
                    "{name}: ignored {} tensors that the index does not place there, such as {first}",
                    unlisted.len()
                ));
            }
        }
        for (tensor, shard) in index.iter().flatten() {
            if !tensors.contains_key(tensor) {
                return Err(CheckpointError::NotInShard {
                    tensor: tensor.clone(),
                    shard: directory.join(shard),
                });
            }
        }
        Ok(Self { shards, tensors, notes })
    }

    pub(super) fn bytes(&self, tensor: &Tensor) -> &[u8] {
        &self.shards[tensor.shard].map[tensor.begin..tensor.end]
    }

    pub(super) fn path(&self, tensor: &Tensor) -> &Path {
        &self.shards[tensor.shard].path
    }

    /// The bytes of every file, in the order of [`Self::files`].
    pub(super) fn contents(&self) -> impl Iterator<Item = &[u8]> {
        self.shards.iter().map(|shard| &shard.map[..])
    }

    /// Length field and header of the first file.
    pub(super) fn first_header(&self) -> &[u8] {
        let map = self.shards.first().map_or(&[][..], |shard| &shard.map);
        // Opening has checked the length against the file.
        let length = map.first_chunk().map_or(0, |word| u64::from_le_bytes(*word) as usize);
        map.get(..8 + length).unwrap_or(map)
    }

    pub(super) fn files(&self) -> Vec<SourceFile> {
        let file = |shard: &Shard| SourceFile {
            name: shard
                .path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            bytes: shard.map.len() as u64,
        };
        self.shards.iter().map(file).collect()
    }
}

fn safetensors_files(directory: &Path) -> Result<BTreeSet<String>, CheckpointError> {
    let read = |source| CheckpointError::Read {
        path: directory.into(),
        source,
    };
    let mut files = BTreeSet::new();
    for entry in std::fs::read_dir(directory).map_err(read)? {
        if let Ok(name) = entry.map_err(read)?.file_name().into_string()
            && name.ends_with(".safetensors")
        {
            files.insert(name);
        }
    }
    Ok(files)
}

/// Tensor name to file name.
fn read_index(directory: &Path) -> Result<Option<BTreeMap<String, String>>, CheckpointError> {
    let path = directory.join(INDEX);
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(CheckpointError::Read { path, source }),
    };
    let bad = |reason: String| CheckpointError::Index {
        path: path.clone(),
        reason,
    };
    let index: Value = serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
    let map = index.get("weight_map").and_then(Value::as_object);
    let map = map
        .filter(|map| !map.is_empty())
        .ok_or_else(|| bad("expected a non-empty object `weight_map`".into()))?;
    let entry = |(tensor, file): (&String, &Value)| match file.as_str() {
        Some(file) if is_sibling(file) => Ok((tensor.clone(), file.to_owned())),
        _ => Err(bad(format!(
            "`weight_map` places {tensor} in {file}: expected the name of a file beside the index"
        ))),
    };
    map.iter().map(entry).collect::<Result<_, _>>().map(Some)
}

fn is_sibling(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\\', '\0'])
}

fn single_file(directory: &Path, present: &BTreeSet<String>) -> Result<String, CheckpointError> {
    if present.contains(SINGLE) {
        return Ok(SINGLE.into());
    }
    match present.iter().collect::<Vec<_>>().as_slice() {
        [] => Err(CheckpointError::NoWeights {
            directory: directory.into(),
        }),
        [only] => Ok((*only).clone()),
        several => Err(CheckpointError::AmbiguousFiles {
            directory: directory.into(),
            found: format!("{} .safetensors files and no {INDEX}", several.len()),
        }),
    }
}

fn open_shard(
    path: &Path,
    shard: usize,
    expected_tensors: impl Fn() -> usize,
) -> Result<(Shard, Vec<(String, Tensor)>), CheckpointError> {
    let file = File::open(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => CheckpointError::MissingShard {
            path: path.into(),
            tensors: expected_tensors(),
        },
        _ => CheckpointError::Read {
            path: path.into(),
            source,
        },
    })?;
    // SAFETY: the map is read-only and every access is bounds-checked; a file that another process truncates while it is
    // mapped is outside what a program can guard against.
    let map = unsafe { Mmap::map(&file) }.map_err(|source| CheckpointError::Read {
        path: path.into(),
        source,
    })?;
    let (header, metadata) = SafeTensors::read_metadata(&map).map_err(|source| CheckpointError::Header {
        path: path.into(),
        length: map.len(),
        source,
    })?;
    let data = header + size_of::<u64>();
    let tensors = metadata
        .tensors()
        .into_iter()
        .map(|(name, info)| {
            let (begin, end) = info.data_offsets;
            let place = Tensor {
                shard,
                dtype: info.dtype,
                shape: info.shape.clone(),
                begin: data + begin,
                end: data + end,
            };
            (name, place)
        })
        .collect();
    Ok((Shard { path: path.into(), map }, tensors))
}
