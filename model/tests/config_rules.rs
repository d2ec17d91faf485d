//! The strict artifact configuration and the lenient Hugging Face one, rule by rule.

use perplexity_model::config::{ConfigError, FeedForwardConfig, LayerType, TextConfig};
use serde_json::{Value, json};

fn dense() -> Value {
    json!({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 128, "vocab_size": 320,
        "num_hidden_layers": 2, "max_position_embeddings": 8192, "tie_word_embeddings": false, "rms_norm_eps": 1e-6,
        "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64,
        "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]},
        "linear_num_key_heads": 1, "linear_key_head_dim": 64, "linear_num_value_heads": 2,
        "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "intermediate_size": 128
    })
}

fn moe() -> Value {
    let mut config = dense();
    config["architectures"] = json!(["Qwen3_5MoeForCausalLM"]);
    config["model_type"] = json!("qwen3_5_moe_text");
    remove(&mut config, "intermediate_size");
    for (field, count) in [
        ("num_experts", 16),
        ("num_experts_per_tok", 4),
        ("moe_intermediate_size", 64),
        ("shared_expert_intermediate_size", 32),
    ] {
        config[field] = json!(count);
    }
    config
}

fn remove(config: &mut Value, field: &str) {
    config
        .as_object_mut()
        .expect("an object")
        .shift_remove(field)
        .expect("the field is there");
}

/// The error of `config` after `change`.
fn strict_error(mut config: Value, change: impl FnOnce(&mut Value)) -> ConfigError {
    change(&mut config);
    TextConfig::from_artifact(&config).expect_err("the change is a fault")
}

fn assert_names(error: &ConfigError, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} does not name {word:?}");
    }
}

#[test]
fn an_artifact_record_is_read_and_written_back() {
    for record in [dense(), moe()] {
        let config = TextConfig::from_artifact(&record).expect("a valid record");
        assert_eq!(TextConfig::from_artifact(&config.to_artifact()), Ok(config));
    }
    let config = TextConfig::from_artifact(&dense()).expect("a valid record");
    let attention = config.attention.as_ref().expect("full attention is configured");
    assert_eq!(
        (config.hidden_size, config.vocab_size, config.max_position_embeddings),
        (128, 320, 8192)
    );
    assert_eq!(
        config.layer_types,
        [LayerType::LinearAttention, LayerType::FullAttention]
    );
    // Rounded to f32: 10^7 is exact, 10^-6 is 9.999999974752427e-07.
    assert_eq!(attention.rope_theta, 1e7);
    assert_eq!(f64::from(config.rms_norm_eps), 9.999_999_974_752_427e-7);
    assert_eq!(attention.rotary_dim(), 16);
    assert_eq!(
        config.delta_net.as_ref().map(|delta_net| delta_net.conv_dim()),
        Some(256)
    );
    assert_eq!(config.feed_forward, FeedForwardConfig::Dense { intermediate_size: 128 });
    assert_eq!(config.architecture(), "Qwen3_5ForCausalLM");
}

#[test]
fn every_required_field_is_missed_by_name() {
    for (record, fields) in [(dense(), dense()), (moe(), moe())] {
        for field in fields.as_object().expect("an object").keys() {
            let error = strict_error(record.clone(), |config| remove(config, field));
            assert!(
                matches!(&error, ConfigError::Missing { field: missed, .. } if missed == field),
                "{field}: {error}"
            );
        }
    }
    for field in ["rope_theta", "partial_rotary_factor", "mrope_section"] {
        let error = strict_error(dense(), |config| remove(&mut config["rope_parameters"], field));
        assert_names(&error, &["lacks", &format!("rope_parameters.{field}")]);
    }
}

#[test]
fn a_group_that_is_present_has_to_be_complete_even_when_no_block_uses_it() {
    let linear_only = |config: &mut Value| config["layer_types"] = json!(["linear_attention", "linear_attention"]);
    for group in [&[
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rope_parameters",
    ][..]]
    {
        let complete = {
            let mut config = dense();
            linear_only(&mut config);
            TextConfig::from_artifact(&config).expect("an unused group is allowed")
        };
        assert!(complete.attention.is_some());
        for kept in group {
            let error = strict_error(dense(), |config| {
                linear_only(config);
                group
                    .iter()
                    .filter(|field| *field != kept)
                    .for_each(|field| remove(config, field));
            });
            assert!(matches!(error, ConfigError::Missing { .. }), "{kept} alone: {error}");
        }
        let mut none = dense();
        linear_only(&mut none);
        group.iter().for_each(|field| remove(&mut none, field));
        assert_eq!(
            TextConfig::from_artifact(&none)
                .expect("the group is not needed")
                .attention,
            None
        );
    }
    let error = strict_error(dense(), |config| {
        config["layer_types"] = json!(["full_attention", "full_attention"]);
        for field in [
            "linear_num_key_heads",
            "linear_key_head_dim",
            "linear_num_value_heads",
            "linear_value_head_dim",
        ] {
            remove(config, field);
        }
    });
    assert_names(&error, &["lacks", "linear_num_key_heads"]);
}

