//! What a checkpoint declares to be quantised, module by module.
//!
//! | file, member | `quant_method` | exceptions | names in them |
//! |---|---|---|---|
//! | `config.json`, `quantization_config` | `fp8` | `modules_to_not_convert`, `ignored_layers` | leading or trailing components |
//! | `config.json`, `quantization_config` | `compressed-tensors` | `ignore` | whole names, `re:` and a regular expression for the beginning, classes |
//! | `config.json`, `quantization_config` | `modelopt` | `ignore`, `exclude_modules` | `*` stands for any characters; a module covers those inside it |
//! | `hf_quant_config.json`, `quantization` | (`modelopt`) | `exclude_modules` | the same |
//!
//! Modules may be named with any of the usual prefixes of the text model, whichever the tensors have.

use std::path::{Path, PathBuf};

use regex::Regex;
use serde_json::{Map, Value};

use super::CheckpointError;
use crate::config::shorten;
use crate::source::ActivationPolicy::{self, A16Only, AllowA4, AllowA8};

/// Where one exporter leaves its declaration.
pub(super) const MODELOPT_FILE: &str = "hf_quant_config.json";
/// The only tile of scaled FP8 that is read.
const TILE: [u64; 2] = [128, 128];
/// The only group of NVFP4.
const GROUP: u64 = 16;

/// How the words of a quantised weight are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Words {
    /// E4M3FN with one multiplier per row or for the whole tensor.
    Fp8,
    /// E4M3FN with one multiplier per 128x128 tile.
    Fp8Block,
    /// E2M1 in `weight_packed`, matrix scale and input scale are divisors.
    Nvfp4Packed,
    /// E2M1 in `weight`, matrix scale and input scale are multipliers.
    Nvfp4ModelOpt,
}

impl Words {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "FP8 with scales per row or tensor",
            Self::Fp8Block => "FP8 with scales per 128x128 block",
            Self::Nvfp4Packed => "NVFP4 in `weight_packed`",
            Self::Nvfp4ModelOpt => "NVFP4 in `weight`",
        }
    }
}

/// What is declared about one weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scheme {
    pub(super) words: Words,
    /// The precision that the checkpoint was made to run its activations in.
    pub(super) activations: ActivationPolicy,
}

/// A module that holds a weight.
pub(super) struct Module {
    /// Its name under every prefix it may be declared with.
    names: Vec<String>,
    /// Whether it is a linear layer of its own (not an embedding, a router, or a bank of experts in one tensor).
    linear: bool,
    /// Whether it multiplies an activation, as a linear layer or as a bank of experts.
    projection: bool,
}

impl Module {
    /// The module of weight `tensor`, whose name starts with `prefix` unless it is the head.
    pub(super) fn new(tensor: &str, prefix: &str, linear: bool, projection: bool) -> Self {
        let module = tensor.strip_suffix(".weight").unwrap_or(tensor);
        let names = match module.strip_prefix(prefix) {
            Some(inner) => ["model.", "model.language_model.", "language_model.model."]
                .map(|prefix| format!("{prefix}{inner}"))
                .to_vec(),
            None => vec![module.to_owned(), format!("language_model.{module}")],
        };
        Self {
            names,
            linear,
            projection,
        }
    }
}

enum Pattern {
    /// Every linear layer.
    Linear,
    /// Everything that multiplies an activation, banks of experts included.
    Projections,
    /// A class of modules that has no weights of the text model.
    OtherClass,
    /// Names.
    Names(Regex),
}

impl Pattern {
    fn covers(&self, module: &Module) -> bool {
        match self {
            Self::Linear => module.linear,
            Self::Projections => module.projection,
            Self::OtherClass => false,
            Self::Names(regex) => module.names.iter().any(|name| regex.is_match(name)),
        }
    }

    fn is_class(&self) -> bool {
        !matches!(self, Self::Names(_))
    }
}

/// The declaration of a checkpoint.
pub(super) struct Declaration {
    /// The file it is in.
    pub(super) path: PathBuf,
    ignored: Vec<Pattern>,
    groups: Vec<(Pattern, Scheme)>,
}

impl Declaration {
    /// Reads the declaration from `config`, the content of `config.json` in `directory`, or else from
    /// `hf_quant_config.json`; `None` when neither declares anything.
    pub(super) fn read(directory: &Path, config: &Value) -> Result<Option<Self>, CheckpointError> {
        let declared = [config, &config["text_config"]]
            .into_iter()
            .map(|holder| &holder["quantization_config"])
            .find(|declared| !declared.is_null());
        if let Some(declared) = declared {
            let reader = Reader {
                path: directory.join("config.json"),
            };
            return reader.declaration(declared).map(Some);
        }
        let path = directory.join(MODELOPT_FILE);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CheckpointError::Read { path, source }),
        };
        let reader = Reader { path };
        let file: Value = serde_json::from_slice(&text)
            .map_err(|error| reader.refused("the file", &Value::String(error.to_string()), "JSON"))?;
        let quantization = reader.object("quantization", &file["quantization"])?;
        reader.modelopt(quantization).map(Some)
    }

    /// What is declared about the weight of `module`; `None` when it is not quantised.
    pub(super) fn scheme(&self, module: &Module) -> Option<Scheme> {
        if self.ignored.iter().any(|pattern| pattern.covers(module)) {
            return None;
        }
        let mut covering = self.groups.iter().filter(|(pattern, _)| pattern.covers(module));
        let named = covering.clone().find(|(pattern, _)| !pattern.is_class());
        named.or_else(|| covering.next()).map(|(_, scheme)| *scheme)
    }
}

