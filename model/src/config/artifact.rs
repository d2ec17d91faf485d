//! The closed configuration record of an artifact, read and written.
//!
//! Three optional groups (attention, linear attention, feed-forward) are all-or-nothing: a group is required when a
//! block needs it, and complete when any of its members is present.

use serde_json::{Map, Value, json};

use super::{
    AttentionConfig, ConfigError, DeltaNetConfig, FeedForwardConfig, LayerType, MoeConfig, TextConfig, flash_next,
};

/// `architectures[0]` and `model_type` of the dense model.
pub(super) const DENSE: (&str, &str) = ("Qwen3_5ForCausalLM", "qwen3_5_text");
/// `architectures[0]` and `model_type` of the mixture-of-experts model.
pub(super) const MOE: (&str, &str) = ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text");

pub(super) const COMMON: [&str; 9] = [
    "architectures",
    "model_type",
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "tie_word_embeddings",
    "rms_norm_eps",
    "layer_types",
];
pub(super) const ATTENTION: [&str; 4] = [
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
];
pub(super) const LINEAR_ATTENTION: [&str; 5] = [
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
];
pub(super) const DENSE_FFN: [&str; 1] = ["intermediate_size"];
pub(super) const MOE_FFN: [&str; 4] = [
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
];
const ROPE: [&str; 3] = ["rope_theta", "partial_rotary_factor", "mrope_section"];

/// One JSON object and where it is, for messages.
pub(super) struct Record<'a> {
    pub(super) members: &'a Map<String, Value>,
    pub(super) prefix: &'static str,
}

impl Record<'_> {
    fn path(&self, field: &str) -> String {
        format!("{}{field}", self.prefix)
    }

    pub(super) fn invalid(&self, field: &str, expected: impl Into<String>) -> ConfigError {
        let found = self.members.get(field).map_or_else(|| "absent".into(), shorten);
        ConfigError::Invalid {
            field: self.path(field),
            found,
            expected: expected.into(),
        }
    }

    pub(super) fn get(&self, field: &str, expected: &str) -> Result<&Value, ConfigError> {
        self.members.get(field).ok_or_else(|| ConfigError::Missing {
            field: self.path(field),
            expected: expected.into(),
        })
    }

    fn has_any(&self, fields: &[&str]) -> bool {
        fields.iter().any(|field| self.members.contains_key(*field))
    }

    pub(super) fn string(&self, field: &str) -> Result<&str, ConfigError> {
        self.get(field, "a string")?
            .as_str()
            .ok_or_else(|| self.invalid(field, "a string"))
    }

    pub(super) fn boolean(&self, field: &str) -> Result<bool, ConfigError> {
        self.get(field, "true or false")?
            .as_bool()
            .ok_or_else(|| self.invalid(field, "true or false"))
    }

    /// A JSON integer in `1..2^32`.
    pub(super) fn count(&self, field: &str) -> Result<usize, ConfigError> {
        const EXPECTED: &str = "an integer from 1 to 4294967295";
        match self.get(field, EXPECTED)?.as_u64() {
            Some(count @ 1..=0xFFFF_FFFF) => Ok(count as usize),
            _ => Err(self.invalid(field, EXPECTED)),
        }
    }

    /// A JSON integer from 0 up.
    pub(super) fn unsigned(&self, field: &str) -> Result<u64, ConfigError> {
        const EXPECTED: &str = "an integer that is not negative";
        let value = self.get(field, EXPECTED)?.as_u64();
        value.ok_or_else(|| self.invalid(field, EXPECTED))
    }

    /// A finite positive number once rounded to f32.
    pub(super) fn positive_f32(&self, field: &str) -> Result<f32, ConfigError> {
        const EXPECTED: &str = "a number that is finite and positive in 32 bits";
        match self.get(field, EXPECTED)?.as_f64().map(|number| number as f32) {
            Some(number) if number.is_finite() && number > 0.0 => Ok(number),
            _ => Err(self.invalid(field, EXPECTED)),
        }
    }

    pub(super) fn refuse_unknown(&self, known: &[&[&str]]) -> Result<(), ConfigError> {
        match self
            .members
            .keys()
            .find(|key| !known.iter().any(|group| group.contains(&key.as_str())))
        {
            Some(key) => Err(ConfigError::Unknown { field: self.path(key) }),
            None => Ok(()),
        }
    }
}

