//! Layout arithmetic of the recipes, from shapes alone.

use std::collections::BTreeMap;

use perplexity_model::config::TextConfig;
use perplexity_model::convert::{Plan, Recipe, RecipeError};
use perplexity_model::formats::Format;
use perplexity_model::source::ActivationPolicy;
use serde_json::json;

/// The published 27B geometry.
fn dense_27b() -> TextConfig {
    let layer_types: Vec<&str> = (0..64)
        .map(|layer| {
            if (layer + 1) % 4 == 0 {
                "full_attention"
            } else {
                "linear_attention"
            }
        })
        .collect();
    let config = json!({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 5120,
        "vocab_size": 248320, "num_hidden_layers": 64, "max_position_embeddings": 262144,
        "tie_word_embeddings": false, "rms_norm_eps": 1e-6, "layer_types": layer_types, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256,
        "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 48,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "intermediate_size": 17408
    });
    TextConfig::from_artifact(&config).expect("valid")
}

/// The published 35B-A3B geometry.
fn moe_35b() -> TextConfig {
    let layer_types: Vec<&str> = (0..40)
        .map(|layer| {
            if (layer + 1) % 4 == 0 {
                "full_attention"
            } else {
                "linear_attention"
            }
        })
        .collect();
    let config = json!({
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
        "vocab_size": 248320, "num_hidden_layers": 40, "max_position_embeddings": 262144,
        "tie_word_embeddings": false, "rms_norm_eps": 1e-6, "layer_types": layer_types, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256,
        "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512
    });
    TextConfig::from_artifact(&config).expect("valid")
}

fn plan(config: &TextConfig, recipe: &str) -> Plan {
    Plan::new(config, &Recipe::named(recipe).expect("a recipe"), &BTreeMap::new()).expect("plans")
}

#[test]
fn official_mixes_have_the_published_object_counts_and_sizes() {
    let (dense, moe) = (dense_27b(), moe_35b());
    for (recipe, config, objects, bytes) in [
        ("qwen3_6_27b", &dense, 771, 16_378_329_088),
        ("qwen3_8_27b", &dense, 771, 17_093_490_688),
        ("qwen3_8_27b_q6", &dense, 771, 19_945_617_408),
        ("qwen3_8_27b_nvfp4", &dense, 659, 20_375_621_632),
        ("qwen3_6_27b_nvfp4", &dense, 707, 17_206_931_200),
        ("qwen3_6_35b_a3b", &moe, 533, 21_038_469_632),
    ] {
        let plan = plan(config, recipe);
        assert_eq!(plan.parents.len(), objects, "{recipe}");
        // The published sizes count every object as whole 256 bytes, the last one too.
        assert_eq!(plan.end_from(0).expect("fits").next_multiple_of(256), bytes, "{recipe}");
    }
}