#[test]
fn dense_and_moe_fields_do_not_mix() {
    assert_names(
        &strict_error(dense(), |config| config["num_experts"] = json!(4)),
        &["dense", "num_experts"],
    );
    assert_names(
        &strict_error(moe(), |config| config["intermediate_size"] = json!(4)),
        &["mixture", "intermediate_size"],
    );
    assert_names(
        &strict_error(moe(), |config| config["num_experts_per_tok"] = json!(17)),
        &["num_experts_per_tok", "16"],
    );
}

#[test]
fn unknown_members_are_refused() {
    for field in [
        "full_attention_interval",
        "dtype",
        "attention_bias",
        "rope_scaling",
        "hidden_act",
    ] {
        let error = strict_error(dense(), |config| config[field] = json!(4));
        assert_eq!(error, ConfigError::Unknown { field: field.into() });
    }
    let error = strict_error(dense(), |config| {
        config["rope_parameters"]["rope_type"] = json!("default")
    });
    assert_eq!(
        error,
        ConfigError::Unknown {
            field: "rope_parameters.rope_type".into()
        }
    );
}

#[test]
fn integers_are_json_integers_in_range() {
    for wrong in [
        json!(0),
        json!(-1),
        json!(128.0),
        json!("128"),
        json!(true),
        json!(4_294_967_296_u64),
        Value::Null,
    ] {
        for field in [
            "hidden_size",
            "vocab_size",
            "num_hidden_layers",
            "head_dim",
            "intermediate_size",
        ] {
            let error = strict_error(dense(), |config| config[field] = wrong.clone());
            assert!(
                matches!(&error, ConfigError::Invalid { field: found, .. } if found == field),
                "{field}={wrong}: {error}"
            );
        }
    }
    let largest = strict_error(dense(), |config| {
        config["num_attention_heads"] = json!(4_294_967_295_u64);
        config["num_key_value_heads"] = json!(2);
    });
    assert_names(&largest, &["num_attention_heads", "4294967295", "num_key_value_heads"]);
}

#[test]
fn real_numbers_are_finite_positive_and_fit_32_bits() {
    for wrong in [
        json!(0),
        json!(0.0),
        json!(-1e-6),
        json!(1e300),
        json!(1e-60),
        json!("1e-6"),
        json!([1e-6]),
    ] {
        assert_names(
            &strict_error(dense(), |config| config["rms_norm_eps"] = wrong.clone()),
            &["rms_norm_eps"],
        );
        assert_names(
            &strict_error(dense(), |config| {
                config["rope_parameters"]["rope_theta"] = wrong.clone()
            }),
            &["rope_parameters.rope_theta"],
        );
    }
    assert_names(
        &strict_error(dense(), |config| {
            config["rope_parameters"]["partial_rotary_factor"] = json!(1.25)
        }),
        &["partial_rotary_factor", "at most 1"],
    );
}

#[test]
fn rotary_width_is_positive_and_even() {
    for factor in [0.01, 0.05] {
        // 64 * 0.01 truncates to 0, 64 * 0.05 to 3.
        let error = strict_error(dense(), |config| {
            config["rope_parameters"]["partial_rotary_factor"] = json!(factor)
        });
        assert_names(&error, &["partial_rotary_factor", "even"]);
    }
}

#[test]
fn mrope_sections_have_to_fit_the_interleave() {
    // Sums to 8 pairs, but pairs 1, 4, 7 are the only ones that axis 1 can take.
    for section in [
        json!([2, 4, 2]),
        json!([4, 3, 2]),
        json!([8, 0]),
        json!([3, 3, -2]),
        json!([3.0, 3, 2]),
    ] {
        let error = strict_error(dense(), |config| {
            config["rope_parameters"]["mrope_section"] = section.clone()
        });
        assert_names(&error, &["rope_parameters.mrope_section"]);
    }
    for section in [json!([8, 0, 0]), json!([5, 1, 2])] {
        let mut config = dense();
        config["rope_parameters"]["mrope_section"] = section;
        TextConfig::from_artifact(&config).expect("fits");
    }
}

