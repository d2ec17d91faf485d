//! Quantised checkpoints of `scripts/make_quantised_checkpoints.py`: values against the script's, declarations against the
//! tensors, every fault in words.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use common::data;
use perplexity_model::checkpoint::{CheckpointError, CheckpointSource};
use perplexity_model::parameters::parameters;
use perplexity_model::source::{TextSource, open};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

const CHECKPOINTS: [&str; 4] = ["fp8_block", "fp8_row", "nvfp4_modelopt", "nvfp4_compressed"];

fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

fn path_of(checkpoint: &str) -> PathBuf {
    data("quantised").join(checkpoint)
}

fn golden(checkpoint: &str) -> Value {
    let text = fs::read(path_of(checkpoint).join("golden.json")).expect("reads");
    serde_json::from_slice(&text).expect("JSON")
}

/// A copy of a checkpoint whose tensors and declaration can be changed.
struct Copy {
    directory: tempfile::TempDir,
    config: Value,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Copy {
    fn of(checkpoint: &str) -> Self {
        Self::of_path(&path_of(checkpoint))
    }

    fn of_path(path: &Path) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        for entry in fs::read_dir(path).expect("lists") {
            let entry = entry.expect("an entry");
            fs::copy(entry.path(), directory.path().join(entry.file_name())).expect("copies");
        }
        let read = |name: &str| fs::read(directory.path().join(name)).expect("reads");
        let bytes = read("model.safetensors");
        let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
        let tensors = tensors
            .iter()
            .map(|(name, view)| {
                (
                    name.to_owned(),
                    (view.dtype(), view.shape().to_vec(), view.data().to_vec()),
                )
            })
            .collect();
        let config = serde_json::from_slice(&read("config.json")).expect("JSON");
        Self {
            directory,
            config,
            tensors,
        }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn tensor(&mut self, name: &str) -> &mut (Dtype, Vec<usize>, Vec<u8>) {
        self.tensors.get_mut(name).expect(name)
    }

    /// Replaces element 0 of an f32 tensor.
    fn set_f32(&mut self, name: &str, value: f32) {
        let (dtype, _, bytes) = self.tensor(name);
        assert_eq!(*dtype, Dtype::F32, "{name}");
        bytes[..4].copy_from_slice(&value.to_le_bytes());
    }

    /// Turns a quantised weight into bf16 zeros without scales.
    fn make_plain(&mut self, module: &str, shape: &[usize]) {
        self.tensors.retain(|name, _| !name.starts_with(&format!("{module}.")));
        let bytes = vec![0; 2 * shape.iter().product::<usize>()];
        let weight = (Dtype::BF16, shape.to_vec(), bytes);
        self.tensors.insert(format!("{module}.weight"), weight);
    }

    fn quantization(&mut self) -> &mut Value {
        &mut self.config["quantization_config"]
    }

    fn open(&self) -> Result<CheckpointSource, CheckpointError> {
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            let view = TensorView::new(*dtype, shape.clone(), bytes).expect("a valid view");
            (name.as_str(), view)
        });
        let bytes = safetensors::serialize(views, None).expect("serialises");
        fs::write(self.path().join("model.safetensors"), bytes).expect("writes");
        self.open_with_config(&self.config)
    }

    /// Opens with another configuration and the tensors as they were written last.
    fn open_with_config(&self, config: &Value) -> Result<CheckpointSource, CheckpointError> {
        fs::write(self.path().join("config.json"), config.to_string()).expect("writes");
        CheckpointSource::open(self.path())
    }

    /// The message of opening, which has to name all `words`.
    fn refused(&self, words: &[&str]) -> CheckpointError {
        let error = self.open().err().expect("is refused");
        for word in words {
            assert!(error.to_string().contains(word), "{error} does not name {word:?}");
        }
        error
    }
}

fn load(source: &dyn TextSource, name: &str) -> Vec<f32> {
    let parameter = parameters(source.config()).find(|parameter| parameter.name == name);
    source.load(name, &parameter.expect(name).shape).expect(name)
}