/// The JSON text of a value, cut to a length that fits a message.
pub(crate) fn shorten(value: &Value) -> String {
    const LONGEST: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

pub(super) fn parse(config: &Value) -> Result<TextConfig, ConfigError> {
    let members = config.as_object().ok_or(ConfigError::NotAnObject)?;
    let record = Record { members, prefix: "" };
    let architecture = architecture(&record)?;
    if architecture == flash_next::NAMES {
        return flash_next::parse(&record);
    }
    let is_moe = architecture == MOE;
    let (feed_forward_fields, other_feed_forward): (&[&str], &[&str]) = if is_moe {
        (&MOE_FFN, &DENSE_FFN)
    } else {
        (&DENSE_FFN, &MOE_FFN)
    };
    record
        .refuse_unknown(&[&COMMON, &ATTENTION, &LINEAR_ATTENTION, feed_forward_fields])
        .map_err(|error| match &error {
            ConfigError::Unknown { field } if other_feed_forward.contains(&field.as_str()) => {
                let kind = if is_moe { "mixture-of-experts" } else { "dense" };
                ConfigError::Inconsistent(format!("a {kind} model may not have `{field}`"))
            }
            _ => error,
        })?;

    let layers = record.count("num_hidden_layers")?;
    let layer_types = layer_types(&record, layers)?;
    let needs = |kind| layer_types.contains(&kind);
    let attention = (needs(LayerType::FullAttention) || record.has_any(&ATTENTION))
        .then(|| attention(&record))
        .transpose()?;
    let delta_net = (needs(LayerType::LinearAttention) || record.has_any(&LINEAR_ATTENTION))
        .then(|| delta_net(&record))
        .transpose()?;
    let feed_forward = if is_moe { moe(&record)? } else { dense(&record)? };
    Ok(TextConfig {
        hidden_size: record.count("hidden_size")?,
        vocab_size: record.count("vocab_size")?,
        max_position_embeddings: record.count("max_position_embeddings")?,
        tie_word_embeddings: record.boolean("tie_word_embeddings")?,
        rms_norm_eps: record.positive_f32("rms_norm_eps")?,
        layer_types,
        attention,
        delta_net,
        feed_forward,
        flash_next: None,
    })
}

/// The record's architecture and model type, which are of this family.
fn architecture(record: &Record) -> Result<(&'static str, &'static str), ConfigError> {
    const EXPECTED: &str = "an array of exactly one string";
    let name = match record.get("architectures", EXPECTED)?.as_array().map(Vec::as_slice) {
        Some([Value::String(name)]) => name.as_str(),
        _ => return Err(record.invalid("architectures", EXPECTED)),
    };
    let model_type = record.string("model_type")?;
    let known = [DENSE, MOE, flash_next::NAMES];
    let found = known.into_iter().find(|names| *names == (name, model_type));
    found.ok_or_else(|| ConfigError::Unsupported {
        field: "architectures, model_type".into(),
        found: format!("{name}, {model_type}"),
        supported: format!(
            "expected {}",
            known
                .map(|(name, model_type)| format!("{name}, {model_type}"))
                .join(" or ")
        ),
    })
}

pub(super) fn layer_types(record: &Record, layers: usize) -> Result<Vec<LayerType>, ConfigError> {
    const EXPECTED: &str = "an array of `full_attention` and `linear_attention`, one per hidden layer";
    let names = record.get("layer_types", EXPECTED)?.as_array();
    let names = names.ok_or_else(|| record.invalid("layer_types", EXPECTED))?;
    if names.len() != layers {
        return Err(ConfigError::Inconsistent(format!(
            "`layer_types` has {} entries and `num_hidden_layers` is {layers}",
            names.len()
        )));
    }
    names
        .iter()
        .enumerate()
        .map(|(index, name)| match name.as_str() {
            Some("full_attention") => Ok(LayerType::FullAttention),
            Some("linear_attention") => Ok(LayerType::LinearAttention),
            _ => Err(ConfigError::Invalid {
                field: format!("layer_types[{index}]"),
                found: shorten(name),
                expected: "`full_attention` or `linear_attention`".into(),
            }),
        })
        .collect()
}

pub(super) fn attention(record: &Record) -> Result<AttentionConfig, ConfigError> {
    let num_heads = record.count("num_attention_heads")?;
    let num_kv_heads = record.count("num_key_value_heads")?;
    let head_dim = record.count("head_dim")?;
    require_multiple(
        ("num_attention_heads", num_heads),
        ("num_key_value_heads", num_kv_heads),
    )?;
    require_product("num_attention_heads * head_dim", &[num_heads, head_dim])?;

    const EXPECTED: &str = "an object of rope_theta, partial_rotary_factor and mrope_section";
    let rope = record.get("rope_parameters", EXPECTED)?.as_object();
    let rope = Record {
        members: rope.ok_or_else(|| record.invalid("rope_parameters", EXPECTED))?,
        prefix: "rope_parameters.",
    };
    rope.refuse_unknown(&[&ROPE])?;
    let partial_rotary_factor = rope.positive_f32("partial_rotary_factor")?;
    if partial_rotary_factor > 1.0 {
        return Err(rope.invalid("partial_rotary_factor", "at most 1"));
    }
    const SECTION: &str = "an array of three integers";
    let section = rope.get("mrope_section", SECTION)?.as_array().map(Vec::as_slice);
    let section: Option<Vec<usize>> = match section {
        Some(section @ [_, _, _]) => section
            .iter()
            .map(|count| count.as_u64().and_then(|count| u32::try_from(count).ok()))
            .map(|count| count.map(|count| count as usize))
            .collect(),
        _ => None,
    };
    let section = section.ok_or_else(|| rope.invalid("mrope_section", SECTION))?;
    let attention = AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        rope_theta: rope.positive_f32("rope_theta")?,
        partial_rotary_factor,
        mrope_section: [section[0], section[1], section[2]],
    };
    let rotary_dim = attention.rotary_dim();
    if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
        return Err(rope.invalid(
            "partial_rotary_factor",
            format!("a factor that makes an even, positive number of the {head_dim} head features, not {rotary_dim}"),
        ));
    }
    let mut counts = [0; 3];
    (0..rotary_dim / 2).for_each(|pair| counts[attention.rotary_axis(pair)] += 1);
    if counts != attention.mrope_section {
        return Err(rope.invalid(
            "mrope_section",
            format!(
                "counts that fit {} interleaved rotary pairs; these give {counts:?}",
                rotary_dim / 2
            ),
        ));
    }
    Ok(attention)
}