#[test]
fn packed_parents_have_the_official_shapes_and_order() {
    let find = |plan: &Plan, name: &str| {
        let holds =
            |parent: &&perplexity_model::convert::Parent| parent.members.iter().any(|member| member.name == name);
        plan.parents.iter().find(holds).expect(name).clone()
    };
    let plan_27b = plan(&dense_27b(), "qwen3_8_27b");
    for (name, shape, format) in [
        ("text/layers/3/attention/key", [7168, 5120], Format::Q4G64Fp16),
        ("text/layers/3/attention/gate", [7168, 5120], Format::Q5G64Fp16),
        ("text/layers/0/gdn/key", [4096, 5120], Format::Q4G64Fp16),
        ("text/layers/0/gdn/z", [12288, 5120], Format::Q5G64Fp16),
        ("text/layers/0/gdn/a_projection", [48, 5120], Format::Bf16),
        ("text/layers/0/mlp/up", [34816, 5120], Format::Q4G64Fp16),
        ("text/token_embedding", [248_320, 5120], Format::Q8G32Fp16),
    ] {
        let parent = find(&plan_27b, name);
        assert_eq!(
            (parent.shape.as_slice(), parent.encoding.format),
            (shape.as_slice(), format),
            "{name}"
        );
    }
    let plan_fp = plan(&dense_27b(), "qwen3_8_27b_nvfp4");
    let attention = find(&plan_fp, "text/layers/7/attention/value");
    assert_eq!(attention.shape, [14336, 5120]);
    let order: Vec<&str> = attention.members.iter().map(|member| member.role).collect();
    assert_eq!(
        order,
        ["attention/query", "attention/key", "attention/gate", "attention/value"]
    );
    assert_eq!(find(&plan_fp, "text/layers/0/gdn/b_projection").shape, [96, 5120]);
    assert_eq!(find(&plan_fp, "text/layers/55/mlp/down").encoding.format, Format::Nvfp4);
    assert_eq!(
        find(&plan_fp, "text/layers/56/mlp/down").encoding.format,
        Format::Fp8E4m3fnRowBf16
    );

    let plan_35b = plan(&moe_35b(), "qwen3_6_35b_a3b");
    let bank = find(&plan_35b, "text/layers/0/moe/experts/1/up");
    assert_eq!(bank.shape, [262_144, 2048]);
    let order: Vec<&str> = bank.members[..4].iter().map(|member| member.name.as_str()).collect();
    assert_eq!(
        order,
        ["0/gate", "0/up", "1/gate", "1/up"].map(|name| format!("text/layers/0/moe/experts/{name}"))
    );
    for (name, shape, format) in [
        ("text/layers/38/moe/experts/9/down", [524_288, 512], Format::Q6G64Fp16),
        ("text/layers/37/moe/experts/9/down", [524_288, 512], Format::Q5G64Fp16),
        ("text/layers/0/moe/shared_score", [257, 2048], Format::Bf16),
        ("text/layers/0/moe/shared/up", [1024, 2048], Format::Q8G32Fp16),
        ("text/layers/0/gdn/z", [12288, 2048], Format::Q8G32Fp16),
        ("text/layers/3/attention/gate", [9216, 2048], Format::Q8G32Fp16),
        ("text/output_head", [248_320, 2048], Format::Q6G64Fp16),
    ] {
        let parent = find(&plan_35b, name);
        assert_eq!(
            (parent.shape.as_slice(), parent.encoding.format),
            (shape.as_slice(), format),
            "{name}"
        );
    }
}

#[test]
fn groups_come_first_and_the_rest_in_declaration_order() {
    let plan = plan(&dense_27b(), "qwen3_8_27b");
    let first = |index: usize| plan.parents[index].members[0].name.as_str();
    // Block 0: q|k, v|z, gate|up; block 1 follows; 64 blocks of three groups.
    assert_eq!(
        [first(0), first(1), first(2)],
        ["gdn/query", "gdn/value", "mlp/gate"].map(|name| format!("text/layers/0/{name}"))
    );
    assert_eq!(first(3), "text/layers/1/gdn/query");
    let rest: Vec<&str> = plan.parents[192..]
        .iter()
        .take(5)
        .map(|parent| parent.members[0].name.as_str())
        .collect();
    assert_eq!(
        rest,
        [
            "text/token_embedding",
            "text/output_head",
            "text/final_norm",
            "text/layers/0/input_norm",
            "text/layers/0/gdn/a_projection",
        ]
    );
    assert_eq!(plan.parents[192].id, "weight/000192");
}

