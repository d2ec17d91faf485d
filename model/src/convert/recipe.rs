//! Which format, encoding method and activation permission each weight gets.
//!
//! A recipe is an ordered list of rules; the first whose role pattern and layers match decides. Only parameters that may
//! be stored in any format are asked about: norms and the convolution stay bf16, `gdn/a_log` and `gdn/dt_bias` fp32.
//! What no rule matches is bf16 with 16-bit activations.
//!
//! Own mixes are written as TOML:
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

use crate::formats::{EncodeMethod, Format, FormatError};
use crate::source::ActivationPolicy::{self, A16Only, AllowA4, AllowA8};

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

/// How values become bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Encoding {
    /// The numeric format.
    pub format: Format,
    /// How its words are chosen.
    pub method: EncodeMethod,
}

impl Encoding {
    pub(super) const BF16: Self = Self {
        format: Format::Bf16,
        method: EncodeMethod::CastDirect,
    };
    pub(super) const FP32: Self = Self {
        format: Format::Fp32,
        method: EncodeMethod::CastDirect,
    };
    const Q4: Self = Self {
        format: Format::Q4G64Fp16,
        method: EncodeMethod::GroupedAbsmax,
    };
    const Q5: Self = Self {
        format: Format::Q5G64Fp16,
        method: EncodeMethod::GroupedAbsmax,
    };
    const Q6: Self = Self {
        format: Format::Q6G64Fp16,
        method: EncodeMethod::GroupedAbsmax,
    };
    const Q8: Self = Self {
        format: Format::Q8G32Fp16,
        method: EncodeMethod::GroupedAbsmax,
    };
    const FP8: Self = Self {
        format: Format::Fp8E4m3fnRowBf16,
        method: EncodeMethod::Fp8RowMaxabs,
    };
    const NVFP4: Self = Self {
        format: Format::Nvfp4,
        method: EncodeMethod::Nvfp4Absmax,
    };
    const NVFP4_MSE: Self = Self {
        format: Format::Nvfp4,
        method: EncodeMethod::Nvfp4Mse,
    };

    /// `format` by its canonical encoder, if it has one.
    fn canonical(format: Format) -> Option<Self> {
        EncodeMethod::ALL
            .into_iter()
            .find(|method| method.encodes(format))
            .map(|method| Self { format, method })
    }
}

/// Which blocks a rule is for; parameters outside the blocks match `All` only.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Layers {
    All,
    Ranges(Vec<std::ops::Range<usize>>),
}

impl Layers {
    fn contain(&self, layer: Option<usize>) -> bool {
        match self {
            Self::All => true,
            Self::Ranges(ranges) => layer.is_some_and(|layer| ranges.iter().any(|range| range.contains(&layer))),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let number = |text: &str| text.trim().parse::<usize>().ok();
        let range = |part: &str| match part.split_once("..") {
            Some((begin, end)) => Some(number(begin)?..number(end)?).filter(|range| !range.is_empty()),
            None => number(part).and_then(|layer| Some(layer..layer.checked_add(1)?)),
        };
        text.split(',').map(range).collect::<Option<_>>().map(Self::Ranges)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    role: String,
    layers: Layers,
    encoding: Encoding,
    policy: ActivationPolicy,
}

/// An ordered list of rules under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    name: String,
    rules: Vec<Rule>,
    fallback: Encoding,
    /// Whether `gdn/a_projection` and `gdn/b_projection` stay two objects.
    separate_control: bool,
}

/// Roles that a rule can decide about.
const ROLES: [&str; 25] = [
    "token_embedding",
    "output_head",
    "attention/query",
    "attention/key",
    "attention/gate",
    "attention/value",
    "attention/output",
    "gdn/query",
    "gdn/key",
    "gdn/value",
    "gdn/z",
    "gdn/a_projection",
    "gdn/b_projection",
    "gdn/output",
    "mlp/gate",
    "mlp/up",
    "mlp/down",
    "moe/router",
    "moe/shared_score",
    "moe/experts/gate",
    "moe/experts/up",
    "moe/experts/down",
    "moe/shared/gate",
    "moe/shared/up",
    "moe/shared/down",
];

/// The control projections: few rows, and every error in them reaches the decay or the routing.
const CONTROL: [&str; 4] = ["gdn/a_projection", "gdn/b_projection", "moe/router", "moe/shared_score"];

impl Recipe {
    /// Names that [`Recipe::named`] knows: uniform recipes, then the official mixes.
    pub const NAMES: [&'static str; 14] = [
        "bf16",
        "q8",
        "q6",
        "q5",
        "q4",
        "fp8",
        "nvfp4",
        "nvfp4_mse",
        "qwen3_6_27b",
        "qwen3_8_27b",
        "qwen3_8_27b_q6",
        "qwen3_6_27b_nvfp4",
        "qwen3_8_27b_nvfp4",
        "qwen3_6_35b_a3b",
    ];

