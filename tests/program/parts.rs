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
    assert!(
        run.stderr.contains("of the 3 shards these are missing: 1"),
        "{}",
        run.stderr
    );
    let other = protocol.replace("int8", "fp8");
    let run = dir.score(&demo_artifact(), &text, &format!("{other} --shard 1/3 --output other"));
    assert_eq!(run.code, 0, "{}", run.stderr);
    reports[2] = "other/report.json".into();
    let run = merge(&reports, "differs");
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    let words = "`execution.kv_dtype` differs between \"shard-0/report.json\" and \"other/report.json\"";
    assert!(run.stderr.contains(words), "{}", run.stderr);
    assert!(!dir.path("missing").exists() && !dir.path("differs").exists());
}

/// Model, text and reference lie elsewhere on every machine; they are the same by what is in them.
#[test]
fn shards_of_machines_with_other_paths_merge() {
    let dir = Dir::new();
    let text = std::fs::read(text(&dir)).unwrap();
    let model = std::fs::read(demo_artifact()).unwrap();
    let protocol = "--context 64 --stride 32 --log-level error";
    let saved = dir.score(
        &demo_artifact(),
        &dir.path("a.txt"),
        &format!("{protocol} --save-top-tokens ref.bin --output saved"),
    );
    assert_eq!(saved.code, 0, "{}", saved.stderr);
    let reference = std::fs::read(dir.path("ref.bin")).unwrap();
    let score = |at: &str, shard: &str, reference: &[u8]| {
        let model = dir.file(&format!("{at}/m.ninfer"), &model);
        let text = dir.file(&format!("{at}/texts/a.txt"), &text);
        dir.file(&format!("{at}/r.bin"), reference);
        let files = format!("--kv-dtype int8 --kl-reference {at}/r.bin --output {at}/out");
        let run = dir.score(&model, &text, &format!("{protocol} {files} --shard {shard}"));
        assert_eq!(run.code, 0, "{}", run.stderr);
        format!("{at}/out/report.json")
    };
    let parts = [score("here", "0/2", &reference), score("there", "1/2", &reference)];
    let whole = score("alone", "0/1", &reference);
    let merge = |reports: &[&str], out: &str| {
        let args = ["merge"].into_iter().chain(reports.iter().copied());
        dir.run(args.chain(["--output", out]))
    };
    let run = merge(&[&parts[1], &parts[0]], "merged");
    assert_eq!(run.code, 0, "{}", run.stderr);
    let [merged, one] = ["merged", "alone/out"].map(|name| read_report(&dir.path(name)));
    assert_eq!(merged["overall"]["total_nll"], one["overall"]["total_nll"]);
    assert_eq!(merged["kl_divergence"]["positions"], one["kl_divergence"]["positions"]);
    // Another build is a note.
    let mut other = read_report(&dir.path("there/out"));
    other["build"]["version"] = "0.0.0".into();
    dir.file("built.json", other.to_string());
    let run = merge(&["built.json", &parts[0]], "built");
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(
        run.stdout
            .contains("note: the shards were scored by different builds: "),
        "{}",
        run.stdout
    );
    // Another reference is another run.
    let mut changed = reference.clone();
    let provenance = changed.len() - 40;
    let at = changed[..provenance]
        .windows(4)
        .rposition(|bytes| bytes == [0xff; 4])
        .unwrap()
        - 1;
    changed[at] ^= 1;
    let third = score("third", "1/2", &changed);
    let run = merge(&[&parts[0], &third], "refused");
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(
        run.stderr
            .contains("`kl_divergence.reference_sha256` differs between \"here/out/report.json\" and"),
        "{}",
        run.stderr
    );
    // A run that was not cut is its own merge, and no part of another.
    let run = merge(&[&whole], "again");
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(read_report(&dir.path("again")), one);
    let run = merge(&[&whole, &parts[1]], "mixed");
    let words = "\"alone/out/report.json\" is shard 0/1 and \"there/out/report.json\" is shard 1/2";
    assert!(run.code == 1 && run.stderr.contains(words), "{}", run.stderr);
    let run = merge(&[&parts[0], &parts[1], &parts[0]], "twice");
    assert!(
        run.code == 1 && run.stderr.contains("are both shard 0/2"),
        "{}",
        run.stderr
    );
}

#[test]
fn a_damaged_state_is_said_and_what_is_sound_of_it_is_used() {
    let dir = Dir::new();
    let (text, model) = (text(&dir), demo_artifact());
    let mut args = vec![model.to_str().unwrap(), "--text", text.to_str().unwrap()];
    args.extend("--context 32 --stride 2 --batch 1 --output out --resume state".split(' '));
    kill_in_the_middle(&dir, &args, &dir.path("state"));
    let state = std::fs::read(dir.path("state")).unwrap();
    let first = 16 + u32::from_le_bytes(state[12..16].try_into().unwrap()) as usize;
    let second = first + 32 + u64::from_le_bytes(state[first..first + 8].try_into().unwrap()) as usize;
    assert!(state.len() > second + 40);

    let mut damaged = state.clone();
    damaged[second + 40] ^= 1;
    dir.file("state", &damaged);
    let run = dir.run(&args);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let words = format!("warning: state is damaged at byte {second}: ");
    assert!(run.stderr.contains(&words), "{}", run.stderr);
    assert!(run.stderr.contains("continuing | 1 batches"), "{}", run.stderr);
    std::fs::remove_file(dir.path("out/report.json")).unwrap();

    dir.file("state", &state[..second + 40]);
    let run = dir.run(&args);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(
        run.stderr
            .contains("state ends within a batch: its 40 bytes are dropped")
            && !run.stderr.contains("warning"),
        "{}",
        run.stderr
    );
    assert_eq!(dir.files(), ["a.txt", "out/report.json"]);
}

/// What a killed run leaves in a directory does not keep others from it, but may be what is to be merged.
#[test]
fn a_shard_under_the_name_of_the_incomplete_report_is_refused_and_stays() {
    let dir = Dir::new();
    std::fs::create_dir(dir.path("out")).unwrap();
    let shard = dir.file("out/report.json.tmp", "a shard");
    let run = dir.run(["merge", "out/report.json.tmp", "--output", "out"]);
    assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{}", run.stderr);
    assert!(run.stderr.contains("and that is one of the shards"), "{}", run.stderr);
    assert_eq!(std::fs::read(shard).unwrap(), b"a shard");
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(dir.path("out/report.json.tmp"), dir.path("link.json")).unwrap();
        let run = dir.run(["merge", "link.json", "--output", "out"]);
        assert!(
            run.code == 2 && run.stderr.contains("one of the shards"),
            "{}",
            run.stderr
        );
    }
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
