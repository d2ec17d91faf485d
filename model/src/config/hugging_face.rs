//! A Hugging Face `config.json` rewritten as an artifact record.
//!
//! What is absent and has one meaning in this family is filled in (`layer_types` from `full_attention_interval`, default
//! 4: block `i` is full attention when `(i + 1) % interval == 0`). What would change the numbers and is not implemented
//! is refused by name. The class default of `rope_theta` (10,000) is not the family's value, so absent rotary parameters
//! are refused too.

use serde_json::{Map, Value, json};

use super::artifact::{ATTENTION, DENSE, DENSE_FFN, LINEAR_ATTENTION, MOE, MOE_FFN, shorten};
use super::{ConfigError, flash_next};

const DEFAULT_FULL_ATTENTION_INTERVAL: u64 = 4;

/// Fields with one supported value; absent or null means that value.
const FIXED: [(&str, Fixed); 8] = [
    ("hidden_act", Fixed::Text("silu")),
    ("attention_bias", Fixed::Flag(false)),
    ("attn_output_gate", Fixed::Flag(true)),
    ("mamba_ssm_dtype", Fixed::Text("float32")),
    ("use_sliding_window", Fixed::Flag(false)),
    // Absent means true in this family: the top-k weights are renormalised.
    ("norm_topk_prob", Fixed::Flag(true)),
    ("decoder_sparse_step", Fixed::Count(1)),
    ("mlp_only_layers", Fixed::EmptyList),
];

#[derive(Clone, Copy)]
enum Fixed {
    Text(&'static str),
    Flag(bool),
    Count(u64),
    EmptyList,
}

impl Fixed {
    fn accepts(self, value: &Value) -> bool {
        match self {
            Self::Text(text) => value.as_str() == Some(text),
            Self::Flag(flag) => value.as_bool() == Some(flag),
            Self::Count(count) => value.as_u64() == Some(count),
            Self::EmptyList => value.as_array().is_some_and(Vec::is_empty),
        }
    }

