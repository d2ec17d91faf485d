//! What can be wrong with an artifact's files, directory and objects. The codes in front are stable names of the rules.

use crate::formats::FormatError;
use std::{io, path::PathBuf};

/// A fault of the directory, the JSON text that describes an artifact.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DirectoryError {
    /// J01: not valid UTF-8 or JSON (NaN, infinity, a byte-order mark and trailing text included).
    #[error("invalid JSON at line {line}, column {column}: {reason}")]
    Json {
        /// Line, from 1.
        line: usize,
        /// Column, from 1 (0 at the end of a line).
        column: usize,
        /// What the parser says.
        reason: String,
    },
    /// J02: a member name twice in one object.
    #[error("duplicate member `{name}`")]
    DuplicateMember {
        /// The name.
        name: String,
    },
    /// J03: another type of value than expected.
    #[error("{label} must be {expected}")]
    Type {
        /// Where.
        label: String,
        /// The type expected.
        expected: &'static str,
    },
    /// J04: a required member is missing.
    #[error("{record} lacks member `{member}`")]
    MissingMember {
        /// The record.
        record: String,
        /// The member.
        member: &'static str,
    },
    /// J05: a member that the record does not have.
    #[error("{record} has unknown member `{member}`")]
    UnknownMember {
        /// The record.
        record: String,
        /// The member.
        member: String,
    },
    /// J06: not a non-empty string without U+0000.
    #[error("{label} must be a non-empty string without U+0000")]
    Id {
        /// Where.
        label: String,
    },
    /// J07: not an integer token in range.
    #[error("{label} must be an integer from {least} to 2^64 - 1, without fraction or exponent")]
    Integer {
        /// Where.
        label: String,
        /// Smallest value allowed.
        least: u64,
    },
    /// D01: an empty `files` array.
    #[error("files is empty")]
    NoFiles,
    /// D02: the entry file has a path.
    #[error("files[0].path must be null")]
    EntryPath,
    /// D03: not the plain name of another file in the same folder.
    #[error("files[{index}].path `{name}` is not a distinct sibling file name")]
    VolumeName {
        /// Index in `files`.
        index: usize,
        /// The name found.
        name: String,
    },
    /// D04: an empty `objects` array.
    #[error("objects is empty")]
    NoObjects,
    /// D05: an object that is neither a tensor nor a resource.
    #[error("object `{object}` has kind `{kind}`, not tensor or resource")]
    Kind {
        /// Object id.
        object: String,
        /// The kind found.
        kind: String,
    },
    /// D06: an object id twice.
    #[error("object id `{object}` is not unique")]
    DuplicateObject {
        /// Object id.
        object: String,
    },
    /// D07: objects out of order, overlapping, or beyond the payload.
    #[error(
        "object `{object}` at offset {offset} with {bytes} bytes does not lie between {previous_end}, where the one \
         before ends, and {payload}, where the payload ends"
    )]
    Placement {
        /// Object id.
        object: String,
        /// Its offset.
        offset: u64,
        /// Its size.
        bytes: u64,
        /// End of the object before it.
        previous_end: u64,
        /// Size of the payload.
        payload: u64,
    },
    /// D08: more than 16 extents, a zero extent, or an overflowing number of elements.
    #[error("object `{object}` has shape {shape:?}; shapes have at most 16 positive extents and 2^64 - 1 elements")]
    Shape {
        /// Object id.
        object: String,
        /// The shape found.
        shape: Vec<u64>,
    },
    /// D09: no `text` component.
    #[error("components lacks `text`")]
    NoText,
    /// D10: a target that is no component.
    #[error("component `{component}` targets `{target}`, which does not exist")]
    Target {
        /// Component id.
        component: String,
        /// The target found.
        target: String,
    },
    /// D11: a proposal outside `text`, or neither full without rows nor indexed with rows.
    #[error("component `{component}` has a proposal that is misplaced or not `full`, or `indexed` with rows")]
    Proposal {
        /// Component id.
        component: String,
    },
    /// D12: `metadata` or `provenance` is not an object.
    #[error("{member} must be an object")]
    OpenRecord {
        /// Which of the two.
        member: &'static str,
    },
    /// D13: `metadata.name` is not an id.
    #[error("metadata.name must be a non-empty string without U+0000")]
    ModelName,
    /// R01: a reference to an object that does not exist.
    #[error("{label} refers to object `{object}`, which does not exist")]
    UnknownObject {
        /// Where.
        label: String,
        /// The id found.
        object: String,
    },
    /// R02: a resource where a tensor is needed, or the reverse.
    #[error("{label} refers to object `{object}`, which is not a {expected}")]
    WrongKind {
        /// Where.
        label: String,
        /// Object id.
        object: String,
        /// The kind needed.
        expected: &'static str,
    },
    /// R03: neither `{"object"}` nor a non-empty `{"parts"}`.
    #[error("{label} must have either `object` alone or a non-empty `parts` alone")]
    BindingForm {
        /// Where.
        label: String,
    },
    /// R04: an element range that is empty, reversed or beyond its parent.
    #[error("{label} takes range [{begin}, {end}) of object `{object}`, which has {elements} elements")]
    PartRange {
        /// Where.
        label: String,
        /// Object id.
        object: String,
        /// First element.
        begin: u64,
        /// One past the last element.
        end: u64,
        /// Elements of the parent.
        elements: u64,
    },
    /// R05: a Use of a parameter without binding.
    #[error("use of `{parameter}` at `{input}`: the parameter has no binding")]
    UnboundUse {
        /// Parameter name.
        parameter: String,
        /// Input position.
        input: String,
    },
    /// R06: two Uses of one parameter at one input.
    #[error("use of `{parameter}` at `{input}` is not unique")]
    DuplicateUse {
        /// Parameter name.
        parameter: String,
        /// Input position.
        input: String,
    },
    /// R07: no such activation policy.
    #[error("use of `{parameter}` at `{input}` has unknown activation policy `{policy}`")]
    Policy {
        /// Parameter name.
        parameter: String,
        /// Input position.
        input: String,
        /// The policy found.
        policy: String,
    },
    /// F11: a sum or product beyond 64 bits.
    #[error("{what} overflows")]
    Overflow {
        /// What was being computed.
        what: String,
    },
}

