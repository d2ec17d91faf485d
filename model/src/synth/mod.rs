//! Artifacts of a published geometry with random weights: for benchmarks, and tests at full size without a download.
//!
//! Formats, packing, permissions and sizes are those of a real artifact of the same recipe; weights have a trained
//! model's scale, so that activations stay bounded and the perplexity is finite, and mean nothing. Matrices are drawn
//! in their stored form (see [`pool`]). The same options give the same bytes, whatever the number of threads.
//!
//! Qwen3.8-Flash-Next comes with an n-gram volume of random codes. The published table is larger than everything else
//! together, so it is made smaller unless told otherwise; every head then has fewer rows, and nothing else changes.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use rayon::prelude::*;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::artifact::{PendingFile, Writer, WriterOptions};
use crate::checkpoint::QuantizedWeight;
use crate::config::TextConfig;
use crate::convert::{self, ConvertError, Encoding, Parent, Plan, Progress, Recipe, Summary};
use crate::formats::{self, Format};
use crate::ngram::VolumeWriter;
use crate::parameters::{EXPERT_BANK, NGRAM_SCALE, Parameter, RequiredFormat, parameters};
use crate::qwen4_exp::volume_path;
use crate::source::{ActivationPolicy, TextSource};

mod pool;
mod preset;
mod tokenizer;

use pool::{ExpertPool, Pool, mix, random};
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
/// What the codes of an n-gram table are multiplied by: random ones below 2 then have a deviation of about 0.02.
const TABLE_SCALE: f32 = 1.0 / 32.0;
/// Rows of an n-gram table drawn at a time.
const TABLE_ROWS: u64 = 1 << 16;
/// Recipes whose banks of experts permit 16-bit activations only, as the published artifact of that name.
const SIXTEEN_BIT_BANKS: &str = "qwen3_8_flash_next_nvfp4_orcarouter";

