//! Checkpoint directories: what is read, what is skipped with a note, what is refused before any computation.

mod common;

use std::collections::BTreeMap;
use std::fs;

use common::{Tiny, data, dtype};
use perplexity_model::checkpoint::{CheckpointError, CheckpointSource};
use perplexity_model::parameters::parameters;
use perplexity_model::source::{self, ActivationPolicy, TextSource};
use serde_json::json;

fn open_error(tiny: &Tiny) -> CheckpointError {
    match CheckpointSource::open(tiny.path()) {
        Ok(_) => panic!("the checkpoint is at fault"),
        Err(error) => error,
    }
}

fn assert_names(error: &dyn std::error::Error, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} does not name {word:?}");
    }
}

#[test]
fn the_shipped_checkpoints_open_and_every_parameter_loads() {
    for directory in ["demo_hf", "fixtures/dense", "fixtures/moe"] {
        let source = source::open(&data(directory)).expect(directory);
        let notes = source.notes();
        // The fixtures keep their golden values beside the model.
        let golden = notes.len() == 1 && notes[0].contains("golden.safetensors") && directory != "demo_hf";
        assert!(notes.is_empty() || golden, "{directory}: {notes:?}");
        for parameter in parameters(source.config()) {
            let values = source.load(&parameter.name, &parameter.shape).expect(&parameter.name);
            assert_eq!(Some(values.len()), parameter.elements());
            assert!(values.iter().all(|value| value.is_finite()), "{}", parameter.name);
            let stored = source.stored(&parameter.name).expect(&parameter.name);
            assert_eq!(stored.parts[0].bytes as usize, 2 * values.len());
            assert_eq!(stored.policy, parameter.input.map(|_| ActivationPolicy::A16Only));
        }
        for role in [
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "generation_config.json",
        ] {
            assert!(source.resource(role).expect(role).is_some(), "{directory} {role}");
        }
        assert_eq!(source.resource("merges.txt").expect("absent is fine"), None);
        assert_eq!(source.resource("../config.json").expect("not a role"), None);
    }
}

#[test]
fn the_demo_head_is_its_embedding() {
    let source = source::open(&data("demo_hf")).expect("opens");
    assert!(source.config().tie_word_embeddings);
    let load = |name| source.load(name, &[8320, 256]).expect(name);
    assert_eq!(load("text/token_embedding"), load("text/output_head"));
}

#[test]
fn query_and_gate_are_interleaved_per_head() {
    let tiny = Tiny::dense();
    let source = CheckpointSource::open(tiny.path()).expect("opens");
    // Two heads of four rows: query 0, gate 0, query 1, gate 1. Element values count up through the tensor.
    let (heads, head_dim, hidden) = (2, 4, 8);
    let row = |row: usize| (0..hidden).map(move |column| (row * hidden + column) as f32);
    for (name, half) in [("attention/query", 0), ("attention/gate", 1)] {
        let expected: Vec<f32> = (0..heads)
            .flat_map(|head| (0..head_dim).map(move |i| (2 * head + half) * head_dim + i))
            .flat_map(row)
            .collect();
        let name = format!("text/layers/1/{name}");
        assert_eq!(
            source.load(&name, &[heads * head_dim, hidden]).expect(&name),
            expected,
            "{name}"
        );
    }
}

#[test]
fn mixed_projections_are_split_and_the_convolution_is_tap_major() {
    let tiny = Tiny::dense();
    let source = CheckpointSource::open(tiny.path()).expect("opens");
    // Kd = 4, Vd = 8, hidden 8: rows 0..4 query, 4..8 key, 8..16 value.
    for (name, rows) in [("query", 0..4), ("key", 4..8), ("value", 8..16)] {
        let expected: Vec<f32> = (rows.start * 8..rows.end * 8).map(|value| value as f32).collect();
        let name = format!("text/layers/0/gdn/{name}");
        assert_eq!(source.load(&name, &[rows.len(), 8]).expect(&name), expected, "{name}");
    }
    // [16 channels, 1, 4 taps] counting up: tap t of channel c is 4 c + t.
    let expected: Vec<f32> = (0..4)
        .flat_map(|tap| (0..16).map(move |channel| (4 * channel + tap) as f32))
        .collect();
    assert_eq!(
        source
            .load("text/layers/0/gdn/convolution", &[4, 16])
            .expect("convolution"),
        expected
    );
}

