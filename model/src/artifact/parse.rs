//! From JSON text to a [`Directory`]: closed records, ids, integers, references. Order of checks: root, files, objects,
//! components, bindings, Uses, metadata and provenance.

use super::directory::{Binding, Component, Directory, Object, ObjectContent, Part, Proposal, Use, VolumeFile};
use super::{DirectoryError, parse_strict};
use crate::formats::direct::MAX_RANK;
use crate::{formats::element_count, source::ActivationPolicy};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Display;

/// Where a value stands, for messages; formatted only when one is needed.
type Label<'a> = &'a dyn Display;

impl Directory {
    /// Parses and checks the directory of the entry file named `entry_name`.
    ///
    /// # Errors
    /// The first fault found.
    pub fn parse(json: &[u8], entry_name: &str) -> Result<Self, DirectoryError> {
        let mut root = Record::new(parse_strict(json)?, &"the directory")?;
        let components = root.take("components")?;
        let objects = root.take("objects")?;
        let bindings = root.take("bindings")?;
        let uses = root.take("uses")?;
        let files = root.take("files")?;
        let metadata = root.take_optional("metadata");
        let provenance = root.take_optional("provenance");
        root.finish()?;

        let files = parse_files(array(files, &"files")?, entry_name)?;
        let payload = files
            .iter()
            .try_fold(0u64, |sum, file| sum.checked_add(file.payload_bytes))
            .ok_or_else(|| DirectoryError::Overflow {
                what: "the payload size".into(),
            })?;
        let objects = parse_objects(array(objects, &"objects")?, payload)?;
        let index = objects
            .iter()
            .enumerate()
            .map(|(at, object)| (object.id.as_str(), at))
            .collect();
        let references = References {
            objects: &objects,
            index,
        };
        let components = parse_components(object(components, &"components")?, &references)?;
        let bindings = object(bindings, &"bindings")?
            .into_iter()
            .map(|(name, binding)| {
                require_id(&name, &"a parameter name")?;
                let binding = references.binding(binding, &format_args!("binding `{name}`"))?;
                Ok((name, binding))
            })
            .collect::<Result<BTreeMap<_, _>, DirectoryError>>()?;
        let uses = parse_uses(array(uses, &"uses")?, &bindings, &references)?;
        drop(references);
        let metadata = open_record(metadata, "metadata")?;
        if let Some(name) = metadata.get("name") {
            name.as_str()
                .filter(|name| is_id(name))
                .ok_or(DirectoryError::ModelName)?;
        }
        let provenance = open_record(provenance, "provenance")?;
        Ok(Self {
            components,
            objects,
            bindings,
            uses,
            files,
            metadata,
            provenance,
        })
    }
}

/// A closed record: members are taken by name, and none may be left.
struct Record<'a> {
    label: Label<'a>,
    members: Map<String, Value>,
}

impl<'a> Record<'a> {
    fn new(value: Value, label: Label<'a>) -> Result<Self, DirectoryError> {
        Ok(Self {
            label,
            members: object(value, label)?,
        })
    }

    fn take(&mut self, member: &'static str) -> Result<Value, DirectoryError> {
        self.take_optional(member).ok_or_else(|| DirectoryError::MissingMember {
            record: self.label.to_string(),
            member,
        })
    }

    fn take_optional(&mut self, member: &str) -> Option<Value> {
        self.members.swap_remove(member)
    }

    fn take_id(&mut self, member: &'static str) -> Result<String, DirectoryError> {
        let value = self.take(member)?;
        id(value, &format_args!("{}.{member}", self.label))
    }

    fn take_integer(&mut self, member: &'static str, least: u64) -> Result<u64, DirectoryError> {
        let value = self.take(member)?;
        integer(&value, least, &format_args!("{}.{member}", self.label))
    }

    fn finish(self) -> Result<(), DirectoryError> {
        match self.members.into_iter().next() {
            Some((member, _)) => Err(DirectoryError::UnknownMember {
                record: self.label.to_string(),
                member,
            }),
            None => Ok(()),
        }
    }
}

fn object(value: Value, label: Label<'_>) -> Result<Map<String, Value>, DirectoryError> {
    match value {
        Value::Object(members) => Ok(members),
        _ => Err(DirectoryError::Type {
            label: label.to_string(),
            expected: "an object",
        }),
    }
}

