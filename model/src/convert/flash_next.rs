//! What a Qwen3.8-Flash-Next artifact has beyond others: banks of routed experts, the scales of their activations, and the
//! n-gram volume beside it.
//!
//! NVFP4 experts keep their words; of others a matrix is scaled so that its largest magnitude meets the largest code
//! under the largest block scale:
//!
//! ```text
//! m = amax / (6 * 448);   s = e4m3fn(block amax / (6 m));   code = e2m1(w / (s m))
//! ```
//!
//! E4M3FN table rows keep their words too; of others the whole table has the scale `s = bf16(amax / 448)`, and a code is
//! `e4m3fn(bf16(v / s))`.

use std::path::Path;

use perplexity_kernels::numeric::{E4M3FN_MAX, e4m3fn_to_f32, f32_to_e2m1, f32_to_e4m3fn, round_bf16};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::{ConvertError, Parent};
use crate::artifact::PendingFile;
use crate::checkpoint::CheckpointSource;
use crate::config::TextConfig;
use crate::formats::nvfp4_expert::{self, MatrixWords, Projection, UNIT};
use crate::formats::{Format, FormatError};
use crate::ngram::VolumeWriter;
use crate::parameters::{EXPERT_BANK, expert_matrix};

/// The largest magnitude of an E2M1 code.
const LARGEST_CODE: f32 = 6.0;
/// Table rows read at a time.
const ROWS: u64 = 1 << 16;

/// One matrix of an expert, as a bank stores it.
pub(crate) struct Words {
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Vec<u8>,
    pub(crate) multiplier: f32,
}

/// The encoded bank of a block.
pub(super) fn bank(source: &CheckpointSource, parent: &Parent) -> Result<Vec<u8>, ConvertError> {
    let geometry = nvfp4_expert::Geometry::new(&parent.shape)?;
    let layer = parent.members[0].layer.unwrap_or(0);
    let words: Vec<[Words; 3]> = (0..geometry.experts)
        .into_par_iter()
        .map(|expert| {
            let [gate, up, down] = Projection::ALL.map(|projection| {
                let name = expert_matrix(layer, expert, projection);
                let (rows, columns) = geometry.matrix(projection);
                match source.nvfp4_words(&name)? {
                    Some(words) => Ok(words),
                    None => quantise(&name, &source.load_range(&name, 0..rows * columns)?),
                }
            });
            Ok([gate?, up?, down?])
        })
        .collect::<Result<_, ConvertError>>()?;
    nvfp4_expert::pack(&parent.shape, |expert, projection| {
        let words = &words[expert][projection as usize];
        Ok(MatrixWords {
            codes: &words.codes,
            scales: &words.scales,
            multiplier: words.multiplier,
        })
    })
    .map_err(|source| ConvertError::Encode {
        parameter: parent.members[0].name.clone(),
        format: Format::Nvfp4Mul,
        source,
    })
}

pub(crate) fn quantise(name: &str, values: &[f32]) -> Result<Words, ConvertError> {
    if let Some(element) = values.iter().position(|value| !value.is_finite()) {
        return Err(ConvertError::NotFinite {
            parameter: name.into(),
            element,
            value: values[element],
        });
    }
    let amax = |values: &[f32]| values.iter().fold(0.0f32, |amax, value| amax.max(value.abs()));
    let largest = amax(values);
    let multiplier = match largest / (LARGEST_CODE * E4M3FN_MAX) {
        m if m > 0.0 => m,
        // A matrix of zeros, or of numbers too small for a scale: any multiplier gives zeros.
        _ => 1.0,
    };
    let (mut codes, mut scales) = (Vec::with_capacity(values.len() / 2), Vec::new());
    for block in values.chunks_exact(UNIT) {
        let word = f32_to_e4m3fn(amax(block) / (LARGEST_CODE * multiplier));
        let step = e4m3fn_to_f32(word) * multiplier;
        let code = |value: f32| if word == 0 { 0 } else { f32_to_e2m1(value / step) };
        scales.push(word);
        codes.extend(
            block
                .as_chunks::<2>()
                .0
                .iter()
                .map(|pair| code(pair[0]) | code(pair[1]) << 4),
        );
    }
    Ok(Words {
        codes,
        scales,
        multiplier,
    })
}