#[test]
fn values_permissions_and_divisors_are_those_of_the_script() {
    let plain = open(&data("fixtures/dense")).expect("opens");
    for checkpoint in CHECKPOINTS {
        let source = open(&path_of(checkpoint)).expect(checkpoint);
        let golden = golden(checkpoint);
        let mut quantised = 0;
        for parameter in parameters(source.config()) {
            let name = &parameter.name;
            let values = source.load(name, &parameter.shape).expect(name);
            let stored = source.stored(name).expect(name);
            let Some(expected) = golden.get(name) else {
                assert_eq!(
                    values,
                    plain.load(name, &parameter.shape).expect(name),
                    "{checkpoint} {name}"
                );
                assert_eq!(stored.parts[0].format, "bf16", "{checkpoint} {name}");
                continue;
            };
            quantised += 1;
            assert_eq!(expected["shape"], json!(parameter.shape), "{checkpoint} {name}");
            for sample in expected["samples"].as_array().expect("samples") {
                let at = sample[0].as_u64().expect("an index") as usize;
                let value = sample[1].as_f64().expect("a value") as f32;
                assert_eq!(values[at], value, "{checkpoint} {name} element {at}");
            }
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert_eq!(expected["values_sha256"], sha256(&bytes), "{checkpoint} {name}");
            let policy = stored.policy.expect("a projection").name();
            assert_eq!(expected["policy"], policy, "{checkpoint} {name}");
            let divisor = expected["activation_divisor"].as_f64().map(|divisor| divisor as f32);
            assert_eq!(stored.activation_divisor, divisor, "{checkpoint} {name}");
            assert_ne!(stored.parts[0].format, "bf16");
        }
        assert_eq!(quantised, golden.as_object().expect("an object").len(), "{checkpoint}");
    }
}

#[test]
fn reading_piece_by_piece_gives_the_whole() {
    for checkpoint in CHECKPOINTS {
        let source = CheckpointSource::open(&path_of(checkpoint)).expect(checkpoint);
        for name in golden(checkpoint).as_object().expect("an object").keys() {
            let whole = load(&source, name);
            for piece in [1021, 77] {
                let pieces = (0..whole.len()).step_by(piece).flat_map(|begin| {
                    let end = whole.len().min(begin + piece);
                    source.load_range(name, begin..end).expect(name)
                });
                assert!(pieces.eq(whole.iter().copied()), "{checkpoint} {name} by {piece}");
            }
        }
    }
}

#[test]
fn formats_and_bytes_count_scales() {
    let stored = |checkpoint: &str, name: &str| {
        let source = open(&path_of(checkpoint)).expect("opens");
        let stored = source.stored(name).expect(name);
        (stored.parts[0].format, stored.parts[0].bytes)
    };
    // Codes, and scales of: 2x1 tiles of f32; 2x1 tiles of bf16; 256 rows of f32; one tensor; 4.5 bits and an f32.
    for (checkpoint, name, format, bytes) in [
        (
            "fp8_block",
            "text/layers/0/mlp/gate",
            "fp8_e4m3fn_block128_f32",
            256 * 128 + 8,
        ),
        (
            "fp8_block",
            "text/layers/2/mlp/gate",
            "fp8_e4m3fn_block128_bf16",
            256 * 128 + 4,
        ),
        (
            "fp8_row",
            "text/layers/0/mlp/gate",
            "fp8_e4m3fn_row_f32",
            256 * 128 + 1024,
        ),
        (
            "fp8_row",
            "text/layers/2/mlp/gate",
            "fp8_e4m3fn_row_bf16",
            256 * 128 + 512,
        ),
        ("fp8_row", "text/layers/0/mlp/down", "fp8_e4m3fn_tensor", 256 * 128 + 4),
        ("nvfp4_modelopt", "text/layers/0/mlp/gate", "nvfp4_mul", 256 * 72 + 4),
        ("nvfp4_compressed", "text/layers/0/mlp/gate", "nvfp4", 256 * 72 + 4),
        // Half of q_proj.
        (
            "fp8_row",
            "text/layers/3/attention/query",
            "fp8_e4m3fn_row_bf16",
            512 * 130,
        ),
    ] {
        assert_eq!(stored(checkpoint, name), (format, bytes), "{checkpoint} {name}");
    }
}