fn array(value: Value, label: Label<'_>) -> Result<Vec<Value>, DirectoryError> {
    match value {
        Value::Array(items) => Ok(items),
        _ => Err(DirectoryError::Type {
            label: label.to_string(),
            expected: "an array",
        }),
    }
}

fn is_id(text: &str) -> bool {
    !text.is_empty() && !text.contains('\0')
}

fn require_id(text: &str, label: Label<'_>) -> Result<(), DirectoryError> {
    if is_id(text) {
        Ok(())
    } else {
        Err(DirectoryError::Id {
            label: label.to_string(),
        })
    }
}

fn id(value: Value, label: Label<'_>) -> Result<String, DirectoryError> {
    match value {
        Value::String(text) if is_id(&text) => Ok(text),
        _ => Err(DirectoryError::Id {
            label: label.to_string(),
        }),
    }
}

fn integer(value: &Value, least: u64, label: Label<'_>) -> Result<u64, DirectoryError> {
    value
        .as_u64()
        .filter(|value| *value >= least)
        .ok_or_else(|| DirectoryError::Integer {
            label: label.to_string(),
            least,
        })
}

fn open_record(value: Option<Value>, member: &'static str) -> Result<Map<String, Value>, DirectoryError> {
    match value {
        None => Ok(Map::new()),
        Some(Value::Object(members)) => Ok(members),
        Some(_) => Err(DirectoryError::OpenRecord { member }),
    }
}

fn parse_files(items: Vec<Value>, entry_name: &str) -> Result<Vec<VolumeFile>, DirectoryError> {
    if items.is_empty() {
        return Err(DirectoryError::NoFiles);
    }
    let mut names = HashSet::from([entry_name.to_owned()]);
    let mut files = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let label = format_args!("files[{index}]");
        let mut record = Record::new(item, &label)?;
        let path = record.take("path")?;
        let payload_bytes = record.take_integer("payload_bytes", 1)?;
        record.finish()?;
        let path = if index == 0 {
            if path != Value::Null {
                return Err(DirectoryError::EntryPath);
            }
            None
        } else {
            let name = id(path, &format_args!("{label}.path"))?;
            if name == "." || name == ".." || name.contains(['/', '\\']) || !names.insert(name.clone()) {
                return Err(DirectoryError::VolumeName { index, name });
            }
            Some(name)
        };
        files.push(VolumeFile { path, payload_bytes });
    }
    Ok(files)
}

fn parse_objects(items: Vec<Value>, payload: u64) -> Result<Vec<Object>, DirectoryError> {
    if items.is_empty() {
        return Err(DirectoryError::NoObjects);
    }
    let mut ids = HashSet::with_capacity(items.len());
    let mut objects = Vec::with_capacity(items.len());
    let mut previous_end = 0;
    for (index, item) in items.into_iter().enumerate() {
        let object = parse_object(item, &format_args!("objects[{index}]"))?;
        let end = object
            .offset
            .checked_add(object.bytes)
            .ok_or_else(|| DirectoryError::Overflow {
                what: format!("the end of object `{}`", object.id),
            })?;
        if object.offset < previous_end || end > payload {
            let Object { id, offset, bytes, .. } = object;
            return Err(DirectoryError::Placement {
                object: id,
                offset,
                bytes,
                previous_end,
                payload,
            });
        }
        previous_end = end;
        if !ids.insert(object.id.clone()) {
            return Err(DirectoryError::DuplicateObject { object: object.id });
        }
        objects.push(object);
    }
    Ok(objects)
}

