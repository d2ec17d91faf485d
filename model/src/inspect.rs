//! What an artifact or a checkpoint holds, for people ([`Display`](std::fmt::Display)) and for programs (serde).

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use crate::artifact::{Artifact, ObjectContent};
use crate::config::TextConfig;
use crate::parameters::{EXPERT_BANK, parameters};
use crate::qwen4_exp::volume_path;
use crate::source::{self, SourceError, SourceFile, TextSource};
use crate::tokenizer::{CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG};

/// Everything `inspect` tells.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// `artifact` or `checkpoint`.
    pub kind: &'static str,
    /// The path as given.
    pub path: String,
    /// Public model name.
    pub name: String,
    /// `Qwen3_5ForCausalLM` or `Qwen3_5MoeForCausalLM`.
    pub architecture: &'static str,
    /// The artifact id, 32 hex digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub artifact_id: Option<String>,
    /// Files and the payload bytes in each.
    pub files: Vec<SourceFile>,
    /// Components by id.
    pub components: Vec<ComponentEntry>,
    /// The text configuration, as an artifact records it.
    pub config: Value,
    /// Text parameters in declaration order.
    pub parameters: Vec<ParameterEntry>,
    /// Storage by role.
    pub roles: Vec<RoleEntry>,
    /// Resources of the text component.
    pub resources: Vec<ResourceEntry>,
    /// Sorted names of all weight formats of the text model.
    pub formats: Vec<String>,
    /// Weights that are stored, each shared object counted once.
    pub weights: u64,
    /// Their bytes, scales and padding included.
    pub bytes: u64,
    /// `8 * bytes / weights`.
    pub bits_per_weight: f64,
    /// Free members about the model.
    pub metadata: Value,
    /// Free members about the origin.
    pub provenance: Value,
    /// The n-gram volume that an artifact of Qwen3.8-Flash-Next looks rows up in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ngram_volume: Option<NgramVolumeEntry>,
    /// What was skipped or ignored on opening.
    pub notes: Vec<String>,
}

/// An n-gram volume, as its artifact describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NgramVolumeEntry {
    /// Its id, 32 hex digits.
    pub id: String,
    /// Rows, padding included.
    pub rows: u64,
    /// Bytes, and elements, of a row.
    pub row_bytes: usize,
    /// Rows in a block of 4 KiB.
    pub rows_per_block: u64,
    /// Blocks behind the header.
    pub blocks: u64,
    /// Length of the file.
    pub file_bytes: u64,
    /// Where it is unless said otherwise.
    pub path: String,
    /// Whether a file is there; what is in it is not looked at.
    pub exists: bool,
}

/// A component of an artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ComponentEntry {
    /// Its id.
    pub id: String,
    /// Whether it is what gets loaded.
    pub loaded: bool,
    /// Resource roles.
    pub resources: Vec<String>,
}

/// A parameter of the text model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ParameterEntry {
    /// Its name.
    pub name: String,
    /// What it is, without block and expert number.
    pub role: &'static str,
    /// Extents.
    pub shape: Vec<usize>,
    /// Format of each piece.
    pub formats: Vec<&'static str>,
    /// Stored objects, in order of the pieces.
    pub objects: Vec<String>,
    /// Its share of their bytes.
    pub bytes: u64,
    /// Activation permission at its input.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activation_policy: Option<&'static str>,
}

/// Storage of all parameters of one role.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RoleEntry {
    /// The role.
    pub role: &'static str,
    /// Parameters.
    pub parameters: usize,
    /// Their elements.
    pub weights: u64,
    /// Their bytes.
    pub bytes: u64,
    /// `8 * bytes / weights`.
    pub bits_per_weight: f64,
    /// Parameters by format.
    pub formats: BTreeMap<&'static str, usize>,
    /// Parameters by activation permission.
    pub activation_policies: BTreeMap<&'static str, usize>,
}

/// A resource of the text component.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ResourceEntry {
    /// Its role.
    pub role: String,
    /// Its length.
    pub bytes: u64,
}

impl Inspection {
    /// Opens and describes the artifact or checkpoint at `path`.
    ///
    /// # Errors
    /// What opening it can meet.
    pub fn of_path(path: &Path) -> Result<Self, SourceError> {
        Self::of_source(path, source::open(path)?.as_ref())
    }

