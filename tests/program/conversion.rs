//! `convert` and `inspect`.

use serde_json::Value;

use crate::common::{Dir, demo_artifact, demo_checkpoint, moe_model, number, repository, window_nlls};

/// Enough text to tell a wrong weight from a right one, and little enough for many recipes.
const SHORT: &str = "--context 256 --stride 128 --chunks 2 --log-level error";

fn convert(dir: &Dir, checkpoint: &std::path::Path, recipe: &str) -> std::path::PathBuf {
    let out = dir.path(&format!("{recipe}.ninfer"));
    let run = dir.run([checkpoint.as_os_str(), out.as_os_str()].into_iter().fold(
        vec!["convert".into(), "--recipe".into(), recipe.into()],
        |mut args: Vec<std::ffi::OsString>, path| {
            args.push(path.into());
            args
        },
    ));
    assert_eq!((run.code, run.stdout.as_str()), (0, ""), "{recipe}: {}", run.stderr);
    assert!(run.stderr.contains(" bits per weight"), "{}", run.stderr);
    out
}

fn text() -> std::path::PathBuf {
    repository("eval/corpora/open-1m/data/demo/english_long_form.txt")
}

#[test]
fn checkpoint_and_bf16_artifact_score_identically() {
    let dir = Dir::new();
    for route in ["normal", "exact"] {
        let options = format!("{SHORT} --route {route}");
        let checkpoint = dir.report(&demo_checkpoint(), &text(), &options);
        let artifact = dir.report(&demo_artifact(), &text(), &options);
        assert_eq!(window_nlls(&checkpoint), window_nlls(&artifact), "{route}");
    }
}

#[test]
fn the_shipped_artifact_is_what_convert_makes() {
    let dir = Dir::new();
    let made = convert(&dir, &demo_checkpoint(), "bf16");
    let options = format!("{SHORT} --route exact");
    let fresh = dir.report(&made, &text(), &options);
    let shipped = dir.report(&demo_artifact(), &text(), &options);
    assert_eq!(window_nlls(&fresh), window_nlls(&shipped));
    assert_eq!(
        fresh["artifact"]["prefill_signature"],
        shipped["artifact"]["prefill_signature"]
    );
}

#[test]
fn every_recipe_scores_near_bf16_and_coarser_ones_farther_away() {
    let dir = Dir::new();
    let score = |model: &std::path::Path| number(&dir.report(model, &text(), SHORT), "/overall/mean_nll");
    let bf16 = score(&demo_artifact());
    // Nats per token; a wrong layout or scale costs several.
    for (recipe, tolerance) in [
        ("q8", 0.005),
        ("q6", 0.03),
        ("fp8", 0.05),
        ("qwen3_8_27b_q6", 0.1),
        ("qwen3_8_27b", 0.5),
        ("qwen3_8_27b_nvfp4", 0.5),
        ("nvfp4", 0.5),
        ("nvfp4_mse", 0.5),
        ("q4", 0.5),
    ] {
        let difference = (score(&convert(&dir, &demo_checkpoint(), recipe)) - bf16).abs();
        assert!(difference > 0.0 && difference < tolerance, "{recipe}: {difference}");
    }
}

#[test]
fn a_mixture_of_experts_scores_from_its_checkpoint_and_from_artifacts() {
    let dir = Dir::new();
    let text = moe_model().join("text.txt");
    let options = "--context 256 --stride 128 --route exact --log-level error";
    let total = |model: &std::path::Path| window_nlls(&dir.report(model, &text, options));

    let checkpoint = total(&moe_model());
    let golden: Value = serde_json::from_slice(&std::fs::read(moe_model().join("golden.json")).unwrap()).unwrap();
    let error = checkpoint.iter().sum::<f64>() - number(&golden, "/f32_public_total_nll");
    assert!(error.abs() < 1e-3, "{error} from Hugging Face");

    assert_eq!(total(&convert(&dir, &moe_model(), "bf16")), checkpoint);
    // 149 positions of a random model; experts of 4 and 5 bits, the rest of 6, 8 and 16.
    let mixed = total(&convert(&dir, &moe_model(), "qwen3_6_35b_a3b"));
    let difference = (mixed.iter().sum::<f64>() - checkpoint.iter().sum::<f64>()) / 149.0;
    assert!(difference != 0.0 && difference.abs() < 0.1, "{difference}");
}