/// Reads one file's declaration.
struct Reader {
    path: PathBuf,
}

impl Reader {
    fn refused(&self, member: &str, found: &Value, expected: impl Into<String>) -> CheckpointError {
        CheckpointError::Declaration {
            path: self.path.clone(),
            member: member.into(),
            found: shorten(found),
            expected: expected.into(),
        }
    }

    fn object<'a>(&self, member: &str, value: &'a Value) -> Result<&'a Map<String, Value>, CheckpointError> {
        value
            .as_object()
            .ok_or_else(|| self.refused(member, value, "an object"))
    }

    /// The strings of a list; none when it is absent.
    fn names<'a>(&self, member: &str, value: Option<&'a Value>) -> Result<Vec<&'a str>, CheckpointError> {
        let Some(value) = value.filter(|value| !value.is_null()) else {
            return Ok(Vec::new());
        };
        let names = value
            .as_array()
            .and_then(|names| names.iter().map(Value::as_str).collect());
        names.ok_or_else(|| self.refused(member, value, "a list of module names"))
    }

    fn regex(&self, member: &str, text: &str, pattern: &str) -> Result<Pattern, CheckpointError> {
        let regex = Regex::new(pattern);
        let regex =
            regex.map_err(|error| self.refused(member, &text.into(), format!("a pattern of names ({error})")))?;
        Ok(Pattern::Names(regex))
    }

    fn declaration(self, declared: &Value) -> Result<Declaration, CheckpointError> {
        let members = self.object("quantization_config", declared)?;
        match (declared["quant_method"].as_str(), members.contains_key("quant_algo")) {
            (Some("fp8"), _) => self.fp8(members),
            (Some("compressed-tensors"), _) => self.compressed_tensors(members),
            (Some("modelopt"), _) | (None, true) => self.modelopt(members),
            _ => Err(self.refused(
                "quantization_config.quant_method",
                &declared["quant_method"],
                "fp8, compressed-tensors or modelopt",
            )),
        }
    }

    fn fp8(self, members: &Map<String, Value>) -> Result<Declaration, CheckpointError> {
        let null = Value::Null;
        let get = |member: &str| members.get(member).unwrap_or(&null);
        for (member, expected) in [
            ("fmt", ["e4m3", "float8_e4m3fn"]),
            ("activation_scheme", ["dynamic", "static"]),
        ] {
            let found = get(member);
            if !found.is_null() && !found.as_str().is_some_and(|found| expected.contains(&found)) {
                return Err(self.refused(member, found, expected.join(" or ")));
            }
        }
        let words = self.fp8_words("weight_block_size", get("weight_block_size"))?;
        let listed = ["modules_to_not_convert", "ignored_layers"];
        let mut ignored = Vec::new();
        for member in listed {
            for name in self.names(member, members.get(member))? {
                let escaped = regex::escape(name);
                ignored.push(self.regex(member, name, &format!(r"^{escaped}(\.|$)|\.{escaped}$"))?);
            }
        }
        if listed.iter().all(|member| get(member).is_null()) {
            // Without a list the output head is not converted.
            ignored.push(self.regex(listed[0], "lm_head", "^lm_head$")?);
        }
        let scheme = Scheme {
            words,
            activations: AllowA8,
        };
        Ok(Declaration {
            path: self.path,
            ignored,
            groups: vec![(Pattern::Projections, scheme)],
        })
    }

    /// FP8 with a block of this size, or none.
    fn fp8_words(&self, member: &str, block: &Value) -> Result<Words, CheckpointError> {
        if block.is_null() {
            return Ok(Words::Fp8);
        }
        let extents: Option<Vec<u64>> = block
            .as_array()
            .and_then(|extents| extents.iter().map(Value::as_u64).collect());
        if extents.as_deref() == Some(&TILE) {
            Ok(Words::Fp8Block)
        } else {
            Err(self.refused(member, block, format!("{TILE:?}")))
        }
    }

    fn compressed_tensors(self, members: &Map<String, Value>) -> Result<Declaration, CheckpointError> {
        let null = Value::Null;
        let get = |member: &str| members.get(member).unwrap_or(&null);
        let transforms = get("transform_config");
        if !(transforms.is_null() || transforms.as_object().is_some_and(Map::is_empty)) {
            return Err(self.refused(
                "transform_config",
                transforms,
                "no transforms of weights or activations",
            ));
        }
        let sparsity = &get("sparsity_config")["format"];
        if !(sparsity.is_null() || sparsity == "dense") {
            return Err(self.refused("sparsity_config.format", sparsity, "dense"));
        }
        let ignored = self
            .names("ignore", members.get("ignore"))?
            .into_iter()
            .map(|name| self.compressed_pattern("ignore", name))
            .collect::<Result<_, _>>()?;
        let mut groups = Vec::new();
        for (name, group) in self.object("config_groups", get("config_groups"))? {
            let scheme = self.compressed_scheme(&format!("config_groups.{name}"), group)?;
            let member = format!("config_groups.{name}.targets");
            for target in self.names(&member, group.get("targets"))? {
                groups.push((self.compressed_pattern(&member, target)?, scheme));
            }
        }
        Ok(Declaration {
            path: self.path,
            ignored,
            groups,
        })
    }

    fn compressed_pattern(&self, member: &str, text: &str) -> Result<Pattern, CheckpointError> {
        if let Some(expression) = text.strip_prefix("re:") {
            return self.regex(member, text, &format!("^(?:{expression})"));
        }
        let is_class = !text.contains('.') && text.starts_with(char::is_uppercase);
        match text {
            "Linear" => Ok(Pattern::Linear),
            _ if is_class => Ok(Pattern::OtherClass),
            _ => self.regex(member, text, &format!("^{}$", regex::escape(text))),
        }
    }

    fn compressed_scheme(&self, member: &str, group: &Value) -> Result<Scheme, CheckpointError> {
        let weights = &group["weights"];
        let refused = |member: String, found: &Value, expected: &str| Err(self.refused(&member, found, expected));
        if weights["symmetric"] == false {
            return refused(format!("{member}.weights.symmetric"), &weights["symmetric"], "true");
        }
        let (bits, kind, strategy) = (
            weights["num_bits"].as_u64(),
            weights["type"].as_str(),
            weights["strategy"].as_str(),
        );
        let words = match (bits, kind, strategy) {
            (Some(8), Some("float"), Some("channel" | "tensor")) => Words::Fp8,
            (Some(8), Some("float"), Some("block")) => self.fp8_words(
                &format!("{member}.weights.block_structure"),
                &weights["block_structure"],
            )?,
            (Some(4), Some("float"), Some("tensor_group")) if weights["group_size"].as_u64() == Some(GROUP) => {
                Words::Nvfp4Packed
            }
            _ => {
                let expected = "8-bit floats by channel, tensor or block, or 4-bit floats by tensor_group of 16";
                return refused(format!("{member}.weights"), weights, expected);
            }
        };
        let inputs = &group["input_activations"];
        let activations = match (inputs["num_bits"].as_u64(), inputs["type"].as_str()) {
            _ if inputs.is_null() => A16Only,
            (Some(8), Some("float")) => AllowA8,
            (Some(4), Some("float")) => AllowA4,
            _ => {
                return refused(
                    format!("{member}.input_activations"),
                    inputs,
                    "8-bit or 4-bit floats, or null",
                );
            }
        };
        Ok(Scheme { words, activations })
    }

    fn modelopt(self, members: &Map<String, Value>) -> Result<Declaration, CheckpointError> {
        let mut ignored = Vec::new();
        for member in ["ignore", "exclude_modules"] {
            for name in self.names(member, members.get(member))? {
                ignored.push(self.modelopt_pattern(member, name)?);
            }
        }
        let mut groups = Vec::new();
        let layers = members.get("quantized_layers").filter(|layers| !layers.is_null());
        for (name, layer) in layers
            .map(|layers| self.object("quantized_layers", layers))
            .transpose()?
            .into_iter()
            .flatten()
        {
            let scheme = self.modelopt_scheme(&format!("quantized_layers.{name}"), layer)?;
            groups.push((self.modelopt_pattern("quantized_layers", name)?, scheme));
        }
        if groups.is_empty() {
            let declared = Value::Object(members.clone());
            groups.push((Pattern::Linear, self.modelopt_scheme("", &declared)?));
        }
        Ok(Declaration {
            path: self.path,
            ignored,
            groups,
        })
    }

    /// `*` stands for any characters, `?` for one.
    fn modelopt_pattern(&self, member: &str, text: &str) -> Result<Pattern, CheckpointError> {
        let expression = regex::escape(text).replace(r"\*", ".*").replace(r"\?", ".");
        self.regex(member, text, &format!(r"^{expression}(\.|$)"))
    }

    fn modelopt_scheme(&self, holder: &str, members: &Value) -> Result<Scheme, CheckpointError> {
        let path = |member: &str| format!("{holder}{}{member}", if holder.is_empty() { "" } else { "." });
        let (words, activations) = match members["quant_algo"].as_str() {
            Some("NVFP4") => (Words::Nvfp4ModelOpt, AllowA4),
            Some("FP8" | "FP8_PER_CHANNEL_PER_TOKEN") => (Words::Fp8, AllowA8),
            _ => {
                let expected = "NVFP4, FP8 or FP8_PER_CHANNEL_PER_TOKEN";
                return Err(self.refused(&path("quant_algo"), &members["quant_algo"], expected));
            }
        };
        let group = &members["group_size"];
        if words == Words::Nvfp4ModelOpt && !group.is_null() && group.as_u64() != Some(GROUP) {
            return Err(self.refused(&path("group_size"), group, "16"));
        }
        Ok(Scheme { words, activations })
    }
}