    /// Describes `source`, opened from `path`.
    ///
    /// # Errors
    /// When a parameter's storage cannot be told or a resource cannot be read.
    pub fn of_source(path: &Path, source: &dyn TextSource) -> Result<Self, SourceError> {
        let config = source.config();
        let parameters = parameter_entries(source, config)?;
        let mut formats: Vec<String> = parameters
            .iter()
            .flat_map(|parameter| &parameter.formats)
            .map(|format| (*format).into())
            .collect();
        formats.sort_unstable();
        formats.dedup();
        let (weights, bytes) = totals(source, &parameters)?;
        let artifact = source.artifact();
        Ok(Self {
            kind: if artifact.is_some() { "artifact" } else { "checkpoint" },
            path: path.display().to_string(),
            name: source.name().into(),
            architecture: config.architecture(),
            artifact_id: artifact.map(Artifact::artifact_id),
            files: source.files(),
            components: artifact.map_or_else(Vec::new, components),
            config: config.to_artifact(),
            roles: roles(&parameters),
            parameters,
            resources: resources(source)?,
            formats,
            weights,
            bytes,
            bits_per_weight: bits_per_weight(bytes, weights),
            metadata: artifact.map_or(Value::Null, |artifact| artifact.metadata().clone().into()),
            provenance: artifact.map_or(Value::Null, |artifact| artifact.provenance().clone().into()),
            ngram_volume: artifact.and_then(|artifact| ngram_volume(artifact, config)),
            notes: source.notes(),
        })
    }
}

fn ngram_volume(artifact: &Artifact, config: &TextConfig) -> Option<NgramVolumeEntry> {
    let dims = config.flash_next.as_ref()?;
    let geometry = dims.geometry(config.vocab_size);
    let path = volume_path(artifact.path());
    Some(NgramVolumeEntry {
        id: dims.volume_id?.iter().map(|byte| format!("{byte:02x}")).collect(),
        rows: geometry.rows,
        row_bytes: geometry.row_bytes,
        rows_per_block: geometry.rows_per_block(),
        blocks: geometry.blocks(),
        file_bytes: geometry.file_bytes(),
        exists: path.is_file(),
        path: path.display().to_string(),
    })
}

fn bits_per_weight(bytes: u64, weights: u64) -> f64 {
    if weights == 0 {
        0.0
    } else {
        8.0 * bytes as f64 / weights as f64
    }
}

fn parameter_entries(source: &dyn TextSource, config: &TextConfig) -> Result<Vec<ParameterEntry>, SourceError> {
    parameters(config)
        .map(|parameter| {
            let stored = source.stored(&parameter.name)?;
            let mut formats: Vec<&'static str> = stored.parts.iter().map(|part| part.format).collect();
            formats.dedup();
            Ok(ParameterEntry {
                name: parameter.name,
                role: parameter.role,
                shape: parameter.shape,
                formats,
                objects: stored.parts.iter().map(|part| part.object.clone()).collect(),
                bytes: stored.parts.iter().map(|part| part.bytes).sum(),
                activation_policy: stored.policy.map(|policy| policy.name()),
            })
        })
        .collect()
}

/// Weights and bytes with shared storage counted once: whole objects for an artifact, element ranges for a checkpoint.
fn totals(source: &dyn TextSource, parameters: &[ParameterEntry]) -> Result<(u64, u64), SourceError> {
    if let Some(artifact) = source.artifact() {
        let mut objects: Vec<&str> = parameters
            .iter()
            .flat_map(|entry| &entry.objects)
            .map(String::as_str)
            .collect();
        objects.sort_unstable();
        objects.dedup();
        let objects = objects.into_iter().filter_map(|id| artifact.object(id));
        let banks = parameters.iter().filter(|entry| entry.role == EXPERT_BANK);
        let more: u64 = banks.map(|entry| weights_of(entry) - elements(&entry.shape)).sum();
        return Ok(objects.fold((more, 0), |(weights, bytes), object| {
            (weights + object.elements().unwrap_or(0), bytes + object.bytes)
        }));
    }
    let tied = source.config().tie_word_embeddings;
    let counted = parameters.iter().filter(|entry| !(tied && entry.role == "output_head"));
    Ok(counted.fold((0, 0), |(weights, bytes), entry| {
        (weights + weights_of(entry), bytes + entry.bytes)
    }))
}

/// Weights of a parameter: its elements, but for a bank `[E, H, I]` of experts, which has three matrices per expert.
fn weights_of(entry: &ParameterEntry) -> u64 {
    let matrices = if entry.role == EXPERT_BANK { 3 } else { 1 };
    matrices * elements(&entry.shape)
}

fn elements(shape: &[usize]) -> u64 {
    shape.iter().map(|extent| *extent as u64).product()
}

