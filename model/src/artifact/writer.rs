//! Writes an artifact: declare every object, bind parameters, then append the objects' bytes.
//!
//! Sizes are known before any byte is written, so files get their final length at once and gaps stay zero. Everything
//! goes to temporary names beside the target; [`ObjectStream::finish`] renames the continuations first and the entry
//! last, and anything short of that removes what was written.

use super::directory::{Binding, Component, Directory, Object, ObjectContent, Use, VolumeFile};
use super::pending::{PendingFile, publish};
use super::{ArtifactError, ENTRY_MAGIC, HEADER_BYTES, PAYLOAD_ALIGNMENT, VOLUME_MAGIC};
use crate::formats::{self, Format, FormatError, align_up};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Largest file written unless told otherwise, framing included: 32 GB, which common hosts still take.
pub const DEFAULT_VOLUME_LIMIT: u64 = 32_000_000_000;

/// How to write.
#[derive(Debug, Clone, Copy)]
pub struct WriterOptions {
    /// Largest file in bytes, framing included.
    pub volume_limit: u64,
    /// The artifact id; random when `None`.
    pub artifact_id: Option<[u8; 16]>,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self {
            volume_limit: DEFAULT_VOLUME_LIMIT,
            artifact_id: None,
        }
    }
}

/// Collects what an artifact will hold.
#[derive(Debug)]
pub struct Writer {
    options: WriterOptions,
    directory: Directory,
    payload: u64,
}

impl Writer {
    /// A writer without objects.
    pub fn new(options: WriterOptions) -> Self {
        let directory = Directory {
            components: BTreeMap::new(),
            objects: Vec::new(),
            bindings: BTreeMap::new(),
            uses: Vec::new(),
            files: Vec::new(),
            metadata: Map::new(),
            provenance: Map::new(),
        };
        Self {
            options,
            directory,
            payload: 0,
        }
    }

    fn declare(
        &mut self,
        id: &str,
        bytes: u64,
        alignment: u64,
        content: ObjectContent,
    ) -> Result<usize, ArtifactError> {
        let overflow = || ArtifactError::Overflow {
            what: "the payload size",
        };
        let offset = align_up(self.payload, alignment).ok_or_else(overflow)?;
        self.payload = offset.checked_add(bytes).ok_or_else(overflow)?;
        self.directory.objects.push(Object {
            id: id.to_owned(),
            offset,
            bytes,
            content,
        });
        Ok(self.directory.objects.len() - 1)
    }

    /// Declares the next tensor and returns its index, which bindings and [`ObjectStream::append`] take. `divisors` is 1
    /// except for nvfp4 with one divisor per row block.
    ///
    /// # Errors
    /// When the format does not allow the shape or a size overflows.
    pub fn declare_tensor(
        &mut self,
        id: &str,
        format: Format,
        shape: &[u64],
        divisors: u64,
    ) -> Result<usize, ArtifactError> {
        let layout = format.layout();
        let bytes = formats::encoded_size(format, layout, shape, divisors).map_err(|source| ArtifactError::Object {
            object: id.to_owned(),
            source,
        })?;
        self.declare(
            id,
            bytes,
            layout.alignment(),
            ObjectContent::tensor(format, shape, divisors),
        )
    }

    /// Declares the next resource, such as `tokenizer.json`, of this many bytes and returns its index.
    ///
    /// # Errors
    /// When it is empty or a size overflows.
    pub fn declare_resource(&mut self, id: &str, bytes: u64) -> Result<usize, ArtifactError> {
        if bytes == 0 {
            let source = FormatError::Size { expected: 1, actual: 0 };
            return Err(ArtifactError::Object {
                object: id.to_owned(),
                source,
            });
        }
        self.declare(id, bytes, 1, ObjectContent::raw_bytes())
    }

    /// Sets a component.
    pub fn set_component(&mut self, name: &str, component: Component) {
        self.directory.components.insert(name.to_owned(), component);
    }

    /// Binds a parameter.
    pub fn bind(&mut self, parameter: &str, binding: Binding) {
        self.directory.bindings.insert(parameter.to_owned(), binding);
    }

    /// Adds a Use.
    pub fn add_use(&mut self, item: Use) {
        self.directory.uses.push(item);
    }

    /// Free members; set `name` to the model's public name.
    pub fn metadata_mut(&mut self) -> &mut Map<String, Value> {
        &mut self.directory.metadata
    }

    /// Free members about the origin.
    pub fn provenance_mut(&mut self) -> &mut Map<String, Value> {
        &mut self.directory.provenance
    }

    /// Objects declared so far.
    pub fn objects(&self) -> &[Object] {
        &self.directory.objects
    }

