//! Conversion of a checkpoint into an artifact: plan, encode parent by parent, write under a temporary name, rename.
//!
//! At any time one encoded parent and one slab of source values (64 MiB), or the source's words of an imported parent, are
//! held, whatever the model's size; encoding is parallel over the rows of a slab. Words that the source already holds in
//! the recipe's format are copied, so that importing changes no weight, except by two roundings that the formats impose:
//! an f32 row scale to bf16, and a matrix multiplier `m` to the divisor `1 / m`.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::artifact::{ArtifactError, Binding, Component, Part, Use, Writer, WriterOptions};
use crate::checkpoint::{CheckpointError, CheckpointSource, RowWords};
use crate::config::TextConfig;
use crate::formats::{self, Encoder, Format, FormatError};
use crate::ngram::VolumeError;
use crate::parameters::{NGRAM_SCALE, parameters};
use crate::qwen4_exp::volume_path;
use crate::source::{ActivationPolicy, SourceError, TextSource};
use crate::tokenizer::{
    AddedTokens, CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, TextTokenizer, TokenizerError,
};

mod flash_next;
mod own_mix;
mod plan;
mod recipe;

pub(crate) use flash_next::{Words, quantise, volume_id};
pub use own_mix::RecipeError;
pub use plan::{Parent, Plan};
pub use recipe::{Encoding, Recipe};

/// Source values held at a time (64 MiB as f32).
const SLAB: usize = 1 << 24;

/// A conversion that failed; nothing is left under the output's name.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A resource of the checkpoint cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The tokenizer of the checkpoint cannot be used.
    #[error("the tokenizer of the checkpoint cannot be used: {0}")]
    Tokenizer(#[from] TokenizerError),
    /// The artifact cannot be written.
    #[error(transparent)]
    Artifact(#[from] Box<ArtifactError>),
    /// An activation divisor that is not a finite positive number.
    #[error("the activation divisor of {input} is {divisor}: expected a finite positive number")]
    Divisor {
        /// The input.
        input: String,
        /// The value.
        divisor: f32,
    },
    /// The n-gram table cannot be read, or the volume not be written.
    #[error(transparent)]
    Ngrams(#[from] VolumeError),
    /// A size that no format can hold.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A weight cannot be encoded.
    #[error("{parameter} cannot be stored as {format}: {source}")]
    Encode {
        /// The parameter.
        parameter: String,
        /// The format.
        format: Format,
        /// Why.
        source: FormatError,
    },
    /// A weight that is not a number.
    #[error("element {element} of {parameter} is {value}: expected finite weights")]
    NotFinite {
        /// The parameter.
        parameter: String,
        /// Flat index.
        element: usize,
        /// The value.
        value: f32,
    },
    /// A size does not fit.
    #[error("{what} overflows")]
    Overflow {
        /// The size.
        what: &'static str,
    },
}

/// What to convert into what.
#[derive(Debug, Clone)]
pub struct ConvertOptions {
    /// Formats, methods and permissions.
    pub recipe: Recipe,
    /// Public model name; the checkpoint's directory name when absent.
    pub name: Option<String>,
    /// Activation divisors by input, such as `text/layers/0/ffn_input`; they replace those of the source. Four-bit
    /// activations are permitted only where there is one or the other.
    pub activation_divisors: BTreeMap<String, f32>,
    /// Where they come from, for the artifact's provenance; nothing when it is null.
    pub calibration: Value,
    /// Volume limit and artifact id.
    pub writer: WriterOptions,
}

impl From<ArtifactError> for ConvertError {
    fn from(error: ArtifactError) -> Self {
        Self::Artifact(Box::new(error))
    }
}

impl ConvertOptions {
    /// `recipe` and nothing special.
    pub fn new(recipe: Recipe) -> Self {
        Self {
            recipe,
            name: None,
            activation_divisors: BTreeMap::new(),
            calibration: Value::Null,
            writer: WriterOptions::default(),
        }
    }
}

/// How far a conversion is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Tensor objects written.
    pub objects: usize,
    /// Tensor objects in all.
    pub all_objects: usize,
    /// Bytes of them written.
    pub bytes: u64,
    /// Bytes in all.
    pub all_bytes: u64,
}

/// What was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// The entry, then continuation volumes, then the n-gram volume.
    pub files: Vec<PathBuf>,
    /// Public model name.
    pub name: String,
    /// Recipe name.
    pub recipe: String,
    /// Tensor objects.
    pub objects: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Stored bits per weight.
    pub bits_per_weight: f64,
    /// What was skipped, replaced or withheld, in words.
    pub notes: Vec<String>,
}