#[test]
fn heads_have_to_divide() {
    assert_names(
        &strict_error(dense(), |config| config["num_key_value_heads"] = json!(3)),
        &["num_attention_heads", "num_key_value_heads"],
    );
    assert_names(
        &strict_error(dense(), |config| config["linear_num_key_heads"] = json!(4)),
        &["linear_num_value_heads", "linear_num_key_heads"],
    );
}

#[test]
fn convolution_channels_may_not_overflow() {
    let error = strict_error(dense(), |config| {
        for field in ["linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads"] {
            config[field] = json!(4_294_967_295_u64);
        }
    });
    assert_names(&error, &["overflows"]);
}

#[test]
fn layer_types_are_counted_and_spelled() {
    assert_names(
        &strict_error(dense(), |config| config["num_hidden_layers"] = json!(3)),
        &["layer_types", "2", "3"],
    );
    assert_names(
        &strict_error(dense(), |config| config["layer_types"][1] = json!("sliding_attention")),
        &["layer_types[1]", "sliding_attention"],
    );
}

#[test]
fn only_the_known_architectures_are_accepted() {
    for (name, model_type) in [
        ("Qwen3_5ForCausalLM", "qwen3_5_moe_text"),
        ("Qwen4ExpForCausalLM", "qwen3_5_text"),
        ("Qwen9ForCausalLM", "qwen9_text"),
        ("LlamaForCausalLM", "llama"),
    ] {
        let error = strict_error(dense(), |config| {
            config["architectures"] = json!([name]);
            config["model_type"] = json!(model_type);
        });
        assert_names(&error, &[name, model_type]);
    }
    let error = strict_error(dense(), |config| config["architectures"] = json!([]));
    assert_names(&error, &["architectures", "exactly one"]);
    assert_eq!(TextConfig::from_artifact(&json!([])), Err(ConfigError::NotAnObject));
}

/// The dense record in Hugging Face's clothes.
fn checkpoint() -> Value {
    let mut config = dense();
    let extra = json!({
        "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": null, "dtype": "bfloat16",
        "hidden_act": "silu", "initializer_range": 0.02, "use_cache": true, "transformers_version": "5.24.0"
    });
    config
        .as_object_mut()
        .expect("an object")
        .extend(extra.as_object().expect("an object").clone());
    config["rope_parameters"]["rope_type"] = json!("default");
    config["rope_parameters"]["mrope_interleaved"] = json!(true);
    config
}

/// The same nested under `text_config`, as multimodal checkpoints have it.
fn nested() -> Value {
    let mut text = checkpoint();
    remove(&mut text, "architectures");
    json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
        "vision_config": {"depth": 27}, "image_token_id": 248056
    })
}

fn lenient_error(mut config: Value, change: impl FnOnce(&mut Value)) -> ConfigError {
    change(&mut config);
    TextConfig::from_hugging_face(&config).expect_err("the change is a fault")
}

#[test]
fn checkpoint_configurations_read_alike_nested_or_not() {
    let expected = TextConfig::from_artifact(&dense()).expect("valid");
    assert_eq!(TextConfig::from_hugging_face(&checkpoint()).as_ref(), Ok(&expected));
    assert_eq!(TextConfig::from_hugging_face(&nested()).as_ref(), Ok(&expected));
}

#[test]
fn full_attention_interval_is_expanded_into_layer_types() {
    let types = |interval: Value| {
        let mut config = checkpoint();
        remove(&mut config, "layer_types");
        config["num_hidden_layers"] = json!(8);
        config["full_attention_interval"] = interval;
        let config = TextConfig::from_hugging_face(&config).expect("valid");
        let full = |(layer, kind): (usize, &LayerType)| (*kind == LayerType::FullAttention).then_some(layer);
        config
            .layer_types
            .iter()
            .enumerate()
            .filter_map(full)
            .collect::<Vec<_>>()
    };
    assert_eq!(types(json!(4)), [3, 7]);
    assert_eq!(types(json!(3)), [2, 5]);
    // Absent means 4.
    assert_eq!(types(Value::Null), [3, 7]);
    let error = lenient_error(checkpoint(), |config| {
        remove(config, "layer_types");
        config["full_attention_interval"] = json!(0);
    });
    assert_names(&error, &["full_attention_interval"]);
}