    fn expectation(self) -> String {
        match self {
            Self::Text(text) => format!("expected \"{text}\""),
            Self::Flag(flag) => format!("expected {flag}"),
            Self::Count(count) => format!("expected {count}"),
            Self::EmptyList => "expected an empty list".into(),
        }
    }
}

pub(super) fn to_artifact_record(config: &Value) -> Result<Value, ConfigError> {
    let root = config.as_object().ok_or(ConfigError::NotAnObject)?;
    let text = match root.get("text_config") {
        None | Some(Value::Null) => root,
        Some(Value::Object(text)) => text,
        Some(other) => {
            return Err(ConfigError::Invalid {
                field: "text_config".into(),
                found: shorten(other),
                expected: "an object".into(),
            });
        }
    };
    let names = architecture(root, text)?;
    let is_moe = names != DENSE;
    for holder in [root, text] {
        for (field, fixed) in FIXED {
            match holder.get(field) {
                None | Some(Value::Null) => {}
                Some(value) if fixed.accepts(value) => {}
                Some(value) => return Err(unsupported(field, value, fixed.expectation())),
            }
        }
    }

    let (architecture, model_type) = names;
    let mut record = Map::new();
    record.insert("architectures".into(), json!([architecture]));
    record.insert("model_type".into(), model_type.into());
    for field in [
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "max_position_embeddings",
        "rms_norm_eps",
    ] {
        copy(text, field, &mut record);
    }
    record.insert("tie_word_embeddings".into(), tie_word_embeddings(root, text)?.into());
    if let Some(mut layer_types) = layer_types(text)? {
        if names == flash_next::NAMES {
            flash_next::rename_layer_types(&mut layer_types);
        }
        record.insert("layer_types".into(), layer_types);
    }
    for field in ATTENTION
        .into_iter()
        .filter(|field| *field != "rope_parameters")
        .chain(LINEAR_ATTENTION)
    {
        copy(text, field, &mut record);
    }
    if record.contains_key("num_attention_heads") {
        record.insert("rope_parameters".into(), rope_parameters(text)?);
    }
    if is_moe {
        MOE_FFN.iter().for_each(|field| copy(text, field, &mut record));
    } else {
        DENSE_FFN.iter().for_each(|field| copy(text, field, &mut record));
        if let Some(experts) = text
            .get("num_experts")
            .filter(|experts| !experts.is_null() && experts.as_u64() != Some(0))
        {
            return Err(unsupported(
                "num_experts",
                experts,
                format!("a model of type {model_type} has no experts"),
            ));
        }
    }
    if names == flash_next::NAMES {
        flash_next::copy_members(root, text, &mut record);
    }
    Ok(Value::Object(record))
}

fn unsupported(field: &str, found: &Value, supported: String) -> ConfigError {
    ConfigError::Unsupported {
        field: field.into(),
        found: shorten(found),
        supported,
    }
}

pub(super) fn copy(from: &Map<String, Value>, field: &str, to: &mut Map<String, Value>) {
    if let Some(value) = from.get(field).filter(|value| !value.is_null()) {
        to.insert(field.into(), value.clone());
    }
}

/// The architecture and model type of the artifact record; `architectures`, where given, has to agree with the type.
fn architecture(
    root: &Map<String, Value>,
    text: &Map<String, Value>,
) -> Result<(&'static str, &'static str), ConfigError> {
    const TYPES: &str = "qwen3_5_text, qwen3_5_moe_text, qwen4_exp_text, qwen3_5, qwen3_5_moe or qwen4_exp";
    let model_type = text
        .get("model_type")
        .or_else(|| root.get("model_type"))
        .unwrap_or(&Value::Null);
    let names = match model_type.as_str() {
        Some("qwen3_5_text" | "qwen3_5") => DENSE,
        Some("qwen3_5_moe_text" | "qwen3_5_moe") => MOE,
        Some("qwen4_exp_text" | "qwen4_exp") => flash_next::NAMES,
        _ if model_type.is_null() => {
            return Err(ConfigError::Missing {
                field: "model_type".into(),
                expected: TYPES.into(),
            });
        }
        _ => return Err(unsupported("model_type", model_type, format!("expected {TYPES}"))),
    };
    let Some(architectures) = root.get("architectures").filter(|names| !names.is_null()) else {
        return Ok(names);
    };
    let expected = [
        names.0.to_owned(),
        names.0.replace("ForCausalLM", "ForConditionalGeneration"),
    ];
    match architectures.as_array().map(Vec::as_slice) {
        Some([Value::String(name)]) if expected.contains(name) => Ok(names),
        _ => Err(unsupported(
            "architectures",
            architectures,
            format!("expected one of {expected:?}"),
        )),
    }
}

/// The flag stands at the top, in `text_config`, or in both; absent means untied, the class default.
fn tie_word_embeddings(root: &Map<String, Value>, text: &Map<String, Value>) -> Result<bool, ConfigError> {
    const FIELD: &str = "tie_word_embeddings";
    let flag = |holder: &Map<String, Value>| match holder.get(FIELD) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(flag)) => Ok(Some(*flag)),
        Some(other) => Err(ConfigError::Invalid {
            field: FIELD.into(),
            found: shorten(other),
            expected: "true or false".into(),
        }),
    };
    match (flag(root)?, flag(text)?) {
        (Some(outer), Some(inner)) if outer != inner => Err(ConfigError::Inconsistent(format!(
            "`{FIELD}` is {outer} at the top and {inner} in `text_config`"
        ))),
        (outer, inner) => Ok(inner.or(outer).unwrap_or(false)),
    }
}