    /// Checks the directory, lays out the files and opens them under temporary names beside `path`.
    ///
    /// # Errors
    /// When the directory breaks a rule of its own, a file exists already or cannot be created, or the volume limit
    /// leaves no room for payload.
    pub fn begin(mut self, path: impl AsRef<Path>) -> Result<ObjectStream, ArtifactError> {
        let path = path.as_ref();
        let entry_name = path
            .file_name()
            .and_then(|name| name.to_str())
            .ok_or_else(|| ArtifactError::FileName { path: path.to_owned() })?;
        let (json, entry_start) = self.lay_out(entry_name)?;
        // The reader's own rules decide whether this directory is one.
        Directory::parse(json.as_bytes(), entry_name).map_err(|source| ArtifactError::Directory {
            path: path.to_owned(),
            source,
        })?;
        let id = self.options.artifact_id.unwrap_or_else(random_id);
        let mut stream = ObjectStream {
            volumes: Vec::new(),
            written: vec![0; self.directory.objects.len()],
            objects: self.directory.objects,
            beside: Vec::new(),
        };
        let mut begin = 0;
        for (index, file) in self.directory.files.iter().enumerate() {
            let (target, start) = match &file.path {
                Some(name) => (path.with_file_name(name), PAYLOAD_ALIGNMENT),
                None => (path.to_owned(), entry_start),
            };
            let mut volume = OutputVolume::create(&target, begin, file.payload_bytes, start)?;
            let (magic, number) = match index {
                0 => (ENTRY_MAGIC, json.len() as u64),
                _ => (VOLUME_MAGIC, index as u64),
            };
            let header = [&magic[..], &number.to_le_bytes(), &id].concat();
            volume.write_at(0, &header)?;
            if index == 0 {
                volume.write_at(HEADER_BYTES, json.as_bytes())?;
            }
            begin += file.payload_bytes;
            stream.volumes.push(volume);
        }
        Ok(stream)
    }

    /// Fixes the `files` table and the padded directory text; returns it with the payload's start in the entry.
    ///
    /// The table is part of the text whose length decides the table, so room is reserved and grown until both fit.
    fn lay_out(&mut self, entry_name: &str) -> Result<(String, u64), ArtifactError> {
        let overflow = || ArtifactError::Overflow {
            what: "the directory size",
        };
        let reserve_for = |json: &str| -> Result<u64, ArtifactError> {
            let end = align_up(HEADER_BYTES + json.len() as u64, PAYLOAD_ALIGNMENT).ok_or_else(overflow)?;
            Ok(end - HEADER_BYTES)
        };
        self.directory.files = vec![VolumeFile {
            path: None,
            payload_bytes: self.payload,
        }];
        let mut reserve = reserve_for(&self.directory.to_json())?;
        loop {
            let entry_start = HEADER_BYTES + reserve;
            self.directory.files = split(self.payload, entry_start, self.options.volume_limit, entry_name)?;
            let mut json = self.directory.to_json();
            if json.len() as u64 <= reserve {
                json.extend(std::iter::repeat_n(' ', reserve as usize - json.len()));
                return Ok((json, entry_start));
            }
            reserve = reserve_for(&json)?;
        }
    }
}

/// The files that hold `payload` bytes under the limit. Every file but the last takes a multiple of 4096 bytes.
fn split(payload: u64, entry_start: u64, limit: u64, entry_name: &str) -> Result<Vec<VolumeFile>, ArtifactError> {
    if entry_start.checked_add(payload).is_some_and(|end| end <= limit) {
        return Ok(vec![VolumeFile {
            path: None,
            payload_bytes: payload,
        }]);
    }
    let capacity = |framing: u64| {
        let room = limit.saturating_sub(framing) / PAYLOAD_ALIGNMENT * PAYLOAD_ALIGNMENT;
        if room == 0 {
            Err(ArtifactError::VolumeLimit { limit, framing })
        } else {
            Ok(room)
        }
    };
    let (first, following) = (capacity(entry_start)?, capacity(PAYLOAD_ALIGNMENT)?);
    let mut files = vec![VolumeFile {
        path: None,
        payload_bytes: first.min(payload),
    }];
    let mut left = payload - files[0].payload_bytes;
    while left > 0 {
        let taken = left.min(following);
        let path = format!("{entry_name}.part-{:04}", files.len());
        files.push(VolumeFile {
            path: Some(path),
            payload_bytes: taken,
        });
        left -= taken;
    }
    Ok(files)
}

/// A random version 4 UUID from the standard library's per-process hash keys.
fn random_id() -> [u8; 16] {
    let mut id = [0; 16];
    for (half, bytes) in id.chunks_exact_mut(8).enumerate() {
        bytes.copy_from_slice(
            &RandomState::new()
                .hash_one((half, std::time::SystemTime::now()))
                .to_le_bytes(),
        );
    }
    id[6] = (id[6] & 0x0F) | 0x40;
    id[8] = (id[8] & 0x3F) | 0x80;
    id
}