#[test]
fn absent_rotary_parameters_are_refused_rather_than_guessed() {
    let error = lenient_error(checkpoint(), |config| remove(config, "rope_parameters"));
    assert!(
        matches!(&error, ConfigError::Missing { field, .. } if field == "rope_parameters"),
        "{error}"
    );
    let error = lenient_error(checkpoint(), |config| {
        remove(&mut config["rope_parameters"], "rope_theta")
    });
    assert_names(&error, &["rope_parameters.rope_theta"]);
    // The factor may stand at the top; nowhere is refused.
    let mut outside = checkpoint();
    remove(&mut outside["rope_parameters"], "partial_rotary_factor");
    assert_names(
        &lenient_error(outside.clone(), |_| ()),
        &["rope_parameters.partial_rotary_factor"],
    );
    outside["partial_rotary_factor"] = json!(0.25);
    TextConfig::from_hugging_face(&outside).expect("valid");
}

#[test]
fn absent_mrope_sections_become_the_interleaved_shares() {
    for (head_dim, section) in [(64, [3, 3, 2]), (256, [11, 11, 10]), (8, [1, 0, 0]), (16, [1, 1, 0])] {
        let mut config = checkpoint();
        config["head_dim"] = json!(head_dim);
        remove(&mut config["rope_parameters"], "mrope_section");
        let config = TextConfig::from_hugging_face(&config).expect("valid");
        assert_eq!(
            config.attention.map(|attention| attention.mrope_section),
            Some(section),
            "head_dim {head_dim}"
        );
    }
}

#[test]
fn yarn_in_a_checkpoint_is_refused_not_ignored() {
    for kind in ["yarn", "linear", "dynamic", "llama3", "longrope"] {
        let error = lenient_error(checkpoint(), |config| {
            config["rope_parameters"]["rope_type"] = json!(kind)
        });
        assert_names(&error, &["rope_parameters.rope_type", kind]);
    }
    let error = lenient_error(checkpoint(), |config| config["rope_parameters"]["factor"] = json!(4.0));
    assert_names(&error, &["rope_parameters.factor", "4.0"]);
    let error = lenient_error(checkpoint(), |config| {
        config["rope_parameters"]["attention_factor"] = json!(1.5)
    });
    assert_names(&error, &["rope_parameters.attention_factor"]);
    let error = lenient_error(checkpoint(), |config| {
        config["rope_scaling"] = json!({"type": "yarn", "factor": 4.0})
    });
    assert_names(&error, &["rope_scaling", "yarn"]);
    let error = lenient_error(checkpoint(), |config| {
        config["rope_parameters"]["mrope_interleaved"] = json!(false)
    });
    assert_names(&error, &["mrope_interleaved"]);
}

#[test]
fn features_outside_the_family_are_refused_by_name() {
    for (field, value) in [
        ("hidden_act", json!("gelu")),
        ("attention_bias", json!(true)),
        ("attn_output_gate", json!(false)),
        ("mamba_ssm_dtype", json!("bfloat16")),
        ("use_sliding_window", json!(true)),
        ("decoder_sparse_step", json!(2)),
        ("mlp_only_layers", json!([0])),
        ("num_experts", json!(8)),
    ] {
        let error = lenient_error(checkpoint(), |config| config[field] = value.clone());
        assert!(
            matches!(&error, ConfigError::Unsupported { field: found, .. } if found == field),
            "{field}: {error}"
        );
    }
    for architecture in ["Qwen4ExpForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"] {
        let error = lenient_error(checkpoint(), |config| config["architectures"] = json!([architecture]));
        assert_names(&error, &["architectures", architecture]);
    }
    assert_names(
        &lenient_error(checkpoint(), |config| config["model_type"] = json!("qwen9_text")),
        &["qwen9_text"],
    );
}

#[test]
fn norm_topk_prob_absent_means_renormalised_and_false_is_refused() {
    let mut config = moe();
    let expected = TextConfig::from_artifact(&config).expect("valid");
    config["rope_parameters"]["rope_type"] = json!("default");
    assert_eq!(TextConfig::from_hugging_face(&config).as_ref(), Ok(&expected));
    config["norm_topk_prob"] = json!(true);
    assert_eq!(TextConfig::from_hugging_face(&config).as_ref(), Ok(&expected));
    config["norm_topk_prob"] = json!(false);
    assert_names(&lenient_error(config, |_| ()), &["norm_topk_prob", "expected true"]);
}