#[test]
fn four_bit_activations_need_a_divisor_at_their_input() {
    let config = dense_27b();
    let recipe = Recipe::named("qwen3_8_27b_nvfp4").expect("a recipe");
    let without = Plan::new(&config, &recipe, &BTreeMap::new()).expect("plans");
    // 56 blocks of gate, up, down.
    assert!(
        without.notes.iter().any(|note| note.starts_with("168 weights")),
        "{:?}",
        without.notes
    );
    assert_eq!(without.policies["text/layers/0/mlp/gate"], ActivationPolicy::A16Only);
    // FP8 that is encoded here, not imported.
    assert_eq!(without.policies["text/layers/60/mlp/gate"], ActivationPolicy::A16Only);
    assert_eq!(without.policies["text/output_head"], ActivationPolicy::A16Only);
    let heads = [
        ("nvidia", ActivationPolicy::AllowA8),
        ("orcarouter", ActivationPolicy::A16Only),
    ];
    for (maker, policy) in heads {
        let plan = plan(&config, &format!("qwen3_8_27b_nvfp4_{maker}"));
        assert_eq!(plan.policies["text/output_head"], policy, "{maker}");
    }
    assert_eq!(
        without.policies["text/layers/0/gdn/a_projection"],
        ActivationPolicy::A16Only
    );
    assert!(!without.policies.contains_key("text/token_embedding"));

    let divisors = BTreeMap::from([("text/layers/0/ffn_input".to_owned(), 12.5)]);
    let with = Plan::new(&config, &recipe, &divisors).expect("plans");
    assert_eq!(with.policies["text/layers/0/mlp/gate"], ActivationPolicy::AllowA4);
    assert_eq!(with.policies["text/layers/0/mlp/up"], ActivationPolicy::AllowA4);
    assert_eq!(with.policies["text/layers/0/mlp/down"], ActivationPolicy::A16Only);
    assert!(
        with.notes.iter().any(|note| note.starts_with("166 weights")),
        "{:?}",
        with.notes
    );
}

#[test]
fn matrices_that_nvfp4_cannot_hold_get_the_fallback_with_a_note() {
    let mut record = dense_27b().to_artifact();
    // 17408 = 136 * 128; 17472 = 136.5 * 128 and 273 * 64: gate|up together are whole tiles, and so is down.
    record["intermediate_size"] = json!(17472);
    let config = TextConfig::from_artifact(&record).expect("valid");
    assert!(
        !plan(&config, "nvfp4")
            .notes
            .iter()
            .any(|note| note.contains("do not fit"))
    );
    // 17440 = 272.5 * 64: gate|up have 34880 = 272.5 * 128 rows, down has 17440 columns.
    record["intermediate_size"] = json!(17440);
    let config = TextConfig::from_artifact(&record).expect("valid");
    for (recipe, format) in [
        ("nvfp4", Format::Q8G32Fp16),
        ("qwen3_8_27b_nvfp4", Format::Fp8E4m3fnRowBf16),
    ] {
        let plan = plan(&config, recipe);
        let unfit = if recipe == "nvfp4" { 192 } else { 168 };
        let note = plan
            .notes
            .iter()
            .find(|note| note.contains("do not fit"))
            .expect("a note");
        assert!(
            note.starts_with(&format!("{unfit} matrices do not fit nvfp4 and are stored as {format}")),
            "{note}"
        );
        assert!(note.contains("text/layers/0/mlp/gate [17440, 5120]"), "{note}");
    }
}

#[test]
fn a_tied_head_shares_the_embedding_only_when_both_are_stored_alike() {
    let mut record = dense_27b().to_artifact();
    record["tie_word_embeddings"] = json!(true);
    let config = TextConfig::from_artifact(&record).expect("valid");
    let alike = plan(&config, "q8");
    assert_eq!(alike.shared.len(), 1);
    assert_eq!(
        (alike.shared[0].0.name.as_str(), alike.shared[0].1.as_str()),
        ("text/output_head", "text/token_embedding")
    );
    assert_eq!(alike.policies["text/output_head"], ActivationPolicy::A16Only);
    let mix = Recipe::from_toml("name='m'\n[[rule]]\nrole='output_head'\nformat='q6_g64_fp16'").expect("valid");
    assert!(
        Plan::new(&config, &mix, &BTreeMap::new())
            .expect("plans")
            .shared
            .is_empty()
    );
    assert!(plan(&dense_27b(), "q8").shared.is_empty());
}