/// One entry per role, in order of first appearance.
fn roles(parameters: &[ParameterEntry]) -> Vec<RoleEntry> {
    let mut roles: Vec<RoleEntry> = Vec::new();
    for entry in parameters {
        let at = roles
            .iter()
            .position(|role| role.role == entry.role)
            .unwrap_or_else(|| {
                roles.push(RoleEntry {
                    role: entry.role,
                    parameters: 0,
                    weights: 0,
                    bytes: 0,
                    bits_per_weight: 0.0,
                    formats: BTreeMap::new(),
                    activation_policies: BTreeMap::new(),
                });
                roles.len() - 1
            });
        let role = &mut roles[at];
        role.parameters += 1;
        role.weights += weights_of(entry);
        role.bytes += entry.bytes;
        role.bits_per_weight = bits_per_weight(role.bytes, role.weights);
        for format in &entry.formats {
            *role.formats.entry(format).or_default() += 1;
        }
        if let Some(policy) = entry.activation_policy {
            *role.activation_policies.entry(policy).or_default() += 1;
        }
    }
    roles
}

fn components(artifact: &Artifact) -> Vec<ComponentEntry> {
    artifact
        .components()
        .iter()
        .map(|(id, component)| ComponentEntry {
            id: id.clone(),
            loaded: id == "text",
            resources: component.resources.keys().cloned().collect(),
        })
        .collect()
}

fn resources(source: &dyn TextSource) -> Result<Vec<ResourceEntry>, SourceError> {
    if let Some(artifact) = source.artifact() {
        let object = |(role, object): (&String, &usize)| {
            let object = &artifact.objects()[*object];
            debug_assert!(matches!(object.content, ObjectContent::Resource { .. }));
            ResourceEntry {
                role: role.clone(),
                bytes: object.bytes,
            }
        };
        return Ok(artifact.components()["text"].resources.iter().map(object).collect());
    }
    let mut resources = Vec::new();
    for role in [TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, GENERATION_CONFIG] {
        if let Some(bytes) = source.resource(role)? {
            resources.push(ResourceEntry {
                role: role.into(),
                bytes: bytes.len() as u64,
            });
        }
    }
    Ok(resources)
}

/// `1234567` as `1,234,567`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `bf16`, or `bf16 x3, nvfp4 x5` where there are several.
fn counts(counts: &BTreeMap<&'static str, usize>) -> String {
    match counts.len() {
        0 => "-".into(),
        1 => counts.keys().copied().collect(),
        _ => counts
            .iter()
            .map(|(name, count)| format!("{name} x{count}"))
            .collect::<Vec<_>>()
            .join(", "),
    }
}

/// A string without its quotes, any other value as JSON.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} {}", self.kind, self.path)?;
        writeln!(f, "  name          {}", self.name)?;
        writeln!(f, "  architecture  {}", self.architecture)?;
        if let Some(id) = &self.artifact_id {
            writeln!(f, "  id            {id}")?;
        }
        for file in &self.files {
            writeln!(f, "  file          {}  {} bytes", file.name, grouped(file.bytes))?;
        }
        if let Some(volume) = &self.ngram_volume {
            let there = if volume.exists { "" } else { "  (not there)" };
            let (bytes, rows) = (grouped(volume.file_bytes), grouped(volume.rows));
            writeln!(f, "  n-gram volume {}  {bytes} bytes{there}", volume.path)?;
            writeln!(
                f,
                "                id {}, {rows} rows of {} bytes, {} in each of {} blocks of 4,096",
                volume.id,
                volume.row_bytes,
                volume.rows_per_block,
                grouped(volume.blocks)
            )?;
        }
        for component in &self.components {
            let loaded = if component.loaded { "" } else { "  (not loaded)" };
            writeln!(f, "  component     {}{loaded}", component.id)?;
        }
        for resource in &self.resources {
            writeln!(
                f,
                "  resource      {}  {} bytes",
                resource.role,
                grouped(resource.bytes)
            )?;
        }
        writeln!(f)?;
        writeln!(
            f,
            "{:<20} {:>6} {:>17} {:>17} {:>8}  {:<30}  activations",
            "role", "count", "weights", "bytes", "bits", "formats"
        )?;
        for role in &self.roles {
            writeln!(
                f,
                "{:<20} {:>6} {:>17} {:>17} {:>8.3}  {:<30}  {}",
                role.role,
                role.parameters,
                grouped(role.weights),
                grouped(role.bytes),
                role.bits_per_weight,
                counts(&role.formats),
                counts(&role.activation_policies),
            )?;
        }
        writeln!(
            f,
            "{:<20} {:>6} {:>17} {:>17} {:>8.3}  {}",
            "stored in all",
            self.parameters.len(),
            grouped(self.weights),
            grouped(self.bytes),
            self.bits_per_weight,
            self.formats.join(", ")
        )?;
        if let Some(provenance) = self.provenance.as_object().filter(|members| !members.is_empty()) {
            writeln!(f)?;
            for (member, value) in provenance {
                match value {
                    Value::Array(lines) => {
                        lines
                            .iter()
                            .try_for_each(|line| writeln!(f, "provenance {member}: {}", plain(line)))?;
                    }
                    value => writeln!(f, "provenance {member}: {}", plain(value))?,
                }
            }
        }
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        Ok(())
    }
}
