//! Which format, encoding method and activation permission each weight gets.
//!
//! A recipe is an ordered list of rules; the first whose role pattern and layers match decides. Only parameters that may
//! be stored in any format are asked about: norms and the convolution stay bf16, `gdn/a_log` and `gdn/dt_bias` fp32.
//! What no rule matches is bf16 with 16-bit activations. A weight whose words the source already holds in the decided
//! format is imported instead of encoded. Own mixes come from TOML, see [`Recipe::from_toml`].

use std::collections::HashSet;

use crate::config::{FeedForwardConfig, TextConfig};
use crate::formats::{EncodeMethod, Format};
use crate::source::ActivationPolicy::{self, A16Only, AllowA4, AllowA8};

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
    pub(super) const NVFP4_MUL: Self = Self {
        format: Format::Nvfp4Mul,
        method: EncodeMethod::Nvfp4Absmax,
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
    pub(super) fn canonical(format: Format) -> Option<Self> {
        EncodeMethod::ALL
            .into_iter()
            .find(|method| method.encodes(format))
            .map(|method| Self { format, method })
    }
}

/// Which blocks a rule is for; parameters outside the blocks match `All` only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Layers {
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

    fn below(end: usize) -> Self {
        Self::Ranges(std::iter::once(0..end).collect())
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let number = |text: &str| text.trim().parse::<usize>().ok();
        let range = |part: &str| match part.split_once("..") {
            Some((begin, end)) => Some(number(begin)?..number(end)?).filter(|range| !range.is_empty()),
            None => number(part).and_then(|layer| Some(layer..layer.checked_add(1)?)),
        };
        text.split(',').map(range).collect::<Option<_>>().map(Self::Ranges)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) role: String,
    pub(super) layers: Layers,
    pub(super) encoding: Encoding,
    pub(super) policy: ActivationPolicy,
    /// The permission of weights that are encoded here rather than imported, where it differs.
    pub(super) policy_if_encoded: Option<ActivationPolicy>,
}

/// What a recipe says about one parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) encoding: Encoding,
    /// Activation permission when the source's words are imported.
    pub(super) policy: ActivationPolicy,
    /// Activation permission when the weight is encoded.
    pub(super) policy_if_encoded: ActivationPolicy,
    /// Number of the deciding rule.
    pub(super) rule: Option<usize>,
}

/// An ordered list of rules under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    pub(super) name: String,
    pub(super) rules: Vec<Rule>,
    pub(super) fallback: Encoding,
    /// Whether `gdn/a_projection` and `gdn/b_projection` stay two objects.
    pub(super) separate_control: bool,
    /// Whether every rule is meant for the model at hand, so that one without effect deserves a note.
    pub(super) own: bool,
}

/// Roles that a rule can decide about.
pub(super) const ROLES: [&str; 37] = [
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
    "attn_hc/down",
    "attn_hc/up",
    "attn_hc/inject",
    "mlp_hc/down",
    "mlp_hc/up",
    "mlp_hc/inject",
    "final_mixer/down",
    "final_mixer/up",
    "attention/index_query",
    "attention/index_key",
    "ple/key_projection",
    "ple/value_projection",
];

/// The layers whose feed-forward is NVFP4 in the published 64-layer checkpoints; the last ones are FP8.
const NVFP4_LAYERS: usize = 56;

/// The control projections: few rows, and every error in them reaches the decay or the routing.
const CONTROL: [&str; 4] = ["gdn/a_projection", "gdn/b_projection", "moe/router", "moe/shared_score"];

impl Decision {
    /// `encoding` with 16-bit activations, by no rule.
    pub(super) fn of(encoding: Encoding) -> Self {
        Self {
            encoding,
            policy: A16Only,
            policy_if_encoded: A16Only,
            rule: None,
        }
    }
}

