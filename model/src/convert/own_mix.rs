//! Own mixes of formats, written as TOML:
//!
//! ```toml
//! name = "mine"
//! fallback = "q8_g32_fp16"          # for matrices that a rule's format cannot hold; default bf16
//!
//! [[rule]]
//! role = "mlp/*"                    # `*` stands for any characters
//! layers = "0..8, 12"               # default all; the end of a range is not in it
//! format = "nvfp4"
//! method = "nvfp4_mse"              # default: the format's canonical encoder
//! policy = "AllowA8"                # default A16Only
//! ```

use serde::Deserialize;

use super::recipe::{Encoding, Layers, ROLES, Recipe, Rule, matches};
use crate::formats::{EncodeMethod, Format, FormatError};
use crate::source::ActivationPolicy::{A16Only, AllowA4, AllowA8};

/// A recipe that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The text is not a recipe.
    #[error("the recipe is not valid TOML: {0}")]
    Toml(#[from] toml::de::Error),
    /// A rule names no format or method, or a method that does not make the format.
    #[error("rule {rule} of the recipe: {source}")]
    Format {
        /// Number of the rule, from 1; 0 for the fallback.
        rule: usize,
        /// Why.
        source: FormatError,
    },
    /// A format that is only imported, never encoded.
    #[error("rule {rule} of the recipe: {format} cannot be encoded from floating-point weights")]
    NoEncoder {
        /// Number of the rule, from 1; 0 for the fallback.
        rule: usize,
        /// The format.
        format: Format,
    },
    /// A method of another format.
    #[error("rule {rule} of the recipe: method {method} does not produce {format}")]
    Method {
        /// Number of the rule, from 1.
        rule: usize,
        /// The method.
        method: EncodeMethod,
        /// The format.
        format: Format,
    },
    /// Layers that cannot be read.
    #[error("rule {rule} of the recipe: layers {text:?}: expected numbers and ranges such as \"0..8, 12\"")]
    Layers {
        /// Number of the rule, from 1.
        rule: usize,
        /// The text.
        text: String,
    },
    /// A permission that does not exist.
    #[error("rule {rule} of the recipe: policy {policy:?}: expected A16Only, AllowA8 or AllowA4")]
    Policy {
        /// Number of the rule, from 1.
        rule: usize,
        /// The text.
        policy: String,
    },
    /// A rule whose pattern no parameter of any model can match.
    #[error("rule {rule} of the recipe: no parameter has a role like {pattern:?}; the roles are {ROLES:?}")]
    Pattern {
        /// Number of the rule, from 1.
        rule: usize,
        /// The pattern.
        pattern: String,
    },
}

impl Recipe {
    /// Reads an own mix: `name`, perhaps `fallback`, and an ordered list of `[[rule]]` with `role` and `format` and perhaps
    /// `layers` ("0..8, 12"), `method` and `policy`.
    ///
    /// # Errors
    /// Text that is not such a TOML, unknown formats, methods, policies or layers, a pattern that matches no role.
    pub fn from_toml(text: &str) -> Result<Self, RecipeError> {
        let file: RecipeFile = toml::from_str(text)?;
        let fallback = match &file.fallback {
            None => Encoding::BF16,
            Some(format) => encoding(0, format, None)?,
        };
        let rules = file
            .rule
            .iter()
            .enumerate()
            .map(|(index, rule)| rule.check(index + 1))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            name: file.name,
            rules,
            fallback,
            separate_control: false,
            own: true,
        })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RecipeFile {
    name: String,
    fallback: Option<String>,
    #[serde(default)]
    rule: Vec<RuleFile>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleFile {
    role: String,
    layers: Option<String>,
    format: String,
    method: Option<String>,
    policy: Option<String>,
}

impl RuleFile {
    fn check(&self, number: usize) -> Result<Rule, RecipeError> {
        if !ROLES.iter().any(|role| matches(&self.role, role)) {
            return Err(RecipeError::Pattern {
                rule: number,
                pattern: self.role.clone(),
            });
        }
        let layers = match &self.layers {
            None => Layers::All,
            Some(text) => Layers::parse(text).ok_or_else(|| RecipeError::Layers {
                rule: number,
                text: text.clone(),
            })?,
        };
        let policy = match self.policy.as_deref() {
            None | Some("A16Only") => A16Only,
            Some("AllowA8") => AllowA8,
            Some("AllowA4") => AllowA4,
            Some(other) => {
                return Err(RecipeError::Policy {
                    rule: number,
                    policy: other.into(),
                });
            }
        };
        let encoding = encoding(number, &self.format, self.method.as_deref())?;
        Ok(Rule {
            role: self.role.clone(),
            layers,
            encoding,
            policy,
            policy_if_encoded: None,
        })
    }
}

fn encoding(rule: usize, format: &str, method: Option<&str>) -> Result<Encoding, RecipeError> {
    let wrong = |source| RecipeError::Format { rule, source };
    let format: Format = format.parse().map_err(wrong)?;
    let canonical = match format {
        // Weights are not integers.
        Format::Int32 => None,
        _ => Encoding::canonical(format),
    };
    let canonical = canonical.ok_or(RecipeError::NoEncoder { rule, format })?;
    match method {
        None => Ok(canonical),
        Some(name) => {
            let method: EncodeMethod = name.parse().map_err(wrong)?;
            if method.encodes(format) {
                Ok(Encoding { format, method })
            } else {
                Err(RecipeError::Method { rule, method, format })
            }
        }
    }
}
