//! Faults that a hostile user found, each with a test of its name.

use std::process::{Command, Stdio};

use perplexity_model::artifact::WriterOptions;
use perplexity_model::flash_next_tiny::{self, TinyOptions};
use serde_json::{Value, json};

use crate::common::{Dir, Run, byte_model, demo_artifact, demo_checkpoint, read_report, repository};

const TEXT: &str = "the quick brown fox jumps over the lazy dog";

/// Runs a command line in which MODEL stands for the byte model.
fn run(dir: &Dir, line: &str) -> Run {
    let line = line.replace("MODEL", byte_model().to_str().unwrap());
    dir.run(line.split_whitespace())
}

#[test]
fn a_missing_input_is_wrong_usage_everywhere() {
    let dir = Dir::new();
    dir.file("a.txt", TEXT);
    for line in [
        "nowhere --text a.txt",
        "MODEL --text nowhere",
        "MODEL --corpus nowhere",
        "MODEL --text a.txt --kl-reference nowhere",
        "MODEL --text a.txt --llama-chunks --kl-base nowhere",
        "MODEL --text a.txt --kl-hidden nowhere",
        "convert nowhere out.ninfer --recipe bf16",
        "inspect nowhere",
        "compare nowhere a.txt",
        "compare a.txt nowhere",
        "gate nowhere a.txt",
        "merge a.txt nowhere --output out",
    ] {
        let run = run(&dir, line);
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{line}: {}", run.stderr);
        assert!(
            run.stderr.contains("\"nowhere\" does not exist"),
            "{line}: {}",
            run.stderr
        );
    }
    // What is there and is something else fails while working.
    for line in [
        "a.txt --text a.txt",
        "MODEL --corpus a.txt",
        "MODEL --text a.txt --kl-reference a.txt",
        "MODEL --text a.txt --kl-hidden a.txt",
        "inspect a.txt",
        "compare a.txt a.txt",
        "merge a.txt --output out",
    ] {
        let run = run(&dir, line);
        assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{line}: {}", run.stderr);
        assert_eq!(run.stderr.matches("a.txt").count(), 1, "{line}: {}", run.stderr);
    }
    assert_eq!(dir.files(), ["a.txt"]);
}

#[test]
fn no_message_says_a_word_twice() {
    let dir = Dir::new();
    dir.file("a/config.json", "{}");
    let run = run(&dir, "a --text a/config.json");
    assert!(!run.stderr.contains("expected expected"), "{}", run.stderr);
    assert_eq!(run.stderr.matches("a/config.json").count(), 1, "{}", run.stderr);
}

#[cfg(unix)]
#[test]
fn a_pipe_a_device_and_a_directory_are_no_texts() {
    let dir = Dir::new();
    let made = Command::new("mkfifo").arg(dir.path("pipe")).status().unwrap();
    assert!(made.success());
    for (name, kind) in [("pipe", "a pipe"), ("/dev/zero", "a device"), (".", "a directory")] {
        let run = run(&dir, &format!("MODEL --text {name}"));
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{}", run.stderr);
        assert!(
            run.stderr.contains(&format!("is {kind}, expected a file")),
            "{}",
            run.stderr
        );
    }
    let manifest = r#"{"corpus_id":"c","streams":[{"id":"s","domain":"d","path":"pipe"}],
        "modes":{"quick":["s"],"full":["s"]}}"#;
    dir.file("manifest.json", manifest);
    let run = run(&dir, "MODEL --corpus manifest.json");
    assert_eq!(run.code, 1);
    assert!(
        run.stderr.contains("it is a pipe, not a regular file"),
        "{}",
        run.stderr
    );
}

/// A corpus of one stream, with further fields of the stream.
fn manifest(dir: &Dir, fields: &str) {
    dir.file("data/a.txt", TEXT);
    dir.file(
        "manifest.json",
        format!(
            r#"{{"corpus_id":"c","streams":[{{"id":"s","domain":"d","path":"data/a.txt"{fields}}}],
            "modes":{{"quick":["s"],"full":["s"]}}}}"#
        ),
    );
}