/// What to write.
#[derive(Debug, Clone)]
pub struct SynthOptions {
    /// The geometry.
    pub preset: Preset,
    /// Formats, packing and permissions.
    pub recipe: Recipe,
    /// Layers; the preset's own number when `None`.
    pub layers: Option<usize>,
    /// Least rows of every head of an n-gram table; [`Preset::NGRAM_BASE`] when `None`.
    pub ngram_base: Option<u64>,
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
            ngram_base: None,
            seed: 0,
            writer: WriterOptions::default(),
        }
    }

    /// The configuration of the model.
    pub fn config(&self) -> TextConfig {
        let mut config = self.preset.config(self.layers(), self.ngram_base());
        if let Some(dims) = &mut config.flash_next {
            // The table depends on these alone: it serves every recipe and number of layers.
            let drawn_from = json!([self.preset.name, self.ngram_base(), self.seed]);
            dims.volume_id = Some(first_half_of_sha256(&drawn_from));
        }
        config
    }

    fn layers(&self) -> usize {
        self.layers.unwrap_or(self.preset.layers)
    }

    fn ngram_base(&self) -> u64 {
        self.ngram_base.unwrap_or(Preset::NGRAM_BASE)
    }

    /// The objects of the artifact. FP8 matrices have the permissions of imported ones, as the published artifacts hold
    /// them, and every input has a divisor for 4-bit activations; of Qwen3.8-Flash-Next only routed experts permit less
    /// than 16 bits.
    ///
    /// # Errors
    /// When a size overflows.
    pub fn plan(&self) -> Result<Plan, ConvertError> {
        let config = self.config();
        if config.flash_next.is_some() {
            return Plan::new(&config, &self.recipe, &BTreeMap::new());
        }
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

    /// What is smaller than in the published model, in words.
    fn reduced(&self) -> Vec<String> {
        let layers = (self.layers() != self.preset.layers)
            .then(|| format!("{} layers of {}", self.layers(), self.preset.layers));
        let rows = |base: u64| {
            let config = self.preset.config(self.preset.fewest_layers(), base);
            let geometry = config.flash_next.map(|dims| dims.geometry(config.vocab_size));
            geometry.filter(|_| self.ngram_base() != Preset::PUBLISHED_NGRAM_BASE)
        };
        let table = rows(self.ngram_base()).zip(rows(Preset::PUBLISHED_NGRAM_BASE));
        let table = table.map(|(ours, published)| {
            format!(
                "{} rows of the n-gram table, {} bytes, of {}, {} bytes",
                ours.rows,
                ours.file_bytes(),
                published.rows,
                published.file_bytes()
            )
        });
        layers.into_iter().chain(table).collect()
    }

    fn provenance(&self) -> Map<String, Value> {
        let mut members = vec![
            ("tool", json!("burn-perplexity")),
            ("tool_version", json!(env!("CARGO_PKG_VERSION"))),
            ("recipe", json!(self.recipe.name())),
            ("rules", json!(self.recipe.describe())),
            ("preset", json!(self.preset.name)),
            ("layers", json!(self.layers())),
            ("seed", json!(self.seed)),
        ];
        let mut notes = vec!["the weights are random numbers".to_owned()];
        if self.preset.has_ngrams() {
            members.push(("ngram_base", json!(self.ngram_base())));
            notes.extend(self.reduced().iter().map(|what| format!("reduced: {what}")));
        }
        members.push(("notes", json!(notes)));
        members
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }

    /// The scales of the inputs of a bank's experts: gate, up, down of each.
    fn input_scales(&self, parent: &Parent) -> Option<Vec<f32>> {
        let scales = [LARGEST_ACTIVATION.0, LARGEST_ACTIVATION.0, LARGEST_ACTIVATION.1];
        (self.recipe.name() != SIXTEEN_BIT_BANKS).then(|| {
            scales
                .map(|largest| largest / LARGEST_NVFP4)
                .repeat(parent.shape[0] as usize)
        })
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
    let mut notes: Vec<String> = plan
        .notes
        .iter()
        .filter(|note| !note.contains("of the source"))
        .cloned()
        .collect();
    let resources = tokenizer::padded(source, options.preset.public_tokens(), &mut notes)?;
    let provenance = options.provenance();
    notes.extend(options.reduced().iter().map(|what| format!("reduced: {what}")));
    let name = format!("random-{}", options.preset.name);
    let mut writer = Writer::new(WriterOptions {
        artifact_id: options.writer.artifact_id.or(Some(artifact_id(&provenance))),
        ..options.writer
    });
    let input_scales = |parent: &Parent| options.input_scales(parent);
    let layout = convert::declare(&mut writer, &input_scales, &config, &plan, &resources)?;
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
    let mut experts = None;
    for (number, (object, parent)) in layout.parents.iter().zip(&plan.parents).enumerate() {
        let seed = random(mix(options.seed), number as u64);
        let format = parent.encoding.format;
        let mut append = |bytes: &[u8]| stream.append(*object, bytes).map_err(ConvertError::from);
        match parent.members.as_slice() {
            [bank] if bank.role == EXPERT_BANK && format == Format::Nvfp4Mul => {
                let pool = match experts.take() {
                    Some(pool) => pool,
                    None => ExpertPool::new(mix(options.seed))?,
                };
                experts.insert(pool).write(&parent.shape, seed, append)?;
            }
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
    for (object, scales) in &layout.input_scales {
        let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        stream.append(*object, &bytes)?;
    }
    if let Some(volume) = write_volume(&config, &volume_path(out), mix(options.seed))? {
        stream.accompany(volume);
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
        "gdn/convolution" | "ple/convolution" => uniform(CONVOLUTION),
        NGRAM_SCALE => vec![TABLE_SCALE],
        // The only norm whose weight is the factor itself and not its distance from 1.
        "gdn/norm" => vec![1.0; elements as usize],
        _ => vec![0.0; elements as usize],
    };
    let Encoding { format, method } = parent.encoding;
    Ok(formats::encode(format, method, &parent.shape, &values)?)
}

/// Writes the n-gram volume of a model that has one; it has no name yet.
fn write_volume(config: &TextConfig, path: &Path, seed: u64) -> Result<Option<PendingFile>, ConvertError> {
    let Some(dims) = &config.flash_next else {
        return Ok(None);
    };
    let geometry = dims.geometry(config.vocab_size);
    let width = geometry.row_bytes;
    let mut volume = VolumeWriter::create(path, geometry, dims.volume_id.unwrap_or_default())?;
    for first in (0..geometry.rows).step_by(TABLE_ROWS as usize) {
        let count = TABLE_ROWS.min(geometry.rows - first) as usize;
        let mut codes = vec![0u8; count * width];
        codes
            .par_chunks_exact_mut(width)
            .enumerate()
            .for_each(|(row_number, row)| {
                let number = first + row_number as u64;
                for (at, part) in row.chunks_mut(8).enumerate() {
                    // Without the largest exponent bit: numbers below 2, none that is not a number.
                    let word = random(seed, number * width as u64 + at as u64) & 0xBFBF_BFBF_BFBF_BFBF;
                    part.copy_from_slice(&word.to_le_bytes()[..part.len()]);
                }
            });
        codes.chunks_exact(width).try_for_each(|row| volume.append(row))?;
    }
    Ok(Some(volume.complete()?))
}

/// The first half of the SHA-256 of what decides the bytes.
fn artifact_id(provenance: &Map<String, Value>) -> [u8; 16] {
    first_half_of_sha256(&json!(provenance))
}

fn first_half_of_sha256(of: &Value) -> [u8; 16] {
    let digest = Sha256::digest(of.to_string());
    std::array::from_fn(|at| digest[at])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::artifact::publish;
    use crate::flash_next_tiny;
    use crate::ngram::{Access, NgramTable, Volume};

    #[test]
    fn a_drawn_volume_has_numbers_of_the_usual_size_in_every_row() {
        let mut config = flash_next_tiny::config();
        let dims = config.flash_next.as_mut().unwrap();
        dims.volume_id = Some([7; 16]);
        let geometry = dims.geometry(96);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drawn.ngram");
        let volume = write_volume(&config, &path, 3).unwrap().unwrap();
        assert!(!path.exists(), "it has no name before the artifact is complete");
        publish(vec![volume]).unwrap();
        let volume = Volume::open(&path, geometry, [7; 16], TABLE_SCALE, &Access::Mapped.into()).unwrap();
        let rows: Vec<u64> = (0..geometry.rows).collect();
        let mut values = vec![0.0; rows.len() * geometry.row_bytes];
        volume.read(&rows, &mut values).unwrap();
        let squares: f64 = values.iter().map(|x| f64::from(*x).powi(2)).sum();
        let deviation = (squares / values.len() as f64).sqrt();
        // Codes below 2, each as likely: the mean square of 8 exponents by 8 mantissas is 0.358.
        let expected = 0.358f64.sqrt() * f64::from(TABLE_SCALE);
        assert!((deviation / expected - 1.0).abs() < 0.02, "{deviation}, not {expected}");
        let mut sorted: Vec<Vec<u32>> = values
            .chunks(geometry.row_bytes)
            .map(|row| row.iter().map(|x| x.to_bits()).collect())
            .collect();
        sorted.sort();
        sorted.dedup();
        assert_eq!(sorted.len() as u64, geometry.rows, "no two rows are equal");
        let without = TextConfig {
            flash_next: None,
            ..config
        };
        assert!(write_volume(&without, &path, 3).unwrap().is_none());
    }
}