/// The scales of the inputs of a block's experts, three per expert; `None` when the source has not all of them.
pub(super) fn input_scales(source: &CheckpointSource, parent: &Parent) -> Option<Vec<f32>> {
    let (experts, layer) = (parent.shape[0] as usize, parent.members[0].layer?);
    let matrices = (0..experts).flat_map(|expert| Projection::ALL.map(|projection| (expert, projection)));
    matrices
        .map(|(expert, projection)| source.input_scale(&expert_matrix(layer, expert, projection)))
        .collect()
}

/// The parents that are banks.
pub(super) fn is_bank(parent: &Parent) -> bool {
    parent.members[0].role == EXPERT_BANK && parent.encoding.format == Format::Nvfp4Mul
}

/// The id of the volume: from what the source's files hold, so that equal sources have equal volumes.
pub(crate) fn volume_id(source: &CheckpointSource) -> [u8; 16] {
    let hashes = source.file_hashes();
    let digest = hashes
        .iter()
        .fold(Sha256::new(), |sha, hash| sha.chain_update(hash))
        .finalize();
    std::array::from_fn(|i| digest[i])
}

/// What the codes of the volume are multiplied by; exactly bfloat16.
pub(super) fn table_scale(source: &CheckpointSource, config: &TextConfig) -> Result<f32, ConvertError> {
    if let Some(scale) = source.coded_table_scale() {
        return Ok(scale);
    }
    let mut largest = 0.0f32;
    for_each_rows(source, config, |_, values| {
        largest = values.par_iter().map(|value| value.abs()).reduce(|| largest, f32::max);
        Ok(())
    })?;
    let scale = round_bf16(largest / E4M3FN_MAX);
    Ok(if scale > 0.0 { scale } else { 1.0 })
}

/// Writes the n-gram volume of a model that has one; it has no name yet.
pub(super) fn write_volume(
    source: &CheckpointSource,
    config: &TextConfig,
    path: &Path,
    scale: f32,
) -> Result<Option<PendingFile>, ConvertError> {
    let Some(dims) = &config.flash_next else {
        return Ok(None);
    };
    let geometry = dims.geometry(config.vocab_size);
    let mut volume = VolumeWriter::create(path, geometry, dims.volume_id.unwrap_or_default())?;
    if source.coded_table_scale().is_some() {
        for row in 0..geometry.rows {
            volume.append(source.table_row(row)?)?;
        }
    } else {
        for_each_rows(source, config, |_, values| {
            let codes: Vec<u8> = values
                .par_iter()
                .map(|value| f32_to_e4m3fn(round_bf16(value / scale)))
                .collect();
            codes
                .chunks_exact(geometry.row_bytes)
                .try_for_each(|row| volume.append(row))?;
            Ok(())
        })?;
    }
    Ok(Some(volume.complete()?))
}

/// The table's values, some rows at a time, with the first row's number.
fn for_each_rows(
    source: &CheckpointSource,
    config: &TextConfig,
    mut work: impl FnMut(u64, &[f32]) -> Result<(), ConvertError>,
) -> Result<(), ConvertError> {
    let (Some(dims), Some(table)) = (&config.flash_next, source.table()) else {
        return Ok(());
    };
    let geometry = dims.geometry(config.vocab_size);
    for first in (0..geometry.rows).step_by(ROWS as usize) {
        let rows: Vec<u64> = (first..geometry.rows.min(first + ROWS)).collect();
        let mut values = vec![0.0; rows.len() * geometry.row_bytes];
        table.read(&rows, &mut values)?;
        work(first, &values)?;
    }
    Ok(())
}

/// The bytes of the table's scale as the artifact stores it.
pub(super) fn scale_bytes(scale: f32) -> Result<Vec<u8>, FormatError> {
    crate::formats::encode(Format::Bf16, crate::formats::EncodeMethod::CastDirect, &[1], &[scale])
}
