//! The demo against Hugging Face transformers: `tests/data/golden/golden.json`, made by `scripts/golden_demo.py`.

use serde_json::Value;

use crate::common::{Dir, demo_artifact, number, read_report, repository};

fn golden() -> Value {
    serde_json::from_slice(&std::fs::read(repository("tests/data/golden/golden.json")).unwrap()).unwrap()
}

/// Runs the demo as its user does, from the repository; the report goes elsewhere.
fn demo(options: &[&str]) -> Value {
    let dir = Dir::new();
    let out = dir.path("out");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_burn-perplexity"))
        .args(["--output", out.to_str().unwrap()])
        .args(options)
        .current_dir(repository("docs"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    read_report(&out)
}

/// Compares every stream's perplexity with the golden `figure`, relatively.
fn compare(report: &Value, figure: &str, tolerance: f64) {
    let golden = golden();
    assert_eq!(
        number(report, "/execution/context_tokens"),
        golden["context"].as_f64().unwrap()
    );
    assert_eq!(
        number(report, "/execution/stride_tokens"),
        golden["stride"].as_f64().unwrap()
    );
    assert_eq!(
        number(report, "/denominators/softmax_rows"),
        golden["valid_rows"].as_f64().unwrap()
    );
    let expected = golden["streams"].as_array().unwrap();
    let streams = report["streams"].as_array().unwrap();
    assert_eq!(streams.len(), expected.len());
    for (stream, expected) in streams.iter().zip(expected) {
        // The golden ids are those of the quick streams, whose first 12,000 bytes the demo streams are.
        let id = expected["id"].as_str().unwrap().trim_end_matches("-00");
        assert_eq!(stream["id"], format!("demo-{id}"));
        assert_eq!(stream["input_tokens"], expected["tokens"], "{id}");
        assert_eq!(
            stream["windows"].as_array().unwrap().len() as u64,
            expected["windows"].as_u64().unwrap(),
            "{id}"
        );
        let (found, wanted) = (number(stream, "/perplexity"), expected[figure].as_f64().unwrap());
        let error = (found - wanted).abs() / wanted;
        assert!(
            error <= tolerance,
            "{id}: {found} against {wanted}, relative {error:e} > {tolerance:e}"
        );
    }
}

#[test]
fn exact_on_flex_equals_float32_transformers() {
    compare(&demo(&["--route", "exact", "--device", "flex"]), "f32_ppl", 1e-5);
}

#[test]
fn exact_on_ndarray_equals_float32_transformers() {
    compare(&demo(&["--route", "exact", "--device", "ndarray"]), "f32_ppl", 1e-5);
}

#[test]
fn normal_is_near_bf16_transformers() {
    compare(&demo(&["--device", "flex"]), "bf16_ppl", 3e-3);
}

#[test]
fn passes_do_not_change_the_exact_result() {
    let text = repository("eval/corpora/open-1m/data/demo/rust_code.txt");
    let dir = Dir::new();
    let total = |chunk: usize| {
        let options = format!("--context 1024 --stride 512 --chunks 2 --route exact --prefill-chunk {chunk}");
        number(&dir.report(&demo_artifact(), &text, &options), "/overall/total_nll")
    };
    let whole = total(1024);
    for chunk in [128, 256] {
        let split = total(chunk);
        assert!(
            (split - whole).abs() <= 1e-6 * whole,
            "passes of {chunk}: {split} against {whole}"
        );
    }
}