/// Converts the checkpoint directory `source` into the artifact `out`.
///
/// `progress` is called after every tensor object. The output has its name only once it is complete.
///
/// # Errors
/// See [`ConvertError`]; an existing output is never overwritten.
pub fn convert(
    source: &Path,
    out: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Summary, ConvertError> {
    if let Some((input, divisor)) = options
        .activation_divisors
        .iter()
        .find(|(_, divisor)| !(divisor.is_finite() && **divisor > 0.0))
    {
        return Err(ConvertError::Divisor {
            input: input.clone(),
            divisor: *divisor,
        });
    }
    let source = CheckpointSource::open(source)?;
    TextTokenizer::from_source(&source, AddedTokens::Match)?;
    let mut config = source.config().clone();
    let mut table_scale = 1.0;
    if let Some(dims) = &mut config.flash_next {
        dims.volume_id = Some(flash_next::volume_id(&source));
        table_scale = flash_next::table_scale(&source, source.config())?;
    }
    let plan = Plan::importing(
        &config,
        &options.recipe,
        &options.activation_divisors,
        &source.quantized(),
    )?;
    let mut notes = source.notes();
    notes.extend(plan.notes.iter().cloned());
    notes.extend(rounding_note(&source, &plan)?);
    let resources = resources(&source, &mut notes)?;
    let name = options.name.clone().unwrap_or_else(|| source.name().into());

    let mut writer = Writer::new(options.writer);
    let input_scales = |parent: &Parent| flash_next::input_scales(&source, parent);
    let layout = declare(&mut writer, &input_scales, &config, &plan, &resources)?;
    writer.metadata_mut().insert("name".into(), name.as_str().into());
    *writer.provenance_mut() = provenance(&source, &options.recipe, &notes);
    if !options.calibration.is_null() {
        writer
            .provenance_mut()
            .insert("activation_divisors".into(), options.calibration.clone());
    }

    let mut stream = writer.begin(out)?;
    for (object, (_, bytes)) in layout.resources.iter().zip(&resources) {
        stream.append(*object, bytes)?;
    }
    let all_bytes = plan.parents.iter().map(|parent| parent.bytes).sum();
    let mut done = Progress {
        objects: 0,
        all_objects: plan.parents.len(),
        bytes: 0,
        all_bytes,
    };
    for (object, parent) in layout.parents.iter().zip(&plan.parents) {
        let encoded = if flash_next::is_bank(parent) {
            flash_next::bank(&source, parent)?
        } else if parent.members[0].role == NGRAM_SCALE {
            flash_next::scale_bytes(table_scale)?
        } else if parent.imported {
            import_parent(&source, parent)?
        } else {
            encode_parent(&source, parent)?
        };
        stream.append(*object, &encoded)?;
        done.objects += 1;
        done.bytes += parent.bytes;
        progress(done);
    }
    for (object, divisor) in &layout.divisors {
        stream.append(*object, &divisor.to_le_bytes())?;
    }
    for (object, scales) in &layout.input_scales {
        let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        stream.append(*object, &bytes)?;
    }
    if let Some(volume) = flash_next::write_volume(&source, &config, &volume_path(out), table_scale)? {
        stream.accompany(volume);
    }
    Ok(Summary {
        files: stream.finish()?,
        name,
        recipe: options.recipe.name().into(),
        objects: plan.parents.len(),
        bytes: all_bytes,
        bits_per_weight: plan.bits_per_weight(),
        notes,
    })
}

/// Object numbers in the writer.
pub(crate) struct Declared {
    pub(crate) resources: Vec<usize>,
    pub(crate) parents: Vec<usize>,
    pub(crate) divisors: Vec<(usize, f32)>,
    pub(crate) input_scales: Vec<(usize, Vec<f32>)>,
}

/// Declares resources, parents, divisors and input scales in this order; binds every parameter; adds every Use. A bank of
/// experts permits 4-bit activations if there are `input_scales` for it.
pub(crate) fn declare(
    writer: &mut Writer,
    input_scales: &dyn Fn(&Parent) -> Option<Vec<f32>>,
    config: &TextConfig,
    plan: &Plan,
    resources: &[(&'static str, Vec<u8>)],
) -> Result<Declared, ConvertError> {
    let mut declared = Declared {
        resources: Vec::new(),
        parents: Vec::new(),
        divisors: Vec::new(),
        input_scales: Vec::new(),
    };
    let mut roles = BTreeMap::new();
    for (role, bytes) in resources {
        let object = writer.declare_resource(&format!("resource/text/{role}"), bytes.len() as u64)?;
        declared.resources.push(object);
        roles.insert((*role).to_owned(), object);
    }
    writer.set_component(
        "text",
        Component {
            config: config.to_artifact(),
            target: None,
            resources: roles,
            proposal: None,
        },
    );

    let mut bindings: BTreeMap<String, Binding> = BTreeMap::new();
    for parent in &plan.parents {
        let object = writer.declare_tensor(&parent.id, parent.encoding.format, &parent.shape, 1)?;
        declared.parents.push(object);
        if let [only] = parent.members.as_slice() {
            bindings.insert(only.name.clone(), Binding::Whole { object });
            continue;
        }
        let mut begin = 0;
        for member in &parent.members {
            let elements = member.elements().ok_or(ConvertError::Overflow {
                what: "the size of a parameter",
            })?;
            let end = begin + elements as u64;
            bindings.insert(member.name.clone(), Binding::Parts(vec![Part { object, begin, end }]));
            begin = end;
        }
    }
    for (parameter, stored) in &plan.shared {
        if let Some(binding) = bindings.get(stored).cloned() {
            bindings.insert(parameter.name.clone(), binding);
        }
    }
    bindings
        .into_iter()
        .for_each(|(name, binding)| writer.bind(&name, binding));

    let mut four_bit_banks = HashSet::new();
    for parent in plan.parents.iter().filter(|parent| flash_next::is_bank(parent)) {
        if let Some(scales) = input_scales(parent) {
            let name = &parent.members[0].name;
            let scales_name = name.replace("experts", "expert_input_scales");
            let object = writer.declare_tensor(&scales_name, Format::Fp32, &[parent.shape[0], 3], 1)?;
            writer.bind(&scales_name, Binding::Whole { object });
            declared.input_scales.push((object, scales));
            four_bit_banks.insert(name.clone());
        }
    }

    // One object per input and value: weights that share an input may come with different divisors.
    let mut divisor_objects: BTreeMap<(String, u32), usize> = BTreeMap::new();
    for parameter in parameters(config) {
        let Some(input) = parameter.input else { continue };
        let planned = plan.policies.get(&parameter.name).copied();
        let policy = match four_bit_banks.contains(&parameter.name) {
            true => ActivationPolicy::AllowA4,
            false => planned.unwrap_or(ActivationPolicy::A16Only),
        };
        let mut auxiliaries = BTreeMap::new();
        if let Some(divisor) = plan.activation_divisors.get(&parameter.name) {
            let key = (input.clone(), divisor.to_bits());
            let object = match divisor_objects.get(&key) {
                Some(object) => *object,
                None => {
                    let id = format!("auxiliary/{:06}", divisor_objects.len());
                    let object = writer.declare_tensor(&id, Format::Fp32, &[], 1)?;
                    declared.divisors.push((object, *divisor));
                    divisor_objects.insert(key, object);
                    object
                }
            };
            auxiliaries.insert("activation_input_divisor".to_owned(), Binding::Whole { object });
        }
        writer.add_use(Use {
            parameter: parameter.name,
            input,
            policy: Some(policy),
            auxiliaries,
        });
    }
    Ok(declared)
}

/// The four text resources. A missing chat template or generation configuration, which scoring does not use but every
/// artifact has, is replaced with a note.
pub(crate) fn resources(
    source: &dyn TextSource,
    notes: &mut Vec<String>,
) -> Result<Vec<(&'static str, Vec<u8>)>, ConvertError> {
    let mut resources = Vec::new();
    for role in [TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, GENERATION_CONFIG] {
        let bytes = match source.resource(role)?.filter(|bytes| !bytes.is_empty()) {
            Some(bytes) => bytes,
            None if role == CHAT_TEMPLATE => {
                let config: Option<Value> = source
                    .resource(TOKENIZER_CONFIG)?
                    .and_then(|config| serde_json::from_slice(&config).ok());
                match config
                    .as_ref()
                    .and_then(|config| config["chat_template"].as_str())
                    .filter(|text| !text.is_empty())
                {
                    Some(template) => {
                        notes.push(format!("{CHAT_TEMPLATE} was taken from {TOKENIZER_CONFIG}"));
                        template.as_bytes().to_vec()
                    }
                    None => {
                        notes.push(format!(
                            "the checkpoint has no chat template: {CHAT_TEMPLATE} is an empty comment"
                        ));
                        b"{# no chat template #}".to_vec()
                    }
                }
            }
            None if role == GENERATION_CONFIG => {
                notes.push(format!(
                    "the checkpoint has no {GENERATION_CONFIG}: no stop tokens are recorded"
                ));
                b"{}".to_vec()
            }
            None => return Err(TokenizerError::MissingResource { role }.into()),
        };
        resources.push((role, bytes));
    }
    Ok(resources)
}

/// Says how many weights lose bits merely by becoming bf16.
fn rounding_note(source: &CheckpointSource, plan: &Plan) -> Result<Option<String>, ConvertError> {
    let mut rounded = 0;
    for member in plan
        .parents
        .iter()
        .filter(|parent| parent.encoding == Encoding::BF16)
        .flat_map(|parent| &parent.members)
    {
        rounded += usize::from(
            source
                .stored(&member.name)?
                .parts
                .iter()
                .any(|part| matches!(part.format, "fp16" | "fp32")),
        );
    }
    Ok((rounded > 0).then(|| format!("{rounded} weights of wider types were rounded to bf16")))
}

fn provenance(source: &CheckpointSource, recipe: &Recipe, notes: &[String]) -> Map<String, Value> {
    let files: Vec<Value> = source
        .files()
        .into_iter()
        .zip(source.file_hashes())
        .map(|(file, hash)| json!({"name": file.name, "bytes": file.bytes, "sha256": hash}))
        .collect();
    let provenance = json!({
        "tool": "burn-perplexity",
        "tool_version": env!("CARGO_PKG_VERSION"),
        "recipe": recipe.name(),
        "rules": recipe.describe(),
        "source": {"name": source.name(), "files": files},
        "notes": notes,
    });
    match provenance {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

/// The values of a parent's members, slab by slab in order of its elements.
fn for_each_slab(
    source: &CheckpointSource,
    parent: &Parent,
    mut use_slab: impl FnMut(&str, &[f32]) -> Result<(), ConvertError>,
) -> Result<(), ConvertError> {
    for member in &parent.members {
        let elements = member.elements().ok_or(ConvertError::Overflow {
            what: "the size of a parameter",
        })?;
        let columns = member.shape.last().copied().unwrap_or(1);
        let slab = (SLAB / columns).max(1) * columns;
        for begin in (0..elements).step_by(slab) {
            let values = source.load_range(&member.name, begin..elements.min(begin + slab))?;
            if let Some(at) = values.iter().position(|value| !value.is_finite()) {
                let parameter = member.name.clone();
                return Err(ConvertError::NotFinite {
                    parameter,
                    element: begin + at,
                    value: values[at],
                });
            }
            use_slab(&member.name, &values)?;
        }
    }
    Ok(())
}

/// The encoded bytes of a parent.
fn encode_parent(source: &CheckpointSource, parent: &Parent) -> Result<Vec<u8>, ConvertError> {
    let format = parent.encoding.format;
    let failed = |parameter: &str, source| ConvertError::Encode {
        parameter: parameter.into(),
        format,
        source,
    };
    let mut largest = 0.0f32;
    if format == Format::Nvfp4 {
        for_each_slab(source, parent, |_, values| {
            largest = values.iter().fold(largest, |largest, value| largest.max(value.abs()));
            Ok(())
        })?;
    }
    let mut encoder = Encoder::new(format, parent.encoding.method, &parent.shape, largest)
        .map_err(|source| failed(&parent.members[0].name, source))?;
    for_each_slab(source, parent, |name, values| {
        encoder.push(values).map_err(|source| failed(name, source))
    })?;
    encoder
        .finish()
        .map_err(|source| failed(&parent.members[0].name, source))
}

/// The bytes of a parent whose members the source holds in its format, words unchanged.
fn import_parent(source: &CheckpointSource, parent: &Parent) -> Result<Vec<u8>, ConvertError> {
    let format = parent.encoding.format;
    let (mut all_codes, mut block_scales, mut row_scales) = (Vec::new(), Vec::new(), Vec::new());
    let mut divisor = 1.0;
    for member in &parent.members {
        match source.row_words(&member.name)? {
            Some(RowWords::Nvfp4 {
                codes,
                scales,
                divisor: own,
            }) if format == Format::Nvfp4 => {
                all_codes.extend(codes);
                block_scales.extend(scales);
                // The plan puts only members of the same divisor together.
                divisor = own;
            }
            Some(RowWords::Fp8Row { codes, scales }) if format == Format::Fp8E4m3fnRowBf16 => {
                all_codes.extend(codes);
                row_scales.extend(scales);
            }
            _ => unreachable!("the plan imports only words of the parent's format"),
        }
    }
    let packed = match format {
        Format::Nvfp4 => formats::nvfp4::pack(&parent.shape, &all_codes, &block_scales, &[divisor]),
        _ => formats::fp8_row::pack(&parent.shape, &all_codes, &row_scales),
    };
    let checked = packed.and_then(|bytes| {
        formats::validate(format, format.layout(), &parent.shape, 1, &bytes)?;
        Ok(bytes)
    });
    checked.map_err(|source| ConvertError::Encode {
        parameter: parent.members[0].name.clone(),
        format,
        source,
    })
}