impl Recipe {
    /// Names that [`Recipe::named`] knows: uniform recipes, then the official mixes.
    pub const NAMES: [&'static str; 19] = [
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
        "qwen3_8_27b_nvfp4_nvidia",
        "qwen3_8_27b_nvfp4_orcarouter",
        "qwen3_6_35b_a3b",
        "qwen3_8_flash_next_nvfp4",
        "qwen3_8_flash_next_nvfp4_dense8",
        "qwen3_8_flash_next_nvfp4_orcarouter",
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
            "qwen3_8_27b_nvfp4" => Self::nvfp4_3_8_27b(Layers::below(NVFP4_LAYERS), None),
            "qwen3_8_27b_nvfp4_nvidia" => Self::nvfp4_3_8_27b(Layers::All, Some(AllowA8)),
            "qwen3_8_27b_nvfp4_orcarouter" => Self::nvfp4_3_8_27b(Layers::below(NVFP4_LAYERS), Some(A16Only)),
            "qwen3_6_35b_a3b" => Self::grouped_35b(),
            "qwen3_8_flash_next_nvfp4" => Self::uniform(Encoding::BF16, A16Only),
            "qwen3_8_flash_next_nvfp4_dense8" => Self::flash_next(Encoding::Q8, Encoding::BF16, Encoding::Q8),
            "qwen3_8_flash_next_nvfp4_orcarouter" => Self::flash_next(Encoding::FP8, Encoding::FP8, Encoding::FP8),
            _ => return None,
        };
        Some(Self {
            name: name.into(),
            ..recipe
        })
    }

    /// Said where an official mix meets a model without the parts that it is about.
    pub(super) fn meant_for_another(&self, config: &TextConfig) -> Option<String> {
        let dense = matches!(config.feed_forward, FeedForwardConfig::Dense { .. });
        let flash_next = config.flash_next.is_some();
        let (model, fits) = match self.name.as_str() {
            _ if self.own => return None,
            name if name.starts_with("qwen3_8_flash_next") => ("Qwen3.8-Flash-Next", flash_next),
            name if name.ends_with("_a3b") => ("a mixture of experts", !dense && !flash_next),
            name if name.starts_with("qwen3_") => ("a dense model", dense && !flash_next),
            _ => return None,
        };
        if fits {
            return None;
        }
        let name = &self.name;
        Some(format!(
            "recipe {name} is made for {model}, which this is not: rules about its parts decide about no weight"
        ))
    }

    /// Public name, recorded in the artifact's provenance.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it is one of Qwen3.8-Flash-Next, whose routed experts have one format.
    pub(super) fn packs_experts(&self) -> bool {
        self.name.starts_with("qwen3_8_flash_next")
    }

    /// The rules in words, one line each.
    pub fn describe(&self) -> Vec<String> {
        let line = |rule: &Rule| {
            let layers = match &rule.layers {
                Layers::All => String::new(),
                Layers::Ranges(ranges) => format!(" in layers {ranges:?}"),
            };
            let Encoding { format, method } = rule.encoding;
            let encoded = rule
                .policy_if_encoded
                .map_or_else(String::new, |policy| format!(" if imported, else {policy:?}"));
            format!(
                "{}{layers}: {format} by {method}, {:?}{encoded}",
                rule.role, rule.policy
            )
        };
        self.rules
            .iter()
            .map(line)
            .chain([format!("what does not fit: {}", self.fallback.format)])
            .collect()
    }

    /// Whether any weight is to permit 4-bit activations, which need divisors.
    pub fn permits_a4(&self) -> bool {
        self.rules.iter().any(|rule| rule.policy == AllowA4)
    }

    /// What the first matching rule says about a parameter that may be stored in any format.
    pub(super) fn decide(&self, role: &str, layer: Option<usize>) -> Decision {
        let decides = |rule: &Rule| matches(&rule.role, role) && rule.layers.contain(layer);
        match self.rules.iter().position(decides) {
            Some(number) => {
                let rule = &self.rules[number];
                Decision {
                    encoding: rule.encoding,
                    policy: rule.policy,
                    policy_if_encoded: rule.policy_if_encoded.unwrap_or(rule.policy),
                    rule: Some(number),
                }
            }
            None => Decision::of(Encoding::BF16),
        }
    }

    /// Notes about rules of an own mix that are not among `used`.
    pub(super) fn without_effect(&self, used: &HashSet<usize>) -> Vec<String> {
        let idle = self
            .rules
            .iter()
            .enumerate()
            .filter(|(number, _)| self.own && !used.contains(number));
        idle.map(|(number, rule)| {
            format!(
                "rule {} ({}) of the recipe decides about no weight of this model",
                number + 1,
                rule.role
            )
        })
        .collect()
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
            own: false,
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

    /// NVFP4 feed-forward matrices in `nvfp4` layers and FP8 rows elsewhere. FP8 that is encoded here keeps 16-bit
    /// activations; an imported one permits 8 bits. `head` is a fixed permission of the output head.
    fn nvfp4_3_8_27b(nvfp4: Layers, head: Option<ActivationPolicy>) -> Self {
        let mut rules = control();
        rules.push(Rule {
            layers: nvfp4,
            ..rule("mlp/*", Encoding::NVFP4, AllowA4)
        });
        rules.extend(head.map(|policy| rule("output_head", Encoding::FP8, policy)));
        rules.push(Rule {
            policy_if_encoded: Some(A16Only),
            ..rule("*", Encoding::FP8, AllowA8)
        });
        Self {
            fallback: Encoding::FP8,
            ..Self::of(rules)
        }
    }

    /// Qwen3.8-Flash-Next but for its routed experts, which have one format: `mixer` for the Gated DeltaNets and the shared
    /// experts, `attention_input` and `attention_output` for the attention, bf16 for its indexer, q8 for what mixes
    /// streams, takes n-grams in, and the head.
    fn flash_next(mixer: Encoding, attention_input: Encoding, attention_output: Encoding) -> Self {
        let mut rules = control();
        for (role, encoding) in [
            ("gdn/*", mixer),
            ("moe/shared/*", mixer),
            ("attention/index_*", Encoding::BF16),
            ("attention/output", attention_output),
            ("attention/*", attention_input),
            ("*", Encoding::Q8),
        ] {
            rules.push(rule(role, encoding, A16Only));
        }
        Self::of(rules)
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
        policy_if_encoded: None,
    }
}

impl Rule {
    fn at_layers(mut self, layers: &[usize]) -> Self {
        self.layers = Layers::Ranges(layers.iter().map(|layer| *layer..layer + 1).collect());
        self
    }

    fn below_layer(mut self, end: usize) -> Self {
        self.layers = Layers::below(end);
        self
    }
}

/// Whether `pattern`, in which `*` stands for any characters, matches all of `text`.
pub(super) fn matches(pattern: &str, text: &str) -> bool {
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
