//! Whole distributions on the real binary: llama.cpp logit bases and hidden states.

use serde_json::Value;

use crate::common::{Dir, demo_artifact, number, repository};

/// A beginning of prose, in the windows of the test.
fn text(dir: &Dir, bytes: usize) -> std::path::PathBuf {
    let whole = std::fs::read(repository("eval/corpora/open-1m/data/demo/english_long_form.txt")).unwrap();
    dir.file("a.txt", &whole[..bytes])
}

fn report(dir: &Dir, options: &str) -> Value {
    dir.report(
        &demo_artifact(),
        &dir.path("a.txt"),
        &format!("--log-level error {options}"),
    )
}

/// Whole rows and reduced ones are summed in another order, which shows in the last digits of a float32.
fn same_nll(a: &Value, b: &Value) {
    let [a, b] = [a, b].map(|report| number(report, "/overall/total_nll"));
    assert_eq!(a, b);
}

/// The mean divergence of every window.
fn window_kls(report: &Value) -> Vec<f64> {
    let windows = report["streams"][0]["windows"].as_array().unwrap();
    windows
        .iter()
        .map(|window| number(window, "/kl_divergence/mean_kl"))
        .collect()
}

/// A logit base read as its format says, by nothing of the program: context, and per scored position the probabilities.
fn read_base(bytes: &[u8]) -> (usize, Vec<u32>, Vec<Vec<f64>>) {
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!(&bytes[..8], b"_logits_");
    let [context, vocabulary, chunks] = [8, 12, 16].map(|at| word(at) as usize);
    let tokens: Vec<u32> = (0..context * chunks).map(|i| word(20 + 4 * i)).collect();
    let row_bytes = 2 * (2 * vocabulary.div_ceil(2) + 4);
    let rows = bytes[20 + 4 * tokens.len()..].chunks(row_bytes).map(|row| {
        let float = |at: usize| f64::from(f32::from_le_bytes(row[at..at + 4].try_into().unwrap()));
        let (scale, least) = (float(0), float(4));
        let codes = row[8..].chunks_exact(2).take(vocabulary);
        let log = |code: &[u8]| least + scale * f64::from(u16::from_le_bytes(code.try_into().unwrap()));
        codes.map(|code| log(code).exp()).collect()
    });
    let rows: Vec<Vec<f64>> = rows.collect();
    assert_eq!(rows.len(), chunks * (context - 1 - context / 2));
    (context, tokens, rows)
}

#[test]
fn a_logit_base_is_written_for_other_readers_and_read_back() {
    let dir = Dir::new();
    text(&dir, 900);
    let protocol = "--context 64 --llama-chunks";
    let plain = report(&dir, protocol);
    let base = dir.path("base");
    let saved = report(&dir, &format!("{protocol} --save-logits {}", base.display()));
    same_nll(&saved, &plain);
    let (context, tokens, rows) = read_base(&std::fs::read(&base).unwrap());
    assert_eq!((context, rows[0].len()), (64, 8195));
    // Row by row the probabilities add up to one, and those of the targets to the run's own likelihood.
    let mut nll = 0.0;
    for (r, row) in rows.iter().enumerate() {
        let mass: f64 = row.iter().sum();
        assert!((mass - 1.0).abs() < 2e-3, "row {r} adds up to {mass}");
        // Of each chunk, the tokens from the second half's second on.
        let target = tokens[r / 31 * 64 + 33 + r % 31];
        nll -= row[target as usize].ln();
    }
    let expected = number(&plain, "/overall/total_nll");
    assert!((nll - expected).abs() < 1e-3 * rows.len() as f64, "{nll} {expected}");

    let own = report(&dir, &format!("{protocol} --kl-base {}", base.display()));
    let of_codes = number(&own, "/kl_divergence/mean_kl").abs();
    // Half a code: they are 16 nats in 65,535 steps.
    assert!(of_codes < 16.0 / 65_535.0 / 2.0, "{}", own["kl_divergence"]);
    assert!(own["kl_divergence"]["mean_reverse_kl"].is_null());
    same_nll(&own, &plain);
    assert_eq!(number(&own, "/kl_divergence/top1_agreement"), 1.0);
    assert_eq!(own["kl_divergence"]["reference_kind"], "logit-base");
    let int8 = report(
        &dir,
        &format!("{protocol} --kv-dtype int8 --kl-base {}", base.display()),
    );
    assert!(number(&int8, "/kl_divergence/mean_kl") > of_codes);
    let other = dir.score(
        &demo_artifact(),
        &dir.path("a.txt"),
        &format!("--context 32 --llama-chunks --kl-base {}", base.display()),
    );
    assert_eq!((other.code, other.stdout.as_str()), (1, ""));
    assert!(
        other.stderr.contains("written for context 64, this run has 32") && !other.stderr.contains("weights"),
        "{}",
        other.stderr
    );
}