    /// A built-in recipe.
    ///
    /// The uniform ones store every matrix in one format, except the control projections (bf16) and, for nvfp4, the
    /// embedding and the head (q8). The layer numbers of the official mixes are those of the models they were made for
    /// (64 and 40 blocks) and are taken as they are, whatever the number of blocks.
    pub fn named(name: &str) -> Option<Self> {
        let recipe = match name {
            "bf16" => Self::uniform(Encoding::BF16, A16Only),
            "q8" => Self::uniform(Encoding::Q8, A16Only),
            "q6" => Self::uniform(Encoding::Q6, A16Only),
            "q5" => Self::uniform(Encoding::Q5, A16Only),
            "q4" => Self::uniform(Encoding::Q4, A16Only),
            "fp8" => Self::uniform(Encoding::FP8, AllowA8),
            "nvfp4" => Self::uniform_nvfp4(Encoding::NVFP4),
            "nvfp4_mse" => Self::uniform_nvfp4(Encoding::NVFP4_MSE),
            "qwen3_6_27b" => Self::grouped_27b(Encoding::Q6, Encoding::Q4),
            "qwen3_8_27b" => Self::grouped_27b(Encoding::Q8, Encoding::Q4),
            "qwen3_8_27b_q6" => Self::grouped_27b(Encoding::Q8, Encoding::Q6),
            "qwen3_6_27b_nvfp4" => Self::nvfp4_3_6_27b(),
            "qwen3_8_27b_nvfp4" => Self::nvfp4_3_8_27b(),
            "qwen3_6_35b_a3b" => Self::grouped_35b(),
            _ => return None,
        };
        Some(Self {
            name: name.into(),
            ..recipe
        })
    }

    /// Reads an own mix.
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
        })
    }

    /// Public name, recorded in the artifact's provenance.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The rules in words, one line each.
    pub fn describe(&self) -> Vec<String> {
        let line = |rule: &Rule| {
            let layers = match &rule.layers {
                Layers::All => String::new(),
                Layers::Ranges(ranges) => format!(" in layers {ranges:?}"),
            };
            let Encoding { format, method } = rule.encoding;
            format!("{}{layers}: {format} by {method}, {:?}", rule.role, rule.policy)
        };
        self.rules
            .iter()
            .map(line)
            .chain([format!("what does not fit: {}", self.fallback.format)])
            .collect()
    }

    /// Encoding and permission of a parameter that may be stored in any format.
    pub(super) fn decide(&self, role: &str, layer: Option<usize>) -> (Encoding, ActivationPolicy) {
        let matching = |rule: &&Rule| matches(&rule.role, role) && rule.layers.contain(layer);
        self.rules
            .iter()
            .find(matching)
            .map_or((Encoding::BF16, A16Only), |rule| (rule.encoding, rule.policy))
    }

    /// Encoding of matrices that the decided format cannot hold.
    pub(super) fn fallback(&self) -> Encoding {
        self.fallback
    }

    pub(super) fn separates_control(&self) -> bool {
        self.separate_control
    }

    fn of(rules: Vec<Rule>) -> Self {
        Self {
            name: String::new(),
            rules,
            fallback: Encoding::BF16,
            separate_control: false,
        }
    }

    fn uniform(encoding: Encoding, policy: ActivationPolicy) -> Self {
        let mut rules = control();
        rules.push(rule("*", encoding, policy));
        Self::of(rules)
    }

    fn uniform_nvfp4(encoding: Encoding) -> Self {
        let mut rules = control();
        rules.push(rule("token_embedding", Encoding::Q8, A16Only));
        rules.push(rule("output_head", Encoding::Q8, A16Only));
        rules.push(rule("*", encoding, AllowA4));
        Self {
            fallback: Encoding::Q8,
            ..Self::of(rules)
        }
    }

    /// Grouped integers: q4 for queries and keys, q5 for what carries values, one choice each for the vocabulary and the
    /// feed-forward input.
    fn grouped_27b(vocabulary: Encoding, feed_forward_input: Encoding) -> Self {
        let mut rules = control();
        for (role, encoding) in [
            ("token_embedding", vocabulary),
            ("output_head", vocabulary),
            ("*/query", Encoding::Q4),
            ("*/key", Encoding::Q4),
            ("attention/*", Encoding::Q5),
            ("gdn/*", Encoding::Q5),
            ("mlp/gate", feed_forward_input),
            ("mlp/up", feed_forward_input),
            ("mlp/down", Encoding::Q5),
        ] {
            rules.push(rule(role, encoding, A16Only));
        }
        Self {
            separate_control: true,
            ..Self::of(rules)
        }
    }

    fn nvfp4_3_6_27b() -> Self {
        let mut rules = control();
        rules.push(rule("token_embedding", Encoding::Q8, A16Only));
        rules.push(rule("output_head", Encoding::Q8, A16Only));
        rules.push(rule("attention/output", Encoding::BF16, A16Only).at_layers(&[3, 7]));
        rules.push(rule("attention/output", Encoding::NVFP4, AllowA4));
        rules.push(rule("attention/*", Encoding::BF16, A16Only).below_layer(24));
        rules.push(rule("gdn/output", Encoding::BF16, A16Only).at_layers(&[4]));
        rules.push(rule("*", Encoding::NVFP4, AllowA4));
        Self {
            separate_control: true,
            fallback: Encoding::Q8,
            ..Self::of(rules)
        }
    }

    fn nvfp4_3_8_27b() -> Self {
        let mut rules = control();
        rules.push(rule("mlp/*", Encoding::NVFP4, AllowA4).below_layer(56));
        rules.push(rule("*", Encoding::FP8, AllowA8));
        Self {
            fallback: Encoding::FP8,
            ..Self::of(rules)
        }
    }

    fn grouped_35b() -> Self {
        let mut rules = control();
        rules.push(rule("output_head", Encoding::Q6, A16Only));
        rules.push(rule("moe/experts/down", Encoding::Q6, A16Only).at_layers(&[34, 38, 39]));
        rules.push(rule("moe/experts/down", Encoding::Q5, A16Only));
        rules.push(rule("moe/experts/*", Encoding::Q4, A16Only));
        rules.push(rule("*", Encoding::Q8, A16Only));
        Self::of(rules)
    }
}

