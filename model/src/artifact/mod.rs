//! The v3 `.ninfer` artifact (also published as `.infernix`): one entry file, perhaps continuation volumes.
//!
//! | bytes of the entry | content |
//! |---|---|
//! | 0..8 | magic `NINFER` 0 3 |
//! | 8..16 | `json_bytes`, u64 |
//! | 16..32 | artifact id |
//! | 32..32+json_bytes | the directory, JSON, perhaps padded with spaces |
//! | from the next multiple of 4096 | the first segment of the payload |
//!
//! A continuation starts with magic `NINPRT` 0 3, its index as u64 and the artifact id; its segment of the payload
//! starts at 4096. The payload is the concatenation of the segments; object offsets count in it, and an object may
//! cross a file boundary. Numbers are little-endian.
//!
//! [`Artifact`] reads, [`Writer`] writes, [`Directory`] is what both agree on.

mod directory;
mod error;
mod json;
mod parse;
mod pending;
mod reader;
mod volumes;
mod writer;

pub use directory::{Binding, Component, Directory, Encoding, Object, ObjectContent, Part, Proposal, Use, VolumeFile};
pub use error::{ArtifactError, DirectoryError};
pub use json::parse_strict;
pub(crate) use pending::PendingFile;
#[cfg(test)]
pub(crate) use pending::publish;
pub(crate) use reader::ACTIVATION_DIVISOR;
pub use reader::{Artifact, StoredPart};
pub use writer::{DEFAULT_VOLUME_LIMIT, ObjectStream, Writer, WriterOptions};

/// First bytes of an entry file.
const ENTRY_MAGIC: [u8; 8] = *b"NINFER\x00\x03";
/// First bytes of a continuation volume.
const VOLUME_MAGIC: [u8; 8] = *b"NINPRT\x00\x03";
/// Bytes of either header.
const HEADER_BYTES: u64 = 32;
/// Alignment of the payload within a file.
const PAYLOAD_ALIGNMENT: u64 = 4096;
/// The only encoding of resources: the bytes themselves.
const RAW_BYTES: &str = "raw_bytes_v1";