#[test]
fn own_mixes_decide_by_the_first_rule_that_matches() {
    let recipe = Recipe::from_toml(
        r#"
        name = "mine"
        fallback = "q8_g32_fp16"
        [[rule]]
        role = "mlp/*"
        layers = "0..2, 63"
        format = "nvfp4"
        method = "nvfp4_mse"
        policy = "AllowA4"
        [[rule]]
        role = "mlp/down"
        format = "q6_g64_fp16"
        policy = "AllowA8"
        [[rule]]
        role = "*/norm*"
        format = "q4_g64_fp16"
        "#,
    );
    // No parameter that a rule decides about is called a norm.
    assert!(matches!(recipe, Err(RecipeError::Pattern { rule: 3, .. })));
    let recipe = Recipe::from_toml(
        "name = 'mine'\n[[rule]]\nrole = 'mlp/*'\nlayers = '0..2, 63'\nformat = 'nvfp4'\nmethod = 'nvfp4_mse'\n\
         [[rule]]\nrole = 'mlp/down'\nformat = 'q6_g64_fp16'\npolicy = 'AllowA8'",
    )
    .expect("valid");
    let plan = Plan::new(&dense_27b(), &recipe, &BTreeMap::new()).expect("plans");
    let formats = |layer: usize| {
        ["gate", "up", "down"].map(|role| {
            let name = format!("text/layers/{layer}/mlp/{role}");
            let holds =
                |parent: &&perplexity_model::convert::Parent| parent.members.iter().any(|member| member.name == name);
            plan.parents.iter().find(holds).expect("placed").encoding.format
        })
    };
    for layer in [0, 1, 63] {
        assert_eq!(formats(layer), [Format::Nvfp4; 3], "{layer}");
    }
    assert_eq!(formats(2), [Format::Bf16, Format::Bf16, Format::Q6G64Fp16]);
    assert_eq!(plan.policies["text/layers/2/mlp/down"], ActivationPolicy::AllowA8);
}

#[test]
fn rules_of_an_own_mix_without_effect_are_noted() {
    let text = "name='m'\n[[rule]]\nrole='mlp/*'\nformat='bf16'\n[[rule]]\nrole='mlp/down'\nformat='q4_g64_fp16'\n\
                [[rule]]\nrole='gdn/z'\nlayers='64'\nformat='q4_g64_fp16'";
    let plan = Plan::new(&dense_27b(), &Recipe::from_toml(text).expect("valid"), &BTreeMap::new()).expect("plans");
    let notes = plan.notes.join("\n");
    assert!(
        notes.contains("rule 2 (mlp/down)") && notes.contains("rule 3 (gdn/z)") && !notes.contains("rule 1"),
        "{notes}"
    );
}

#[test]
fn faulty_recipes_are_refused_with_the_rule_and_the_fault() {
    for (text, words) in [
        ("[[rule]]\nrole='*'\nformat='bf16'", &["name"][..]),
        ("name='a'\nrules=1", &["rules"]),
        ("name='a'\n[[rule]]\nrole='*'\nformat='q7'", &["rule 1", "q7"]),
        (
            "name='a'\n[[rule]]\nrole='*'\nformat='bf16'\n[[rule]]\nrole='*'\nformat='nvfp4_mul'",
            &["rule 2", "nvfp4_mul"],
        ),
        ("name='a'\n[[rule]]\nrole='*'\nformat='int32'", &["rule 1", "int32"]),
        (
            "name='a'\n[[rule]]\nrole='*'\nformat='bf16'\nmethod='nvfp4_mse'",
            &["rule 1", "nvfp4_mse", "bf16"],
        ),
        (
            "name='a'\n[[rule]]\nrole='*'\nformat='bf16'\nmethod='magic'",
            &["rule 1", "magic"],
        ),
        (
            "name='a'\n[[rule]]\nrole='*'\nformat='bf16'\nlayers='3-5'",
            &["rule 1", "3-5", "0..8, 12"],
        ),
        (
            "name='a'\n[[rule]]\nrole='*'\nformat='bf16'\npolicy='A4'",
            &["rule 1", "A4", "AllowA4"],
        ),
        ("name='a'\nfallback='q9'", &["q9"]),
    ] {
        let error = Recipe::from_toml(text).expect_err(text).to_string();
        for word in words {
            assert!(error.contains(word), "{error:?} does not name {word:?}");
        }
    }
}
