//! Conversion of whole checkpoints: values, bindings, permissions, failure without a trace.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use common::data;
use perplexity_model::bindings::ArtifactSource;
use perplexity_model::checkpoint::CheckpointSource;
use perplexity_model::convert::{ConvertError, ConvertOptions, Plan, Progress, Recipe, Summary, convert};
use perplexity_model::formats::{self, EncodeMethod, Format};
use perplexity_model::parameters::parameters;
use perplexity_model::source::{self, ActivationPolicy, TextSource};
use perplexity_model::tokenizer::{AddedTokens, TextTokenizer};
use serde_json::json;

fn options(recipe: &str) -> ConvertOptions {
    ConvertOptions::new(Recipe::named(recipe).expect("a recipe"))
}

fn convert_into(directory: &Path, source: &str, options: &ConvertOptions) -> (PathBuf, Summary) {
    let out = directory.join("model.ninfer");
    let summary = convert(&data(source), &out, options, &mut |_| ()).expect("converts");
    (out, summary)
}

#[test]
fn a_bf16_artifact_holds_exactly_the_checkpoint() {
    for checkpoint in ["demo_hf", "fixtures/dense", "fixtures/moe"] {
        let directory = tempfile::tempdir().expect("a directory");
        let (out, summary) = convert_into(directory.path(), checkpoint, &options("bf16"));
        let original = source::open(&data(checkpoint)).expect("opens");
        let converted = source::open(&out).expect("opens");
        assert_eq!(converted.config(), original.config(), "{checkpoint}");
        assert_eq!(converted.name(), original.name());
        assert_eq!(summary.files, [out]);
        for parameter in parameters(original.config()) {
            let load = |source: &dyn TextSource| source.load(&parameter.name, &parameter.shape).expect(&parameter.name);
            assert_eq!(
                load(converted.as_ref()),
                load(original.as_ref()),
                "{checkpoint} {}",
                parameter.name
            );
        }
        let tokens = |source: &dyn TextSource| {
            let tokenizer = TextTokenizer::from_source(source, AddedTokens::Match).expect("builds");
            tokenizer.encode("The quick brown fox.").expect("encodes")
        };
        assert_eq!(tokens(converted.as_ref()), tokens(original.as_ref()));
    }
}

#[test]
fn a_tied_demo_is_stored_once() {
    let directory = tempfile::tempdir().expect("a directory");
    let (out, _) = convert_into(directory.path(), "demo_hf", &options("bf16"));
    let source = ArtifactSource::open(&out).expect("opens");
    let object = |name| source.stored(name).expect(name).parts[0].object.clone();
    assert_eq!(object("text/output_head"), object("text/token_embedding"));
    let size = fs::metadata(&out).expect("written").len();
    let weights = 15_843_376 + 2 * (6 * 2 * 2);
    // Weights, the tokenizer of 544 kB, a directory of less than 64 KiB, alignment.
    assert!((weights..weights + 544_000 + 100_000).contains(&size), "{size}");
}

/// Relative root-mean-square error of all matrices of a role, and the stored format.
fn error_of(original: &dyn TextSource, converted: &dyn TextSource, role: &str) -> (f64, &'static str) {
    let (mut error, mut power, mut format) = (0.0, 0.0, "");
    for parameter in parameters(original.config()).filter(|parameter| parameter.role == role) {
        let load = |source: &dyn TextSource| source.load(&parameter.name, &parameter.shape).expect(&parameter.name);
        for (exact, stored) in load(original).iter().zip(load(converted)) {
            error += f64::from(exact - stored).powi(2);
            power += f64::from(*exact).powi(2);
        }
        format = converted.stored(&parameter.name).expect("stored").parts[0].format;
    }
    ((error / power).sqrt(), format)
}

#[test]
fn every_recipe_converts_the_demo_within_the_error_of_its_formats() {
    // Bounds for near-Gaussian weights: an absmax grid of b bits over a group of 32 to 64 has a step of about
    // 2.4 sigma / qmax, so an error of 0.29 steps; E2M1 with block scales errs by about 0.1, E4M3 by 0.027.
    let bound = |format: &str| match format {
        "bf16" => 0.0,
        "q8_g32_fp16" => 0.008,
        "q6_g64_fp16" => 0.03,
        "q5_g64_fp16" => 0.06,
        "q4_g64_fp16" => 0.13,
        "nvfp4" => 0.12,
        "fp8_e4m3fn_row_bf16" => 0.035,
        other => panic!("unexpected format {other}"),
    };
    let original = source::open(&data("demo_hf")).expect("opens");
    for recipe in Recipe::NAMES {
        let directory = tempfile::tempdir().expect("a directory");
        let (out, summary) = convert_into(directory.path(), "demo_hf", &options(recipe));
        let converted = source::open(&out).expect("opens");
        for role in [
            "token_embedding",
            "attention/query",
            "attention/gate",
            "gdn/value",
            "gdn/output",
            "mlp/up",
            "mlp/down",
        ] {
            let (error, format) = error_of(original.as_ref(), converted.as_ref(), role);
            assert!(
                error <= bound(format) && (error > 0.0) == (format != "bf16"),
                "{recipe} {role} {format}: {error}"
            );
        }
        let (error, format) = error_of(original.as_ref(), converted.as_ref(), "gdn/a_log");
        assert_eq!((error, format), (0.0, "fp32"), "{recipe}");
        assert!(summary.bits_per_weight < 16.1, "{recipe}: {}", summary.bits_per_weight);
    }
}