#[test]
fn scales_of_one_and_an_eighth_differ() {
    // A reader that takes an absent or ignored scale to be 1 would find the same values.
    for (checkpoint, scale, parameter) in [
        (
            "fp8_block",
            "model.layers.0.mlp.gate_proj.weight_scale_inv",
            "text/layers/0/mlp/gate",
        ),
        (
            "fp8_row",
            "model.layers.0.mlp.gate_proj.weight_scale",
            "text/layers/0/mlp/gate",
        ),
        (
            "fp8_row",
            "model.layers.0.mlp.down_proj.weight_scale",
            "text/layers/0/mlp/down",
        ),
        (
            "nvfp4_modelopt",
            "model.layers.0.mlp.gate_proj.weight_scale_2",
            "text/layers/0/mlp/gate",
        ),
        (
            "nvfp4_compressed",
            "model.layers.0.mlp.gate_proj.weight_global_scale",
            "text/layers/0/mlp/gate",
        ),
    ] {
        let with = |value: f32| {
            let mut copy = Copy::of(checkpoint);
            for word in copy.tensor(scale).2.chunks_exact_mut(4) {
                word.copy_from_slice(&value.to_le_bytes());
            }
            load(&copy.open().expect("opens"), parameter)
        };
        let (one, eighth) = (with(1.0), with(0.125));
        let factor = if scale.ends_with("global_scale") { 8.0 } else { 0.125 };
        assert!(one.iter().any(|value| *value != 0.0));
        assert!(
            one.iter().zip(&eighth).all(|(one, eighth)| one * factor == *eighth),
            "{scale}"
        );
    }
}

#[test]
fn a_missing_scale_is_refused_by_name() {
    for (checkpoint, scale) in [
        ("fp8_block", "model.layers.1.mlp.up_proj.weight_scale_inv"),
        ("fp8_row", "model.layers.1.mlp.up_proj.weight_scale"),
        ("nvfp4_modelopt", "lm_head.weight_scale"),
        ("nvfp4_modelopt", "lm_head.weight_scale_2"),
        ("nvfp4_modelopt", "model.layers.3.self_attn.o_proj.weight_scale"),
        ("nvfp4_compressed", "model.layers.1.mlp.up_proj.weight_scale"),
        ("nvfp4_compressed", "model.layers.1.mlp.up_proj.weight_global_scale"),
        ("nvfp4_compressed", "model.layers.1.mlp.up_proj.input_global_scale"),
    ] {
        let mut copy = Copy::of(checkpoint);
        copy.tensors.remove(scale).expect(scale);
        // The message names either FP8 spelling by the plainer one.
        let error = copy.refused(&[scale.strip_suffix("_inv").unwrap_or(scale)]);
        assert!(matches!(error, CheckpointError::MissingScale { .. }), "{error}");
    }
}

#[test]
fn without_an_input_scale_modelopt_weights_permit_sixteen_bits_only() {
    let mut copy = Copy::of("nvfp4_modelopt");
    copy.tensors
        .remove("model.layers.1.mlp.up_proj.input_scale")
        .expect("there");
    let source = copy.open().expect("opens");
    let stored = |name: &str| {
        let stored = source.stored(name).expect(name);
        (stored.policy.expect("a projection").name(), stored.activation_divisor)
    };
    assert_eq!(stored("text/layers/1/mlp/up"), ("A16Only", None));
    assert_eq!(stored("text/layers/1/mlp/gate").0, "AllowA4");
    let notes = source.notes().join("\n");
    assert!(notes.contains("1 NVFP4 weights have no input scale"), "{notes}");
}

