//! An artifact's text component as a weight source: the model's parameter list held against the directory.
//!
//! Opening walks the parameters in declaration order and refuses a missing binding, another number of elements or
//! another shape, another format where one is required, a projection input without a Use or without a policy, an
//! unknown auxiliary and an unfit activation divisor. Objects and components that no text parameter mentions are not
//! looked at.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::artifact::{ACTIVATION_DIVISOR, Artifact, ArtifactError};
use crate::config::{ConfigError, TextConfig};
use crate::experts::{ExpertBank, ExpertError};
use crate::formats::Format;
use crate::parameters::{EXPERT_BANK, RequiredFormat, parameters};
use crate::source::{ActivationPolicy, SourceError, SourceFile, StoredParameter, StoredPart, TextSource};
use crate::tokenizer::{CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG};

/// The component that is loaded.
const TEXT: &str = "text";

/// An artifact whose text model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BindingError {
    /// The container, a binding or a Use is at fault.
    #[error("{}", in_file(path, source))]
    Artifact {
        /// The entry file.
        path: PathBuf,
        /// Why.
        source: Box<ArtifactError>,
    },
    /// The text configuration is at fault.
    #[error("{}: {source}", path.display())]
    Config {
        /// The entry file.
        path: PathBuf,
        /// Why.
        source: ConfigError,
    },
    /// Asked for with another number of elements.
    #[error("{}: {parameter} has {found} elements, but {expected:?} was asked for", path.display())]
    ExpectedShape {
        /// The entry file.
        path: PathBuf,
        /// The parameter.
        parameter: String,
        /// Its number of elements.
        found: u64,
        /// The shape asked for.
        expected: Vec<usize>,
    },
}

/// `path: error`, unless the error names the file itself.
fn in_file(path: &Path, error: &ArtifactError) -> String {
    let (path, error) = (path.display().to_string(), error.to_string());
    match error.contains(&path) {
        true => error,
        false => format!("{path}: {error}"),
    }
}

impl From<BindingError> for SourceError {
    fn from(error: BindingError) -> Self {
        Self(Box::new(error))
    }
}

/// An opened artifact whose text parameters are all there.
pub struct ArtifactSource {
    artifact: Arc<Artifact>,
    config: TextConfig,
    name: String,
    /// Permission and divisor of every projection.
    activations: HashMap<String, (ActivationPolicy, Option<f32>)>,
}

impl ArtifactSource {
    /// Opens and checks the entry file `path`.
    ///
    /// # Errors
    /// See [`BindingError`]; no weight has been decoded by then.
    pub fn open(path: &Path) -> Result<Self, BindingError> {
        let refused = |source| BindingError::Artifact {
            path: path.into(),
            source: Box::new(source),
        };
        let artifact = Artifact::open(path).map_err(refused)?;
        let text = &artifact.components()[TEXT];
        let config = TextConfig::from_artifact(&text.config).map_err(|source| BindingError::Config {
            path: path.into(),
            source,
        })?;
        for role in [TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, GENERATION_CONFIG] {
            artifact.resource(TEXT, role).map_err(refused)?;
        }
        let mut activations = HashMap::new();
        for parameter in parameters(&config) {
            let shape: Vec<u64> = parameter.shape.iter().map(|extent| *extent as u64).collect();
            let format = match parameter.format {
                RequiredFormat::Any => None,
                RequiredFormat::Bf16 => Some(Format::Bf16),
                RequiredFormat::Fp32 => Some(Format::Fp32),
                RequiredFormat::Nvfp4Mul => Some(Format::Nvfp4Mul),
            };
            artifact
                .check_parameter(&parameter.name, &shape, format)
                .map_err(refused)?;
            if let Some(input) = &parameter.input {
                let activation = artifact.activation(&parameter.name, input).map_err(refused)?;
                // Scales of 4-bit activations are a parameter of their own there.
                if let (Some(_), Some(_)) = (&config.flash_next, activation.1) {
                    let role = ACTIVATION_DIVISOR.into();
                    let (parameter, input) = (parameter.name, input.clone());
                    return Err(refused(ArtifactError::AuxiliaryRole { parameter, input, role }));
                }
                activations.insert(parameter.name, activation);
            }
        }
        let name = artifact.name().unwrap_or(config.architecture()).to_owned();
        Ok(Self {
            artifact: Arc::new(artifact),
            config,
            name,
            activations,
        })
    }