#[test]
fn packed_values_are_the_encoders_values() {
    // The parent of gate and up, encoded at once from its rows, gives the bytes in the file.
    for (recipe, format, method) in [
        ("q5", Format::Q5G64Fp16, EncodeMethod::GroupedAbsmax),
        ("nvfp4", Format::Nvfp4, EncodeMethod::Nvfp4Absmax),
        ("nvfp4_mse", Format::Nvfp4, EncodeMethod::Nvfp4Mse),
        ("fp8", Format::Fp8E4m3fnRowBf16, EncodeMethod::Fp8RowMaxabs),
    ] {
        let directory = tempfile::tempdir().expect("a directory");
        let (out, _) = convert_into(directory.path(), "demo_hf", &options(recipe));
        let original = CheckpointSource::open(&data("demo_hf")).expect("opens");
        let mut rows = original.load("text/layers/2/mlp/gate", &[512, 256]).expect("loads");
        rows.extend(original.load("text/layers/2/mlp/up", &[512, 256]).expect("loads"));
        let expected = formats::encode(format, method, &[1024, 256], &rows).expect("encodes");
        let converted = ArtifactSource::open(&out).expect("opens");
        let stored = converted.stored("text/layers/2/mlp/up").expect("stored");
        let part = &stored.parts[0];
        assert_eq!(part.range, Some((512 * 256, 1024 * 256)));
        let artifact = converted.artifact().expect("an artifact");
        let object = artifact.object(&part.object).expect("the parent");
        assert_eq!(
            artifact.object_bytes(object).expect("reads").as_ref(),
            expected,
            "{recipe}"
        );
    }
}

#[test]
fn permissions_and_divisors_are_written_for_every_projection() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut options = options("nvfp4");
    options.activation_divisors = BTreeMap::from([("text/layers/1/ffn_input".to_owned(), 448.0)]);
    options.name = Some("named".into());
    let (out, summary) = convert_into(directory.path(), "demo_hf", &options);
    assert!(
        summary.notes.iter().any(|note| note.contains("A16Only")),
        "{:?}",
        summary.notes
    );
    let source = ArtifactSource::open(&out).expect("opens");
    assert_eq!((source.name(), summary.name.as_str()), ("named", "named"));
    let artifact = source.artifact().expect("an artifact");
    for parameter in parameters(source.config()) {
        let Some(input) = parameter.input else { continue };
        let expected = match (input.as_str(), parameter.role) {
            ("text/layers/1/ffn_input", "mlp/gate" | "mlp/up") => (ActivationPolicy::AllowA4, Some(448.0)),
            _ => (ActivationPolicy::A16Only, None),
        };
        assert_eq!(
            artifact.activation(&parameter.name, &input).expect("a Use"),
            expected,
            "{}",
            parameter.name
        );
        assert_eq!(source.stored(&parameter.name).expect("stored").policy, Some(expected.0));
    }
    assert_eq!(artifact.provenance()["recipe"], "nvfp4");
    assert_eq!(
        artifact.provenance()["source"]["files"][0]["name"],
        "model-00001-of-00002.safetensors"
    );
}

#[test]
fn fallbacks_of_nvfp4_are_noted_and_readable() {
    // The MoE fixture: experts of 64 rows pack to whole tiles, gates of 4 rows stay bf16.
    let directory = tempfile::tempdir().expect("a directory");
    let recipe =
        Recipe::from_toml("name='all'\nfallback='q8_g32_fp16'\n[[rule]]\nrole='*'\nformat='nvfp4'").expect("valid");
    let (out, summary) = convert_into(directory.path(), "fixtures/moe", &ConvertOptions::new(recipe));
    let note = summary
        .notes
        .iter()
        .find(|note| note.contains("do not fit nvfp4"))
        .expect("a note");
    assert!(note.contains("q8_g32_fp16"), "{note}");
    let source = source::open(&out).expect("opens");
    let format = |name: &str| source.stored(name).expect(name).parts[0].format;
    assert_eq!(format("text/layers/0/moe/experts/3/up"), "nvfp4");
    assert_eq!(format("text/layers/0/moe/shared/gate"), "nvfp4");
    assert_eq!(format("text/layers/0/gdn/a_projection"), "q8_g32_fp16");
    assert_eq!(format("text/layers/0/moe/router"), "q8_g32_fp16");
}

