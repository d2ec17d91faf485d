//! The command lines of the two evaluators' guides on the demo model, as they stand there apart from the program's name, and
//! every option that the guides name.

use std::path::Path;
use std::sync::OnceLock;

use crate::common::{Dir, demo_checkpoint, repository};

/// What a command line gives.
enum Expected {
    /// A report.
    Runs,
    /// Exit code 2 and the name of the option.
    NotInThisBuild,
    /// Exit code 2 and these words: the option belongs to another model, or its value is not in this build.
    Refused(&'static str),
}

use Expected::{NotInThisBuild, Refused, Runs};

/// The guides' command lines in their order; the second guide's corpus line with the first guide's corpus is the first guide's.
const COMMANDS: &[&str] = &[
    "models/qwen3_8_27b_nvfp4.ninfer --corpus eval/corpora/perplexity-1m/manifest.json --quick --kv-dtype fp8",
    "models/qwen3_8_27b.ninfer --text notes.txt --context 16384 --stride 8192 --kv-dtype int8",
    "models/qwen3_8_27b.ninfer --corpus eval/corpora/perplexity-1m/manifest.json --context 65536 --stride 32768 \
     --kv-dtype bf16 --save-top-tokens ref-bf16-64k.bin",
    "models/qwen3_8_27b.ninfer --corpus eval/corpora/perplexity-1m/manifest.json --context 65536 --stride 32768 \
     --kv-dtype nvfp4 --kl-reference ref-bf16-64k.bin",
    "models/qwen3_8_27b.ninfer --corpus eval/corpora/perplexity-1m/manifest.json --quick --kv-dtype int8",
    "models/qwen3_8_27b.ninfer --corpus eval/corpora/perplexity-heldout-2026-09/manifest.json --quick --kv-dtype int8",
    "models/qwen3_8_27b_gsq_rco_iq3_s.ninfer --text wiki.test.joined.txt --context 2048 --disjoint --kv-dtype bf16",
];

/// The options that the guides name. An option that arrives changes its line here.
#[rustfmt::skip]
const OPTIONS: &[(&str, Expected)] = &[
    ("--prefill-chunk 256", Runs),
    ("--log-level debug", Runs),
    ("--save-tokens tokens.json", Runs),
    ("--disjoint --context 64", Runs),
    ("--kv-dtype vq2", Runs),
    ("--kv-dtype k8v4", Runs),
    ("--kv-dtype k4v2", Runs),
    ("--kv-dtype rk8v4", Runs),
    ("--kv-dtype rk4v4", Runs),
    ("--kv-dtype rk4v4-e8", Runs),
    ("--kv-dtype rk2v4-e8", Runs),
    ("--kv-dtype int8 --use-original-int8-prefill-kernel", Runs),
    ("--kv-dtype nvfp4 --use-original-nvfp4-prefill-kernel", Runs),
    ("--kv-dtype int8 --fast-prefill-kernel", Runs),
    ("--kv-dtype fp8 --fast-prefill-kernel", Refused("--fast-prefill-kernel")),
    ("--device ndarray", Runs),
    ("--reproducible", Runs),
    ("--lossless --prefill-chunk 4096", Runs),
    ("--reference --prefill-chunk 4096", Runs),
    ("--fast-path NAME", NotInThisBuild),
    ("--expert-a4-activations", Refused("is for Qwen3.8-Flash-Next")),
    ("--a16-activations", Runs),
    ("--rope-yarn-factor 1", Runs),
    ("--rope-yarn", Runs),
    ("--rope-scaling-factor 2", Runs),
    ("--rope-scaling-factor 2 --rope-scaling-original-context 128", Runs),
    ("--prefill-cublas", NotInThisBuild),
    ("--no-prefill-cublas-projections", NotInThisBuild),
    ("--no-prefill-a8", Runs),
    ("--lm-head-q4", Runs),
    ("--lm-head-q6", Runs),
    ("--embedding-q4", Runs),
    ("--embedding-q6", Runs),
    ("--mtp-experts-q4", NotInThisBuild),
    ("--gdn-state-fp16", Runs),
    ("--mlp-a8-decode", Runs),
    ("--devices 0,1", NotInThisBuild),
    ("--ngram-volume notes.txt", Refused("is for Qwen3.8-Flash-Next")),
    ("--expert-stripe notes.txt", Refused("is for Qwen3.8-Flash-Next")),
    ("--expert-residency host", Refused("is for Qwen3.8-Flash-Next")),
    ("--expert-residency host --expert-cache-mib 64", Refused("is for Qwen3.8-Flash-Next")),
    ("--ngram-table notes.txt", Refused("is for Qwen3.8-Flash-Next")),
    ("--ngram-residency ram-hot", Refused("--ngram-residency ram-hot needs --ngram-hot-profile")),
    ("--ngram-io direct", Refused("is for Qwen3.8-Flash-Next")),
    ("--ngram-io buffered --ngram-io-depth 64", Refused("is for Qwen3.8-Flash-Next")),
    ("--ngram-residency ram-hot --ngram-hot-profile notes.txt", Refused("is for Qwen3.8-Flash-Next")),
    ("--ngram-ram-mib 4096", Refused("is for Qwen3.8-Flash-Next")),
    ("--ngram-residency ram --ngram-lock", Refused("is for Qwen3.8-Flash-Next")),
    ("--no-ngram-table", Refused("is for Qwen3.8-Flash-Next")),
];

/// The demo model with the positions of a long-context one: the demo checkpoint with another `max_position_embeddings`,
/// converted once.
fn long_model() -> &'static Path {
    static MODEL: OnceLock<(Dir, std::path::PathBuf)> = OnceLock::new();
    let (_, path) = MODEL.get_or_init(|| {
        let dir = Dir::new();
        for entry in std::fs::read_dir(demo_checkpoint()).unwrap() {
            let file = entry.unwrap();
            let mut bytes = std::fs::read(file.path()).unwrap();
            if file.file_name() == "config.json" {
                let mut config: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
                config["max_position_embeddings"] = 262_144.into();
                bytes = config.to_string().into_bytes();
            }
            dir.file(&format!("hf/{}", file.file_name().to_str().unwrap()), bytes);
        }
        let run = dir.run(["convert", "hf", "long.ninfer", "--recipe", "bf16"]);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let path = dir.path("long.ninfer");
        (dir, path)
    });
    path
}