#[test]
fn fused_and_separate_experts_are_the_same_experts() {
    let separate = Tiny::moe();
    let mut fused = Tiny::moe();
    // [3 experts, 2 * 4 rows, 8] of gate rows then up rows, and [3, 8, 4].
    for layer in 0..2 {
        let prefix = format!("model.layers.{layer}.mlp.experts");
        let take = |fused: &mut Tiny, expert: usize, name: &str| {
            fused
                .tensors
                .remove(&format!("{prefix}.{expert}.{name}_proj.weight"))
                .expect("an expert")
                .values
        };
        let mut gate_up = Vec::new();
        let mut down = Vec::new();
        for expert in 0..3 {
            gate_up.extend(take(&mut fused, expert, "gate"));
            gate_up.extend(take(&mut fused, expert, "up"));
            down.extend(take(&mut fused, expert, "down"));
        }
        fused.set_values(&format!("{prefix}.gate_up_proj"), &[3, 8, 8], gate_up);
        fused.set_values(&format!("{prefix}.down_proj"), &[3, 8, 4], down);
    }
    fused.write();
    let [separate, fused] = [&separate, &fused].map(|tiny| CheckpointSource::open(tiny.path()).expect("opens"));
    let mut differ = 0;
    for parameter in parameters(separate.config()) {
        let load = |source: &CheckpointSource| source.load(&parameter.name, &parameter.shape).expect("loads");
        assert_eq!(load(&separate), load(&fused), "{}", parameter.name);
        differ += usize::from(parameter.expert == Some(2) && load(&separate)[0] != 0.0);
    }
    assert_eq!(differ, 2 * 3, "experts hold values of their own");
}

#[test]
fn reading_piece_by_piece_gives_the_whole() {
    // Pieces that cross heads, rows and decoding tasks; the demo's embedding has 2,129,920 elements.
    for directory in ["demo_hf", "fixtures/moe"] {
        let source = CheckpointSource::open(&data(directory)).expect(directory);
        for parameter in parameters(source.config()) {
            let whole = source.load(&parameter.name, &parameter.shape).expect(&parameter.name);
            let piece = [1, 3, 257, 65_537, 1_000_003][parameter.name.len() % 5].max(whole.len() / 40);
            let mut pieces = Vec::new();
            for begin in (0..whole.len()).step_by(piece) {
                let end = whole.len().min(begin + piece);
                pieces.extend(source.load_range(&parameter.name, begin..end).expect(&parameter.name));
            }
            assert!(pieces == whole, "{directory} {} by {piece}", parameter.name);
            assert!(source.load_range(&parameter.name, 0..whole.len() + 1).is_err());
        }
    }
}

#[test]
fn all_three_float_types_are_read_exactly() {
    for (kind, format) in [(dtype::BF16, "bf16"), (dtype::F16, "fp16"), (dtype::F32, "fp32")] {
        let mut tiny = Tiny::dense();
        tiny.dtype = kind;
        tiny.write();
        let source = CheckpointSource::open(tiny.path()).expect("opens");
        // Counting up to 128 is exact in all three.
        let expected: Vec<f32> = (0..8).map(|value| value as f32).collect();
        assert_eq!(source.load("text/final_norm", &[8]).expect("loads"), expected);
        assert_eq!(
            source.stored("text/final_norm").expect("stored").parts[0].format,
            format
        );
    }
}

