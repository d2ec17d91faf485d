//! Opens an artifact, finds objects by id and parameter, decodes parameters.

use super::directory::{Binding, Component, Directory, Encoding, Object, ObjectContent, Part, Use, VolumeFile};
use super::volumes::{Entry, Volumes};
use super::{ArtifactError, RAW_BYTES};
use crate::formats::{self, Format, Layout};
use crate::source::ActivationPolicy;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The only auxiliary role with a meaning: one f32 by which the activation is divided before 4-bit rounding.
pub(crate) const ACTIVATION_DIVISOR: &str = "activation_input_divisor";

/// An opened artifact. Files are mapped, not read; all methods may be called from several threads.
pub struct Artifact {
    path: PathBuf,
    id: [u8; 16],
    header_sha256: [u8; 32],
    directory: Directory,
    volumes: Volumes,
    object_index: HashMap<String, usize>,
    use_index: HashMap<String, Vec<usize>>,
    /// The last object that had to be joined from several files: the parameters that share it come one after another.
    joined: Mutex<Option<(usize, Arc<Vec<u8>>)>>,
}

/// A piece of a parameter as it is stored: elements `[begin, end)` of a parent tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredPart<'a> {
    /// The parent.
    pub object: &'a Object,
    /// Index of the parent in [`Artifact::objects`].
    pub index: usize,
    /// How the parent is stored, checked.
    pub encoding: Encoding,
    /// First element.
    pub begin: u64,
    /// One past the last element.
    pub end: u64,
}

impl Artifact {
    /// Opens the entry file, parses and checks the directory. Continuations are opened when something needs them.
    ///
    /// # Errors
    /// F01 to F05, or a fault of the directory.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ArtifactError> {
        let path = path.as_ref();
        let entry = Entry::open(path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let directory = Directory::parse(entry.json(), &name).map_err(|source| ArtifactError::Directory {
            path: path.to_owned(),
            source,
        })?;
        let id = entry.id();
        let header_sha256 = Sha256::digest(entry.head()).into();
        let volumes = Volumes::new(entry, &directory.files)?;
        let object_index = directory
            .objects
            .iter()
            .enumerate()
            .map(|(at, object)| (object.id.clone(), at))
            .collect();
        let mut use_index: HashMap<String, Vec<usize>> = HashMap::with_capacity(directory.uses.len());
        for (at, item) in directory.uses.iter().enumerate() {
            use_index.entry(item.parameter.clone()).or_default().push(at);
        }
        Ok(Self {
            path: path.to_owned(),
            id,
            header_sha256,
            directory,
            volumes,
            object_index,
            use_index,
            joined: Mutex::new(None),
        })
    }