pub(super) fn delta_net(record: &Record) -> Result<DeltaNetConfig, ConfigError> {
    let delta_net = DeltaNetConfig {
        num_key_heads: record.count("linear_num_key_heads")?,
        key_head_dim: record.count("linear_key_head_dim")?,
        num_value_heads: record.count("linear_num_value_heads")?,
        value_head_dim: record.count("linear_value_head_dim")?,
        conv_kernel_dim: record.count("linear_conv_kernel_dim")?,
    };
    require_multiple(
        ("linear_num_value_heads", delta_net.num_value_heads),
        ("linear_num_key_heads", delta_net.num_key_heads),
    )?;
    let keys = require_product(
        "linear_num_key_heads * linear_key_head_dim",
        &[delta_net.num_key_heads, delta_net.key_head_dim],
    )?;
    let values = require_product(
        "linear_num_value_heads * linear_value_head_dim",
        &[delta_net.num_value_heads, delta_net.value_head_dim],
    )?;
    keys.checked_mul(2)
        .and_then(|keys| keys.checked_add(values))
        .ok_or_else(|| {
            ConfigError::Inconsistent("the number of linear-attention convolution channels overflows".into())
        })?;
    Ok(delta_net)
}

fn dense(record: &Record) -> Result<FeedForwardConfig, ConfigError> {
    Ok(FeedForwardConfig::Dense {
        intermediate_size: record.count("intermediate_size")?,
    })
}

