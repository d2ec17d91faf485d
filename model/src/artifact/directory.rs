//! What an artifact holds: components, objects, bindings, Uses, files. References are indices into `objects`.

use super::{ArtifactError, RAW_BYTES};
use crate::{
    formats::{self, Format, FormatError, Layout},
    source::ActivationPolicy,
};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// The contents of the JSON directory.
#[derive(Debug, Clone, PartialEq)]
pub struct Directory {
    /// Component by id; `text` is always there.
    pub components: BTreeMap<String, Component>,
    /// Objects in payload order.
    pub objects: Vec<Object>,
    /// Where each logical parameter lies.
    pub bindings: BTreeMap<String, Binding>,
    /// Activation permissions, in order.
    pub uses: Vec<Use>,
    /// The entry, then the continuation volumes.
    pub files: Vec<VolumeFile>,
    /// Free members; `name`, if there, is the model's public name.
    pub metadata: Map<String, Value>,
    /// Free members about the artifact's origin.
    pub provenance: Map<String, Value>,
}

/// A part of the model that can be loaded by itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Component {
    /// Configuration, a JSON object.
    pub config: Value,
    /// The component this one accompanies.
    pub target: Option<String>,
    /// Resource object by role.
    pub resources: BTreeMap<String, usize>,
    /// The head of speculative decoding, on `text` only.
    pub proposal: Option<Proposal>,
}

/// Which tokens a speculative head proposes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proposal {
    /// All of the vocabulary.
    Full,
    /// A list of this many tokens.
    Indexed {
        /// Rows of the head.
        rows: u64,
    },
}

/// A tensor or resource in the payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Unique id.
    pub id: String,
    /// Offset in the logical payload.
    pub offset: u64,
    /// Encoded size.
    pub bytes: u64,
    /// What it is.
    pub content: ObjectContent,
}

/// What an object is. Names that this version does not know are kept until someone asks for the encoding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectContent {
    /// Numbers.
    Tensor {
        /// Logical extents, C order.
        shape: Vec<u64>,
        /// Name of the numeric format.
        format: String,
        /// Name of the layout.
        layout: String,
        /// Matrix divisors; 1 except for nvfp4 tensors with one per row block.
        divisors: u64,
    },
    /// A file such as `tokenizer.json`.
    Resource {
        /// Name of the encoding.
        encoding: String,
    },
}

/// How a tensor is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoding {
    /// Numeric format.
    pub format: Format,
    /// Storage layout.
    pub layout: Layout,
    /// Logical extents, C order.
    pub shape: Vec<u64>,
    /// Matrix divisors.
    pub divisors: u64,
}

impl Object {
    /// How this tensor is stored, with format, layout, shape, size and alignment checked.
    ///
    /// # Errors
    /// E01 to E05, or [`ArtifactError::NotATensor`].
    pub fn encoding(&self) -> Result<Encoding, ArtifactError> {
        let ObjectContent::Tensor {
            shape,
            format,
            layout,
            divisors,
        } = &self.content
        else {
            return Err(ArtifactError::NotATensor {
                object: self.id.clone(),
            });
        };
        let checked = || -> Result<Encoding, FormatError> {
            let (format, layout): (Format, Layout) = (format.parse()?, layout.parse()?);
            let expected = formats::encoded_size(format, layout, shape, *divisors)?;
            if expected != self.bytes {
                return Err(FormatError::Size {
                    expected,
                    actual: self.bytes,
                });
            }
            let alignment = layout.alignment();
            if !self.offset.is_multiple_of(alignment) {
                return Err(FormatError::Alignment {
                    offset: self.offset,
                    alignment,
                });
            }
            Ok(Encoding {
                format,
                layout,
                shape: shape.clone(),
                divisors: *divisors,
            })
        };
        checked().map_err(|source| ArtifactError::Object {
            object: self.id.clone(),
            source,
        })
    }

    /// Elements of a tensor; `None` for a resource or an overflowing shape.
    pub fn elements(&self) -> Option<u64> {
        match &self.content {
            ObjectContent::Tensor { shape, .. } => formats::element_count(shape).ok(),
            ObjectContent::Resource { .. } => None,
        }
    }
}

/// Where a logical parameter lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Binding {
    /// A whole tensor, of the parameter's shape.
    Whole {
        /// Index of the object.
        object: usize,
    },
    /// The concatenation of element ranges.
    Parts(Vec<Part>),
}

/// A range of a tensor's logical elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Index of the object.
    pub object: usize,
    /// First element.
    pub begin: u64,
    /// One past the last element.
    pub end: u64,
}

