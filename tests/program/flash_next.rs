//! Qwen3.8-Flash-Next through the program: checkpoint, artifact, volume, residencies.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::common::{Dir, number, read_report, repository, window_nlls};

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
    let (profile, stripe) = (dir.path("rows.txt"), dir.path("other-disk/copy.ninfer"));
    std::fs::create_dir(dir.path("other-disk")).unwrap();
    std::fs::copy(&model, &stripe).unwrap();
    let profiled = score(&format!("--ngram-hot-profile-out {}", profile.display()));
    assert_eq!(window_nlls(&profiled), window_nlls(&device));
    let profile = profile.display();
    let hot = format!("--ngram-residency ram-hot --ngram-hot-profile {profile} --ngram-ram-mib 2");
    let elsewhere = format!("--ngram-table {}", fixture().display());
    let striped = format!("--expert-stripe {} --expert-residency disk", stripe.display());
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
        ("--ngram-ram-mib 1", "ngram_access", "disk, mmap"),
        (&hot, "ngram_access", "ram-hot, mmap"),
        (&elsewhere, "ngram_volume", fixture().to_str().unwrap()),
        (&striped, "expert_stripe", stripe.to_str().unwrap()),
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
        let notes = report["notes"].to_string();
        let in_memory = "n-gram rows in memory: ";
        assert_eq!(
            notes.contains(in_memory),
            options.contains("ram-mib"),
            "{options}: {notes}"
        );
        // The profile has every row that the run looks up.
        let all = notes.contains("uses were ready, 100.0 %");
        assert_eq!(all, options.contains("ram-hot"), "{options}: {notes}");
    }
    // The file system of the test need not have reads past its cache; then the run says so and scores nothing.
    let out = dir.path("direct");
    let options = format!("{PROTOCOL} --ngram-io direct --output {}", out.display());
    let direct = dir.score(&model, &text(), &options);
    match direct.code {
        0 => {
            let report = read_report(&out);
            assert_eq!(window_nlls(&report), window_nlls(&device));
            let access = &report["execution"]["options"]["ngram_access"];
            assert_eq!(access, "disk, direct, 64 reads in flight");
        }
        _ => {
            let words = "cannot be read past the page cache";
            assert!(direct.stderr.contains(words), "{}", direct.stderr);
        }
    }
}

#[test]
fn routes_in_f64_say_what_they_did() {
    let dir = Dir::new();
    let model = converted(&dir);
    let exact = dir.report(&fixture(), &text(), &format!("{PROTOCOL} --route exact"));
    let near = number(&exact, "/overall/mean_nll");
    for (model, route, arithmetic) in [
        (&fixture(), "lossless", "f64 products of the checkpoint's weights"),
        (&fixture(), "reference", "f64 products of the checkpoint's weights"),
        (&model, "lossless", "f64, decoded weights rounded to bfloat16"),
        (&model, "reference", "exact integers, 16-bit activations"),
    ] {
        let report = dir.report(model, &text(), &format!("{PROTOCOL} --{route}"));
        assert_eq!(report["execution"]["route"], route);
        assert_eq!(report["execution"]["options"]["expert_arithmetic"], arithmetic);
        assert_eq!(report["execution"]["logits_dtype"], "f32");
        let nll = number(&report, "/overall/mean_nll");
        assert!((nll - near).abs() < 0.05, "{route}: {nll}, {near} in float32");
    }
    // Where decoded experts come from changes nothing either.
    let score = |options: &str| dir.report(&model, &text(), &format!("{PROTOCOL} --lossless {options}"));
    let (device, disk) = (score(""), score("--expert-residency disk --expert-cache-mib 1"));
    assert_eq!(window_nlls(&device), window_nlls(&disk));
    let refused = |options: &str, words: &str| {
        let run = dir.score(&model, &text(), &format!("{PROTOCOL} {options}"));
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{options}: {}", run.stderr);
        assert!(run.stderr.contains(words), "{options}: {}", run.stderr);
    };
    refused("--lossless --expert-a4-activations", "--expert-a4-activations would");
    refused("--kv-emulation kernel", "imitates kernels of dense attention");
}