    fn refused(&self, source: ArtifactError) -> BindingError {
        let source = Box::new(source);
        BindingError::Artifact {
            path: self.artifact.path().into(),
            source,
        }
    }
}

impl TextSource for ArtifactSource {
    fn config(&self) -> &TextConfig {
        &self.config
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn load(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>, SourceError> {
        let found = self.artifact.elements(name).map_err(|source| self.refused(source))?;
        let wanted = expected
            .iter()
            .try_fold(1u64, |product, extent| product.checked_mul(*extent as u64));
        if wanted != Some(found) {
            let (path, parameter) = (self.artifact.path().into(), name.into());
            return Err(BindingError::ExpectedShape {
                path,
                parameter,
                found,
                expected: expected.to_vec(),
            }
            .into());
        }
        Ok(self.artifact.load(name).map_err(|source| self.refused(source))?)
    }

    fn expert_bank(&self, layer: usize) -> Result<Option<ExpertBank>, SourceError> {
        let name = format!("text/layers/{layer}/{EXPERT_BANK}");
        if self.config.flash_next.is_none() || !self.artifact.bindings().contains_key(&name) {
            return Ok(None);
        }
        let policy = self.activations.get(&name).map(|(policy, _)| *policy);
        let bank = ExpertBank::open(&self.artifact, &name, policy.unwrap_or(ActivationPolicy::A16Only));
        Ok(Some(bank.map_err(|error| match error {
            ExpertError::Artifact(source) => self.refused(source).into(),
            other => SourceError(Box::new(other)),
        })?))
    }

    fn resource(&self, role: &str) -> Result<Option<Vec<u8>>, SourceError> {
        if !self.artifact.components()[TEXT].resources.contains_key(role) {
            return Ok(None);
        }
        let bytes = self
            .artifact
            .resource(TEXT, role)
            .map_err(|source| self.refused(source))?;
        Ok(Some(bytes.into_owned()))
    }

    fn notes(&self) -> Vec<String> {
        let others: Vec<&str> = self
            .artifact
            .components()
            .keys()
            .map(String::as_str)
            .filter(|id| *id != TEXT)
            .collect();
        if others.is_empty() {
            Vec::new()
        } else {
            vec![format!("components not loaded: {}", others.join(", "))]
        }
    }

    fn files(&self) -> Vec<SourceFile> {
        let entry = self.artifact.path().file_name().unwrap_or_default().to_string_lossy();
        let files = self.artifact.files().iter();
        files
            .map(|file| SourceFile {
                name: file.path.clone().unwrap_or_else(|| entry.clone().into()),
                bytes: file.payload_bytes,
            })
            .collect()
    }

    fn header_sha256(&self) -> Result<Option<String>, SourceError> {
        Ok(Some(self.artifact.header_sha256()))
    }

    fn stored(&self, name: &str) -> Result<StoredParameter, SourceError> {
        let parts = self
            .artifact
            .stored_parts(name)
            .map_err(|source| self.refused(source))?;
        let mut elements = 0;
        let parts = parts
            .into_iter()
            .map(|part| {
                elements += part.end - part.begin;
                let whole = u128::from(part.object.elements().unwrap_or(1));
                StoredPart {
                    object: part.object.id.clone(),
                    object_shape: part.encoding.shape.iter().map(|extent| *extent as usize).collect(),
                    format: part.encoding.format.name(),
                    layout: part.encoding.layout.name(),
                    range: Some((part.begin, part.end)),
                    bytes: (u128::from(part.object.bytes) * u128::from(part.end - part.begin) / whole) as u64,
                }
            })
            .collect();
        let activation = self.activations.get(name);
        Ok(StoredParameter {
            elements,
            parts,
            policy: activation.map(|(policy, _)| *policy),
            activation_divisor: activation.and_then(|(_, divisor)| *divisor),
        })
    }

    fn artifact(&self) -> Option<&Artifact> {
        Some(&self.artifact)
    }
}
