//! Output directories, the table, the report and the log.

use crate::common::{Dir, byte_model, demo_artifact, demo_checkpoint, number, read_report};

const TEXT: &str = "the quick brown fox jumps over the lazy dog";

#[test]
fn the_report_goes_into_a_new_or_an_empty_directory_alone() {
    let dir = Dir::new();
    let text = dir.file("a.txt", TEXT);
    std::fs::create_dir(dir.path("empty")).unwrap();
    for out in ["empty", "new/nested"] {
        let run = dir.score(&byte_model(), &text, &format!("--output {out}"));
        assert_eq!(run.code, 0, "{}", run.stderr);
        let files: Vec<_> = dir.files().into_iter().filter(|f| f.starts_with(out)).collect();
        assert_eq!(files, [format!("{out}/report.json")]);
    }
    let again = dir.score(&byte_model(), &text, "--output empty");
    assert_eq!((again.code, again.stdout.as_str()), (2, ""));
    assert!(again.stderr.contains("is not empty"), "{}", again.stderr);
}

#[test]
fn without_output_a_directory_is_named_after_the_run() {
    let dir = Dir::new();
    let run = dir.score(&byte_model(), &dir.file("my notes.txt", TEXT), "");
    assert_eq!(run.code, 0, "{}", run.stderr);
    let files = dir.files();
    let report = files.iter().find(|name| name.ends_with("report.json")).unwrap();
    let parts: Vec<&str> = report.split('/').collect();
    assert_eq!(
        (parts.len(), &parts[..2], parts[2]),
        (9, &["profiles", "perplexity"][..], "dense"),
        "{report}"
    );
    assert_eq!(parts[3].len(), 64, "the prefill signature");
    assert_eq!(&parts[4..7], ["bf16", "custom-my-notes.txt", "custom"]);
    assert!(run.stdout.contains(report), "{}", run.stdout);
}

#[test]
fn the_table_goes_to_stdout_and_the_log_to_stderr() {
    let dir = Dir::new();
    let run = dir.score(
        &byte_model(),
        &dir.file("a.txt", TEXT),
        "--output out --context 16 --stride 8",
    );
    let report = read_report(&dir.path("out"));
    let lines: Vec<&str> = run.stdout.lines().collect();
    assert_eq!(lines[..2], ["Perplexity result", "artifact: dense"]);
    assert_eq!(
        lines[2],
        "kv: bf16, corpus: custom-a.txt / custom, context/stride: 16/8"
    );
    let (mean, perplexity) = (
        number(&report, "/overall/mean_nll"),
        number(&report, "/overall/perplexity"),
    );
    for name in ["custom", "overall"] {
        let row = format!("{name:<24}{:>16}{mean:>16.6}{perplexity:>16.6}", TEXT.len() - 1);
        assert!(lines.contains(&row.as_str()), "{row}\n{}", run.stdout);
    }
    assert!(
        run.stderr
            .contains("corpus ready | 1 streams | 43 input tokens | 42 scored tokens"),
        "{}",
        run.stderr
    );
    assert!(
        run.stderr.contains("[1/1] a.txt | 42 scored tokens | PPL "),
        "{}",
        run.stderr
    );
    assert!(
        run.stderr.contains("scoring complete | 42 tokens | 5 windows | PPL "),
        "{}",
        run.stderr
    );
    assert!(
        !run.stderr.contains('\r') && !run.stderr.contains('\x1b'),
        "a redirected log is plain text"
    );
}

#[test]
fn log_levels_select_records() {
    let dir = Dir::new();
    let text = dir.file("a.txt", TEXT);
    let log = |level: &str| {
        dir.score(
            &byte_model(),
            &text,
            &format!("--output out-{level} --log-level {level}"),
        )
        .stderr
    };
    // The folder holds a safetensors file of golden values beside the weights, which is said.
    let warnings = log("warning");
    assert!(
        warnings.starts_with("warning: ") && warnings.lines().count() == 1,
        "{warnings}"
    );
    assert_eq!(log("warn"), warnings);
    assert_eq!(log("off"), "");
    let (info, debug) = (log("info"), log("debug"));
    assert!(!info.contains("debug: ") && debug.contains("debug: "), "{debug}");
}