#[test]
fn reproducible_scores_do_not_depend_on_pass_batch_and_threads() {
    let dir = Dir::new();
    for model in [fixture(), converted(&dir)] {
        let score = |options: &str| {
            let protocol = "--context 70 --stride 35 --log-level error";
            window_nlls(&dir.report(&model, &text(), &format!("{protocol} --reproducible {options}")))
        };
        let alone = score("--batch 1 --threads 1");
        assert!(alone.len() > 2);
        for options in ["--batch 3 --threads 2", "--prefill-chunk 128 --batch 2 --threads 1"] {
            assert_eq!(score(options), alone, "{options}");
        }
        let whole =
            |options: &str| window_nlls(&dir.report(&model, &text(), &format!("{PROTOCOL} --reproducible {options}")));
        assert_eq!(whole("--prefill-chunk 128"), whole(""));
    }
}

#[test]
fn rotary_extensions_turn_the_attention_and_its_indexer() {
    let dir = Dir::new();
    let score = |options: &str| dir.report(&fixture(), &text(), &format!("{PROTOCOL} {options}"));
    let native = score("");
    assert_eq!(window_nlls(&score("--rope-yarn-factor 1")), window_nlls(&native));
    for options in [
        "--rope-yarn-factor 4",
        "--rope-scaling-factor 2 --rope-scaling-original-context 64",
    ] {
        let extended = score(options);
        assert_ne!(window_nlls(&extended), window_nlls(&native), "{options}");
        let distance = number(&extended, "/overall/mean_nll") - number(&native, "/overall/mean_nll");
        assert!(distance.abs() < 0.05, "{options}: {distance}");
    }
}

/// Attention is sparse from the 36th token on. These codecs read part of their keys from exact copies, and store rows of 64.
#[test]
fn codecs_with_an_exact_window_meet_sparse_attention() {
    let dir = Dir::new();
    let plain = dir.report(&fixture(), &text(), PROTOCOL);
    let near = number(&plain, "/overall/mean_nll");
    for kv in ["kivi4", "kivi2"] {
        let score = |options: &str| {
            let options = format!("{PROTOCOL} --kv-dtype {kv} {options}");
            dir.report(&fixture(), &text(), &options)
        };
        let whole = score("");
        assert!((number(&whole, "/overall/mean_nll") - near).abs() < 0.02, "{kv}");
        assert_ne!(window_nlls(&whole), window_nlls(&plain), "{kv}");
        assert_eq!(window_nlls(&score("--prefill-chunk 128")), window_nlls(&whole), "{kv}");
        let reference = score("--reference");
        assert!((number(&reference, "/overall/mean_nll") - near).abs() < 0.02, "{kv}");
    }
}

#[test]
fn a_second_copy_that_is_none_is_refused_before_scoring() {
    let dir = Dir::new();
    let model = converted(&dir);
    let bytes = std::fs::read(&model).unwrap();
    let refused = |copy: &[u8], words: &str| {
        let copy = dir.file("copy.ninfer", copy);
        for residency in ["device", "disk"] {
            let options = format!(
                "--context 256 --stride 128 --expert-stripe {} --expert-residency {residency}",
                copy.display()
            );
            let run = dir.score(&model, &text(), &options);
            assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{words}: {}", run.stderr);
            assert!(run.stderr.contains(words), "{words}: {}", run.stderr);
            assert!(!run.stderr.contains("weights ready"), "{}", run.stderr);
        }
    };
    refused(&bytes[..bytes.len() - 1], "the second copy of the experts: ");
    refused(&bytes[..20], "the second copy of the experts: ");
    let mut other = bytes.clone();
    other[16] ^= 1;
    refused(&other, "the artifact id is");
    #[cfg(unix)]
    {
        std::fs::hard_link(&model, dir.path("hard.ninfer")).unwrap();
        std::os::unix::fs::symlink(&model, dir.path("soft.ninfer")).unwrap();
        for name in ["./model.ninfer", "hard.ninfer", "soft.ninfer"] {
            let itself = format!("{PROTOCOL} --expert-stripe {}", dir.path(name).display());
            let run = dir.score(&model, &text(), &itself);
            assert_eq!(run.code, 2, "{name}: {}", run.stderr);
            assert!(run.stderr.contains("is the artifact itself"), "{name}: {}", run.stderr);
        }
    }
}