#[test]
fn the_tie_flag_is_found_in_either_place() {
    let tied = |outer: Value, inner: Value| {
        let mut config = nested();
        remove(&mut config["text_config"], "tie_word_embeddings");
        for (holder, flag) in [("", outer), ("text_config", inner)] {
            let holder = if holder.is_empty() {
                &mut config
            } else {
                &mut config[holder]
            };
            if !flag.is_null() {
                holder["tie_word_embeddings"] = flag;
            }
        }
        TextConfig::from_hugging_face(&config).map(|config| config.tie_word_embeddings)
    };
    assert_eq!(tied(json!(true), Value::Null), Ok(true));
    assert_eq!(tied(Value::Null, json!(true)), Ok(true));
    assert_eq!(tied(Value::Null, json!(false)), Ok(false));
    assert_eq!(tied(json!(false), json!(false)), Ok(false));
    assert_eq!(tied(Value::Null, Value::Null), Ok(false));
    assert_names(
        &tied(json!(true), json!(false)).expect_err("a conflict"),
        &["tie_word_embeddings", "text_config"],
    );
    assert_names(
        &tied(json!("yes"), Value::Null).expect_err("not a flag"),
        &["tie_word_embeddings", "yes"],
    );
}

fn flash_next() -> Value {
    let mut config = perplexity_model::flash_next_tiny::config();
    if let Some(dims) = &mut config.flash_next {
        dims.volume_id = Some([7; 16]);
    }
    config.to_artifact()
}

#[test]
fn a_flash_next_record_is_closed_complete_and_read_back() {
    let record = flash_next();
    let config = TextConfig::from_artifact(&record).expect("a valid record");
    assert_eq!(config.to_artifact(), record);
    assert_eq!(config.architecture(), "Qwen4ExpForCausalLM");
    let members: Vec<String> = record.as_object().expect("an object").keys().cloned().collect();
    assert_eq!(members.len(), 9 + 4 + 5 + 4 + 20);
    for member in members {
        let error = strict_error(flash_next(), |config| remove(config, &member));
        assert_names(&error, &[&member]);
    }
    let error = strict_error(flash_next(), |config| config["final_norm"] = json!(1));
    assert_eq!(
        error,
        ConfigError::Unknown {
            field: "final_norm".into()
        }
    );
}

#[test]
fn flash_next_members_have_their_ranges() {
    for (field, value, words) in [
        ("tie_word_embeddings", json!(true), "expected false"),
        ("norm_topk_prob", json!(false), "expected true"),
        ("hc_count", json!(1), "at least 2 streams"),
        ("indexer_kv_heads", json!(2), "expected 1"),
        ("indexer_budget", json!(9), "is not a multiple"),
        ("indexer_head_dim", json!(4), "at least the 8 rotated features"),
        ("output_gate_type", json!("tanh"), "`sigmoid` or `silu`"),
        ("ple_layer_ids", json!([0]), "of a linear-attention block"),
        ("ple_layer_ids", json!([4]), "of a linear-attention block"),
        ("ple_layer_ids", json!([1, 2]), "an array of one block number"),
        ("ple_embed_dim", json!(50), "is not a multiple"),
        ("ple_conv_kernel_size", json!(1), "at least 2 taps"),
        ("ngram_size", json!(1), "from 2 to 64"),
        ("heads_per_ngram", json!(65), "from 1 to 64"),
        ("eos_token_id", json!(96), "an id below `vocab_size` = 96"),
        ("num_experts_per_tok", json!(9), "at most `num_experts` = 8"),
    ] {
        let error = strict_error(flash_next(), |config| config[field] = value.clone());
        assert_names(&error, &[words]);
    }
    for (member, value, words) in [
        ("format", json!("iq4_nl"), "`fp8_e4m3fn`"),
        ("rows", json!(4063), "4064, by the n-gram hash"),
        ("file_bytes", json!(53_247), "53248, by the n-gram hash"),
        ("volume_id", json!("0g"), "32 hex digits"),
        ("sha256", json!(""), "unexpected member `ngram_table.sha256`"),
    ] {
        let error = strict_error(flash_next(), |config| config["ngram_table"][member] = value.clone());
        assert_names(&error, &[words]);
    }
}

#[test]
fn a_flash_next_checkpoint_may_omit_what_its_class_defaults() {
    let mut config = flash_next();
    for field in [
        "seed",
        "split_ngram_parts",
        "norm_topk_prob",
        "ngram_table",
        "output_gate_type",
    ] {
        remove(&mut config, field);
    }
    config["eos_token_id"] = json!([95, 3]);
    config["layer_types"][3] = json!("indexed_attention");
    let read = TextConfig::from_hugging_face(&config).expect("a valid checkpoint");
    let dims = read.flash_next.expect("a model of this kind");
    assert_eq!(
        (dims.ngram.seed, dims.ngram.parts, dims.ngram.eos_token_id),
        (1234, 512, 95)
    );
    assert_eq!((dims.output_gate.name(), dims.volume_id), ("silu", None));
    assert_eq!(read.layer_types[3], LayerType::FullAttention);
}
