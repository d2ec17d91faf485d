//! Runs in parts: shards that are merged, and runs that are killed and continued.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{Dir, demo_artifact, number, read_report, repository};

fn text(dir: &Dir) -> PathBuf {
    let whole = std::fs::read(repository("eval/corpora/open-1m/data/demo/english_long_form.txt")).unwrap();
    dir.file("a.txt", &whole[..1500])
}

/// The report without what every run has of its own: times, and `also`.
fn timeless(mut report: Value, also: &[&str]) -> String {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                fields.remove("seconds");
                fields.values_mut().for_each(strip);
            }
            Value::Array(items) => items.iter_mut().for_each(strip),
            _ => {}
        }
    }
    strip(&mut report);
    let fields = report.as_object_mut().unwrap();
    fields.remove("timing").expect("a report has times");
    for name in also {
        fields.remove(*name).expect("a field of the report");
    }
    serde_json::to_string_pretty(&report).unwrap()
}

#[test]
fn merged_shards_are_the_whole_run() {
    let dir = Dir::new();
    let text = text(&dir);
    let protocol = "--context 64 --stride 32 --batch 2 --kv-dtype int8 --log-level error";
    let whole = dir.report(&demo_artifact(), &text, protocol);
    assert!(number(&whole, "/denominators/windows") > 6.0);
    let mut reports = Vec::new();
    for shard in ["2/3", "0/3", "1/3"] {
        let out = format!("shard-{}", &shard[..1]);
        let run = dir.score(
            &demo_artifact(),
            &text,
            &format!("{protocol} --shard {shard} --output {out}"),
        );
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert!(
            run.stdout.contains(&format!("shard: {shard} of the windows")),
            "{}",
            run.stdout
        );
        reports.push(format!("{out}/report.json"));
    }
    let merge = |reports: &[String], out: &str| {
        let args = ["merge"].into_iter().chain(reports.iter().map(String::as_str));
        dir.run(args.chain(["--output", out]))
    };
    let run = merge(&reports, "merged");
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(
        run.stdout.starts_with("Perplexity result\n") && !run.stdout.contains("shard:"),
        "{}",
        run.stdout
    );
    let merged = read_report(&dir.path("merged"));
    assert_eq!(timeless(merged, &["command_line"]), timeless(whole, &["command_line"]));

    let run = merge(&reports[..2], "missing");
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(run.stderr.contains("3 shards are needed, each once"), "{}", run.stderr);
    let other = protocol.replace("int8", "fp8");
    let run = dir.score(&demo_artifact(), &text, &format!("{other} --shard 1/3 --output other"));
    assert_eq!(run.code, 0, "{}", run.stderr);
    reports[2] = "other/report.json".into();
    let run = merge(&reports, "differs");
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(run.stderr.contains("`execution.kv_dtype` differs"), "{}", run.stderr);
    assert!(!dir.path("missing").exists() && !dir.path("differs").exists());
}

#[test]
fn shards_without_a_window_still_merge() {
    let dir = Dir::new();
    let text = dir.file("a.txt", "the quick brown fox jumps over the lazy dog");
    let score = |shard: &str, out: &str| {
        let run = dir.score(&demo_artifact(), &text, &format!("--shard {shard} --output {out}"));
        assert_eq!(run.code, 0, "{}", run.stderr);
    };
    score("0/2", "a");
    score("1/2", "b");
    let run = dir.run(["merge", "b/report.json", "a/report.json", "--output", "c"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let mean = |name: &str| number(&read_report(&dir.path(name)), "/overall/mean_nll");
    assert_eq!(mean("c"), mean("a"));
}

/// Starts the run and kills it, as a lost machine would, once `state` holds some batches.
fn kill_in_the_middle(dir: &Dir, args: &[&str], state: &Path) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_burn-perplexity"))
        .args(args)
        .current_dir(dir.path(""))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let length = || std::fs::metadata(state).map_or(0, |found| found.len());
    let (began, mut last, mut growths) = (Instant::now(), 0, 0);
    // The header is one growth, a batch one or, across a page, two: these are two whole batches at least.
    while growths < 6 {
        assert_eq!(
            child.try_wait().unwrap(),
            None,
            "the run ended before it could be killed"
        );
        assert!(began.elapsed() < Duration::from_secs(120), "no batch was recorded");
        growths += usize::from(length() > last);
        last = length();
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success());
}

#[test]
fn a_killed_run_leaves_no_result_and_continues_to_the_same_report() {
    let dir = Dir::new();
    let (text, model) = (text(&dir), demo_artifact());
    let mut args = vec![model.to_str().unwrap(), "--text", text.to_str().unwrap()];
    args.extend("--context 32 --stride 2 --batch 1 --output out --resume state --save-top-tokens saved.bin".split(' '));
    let whole = dir.run(&args);
    assert_eq!(whole.code, 0, "{}", whole.stderr);
    assert_eq!(
        dir.files(),
        ["a.txt", "out/report.json", "saved.bin"],
        "the state goes when the run is done"
    );
    let (report, saved) = (
        read_report(&dir.path("out")),
        std::fs::read(dir.path("saved.bin")).unwrap(),
    );
    std::fs::remove_file(dir.path("out/report.json")).unwrap();
    std::fs::remove_file(dir.path("saved.bin")).unwrap();

    kill_in_the_middle(&dir, &args, &dir.path("state"));
    assert!(
        !dir.path("out/report.json").exists() && !dir.path("saved.bin").exists(),
        "{:?}",
        dir.files()
    );

    let other = dir.run(args.iter().copied().chain(["--kv-dtype", "int8"]));
    assert_eq!((other.code, other.stdout.as_str()), (1, ""));
    assert!(
        other.stderr.contains("belongs to a run with another `settings.kv_"),
        "{}",
        other.stderr
    );
    assert!(!other.stderr.contains("weights"), "{}", other.stderr);

    let resumed = dir.run(&args);
    assert_eq!(resumed.code, 0, "{}", resumed.stderr);
    assert!(resumed.stderr.contains("continuing | "), "{}", resumed.stderr);
    assert_eq!(timeless(read_report(&dir.path("out")), &[]), timeless(report, &[]));
    assert_eq!(std::fs::read(dir.path("saved.bin")).unwrap(), saved);
    assert_eq!(dir.files(), ["a.txt", "out/report.json", "saved.bin"]);
}

#[test]
fn a_file_that_holds_no_state_is_never_overwritten() {
    let dir = Dir::new();
    let text = text(&dir);
    let notes = dir.file("notes.txt", "a text of the user's, longer than a header");
    let run = dir.score(&demo_artifact(), &text, &format!("--resume {}", notes.display()));
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(run.stderr.contains("is not a state file"), "{}", run.stderr);
    assert!(
        std::fs::read_to_string(notes)
            .unwrap()
            .starts_with("a text of the user's")
    );
}
