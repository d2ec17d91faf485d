//! Qwen3.8-Flash-Next through the program: checkpoint, artifact, volume, residencies.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::common::{Dir, number, repository, window_nlls};

/// One window over the whole text.
const PROTOCOL: &str = "--context 256 --stride 128 --log-level error";

fn fixture() -> PathBuf {
    repository("tests/data/fixtures/flash_next")
}

fn text() -> PathBuf {
    fixture().join("text.txt")
}

/// The fixture with packed experts, and its volume beside it.
fn converted(dir: &Dir) -> PathBuf {
    let out = dir.path("model.ninfer");
    let recipe = "qwen3_8_flash_next_nvfp4";
    let run = dir.run([
        "convert",
        fixture().to_str().unwrap(),
        out.to_str().unwrap(),
        "--recipe",
        recipe,
    ]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stderr.contains("model.ninfer.ngram"), "{}", run.stderr);
    out
}

#[test]
fn the_fixture_has_hugging_faces_likelihood() {
    let golden: Value = serde_json::from_slice(&std::fs::read(fixture().join("golden.json")).unwrap()).unwrap();
    let report = Dir::new().report(&fixture(), &text(), &format!("{PROTOCOL} --route exact"));
    let got = number(&report, "/overall/mean_nll") * (number(&golden, "/tokens") - 1.0);
    let want = number(&golden, "/f32_public_total_nll");
    assert!((got - want).abs() < 1e-2, "{got}, not {want}");
    assert_eq!(report["artifact"]["architecture"], "Qwen4ExpForCausalLM");
    for (field, value) in [
        ("prefill_chunk_tokens", Value::from(16_384)),
        ("score_tile_tokens", 64.into()),
        ("logits_dtype", "f32".into()),
    ] {
        assert_eq!(report["execution"][field], value, "{field}");
    }
    assert_eq!(
        report["execution"]["options"]["ngram_volume"],
        "the checkpoint's own table"
    );
}

#[test]
fn residency_and_row_access_change_no_score() {
    let dir = Dir::new();
    let model = converted(&dir);
    let score = |options: &str| dir.report(&model, &text(), &format!("{PROTOCOL} {options}"));
    let device = score("");
    let options = &device["execution"]["options"];
    assert_eq!(options["expert_arithmetic"], "exact integers, 16-bit activations");
    assert_eq!(options["expert_residency"], "device");
    assert_eq!(options["ngram_access"], "disk, mmap");
    for (options, setting, value) in [
        (
            "--expert-residency host --expert-cache-mib 0",
            "expert_residency",
            "host",
        ),
        ("--expert-residency disk", "expert_residency", "disk"),
        ("--ngram-residency ram", "ngram_access", "ram"),
        (
            "--ngram-io buffered --ngram-io-depth 3",
            "ngram_access",
            "disk, buffered, 3 reads in flight",
        ),
    ] {
        let report = score(options);
        assert_eq!(window_nlls(&report), window_nlls(&device), "{options}");
        assert_eq!(report["execution"]["options"][setting], value, "{options}");
        let noted = report["notes"]
            .as_array()
            .unwrap()
            .iter()
            .any(|note| note.as_str().unwrap().starts_with("expert cache: "));
        assert_eq!(noted, options.contains("expert"), "{options}");
    }
}

#[test]
fn a_missing_or_foreign_volume_is_refused_before_scoring() {
    let dir = Dir::new();
    let model = converted(&dir);
    let volume = Path::new(&format!("{}.ngram", model.display())).to_owned();
    let elsewhere = dir.path("elsewhere.ngram");
    let usual = dir.report(&model, &text(), PROTOCOL);
    std::fs::rename(&volume, &elsewhere).unwrap();
    let refused = |options: &str, words: &str| {
        let run = dir.score(&model, &text(), &format!("{PROTOCOL} {options}"));
        assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{options}: {}", run.stderr);
        assert!(run.stderr.contains(words), "{options}: {}", run.stderr);
    };
    refused("", "model.ninfer.ngram does not exist");
    let moved = dir.report(
        &model,
        &text(),
        &format!("{PROTOCOL} --ngram-volume {}", elsewhere.display()),
    );
    assert_eq!(window_nlls(&moved), window_nlls(&usual));

    let mut bytes = std::fs::read(&elsewhere).unwrap();
    bytes[44] ^= 1;
    let foreign = dir.file("foreign.ngram", bytes);
    refused(
        &format!("--ngram-volume {}", foreign.display()),
        "volume_id of the n-gram volume is",
    );
    refused(
        &format!("--ngram-volume {} --expert-a4-activations", elsewhere.display()),
        "need packed experts with input scales",
    );

    let without = dir.report(&model, &text(), &format!("{PROTOCOL} --no-ngram-table"));
    assert_ne!(window_nlls(&without), window_nlls(&usual));
    assert_eq!(without["execution"]["options"]["no_ngram_table"], true);
    let notes = without["notes"].to_string();
    assert!(notes.contains("scored without n-grams"), "{notes}");
}
