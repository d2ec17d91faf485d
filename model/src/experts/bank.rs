//! A bank of routed experts in an artifact: one record per expert, read by itself.

use std::borrow::Cow;
use std::sync::Arc;

use crate::artifact::{Artifact, ArtifactError};
use crate::formats::nvfp4_expert::{Geometry, Projection, decode_record};
use crate::formats::{Format, FormatError};
use crate::source::ActivationPolicy;

/// What is appended to a bank's name for the scales of its 4-bit activations.
const INPUT_SCALES: &str = "expert_input_scales";

/// The routed experts of one block, `[E, H, I]`.
pub struct ExpertBank {
    artifact: Arc<Artifact>,
    object: String,
    offset: u64,
    geometry: Geometry,
    multipliers: Vec<[f32; 3]>,
    input_scales: Option<Vec<[f32; 3]>>,
    policy: ActivationPolicy,
}

impl std::fmt::Debug for ExpertBank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExpertBank")
            .field("object", &self.object)
            .finish_non_exhaustive()
    }
}

impl ExpertBank {
    /// The bank that is bound to `name`, such as `text/layers/0/moe/experts`, with its input scales if it has any.
    ///
    /// # Errors
    /// When the bank is not one whole object of the right size, or a multiplier or input scale is not finite and positive.
    pub(crate) fn open(artifact: &Arc<Artifact>, name: &str, policy: ActivationPolicy) -> Result<Self, ArtifactError> {
        let parts = artifact.stored_parts(name)?;
        let elements = artifact.elements(name)?;
        let [part] = &*parts else {
            return Err(not_whole(name, format!("{} parts", parts.len())));
        };
        if (part.begin, part.end) != (0, part.object.elements().unwrap_or(0)) {
            return Err(not_whole(name, format!("{elements} elements of {}", part.object.id)));
        }
        let (object, offset) = (part.object.id.clone(), part.object.offset);
        let refused = |source: FormatError| ArtifactError::Object {
            object: object.clone(),
            source,
        };
        let geometry = Geometry::new(&part.encoding.shape).map_err(refused)?;
        let tail = artifact.payload(
            offset + (geometry.experts * geometry.stride) as u64,
            12 * geometry.experts as u64,
        )?;
        let multipliers = triples(&tail).map_err(refused)?;
        let scales = name.replace("experts", INPUT_SCALES);
        let input_scales = match artifact.bindings().contains_key(&scales) {
            true => {
                artifact.check_parameter(&scales, &[geometry.experts as u64, 3], Some(Format::Fp32))?;
                let bytes: Vec<u8> = artifact
                    .load(&scales)?
                    .iter()
                    .flat_map(|scale| scale.to_le_bytes())
                    .collect();
                Some(triples(&bytes).map_err(|source| ArtifactError::Object { object: scales, source })?)
            }
            false => None,
        };
        Ok(Self {
            artifact: Arc::clone(artifact),
            object,
            offset,
            geometry,
            multipliers,
            input_scales,
            policy,
        })
    }

    /// Where the records lie.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The multipliers of an expert's gate, up and down matrices.
    pub fn multipliers(&self, expert: usize) -> [f32; 3] {
        self.multipliers[expert]
    }

    /// The scales of 4-bit activations at the inputs of an expert's gate, up and down; `None` when the bank permits
    /// 16-bit activations only.
    pub fn input_scales(&self, expert: usize) -> Option<[f32; 3]> {
        if self.policy != ActivationPolicy::AllowA4 {
            return None;
        }
        self.input_scales.as_ref().map(|scales| scales[expert])
    }

    /// The record of `expert`, its zero tail included; borrowed when one file holds it.
    ///
    /// # Errors
    /// When a file of the artifact cannot be read.
    pub fn record(&self, expert: usize) -> Result<Cow<'_, [u8]>, ArtifactError> {
        let stride = self.geometry.stride as u64;
        self.artifact.payload(self.offset + expert as u64 * stride, stride)
    }

    /// The values of one matrix of `expert`, C order.
    ///
    /// # Errors
    /// When the record cannot be read or a scale in it is not a number.
    pub fn load(&self, expert: usize, projection: Projection) -> Result<Vec<f32>, ArtifactError> {
        let (rows, columns) = self.geometry.matrix(projection);
        let mut values = vec![0.0; rows * columns];
        let multiplier = self.multipliers[expert][projection as usize];
        decode_record(
            &self.geometry,
            &self.record(expert)?,
            projection,
            multiplier,
            &mut values,
        )
        .map_err(|source| self.refused(source))?;
        Ok(values)
    }

    pub(crate) fn refused(&self, source: FormatError) -> ArtifactError {
        ArtifactError::Object {
            object: self.object.clone(),
            source,
        }
    }
}

fn not_whole(name: &str, found: String) -> ArtifactError {
    ArtifactError::ParameterShape {
        parameter: name.to_owned(),
        expected: Vec::new(),
        found: format!("{found}: a bank of experts is one whole object"),
    }
}

/// Finite positive numbers, three per expert.
fn triples(bytes: &[u8]) -> Result<Vec<[f32; 3]>, FormatError> {
    let values = bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word));
    let values: Vec<f32> = values.collect();
    if let Some(index) = values.iter().position(|value| !(value.is_finite() && *value > 0.0)) {
        return Err(FormatError::InvalidWord {
            what: "scale of an expert's matrix",
            index: index as u64,
            word: values[index].to_bits(),
        });
    }
    Ok(values.as_chunks::<3>().0.to_vec())
}