#[test]
fn outputs_never_replace_a_text_of_the_corpus() {
    let dir = Dir::new();
    manifest(&dir, "");
    for option in ["--save-tokens", "--save-top-tokens", "--resume"] {
        let run = run(&dir, &format!("MODEL --corpus manifest.json {option} data/a.txt"));
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{}", run.stderr);
        let words = format!("{option} \"data/a.txt\" is also a text of the corpus");
        assert!(run.stderr.contains(&words), "{}", run.stderr);
    }
    assert_eq!(std::fs::read_to_string(dir.path("data/a.txt")).unwrap(), TEXT);
}

#[test]
fn unknown_fields_of_a_manifest_are_named() {
    let dir = Dir::new();
    manifest(&dir, r#","sha265":"a typo""#);
    let run = run(&dir, "MODEL --corpus manifest.json --output out");
    assert_eq!(run.code, 0, "{}", run.stderr);
    let words = "the manifest's field `streams[].sha265` is not known and was ignored";
    assert!(run.stderr.contains(&format!("warning: {words}")), "{}", run.stderr);
    assert_eq!(read_report(&dir.path("out"))["notes"][0], words);
}

#[test]
fn a_folder_that_does_not_exist_is_noticed_before_loading() {
    let dir = Dir::new();
    dir.file("a.txt", TEXT);
    for option in ["--save-top-tokens", "--save-tokens", "--save-hidden", "--resume"] {
        let run = run(&dir, &format!("MODEL --text a.txt {option} nowhere/a"));
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{}", run.stderr);
        assert!(
            run.stderr.contains("\"nowhere\" does not exist") && !run.stderr.contains("weights"),
            "{}",
            run.stderr
        );
    }
    let run = run(&dir, "convert MODEL nowhere/a.ninfer --recipe bf16");
    assert_eq!(run.code, 2, "{}", run.stderr);
}

/// Starts the same command several times at once and returns the exit codes, ascending.
fn together(dir: &Dir, times: usize, line: &str) -> Vec<i32> {
    let line = line.replace("MODEL", byte_model().to_str().unwrap());
    let start = |_| {
        Command::new(env!("CARGO_BIN_EXE_burn-perplexity"))
            .args(line.split_whitespace())
            .current_dir(dir.path(""))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let children: Vec<_> = (0..times).map(start).collect();
    let ended = children.into_iter().map(|mut child| child.wait().unwrap().code());
    let mut codes: Vec<i32> = ended.map(|code| code.expect("not ended by a signal")).collect();
    codes.sort_unstable();
    codes
}

#[test]
fn parallel_runs_lose_no_report() {
    let dir = Dir::new();
    dir.file("a.txt", TEXT);
    assert_eq!(together(&dir, 3, "MODEL --text a.txt"), [0, 0, 0]);
    let reports = dir.files().iter().filter(|name| name.ends_with("/report.json")).count();
    assert_eq!(reports, 3, "{:?}", dir.files());
    // One directory, or one file, belongs to one run.
    let codes = together(&dir, 2, "MODEL --text a.txt --output shared");
    assert!(codes[0] == 0 && codes[1] > 0, "{codes:?}");
    assert!(dir.path("shared/report.json").exists());
    assert!(
        !dir.files().iter().any(|name| name.ends_with(".tmp")),
        "{:?}",
        dir.files()
    );
}

#[test]
fn a_shard_without_a_window_is_said() {
    let dir = Dir::new();
    dir.file("a.txt", TEXT);
    let run = run(&dir, "MODEL --text a.txt --shard 1/2 --output out");
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(
        run.stderr
            .contains("warning: shard 1/2 holds none of the 1 windows: nothing is scored"),
        "{}",
        run.stderr
    );
}

#[test]
fn a_rerun_takes_over_what_a_killed_conversion_left() {
    let dir = Dir::new();
    let checkpoint = demo_checkpoint();
    let line = ["convert", checkpoint.to_str().unwrap(), "a.ninfer", "--recipe", "bf16"];
    let mut child = Command::new(env!("CARGO_BIN_EXE_burn-perplexity"))
        .args(line)
        .current_dir(dir.path(""))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    while dir.files().is_empty() && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // Killed early, it left its beginning under the temporary name, or a longer one of an older run lies there.
    if !dir.path("a.ninfer").exists() {
        dir.file("a.ninfer.tmp", vec![0x5a; 40_000_000]);
        let again = dir.run(line);
        assert_eq!(again.code, 0, "{}", again.stderr);
    }
    assert_eq!(dir.files(), ["a.ninfer"]);
    let inspected = dir.run(["inspect", "a.ninfer"]);
    assert_eq!(inspected.code, 0, "{}", inspected.stderr);
}

#[test]
fn absurd_numbers_in_a_report_stop_every_command_with_file_and_field() {
    let dir = Dir::new();
    dir.file("a.txt", TEXT);
    let line = "MODEL --text a.txt --context 16 --stride 8 --output good --shard 0/1";
    assert_eq!(run(&dir, line).code, 0);
    let good = read_report(&dir.path("good"));
    for (pointer, value, field) in [
        ("/streams/0/windows/0/scored_tokens", json!(u64::MAX), "scored_tokens"),
        ("/streams/0/windows/0/total_nll", json!(-1.0), "total_nll"),
        ("/streams/0/windows/0/total_nll", json!(1e300), "total_nll"),
        ("/streams/0/total_nll", json!(1.0), "total_nll"),
    ] {
        let mut bad: Value = good.clone();
        *bad.pointer_mut(pointer).unwrap() = value;
        bad["shard"] = json!({"index": 0, "count": 1});
        dir.file("bad.json", bad.to_string());
        for line in [
            "compare good/report.json bad.json",
            "gate bad.json good/report.json",
            "merge bad.json --output merged",
        ] {
            let run = run(&dir, line);
            assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{line}: {}", run.stderr);
            let named = run.stderr.contains("bad.json: `streams[0]") && run.stderr.contains(field);
            assert!(named && !run.stderr.contains("panicked"), "{line}: {}", run.stderr);
        }
    }
    assert!(!dir.path("merged").exists());
}

/// Starts a command, kills it once `partial` holds something, and returns the files that lie there then.
fn killed(dir: &Dir, args: &[&str], partial: &str) -> Vec<String> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_burn-perplexity"))
        .args(args)
        .current_dir(dir.path(""))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    while std::fs::metadata(dir.path(partial)).map_or(0, |found| found.len()) == 0 {
        assert_eq!(child.try_wait().unwrap(), None, "ended before it could be killed");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success());
    dir.files()
}

#[test]
fn a_killed_run_leaves_nothing_under_a_final_name() {
    let dir = Dir::new();
    let whole = std::fs::read(repository("eval/corpora/open-1m/data/demo/english_long_form.txt")).unwrap();
    dir.file("a.txt", &whole[..1500]);
    let (model, checkpoint) = (demo_artifact(), demo_checkpoint());
    let model = model.to_str().unwrap();
    let scores = "--text a.txt --context 64 --stride 16 --save-top-tokens t --save-hidden h --save-tokens j --output o";
    let rows = "--text a.txt --context 64 --llama-chunks --save-logits l --output o";
    let convert = ["convert", checkpoint.to_str().unwrap(), "m", "--recipe", "q4"];
    let line = |options: &'static str| std::iter::once(model).chain(options.split(' ')).collect::<Vec<&str>>();
    for (args, partial, last) in [
        (line(scores), "h.partial", "j"),
        (line(rows), "l.partial", "l"),
        (convert.to_vec(), "m.tmp", "m"),
    ] {
        let left = killed(&dir, &args, partial);
        let partial = |name: &String| name == "a.txt" || name.ends_with(".partial") || name.ends_with(".tmp");
        assert!(left.iter().all(partial), "{left:?}");
        // The same command again takes all of it over.
        let again = dir.run(&args);
        assert_eq!(again.code, 0, "{}", again.stderr);
        let files = dir.files();
        assert!(files.contains(&last.to_owned()), "{files:?}");
        assert!(
            files
                .iter()
                .all(|name| !name.contains(".partial") && !name.ends_with(".tmp")),
            "{files:?}"
        );
        for name in files.iter().filter(|name| *name != "a.txt") {
            std::fs::remove_file(dir.path(name)).unwrap();
        }
    }
}

/// Runs a command line that must be refused as wrong usage, with these words.
fn refused(dir: &Dir, line: &str, words: &str) {
    let run = run(dir, line);
    assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{line}: {}", run.stderr);
    assert!(run.stderr.contains(words), "{line}: {}", run.stderr);
}

#[test]
fn outputs_never_replace_the_volumes_of_a_model() {
    let dir = Dir::new();
    dir.file("a.txt", "printable_characters");
    for folder in ["v", "w"] {
        std::fs::create_dir(dir.path(folder)).unwrap();
        let options = TinyOptions {
            writer: WriterOptions {
                volume_limit: 200_000,
                artifact_id: Some([7; 16]),
            },
            ..TinyOptions::default()
        };
        flash_next_tiny::write(&dir.path(&format!("{folder}/m.ninfer")), &options).unwrap();
    }
    let files = dir.files();
    let contents = || -> Vec<Vec<u8>> {
        files
            .iter()
            .map(|name| std::fs::read(dir.path(name)).unwrap())
            .collect()
    };
    let before = contents();
    let read = |name: &&String| name.starts_with("v/") || name.starts_with("w/m.ninfer.part");
    let volumes: Vec<&String> = files.iter().filter(|name| *name != "v/m.ninfer").filter(read).collect();
    assert!(volumes.len() > 2, "{files:?}");
    for volume in volumes {
        for option in [
            "--save-top-tokens",
            "--save-tokens",
            "--save-hidden",
            "--ngram-hot-profile-out",
        ] {
            let line = format!("v/m.ninfer --text a.txt --expert-stripe w/m.ninfer {option} {volume}");
            refused(
                &dir,
                &line,
                &format!("{option} {volume:?} is also a file of the artifact"),
            );
        }
    }
    assert_eq!(dir.files(), files);
    assert_eq!(contents(), before);
}

#[test]
fn names_of_incomplete_outputs_are_no_inputs() {
    let dir = Dir::new();
    for name in ["q.partial", "n.tmp", "o/report.json.tmp"] {
        dir.file(name, TEXT);
    }
    dir.file("r.tmp", "name = \"mine\"\nfallback = \"bf16\"\n");
    let model = std::fs::read(demo_artifact()).unwrap();
    dir.file("m.tmp", &model);
    let files = dir.files();
    for (line, words) in [
        (
            "MODEL --text q.partial --save-top-tokens q",
            r#"--save-top-tokens "q" reserves the name "q.partial" until it is complete, and that is the text"#,
        ),
        (
            "MODEL --text n.tmp --ngram-hot-profile-out n",
            r#"the name "n.tmp" until"#,
        ),
        (
            "m.tmp --text n.tmp --ngram-hot-profile-out m",
            r#"--ngram-hot-profile-out "m" reserves the name "m.tmp" until it is complete, and that is the artifact"#,
        ),
        (
            "MODEL --text o/report.json.tmp --output o",
            r#"the report "o/report.json" reserves the name "o/report.json.tmp""#,
        ),
        (
            "MODEL --text n.tmp --save-tokens k --resume k.partial",
            r#"--save-tokens "k" reserves the name "k.partial" until it is complete, and that is --resume"#,
        ),
        (
            "convert MODEL r --recipe r.tmp",
            r#"OUT.ninfer "r" reserves the name "r.tmp" until it is complete, and that is --recipe"#,
        ),
        (
            "synth m --preset demo --recipe q4 --tokenizer m.tmp",
            r#"the name "m.tmp" until it is complete, and that is --tokenizer"#,
        ),
    ] {
        refused(&dir, line, words);
    }
    assert_eq!(dir.files(), files);
    assert_eq!(std::fs::read(dir.path("m.tmp")).unwrap(), model);
    for name in ["q.partial", "n.tmp", "o/report.json.tmp"] {
        assert_eq!(std::fs::read_to_string(dir.path(name)).unwrap(), TEXT, "{name}");
    }
}

#[test]
fn a_volume_in_the_way_is_noticed_first_and_one_left_incomplete_is_taken_over() {
    let dir = Dir::new();
    let fixture = repository("tests/data/fixtures/flash_next");
    let convert = format!(
        "convert {} m.ninfer --recipe qwen3_8_flash_next_nvfp4",
        fixture.display()
    );
    let tiny = "synth m.ninfer --preset flash-next-tiny";
    let large = "synth m.ninfer --preset qwen3.8-flash-next --recipe qwen3_8_flash_next_nvfp4";
    dir.file("m.ninfer.ngram", "kept");
    for line in [&convert, tiny, large] {
        refused(&dir, line, r#""m.ninfer.ngram" exists already"#);
    }
    assert_eq!(dir.files(), ["m.ninfer.ngram"]);
    // A model without a table writes no volume.
    assert_eq!(run(&dir, "convert MODEL m.ninfer --recipe bf16").code, 0);
    assert_eq!(std::fs::read_to_string(dir.path("m.ninfer.ngram")).unwrap(), "kept");
    let remove = |names: &[&str]| {
        names
            .iter()
            .for_each(|name| std::fs::remove_file(dir.path(name)).unwrap())
    };
    remove(&["m.ninfer", "m.ninfer.ngram"]);

    for line in [&convert, tiny] {
        let mut volumes = Vec::new();
        for left in [false, true] {
            if left {
                dir.file("m.ninfer.ngram.tmp", vec![0x5a; 1_000_000]);
                dir.file("m.ninfer.tmp", vec![0x5a; 1_000_000]);
            }
            let run = run(&dir, line);
            assert_eq!(run.code, 0, "{}", run.stderr);
            assert_eq!(dir.files(), ["m.ninfer", "m.ninfer.ngram"]);
            volumes.push(std::fs::read(dir.path("m.ninfer.ngram")).unwrap());
            remove(&["m.ninfer", "m.ninfer.ngram"]);
        }
        assert_eq!(volumes[0], volumes[1], "{line}");
    }
}

#[test]
fn outputs_are_not_in_the_way_of_the_reports_directory() {
    let dir = Dir::new();
    dir.file("a.txt", TEXT);
    std::fs::create_dir(dir.path("empty")).unwrap();
    for option in ["--save-top-tokens", "--save-tokens", "--save-hidden", "--resume"] {
        for (file, directory) in [
            ("o", "o"),
            ("o", "./x/../o"),
            ("o", "o/p"),
            ("o", "o/p/q"),
            ("empty/f", "empty"),
        ] {
            let line = format!("MODEL --text a.txt --output {directory} {option} {file}");
            refused(
                &dir,
                &line,
                &format!("{option} {file:?} and the output directory {directory:?} are in"),
            );
        }
        // The directory that is named after the run lies there.
        let line = format!("MODEL --text a.txt {option} profiles");
        refused(
            &dir,
            &line,
            "\"profiles\" and the output directory \"profiles/perplexity/dense/",
        );
    }
    let line = "MODEL --text a.txt --context 8 --llama-chunks --output o/p --save-logits o";
    refused(&dir, line, "are in each other's way");
    assert_eq!(dir.files(), ["a.txt"]);
    assert_eq!(
        std::fs::read_dir(dir.path("")).unwrap().count(),
        2,
        "the text and the empty folder"
    );
    // Side by side is fine.
    let run = run(
        &dir,
        "MODEL --text a.txt --output o --save-top-tokens o.bin --save-tokens oo",
    );
    assert_eq!(run.code, 0, "{}", run.stderr);
}

#[test]
fn an_output_that_is_a_directory_is_noticed_first() {
    let dir = Dir::new();
    dir.file("a.txt", TEXT);
    for name in ["d", "e.partial", "f.tmp"] {
        std::fs::create_dir(dir.path(name)).unwrap();
    }
    for option in ["--save-top-tokens", "--save-tokens", "--save-hidden", "--resume"] {
        for (file, found) in [("d", "d"), ("e", "e.partial"), ("f", "f.tmp")] {
            let line = format!("MODEL --text a.txt --output o {option} {file}");
            refused(&dir, &line, &format!("{option} {found:?} is a directory; name a file"));
        }
    }
    assert_eq!(dir.files(), ["a.txt"]);
    assert!(!dir.path("o").exists());
}

#[test]
fn an_unknown_mode_and_a_logit_base_in_the_way_are_wrong_usage() {
    let dir = Dir::new();
    manifest(&dir, "");
    refused(
        &dir,
        "MODEL --corpus manifest.json --mode slow",
        "--mode: the manifest has no mode `slow`; it has full, quick",
    );
    dir.file("base", "hours of work");
    let line = "MODEL --text data/a.txt --context 8 --llama-chunks --save-logits base";
    refused(&dir, line, "--save-logits \"base\" exists already");
    assert_eq!(std::fs::read_to_string(dir.path("base")).unwrap(), "hours of work");
}

#[test]
fn names_from_files_send_nothing_to_the_terminal() {
    let dir = Dir::new();
    dir.file("data/a.txt", TEXT);
    dir.file(
        "manifest.json",
        r#"{"corpus_id":"c\u001b[2J","streams":[{"id":"s\u0007","domain":"d\ne\u001b[31m","path":"data/a.txt"}],
            "modes":{"quick":["s\u0007"],"full":["s\u0007"]}}"#,
    );
    let checkpoint = byte_model();
    let args = [
        "convert",
        checkpoint.to_str().unwrap(),
        "m.ninfer",
        "--recipe",
        "q8",
        "--name",
    ];
    let converted = dir.run(args.into_iter().chain(["a\n\x1b[31mRED"]));
    assert_eq!(converted.code, 0, "{}", converted.stderr);
    let run = run(&dir, "m.ninfer --corpus manifest.json --output o");
    assert_eq!(run.code, 0, "{}", run.stderr);
    let controls = |text: &str| text.chars().any(|c| c.is_control() && c != '\n');
    assert!(!controls(&run.stdout) && !controls(&run.stderr), "{run:?}");
    assert!(run.stdout.contains("\nartifact: a ?[31mRED\n"), "{}", run.stdout);
    assert!(run.stdout.contains("\nd e?[31m "), "{}", run.stdout);
    let inspected = dir.run(["inspect", "m.ninfer"]);
    assert!(!controls(&inspected.stdout), "{:?}", inspected.stdout);
    assert!(
        inspected.stdout.contains("name          a ?[31mRED\n"),
        "{}",
        inspected.stdout
    );
    // As data they are what they are.
    let report = read_report(&dir.path("o"));
    assert_eq!(report["artifact"]["name"], "a\n\x1b[31mRED");
    let compared = dir.run(["compare", "o/report.json", "o/report.json"]);
    assert!(compared.code == 0 && !controls(&compared.stdout), "{compared:?}");
    assert!(compared.stdout.contains("\nd e?[31m "), "{}", compared.stdout);
}

#[cfg(target_os = "linux")]
#[test]
fn a_result_that_cannot_be_written_names_its_place() {
    let dir = Dir::new();
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_burn-perplexity"))
        .args(["man"])
        .stdout(full)
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr.starts_with("error: cannot write standard output: "), "{stderr}");
    let run = dir.run(["man", "--dir", "/proc"]);
    assert_eq!(run.code, 1);
    let words = "error: cannot write the manual pages into /proc: ";
    assert!(run.stderr.starts_with(words), "{}", run.stderr);
    // Where the default directory would be is a file.
    dir.file("profiles", "a file");
    let text = dir.file("a.txt", TEXT);
    let run = dir.score(&byte_model(), &text, "");
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(
        run.stderr
            .contains("cannot use the output directory profiles/perplexity/")
            && run.stderr.contains("name another with --output"),
        "{}",
        run.stderr
    );
}
