//! KV-cache codecs on the demo model, whose attention blocks are layers 3 and 7 with one KV head of 256 values.

use serde_json::Value;

use crate::common::{Dir, demo_artifact, number, repository, window_nlls};

/// One window over a beginning of prose.
const PROTOCOL: &str = "--context 512 --stride 256 --log-level error";

/// A short beginning of a demo text.
fn text(dir: &Dir) -> std::path::PathBuf {
    let whole = std::fs::read(repository("eval/corpora/open-1m/data/demo/english_long_form.txt")).unwrap();
    dir.file("a.txt", &whole[..1500])
}

/// The divergence of a run with `options` from one with `reference` options, and its report.
fn divergences(reference: &str, all: &[&str]) -> Vec<(f64, Value)> {
    let dir = Dir::new();
    let text = text(&dir);
    let file = dir.path("reference.bin");
    let file = file.display();
    dir.report(
        &demo_artifact(),
        &text,
        &format!("{PROTOCOL} {reference} --save-top-tokens {file}"),
    );
    let compared = |options: &&str| {
        let report = dir.report(
            &demo_artifact(),
            &text,
            &format!("{PROTOCOL} {options} --kl-reference {file}"),
        );
        (number(&report, "/kl_divergence/mean_kl"), report)
    };
    all.iter().map(compared).collect()
}

#[test]
fn a_coarser_codec_is_farther_from_bf16() {
    let runs = divergences(
        "",
        &["--kv-dtype bf16", "--kv-dtype int8", "--kv-dtype vq2 --kv-window off"],
    );
    let [bf16, int8, vq2] = [runs[0].0, runs[1].0, runs[2].0];
    assert_eq!(bf16, 0.0);
    assert!(0.0 < int8 && int8 < vq2, "int8 {int8:e}, vq2 {vq2:e}");
    let execution = |run: usize, field: &str| runs[run].1["execution"][field].clone();
    assert_eq!(execution(1, "kv_dtype"), "int8-g64");
    assert_eq!(execution(1, "kv_dtype_requested"), "int8");
    // Two layers, K and V: 256 codes and four FP16 scales; 256 values in 64-byte codes and a row scale of FP16.
    let rows = [(0, 2.0 * 2.0 * 512.0), (1, 2.0 * 2.0 * 264.0), (2, 2.0 * 2.0 * 66.0)];
    for (run, per_token) in rows {
        let report = &runs[run].1;
        assert_eq!(number(report, "/execution/kv_bytes_per_token"), per_token);
        let fed = number(report, "/streams/0/input_tokens") - 1.0;
        assert_eq!(number(report, "/execution/kv_bytes_total"), per_token * fed);
    }
    assert_eq!(
        [0, 1, 2].map(|run| execution(run, "kv_window")),
        [Value::Null, Value::Null, false.into()]
    );
    // A checkpoint's own cache scales are never used, and the report says where they came from instead.
    assert_eq!(execution(0, "kv_scales_source"), Value::Null);
    assert_eq!(execution(1, "kv_scales_source"), "computed from the stored rows");
    assert_eq!(execution(0, "kv_emulation"), Value::Null);
    assert_eq!(execution(1, "kv_emulation"), "format");
    assert_eq!(runs[1].1["kl_divergence"]["reference_provenance"]["kv_dtype"], "bf16");
}

#[test]
fn bf16_with_and_without_the_option_is_the_same_bits() {
    let dir = Dir::new();
    let text = text(&dir);
    let nlls = |options: &str| window_nlls(&dir.report(&demo_artifact(), &text, &format!("{PROTOCOL} {options}")));
    let plain = nlls("");
    assert_eq!(plain, nlls("--kv-dtype bf16"));
    // The same rows through a codec: a layer table keeps the codec in place.
    assert_eq!(plain, nlls("--kv-dtype bf16;3=bf16"));
    assert_ne!(plain, nlls("--kv-dtype bf16;3=int8"));
}

#[test]
fn the_exact_window_of_vq2_covers_a_short_text() {
    let runs = divergences("--kv-dtype vq2 --kv-window off", &["--kv-dtype vq2"]);
    assert!(runs[0].0 > 0.0, "the switch does nothing");
    assert_eq!(runs[0].1["execution"]["kv_window"], true);
    let provenance = &runs[0].1["kl_divergence"]["reference_provenance"];
    assert_eq!(provenance["kv_dtype"], "vq2, window off");
}

#[test]
fn kernel_options_select_the_kernel_level_and_are_recorded() {
    let runs = divergences(
        "--kv-dtype k8v4",
        &[
            "--kv-dtype k8v4 --no-prefill-8bit-pv",
            "--kv-dtype k8v4 --kv-emulation kernel",
        ],
    );
    for (run, form) in [(0, "off"), (1, "auto")] {
        let execution = &runs[run].1["execution"];
        assert_eq!(execution["kv_emulation"], "kernel");
        assert_eq!(execution["prefill_8bit_pv"], form);
        assert!(runs[run].0 > 0.0, "{form}: the kernel's roundings change nothing");
    }
    assert_ne!(runs[0].0, runs[1].0, "8-bit and FP16 P x V are the same");
}

#[test]
fn in_route_exact_a_codec_is_the_only_rounding() {
    let runs = divergences(
        "--route exact",
        &["--route exact --kv-dtype bf16", "--route exact --kv-dtype int8"],
    );
    let [bf16, int8] = [runs[0].0, runs[1].0];
    assert!(0.0 < bf16 && bf16 < int8, "bf16 {bf16:e}, int8 {int8:e}");
    assert_eq!(runs[0].1["execution"]["kv_dtype"], "bf16");
}

#[test]
fn a_cache_that_does_not_fit_the_model_is_refused_before_loading() {
    let dir = Dir::new();
    let text = text(&dir);
    let run = dir.score(
        &demo_artifact(),
        &text,
        "--context 512 --stride 256 --kv-dtype bf16;0=int8",
    );
    assert_eq!((run.code, run.stdout.as_str()), (2, ""));
    assert!(
        run.stderr
            .contains("names layer 0, which has no KV cache; layers with one: [3, 7]"),
        "{}",
        run.stderr
    );
    assert!(!run.stderr.contains("weights"), "{}", run.stderr);
    assert_eq!(dir.files(), ["a.txt"]);
}

#[test]
fn kernels_and_formats_that_nothing_would_use_are_refused() {
    let dir = Dir::new();
    let text = text(&dir);
    let int8 = "--kv-dtype int8 --use-original-int8-prefill-kernel";
    let nvfp4 = "--kv-dtype nvfp4 --use-original-nvfp4-prefill-kernel";
    for (options, words) in [
        (format!("{int8} --fast-prefill-kernel"), "cannot be used with"),
        (format!("{int8} --prefill-8bit-pv"), "cannot be used with"),
        (format!("{nvfp4} --prefill-8bit-pv"), "cannot be used with"),
        // Both layers that have a cache are named.
        ("--kv-dtype vq2;3=bf16;7=int8".into(), "`vq2` is for no layer"),
    ] {
        let run = dir.score(&demo_artifact(), &text, &options);
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{options}: {}", run.stderr);
        assert!(run.stderr.contains(words), "{options}: {}", run.stderr);
    }
    assert_eq!(dir.files(), ["a.txt"]);
}
