//! An artifact's text component held against the model's parameter list, fault by fault.

#[path = "artifact_support/mod.rs"]
mod artifact_support;
mod common;

use std::fs;
use std::path::{Path, PathBuf};

use artifact_support::SMALL_DIRECTORY;
use common::data;
use perplexity_model::bindings::ArtifactSource;
use perplexity_model::convert::{ConvertOptions, Recipe, convert};
use perplexity_model::signature::{prefill_signature, signature_text};
use perplexity_model::source::{self, ActivationPolicy, TextSource};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// First multiple of 4096 behind a directory of this length.
fn payload_start(json_bytes: usize) -> usize {
    (32 + json_bytes).next_multiple_of(4096)
}

/// Writes an entry file around `directory` and `payload`.
fn write_artifact(path: &Path, directory: &Value, payload: &[u8]) {
    let json = directory.to_string();
    let mut file = b"NINFER\x00\x03".to_vec();
    file.extend((json.len() as u64).to_le_bytes());
    file.extend([7; 16]);
    file.extend(json.as_bytes());
    file.resize(payload_start(json.len()), 0);
    file.extend(payload);
    fs::write(path, file).expect("writes");
}

/// An artifact that can be changed: the small example with every text format.
struct Small {
    folder: tempfile::TempDir,
    directory: Value,
    payload: Vec<u8>,
}