#[test]
fn weight_only_quantisation_permits_sixteen_bits_only() {
    let mut copy = Copy::of("nvfp4_compressed");
    let groups = &mut copy.quantization()["config_groups"];
    groups["group_0"]["input_activations"] = Value::Null;
    groups["group_1"]["input_activations"] = Value::Null;
    // The input scales are then nobody's.
    copy.refused(&["input_global_scale"]);
    copy.tensors.retain(|name, _| !name.ends_with("input_global_scale"));
    let source = copy.open().expect("opens");
    for parameter in parameters(source.config()).filter(|parameter| parameter.input.is_some()) {
        let stored = source.stored(&parameter.name).expect("stored");
        let permission = stored.policy.map(|policy| policy.name());
        assert_eq!(
            (permission, stored.activation_divisor),
            (Some("A16Only"), None),
            "{}",
            parameter.name
        );
    }
}

#[test]
fn poisoned_scales_are_refused_with_their_value() {
    let row = "model.layers.0.mlp.gate_proj.weight_scale";
    let block = "model.layers.0.mlp.gate_proj.weight_scale_inv";
    let multiplier = "model.layers.0.mlp.gate_proj.weight_scale_2";
    let divisor = "model.layers.0.mlp.gate_proj.weight_global_scale";
    let input = "model.layers.0.mlp.gate_proj.input_scale";
    for (checkpoint, scale, values) in [
        ("fp8_row", row, &[f32::NAN, f32::INFINITY, -1.0][..]),
        ("fp8_block", block, &[f32::NAN, f32::INFINITY, -1.0]),
        // 1e-39 is a subnormal whose reciprocal overflows.
        (
            "nvfp4_modelopt",
            multiplier,
            &[f32::NAN, f32::INFINITY, -1.0, 0.0, 1e-39],
        ),
        ("nvfp4_modelopt", input, &[f32::NAN, f32::INFINITY, -1.0, 0.0]),
        ("nvfp4_compressed", divisor, &[f32::NAN, f32::INFINITY, -1.0, 0.0]),
    ] {
        for value in values {
            let mut copy = Copy::of(checkpoint);
            copy.set_f32(scale, *value);
            let error = copy.refused(&[scale, &value.to_string(), "model.safetensors"]);
            assert!(matches!(error, CheckpointError::Scale { element: 0, .. }), "{error}");
        }
    }
}

#[test]
fn words_that_are_no_numbers_are_refused_on_loading() {
    for (checkpoint, tensor, parameter) in [
        (
            "fp8_block",
            "model.layers.3.self_attn.q_proj.weight",
            "text/layers/3/attention/query",
        ),
        (
            "fp8_row",
            "model.layers.3.self_attn.q_proj.weight",
            "text/layers/3/attention/query",
        ),
        (
            "nvfp4_compressed",
            "model.layers.0.mlp.gate_proj.weight_scale",
            "text/layers/0/mlp/gate",
        ),
    ] {
        let mut copy = Copy::of(checkpoint);
        copy.tensor(tensor).2[3] = 0x7F;
        let source = copy.open().expect("opens");
        let shape = parameters(source.config())
            .find(|candidate| candidate.name == parameter)
            .expect("there")
            .shape;
        let error = source.load(parameter, &shape).expect_err("NaN").to_string();
        assert!(error.contains("0x7f") && error.contains("_proj.weight"), "{error}");
    }
}

#[test]
fn scales_of_other_shapes_and_types_are_named() {
    for (checkpoint, tensor, words) in [
        (
            "fp8_block",
            "model.layers.0.mlp.gate_proj.weight_scale_inv",
            ["[1, 2]", "[2, 1]"],
        ),
        (
            "fp8_row",
            "model.layers.0.mlp.gate_proj.weight_scale",
            ["[1, 256]", "[256, 1]"],
        ),
        (
            "nvfp4_compressed",
            "model.layers.0.mlp.gate_proj.weight_scale",
            ["[8, 256]", "[256, 8]"],
        ),
        (
            "nvfp4_modelopt",
            "model.layers.0.mlp.gate_proj.weight",
            ["[64, 256]", "[256, 64]"],
        ),
    ] {
        let mut copy = Copy::of(checkpoint);
        copy.tensor(tensor).1.reverse();
        let error = copy.refused(&[tensor, words[0], words[1]]);
        assert!(matches!(error, CheckpointError::Shape { .. }), "{error}");
    }
    let mut copy = Copy::of("nvfp4_modelopt");
    copy.tensor("lm_head.weight_scale").0 = Dtype::U8;
    copy.refused(&["lm_head.weight_scale", "U8", "F8_E4M3"]);
    let mut copy = Copy::of("nvfp4_modelopt");
    copy.tensor("lm_head.weight_scale_2").0 = Dtype::I32;
    copy.refused(&["lm_head.weight_scale_2", "I32", "F32"]);
}

