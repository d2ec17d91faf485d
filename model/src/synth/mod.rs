//! Artifacts of a published geometry with random weights: for benchmarks, and tests at full size without a download.
//!
//! Formats, packing, permissions and sizes are those of a real artifact of the same recipe; weights have a trained
//! model's scale, so that activations stay bounded and the perplexity is finite, and mean nothing. Matrices are drawn
//! in their stored form (see [`pool`]). The same options give the same bytes, whatever the number of threads.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::artifact::{Writer, WriterOptions};
use crate::checkpoint::QuantizedWeight;
use crate::config::TextConfig;
use crate::convert::{self, ConvertError, Encoding, Parent, Plan, Progress, Recipe, Summary};
use crate::formats::{self, Format};
use crate::parameters::{Parameter, RequiredFormat, parameters};
use crate::source::{ActivationPolicy, TextSource};

mod pool;
mod preset;
mod tokenizer;

use pool::{Pool, mix, random};
pub use preset::Preset;

/// Range of `gdn/a_log`: decay rates from 1 to 16 per unit of time.
const A_LOG: (f32, f32) = (0.0, 2.77);
/// Range of `gdn/dt_bias`: time steps from 1/1000 to 1/10, as `softplus(x)` is about `exp(x)` there.
const DT_BIAS: (f32, f32) = (-6.9, -2.3);
/// Range of the convolution's taps, `1 / sqrt(4)` for a width of 4.
const CONVOLUTION: (f32, f32) = (-0.5, 0.5);
/// The largest activation that 4-bit inputs are scaled for: behind a norm, and elsewhere.
const LARGEST_ACTIVATION: (f32, f32) = (16.0, 64.0);
/// The largest 4-bit value under the largest scale.
const LARGEST_NVFP4: f32 = 6.0 * 448.0;

/// What to write.
#[derive(Debug, Clone)]
pub struct SynthOptions {
    /// The geometry.
    pub preset: Preset,
    /// Formats, packing and permissions.
    pub recipe: Recipe,
    /// Layers; the preset's own number when `None`.
    pub layers: Option<usize>,
    /// Chooses the weights.
    pub seed: u64,
    /// Volume limit and artifact id; the id is derived from the other options when `None`.
    pub writer: WriterOptions,
}

impl SynthOptions {
    /// All layers of `preset`, stored by `recipe`.
    pub fn new(preset: Preset, recipe: Recipe) -> Self {
        Self {
            preset,
            recipe,
            layers: None,
            seed: 0,
            writer: WriterOptions::default(),
        }
    }

    /// The configuration of the model.
    pub fn config(&self) -> TextConfig {
        self.preset.config(self.layers.unwrap_or(self.preset.layers))
    }

    /// The objects of the artifact. FP8 matrices have the permissions of imported ones, as the published artifacts hold
    /// them, and every input has a divisor for 4-bit activations.
    ///
    /// # Errors
    /// When a size overflows.
    pub fn plan(&self) -> Result<Plan, ConvertError> {
        let config = self.config();
        let divisors: BTreeMap<String, f32> = parameters(&config)
            .filter_map(|parameter| parameter.input)
            .map(|input| {
                let divisor = LARGEST_NVFP4 / largest_activation(&input);
                (input, divisor)
            })
            .collect();
        let encoded = Plan::new(&config, &self.recipe, &divisors)?;
        let imported: HashMap<String, QuantizedWeight> = encoded
            .parents
            .iter()
            .filter(|parent| parent.encoding.format == Format::Fp8E4m3fnRowBf16)
            .flat_map(|parent| &parent.members)
            .filter(|parameter| parameter.input.is_some())
            .map(|parameter| (parameter.name.clone(), imported_fp8()))
            .collect();
        Plan::importing(&config, &self.recipe, &divisors, &imported)
    }

    fn provenance(&self) -> Map<String, Value> {
        let members = [
            ("tool", json!("burn-perplexity")),
            ("tool_version", json!(env!("CARGO_PKG_VERSION"))),
            ("recipe", json!(self.recipe.name())),
            ("rules", json!(self.recipe.describe())),
            ("preset", json!(self.preset.name)),
            ("layers", json!(self.layers.unwrap_or(self.preset.layers))),
            ("seed", json!(self.seed)),
            ("notes", json!(["the weights are random numbers"])),
        ];
        members
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }
}

fn imported_fp8() -> QuantizedWeight {
    QuantizedWeight {
        stored: "fp8 rows",
        format: Some(Format::Fp8E4m3fnRowBf16),
        weight_divisor: None,
        policy: ActivationPolicy::AllowA8,
        activation_divisor: None,
    }
}