fn parse_object(item: Value, label: Label<'_>) -> Result<Object, DirectoryError> {
    let mut record = Record::new(item, label)?;
    let object_id = record.take_id("id")?;
    let kind = record.take_id("kind")?;
    let content = match kind.as_str() {
        "tensor" => {
            let extents = array(record.take("shape")?, &format_args!("{label}.shape"))?;
            let shape = extents
                .iter()
                .map(|extent| extent.as_u64().ok_or(extent))
                .collect::<Result<Vec<u64>, _>>()
                .map_err(|_| DirectoryError::Integer {
                    label: format!("{label}.shape"),
                    least: 1,
                })?;
            if shape.len() > MAX_RANK || shape.contains(&0) || element_count(&shape).is_err() {
                return Err(DirectoryError::Shape {
                    object: object_id,
                    shape,
                });
            }
            let format = record.take_id("format")?;
            let layout = record.take_id("layout")?;
            // Any other format with this member has an unknown member.
            let divisors = match record.members.get("divisors") {
                Some(_) if format == "nvfp4" => record.take_integer("divisors", 1)?,
                _ => 1,
            };
            ObjectContent::Tensor {
                shape,
                format,
                layout,
                divisors,
            }
        }
        "resource" => ObjectContent::Resource {
            encoding: record.take_id("encoding")?,
        },
        _ => {
            return Err(DirectoryError::Kind {
                object: object_id,
                kind,
            });
        }
    };
    let offset = record.take_integer("offset", 0)?;
    let bytes = record.take_integer("bytes", 1)?;
    record.finish()?;
    Ok(Object {
        id: object_id,
        offset,
        bytes,
        content,
    })
}

/// The objects that components, bindings and Uses refer to by id.
struct References<'a> {
    objects: &'a [Object],
    index: HashMap<&'a str, usize>,
}

impl References<'_> {
    fn resolve(&self, object: String, expected: &'static str, label: Label<'_>) -> Result<usize, DirectoryError> {
        let Some(&at) = self.index.get(object.as_str()) else {
            return Err(DirectoryError::UnknownObject {
                label: label.to_string(),
                object,
            });
        };
        let kind = match self.objects[at].content {
            ObjectContent::Tensor { .. } => "tensor",
            ObjectContent::Resource { .. } => "resource",
        };
        if kind == expected {
            Ok(at)
        } else {
            Err(DirectoryError::WrongKind {
                label: label.to_string(),
                object,
                expected,
            })
        }
    }

    fn binding(&self, value: Value, label: Label<'_>) -> Result<Binding, DirectoryError> {
        let form = || DirectoryError::BindingForm {
            label: label.to_string(),
        };
        let mut members = object(value, label)?;
        if members.len() != 1 {
            return Err(form());
        }
        if let Some(whole) = members.swap_remove("object") {
            let object = self.resolve(id(whole, &format_args!("{label}.object"))?, "tensor", label)?;
            return Ok(Binding::Whole { object });
        }
        let parts = members.swap_remove("parts").ok_or_else(form)?;
        let parts = array(parts, &format_args!("{label}.parts"))?;
        if parts.is_empty() {
            return Err(form());
        }
        let parts = parts
            .into_iter()
            .enumerate()
            .map(|(at, part)| self.part(part, &format_args!("{label} part {at}")))
            .collect::<Result<Vec<Part>, _>>()?;
        parts
            .iter()
            .try_fold(0u64, |sum, part| sum.checked_add(part.end - part.begin))
            .ok_or_else(|| DirectoryError::Overflow {
                what: format!("the number of elements of {label}"),
            })?;
        Ok(Binding::Parts(parts))
    }

    fn part(&self, value: Value, label: Label<'_>) -> Result<Part, DirectoryError> {
        let mut record = Record::new(value, label)?;
        let parent = record.take_id("object")?;
        let range = array(record.take("range")?, &format_args!("{label}.range"))?;
        record.finish()?;
        let object = self.resolve(parent, "tensor", label)?;
        let range_label = format_args!("{label}.range");
        let [begin, end] = range.as_slice() else {
            return Err(DirectoryError::Type {
                label: range_label.to_string(),
                expected: "an array of two integers",
            });
        };
        let (begin, end) = (integer(begin, 0, &range_label)?, integer(end, 0, &range_label)?);
        let parent = &self.objects[object];
        let elements = parent.elements().unwrap_or(0);
        if begin >= end || end > elements {
            let (label, object) = (label.to_string(), parent.id.clone());
            return Err(DirectoryError::PartRange {
                label,
                object,
                begin,
                end,
                elements,
            });
        }
        Ok(Part { object, begin, end })
    }
}