/// The first bytes of a demo text.
fn beginning(name: &str, bytes: usize) -> Vec<u8> {
    let path = repository(&format!("eval/corpora/open-1m/data/demo/{name}.txt"));
    std::fs::read(path).unwrap()[..bytes].to_vec()
}

/// A folder as the guides' reader has it.
fn folder() -> Dir {
    let dir = Dir::new();
    for model in ["qwen3_8_27b", "qwen3_8_27b_nvfp4", "qwen3_8_27b_gsq_rco_iq3_s"] {
        let bytes = std::fs::read(long_model()).unwrap();
        dir.file(&format!("models/{model}.ninfer"), bytes);
    }
    for corpus in ["perplexity-1m", "perplexity-heldout-2026-09"] {
        let at = format!("eval/corpora/{corpus}");
        let names = ["english_reference", "rust_code"];
        let stream = |name: &str| format!(r#"{{"id":"{name}","domain":"{name}","path":"data/{name}.txt"}}"#);
        let manifest = format!(
            r#"{{"corpus_id":"{corpus}","streams":[{}],"modes":{{"quick":["rust_code"],"full":{names:?}}}}}"#,
            names.map(stream).join(",")
        );
        dir.file(&format!("{at}/manifest.json"), manifest);
        for name in names {
            dir.file(&format!("{at}/data/{name}.txt"), beginning(name, 600));
        }
    }
    dir.file("notes.txt", beginning("english_long_form", 600));
    dir.file("wiki.test.joined.txt", beginning("english_long_form", 12_000));
    dir
}

#[test]
fn the_guides_command_lines_run_as_they_stand() {
    let dir = folder();
    for (number, line) in COMMANDS.iter().enumerate() {
        let run = dir.run(line.split_whitespace());
        assert_eq!(run.code, 0, "{line}: {}", run.stderr);
        assert!(run.stdout.starts_with("Perplexity result\n"), "{line}: {}", run.stdout);
        let reports = dir.files().iter().filter(|name| name.ends_with("/report.json")).count();
        assert_eq!(reports, number + 1, "{line}");
    }
    let compared = dir.run(COMMANDS[3].split_whitespace());
    assert!(
        compared.stdout.contains("KL divergence from reference: mean "),
        "{}",
        compared.stdout
    );
    let help = dir.run(["--help"]);
    assert_eq!(help.code, 0);
    for (options, _) in OPTIONS {
        let named = options.split_whitespace().filter(|word| word.starts_with("--"));
        for option in named {
            assert!(help.stdout.contains(option), "{option} is not in the help");
        }
    }
}

#[test]
fn every_option_of_the_guides_runs_or_says_why_not() {
    let dir = Dir::new();
    dir.file("notes.txt", beginning("english_long_form", 300));
    let model = repository("tests/data/demo.ninfer");
    for (options, expected) in OPTIONS {
        let line = ["--text", "notes.txt"].into_iter().chain(options.split_whitespace());
        let run = dir.run(std::iter::once(model.to_str().unwrap()).chain(line));
        match expected {
            Runs => assert_eq!(run.code, 0, "{options}: {}", run.stderr),
            NotInThisBuild => {
                assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{options}");
                assert!(
                    run.stderr.contains(" is not in this build"),
                    "{options}: {}",
                    run.stderr
                );
            }
            Refused(words) => {
                assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{options}");
                assert!(run.stderr.contains(words), "{options}: {}", run.stderr);
            }
        }
    }
}