#[test]
fn what_is_declared_unquantised_must_not_be_quantised() {
    type Change = fn(&mut Copy);
    let ignore: [(&str, Change); 3] = [
        ("fp8_block", |copy| {
            copy.quantization()["modules_to_not_convert"]
                .as_array_mut()
                .expect("a list")
                .push("self_attn.o_proj".into());
        }),
        ("fp8_row", |copy| {
            copy.quantization()["ignore"]
                .as_array_mut()
                .expect("a list")
                .push("re:.*self_attn.o".into());
        }),
        ("nvfp4_modelopt", |copy| {
            copy.quantization().take();
            edit_modelopt(copy, |quantization| {
                quantization["exclude_modules"] = json!(["model.layers.*.self_attn", "*in_proj_a", "*_proj_b"]);
            });
        }),
    ];
    for (checkpoint, change) in ignore {
        let mut copy = Copy::of(checkpoint);
        change(&mut copy);
        let error = copy.refused(&["model.layers.3.self_attn", "declares it unquantised", "json"]);
        assert!(matches!(error, CheckpointError::NotDeclared { .. }), "{error}");
    }
    // No declaration at all.
    for checkpoint in CHECKPOINTS {
        let mut copy = Copy::of(checkpoint);
        copy.quantization().take();
        let _ = fs::remove_file(copy.path().join("hf_quant_config.json"));
        let error = copy.refused(&["neither config.json nor hf_quant_config.json"]);
        assert!(matches!(error, CheckpointError::NotDeclared { .. }), "{error}");
    }
}

fn edit_modelopt(copy: &Copy, change: impl FnOnce(&mut Value)) {
    let path = copy.path().join("hf_quant_config.json");
    let mut file: Value = serde_json::from_slice(&fs::read(&path).expect("reads")).expect("JSON");
    change(&mut file["quantization"]);
    fs::write(path, file.to_string()).expect("writes");
}

#[test]
fn what_is_declared_quantised_must_be_so() {
    for (checkpoint, module, shape, words) in [
        ("fp8_block", "model.layers.0.mlp.gate_proj", [256, 128], "128x128 block"),
        (
            "fp8_row",
            "model.layers.0.mlp.gate_proj",
            [256, 128],
            "per row or tensor",
        ),
        ("nvfp4_modelopt", "lm_head", [512, 128], "NVFP4 in `weight`"),
        (
            "nvfp4_compressed",
            "model.layers.0.mlp.gate_proj",
            [256, 128],
            "NVFP4 in `weight_packed`",
        ),
    ] {
        let mut copy = Copy::of(checkpoint);
        copy.make_plain(module, &shape);
        let error = copy.refused(&[module, "BF16", words, "json"]);
        assert!(matches!(error, CheckpointError::NotAsDeclared { .. }), "{error}");
    }
    // Codes where the other NVFP4 layout has them.
    let mut copy = Copy::of("nvfp4_compressed");
    let codes = copy
        .tensors
        .remove("model.layers.0.mlp.gate_proj.weight_packed")
        .expect("codes");
    copy.tensors.insert("model.layers.0.mlp.gate_proj.weight".into(), codes);
    copy.refused(&["model.layers.0.mlp.gate_proj.weight", "U8", "`weight_packed`"]);
}

#[test]
fn modules_may_be_declared_under_other_prefixes() {
    for prefix in ["model.language_model.", "language_model.model."] {
        let mut copy = Copy::of("nvfp4_modelopt");
        copy.quantization().take();
        edit_modelopt(&copy, |quantization| {
            let text = quantization
                .to_string()
                .replace("model.layers", &format!("{prefix}layers"));
            *quantization = serde_json::from_str(&text).expect("JSON");
        });
        copy.open().expect(prefix);
    }
}