fn control() -> Vec<Rule> {
    CONTROL
        .into_iter()
        .map(|role| rule(role, Encoding::BF16, A16Only))
        .collect()
}

fn rule(role: &str, encoding: Encoding, policy: ActivationPolicy) -> Rule {
    Rule {
        role: role.into(),
        layers: Layers::All,
        encoding,
        policy,
    }
}

impl Rule {
    fn at_layers(mut self, layers: &[usize]) -> Self {
        self.layers = Layers::Ranges(layers.iter().map(|layer| *layer..layer + 1).collect());
        self
    }

    fn below_layer(mut self, end: usize) -> Self {
        self.layers = Layers::Ranges(std::iter::once(0..end).collect());
        self
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

/// Whether `pattern`, in which `*` stands for any characters, matches all of `text`.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((before, after)) => text.strip_prefix(before).is_some_and(|rest| {
            rest.char_indices()
                .map(|(at, _)| at)
                .chain([rest.len()])
                .any(|at| matches(after, &rest[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_roles() {
        for (pattern, role, expected) in [
            ("mlp/*", "mlp/down", true),
            ("*/output", "gdn/output", true),
            ("*", "token_embedding", true),
            ("m*/d*n", "mlp/down", true),
            ("mlp", "mlp/down", false),
            ("*/out", "gdn/output", false),
            ("moe/*/down", "moe/experts/down", true),
            ("", "mlp/down", false),
        ] {
            assert_eq!(matches(pattern, role), expected, "{pattern} {role}");
        }
    }

    #[test]
    fn layers_are_numbers_and_half_open_ranges() {
        let layers = Layers::parse("0..2, 7,9..10").expect("valid");
        let in_it: Vec<usize> = (0..12).filter(|layer| layers.contain(Some(*layer))).collect();
        assert_eq!(in_it, [0, 1, 7, 9]);
        assert!(!layers.contain(None));
        for text in ["", "a", "3..", "5..5", "1-2", "18446744073709551615"] {
            assert_eq!(Layers::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn every_name_is_a_recipe() {
        for name in Recipe::NAMES {
            assert_eq!(Recipe::named(name).map(|recipe| recipe.name), Some(name.to_owned()));
        }
        assert_eq!(Recipe::named("q7"), None);
    }
}