#[test]
fn the_report_records_what_was_run() {
    let dir = Dir::new();
    let text = dir.file("a.txt", TEXT);
    let report = dir.report(
        &byte_model(),
        &text,
        "--context 16 --stride 8 --route exact --device ndarray --batch 2",
    );
    assert_eq!(report["artifact"]["architecture"], "Qwen3_5ForCausalLM");
    assert_eq!(report["artifact"]["name"], "dense");
    assert_eq!(report["artifact"]["formats"], serde_json::json!(["bf16"]));
    assert_eq!(report["corpus"]["id"], "custom-a.txt");
    let execution = &report["execution"];
    assert_eq!(execution["route"], "exact");
    assert_eq!(execution["backend"], "ndarray");
    // Nothing is rounded, so there is no cache format.
    assert_eq!(execution["kv_dtype"], "fp32");
    assert_eq!(number(&report, "/execution/prefill_chunk_tokens"), 1024.0);
    assert_eq!(number(&report, "/execution/batch_windows"), 2.0);
    // 507 ids, 512 rows.
    assert_eq!(number(&report, "/denominators/softmax_rows"), 507.0);
    assert!(report["command_line"].as_array().unwrap().contains(&"--batch".into()));
}

#[test]
fn the_header_hash_covers_what_a_model_declares() {
    use sha2::{Digest, Sha256};
    let dir = Dir::new();
    let text = dir.file("a.txt", TEXT);
    let read = |path: std::path::PathBuf| std::fs::read(path).unwrap();
    let length = |bytes: &[u8]| u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let found = |model: &std::path::Path| dir.report(model, &text, "")["artifact"]["header_sha256"].clone();
    // Magic, directory length, id; the directory.
    let artifact = read(demo_artifact());
    let declared = &artifact[..32 + length(&artifact[8..])];
    assert_eq!(found(&demo_artifact()), format!("{:x}", Sha256::digest(declared)));
    // The configuration and the index.
    let declared = ["config.json", "model.safetensors.index.json"].map(|name| read(demo_checkpoint().join(name)));
    assert_eq!(
        found(&demo_checkpoint()),
        format!("{:x}", Sha256::digest(declared.concat()))
    );
    // The configuration; length field and header of the only weight file.
    let weights = read(byte_model().join("model.safetensors"));
    let declared = [
        read(byte_model().join("config.json")),
        weights[..8 + length(&weights)].to_vec(),
    ]
    .concat();
    assert_eq!(found(&byte_model()), format!("{:x}", Sha256::digest(declared)));
}

#[test]
fn the_gate_accepts_equal_bits_and_wants_a_reference_otherwise() {
    let dir = Dir::new();
    let text = dir.file("a.txt", TEXT);
    let score = |route: &str| {
        let options = format!("--context 16 --stride 8 --log-level error --route {route} --output {route}");
        assert_eq!(dir.score(&byte_model(), &text, &options).code, 0);
        format!("{route}/report.json")
    };
    let (exact, normal) = (score("exact"), score("normal"));
    let run = dir.run(["gate", &exact, &exact]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stdout.starts_with("accept: "), "{}", run.stdout);
    let run = dir.run(["gate", &exact, &normal]);
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(run.stderr.starts_with("error: "), "{}", run.stderr);
}

#[test]
fn the_gate_accepts_nothing_on_no_evidence() {
    let dir = Dir::new();
    let text = dir.file("a.txt", TEXT);
    let protocol = "--context 16 --stride 8 --log-level error";
    let saved = dir.score(
        &byte_model(),
        &text,
        &format!("{protocol} --save-top-tokens ref --output saved"),
    );
    assert_eq!(saved.code, 0, "{}", saved.stderr);
    let empty = dir.score(
        &byte_model(),
        &text,
        &format!("{protocol} --kl-reference ref --shard 5/6 --output empty"),
    );
    assert_eq!(empty.code, 0, "{}", empty.stderr);
    assert!(
        empty
            .stdout
            .contains("\nKL divergence from reference: no position was compared\n"),
        "{}",
        empty.stdout
    );
    assert!(
        !empty.stdout.contains("agreement") && !empty.stdout.contains("RMS"),
        "{}",
        empty.stdout
    );
    let run = dir.run(["gate", "empty/report.json", "empty/report.json"]);
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    let words = "error: inconclusive, more data is needed: the reports hold no scored token";
    assert!(run.stderr.starts_with(words), "{}", run.stderr);
    let run = dir.run(["compare", "empty/report.json", "empty/report.json"]);
    assert!(run.code == 0 && !run.stdout.contains("every window has"), "{run:?}");
}