#[test]
fn fp8_without_a_list_leaves_the_head_alone() {
    let mut copy = Copy::of("fp8_block");
    let list = copy.quantization()["modules_to_not_convert"].take();
    // Without the list the small projections would be quantised too.
    copy.refused(&["in_proj_a", "BF16"]);
    copy.quantization()["ignored_layers"] = json!(["in_proj_a", "in_proj_b"]);
    copy.refused(&["lm_head", "BF16"]);
    copy.quantization()["ignored_layers"] = list;
    copy.open().expect("the other name of the list");
}

#[test]
fn declarations_that_cannot_be_read_name_the_member() {
    let group = "config_groups.group_0";
    let cases: [(&str, &[&str], Value, &[&str]); 13] = [
        (
            "fp8_block",
            &["quant_method"],
            json!("gptq"),
            &["quant_method", "gptq", "compressed-tensors"],
        ),
        (
            "fp8_block",
            &["weight_block_size"],
            json!([64, 128]),
            &["weight_block_size", "[64,128]", "[128, 128]"],
        ),
        ("fp8_block", &["fmt"], json!("e5m2"), &["fmt", "e5m2", "e4m3"]),
        (
            "fp8_block",
            &["activation_scheme"],
            json!("none"),
            &["activation_scheme", "dynamic or static"],
        ),
        (
            "fp8_block",
            &["modules_to_not_convert"],
            json!("lm_head"),
            &["modules_to_not_convert", "a list"],
        ),
        (
            "fp8_row",
            &["ignore"],
            json!(["re:(("]),
            &["ignore", "re:((", "pattern"],
        ),
        (
            "fp8_row",
            &["config_groups"],
            Value::Null,
            &["config_groups", "an object"],
        ),
        (
            "fp8_row",
            &["transform_config"],
            json!({"R1": {}}),
            &["transform_config", "no transforms"],
        ),
        (
            "fp8_row",
            &["sparsity_config"],
            json!({"format": "sparse-24"}),
            &["sparsity_config.format", "dense"],
        ),
        (
            "fp8_row",
            &["config_groups", "group_0", "weights", "num_bits"],
            json!(4),
            &[group, "weights", "8-bit floats"],
        ),
        (
            "fp8_row",
            &["config_groups", "group_0", "weights", "type"],
            json!("int"),
            &[group, "weights", "int"],
        ),
        (
            "fp8_row",
            &["config_groups", "group_0", "weights", "symmetric"],
            json!(false),
            &[group, "symmetric", "true"],
        ),
        (
            "fp8_row",
            &["config_groups", "group_0", "input_activations", "type"],
            json!("int"),
            &[group, "input_activations"],
        ),
    ];
    for (checkpoint, place, value, words) in cases {
        let mut copy = Copy::of(checkpoint);
        let member = place
            .iter()
            .fold(copy.quantization(), |holder, member| &mut holder[*member]);
        *member = value;
        let error = copy.refused(words);
        assert!(matches!(error, CheckpointError::Declaration { .. }), "{error}");
        assert!(error.to_string().contains("config.json"), "{error}");
    }
    for (algorithm, words) in [
        (json!("W4A16_AWQ"), ["W4A16_AWQ", "quantized_layers.lm_head.quant_algo"]),
        (Value::Null, ["null", "quantized_layers.lm_head.quant_algo"]),
    ] {
        let mut copy = Copy::of("nvfp4_modelopt");
        copy.quantization().take();
        edit_modelopt(&copy, |quantization| {
            quantization["quantized_layers"]["lm_head"]["quant_algo"] = algorithm
        });
        copy.refused(&words);
    }
    let mut copy = Copy::of("nvfp4_modelopt");
    copy.quantization().take();
    fs::write(copy.path().join("hf_quant_config.json"), "{").expect("writes");
    copy.refused(&["hf_quant_config.json", "JSON"]);
}