#[test]
fn an_own_mix_is_a_small_file() {
    let dir = Dir::new();
    let mix = "name = \"mine\"\nfallback = \"bf16\"\n[[rule]]\nrole = \"mlp/*\"\nformat = \"q8_g32_fp16\"\n";
    let recipe = dir.file("mine.toml", mix);
    let (checkpoint, out) = (demo_checkpoint(), dir.path("mine.ninfer"));
    let line = [
        "convert",
        checkpoint.to_str().unwrap(),
        out.to_str().unwrap(),
        "--recipe",
        recipe.to_str().unwrap(),
    ];
    let run = dir.run(line);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report = dir.report(&out, &text(), SHORT);
    assert_eq!(
        report["artifact"]["formats"].as_array().unwrap().len(),
        3,
        "{}",
        report["artifact"]["formats"]
    );
}

#[test]
fn unknown_recipes_and_existing_artifacts_are_refused() {
    let dir = Dir::new();
    let existing = dir.file("there.ninfer", "keep me");
    let checkpoint = demo_checkpoint();
    let line = |out: &str, recipe: &str| dir.run(["convert", checkpoint.to_str().unwrap(), out, "--recipe", recipe]);
    let unknown = line("new.ninfer", "q7");
    assert_eq!(unknown.code, 2);
    assert!(unknown.stderr.contains("qwen3_8_27b_nvfp4"), "{}", unknown.stderr);
    let overwriting = line(existing.to_str().unwrap(), "bf16");
    assert_eq!(overwriting.code, 2);
    assert_eq!(std::fs::read_to_string(existing).unwrap(), "keep me");
    assert_eq!(dir.files(), ["there.ninfer"], "nothing half-written is left");
}

#[test]
fn a_broken_checkpoint_leaves_no_artifact() {
    let dir = Dir::new();
    dir.file("broken/config.json", "{}");
    let run = dir.run(["convert", "broken", "new.ninfer", "--recipe", "bf16"]);
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(run.stderr.contains("broken"), "{}", run.stderr);
    assert_eq!(dir.files(), ["broken/config.json"]);
}

#[test]
fn inspect_shows_both_kinds_of_model() {
    let dir = Dir::new();
    for (path, kind, name) in [
        (demo_artifact(), "artifact", "burn-perplexity-demo"),
        (demo_checkpoint(), "checkpoint", "demo_hf"),
    ] {
        let json = dir.run(["inspect", "--json", path.to_str().unwrap()]);
        assert_eq!(json.code, 0, "{}", json.stderr);
        let json: Value = serde_json::from_str(&json.stdout).unwrap();
        assert_eq!((&json["kind"], &json["name"]), (&kind.into(), &name.into()));
        // 7.9 M parameters of 16 bits; the head shares the embedding's storage.
        let weights = json["weights"].as_u64().unwrap();
        assert!((7_900_000..8_000_000).contains(&weights), "{weights}");
        let text = dir.run(["inspect", path.to_str().unwrap()]);
        assert!(
            text.code == 0 && text.stdout.contains("gdn/query") && text.stdout.contains("bf16"),
            "{}",
            text.stdout
        );
    }
}

#[test]
fn a_file_that_is_no_artifact_is_refused() {
    let dir = Dir::new();
    let path = dir.file("noise.ninfer", [0x5a; 4096]);
    for args in [
        vec!["inspect", path.to_str().unwrap()],
        vec![path.to_str().unwrap(), "--text", path.to_str().unwrap()],
    ] {
        let run = dir.run(args);
        assert_eq!((run.code, run.stdout.as_str()), (1, ""));
        assert!(run.stderr.contains("noise.ninfer"), "{}", run.stderr);
    }
}