fn largest_activation(input: &str) -> f32 {
    let behind_norm = ["mixer_input", "ffn_input", "final_hidden"]
        .iter()
        .any(|name| input.ends_with(name));
    if behind_norm {
        LARGEST_ACTIVATION.0
    } else {
        LARGEST_ACTIVATION.1
    }
}

/// Writes the artifact `out`. The tokenizer is that of `source`, with tokens that no text gives up to the preset's number
/// of ids.
///
/// `progress` is called after every tensor object. The output has its name only once it is complete.
///
/// # Errors
/// When `source` has no usable tokenizer or one with more ids, or the file cannot be written; an existing output is
/// never overwritten.
pub fn synth(
    source: &dyn TextSource,
    out: &Path,
    options: &SynthOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Summary, ConvertError> {
    let config = options.config();
    let plan = options.plan()?;
    let mut notes = plan
        .notes
        .iter()
        .filter(|note| !note.contains("of the source"))
        .cloned()
        .collect();
    let resources = tokenizer::padded(source, options.preset.public_tokens(), &mut notes)?;
    let provenance = options.provenance();
    let name = format!("random-{}", options.preset.name);
    let mut writer = Writer::new(WriterOptions {
        artifact_id: options.writer.artifact_id.or(Some(artifact_id(&provenance))),
        ..options.writer
    });
    let layout = convert::declare(&mut writer, None, &config, &plan, &resources)?;
    writer.metadata_mut().insert("name".into(), name.as_str().into());
    *writer.provenance_mut() = provenance;

    let mut stream = writer.begin(out)?;
    for (object, (_, bytes)) in layout.resources.iter().zip(&resources) {
        stream.append(*object, bytes)?;
    }
    let mut done = Progress {
        objects: 0,
        all_objects: plan.parents.len(),
        bytes: 0,
        all_bytes: plan.parents.iter().map(|parent| parent.bytes).sum(),
    };
    let mut pools = HashMap::new();
    for (number, (object, parent)) in layout.parents.iter().zip(&plan.parents).enumerate() {
        let seed = random(mix(options.seed), number as u64);
        let format = parent.encoding.format;
        let mut append = |bytes: &[u8]| stream.append(*object, bytes).map_err(ConvertError::from);
        match parent.members.as_slice() {
            [vector] if vector.format != RequiredFormat::Any => append(&small(parent, vector, seed)?)?,
            _ => {
                let pool = match pools.entry(parent.encoding) {
                    std::collections::hash_map::Entry::Occupied(pool) => pool.into_mut(),
                    std::collections::hash_map::Entry::Vacant(place) => {
                        place.insert(Pool::new(parent.encoding, mix(options.seed))?)
                    }
                };
                pool.write(format, &parent.shape, seed, append)?;
            }
        }
        done.objects += 1;
        done.bytes += parent.bytes;
        progress(done);
    }
    for (object, divisor) in &layout.divisors {
        stream.append(*object, &divisor.to_le_bytes())?;
    }
    Ok(Summary {
        files: stream.finish()?,
        name,
        recipe: options.recipe.name().into(),
        objects: plan.parents.len(),
        bytes: done.all_bytes,
        bits_per_weight: plan.bits_per_weight(),
        notes,
    })
}

/// The bytes of a parameter that is stored in one format only: norms that change nothing, and the decay, time step and
/// convolution of a delta net.
fn small(parent: &Parent, parameter: &Parameter, seed: u64) -> Result<Vec<u8>, ConvertError> {
    let elements: u64 = parent.shape.iter().product();
    let uniform = |(low, high): (f32, f32)| -> Vec<f32> {
        // 24 bits are exact in f32.
        let unit = |at| (random(seed, at) >> 40) as f32 / (1u32 << 24) as f32;
        (0..elements).map(|at| low + (high - low) * unit(at)).collect()
    };
    let values = match parameter.role {
        "gdn/a_log" => uniform(A_LOG),
        "gdn/dt_bias" => uniform(DT_BIAS),
        "gdn/convolution" => uniform(CONVOLUTION),
        // The only norm whose weight is the factor itself and not its distance from 1.
        "gdn/norm" => vec![1.0; elements as usize],
        _ => vec![0.0; elements as usize],
    };
    let Encoding { format, method } = parent.encoding;
    Ok(formats::encode(format, method, &parent.shape, &values)?)
}

/// The first half of the SHA-256 of what decides the bytes.
fn artifact_id(provenance: &Map<String, Value>) -> [u8; 16] {
    let digest = Sha256::digest(json!(provenance).to_string());
    std::array::from_fn(|at| digest[at])
}