#[test]
fn notes_tell_formats_scales_and_what_is_not_used() {
    let notes = |checkpoint: &str| {
        CheckpointSource::open(&path_of(checkpoint))
            .expect("opens")
            .notes()
            .join("\n")
    };
    let row = notes("fp8_row");
    for words in [
        "2 scales of a quantised KV cache are not used",
        "fixed input scales of 4 FP8 weights are not used",
        "4 weights are stored as fp8_e4m3fn_tensor",
        "as config.json declares",
    ] {
        assert!(row.contains(words), "{row}");
    }
    let modelopt = notes("nvfp4_modelopt");
    assert!(modelopt.contains("as hf_quant_config.json declares"), "{modelopt}");
    assert!(modelopt.contains("2 scales of a quantised KV cache"), "{modelopt}");
}

#[test]
fn a_scale_that_belongs_to_nothing_is_not_ignored() {
    for extra in [
        "model.layers.0.mlp.gate_proj.pre_quant_scale",
        "model.layers.0.mlp.gate_proj.weight_zero_point",
        "model.layers.0.input_layernorm.weight_scale",
    ] {
        let mut copy = Copy::of("fp8_row");
        copy.tensors.insert(extra.into(), (Dtype::F32, vec![1], vec![0; 4]));
        let error = copy.refused(&[extra]);
        assert!(matches!(error, CheckpointError::UnusedTensor { .. }), "{error}");
    }
}

/// FP8 ones of this shape.
fn ones(shape: &[usize]) -> (Dtype, Vec<usize>, Vec<u8>) {
    (Dtype::F8_E4M3, shape.to_vec(), vec![0x38; shape.iter().product()])
}

fn scale(values: &[f32], shape: &[usize]) -> (Dtype, Vec<usize>, Vec<u8>) {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    (Dtype::F32, shape.to_vec(), bytes)
}

#[test]
fn experts_have_their_own_scales_one_by_one_and_as_a_bank() {
    const MODULES: [(&str, [usize; 2]); 3] = [("gate", [4, 8]), ("up", [4, 8]), ("down", [8, 4])];
    let value = |expert: usize, module: usize| (1 + 3 * expert + module) as f32;
    let mut separate = Copy::of_path(common::Tiny::moe().path());
    separate.config["quantization_config"] = json!({
        "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "self_attn", "linear_attn", "shared_expert", "shared_expert_gate"]
    });
    // Names match whole components: `self_attn` alone is neither the beginning nor the end of a projection's name.
    separate.refused(&["linear_attn.in_proj_qkv", "BF16"]);
    let kept: Vec<String> = ["q", "k", "v", "o"]
        .map(|name| format!("{name}_proj"))
        .into_iter()
        .chain(
            [
                "in_proj_qkv",
                "in_proj_z",
                "in_proj_a",
                "in_proj_b",
                "out_proj",
                "lm_head",
            ]
            .map(Into::into),
        )
        .chain(["gate", "up", "down"].map(|name| format!("shared_expert.{name}_proj")))
        .chain(["shared_expert_gate".to_owned()])
        .collect();
    separate.quantization()["modules_to_not_convert"] = json!(kept);
    let mut bank = Copy::of_path(common::Tiny::moe().path());
    bank.config = separate.config.clone();
    bank.tensors.retain(|name, _| !name.contains(".experts."));
    for layer in 0..2 {
        let prefix = format!("model.layers.{layer}.mlp.experts");
        for expert in 0..3 {
            for (module, (name, shape)) in MODULES.iter().enumerate() {
                let weight = format!("{prefix}.{expert}.{name}_proj.weight");
                let own = scale(&[value(expert, module)], &[1, 1]);
                separate.tensors.insert(format!("{weight}_scale_inv"), own);
                separate.tensors.insert(weight, ones(shape));
            }
        }
        let scales = |module: usize| (0..3).map(move |expert| value(expert, module)).collect::<Vec<_>>();
        for (name, shape, module) in [("gate_up_proj", [3, 8, 8], 0), ("down_proj", [3, 8, 4], 2)] {
            bank.tensors.insert(format!("{prefix}.{name}"), ones(&shape));
            let scales = scale(&scales(module), &[3, 1, 1]);
            bank.tensors.insert(format!("{prefix}.{name}_scale_inv"), scales);
        }
    }
    let (separate, bank) = (separate.open().expect("opens"), bank.open().expect("opens"));
    for expert in 0..3 {
        for (module, (name, _)) in MODULES.iter().enumerate() {
            let parameter = format!("text/layers/1/moe/experts/{expert}/{name}");
            assert_eq!(load(&separate, &parameter), [value(expert, module); 32], "{parameter}");
            // Gate and up of a bank lie in one tile here.
            let shared = value(expert, if *name == "up" { 0 } else { module });
            assert_eq!(load(&bank, &parameter), [shared; 32], "{parameter}");
        }
    }
}