/// A failure to open, read or write an artifact.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// F01: no room for a header.
    #[error("{}: {bytes} bytes are too short for an artifact", path.display())]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
    },
    /// F02: another kind of file.
    #[error("{}: not the entry file of a v3 artifact", path.display())]
    NotAnEntry {
        /// The file.
        path: PathBuf,
    },
    /// F03: the container before.
    #[error("{}: a v2 artifact, which must be converted to v3 first", path.display())]
    Version2 {
        /// The file.
        path: PathBuf,
    },
    /// F04: the directory does not fit the file.
    #[error("{}: directory length {json_bytes} is out of bounds, the file has room for 1 to {available}", path.display())]
    DirectoryLength {
        /// The file.
        path: PathBuf,
        /// Length found in the header.
        json_bytes: u64,
        /// Bytes after the header.
        available: u64,
    },
    /// F05: the entry is longer or shorter than the directory says.
    #[error("{}: {actual} bytes, but the directory expects {expected}", path.display())]
    EntryLength {
        /// The file.
        path: PathBuf,
        /// Its length.
        actual: u64,
        /// Length that the directory implies.
        expected: u64,
    },
    /// F06: a continuation that is needed cannot be opened.
    #[error("continuation {}: {source}", path.display())]
    MissingVolume {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// F07: a continuation of another artifact or position.
    #[error("continuation {}: belongs to another set or position (volume {index} was expected)", path.display())]
    ForeignVolume {
        /// The file.
        path: PathBuf,
        /// Index it should have.
        index: u64,
    },
    /// F08: a continuation is longer or shorter than the directory says.
    #[error("continuation {}: {actual} bytes, but the directory expects {expected}", path.display())]
    VolumeLength {
        /// The file.
        path: PathBuf,
        /// Its length.
        actual: u64,
        /// Length that the directory implies.
        expected: u64,
    },
    /// F09: a range outside the payload.
    #[error("payload range of {bytes} bytes at {offset} exceeds the payload of {payload}")]
    PayloadRange {
        /// First byte.
        offset: u64,
        /// Length.
        bytes: u64,
        /// Size of the payload.
        payload: u64,
    },
    /// F10: a file ends before the bytes it should hold.
    #[error("payload ends early: {got} of {wanted} bytes at {offset}")]
    Truncated {
        /// Payload offset.
        offset: u64,
        /// Bytes there are.
        got: u64,
        /// Bytes asked for.
        wanted: u64,
    },
    /// F11: a size beyond 64 bits or the address space.
    #[error("{what} overflows")]
    Overflow {
        /// What was being computed.
        what: &'static str,
    },
    /// A fault of the directory.
    #[error("{}: {source}", path.display())]
    Directory {
        /// The entry file.
        path: PathBuf,
        /// The fault.
        source: DirectoryError,
    },
    /// E01 to E05, E07, E08: an object whose format, layout, shape, size, place or words are wrong.
    #[error("object `{object}`: {source}")]
    Object {
        /// Object id.
        object: String,
        /// The fault.
        source: FormatError,
    },
    /// E06: a resource in an unknown encoding.
    #[error("resource object `{object}` has unknown encoding `{encoding}`")]
    ResourceEncoding {
        /// Object id.
        object: String,
        /// The encoding found.
        encoding: String,
    },
    /// A resource where a tensor is needed.
    #[error("object `{object}` is not a tensor")]
    NotATensor {
        /// Object id.
        object: String,
    },
    /// B01: a parameter without binding.
    #[error("parameter `{parameter}` is not in the artifact")]
    UnknownParameter {
        /// Parameter name.
        parameter: String,
    },
    /// B02: a parameter with another shape or number of elements.
    #[error("parameter `{parameter}` must have shape {expected:?}, but the artifact has {found}")]
    ParameterShape {
        /// Parameter name.
        parameter: String,
        /// Shape needed.
        expected: Vec<u64>,
        /// Shape or number of elements found, in words.
        found: String,
    },
    /// B03: a parameter in another format than the one it must have.
    #[error("parameter `{parameter}` must be {expected}, but object `{object}` is {found}")]
    ParameterFormat {
        /// Parameter name.
        parameter: String,
        /// Object id.
        object: String,
        /// Format needed.
        expected: crate::formats::Format,
        /// Format found.
        found: crate::formats::Format,
    },
    /// B04: a projection input without Use.
    #[error("parameter `{parameter}`@`{input}` has no use record")]
    MissingUse {
        /// Parameter name.
        parameter: String,
        /// Input position.
        input: String,
    },
    /// B05: a Use that must state its activation policy and does not.
    #[error("parameter `{parameter}`@`{input}` has no activation policy")]
    MissingPolicy {
        /// Parameter name.
        parameter: String,
        /// Input position.
        input: String,
    },
    /// B06: an auxiliary role without meaning.
    #[error("parameter `{parameter}`@`{input}` has unknown auxiliary role `{role}`")]
    AuxiliaryRole {
        /// Parameter name.
        parameter: String,
        /// Input position.
        input: String,
        /// The role found.
        role: String,
    },
    /// B07: an activation divisor that is not one finite positive f32.
    #[error("parameter `{parameter}`@`{input}`: the activation divisor is not one finite positive fp32 element")]
    ActivationDivisor {
        /// Parameter name.
        parameter: String,
        /// Input position.
        input: String,
    },
    /// T01: a resource that a component does not have.
    #[error("component `{component}` has no resource `{role}`")]
    MissingResource {
        /// Component id.
        component: String,
        /// Role of the resource.
        role: String,
    },
    /// An output slice whose length is not the parameter's.
    #[error("parameter `{parameter}` has {elements} elements, the output {length}")]
    OutputLength {
        /// Parameter name.
        parameter: String,
        /// Elements of the parameter.
        elements: u64,
        /// Length of the output.
        length: u64,
    },
    /// The volume limit leaves no room for payload.
    #[error("a volume limit of {limit} bytes leaves no room for payload after {framing} bytes of framing")]
    VolumeLimit {
        /// The limit.
        limit: u64,
        /// Bytes before the payload.
        framing: u64,
    },
    /// A file that exists and is not overwritten.
    #[error("{} exists already", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A file that another run is writing.
    #[error("another run is writing {}", path.display())]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// A path without a plain UTF-8 file name.
    #[error("{} has no UTF-8 file name", path.display())]
    FileName {
        /// The path.
        path: PathBuf,
    },
    /// More bytes than an object was declared with, or an object that does not exist.
    #[error("object {object}: {written} bytes written of {expected} declared")]
    Written {
        /// Object id, or its index when there is none.
        object: String,
        /// Bytes written, with those refused.
        written: u64,
        /// Bytes declared.
        expected: u64,
    },
}