pub(super) fn moe(record: &Record) -> Result<FeedForwardConfig, ConfigError> {
    let num_experts = record.count("num_experts")?;
    let num_experts_per_tok = record.count("num_experts_per_tok")?;
    if num_experts_per_tok > num_experts {
        return Err(record.invalid("num_experts_per_tok", format!("at most `num_experts` = {num_experts}")));
    }
    Ok(FeedForwardConfig::Moe(MoeConfig {
        num_experts,
        num_experts_per_tok,
        moe_intermediate_size: record.count("moe_intermediate_size")?,
        shared_expert_intermediate_size: record.count("shared_expert_intermediate_size")?,
    }))
}

pub(super) fn require_multiple(
    (whole_name, whole): (&str, usize),
    (part_name, part): (&str, usize),
) -> Result<(), ConfigError> {
    if whole % part == 0 {
        return Ok(());
    }
    Err(ConfigError::Inconsistent(format!(
        "`{whole_name}` = {whole} is not a multiple of `{part_name}` = {part}"
    )))
}

pub(super) fn require_product(what: &str, factors: &[usize]) -> Result<usize, ConfigError> {
    factors
        .iter()
        .try_fold(1usize, |product, factor| product.checked_mul(*factor))
        .ok_or_else(|| ConfigError::Inconsistent(format!("{what} overflows")))
}

/// The record that [`parse`] reads back as `config`.
pub(super) fn record(config: &TextConfig) -> Value {
    let (architecture, model_type) = match (&config.flash_next, &config.feed_forward) {
        (Some(_), _) => flash_next::NAMES,
        (None, FeedForwardConfig::Dense { .. }) => DENSE,
        (None, FeedForwardConfig::Moe { .. }) => MOE,
    };
    let layer_types: Vec<&str> = config.layer_types.iter().map(|kind| kind.name()).collect();
    let mut record = json!({
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.layer_types.len(),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rms_norm_eps": f64::from(config.rms_norm_eps),
        "layer_types": layer_types,
    });
    if let Some(attention) = &config.attention {
        record["num_attention_heads"] = attention.num_heads.into();
        record["num_key_value_heads"] = attention.num_kv_heads.into();
        record["head_dim"] = attention.head_dim.into();
        record["rope_parameters"] = json!({
            "rope_theta": f64::from(attention.rope_theta),
            "partial_rotary_factor": f64::from(attention.partial_rotary_factor),
            "mrope_section": attention.mrope_section,
        });
    }
    if let Some(delta_net) = &config.delta_net {
        record["linear_num_key_heads"] = delta_net.num_key_heads.into();
        record["linear_key_head_dim"] = delta_net.key_head_dim.into();
        record["linear_num_value_heads"] = delta_net.num_value_heads.into();
        record["linear_value_head_dim"] = delta_net.value_head_dim.into();
        record["linear_conv_kernel_dim"] = delta_net.conv_kernel_dim.into();
    }
    match &config.feed_forward {
        FeedForwardConfig::Dense { intermediate_size } => record["intermediate_size"] = (*intermediate_size).into(),
        FeedForwardConfig::Moe(moe) => {
            record["num_experts"] = moe.num_experts.into();
            record["num_experts_per_tok"] = moe.num_experts_per_tok.into();
            record["moe_intermediate_size"] = moe.moe_intermediate_size.into();
            record["shared_expert_intermediate_size"] = moe.shared_expert_intermediate_size.into();
        }
    }
    if let Some(flash_next) = &config.flash_next {
        flash_next.record(&mut record);
    }
    record
}