#[test]
fn compressed_blocks_have_their_scales_in_weight_scale() {
    let mut copy = Copy::of("fp8_block");
    let weights = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]});
    *copy.quantization() = json!({
        "quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*in_proj_[ab]$"]
    });
    copy.tensors = std::mem::take(&mut copy.tensors)
        .into_iter()
        .map(|(name, tensor)| (name.replace("weight_scale_inv", "weight_scale"), tensor))
        .collect();
    let (block, compressed) = (CheckpointSource::open(&path_of("fp8_block")), copy.open());
    let (block, compressed) = (block.expect("opens"), compressed.expect("opens"));
    for name in golden("fp8_block").as_object().expect("an object").keys() {
        assert_eq!(load(&block, name), load(&compressed, name), "{name}");
    }
    copy.quantization()["config_groups"]["group_0"]["weights"]["block_structure"] = json!([128, 64]);
    copy.refused(&["config_groups.group_0.weights.block_structure", "[128,64]"]);
}

/// Every place inside `value`, as JSON pointers.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    let inner: Vec<(String, &Value)> = match value {
        Value::Object(members) => members.iter().map(|(name, value)| (name.clone(), value)).collect(),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .map(|(number, item)| (number.to_string(), item))
            .collect(),
        _ => Vec::new(),
    };
    for (name, value) in inner {
        places(
            value,
            &format!("{at}/{}", name.replace('~', "~0").replace('/', "~1")),
            found,
        );
    }
}

#[test]
fn a_declaration_damaged_anywhere_is_refused_or_means_the_same() {
    for checkpoint in CHECKPOINTS {
        let mut copy = Copy::of(checkpoint);
        if checkpoint == "nvfp4_modelopt" {
            // The same members, in the place that the newer exporter gives them.
            let text = fs::read(copy.path().join("hf_quant_config.json")).expect("reads");
            let mut file: Value = serde_json::from_slice(&text).expect("JSON");
            *copy.quantization() = file["quantization"].take();
            copy.quantization()["quant_method"] = "modelopt".into();
            fs::remove_file(copy.path().join("hf_quant_config.json")).expect("removes");
        }
        let formats = |source: &CheckpointSource| -> Vec<&str> {
            let stored = |parameter: perplexity_model::parameters::Parameter| source.stored(&parameter.name);
            parameters(source.config())
                .map(|parameter| stored(parameter).expect("stored").parts[0].format)
                .collect()
        };
        let expected = formats(&copy.open().expect(checkpoint));
        let mut found = Vec::new();
        places(copy.quantization(), "/quantization_config", &mut found);
        let (mut refused, mut same) = (0, 0);
        for place in found {
            for damage in [json!(null), json!(true), json!(-1), json!("*"), json!([])] {
                let mut config = copy.config.clone();
                *config.pointer_mut(&place).expect("a place") = damage;
                match copy.open_with_config(&config) {
                    Ok(source) => {
                        assert_eq!(formats(&source), expected, "{checkpoint} {place}");
                        same += 1;
                    }
                    Err(_) => refused += 1,
                }
            }
        }
        assert!(
            refused > 50 && same > 0,
            "{checkpoint}: {refused} refused, {same} the same"
        );
    }
}
