//! The numerical routes on the real binary: what they promise and what the report says of them.

use serde_json::Value;

use crate::common::{Dir, demo_artifact, number, repository};

/// A report of the first windows of a text, with what differs from run to run and what the run was told of its pass and
/// batch taken out, as it would be written.
fn figures(options: &str) -> String {
    let text = repository("eval/corpora/open-1m/data/demo/rust_code.txt");
    let options = format!("--context 384 --stride 192 --chunks 3 --log-level error {options}");
    let mut report = Dir::new().report(&demo_artifact(), &text, &options);
    let mut drop = |pointer: &str, fields: &[&str]| {
        let object = report.pointer_mut(pointer).unwrap().as_object_mut().unwrap();
        for field in fields {
            assert!(object.remove(*field).is_some(), "{pointer}/{field}");
        }
    };
    drop("", &["timing", "command_line"]);
    drop(
        "/execution",
        &["batch_windows", "prefill_chunk_tokens", "score_tile_tokens"],
    );
    drop("/execution/options", &["prefill-chunk"]);
    drop("/streams/0", &["seconds"]);
    for window in 0..3 {
        drop(&format!("/streams/0/windows/{window}"), &["seconds"]);
    }
    serde_json::to_string_pretty(&report).unwrap()
}

#[test]
fn a_reproducible_report_is_the_same_for_every_pass_batch_and_thread_count() {
    for kv in ["", "--kv-dtype vq2"] {
        let run = |options: &str| figures(&format!("--reproducible {kv} {options}"));
        let whole = run("--prefill-chunk 384 --batch 1 --threads 1");
        assert!(
            whole.contains("\"reproducible\": true") && whole.contains("\"total_nll\""),
            "{whole}"
        );
        for options in [
            "--prefill-chunk 128 --batch 1 --threads 2",
            "--prefill-chunk 256 --batch 3 --threads 1",
            "--prefill-chunk 384 --batch 3 --threads 2 --device ndarray",
        ] {
            let other = run(options).replace("\"backend\": \"ndarray\"", "\"backend\": \"flex\"");
            assert!(other == whole, "{kv} {options}:\n{other}\nnot\n{whole}");
        }
    }
}

fn report(options: &str) -> Value {
    let text = repository("eval/corpora/open-1m/data/demo/english_reference.txt");
    let options = format!("--context 200 --stride 100 --chunks 2 --log-level error {options}");
    Dir::new().report(&demo_artifact(), &text, &options)
}

#[test]
fn a_report_states_route_contract_and_rows() {
    let lossless = report("--lossless");
    let execution = &lossless["execution"];
    assert_eq!(execution["route"], "lossless");
    assert_eq!(
        (&execution["lossless"], &execution["reference"]),
        (&true.into(), &false.into())
    );
    assert_eq!(execution["logits_dtype"], "f32");
    assert_eq!(execution["kv_dtype"], "bf16");
    assert_eq!(execution["prefill_chunk_tokens"], 200);
    assert_eq!(execution["numeric_contract"]["transformers"], "5.24.0");
    assert!(execution["numeric_contract"]["rounding"].is_string());
    assert_eq!(execution["options"]["softmax-rows"], "all");
    assert_eq!(number(&lossless, "/denominators/softmax_rows"), 8320.0);

    let public = report("--lossless --softmax-rows public");
    assert_eq!(public["execution"]["options"]["softmax-rows"], "public");
    assert_eq!(number(&public, "/denominators/softmax_rows"), 8195.0);
    // More rows share the same probability.
    let nll = |report: &Value| number(report, "/overall/total_nll");
    assert!(nll(&public) < nll(&lossless) && nll(&lossless) < nll(&public) * 1.001);

    let reference = report("--reference");
    assert_eq!(reference["execution"]["route"], "reference");
    assert_eq!(reference["execution"]["logits_dtype"], "bf16");
    assert_eq!(reference["execution"]["numeric_contract"].as_object().unwrap().len(), 1);
    // The same boundaries as the normal route, so nearer to it than Hugging Face's.
    let normal = report("");
    let distance = |other: &Value| (nll(other) / nll(&normal) - 1.0).abs();
    assert!(distance(&reference) < 1e-3, "{}", distance(&reference));
    assert_ne!(nll(&reference), nll(&normal));
}

#[test]
fn the_reference_applies_the_codec_and_nothing_else() {
    let nll = |options: &str| number(&report(options), "/overall/total_nll");
    let (plain, coded) = (nll("--reference"), nll("--reference --kv-dtype nvfp4"));
    let normal = nll("--kv-dtype nvfp4");
    assert!((coded / plain - 1.0).abs() > 1e-5, "{coded} {plain}");
    assert!((coded / normal - 1.0).abs() < 1e-3, "{coded} {normal}");
}
