//! What inspection tells about checkpoints and artifacts, as a structure, as JSON and as a table.

mod common;

use std::fs;

use common::data;
use perplexity_model::convert::{ConvertOptions, Recipe, convert};
use perplexity_model::inspect::Inspection;

#[test]
fn a_checkpoint_is_described_with_shared_storage_counted_once() {
    let inspection = Inspection::of_path(&data("demo_hf")).expect("opens");
    assert_eq!(
        (inspection.kind, inspection.architecture),
        ("checkpoint", "Qwen3_5ForCausalLM")
    );
    // The index of the checkpoint states both numbers.
    assert_eq!((inspection.weights, inspection.bytes), (7_921_688, 15_843_376));
    assert_eq!(inspection.bits_per_weight, 16.0);
    assert_eq!(inspection.formats, ["bf16"]);
    assert_eq!(inspection.files.len(), 2);
    assert_eq!(inspection.files[0].bytes, 11_908_592);
    assert_eq!(inspection.resources.len(), 4);
    assert_eq!(inspection.resources[0].role, "tokenizer.json");
    assert_eq!(inspection.resources[0].bytes, 543_809);
    let role = |name: &str| inspection.roles.iter().find(|role| role.role == name).expect(name);
    assert_eq!(
        (role("mlp/down").parameters, role("mlp/down").weights),
        (8, 8 * 256 * 512)
    );
    assert_eq!(role("attention/query").parameters, 2);
    assert_eq!(role("gdn/z").activation_policies.get("A16Only"), Some(&6));
    assert!(role("token_embedding").activation_policies.is_empty());
}

#[test]
fn an_artifact_is_described_down_to_its_objects() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("mixed.ninfer");
    let options = ConvertOptions::new(Recipe::named("qwen3_8_27b").expect("a recipe"));
    let summary = convert(&data("demo_hf"), &out, &options, &mut |_| ()).expect("converts");
    let inspection = Inspection::of_path(&out).expect("opens");
    assert_eq!((inspection.kind, inspection.name.as_str()), ("artifact", "demo_hf"));
    assert_eq!(inspection.artifact_id.as_ref().map(String::len), Some(32));
    assert_eq!(
        inspection.formats,
        ["bf16", "fp32", "q4_g64_fp16", "q5_g64_fp16", "q8_g32_fp16"]
    );
    assert_eq!(inspection.bytes, summary.bytes);
    assert!((inspection.bits_per_weight - summary.bits_per_weight).abs() < 1e-12);
    let bits = |name: &str| {
        inspection
            .roles
            .iter()
            .find(|role| role.role == name)
            .expect(name)
            .bits_per_weight
    };
    // Bits of the formats; 256 and 512 columns need no padding, planes end on whole 256 bytes.
    assert_eq!(
        (bits("mlp/up"), bits("mlp/down"), bits("token_embedding")),
        (4.25, 5.25, 8.5)
    );
    let query = inspection
        .parameters
        .iter()
        .find(|entry| entry.name == "text/layers/3/attention/query")
        .expect("there");
    let key = inspection
        .parameters
        .iter()
        .find(|entry| entry.name == "text/layers/3/attention/key")
        .expect("there");
    assert_eq!(query.objects, key.objects);
    assert_eq!(query.activation_policy, Some("A16Only"));
    assert_eq!(inspection.components.len(), 1);
    assert!(inspection.components[0].loaded);
    assert_eq!(inspection.provenance["recipe"], "qwen3_8_27b");
    assert_eq!(inspection.config["hidden_size"], 256);
    // Payload: resources, tensors and at most 255 bytes of gap before each tensor.
    let resources: u64 = inspection.resources.iter().map(|resource| resource.bytes).sum();
    let gaps = inspection.files[0].bytes - resources - inspection.bytes;
    assert!(gaps < 256 * summary.objects as u64, "{gaps}");
    assert!(inspection.files[0].bytes < fs::metadata(&out).expect("written").len());
}

#[test]
fn the_table_and_the_json_tell_the_same() {
    let inspection = Inspection::of_path(&data("fixtures/moe")).expect("opens");
    let table = inspection.to_string();
    assert_eq!(inspection.files.len(), 1, "stray files are not files of the model");
    let experts = table
        .lines()
        .find(|line| line.starts_with("moe/experts/up"))
        .expect("a line");
    let words: Vec<&str> = experts.split_whitespace().collect();
    assert_eq!(
        words,
        [
            "moe/experts/up",
            "64",
            "524,288",
            "1,048,576",
            "16.000",
            "bf16",
            "A16Only"
        ]
    );
    assert!(
        table.contains("note: weight files that are not part of the model were ignored: golden.safetensors"),
        "{table}"
    );
    let json = serde_json::to_value(&inspection).expect("serialises");
    assert_eq!(json["roles"].as_array().map(Vec::len), Some(inspection.roles.len()));
    assert_eq!(json["parameters"][0]["name"], "text/token_embedding");
    assert_eq!(json["architecture"], "Qwen3_5MoeForCausalLM");
    assert!(json.get("artifact_id").is_none());
}
