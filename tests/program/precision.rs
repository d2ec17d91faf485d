//! Precision, activations, rotary extensions and passes: what the options change, and that the report says so.

use serde_json::{Value, json};

use crate::common::{Dir, byte_model, demo_artifact, demo_checkpoint, number, repository, window_nlls};

const SHORT: &str = "--context 256 --stride 128 --chunks 2 --log-level error";

fn text() -> std::path::PathBuf {
    repository("eval/corpora/open-1m/data/demo/english_long_form.txt")
}

fn quantised(name: &str) -> std::path::PathBuf {
    repository("tests/data/quantised").join(name)
}

fn execution<'a>(report: &'a Value, field: &str) -> &'a Value {
    &report["execution"][field]
}

#[test]
fn rounding_on_loading_equals_an_artifact_stored_so() {
    let dir = Dir::new();
    let rule = |role: &str| format!("[[rule]]\nrole = \"{role}\"\nformat = \"q6_g64_fp16\"\n");
    let mix = format!(
        "name = \"six\"\nfallback = \"bf16\"\n{}{}",
        rule("token_embedding"),
        rule("output_head")
    );
    let recipe = dir.file("six.toml", mix);
    let (checkpoint, out) = (demo_checkpoint(), dir.path("six.ninfer"));
    let run = dir.run([
        "convert",
        checkpoint.to_str().unwrap(),
        out.to_str().unwrap(),
        "--recipe",
        recipe.to_str().unwrap(),
    ]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let stored = dir.report(&out, &text(), SHORT);
    let loaded = dir.report(
        &demo_artifact(),
        &text(),
        &format!("{SHORT} --lm-head-q6 --embedding-q6"),
    );
    assert_eq!(window_nlls(&loaded), window_nlls(&stored));
    for field in ["lm_head_format", "embedding_format"] {
        assert_eq!(execution(&loaded, field), "q6_g64_fp16");
        assert_eq!(execution(&stored, field), &Value::Null);
    }
    let plain = dir.report(&demo_artifact(), &text(), SHORT);
    let head = dir.report(&demo_artifact(), &text(), &format!("{SHORT} --lm-head-q4"));
    assert_ne!(
        window_nlls(&head),
        window_nlls(&plain),
        "tied matrices are rounded apart"
    );
    assert_eq!(execution(&head, "lm_head_format"), "q4_g64_fp16");
    assert_eq!(execution(&head, "embedding_format"), &Value::Null);
}

#[test]
fn the_state_in_half_precision_is_a_recorded_change_and_decoding_options_are_none() {
    let dir = Dir::new();
    let plain = dir.report(&demo_artifact(), &text(), SHORT);
    let half = dir.report(&demo_artifact(), &text(), &format!("{SHORT} --gdn-state-fp16"));
    assert_ne!(window_nlls(&half), window_nlls(&plain));
    let change = number(&half, "/overall/mean_nll") - number(&plain, "/overall/mean_nll");
    assert!(change.abs() < 0.01, "{change}");
    assert_eq!(
        (execution(&half, "gdn_state_fp16"), execution(&plain, "gdn_state_fp16")),
        (&json!(true), &json!(false))
    );

    let options = "--context 256 --stride 128 --chunks 2 --mlp-a8-decode --a16-activations --a4-rounding modelopt --attention-wave 128";
    let run = dir.score(
        &demo_artifact(),
        &text(),
        &format!("{options} --rope-yarn --output decode"),
    );
    assert_eq!(run.code, 0, "{}", run.stderr);
    for option in ["--mlp-a8-decode", "--a4-rounding", "--attention-wave", "--rope-yarn"] {
        let words = format!("warning: {option} has no effect");
        assert!(run.stderr.contains(&words), "{option}: {}", run.stderr);
    }
    let decode = crate::common::read_report(&dir.path("decode"));
    assert_eq!(window_nlls(&decode), window_nlls(&plain));
    assert_eq!(execution(&decode, "mlp_a8_decode"), &json!(true));
}

#[test]
fn activations_are_narrowed_where_the_model_permits_it() {
    let dir = Dir::new();
    let text = dir.file("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(12));
    let score = |name: &str, options: &str| dir.report(&quantised(name), &text, &format!("{SHORT} {options}"));
    for (name, formats) in [
        ("fp8_row", vec!["fp8"]),
        ("fp8_block", vec!["fp8"]),
        ("nvfp4_compressed", vec!["fp8", "nvfp4"]),
        ("nvfp4_modelopt", vec!["fp8", "nvfp4"]),
    ] {
        let (narrow, wide) = (score(name, ""), score(name, "--a16-activations"));
        let found: Vec<&String> = execution(&narrow, "narrowed_activations")
            .as_object()
            .unwrap()
            .keys()
            .collect();
        assert_eq!(found, formats, "{name}");
        assert_eq!(execution(&wide, "narrowed_activations"), &json!({}), "{name}");
        assert_eq!(
            (
                execution(&wide, "a16_activations"),
                execution(&narrow, "a16_activations")
            ),
            (&json!(true), &json!(false))
        );
        assert_ne!(window_nlls(&narrow), window_nlls(&wide), "{name}");
        let exact = score(name, "--route exact");
        assert_eq!(execution(&exact, "narrowed_activations"), &json!({}), "{name}");
        if formats.len() == 2 {
            let other = score(name, "--a4-rounding modelopt");
            assert_eq!(execution(&other, "options")["a4-rounding"], "modelopt");
            assert_eq!(execution(&narrow, "options")["a4-rounding"], "engine");
        }
    }
}

#[test]
fn integer_activations_are_for_mixes_that_permit_them() {
    let dir = Dir::new();
    let mix = "name = \"a8\"\nfallback = \"bf16\"\n[[rule]]\nrole = \"mlp/*\"\nformat = \"q8_g32_fp16\"\npolicy = \"AllowA8\"\n";
    let (checkpoint, recipe, out) = (demo_checkpoint(), dir.file("a8.toml", mix), dir.path("a8.ninfer"));
    let run = dir.run([
        "convert",
        checkpoint.to_str().unwrap(),
        out.to_str().unwrap(),
        "--recipe",
        recipe.to_str().unwrap(),
    ]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let on = dir.report(&out, &text(), SHORT);
    let off = dir.report(&out, &text(), &format!("{SHORT} --no-prefill-a8"));
    assert_eq!(
        execution(&on, "narrowed_activations")["int8"].as_array().unwrap().len(),
        16
    );
    assert_eq!(
        (execution(&on, "prefill_a8"), execution(&off, "prefill_a8")),
        (&json!(true), &json!(false))
    );
    let change = number(&on, "/overall/mean_nll") - number(&off, "/overall/mean_nll");
    assert!(change != 0.0 && change.abs() < 0.02, "{change}");
}

#[test]
fn calibration_permits_four_bit_activations() {
    let dir = Dir::new();
    let (checkpoint, out) = (demo_checkpoint(), dir.path("a4.ninfer"));
    let sample = dir.file("sample.txt", &std::fs::read(text()).unwrap()[..3000]);
    let convert = |recipe: &str, calibrate: &std::path::Path| {
        let (checkpoint, out) = (checkpoint.to_str().unwrap(), out.to_str().unwrap());
        dir.run([
            "convert",
            checkpoint,
            out,
            "--recipe",
            recipe,
            "--calibrate",
            calibrate.to_str().unwrap(),
        ])
    };
    let refused = convert("q8", &sample);
    assert_eq!(refused.code, 2);
    assert!(refused.stderr.contains("q8 permits none"), "{}", refused.stderr);
    assert_eq!(convert("nvfp4", &dir.path("nowhere.txt")).code, 2);
    assert!(!out.exists());

    let run = convert("nvfp4", &sample);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stderr.contains("calibrated 32 inputs"), "{}", run.stderr);
    let inspection: Value =
        serde_json::from_str(&dir.run(["inspect", "--json", out.to_str().unwrap()]).stdout).unwrap();
    let origin = &inspection["provenance"]["activation_divisors"];
    assert_eq!(
        (&origin["text"], &origin["window"]),
        (&json!("sample.txt"), &json!(1024))
    );

    let narrow = dir.report(&out, &text(), SHORT);
    let wide = dir.report(&out, &text(), &format!("{SHORT} --a16-activations"));
    assert_eq!(
        execution(&narrow, "narrowed_activations")["nvfp4"]
            .as_array()
            .unwrap()
            .len(),
        32
    );
    // Nats per token; a divisor off by a power of two or more would cost far more.
    let change = number(&narrow, "/overall/mean_nll") - number(&wide, "/overall/mean_nll");
    assert!(change != 0.0 && change.abs() < 0.15, "{change}");
}

#[test]
fn rotary_extensions_reach_further_and_are_recorded() {
    let dir = Dir::new();
    let text = dir.file("text.txt", "abcdefgh".repeat(20));
    let run = |options: &str| dir.report(&byte_model(), &text, &format!("{options} --log-level error"));
    // The model has 4,096 positions.
    let native = run("--context 4096");
    let yarn = run("--context 8192 --rope-yarn");
    assert_eq!(
        (execution(&yarn, "rope_yarn"), execution(&yarn, "rope_yarn_factor")),
        (&json!(true), &json!(2.0))
    );
    assert_ne!(window_nlls(&yarn), window_nlls(&native), "YaRN reaches every position");
    assert_eq!(
        window_nlls(&run("--context 8192 --rope-yarn-factor 2")),
        window_nlls(&yarn)
    );
    assert_eq!(
        window_nlls(&run("--context 4096 --rope-yarn-factor 1")),
        window_nlls(&native)
    );
    let linear = run("--context 16384 --rope-scaling-factor 8");
    assert_eq!(execution(&linear, "rope_scaling_factor"), &json!(8.0));
    assert_eq!(
        window_nlls(&linear),
        window_nlls(&native),
        "positions of the native window keep their angles"
    );
    let early = run("--context 4096 --rope-scaling-factor 8 --rope-scaling-original-context 50");
    assert_eq!(execution(&early, "rope_scaling_original_context"), &json!(50));
    assert_ne!(window_nlls(&early), window_nlls(&native));
}

#[test]
fn passes_are_recorded_as_they_ran() {
    let dir = Dir::new();
    let text = dir.file("text.txt", "abcdefgh".repeat(20));
    let passes = |options: &str| {
        let report = dir.report(&byte_model(), &text, &format!("{options} --log-level error"));
        (
            execution(&report, "prefill_chunk_tokens").clone(),
            execution(&report, "options").clone(),
        )
    };
    let options = |wave: Value| json!({"prefill-chunk": 1024, "attention-wave": wave, "softmax-rows": "public"});
    assert_eq!(
        passes("--kv-dtype int8 --attention-wave 384"),
        (json!(768), options(json!(384)))
    );
    assert_eq!(
        passes("--kv-dtype bf16 --attention-wave 384"),
        (json!(1024), options(Value::Null))
    );
}
