//! Finds the tensors of a parameter and holds them against the configuration and the declaration of what is quantised.
//!
//! A weight `x.weight` has its scales in `x.weight_scale_inv`, `x.weight_scale`, `x.weight_scale_2` or
//! `x.weight_global_scale`, those of its input in `x.input_scale` or `x.input_global_scale`; NVFP4 codes may be in
//! `x.weight_packed`.

use std::path::Path;

use safetensors::Dtype;

use super::CheckpointError;
use super::declaration::{Declaration, MODELOPT_FILE, Module, Scheme, Words};
use super::names::{EMBEDDING, LM_HEAD, Origin, Selection, origins};
use super::shards::{Shards, Tensor};
use super::words::{Fp8, Grain, MatrixScale, Nvfp4, Storage, float, is_float, require_multipliers};
use crate::config::TextConfig;
use crate::formats::fp8_block::TILE;
use crate::formats::nvfp4::GROUP;
use crate::formats::{Format, FormatError};
use crate::parameters::{Parameter, RequiredFormat};
use crate::source::ActivationPolicy;

/// Ending of a tensor of NVFP4 codes in one of the two layouts.
pub(super) const PACKED: &str = "_packed";
const INPUT_SCALE: &str = "_input_scale";
const INPUT_GLOBAL_SCALE: &str = "_input_global_scale";
const FLOATS: &str = "BF16, F16 or F32";

/// Where a parameter's values are.
pub(super) struct Stored {
    pub(super) parameter: Parameter,
    pub(super) weight: Weight,
    pub(super) selection: Selection,
}

/// A weight tensor and how its words are to be read.
pub(super) struct Weight {
    pub(super) name: String,
    pub(super) tensor: Tensor,
    pub(super) storage: Storage,
    /// Names of its scales.
    pub(super) companions: Vec<String>,
    /// The activation precision it was quantised for.
    pub(super) policy: ActivationPolicy,
    /// The divisor for 4-bit activations.
    pub(super) activation_divisor: Option<f32>,
    /// Its reciprocal as stored, where it is stored as such.
    pub(super) input_scale: Option<f32>,
    /// Whether there is a fixed scale for 8-bit activations, which scoring does not use.
    pub(super) unused_input_scale: bool,
    /// Whether the scale for 4-bit activations is absent, so that they are not permitted.
    pub(super) missing_input_scale: bool,
}

impl Weight {
    /// Floats, until more is known.
    fn plain(name: &str, tensor: &Tensor) -> Self {
        Self {
            name: name.into(),
            tensor: tensor.clone(),
            storage: Storage::Float,
            companions: Vec::new(),
            policy: ActivationPolicy::A16Only,
            activation_divisor: None,
            input_scale: None,
            unused_input_scale: false,
            missing_input_scale: false,
        }
    }
}

/// What is looked for and where.
pub(super) struct Locator<'a> {
    pub(super) directory: &'a Path,
    pub(super) shards: &'a Shards,
    pub(super) config: &'a TextConfig,
    pub(super) prefix: &'static str,
    pub(super) declaration: Option<&'a Declaration>,
}