/// A file being written.
#[derive(Debug)]
struct OutputVolume {
    file: PendingFile,
    /// Payload offset of its first payload byte.
    begin: u64,
    bytes: u64,
    /// Where its payload starts in the file.
    start: u64,
}

impl OutputVolume {
    fn create(target: &Path, begin: u64, bytes: u64, start: u64) -> Result<Self, ArtifactError> {
        let file = PendingFile::create(target)?;
        let length = start
            .checked_add(bytes)
            .ok_or(ArtifactError::Overflow { what: "a file length" })?;
        file.set_len(length)?;
        Ok(Self {
            file,
            begin,
            bytes,
            start,
        })
    }

    fn write_at(&mut self, position: u64, bytes: &[u8]) -> Result<(), ArtifactError> {
        self.file
            .seek(SeekFrom::Start(position))
            .and_then(|_| self.file.write_all(bytes))
            .map_err(|source| self.file.io(source))
    }
}

/// Takes the bytes of the declared objects. Dropped before [`ObjectStream::finish`] succeeds, it removes its files.
#[derive(Debug)]
pub struct ObjectStream {
    volumes: Vec<OutputVolume>,
    objects: Vec<Object>,
    written: Vec<u64>,
    beside: Vec<PendingFile>,
}

impl ObjectStream {
    /// Appends bytes to an object. Objects may be written in any order and in any number of pieces.
    ///
    /// # Errors
    /// When there is no such object, it would become longer than declared, or writing fails.
    pub fn append(&mut self, object: usize, bytes: &[u8]) -> Result<(), ArtifactError> {
        let length = bytes.len() as u64;
        let Some(declared) = self.objects.get(object) else {
            return Err(ArtifactError::Written {
                object: object.to_string(),
                written: length,
                expected: 0,
            });
        };
        let before = self.written[object];
        if length > declared.bytes - before {
            let written = before.saturating_add(length);
            return Err(ArtifactError::Written {
                object: declared.id.clone(),
                written,
                expected: declared.bytes,
            });
        }
        let (mut position, mut rest) = (declared.offset + before, bytes);
        let first = self.volumes.partition_point(|volume| volume.begin <= position) - 1;
        for volume in &mut self.volumes[first..] {
            let local = position - volume.begin;
            let (now, after) = rest.split_at(rest.len().min((volume.bytes - local) as usize));
            volume.write_at(volume.start + local, now)?;
            position += now.len() as u64;
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        self.written[object] += length;
        Ok(())
    }

    /// Adds a complete file that belongs to the artifact and gets its name with it, before the entry.
    pub(crate) fn accompany(&mut self, file: PendingFile) {
        self.beside.push(file);
    }

    /// Checks that every object is complete, flushes, and gives the files their names, the entry last. Returns the
    /// paths, entry first.
    ///
    /// # Errors
    /// When an object is incomplete, a target name exists by now, or flushing or renaming fails; nothing is left then.
    pub fn finish(self) -> Result<Vec<PathBuf>, ArtifactError> {
        for (object, written) in self.objects.iter().zip(&self.written) {
            if *written != object.bytes {
                let (written, expected) = (*written, object.bytes);
                return Err(ArtifactError::Written {
                    object: object.id.clone(),
                    written,
                    expected,
                });
            }
        }
        let files = self.volumes.into_iter().map(|volume| volume.file);
        let files: Vec<PendingFile> = files.chain(self.beside).collect();
        files.iter().try_for_each(PendingFile::sync)?;
        publish(files)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_limit_leaves_whole_blocks_of_payload() {
        let files = split(70_000_000_000, 65_536, DEFAULT_VOLUME_LIMIT, "x.ninfer").unwrap();
        let sizes: Vec<u64> = files.iter().map(|file| file.payload_bytes).collect();
        assert_eq!(
            sizes,
            [
                31_999_934_464,
                31_999_995_904,
                70_000_000_000 - 31_999_934_464 - 31_999_995_904
            ]
        );
        assert_eq!(files[0].path, None);
        assert_eq!(files[2].path.as_deref(), Some("x.ninfer.part-0002"));
        assert_eq!(
            split(32_000_000_000 - 65_536, 65_536, DEFAULT_VOLUME_LIMIT, "x")
                .unwrap()
                .len(),
            1
        );
        assert_eq!(
            split(32_000_000_001 - 65_536, 65_536, DEFAULT_VOLUME_LIMIT, "x")
                .unwrap()
                .len(),
            2
        );
        let many = split(10_001 * 4096, 4096, 8192, "x.infernix").unwrap();
        assert_eq!(many[10_000].path.as_deref(), Some("x.infernix.part-10000"));
    }
}