    /// The entry file, as opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The artifact id, 32 lowercase hex digits.
    pub fn artifact_id(&self) -> String {
        self.id.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// SHA-256 of the header and the directory's text, 64 lowercase hex digits: all that the artifact declares, no weight.
    pub fn header_sha256(&self) -> String {
        self.header_sha256.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Everything the directory says.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Objects in payload order.
    pub fn objects(&self) -> &[Object] {
        &self.directory.objects
    }

    /// Where each logical parameter lies, by name in byte order.
    pub fn bindings(&self) -> &BTreeMap<String, Binding> {
        &self.directory.bindings
    }

    /// Activation permissions, in order.
    pub fn uses(&self) -> &[Use] {
        &self.directory.uses
    }

    /// Components by id.
    pub fn components(&self) -> &BTreeMap<String, Component> {
        &self.directory.components
    }

    /// Free members; `name`, if there, is the model's public name.
    pub fn metadata(&self) -> &Map<String, Value> {
        &self.directory.metadata
    }

    /// The model's public name, if the metadata has one.
    pub fn name(&self) -> Option<&str> {
        self.directory.metadata.get("name").and_then(Value::as_str)
    }

    /// Free members about the artifact's origin.
    pub fn provenance(&self) -> &Map<String, Value> {
        &self.directory.provenance
    }

    /// The entry, then the continuation volumes.
    pub fn files(&self) -> &[VolumeFile] {
        &self.directory.files
    }

    /// Size of the logical payload in bytes.
    pub fn payload_bytes(&self) -> u64 {
        self.volumes.payload_bytes()
    }

    /// The object with this id.
    pub fn object(&self, id: &str) -> Option<&Object> {
        self.object_index.get(id).map(|&at| &self.directory.objects[at])
    }

    /// Payload bytes `[offset, offset + bytes)`, borrowed when one file holds them.
    ///
    /// # Errors
    /// F06 to F10.
    pub fn payload(&self, offset: u64, bytes: u64) -> Result<Cow<'_, [u8]>, ArtifactError> {
        self.volumes.read(offset, bytes)
    }

    /// Opens and checks every file, which otherwise happens when it is first read.
    ///
    /// # Errors
    /// F06 to F08.
    pub fn open_files(&self) -> Result<(), ArtifactError> {
        self.volumes.open_all()
    }

    /// Has the system begin to read payload bytes `[offset, offset + bytes)`, as far as they exist.
    pub fn will_need(&self, offset: u64, bytes: u64) {
        self.volumes.will_need(offset, bytes);
    }

    /// The encoded bytes of an object, borrowed when one file holds them.
    ///
    /// # Errors
    /// F06 to F10.
    pub fn object_bytes(&self, object: &Object) -> Result<Cow<'_, [u8]>, ArtifactError> {
        self.volumes.read(object.offset, object.bytes)
    }