#[test]
fn progress_counts_every_object_and_byte() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut seen: Vec<Progress> = Vec::new();
    let out = directory.path().join("model.infernix");
    convert(&data("fixtures/dense"), &out, &options("q4"), &mut |progress| {
        seen.push(progress)
    })
    .expect("converts");
    let source = CheckpointSource::open(&data("fixtures/dense")).expect("opens");
    let recipe = Recipe::named("q4").expect("a recipe");
    let plan = Plan::new(source.config(), &recipe, &BTreeMap::new()).expect("plans");
    let bytes: u64 = plan.parents.iter().map(|parent| parent.bytes).sum();
    assert_eq!(seen.len(), plan.parents.len());
    assert!(seen.is_sorted_by_key(|progress| (progress.objects, progress.bytes)));
    let last = seen.last().expect("some");
    assert_eq!(
        (last.objects, last.bytes, last.all_objects, last.all_bytes),
        (seen.len(), bytes, seen.len(), bytes)
    );
}

fn files(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory)
        .expect("lists")
        .map(|entry| entry.expect("an entry").file_name());
    names.map(|name| name.to_string_lossy().into_owned()).collect()
}

#[test]
fn an_existing_output_is_not_overwritten_and_a_failure_leaves_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("model.ninfer");
    fs::write(&out, "mine").expect("writes");
    let error = convert(&data("fixtures/dense"), &out, &options("bf16"), &mut |_| ()).expect_err("exists");
    assert!(error.to_string().contains("model.ninfer"), "{error}");
    assert_eq!(fs::read(&out).expect("reads"), b"mine");
    fs::remove_file(&out).expect("removes");

    // A weight that is not a number is found in the middle of writing.
    let mut tiny = tokenizable();
    let mut values = vec![1.0; 96];
    values[17] = f32::NAN;
    tiny.set_values("model.layers.1.mlp.down_proj.weight", &[8, 12], values);
    tiny.write();
    let error = convert(tiny.path(), &out, &options("q8"), &mut |_| ()).expect_err("a NaN");
    assert!(
        matches!(&error, ConvertError::NotFinite { parameter, element: 17, .. } if parameter == "text/layers/1/mlp/down"),
        "{error}"
    );
    assert_eq!(files(directory.path()), Vec::<String>::new());

    let mut options = options("nvfp4");
    options
        .activation_divisors
        .insert("text/layers/0/ffn_input".into(), 0.0);
    let error = convert(tiny.path(), &out, &options, &mut |_| ()).expect_err("a divisor of 0");
    assert!(matches!(error, ConvertError::Divisor { .. }), "{error}");
}

/// A tiny checkpoint with a tokenizer of its 16 rows.
fn tokenizable() -> common::Tiny {
    let tiny = common::Tiny::dense();
    let vocab: serde_json::Map<_, _> = (0..16)
        .map(|id| (char::from(b'a' + id).to_string(), json!(id)))
        .collect();
    let tokenizer = json!({"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": []});
    fs::write(tiny.path().join("tokenizer.json"), tokenizer.to_string()).expect("writes");
    fs::write(
        tiny.path().join("tokenizer_config.json"),
        r#"{"added_tokens_decoder": {}}"#,
    )
    .expect("writes");
    tiny
}

#[test]
fn missing_resources_that_scoring_does_not_use_are_replaced_with_a_note() {
    let tiny = tokenizable();
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("a.ninfer");
    let summary = convert(tiny.path(), &out, &options("bf16"), &mut |_| ()).expect("converts");
    let notes = summary.notes.join("\n");
    assert!(
        notes.contains("chat template") && notes.contains("generation_config.json"),
        "{notes}"
    );
    source::open(&out).expect("opens");

    let config = r#"{"added_tokens_decoder": {}, "chat_template": "{{ messages }}"}"#;
    fs::write(tiny.path().join("tokenizer_config.json"), config).expect("writes");
    let out = directory.path().join("b.ninfer");
    convert(tiny.path(), &out, &options("bf16"), &mut |_| ()).expect("converts");
    let template = source::open(&out)
        .expect("opens")
        .resource("chat_template.jinja")
        .expect("reads");
    assert_eq!(template.as_deref(), Some(b"{{ messages }}".as_slice()));

    fs::remove_file(tiny.path().join("tokenizer.json")).expect("removes");
    let error = convert(
        tiny.path(),
        &directory.path().join("c.ninfer"),
        &options("bf16"),
        &mut |_| (),
    )
    .expect_err("gone");
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
}

#[test]
fn weights_of_wider_types_are_noted_when_they_become_bf16() {
    let mut tiny = tokenizable();
    tiny.dtype = common::dtype::F32;
    tiny.write();
    let directory = tempfile::tempdir().expect("a directory");
    let summary = convert(
        tiny.path(),
        &directory.path().join("a.ninfer"),
        &options("bf16"),
        &mut |_| (),
    )
    .expect("converts");
    assert!(
        summary.notes.iter().any(|note| note.contains("rounded to bf16")),
        "{:?}",
        summary.notes
    );
}