/// The activation permission of a parameter at one input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    /// Parameter name.
    pub parameter: String,
    /// Input position.
    pub input: String,
    /// Most that the activation may be rounded.
    pub policy: Option<ActivationPolicy>,
    /// Tensors by role.
    pub auxiliaries: BTreeMap<String, Binding>,
}

/// One file of the set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeFile {
    /// Sibling file name; `None` for the entry.
    pub path: Option<String>,
    /// Bytes of the payload in this file.
    pub payload_bytes: u64,
}

/// Name of a policy in the directory.
pub(super) const fn policy_name(policy: ActivationPolicy) -> &'static str {
    match policy {
        ActivationPolicy::A16Only => "A16Only",
        ActivationPolicy::AllowA8 => "AllowA8",
        ActivationPolicy::AllowA4 => "AllowA4",
    }
}

impl Directory {
    /// The compact JSON text; parsing it gives this directory back.
    pub fn to_json(&self) -> String {
        let id = |object: usize| self.objects.get(object).map_or("", |object| object.id.as_str());
        let binding = |binding: &Binding| match binding {
            Binding::Whole { object } => json!({ "object": id(*object) }),
            Binding::Parts(parts) => {
                let parts: Vec<Value> = parts
                    .iter()
                    .map(|part| json!({ "object": id(part.object), "range": [part.begin, part.end] }))
                    .collect();
                json!({ "parts": parts })
            }
        };
        let components: Map<String, Value> = self
            .components
            .iter()
            .map(|(name, component)| {
                let mut record = json!({ "config": component.config });
                if let Some(target) = &component.target {
                    record["target"] = json!(target);
                }
                if !component.resources.is_empty() {
                    let resources: Map<String, Value> = component
                        .resources
                        .iter()
                        .map(|(role, object)| (role.clone(), json!(id(*object))))
                        .collect();
                    record["resources"] = Value::Object(resources);
                }
                match component.proposal {
                    Some(Proposal::Full) => record["proposal"] = json!({ "domain": "full" }),
                    Some(Proposal::Indexed { rows }) => {
                        record["proposal"] = json!({ "domain": "indexed", "rows": rows });
                    }
                    None => {}
                }
                (name.clone(), record)
            })
            .collect();
        let objects: Vec<Value> = self.objects.iter().map(object_record).collect();
        let bindings: Map<String, Value> = self
            .bindings
            .iter()
            .map(|(name, item)| (name.clone(), binding(item)))
            .collect();
        let uses: Vec<Value> = self
            .uses
            .iter()
            .map(|item| {
                let mut record = json!({ "parameter": item.parameter, "input": item.input });
                if let Some(policy) = item.policy {
                    record["activation_policy"] = json!(policy_name(policy));
                }
                if !item.auxiliaries.is_empty() {
                    let auxiliaries: Map<String, Value> = item
                        .auxiliaries
                        .iter()
                        .map(|(role, item)| (role.clone(), binding(item)))
                        .collect();
                    record["auxiliaries"] = Value::Object(auxiliaries);
                }
                record
            })
            .collect();
        let files: Vec<Value> = self
            .files
            .iter()
            .map(|file| json!({ "path": file.path, "payload_bytes": file.payload_bytes }))
            .collect();
        let mut root = json!({
            "components": components, "objects": objects, "bindings": bindings, "uses": uses, "files": files,
        });
        for (name, members) in [("metadata", &self.metadata), ("provenance", &self.provenance)] {
            if !members.is_empty() {
                root[name] = Value::Object(members.clone());
            }
        }
        root.to_string()
    }
}

fn object_record(object: &Object) -> Value {
    match &object.content {
        ObjectContent::Tensor {
            shape,
            format,
            layout,
            divisors,
        } => {
            let mut record = json!({
                "id": object.id, "kind": "tensor", "shape": shape, "format": format, "layout": layout,
                "offset": object.offset, "bytes": object.bytes,
            });
            if *divisors != 1 {
                record["divisors"] = json!(divisors);
            }
            record
        }
        ObjectContent::Resource { encoding } => json!({
            "id": object.id, "kind": "resource", "encoding": encoding, "offset": object.offset, "bytes": object.bytes,
        }),
    }
}

impl ObjectContent {
    /// A tensor of a known format.
    pub(super) fn tensor(format: Format, shape: &[u64], divisors: u64) -> Self {
        Self::Tensor {
            shape: shape.to_vec(),
            format: format.name().to_owned(),
            layout: format.layout().name().to_owned(),
            divisors,
        }
    }

    /// A resource stored as it is.
    pub(super) fn raw_bytes() -> Self {
        Self::Resource {
            encoding: RAW_BYTES.to_owned(),
        }
    }
}