fn parse_components(
    items: Map<String, Value>,
    references: &References<'_>,
) -> Result<BTreeMap<String, Component>, DirectoryError> {
    let names: HashSet<String> = items.keys().cloned().collect();
    if !names.contains("text") {
        return Err(DirectoryError::NoText);
    }
    items
        .into_iter()
        .map(|(name, item)| {
            require_id(&name, &"a component id")?;
            let label = format!("component `{name}`");
            let mut record = Record::new(item, &label)?;
            let config = Value::Object(object(record.take("config")?, &format_args!("{label}.config"))?);
            let target = record
                .take_optional("target")
                .map(|target| id(target, &format_args!("{label}.target")))
                .transpose()?;
            if let Some(target) = target.as_ref().filter(|target| !names.contains(*target)) {
                return Err(DirectoryError::Target {
                    component: name,
                    target: target.clone(),
                });
            }
            let mut resources = BTreeMap::new();
            if let Some(roles) = record.take_optional("resources") {
                for (role, resource) in object(roles, &format_args!("{label}.resources"))? {
                    require_id(&role, &format_args!("a resource role of {label}"))?;
                    let label = format_args!("{label} resource `{role}`");
                    let at = references.resolve(id(resource, &label)?, "resource", &label)?;
                    resources.insert(role, at);
                }
            }
            let proposal = match record.take_optional("proposal") {
                None => None,
                Some(proposal) => Some(parse_proposal(proposal, &name)?),
            };
            record.finish()?;
            Ok((
                name,
                Component {
                    config,
                    target,
                    resources,
                    proposal,
                },
            ))
        })
        .collect()
}

fn parse_proposal(value: Value, component: &str) -> Result<Proposal, DirectoryError> {
    let refused = || DirectoryError::Proposal {
        component: component.to_owned(),
    };
    if component != "text" {
        return Err(refused());
    }
    let label = "component `text`.proposal";
    let mut record = Record::new(value, &label)?;
    let domain = record.take_id("domain")?;
    let rows = record
        .take_optional("rows")
        .map(|rows| integer(&rows, 1, &format_args!("{label}.rows")))
        .transpose()?;
    record.finish()?;
    match (domain.as_str(), rows) {
        ("full", None) => Ok(Proposal::Full),
        ("indexed", Some(rows)) => Ok(Proposal::Indexed { rows }),
        _ => Err(refused()),
    }
}

fn parse_uses(
    items: Vec<Value>,
    bindings: &BTreeMap<String, Binding>,
    references: &References<'_>,
) -> Result<Vec<Use>, DirectoryError> {
    let mut uses = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let label = format_args!("uses[{index}]");
        let mut record = Record::new(item, &label)?;
        let parameter = record.take_id("parameter")?;
        let input = record.take_id("input")?;
        if !bindings.contains_key(&parameter) {
            return Err(DirectoryError::UnboundUse { parameter, input });
        }
        let policy = match record.take_optional("activation_policy") {
            None => None,
            Some(Value::String(policy)) => match policy.as_str() {
                "A16Only" => Some(ActivationPolicy::A16Only),
                "AllowA8" => Some(ActivationPolicy::AllowA8),
                "AllowA4" => Some(ActivationPolicy::AllowA4),
                _ => {
                    return Err(DirectoryError::Policy {
                        parameter,
                        input,
                        policy,
                    });
                }
            },
            Some(_) => {
                let label = format!("{label}.activation_policy");
                return Err(DirectoryError::Type {
                    label,
                    expected: "a string",
                });
            }
        };
        let mut auxiliaries = BTreeMap::new();
        if let Some(roles) = record.take_optional("auxiliaries") {
            for (role, binding) in object(roles, &format_args!("{label}.auxiliaries"))? {
                require_id(&role, &format_args!("an auxiliary role of {label}"))?;
                let binding = references.binding(binding, &format_args!("{label} auxiliary `{role}`"))?;
                auxiliaries.insert(role, binding);
            }
        }
        record.finish()?;
        uses.push(Use {
            parameter,
            input,
            policy,
            auxiliaries,
        });
    }
    let mut seen = HashSet::with_capacity(uses.len());
    for item in &uses {
        if !seen.insert((item.parameter.as_str(), item.input.as_str())) {
            return Err(DirectoryError::DuplicateUse {
                parameter: item.parameter.clone(),
                input: item.input.clone(),
            });
        }
    }
    drop(seen);
    Ok(uses)
}