#[test]
fn a_logit_base_holds_the_one_stream_of_a_corpus_as_well() {
    let dir = Dir::new();
    text(&dir, 900);
    let stream = |id: &str| format!(r#"{{"id":"{id}","domain":"d","path":"a.txt"}}"#);
    let modes = r#"{"quick":["a"],"full":["a","b"]}"#;
    let manifest = format!(
        r#"{{"corpus_id":"c","streams":[{},{}],"modes":{modes}}}"#,
        stream("a"),
        stream("b")
    );
    dir.file("m.json", manifest);
    let model = demo_artifact();
    let line = "--log-level error --context 64 --llama-chunks";
    let score = |further: &str| {
        let args = std::iter::once(model.to_str().unwrap()).chain(line.split(' '));
        dir.run(args.chain(further.split(' ')))
    };
    for further in [
        "--corpus m.json --quick --save-logits base --output o",
        "--text a.txt --save-logits alone",
    ] {
        let run = score(further);
        assert_eq!(run.code, 0, "{}", run.stderr);
    }
    let [base, alone] = ["base", "alone"].map(|name| std::fs::read(dir.path(name)).unwrap());
    assert!(base == alone, "the same text gives the same base");
    let run = score("--corpus m.json --save-logits two --output p");
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(run.stderr.contains("holds one stream"), "{}", run.stderr);
}

#[test]
fn hidden_states_of_a_model_against_itself_give_exactly_zero_in_every_route() {
    let dir = Dir::new();
    text(&dir, 600);
    for (route, precision, bytes) in [("normal", "bf16", 2.0), ("exact", "f32", 4.0)] {
        let file = dir.path(route);
        let protocol = format!("--context 64 --stride 32 --batch 3 --route {route}");
        let saved = report(&dir, &format!("{protocol} --save-hidden {}", file.display()));
        assert_eq!(saved["hidden_states"]["precision"], precision);
        let positions = number(&saved, "/overall/scored_tokens");
        let length = std::fs::metadata(&file).unwrap().len() as f64;
        assert!(length > positions * (4.0 + 256.0 * bytes) && length < positions * (4.0 + 256.0 * bytes) * 1.1);
        let own = report(&dir, &format!("{protocol} --kl-hidden {}", file.display()));
        for field in ["mean_kl", "max_kl", "mean_reverse_kl", "mean_delta_nll"] {
            assert_eq!(number(&own, &format!("/kl_divergence/{field}")), 0.0, "{route} {field}");
        }
        assert_eq!(number(&own, "/kl_divergence/top1_agreement"), 1.0);
        same_nll(&own, &saved);
        assert!(number(&own, "/kl_divergence/reference_head_error") < 1e-5);
        assert_eq!(own["kl_divergence"]["reference_provenance"]["route"], route);
    }
    // Of another route the states have their own logits: what both runs reported, and nothing of the head's rounding.
    let [exact, normal] =
        ["exact", "normal"].map(|route| report(&dir, &format!("--context 64 --stride 32 --route {route}")));
    for (of, run, name) in [("exact", &normal, "normal"), ("normal", &exact, "exact")] {
        let options = format!(
            "--context 64 --stride 32 --route {name} --kl-hidden {}",
            dir.path(of).display()
        );
        let compared = report(&dir, &options);
        same_nll(&compared, run);
        let reference = if of == "exact" { &exact } else { &normal };
        let nll = |report: &Value| number(report, "/overall/mean_nll");
        let kl = |field: &str| number(&compared, &format!("/kl_divergence/{field}"));
        assert!(
            (kl("mean_delta_nll") - (nll(run) - nll(reference))).abs() < 1e-6,
            "{of} {name}"
        );
        assert!((kl("reference_mean_nll") - nll(reference)).abs() < 1e-6, "{of} {name}");
        assert!(
            kl("reference_head_error") < 1e-5,
            "{of} {name}: {}",
            kl("reference_head_error")
        );
    }
    // What the log says of the size comes before the weights are read.
    let run = dir.score(
        &demo_artifact(),
        &dir.path("a.txt"),
        &format!("--save-hidden {} --output sized", dir.path("again").display()),
    );
    let (size, loading) = (run.stderr.find("hidden states | "), run.stderr.find("loading weights"));
    assert!(size.is_some() && size < loading, "{}", run.stderr);
}

#[test]
fn the_exact_divergence_is_never_below_the_bound_of_64_tokens() {
    let dir = Dir::new();
    text(&dir, 300);
    // With a stride of 1 every window but the first scores one position.
    let protocol = "--context 24 --stride 1 --batch 16";
    let (top, states) = (dir.path("top"), dir.path("states"));
    report(&dir, &format!("{protocol} --save-top-tokens {}", top.display()));
    report(&dir, &format!("{protocol} --save-hidden {}", states.display()));
    let run = format!("{protocol} --kv-dtype k4v2 --kv-window off");
    let bound = report(&dir, &format!("{run} --kl-reference {}", top.display()));
    let exact = report(&dir, &format!("{run} --kl-hidden {}", states.display()));
    let (bounds, exacts) = (window_kls(&bound), window_kls(&exact));
    assert!(bounds.len() > 50);
    for (window, (bound, exact)) in bounds.iter().zip(&exacts).enumerate() {
        assert!(*bound <= exact + 1e-6, "window {window}: {bound} > {exact}");
    }
    let mean = |report: &Value| number(report, "/kl_divergence/mean_kl");
    assert!(mean(&exact) > mean(&bound) && mean(&bound) > 0.0);
    assert!(number(&exact, "/kl_divergence/mean_reverse_kl") > 0.0);
    assert_eq!(number(&exact, "/kl_divergence/mean_reference_top_mass"), 1.0);
}

/// Most memory that a run held, in bytes.
#[cfg(target_os = "linux")]
fn peak(dir: &Dir, options: &str) -> u64 {
    let out = dir.path(&format!("peak-{}", dir.files().len()));
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_burn-perplexity"))
        .arg(demo_artifact())
        .args(["--text", "a.txt", "--log-level", "off", "--threads", "1", "--output"])
        .arg(out)
        .args(options.split_whitespace())
        .current_dir(dir.path(""))
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut most = 0;
    while child.try_wait().unwrap().is_none() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
        most = most.max(kilobytes.unwrap_or(0) * 1024);
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(child.wait().unwrap().success());
    most
}

#[cfg(target_os = "linux")]
#[test]
fn memory_does_not_grow_with_context_times_vocabulary() {
    let dir = Dir::new();
    let once = std::fs::read(text(&dir, 12_000)).unwrap();
    dir.file("a.txt", once.repeat(2));
    let base = |context: usize| {
        let options = format!("--context {context} --llama-chunks --chunks 1 --prefill-chunk 128");
        peak(&dir, &format!("{options} --save-logits base-{context}"))
    };
    let (short, long) = (base(256), base(2048));
    // What a window of 2,048 tokens would need more, if its 1,023 rows of 8,320 float32 were held; the KV cache needs 7 MB more.
    let rows = (1023 - 127) * 8320 * 4;
    assert!(
        long < short + rows * 2 / 3,
        "{short} bytes at 256 tokens, {long} at 2,048"
    );
}