#[test]
fn commands_that_read_reports_check_them_alike() {
    let dir = Dir::new();
    let text = dir.file("a.txt", TEXT);
    dir.report(
        &byte_model(),
        &text,
        &format!(
            "--context 16 --stride 8 --save-top-tokens {}",
            dir.path("ref").display()
        ),
    );
    let kl = format!("--context 16 --stride 8 --kl-reference {}", dir.path("ref").display());
    let good = dir.report(&byte_model(), &text, &kl);
    dir.file("good.json", good.to_string());
    for (place, field, value) in [
        ("", "schema_version", serde_json::json!(7)),
        ("/overall", "scored_tokens", serde_json::json!(43)),
        ("/overall", "perplexity", serde_json::json!(2.0)),
        ("/streams/0/windows/1", "input_end", serde_json::json!(25)),
        ("/streams/0/windows/1", "first_target", serde_json::json!(7)),
        ("/streams/0/windows/1", "mean_nll", serde_json::json!(0.0)),
        ("/kl_divergence", "positions", serde_json::json!(41)),
    ] {
        let mut bad = good.clone();
        bad.pointer_mut(place).unwrap()[field] = value;
        dir.file("bad.json", bad.to_string());
        for line in [
            "compare bad.json good.json",
            "compare good.json bad.json",
            "gate good.json bad.json",
            "merge bad.json --output merged",
        ] {
            let run = dir.run(line.split(' '));
            assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{line} {place}/{field}");
            let named = run.stderr.contains("bad.json: `") && run.stderr.contains(&format!("{field}` is "));
            assert!(named, "{line}: {}", run.stderr);
        }
    }
    for line in [
        "compare good.json good.json",
        "gate good.json good.json",
        "merge good.json --output merged",
    ] {
        let run = dir.run(line.split(' '));
        assert_eq!(run.code, 0, "{line}: {}", run.stderr);
    }
}

#[test]
fn two_runs_differ_in_time_only() {
    let dir = Dir::new();
    let text = dir.file("a.txt", TEXT);
    let run = || dir.report(&byte_model(), &text, "--context 16 --stride 8");
    assert_eq!(crate::common::window_nlls(&run()), crate::common::window_nlls(&run()));
}

#[test]
fn a_reader_that_stops_early_is_no_failure() {
    use std::process::{Command, Stdio};
    let dir = Dir::new();
    let mut child = Command::new(env!("CARGO_BIN_EXE_burn-perplexity"))
        .arg(byte_model())
        .args(["--text".as_ref(), dir.file("a.txt", TEXT).as_os_str()])
        .args(["--log-level", "error"])
        .current_dir(dir.path(""))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        (output.status.code(), String::from_utf8(output.stderr).unwrap()),
        (Some(0), String::new())
    );
}

#[test]
fn compare_pairs_two_reports_and_refuses_other_texts() {
    let dir = Dir::new();
    let score = |name: &str, text: &str, route: &str| {
        let options = format!("--context 16 --stride 8 --route {route} --output {name}");
        let run = dir.score(&byte_model(), &dir.file(&format!("text-{name}/a.txt"), text), &options);
        assert_eq!(run.code, 0, "{}", run.stderr);
        format!("{name}/report.json")
    };
    let normal = score("normal", TEXT, "normal");
    let exact = score("exact", TEXT, "exact");
    let run = dir.run(["compare", &normal, &exact]);
    assert!(
        run.code == 0 && run.stdout.contains("execution.route: \"normal\" -> \"exact\""),
        "{run:?}"
    );
    let run = dir.run(["compare", "--json", &normal, &exact]);
    let json: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    let difference = number(&read_report(&dir.path("exact")), "/overall/mean_nll")
        - number(&read_report(&dir.path("normal")), "/overall/mean_nll");
    assert!((number(&json, "/mean_nll/difference") - difference).abs() < 1e-12);
    let other = score("other", &TEXT.to_uppercase(), "normal");
    let refused = dir.run(["compare", &normal, &other]);
    assert_eq!((refused.code, refused.stdout.as_str()), (1, ""));
}

#[test]
fn a_run_compared_with_itself_has_no_divergence() {
    let dir = Dir::new();
    let text = dir.file("a.txt", TEXT);
    let protocol = "--context 16 --stride 8";
    dir.report(
        &byte_model(),
        &text,
        &format!("{protocol} --save-top-tokens {}", dir.path("ref.bin").display()),
    );
    let same = dir.report(
        &byte_model(),
        &text,
        &format!("{protocol} --kl-reference {}", dir.path("ref.bin").display()),
    );
    assert_eq!(number(&same, "/kl_divergence/mean_kl"), 0.0);
    assert_eq!(number(&same, "/kl_divergence/max_kl"), 0.0);
    assert_eq!(number(&same, "/kl_divergence/top1_agreement"), 1.0);
    let reference = dir.path("ref.bin");
    let other = dir.score(
        &byte_model(),
        &text,
        &format!("--context 16 --stride 4 --kl-reference {}", reference.display()),
    );
    assert_eq!((other.code, other.stdout.as_str()), (1, ""));
    assert!(other.stderr.contains("stride"), "{}", other.stderr);
}