#[test]
fn inspect_shows_the_volume_and_whether_it_is_there() {
    let dir = Dir::new();
    let model = converted(&dir);
    let model = model.to_str().unwrap();
    let volume = format!("{model}.ngram");
    let header = std::fs::read(&volume).unwrap();
    let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap());
    let id: String = header[44..60].iter().map(|byte| format!("{byte:02x}")).collect();
    for (exists, mark) in [(true, ""), (false, "  (not there)")] {
        let json = dir.run(["inspect", "--json", model]);
        let json: Value = serde_json::from_str(&json.stdout).unwrap();
        let shown = &json["ngram_volume"];
        assert_eq!(shown["id"], id.as_str());
        assert_eq!(shown["rows"], number(16));
        assert_eq!(shown["blocks"], number(36));
        assert_eq!(shown["file_bytes"], header.len());
        assert_eq!(shown["path"], volume.as_str());
        assert_eq!(shown["exists"], exists);
        let text = dir.run(["inspect", model]).stdout;
        let line = text.lines().find(|line| line.starts_with("  n-gram volume")).unwrap();
        assert!(
            line.contains(&volume) && line.ends_with(&format!("bytes{mark}")),
            "{line}"
        );
        assert!(text.contains(&format!("id {id}, ")), "{text}");
        if exists {
            std::fs::rename(&volume, dir.path("elsewhere")).unwrap();
        }
    }
    let checkpoint = dir.run(["inspect", fixture().to_str().unwrap()]);
    assert!(
        checkpoint.code == 0 && !checkpoint.stdout.contains("n-gram volume"),
        "{}",
        checkpoint.stdout
    );
}

/// A bank has one format, so that a recipe in bfloat16 cannot have its way with the experts.
#[test]
fn another_recipe_says_that_experts_are_packed() {
    let dir = Dir::new();
    for (recipe, noted) in [("bf16", true), ("qwen3_8_flash_next_nvfp4", false)] {
        let out = format!("{recipe}.ninfer");
        let run = dir.run(["convert", fixture().to_str().unwrap(), &out, "--recipe", recipe]);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let note = "layers are packed as nvfp4_mul, whatever the recipe";
        assert_eq!(run.stderr.contains(note), noted, "{recipe}: {}", run.stderr);
        let inspected = dir.run(["inspect", &out]).stdout;
        assert_eq!(inspected.contains(note), noted, "{recipe}: {inspected}");
    }
}

#[test]
fn options_of_an_artifact_are_refused_with_a_checkpoint() {
    let dir = Dir::new();
    let file = dir.file("file", "0\n").display().to_string();
    let hot = format!("ram-hot --ngram-hot-profile {file}");
    for (option, value) in [
        ("--ngram-volume", file.as_str()),
        ("--ngram-table", &file),
        ("--ngram-table", fixture().to_str().unwrap()),
        ("--ngram-residency", "ram"),
        ("--ngram-residency", "disk"),
        ("--ngram-residency", "ram --ngram-lock"),
        ("--ngram-residency", &hot),
        ("--ngram-io", "buffered"),
        ("--ngram-io", "buffered --ngram-io-depth 2"),
        ("--ngram-ram-mib", "1"),
        ("--ngram-ram-mib", "1 --ngram-hot-profile-out rows"),
        ("--expert-a4-activations", ""),
        ("--expert-residency", "host --expert-cache-mib 1"),
        ("--expert-residency", "device"),
        ("--expert-stripe", &file),
    ] {
        let run = dir.score(&fixture(), &text(), &format!("{PROTOCOL} {option} {value}"));
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{option}: {}", run.stderr);
        let words = format!("{option} is for an artifact; this model is a checkpoint");
        assert!(run.stderr.contains(&words), "{option}: {}", run.stderr);
    }
    assert_eq!(dir.files(), ["file"]);
}

#[test]
fn a_profile_holds_the_rows_of_the_shard() {
    let dir = Dir::new();
    let model = converted(&dir);
    let rows = |shard: &str| {
        let path = dir.path("rows.txt");
        let options = format!(
            "--context 70 --stride 35 --log-level error --ngram-hot-profile-out {}",
            path.display()
        );
        dir.report(&model, &text(), &format!("{options} {shard}"));
        let text = std::fs::read_to_string(path).unwrap();
        let rows = text.lines().skip(1).map(str::to_owned);
        rows.collect::<std::collections::BTreeSet<String>>()
    };
    let (all, first, second) = (rows(""), rows("--shard 0/2"), rows("--shard 1/2"));
    assert!(first != all && second != all && first != second);
    assert_eq!(
        first.union(&second).cloned().collect::<std::collections::BTreeSet<_>>(),
        all
    );
    // Nothing is written where nothing can be scored.
    std::fs::remove_file(format!("{}.ngram", model.display())).unwrap();
    let options = format!("{PROTOCOL} --ngram-hot-profile-out {}", dir.path("none.txt").display());
    assert_eq!(dir.score(&model, &text(), &options).code, 1);
    assert!(!dir.path("none.txt").exists());
}