impl Small {
    fn new() -> Self {
        let mut payload = vec![0; 283_912];
        // The divisors of the two nvfp4 parents and of the two activations; everything else decodes to zeros.
        for end in [133_632 + 18_436, 152_320 + 9_220, 283_908, 283_912] {
            payload[end - 4..end].copy_from_slice(&1.0f32.to_le_bytes());
        }
        let directory = serde_json::from_str(SMALL_DIRECTORY).expect("JSON");
        Self {
            folder: tempfile::tempdir().expect("a folder"),
            directory,
            payload,
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("small.ninfer")
    }

    fn open(&self) -> Result<ArtifactSource, String> {
        write_artifact(&self.path(), &self.directory, &self.payload);
        ArtifactSource::open(&self.path()).map_err(|error| error.to_string())
    }

    fn object(&mut self, id: &str) -> &mut Value {
        let objects = self.directory["objects"].as_array_mut().expect("objects");
        objects.iter_mut().find(|object| object["id"] == id).expect(id)
    }

    fn use_of(&mut self, parameter: &str) -> &mut Value {
        let uses = self.directory["uses"].as_array_mut().expect("uses");
        uses.iter_mut()
            .find(|item| item["parameter"] == parameter)
            .expect(parameter)
    }
}

/// The message of opening the small artifact after `change`, which has to name all `words` and the file.
fn assert_refused(words: &[&str], change: impl FnOnce(&mut Small)) {
    let mut small = Small::new();
    change(&mut small);
    let error = small.open().err().expect("the change is a fault");
    for word in words.iter().chain(&["small.ninfer"]) {
        assert!(error.contains(word), "{error:?} does not name {word:?}");
    }
}

#[test]
fn the_small_example_opens_and_every_parameter_has_its_shape() {
    let source = Small::new().open().expect("opens");
    assert_eq!(source.name(), "toy-hybrid");
    assert_eq!(source.config().hidden_size, 128);
    for parameter in perplexity_model::parameters::parameters(source.config()) {
        let values = source.load(&parameter.name, &parameter.shape).expect(&parameter.name);
        assert_eq!(Some(values.len()), parameter.elements());
    }
    let error = source
        .load("text/final_norm", &[127])
        .expect_err("128 elements")
        .to_string();
    assert!(
        error.contains("text/final_norm") && error.contains("128") && error.contains("127"),
        "{error}"
    );
    let stored = source.stored("text/layers/0/mlp/up").expect("stored");
    assert_eq!(stored.policy, Some(ActivationPolicy::AllowA4));
    assert!(stored.activation_divisor.is_some());
    assert_eq!(
        (stored.parts[0].format, stored.parts[0].range),
        ("nvfp4", Some((16_384, 32_768)))
    );
}

#[test]
fn a_missing_binding_is_named() {
    assert_refused(&["text/layers/1/attention/key"], |small| {
        let bindings = small.directory["bindings"].as_object_mut().expect("bindings");
        bindings.shift_remove("text/layers/1/attention/key");
        let uses = small.directory["uses"].as_array_mut().expect("uses");
        uses.retain(|item| item["parameter"] != "text/layers/1/attention/key");
    });
}

#[test]
fn another_number_of_elements_or_another_rank_is_refused() {
    assert_refused(&["text/layers/0/gdn/query", "8191"], |small| {
        small.directory["bindings"]["text/layers/0/gdn/query"]["parts"][0]["range"] = json!([0, 8191]);
    });
    // The whole form needs the same rank too.
    assert_refused(&["text/final_norm", "[1, 128]"], |small| {
        small.object("fnorm")["shape"] = json!([1, 128])
    });
}

#[test]
fn norms_and_decays_have_to_be_of_their_format() {
    assert_refused(&["text/final_norm", "bf16", "fp32"], |small| {
        let object = small.object("fnorm");
        object["format"] = json!("fp32");
        object["bytes"] = json!(512);
        // 256 more bytes behind it: move everything that follows.
        for id in ["head", "div"] {
            let offset = small.object(id)["offset"].as_u64().expect("an offset");
            small.object(id)["offset"] = json!(offset + 256);
        }
        small.payload.splice(251_904..251_904, [0; 256]);
        small.directory["files"][0]["payload_bytes"] = json!(283_912 + 256);
    });
}

#[test]
fn a_projection_without_use_or_policy_is_refused() {
    assert_refused(&["text/layers/0/gdn/z", "text/layers/0/mixer_input"], |small| {
        let uses = small.directory["uses"].as_array_mut().expect("uses");
        uses.retain(|item| item["parameter"] != "text/layers/0/gdn/z");
    });
    assert_refused(&["text/output_head", "text/final_hidden"], |small| {
        small.use_of("text/output_head")["input"] = json!("mtp/final_hidden");
    });
    assert_refused(&["text/layers/1/mlp/down", "policy"], |small| {
        small
            .use_of("text/layers/1/mlp/down")
            .as_object_mut()
            .expect("a Use")
            .shift_remove("activation_policy");
    });
}

#[test]
fn unknown_auxiliaries_and_unfit_divisors_are_refused() {
    assert_refused(&["text/layers/1/mlp/down", "hadamard_signs"], |small| {
        small.use_of("text/layers/1/mlp/down")["auxiliaries"] = json!({"hadamard_signs": {"object": "fnorm"}});
    });
    for bits in [0.0f32, -1.0, f32::INFINITY, f32::NAN] {
        assert_refused(&["text/layers/0/mlp/gate", "text/layers/0/ffn_input"], |small| {
            small.payload[283_904..283_908].copy_from_slice(&bits.to_le_bytes());
        });
    }
    assert_refused(&["text/layers/0/mlp/down"], |small| {
        small.use_of("text/layers/0/mlp/down")["auxiliaries"]["activation_input_divisor"] = json!({"object": "div"});
    });
}

#[test]
fn a_missing_resource_names_component_and_role() {
    for role in [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ] {
        assert_refused(&["text", role], |small| {
            let resources = small.directory["components"]["text"]["resources"]
                .as_object_mut()
                .expect("resources");
            resources.shift_remove(role);
        });
    }
}

#[test]
fn a_faulty_configuration_is_reported_as_one() {
    assert_refused(&["configuration", "sliding_window"], |small| {
        small.directory["components"]["text"]["config"]["sliding_window"] = json!(4096);
    });
    assert_refused(&["Qwen4ExpForCausalLM"], |small| {
        small.directory["components"]["text"]["config"]["architectures"] = json!(["Qwen4ExpForCausalLM"]);
    });
}

#[test]
fn extra_components_and_objects_of_unknown_kinds_of_storage_are_not_looked_at() {
    let mut small = Small::new();
    small.directory["components"]["vision"] = json!({"config": {"depth": 27}, "target": "text"});
    small.payload.extend([0; 8]);
    small.directory["files"][0]["payload_bytes"] = json!(283_920);
    let extra = json!({
        "id": "later", "kind": "tensor", "shape": [4], "format": "q3_from_the_future", "layout": "folded_v9",
        "offset": 283_912, "bytes": 8
    });
    small.directory["objects"].as_array_mut().expect("objects").push(extra);
    let source = small.open().expect("opens");
    assert_eq!(source.notes(), ["components not loaded: vision"]);
    // Once a parameter needs it, it is an error that names it.
    assert_refused(&["later", "q3_from_the_future"], |small| {
        small.directory["objects"].as_array_mut().expect("objects").push(json!({
            "id": "later", "kind": "tensor", "shape": [128], "format": "q3_from_the_future", "layout": "folded_v9",
            "offset": 283_912, "bytes": 8
        }));
        small.payload.extend([0; 8]);
        small.directory["files"][0]["payload_bytes"] = json!(283_920);
        small.directory["bindings"]["text/final_norm"] = json!({"object": "later"});
    });
}

#[test]
fn newer_versions_and_sections_past_the_end_are_clear_errors() {
    let small = Small::new();
    small.open().expect("opens");
    let mut file = fs::read(small.path()).expect("reads");
    file[7] = 4;
    fs::write(small.path(), &file).expect("writes");
    let error = source::open(&small.path()).err().expect("version 4").to_string();
    assert!(error.contains("small.ninfer") && error.contains("v3"), "{error}");

    assert_refused(&["div"], |small| small.object("div")["offset"] = json!(1_u64 << 40));
    let error = source::open(&small.folder.path().join("absent.ninfer"))
        .err()
        .expect("absent")
        .to_string();
    assert!(error.contains("absent.ninfer"), "{error}");
}

#[test]
fn the_prefill_signature_of_the_small_example_is_the_published_one() {
    let source = Small::new().open().expect("opens");
    let text = signature_text(&source, 300).expect("a signature");
    let start = concat!(
        r#"{"architecture":"Qwen3_5ForCausalLM","attention":[2,1,64],"ffn":[128],"gdn":[1,64,2,64,4],"#,
        r#""hidden_size":128,"implementation":"qwen3_5-prefill-1","layer_types":[1,0],"#
    );
    assert!(text.starts_with(start), "{text}");
    assert_eq!(text.len(), 4238, "{text}");
    let signature = "2ccd85e97b57f8a4f2c0cc2ea06d66541143ff31670e3fb0b565d2aa5feed917";
    assert_eq!(prefill_signature(&source, 300).expect("a signature"), signature);
    assert_ne!(prefill_signature(&source, 301).expect("a signature"), signature);
}

#[test]
fn signatures_ignore_values_and_names_but_not_formats() {
    let folder = tempfile::tempdir().expect("a folder");
    let signature = |name: &str, recipe: &str| {
        let out = folder.path().join(name);
        let mut options = ConvertOptions::new(Recipe::named(recipe).expect("a recipe"));
        options.name = Some(name.into());
        convert(&data("fixtures/dense"), &out, &options, &mut |_| ()).expect("converts");
        prefill_signature(source::open(&out).expect("opens").as_ref(), 507).expect("a signature")
    };
    let first = signature("a", "q8");
    assert_eq!(signature("b", "q8"), first);
    assert_ne!(signature("c", "q6"), first);
    assert_eq!(signature("d", "nvfp4"), signature("e", "nvfp4_mse"));
    let checkpoint = source::open(&data("fixtures/dense")).expect("opens");
    assert_eq!(
        prefill_signature(checkpoint.as_ref(), 507).expect("a signature").len(),
        64
    );
    let text = signature_text(checkpoint.as_ref(), 507).expect("a signature");
    assert!(serde_json::from_str::<Value>(&text).is_ok());
    assert_eq!(
        format!("{:x}", Sha256::digest(&text)),
        prefill_signature(checkpoint.as_ref(), 507).expect("a signature")
    );
}