    /// Bytes of a component's resource, such as `tokenizer.json` of `text`.
    ///
    /// # Errors
    /// T01, E06, F06 to F10.
    pub fn resource(&self, component: &str, role: &str) -> Result<Cow<'_, [u8]>, ArtifactError> {
        let object = self
            .directory
            .components
            .get(component)
            .and_then(|component| component.resources.get(role))
            .map(|&at| &self.directory.objects[at])
            .ok_or_else(|| ArtifactError::MissingResource {
                component: component.into(),
                role: role.into(),
            })?;
        match &object.content {
            ObjectContent::Resource { encoding } if encoding != RAW_BYTES => Err(ArtifactError::ResourceEncoding {
                object: object.id.clone(),
                encoding: encoding.clone(),
            }),
            _ => self.object_bytes(object),
        }
    }

    fn binding(&self, parameter: &str) -> Result<&Binding, ArtifactError> {
        self.directory
            .bindings
            .get(parameter)
            .ok_or_else(|| ArtifactError::UnknownParameter {
                parameter: parameter.to_owned(),
            })
    }

    fn parts(&self, binding: &Binding) -> Result<Vec<StoredPart<'_>>, ArtifactError> {
        let stored = |part: &Part| -> Result<StoredPart<'_>, ArtifactError> {
            let object = &self.directory.objects[part.object];
            let encoding = object.encoding()?;
            Ok(StoredPart {
                object,
                index: part.object,
                encoding,
                begin: part.begin,
                end: part.end,
            })
        };
        match binding {
            Binding::Whole { object } => {
                let elements = self.directory.objects[*object].elements();
                let end = elements.ok_or(ArtifactError::Overflow {
                    what: "the number of elements",
                })?;
                Ok(vec![stored(&Part {
                    object: *object,
                    begin: 0,
                    end,
                })?])
            }
            Binding::Parts(parts) => parts.iter().map(stored).collect(),
        }
    }

    /// The stored pieces whose concatenation is a parameter.
    ///
    /// # Errors
    /// B01, E01 to E05.
    pub fn stored_parts(&self, parameter: &str) -> Result<Vec<StoredPart<'_>>, ArtifactError> {
        self.parts(self.binding(parameter)?)
    }

    /// Number of elements of a parameter.
    ///
    /// # Errors
    /// B01 or an overflow.
    pub fn elements(&self, parameter: &str) -> Result<u64, ArtifactError> {
        match self.binding(parameter)? {
            Binding::Whole { object } => self.directory.objects[*object].elements(),
            Binding::Parts(parts) => parts
                .iter()
                .try_fold(0u64, |sum, part| sum.checked_add(part.end - part.begin)),
        }
        .ok_or(ArtifactError::Overflow {
            what: "the number of elements",
        })
    }

    /// The parameter's values in C order.
    ///
    /// # Errors
    /// B01, E01 to E08, F06 to F10, or a size beyond the address space.
    pub fn load(&self, parameter: &str) -> Result<Vec<f32>, ArtifactError> {
        let elements = self.elements(parameter)?;
        let length = usize::try_from(elements)
            .ok()
            .filter(|length| *length <= isize::MAX as usize / size_of::<f32>())
            .ok_or(ArtifactError::Overflow {
                what: "the size of a parameter",
            })?;
        // Encodings are checked before memory is taken: what follows is bounded by bytes that exist.
        let parts = self.stored_parts(parameter)?;
        let mut values = vec![0.0; length];
        self.decode_parts(&parts, &mut values)?;
        Ok(values)
    }

    /// The parameter's values in C order, into a slice of its length.
    ///
    /// # Errors
    /// As [`Artifact::load`], and when the lengths differ.
    pub fn load_into(&self, parameter: &str, out: &mut [f32]) -> Result<(), ArtifactError> {
        let elements = self.elements(parameter)?;
        if elements != out.len() as u64 {
            let length = out.len() as u64;
            return Err(ArtifactError::OutputLength {
                parameter: parameter.to_owned(),
                elements,
                length,
            });
        }
        self.decode_parts(&self.stored_parts(parameter)?, out)
    }

    fn decode_parts(&self, parts: &[StoredPart<'_>], out: &mut [f32]) -> Result<(), ArtifactError> {
        let mut rest = out;
        for part in parts {
            let now;
            (now, rest) = rest.split_at_mut((part.end - part.begin) as usize);
            let Encoding {
                format,
                layout,
                shape,
                divisors,
            } = &part.encoding;
            self.with_bytes(part.index, |bytes| {
                formats::decode(*format, *layout, shape, *divisors, bytes, part.begin..part.end, now)
            })?
            .map_err(|source| ArtifactError::Object {
                object: part.object.id.clone(),
                source,
            })?;
        }
        Ok(())
    }

    /// Calls `work` with an object's bytes; an object in several files is joined once and kept until the next one.
    fn with_bytes<R>(&self, index: usize, work: impl FnOnce(&[u8]) -> R) -> Result<R, ArtifactError> {
        let object = &self.directory.objects[index];
        if self.volumes.in_one_file(object.offset, object.bytes) {
            return Ok(work(&self.object_bytes(object)?));
        }
        let mut joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = match &*joined {
            Some((at, bytes)) if *at == index => Arc::clone(bytes),
            _ => {
                *joined = None;
                let bytes = Arc::new(self.object_bytes(object)?.into_owned());
                *joined = Some((index, Arc::clone(&bytes)));
                bytes
            }
        };
        drop(joined);
        Ok(work(&bytes))
    }

    /// Checks every word of an object: codes and scales its format allows, zero padding.
    ///
    /// # Errors
    /// E01 to E08, F06 to F10.
    pub fn validate_object(&self, index: usize) -> Result<(), ArtifactError> {
        let object = &self.directory.objects[index];
        if let ObjectContent::Resource { encoding } = &object.content {
            if encoding != RAW_BYTES {
                let (object, encoding) = (object.id.clone(), encoding.clone());
                return Err(ArtifactError::ResourceEncoding { object, encoding });
            }
            return self.object_bytes(object).map(|_| ());
        }
        let Encoding {
            format,
            layout,
            shape,
            divisors,
        } = object.encoding()?;
        self.with_bytes(index, |bytes| {
            formats::validate(format, layout, &shape, divisors, bytes)
        })?
        .map_err(|source| ArtifactError::Object {
            object: object.id.clone(),
            source,
        })
    }

    /// Checks that a parameter has this shape and, if one is given, this format.
    ///
    /// A whole binding needs the identical shape, rank included; parts need the same number of elements.
    ///
    /// # Errors
    /// B01 to B03, E01 to E05.
    pub fn check_parameter(&self, parameter: &str, shape: &[u64], format: Option<Format>) -> Result<(), ArtifactError> {
        let parts = self.stored_parts(parameter)?;
        let refused = |found| ArtifactError::ParameterShape {
            parameter: parameter.to_owned(),
            expected: shape.to_vec(),
            found,
        };
        match (self.binding(parameter)?, parts.first()) {
            (Binding::Whole { .. }, Some(part)) if part.encoding.shape != shape => {
                return Err(refused(format!("{:?}", part.encoding.shape)));
            }
            _ => {
                let elements = self.elements(parameter)?;
                if formats::element_count(shape) != Ok(elements) {
                    return Err(refused(format!("{elements} elements")));
                }
            }
        }
        match parts
            .iter()
            .find(|part| format.is_some_and(|format| part.encoding.format != format))
        {
            Some(part) => Err(ArtifactError::ParameterFormat {
                parameter: parameter.to_owned(),
                object: part.object.id.clone(),
                expected: format.unwrap_or(part.encoding.format),
                found: part.encoding.format,
            }),
            None => Ok(()),
        }
    }

    /// Uses of a parameter, in order.
    pub fn uses_of<'a>(&'a self, parameter: &str) -> impl Iterator<Item = &'a Use> {
        self.use_index
            .get(parameter)
            .into_iter()
            .flatten()
            .map(|&at| &self.directory.uses[at])
    }

    /// The activation permission of a projection at one input, and its activation divisor if it has one.
    ///
    /// # Errors
    /// B04 to B07, and what reading the divisor can meet.
    pub fn activation(&self, parameter: &str, input: &str) -> Result<(ActivationPolicy, Option<f32>), ArtifactError> {
        let names = || (parameter.to_owned(), input.to_owned());
        let found = self
            .uses_of(parameter)
            .find(|item| item.input == input)
            .ok_or_else(|| {
                let (parameter, input) = names();
                ArtifactError::MissingUse { parameter, input }
            })?;
        let policy = found.policy.ok_or_else(|| {
            let (parameter, input) = names();
            ArtifactError::MissingPolicy { parameter, input }
        })?;
        if let Some(role) = found.auxiliaries.keys().find(|role| *role != ACTIVATION_DIVISOR) {
            let (parameter, input) = names();
            return Err(ArtifactError::AuxiliaryRole {
                parameter,
                input,
                role: role.clone(),
            });
        }
        let divisor = match found.auxiliaries.get(ACTIVATION_DIVISOR) {
            Some(binding) => Some(self.activation_divisor(binding)?.ok_or_else(|| {
                let (parameter, input) = names();
                ArtifactError::ActivationDivisor { parameter, input }
            })?),
            None => None,
        };
        Ok((policy, divisor))
    }

    /// The value of a divisor binding, or `None` when it is not one finite positive fp32 element.
    fn activation_divisor(&self, binding: &Binding) -> Result<Option<f32>, ArtifactError> {
        let parts = self.parts(binding)?;
        let [part] = parts.as_slice() else { return Ok(None) };
        let encoding = &part.encoding;
        let scalar_shape = matches!(binding, Binding::Parts(_)) || matches!(encoding.shape.as_slice(), [] | [1]);
        let is_fp32 = encoding.format == Format::Fp32 && encoding.layout == Layout::ContiguousLeV1;
        if !is_fp32 || !scalar_shape || part.end - part.begin != 1 {
            return Ok(None);
        }
        let mut value = [0.0];
        self.decode_parts(&parts, &mut value)?;
        Ok(Some(value[0]).filter(|value| value.is_finite() && *value > 0.0))
    }
}