impl Locator<'_> {
    /// The tensor and selection of `parameter`.
    ///
    /// # Errors
    /// When it is absent, of another shape or type, or not quantised as declared.
    pub(super) fn locate(&self, parameter: Parameter) -> Result<Stored, CheckpointError> {
        if parameter
            .elements()
            .and_then(|elements| elements.checked_mul(size_of::<f32>()))
            .is_none()
        {
            return Err(CheckpointError::TooLarge {
                parameter: parameter.name,
            });
        }
        let candidates = origins(self.config, &parameter);
        for origin in &candidates {
            let name = full_name(self.prefix, origin);
            let Some(weight) = self.weight(&name, origin, &parameter)? else {
                continue;
            };
            return Ok(Stored {
                parameter,
                weight,
                selection: origin.selection.clone(),
            });
        }
        // Every role has at least one origin; the last is the plainest name.
        let origin = candidates
            .into_iter()
            .next_back()
            .unwrap_or_else(|| unreachable!("a role without a tensor"));
        Err(CheckpointError::MissingTensor {
            directory: self.directory.into(),
            tensor: full_name(self.prefix, &origin),
            parameter: parameter.name,
            expected: origin.shape,
        })
    }

    /// The weight called `name`, stored as declared; `None` when there is none.
    fn weight(&self, name: &str, origin: &Origin, parameter: &Parameter) -> Result<Option<Weight>, CheckpointError> {
        let scheme = self.declaration.and_then(|declaration| {
            // A router is a bare parameter, not a linear layer.
            let is_projection =
                parameter.input.is_some() && origin.tensor != EMBEDDING && parameter.role != "moe/router";
            let is_linear = is_projection && name.ends_with(".weight");
            let module = Module::new(name, self.prefix, is_linear, is_projection);
            // Norms, decays and the convolution are never quantised, whatever a pattern covers.
            declaration
                .scheme(&module)
                .filter(|_| parameter.format == RequiredFormat::Any)
                .map(|scheme| (declaration, scheme))
        });
        match scheme {
            None => self.plain_weight(name, origin),
            Some((declaration, scheme)) => self.quantized_weight(name, origin, declaration, scheme),
        }
    }

    fn plain_weight(&self, name: &str, origin: &Origin) -> Result<Option<Weight>, CheckpointError> {
        let packed = format!("{name}{PACKED}");
        let found = self.shards.tensors.get_key_value(name);
        let Some((name, tensor)) = found.or_else(|| self.shards.tensors.get_key_value(&packed)) else {
            return Ok(None);
        };
        let path = self.shards.path(tensor);
        if matches!(tensor.dtype, Dtype::F8_E4M3 | Dtype::U8) {
            let declaration = match self.declaration {
                Some(declaration) => format!("{} declares it unquantised", declaration.path.display()),
                None => format!("neither config.json nor {MODELOPT_FILE} declares it quantised: expected {FLOATS}"),
            };
            return Err(CheckpointError::NotDeclared {
                path: path.into(),
                tensor: name.clone(),
                found: tensor.dtype,
                declaration,
            });
        }
        if !is_float(tensor.dtype) {
            return Err(CheckpointError::Dtype {
                path: path.into(),
                tensor: name.clone(),
                found: tensor.dtype,
                expected: FLOATS,
            });
        }
        self.require_shape(name, tensor, &[&origin.shape])?;
        Ok(Some(Weight::plain(name, tensor)))
    }

    fn quantized_weight(
        &self,
        name: &str,
        origin: &Origin,
        declaration: &Declaration,
        scheme: Scheme,
    ) -> Result<Option<Weight>, CheckpointError> {
        let packed = format!("{name}{PACKED}");
        let (stored, other, dtype) = match scheme.words {
            Words::Fp8 | Words::Fp8Block => (name, &*packed, Dtype::F8_E4M3),
            Words::Nvfp4ModelOpt => (name, &*packed, Dtype::U8),
            Words::Nvfp4Packed => (&*packed, name, Dtype::U8),
        };
        let tensors = &self.shards.tensors;
        let Some((found, tensor)) = tensors.get_key_value(stored).or_else(|| tensors.get_key_value(other)) else {
            return Ok(None);
        };
        if found != stored || tensor.dtype != dtype {
            return Err(CheckpointError::NotAsDeclared {
                path: self.shards.path(tensor).into(),
                tensor: found.clone(),
                found: tensor.dtype,
                declaration: declaration.path.clone(),
                declared: scheme.words.name(),
            });
        }
        let mut weight = Weight::plain(found, tensor);
        match scheme.words {
            Words::Fp8 | Words::Fp8Block => self.fp8(name, origin, scheme, &mut weight)?,
            Words::Nvfp4ModelOpt | Words::Nvfp4Packed => self.nvfp4(name, origin, scheme, &mut weight)?,
        }
        Ok(Some(weight))
    }

    fn fp8(&self, name: &str, origin: &Origin, scheme: Scheme, weight: &mut Weight) -> Result<(), CheckpointError> {
        self.require_shape(name, &weight.tensor, &[&origin.shape])?;
        let [matrices @ .., rows, columns] = &*origin.shape else {
            unreachable!("a weight of any format is a matrix")
        };
        let (rows, columns) = (*rows, *columns);
        let plain = format!("{name}_scale");
        let scale_name = [format!("{name}_scale_inv"), plain.clone()]
            .into_iter()
            .find(|name| self.shards.tensors.contains_key(name))
            .unwrap_or(plain);
        let scales = self.scale_tensor(&scale_name, name, &mut weight.companions)?;
        if !is_float(scales.dtype) {
            return Err(self.scale_type(&scale_name, &scales));
        }
        let grain = if scheme.words == Words::Fp8Block {
            let tiles = [matrices, &[rows.div_ceil(TILE), columns.div_ceil(TILE)]].concat();
            self.require_shape(&scale_name, &scales, &[&tiles])?;
            Grain::Block
        } else if scales.shape.iter().all(|extent| *extent == 1) {
            Grain::Tensor
        } else {
            self.require_shape(&scale_name, &scales, &[&[rows, 1], &[rows]])?;
            Grain::Row
        };
        require_multipliers(self.shards, &scale_name, &scales)?;
        weight.policy = scheme.activations;
        let input = input_scale(name, INPUT_SCALE);
        if self.shards.tensors.contains_key(&input) {
            // Eight-bit activations are scaled token by token.
            weight.unused_input_scale = true;
            weight.companions.push(input);
        }
        weight.storage = Storage::Fp8(Fp8 {
            scales,
            rows,
            columns,
            grain,
        });
        Ok(())
    }

    fn nvfp4(&self, name: &str, origin: &Origin, scheme: Scheme, weight: &mut Weight) -> Result<(), CheckpointError> {
        let (stored, shape) = (weight.name.clone(), &*origin.shape);
        let (rows, columns) = match *shape {
            [rows, columns] if columns.is_multiple_of(GROUP) => (rows, columns),
            _ => {
                let shape: Vec<u64> = shape.iter().map(|extent| *extent as u64).collect();
                return Err(CheckpointError::Word {
                    path: self.shards.path(&weight.tensor).into(),
                    tensor: stored,
                    source: FormatError::shape(Format::Nvfp4, &shape, "[N, K] with K % 16 == 0"),
                });
            }
        };
        self.require_shape(&stored, &weight.tensor, &[&[rows, columns / 2]])?;
        let scale_name = format!("{name}_scale");
        let scales = self.scale_tensor(&scale_name, name, &mut weight.companions)?;
        if scales.dtype != Dtype::F8_E4M3 {
            return Err(CheckpointError::Dtype {
                path: self.shards.path(&scales).into(),
                tensor: scale_name,
                found: scales.dtype,
                expected: "F8_E4M3",
            });
        }
        self.require_shape(&scale_name, &scales, &[&[rows, columns / GROUP]])?;
        let is_packed = scheme.words == Words::Nvfp4Packed;
        let (matrix, input) = if is_packed {
            (format!("{name}_global_scale"), input_scale(name, INPUT_GLOBAL_SCALE))
        } else {
            (format!("{name}_scale_2"), input_scale(name, INPUT_SCALE))
        };
        let kind: fn(f32) -> MatrixScale = if is_packed {
            MatrixScale::Divisor
        } else {
            MatrixScale::Multiplier
        };
        let matrix_scale = kind(self.single_scale(&matrix, name, &mut weight.companions, kind)?);
        weight.policy = ActivationPolicy::A16Only;
        if scheme.activations == ActivationPolicy::AllowA4 {
            // The declaration of this layout does not tell weight-only quantisation apart.
            weight.missing_input_scale = !is_packed && !self.shards.tensors.contains_key(&input);
            if !weight.missing_input_scale {
                let scale = self.single_scale(&input, name, &mut weight.companions, kind)?;
                weight.activation_divisor = Some(kind(scale).divisor());
                weight.input_scale = Some(kind(scale).multiplier());
                weight.policy = ActivationPolicy::AllowA4;
            }
        } else if scheme.activations == ActivationPolicy::AllowA8 {
            weight.policy = ActivationPolicy::AllowA8;
        }
        weight.storage = Storage::Nvfp4(Nvfp4 { scales, matrix_scale });
        Ok(())
    }

    fn scale_tensor(&self, name: &str, weight: &str, used: &mut Vec<String>) -> Result<Tensor, CheckpointError> {
        let tensor = self.shards.tensors.get(name);
        let tensor = tensor.ok_or_else(|| CheckpointError::MissingScale {
            directory: self.directory.into(),
            tensor: name.into(),
            weight: weight.into(),
        })?;
        used.push(name.into());
        Ok(tensor.clone())
    }

    /// The one finite positive element of a scale, whose reciprocal is finite and positive too.
    fn single_scale(
        &self,
        name: &str,
        weight: &str,
        used: &mut Vec<String>,
        kind: fn(f32) -> MatrixScale,
    ) -> Result<f32, CheckpointError> {
        let tensor = self.scale_tensor(name, weight, used)?;
        self.require_shape(name, &tensor, &[&[1], &[]])?;
        if !is_float(tensor.dtype) {
            return Err(self.scale_type(name, &tensor));
        }
        let value = float(self.shards.bytes(&tensor), tensor.dtype, 0);
        let divisor = kind(value).divisor();
        if value.is_finite() && value > 0.0 && divisor.is_finite() && divisor > 0.0 {
            return Ok(value);
        }
        Err(CheckpointError::Scale {
            path: self.shards.path(&tensor).into(),
            tensor: name.into(),
            element: 0,
            value,
            expected: "a finite positive number with a finite reciprocal",
        })
    }

    fn scale_type(&self, name: &str, tensor: &Tensor) -> CheckpointError {
        CheckpointError::Dtype {
            path: self.shards.path(tensor).into(),
            tensor: name.into(),
            found: tensor.dtype,
            expected: FLOATS,
        }
    }

    /// Refuses a tensor that has none of the `expected` shapes, of which the first is the usual one.
    fn require_shape(&self, name: &str, tensor: &Tensor, expected: &[&[usize]]) -> Result<(), CheckpointError> {
        if expected.contains(&&*tensor.shape) {
            return Ok(());
        }
        Err(CheckpointError::Shape {
            path: self.shards.path(tensor).into(),
            tensor: name.into(),
            found: tensor.shape.clone(),
            expected: expected[0].to_vec(),
        })
    }
}

/// Name of the scale of the activation that weight `name` multiplies; `ending` starts with `_`.
fn input_scale(name: &str, ending: &str) -> String {
    match name.strip_suffix(".weight") {
        Some(module) => format!("{module}.{}", &ending[1..]),
        None => format!("{name}{ending}"),
    }
}

fn full_name(prefix: &str, origin: &Origin) -> String {
    if origin.tensor == LM_HEAD {
        LM_HEAD.into()
    } else {
        format!("{prefix}{}", origin.tensor)
    }
}