fn layer_types(text: &Map<String, Value>) -> Result<Option<Value>, ConfigError> {
    if let Some(layer_types) = text.get("layer_types").filter(|types| !types.is_null()) {
        return Ok(Some(layer_types.clone()));
    }
    let interval = match text.get("full_attention_interval") {
        None | Some(Value::Null) => DEFAULT_FULL_ATTENTION_INTERVAL,
        Some(value) => value
            .as_u64()
            .filter(|interval| *interval > 0)
            .ok_or_else(|| ConfigError::Invalid {
                field: "full_attention_interval".into(),
                found: shorten(value),
                expected: "a positive integer".into(),
            })?,
    };
    // A wrong or absent layer count is reported by the strict parser. No published model comes near the bound, which
    // keeps a wrong number from filling the memory.
    const MOST_LAYERS: u64 = 65_536;
    let Some(layers) = text.get("num_hidden_layers").and_then(Value::as_u64) else {
        return Ok(None);
    };
    if layers > MOST_LAYERS {
        return Err(ConfigError::Invalid {
            field: "num_hidden_layers".into(),
            found: layers.to_string(),
            expected: format!("at most {MOST_LAYERS}"),
        });
    }
    let kind = |layer: u64| {
        if (layer + 1).is_multiple_of(interval) {
            "full_attention"
        } else {
            "linear_attention"
        }
    };
    Ok(Some((0..layers).map(kind).collect()))
}

/// Plain rotary parameters; every scaled kind is refused, also by its older spelling `rope_scaling`.
fn rope_parameters(text: &Map<String, Value>) -> Result<Value, ConfigError> {
    const EXPECTED: &str = "an object with rope_theta and partial_rotary_factor (a default would be the wrong base)";
    if let Some(scaling) = text.get("rope_scaling").filter(|scaling| !scaling.is_null()) {
        return Err(unsupported(
            "rope_scaling",
            scaling,
            "expected plain rotary parameters in `rope_parameters`".into(),
        ));
    }
    let rope = match text.get("rope_parameters") {
        None | Some(Value::Null) => {
            return Err(ConfigError::Missing {
                field: "rope_parameters".into(),
                expected: EXPECTED.into(),
            });
        }
        Some(Value::Object(rope)) => rope,
        Some(other) => {
            return Err(ConfigError::Invalid {
                field: "rope_parameters".into(),
                found: shorten(other),
                expected: EXPECTED.into(),
            });
        }
    };
    for (field, value) in rope.iter().filter(|(_, value)| !value.is_null()) {
        let field_path = format!("rope_parameters.{field}");
        match field.as_str() {
            "rope_theta" | "partial_rotary_factor" | "mrope_section" => {}
            // "mrope" is the older name of the plain kind with sections.
            "rope_type" | "type" if matches!(value.as_str(), Some("default" | "mrope")) => {}
            "rope_type" | "type" => {
                return Err(unsupported(
                    &field_path,
                    value,
                    "expected \"default\"; scaling is a run option".into(),
                ));
            }
            "mrope_interleaved" if value.as_bool() == Some(true) => {}
            "mrope_interleaved" => return Err(unsupported(&field_path, value, "expected true".into())),
            _ => {
                return Err(unsupported(
                    &field_path,
                    value,
                    "not a member of plain rotary parameters".into(),
                ));
            }
        }
    }
    let mut record = Map::new();
    copy(rope, "rope_theta", &mut record);
    copy(rope, "partial_rotary_factor", &mut record);
    if !record.contains_key("partial_rotary_factor") {
        copy(text, "partial_rotary_factor", &mut record);
    }
    copy(rope, "mrope_section", &mut record);
    if !record.contains_key("mrope_section") {
        // Text gives all axes one position, so the shares have no effect; these are the ones that fit the interleave.
        let head_dim = text.get("head_dim").and_then(Value::as_u64).unwrap_or(0);
        let factor = record
            .get("partial_rotary_factor")
            .and_then(Value::as_f64)
            .unwrap_or(0.0) as f32;
        let pairs = (head_dim as f64 * f64::from(factor)) as u64 / 2;
        record.insert(
            "mrope_section".into(),
            json!([pairs.div_ceil(3), (pairs + 1) / 3, pairs / 3]),
        );
    }
    Ok(Value::Object(record))
}