#[test]
fn a_multimodal_prefix_is_read_and_vision_and_mtp_are_skipped_with_a_note() {
    let mut tiny = Tiny::dense();
    let text: BTreeMap<_, _> = std::mem::take(&mut tiny.tensors)
        .into_iter()
        .map(|(name, tensor)| (name.replace("model.", "model.language_model."), tensor))
        .collect();
    tiny.tensors = text;
    tiny.set("model.visual.blocks.0.attn.qkv.weight", &[12, 4]);
    tiny.set("mtp.layers.0.self_attn.q_proj.weight", &[16, 8]);
    tiny.set("mtp.norm.weight", &[8]);
    let mut text = tiny.config.clone();
    text.as_object_mut().expect("an object").shift_remove("architectures");
    tiny.config =
        json!({"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text});
    tiny.write();
    let source = CheckpointSource::open(tiny.path()).expect("opens");
    let notes = source.notes().join("\n");
    assert!(
        notes.contains("skipped 1 vision tensors (model.visual.*, 96 bytes)"),
        "{notes}"
    );
    assert!(
        notes.contains("skipped 2 multi-token prediction tensors (mtp.*, 272 bytes)"),
        "{notes}"
    );
}

#[test]
fn a_missing_text_tensor_is_named_before_any_computation() {
    for missing in [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.k_norm.weight",
    ] {
        let mut tiny = Tiny::dense();
        tiny.tensors.remove(missing).expect("it was there");
        tiny.write();
        let error = open_error(&tiny);
        assert!(
            matches!(&error, CheckpointError::MissingTensor { tensor, .. } if tensor == missing),
            "{error}"
        );
    }
}

#[test]
fn untied_without_a_head_is_refused() {
    for flag in [json!(false), json!(null)] {
        let mut tiny = Tiny::dense();
        tiny.config["tie_word_embeddings"] = flag;
        tiny.tensors.remove("lm_head.weight").expect("it was there");
        tiny.write();
        let error = open_error(&tiny);
        assert!(matches!(error, CheckpointError::UntiedWithoutHead { .. }), "{error}");
        assert_names(&error, &["lm_head.weight", "tie_word_embeddings"]);
    }
}

#[test]
fn an_untied_head_is_used_and_a_tied_one_is_noted_as_unused() {
    let mut tiny = Tiny::dense();
    let mut head = tiny.tensors["lm_head.weight"].values.clone();
    head.reverse();
    tiny.set_values("lm_head.weight", &[16, 8], head.clone());
    tiny.write();
    let source = CheckpointSource::open(tiny.path()).expect("opens");
    assert_eq!(source.load("text/output_head", &[16, 8]).expect("loads"), head);

    // The flag only inside `text_config`.
    let mut text = tiny.config.clone();
    text["tie_word_embeddings"] = json!(true);
    text.as_object_mut().expect("an object").shift_remove("architectures");
    tiny.config = json!({"model_type": "qwen3_5", "text_config": text});
    tiny.write();
    let source = CheckpointSource::open(tiny.path()).expect("opens");
    let embedding = source.load("text/token_embedding", &[16, 8]).expect("loads");
    assert_eq!(source.load("text/output_head", &[16, 8]).expect("loads"), embedding);
    assert_ne!(embedding, head);
    assert!(
        source.notes().join("\n").contains("lm_head.weight is not used"),
        "{:?}",
        source.notes()
    );
}

#[test]
fn wrong_shapes_and_types_are_named() {
    let mut tiny = Tiny::dense();
    tiny.set("model.layers.1.self_attn.q_proj.weight", &[8, 8]);
    tiny.write();
    let error = open_error(&tiny);
    assert!(
        matches!(&error, CheckpointError::Shape { found, expected, .. } if found == &[8, 8] && expected == &[16, 8])
    );
    assert_names(&error, &["q_proj", "[8, 8]", "[16, 8]", "model.safetensors"]);

    let mut tiny = Tiny::dense();
    tiny.dtype = dtype::F8;
    tiny.write();
    assert_names(
        &open_error(&tiny),
        &["F8_E4M3", "BF16, F16 or F32", "model.embed_tokens.weight"],
    );
}

#[test]
fn a_tensor_that_would_change_the_text_model_is_not_ignored() {
    for extra in [
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.2.input_layernorm.weight",
    ] {
        let mut tiny = Tiny::dense();
        tiny.set(extra, &[8]);
        tiny.write();
        assert_names(&open_error(&tiny), &[extra, "no parameter"]);
    }
    // Derived tables and foreign tensors do not change it.
    let mut tiny = Tiny::dense();
    tiny.set("model.rotary_emb.inv_freq", &[8]);
    tiny.set("value_head.weight", &[8]);
    tiny.write();
    let notes = CheckpointSource::open(tiny.path()).expect("opens").notes().join("\n");
    assert!(
        notes.contains("value_head.weight") && notes.contains("inv_freq"),
        "{notes}"
    );
}

#[test]
fn a_missing_shard_is_named_with_the_tensors_it_should_hold() {
    let tiny = Tiny::dense();
    tiny.write_sharded();
    fs::remove_file(tiny.path().join("model-2.safetensors")).expect("removes");
    let error = open_error(&tiny);
    assert!(
        matches!(&error, CheckpointError::MissingShard { tensors, .. } if *tensors > 1),
        "{error}"
    );
    assert_names(&error, &["model-2.safetensors", "missing"]);
}

#[test]
fn a_truncated_shard_is_refused_at_every_length() {
    let tiny = Tiny::dense();
    let path = tiny.path().join("model.safetensors");
    let whole = fs::read(&path).expect("reads");
    for length in [0, 1, 7, 8, 9, 100, whole.len() - 1] {
        fs::write(&path, &whole[..length]).expect("writes");
        let error = open_error(&tiny);
        assert_names(
            &error,
            &[
                "model.safetensors",
                &format!("{length} bytes"),
                "not a complete safetensors file",
            ],
        );
    }
    fs::write(&path, [whole.as_slice(), &[0]].concat()).expect("writes");
    assert!(matches!(open_error(&tiny), CheckpointError::Header { .. }));
}

#[test]
fn an_index_that_names_an_absent_tensor_is_refused() {
    let tiny = Tiny::dense();
    tiny.write_sharded();
    let mut index = tiny.index();
    index["weight_map"]["model.layers.0.mlp.extra.weight"] = json!("model-1.safetensors");
    tiny.write_index(&index);
    assert_names(
        &open_error(&tiny),
        &[
            "model.layers.0.mlp.extra.weight",
            "model-1.safetensors",
            "does not hold",
        ],
    );
    // Right tensor, wrong file.
    let mut index = tiny.index();
    let place = index["weight_map"]["model.norm.weight"]
        .as_str()
        .expect("a name")
        .to_owned();
    let other = if place == "model-1.safetensors" {
        "model-2.safetensors"
    } else {
        "model-1.safetensors"
    };
    index["weight_map"]["model.norm.weight"] = json!(other);
    tiny.write_index(&index);
    assert_names(&open_error(&tiny), &["model.norm.weight", other]);
}

#[test]
fn stray_files_are_not_picked_up() {
    let mut tiny = Tiny::dense();
    tiny.write_sharded();
    let expected = CheckpointSource::open(tiny.path())
        .expect("opens")
        .load("text/final_norm", &[8])
        .expect("loads");
    // A left-over with another final norm.
    tiny.set_values("model.norm.weight", &[8], vec![99.0; 8]);
    tiny.write_weights("stale.safetensors", |name| name == "model.norm.weight");
    let source = CheckpointSource::open(tiny.path()).expect("opens");
    assert_eq!(source.load("text/final_norm", &[8]).expect("loads"), expected);
    assert!(
        source.notes().join("\n").contains("stale.safetensors"),
        "{:?}",
        source.notes()
    );
    // A single-file model beside an index of others is two models.
    tiny.write_weights("model.safetensors", |_| true);
    assert_names(&open_error(&tiny), &["model.safetensors", "index"]);
    // Several files and no index: no telling.
    fs::remove_file(tiny.path().join("model.safetensors")).expect("removes");
    fs::remove_file(tiny.path().join("model.safetensors.index.json")).expect("removes");
    assert_names(&open_error(&tiny), &["3 .safetensors files", "index"]);
}

#[test]
fn a_tensor_of_a_shard_that_the_index_leaves_out_is_noted() {
    let mut tiny = Tiny::dense();
    tiny.write_sharded();
    let index = tiny.index();
    tiny.set("model.zone.weight", &[8]);
    tiny.write_sharded();
    tiny.write_index(&index);
    let notes = CheckpointSource::open(tiny.path()).expect("opens").notes().join("\n");
    assert!(notes.contains("model.zone.weight"), "{notes}");
}

#[test]
fn a_malformed_index_is_refused() {
    let tiny = Tiny::dense();
    tiny.write_sharded();
    for index in [
        json!([]),
        json!({}),
        json!({"weight_map": {}}),
        json!({"weight_map": {"model.norm.weight": 1}}),
        json!({"weight_map": {"model.norm.weight": "../model-1.safetensors"}}),
    ] {
        tiny.write_index(&index);
        let error = open_error(&tiny);
        assert!(matches!(error, CheckpointError::Index { .. }), "{error}");
        assert_names(&error, &["model.safetensors.index.json", "weight_map"]);
    }
}

#[test]
fn directories_without_a_model_say_what_is_missing() {
    let empty = tempfile::tempdir().expect("a directory");
    let error = CheckpointSource::open(empty.path()).err().expect("empty");
    assert_names(&error, &["config.json"]);
    fs::copy(data("demo_hf/config.json"), empty.path().join("config.json")).expect("copies");
    let error = CheckpointSource::open(empty.path()).err().expect("no weights");
    assert_names(&error, &["no .safetensors file"]);
    fs::write(empty.path().join("config.json"), "{").expect("writes");
    let error = CheckpointSource::open(empty.path()).err().expect("not JSON");
    assert_names(&error, &["config.json", "JSON"]);
}

#[test]
fn a_configuration_too_large_to_exist_is_refused_without_allocating() {
    let mut tiny = Tiny::dense();
    for field in [
        "hidden_size",
        "vocab_size",
        "intermediate_size",
        "num_attention_heads",
        "head_dim",
    ] {
        tiny.config[field] = json!(4_294_967_295_u64);
    }
    tiny.config["rope_parameters"]["partial_rotary_factor"] = json!(1.0 / 1_073_741_824.0);
    tiny.config["rope_parameters"]["mrope_section"] = json!([1, 1, 0]);
    tiny.write();
    let _ = open_error(&tiny);
}

#[test]
fn unknown_parameters_and_sizes_are_refused() {
    let tiny = Tiny::dense();
    let source = CheckpointSource::open(tiny.path()).expect("opens");
    assert_names(
        &source
            .load("text/layers/0/attention/query", &[8, 8])
            .expect_err("layer 0 is linear"),
        &["text/layers/0/attention/query"],
    );
    assert_names(
        &source.load("text/final_norm", &[9]).expect_err("8 elements"),
        &["text/final_norm", "[8]", "[9]"],
    );
}