/// A privileged process may lock whatever it likes; then the report says that it did.
#[cfg(target_os = "linux")]
#[test]
fn memory_that_cannot_be_locked_is_said_to_be() {
    let dir = Dir::new();
    let (model, out) = (converted(&dir), dir.path("out"));
    let run = std::process::Command::new("sh")
        .args([
            "-c",
            "ulimit -l 0; exec \"$0\" \"$@\"",
            env!("CARGO_BIN_EXE_burn-perplexity"),
        ])
        .args([model.as_os_str(), "--text".as_ref(), text().as_os_str()])
        .args(PROTOCOL.split(' '))
        .args(["--ngram-residency", "ram", "--ngram-lock", "--output"])
        .arg(&out)
        .output()
        .unwrap();
    let message = String::from_utf8(run.stderr).unwrap();
    match run.status.code() {
        Some(0) => assert_eq!(read_report(&out)["execution"]["options"]["ngram_access"], "ram, locked"),
        code => {
            assert_eq!(code, Some(1), "{message}");
            assert!(
                message.contains("model.ninfer.ngram: ") && message.contains("raise `ulimit -l`"),
                "{message}"
            );
        }
    }
}

#[test]
fn a_table_of_another_checkpoint_is_refused() {
    let dir = Dir::new();
    let model = converted(&dir);
    for entry in std::fs::read_dir(fixture()).unwrap() {
        let file = entry.unwrap();
        let name = file.file_name().into_string().unwrap();
        let mut bytes = std::fs::read(file.path()).unwrap();
        if name == "model.safetensors" {
            *bytes.last_mut().unwrap() ^= 1;
        }
        dir.file(&format!("other/{name}"), bytes);
    }
    let refused = |table: &Path, code: i32, options: &str, words: &str| {
        let options = format!("{PROTOCOL} --ngram-table {} {options}", table.display());
        let run = dir.score(&model, &text(), &options);
        assert_eq!((run.code, run.stdout.as_str()), (code, ""), "{words}: {}", run.stderr);
        assert!(run.stderr.contains(words), "{words}: {}", run.stderr);
    };
    refused(
        &dir.path("other"),
        1,
        "",
        "the volume id that its files give of its n-gram table is",
    );
    let dense = repository("tests/data/demo_hf");
    refused(&dense, 1, "", "the number of rows of its n-gram table is 0");
    refused(&fixture(), 2, "--ngram-io mmap", "--ngram-io is for a volume");
}

#[test]
fn the_tiny_model_is_written_inspected_and_scored() {
    let dir = Dir::new();
    let out = dir.path("tiny.ninfer");
    let synth = ["synth", "--preset", "flash-next-tiny", out.to_str().unwrap()];
    let run = dir.run(synth);
    assert_eq!((run.code, run.stdout.as_str()), (0, ""), "{}", run.stderr);
    assert!(run.stderr.contains("tiny.ninfer.ngram | 52.0 KiB"), "{}", run.stderr);
    let inspected = dir.run(["inspect", out.to_str().unwrap()]);
    assert!(inspected.stdout.contains("Qwen4ExpForCausalLM"), "{}", inspected.stdout);
    let words = "A_text_of_printable_characters,_one_token_each:_";
    let text = dir.file("text.txt", words.repeat(3));
    let four = dir.report(&out, &text, &format!("{PROTOCOL} --expert-a4-activations"));
    let sixteen = dir.report(&out, &text, PROTOCOL);
    assert_ne!(window_nlls(&four), window_nlls(&sixteen));
    assert_eq!(four["execution"]["expert_a4_activations"], true);
    assert_eq!(dir.run(synth).code, 2);
    let bench = dir.run(["bench", out.to_str().unwrap()]);
    assert_eq!((bench.code, bench.stdout.as_str()), (2, ""), "{}", bench.stderr);
    let words = "bench does not measure Qwen3.8-Flash-Next in this build";
    assert!(bench.stderr.contains(words), "{}", bench.stderr);
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
