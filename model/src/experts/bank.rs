//! A bank of routed experts in an artifact: one record per expert, read by itself. With a second copy of the artifact, on
//! another disk, every other record is read from there, so that both disks work.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use super::ExpertError;
use crate::artifact::{Artifact, ArtifactError};
use crate::formats::nvfp4_expert::{Geometry, Projection, check_record, decode_record};
use crate::formats::{Format, FormatError};
use crate::source::ActivationPolicy;

/// What is appended to a bank's name for the scales of its 4-bit activations.
const INPUT_SCALES: &str = "expert_input_scales";

/// The routed experts of one block, `[E, H, I]`.
pub struct ExpertBank {
    artifact: Arc<Artifact>,
    copy: Option<Arc<Artifact>>,
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
    pub(crate) fn open(artifact: &Arc<Artifact>, name: &str, policy: ActivationPolicy) -> Result<Self, ExpertError> {
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
            copy: None,
            object,
            offset,
            geometry,
            multipliers,
            input_scales,
            policy,
        })
    }

    /// The bank with every other record read from `copy`, which [`open_copy`](Self::open_copy) gave.
    ///
    /// # Errors
    /// When the copy's bank cannot be read or has other multipliers.
    pub fn with_copy(self, copy: &Arc<Artifact>) -> Result<Self, ExpertError> {
        let tail = copy.payload(self.tail(), 12 * self.geometry.experts as u64);
        let found =
            triples(&tail.map_err(ExpertError::Copy)?).map_err(|source| ExpertError::Copy(self.refused(source)))?;
        if let Some(expert) = (0..found.len()).find(|expert| found[*expert] != self.multipliers[*expert]) {
            return Err(ExpertError::Other {
                path: copy.path().into(),
                what: format!("the multipliers of expert {expert} of {}", self.object),
                found: format!("{:?}", found[expert]),
                expected: format!("{:?}", self.multipliers[expert]),
            });
        }
        Ok(Self {
            copy: Some(Arc::clone(copy)),
            ..self
        })
    }

    /// Opens a second copy of `artifact`, all its files.
    ///
    /// # Errors
    /// When one is missing, too short or too long, or it is the copy of another artifact.
    pub fn open_copy(artifact: &Artifact, path: &Path) -> Result<Arc<Artifact>, ExpertError> {
        let copy = Artifact::open(path).map_err(ExpertError::Copy)?;
        for (what, found, expected) in [
            ("the artifact id", copy.artifact_id(), artifact.artifact_id()),
            (
                "the SHA-256 of the directory",
                copy.header_sha256(),
                artifact.header_sha256(),
            ),
        ] {
            if found != expected {
                return Err(ExpertError::Other {
                    path: path.into(),
                    what: what.into(),
                    found,
                    expected,
                });
            }
        }
        copy.open_files().map_err(ExpertError::Copy)?;
        Ok(Arc::new(copy))
    }

    /// Where the multipliers lie, behind the records.
    fn tail(&self) -> u64 {
        self.offset + (self.geometry.experts * self.geometry.stride) as u64
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
        let (artifact, offset, bytes) = self.place(expert);
        artifact.payload(offset, bytes)
    }

    /// Has the system begin to read the record of `expert`.
    pub(super) fn will_need(&self, expert: usize) {
        let (artifact, offset, bytes) = self.place(expert);
        artifact.will_need(offset, bytes);
    }

    fn place(&self, expert: usize) -> (&Artifact, u64, u64) {
        let artifact = self.copy.as_ref().filter(|_| expert % 2 == 1);
        let stride = self.geometry.stride as u64;
        let offset = self.offset + expert as u64 * stride;
        (artifact.unwrap_or(&self.artifact), offset, stride)
    }

    /// The values of one matrix of `expert`, C order.
    ///
    /// # Errors
    /// When the record cannot be read or a scale in it is not a number.
    pub fn load(&self, expert: usize, projection: Projection) -> Result<Vec<f32>, ArtifactError> {
        self.decode(expert, &self.record(expert)?, projection)
    }

    /// The same of a record that was read.
    pub(crate) fn decode(
        &self,
        expert: usize,
        record: &[u8],
        projection: Projection,
    ) -> Result<Vec<f32>, ArtifactError> {
        let (rows, columns) = self.geometry.matrix(projection);
        let mut values = vec![0.0; rows * columns];
        let multiplier = self.multipliers[expert][projection as usize];
        decode_record(&self.geometry, record, projection, multiplier, &mut values)
            .map_err(|source| self.refused(source))?;
        Ok(values)
    }

    /// As [`Self::record`], for one that is used as it is stored.
    ///
    /// # Errors
    /// As [`Self::record`], and when the record holds a scale that is negative or not a number.
    pub(super) fn checked_record(&self, expert: usize) -> Result<Cow<'_, [u8]>, ArtifactError> {
        let record = self.record(expert)?;
        check_record(&self.geometry, &record).map_err(|source| self.refused(source))?;
        Ok(record)
    }

    pub(crate) fn refused(&self, source: FormatError) -> ArtifactError {
        ArtifactError::Object {
            object: self.object.clone(),
            source,
        }
    }
}

fn not_whole(name: &str, found: String) -> ExpertError {
    ExpertError::NotWhole {
        parameter: name.to_owned(),
        found,
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