#[test]
fn random_artifacts_are_inspected_and_scored() {
    let dir = Dir::new();
    for recipe in ["q4", "qwen3_8_27b_nvfp4"] {
        let out = dir.path(&format!("{recipe}.ninfer"));
        let line = format!("synth --preset demo --layers 4 --recipe {recipe} --seed 3 --tokenizer");
        let run = dir.run(
            line.split_whitespace()
                .map(Into::into)
                .chain([demo_checkpoint().into_os_string(), out.clone().into_os_string()])
                .collect::<Vec<std::ffi::OsString>>(),
        );
        assert_eq!((run.code, run.stdout.as_str()), (0, ""), "{}", run.stderr);
        assert!(run.stderr.contains("drew random-demo"), "{}", run.stderr);
        let json = dir.run(["inspect", "--json", out.to_str().unwrap()]);
        let json: Value = serde_json::from_str(&json.stdout).unwrap();
        assert_eq!(json["name"], "random-demo", "{json}");
        let report = dir.report(&out, &text(), &format!("{SHORT} --kv-dtype int8"));
        // Logits of a normalised row of 256 and weights of deviation 0.02 have a deviation of 0.32: nearly ln 8195.
        let nll = number(&report, "/overall/mean_nll");
        assert!((9.0..9.2).contains(&nll), "{recipe}: {nll}");
    }
    let refuse = |options: &str, expected: &str| {
        let run = dir.run(format!("synth x.ninfer {options}").split_whitespace());
        assert_eq!(run.code, 2, "{options}: {}", run.stderr);
        assert!(run.stderr.contains(expected), "{options}: {}", run.stderr);
    };
    refuse("--recipe q4 --preset qwen3.5-1b", "qwen3.8-27b");
    refuse("--recipe q7 --preset demo", "qwen3_8_27b_nvfp4");
    refuse("--recipe q4 --preset demo --layers 0", "from 1 to 1024");
    refuse("--recipe q4 --preset demo --layers 5000", "from 1 to 1024");
    refuse("--recipe q4 --preset demo", "pass --tokenizer MODEL");
    refuse("--preset demo", "no recipe given");
    refuse(
        "--recipe q4 --preset demo --ngram-base 5000",
        "--ngram-base is not for --preset demo",
    );
    let flash_next = "--recipe qwen3_8_flash_next_nvfp4 --preset qwen3.8-flash-next";
    refuse(&format!("{flash_next} --layers 1"), "from 2 to 1024");
    refuse(&format!("{flash_next} --ngram-base 5"), "from 1000 to 20000000");
    for option in ["--recipe q4", "--layers 4", "--seed 1", "--ngram-base 5000"] {
        let expected = "is not for --preset flash-next-tiny";
        refuse(&format!("--preset flash-next-tiny {option}"), expected);
    }
}

#[test]
fn a_mix_for_another_model_is_said_to_be_one() {
    let dir = Dir::new();
    let (dense, moe) = ("tests/data/fixtures/dense", "tests/data/fixtures/moe");
    for (number, (recipe, model, said)) in [
        ("qwen3_8_flash_next_nvfp4", dense, "made for Qwen3.8-Flash-Next"),
        ("qwen3_6_35b_a3b", dense, "made for a mixture of experts"),
        ("qwen3_8_27b", moe, "made for a dense model"),
        ("qwen3_6_35b_a3b", moe, ""),
        ("qwen3_8_27b", dense, ""),
        ("q8", dense, ""),
    ]
    .into_iter()
    .enumerate()
    {
        let (out, model) = (format!("{number}.ninfer"), repository(model));
        let run = dir.run(["convert", "--recipe", recipe, model.to_str().unwrap(), &out]);
        assert_eq!(run.code, 0, "{recipe}: {}", run.stderr);
        let noted = run.stderr.contains("is made for");
        assert!(
            run.stderr.contains(said) && noted != said.is_empty(),
            "{recipe}: {}",
            run.stderr
        );
    }
}
