//! Command lines that cannot be carried out: exit code 2, a message, nothing on standard output, nothing written.

use crate::common::{Dir, byte_model};

/// Runs a command line in which MODEL and TEXT stand for good files.
fn refused(line: &str) -> String {
    let dir = Dir::new();
    let text = dir.file("text.txt", "abcdefgh");
    let line = line
        .replace("MODEL", byte_model().to_str().unwrap())
        .replace("TEXT", text.to_str().unwrap());
    let run = dir.run(line.split_whitespace());
    assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{line}: {}", run.stderr);
    assert_eq!(dir.files(), ["text.txt"], "{line}");
    run.stderr
}

#[test]
fn outside_a_clone_there_is_no_demo() {
    let message = refused("");
    assert!(
        message.contains("pass ARTIFACT and --corpus MANIFEST or --text FILE"),
        "{message}"
    );
}

#[test]
fn options_of_flash_next_fit_the_model_and_one_another() {
    for (options, words) in [
        (
            "--no-ngram-table",
            "--no-ngram-table is for Qwen3.8-Flash-Next; this model is Qwen3_5ForCausalLM",
        ),
        ("--ngram-volume TEXT", "--ngram-volume is for Qwen3.8-Flash-Next"),
        (
            "--expert-residency host",
            "--expert-residency is for Qwen3.8-Flash-Next",
        ),
        // What the defaults would be anyway.
        (
            "--expert-residency device",
            "--expert-residency is for Qwen3.8-Flash-Next",
        ),
        ("--ngram-residency disk", "--ngram-residency is for Qwen3.8-Flash-Next"),
        (
            "--expert-a4-activations",
            "--expert-a4-activations is for Qwen3.8-Flash-Next",
        ),
        ("--expert-a4-activations --route exact", "needs a route that rounds"),
        ("--expert-cache-mib 1", "needs --expert-residency host or disk"),
        ("--expert-residency shelf", "[possible values: device, host, disk]"),
        ("--no-ngram-table --ngram-volume TEXT", "cannot be used with"),
        ("--no-ngram-table --ngram-lock", "cannot be used with"),
        ("--expert-a4-activations --a16-activations", "cannot be used with"),
        ("--ngram-volume nowhere", "--ngram-volume \"nowhere\" does not exist"),
        (
            "--ngram-volume .",
            "--ngram-volume \".\" is a directory, expected a file",
        ),
        ("--ngram-table nowhere", "--ngram-table \"nowhere\" does not exist"),
        (
            "--ngram-table /dev/zero",
            "--ngram-table \"/dev/zero\" is a device, expected a file or a directory",
        ),
        (
            "--ngram-residency ram-hot --ngram-hot-profile nowhere",
            "--ngram-hot-profile \"nowhere\" does not exist",
        ),
        (
            "--ngram-residency ram-hot --ngram-hot-profile /dev/zero",
            "--ngram-hot-profile \"/dev/zero\" is a device",
        ),
        ("--expert-stripe nowhere", "--expert-stripe \"nowhere\" does not exist"),
        ("--expert-stripe .", "--expert-stripe \".\" is a directory"),
        ("--ngram-lock", "--ngram-lock needs --ngram-residency ram"),
        (
            "--ngram-io-depth 8",
            "--ngram-io-depth needs --ngram-io buffered or direct",
        ),
        ("--ngram-io buffered --ngram-io-depth 0", "from 1 to 1024"),
        ("--ngram-io buffered --ngram-io-depth 1025", "from 1 to 1024"),
        ("--ngram-io pigeon", "[possible values: mmap, buffered, direct]"),
        ("--ngram-table TEXT --ngram-volume TEXT", "cannot be used with"),
        ("--ngram-table TEXT", "--ngram-table is for Qwen3.8-Flash-Next"),
        ("--expert-stripe TEXT", "--expert-stripe is for Qwen3.8-Flash-Next"),
        (
            "--ngram-hot-profile TEXT",
            "--ngram-hot-profile needs --ngram-residency ram-hot",
        ),
        (
            "--ngram-residency ram --ngram-ram-mib 4",
            "--ngram-ram-mib needs --ngram-residency disk or ram-hot",
        ),
        ("--ngram-hot-profile-out TEXT", "--ngram-hot-profile-out \""),
        (
            "--ngram-residency ram --ngram-io mmap",
            "--ngram-io needs --ngram-residency disk",
        ),
        (
            "--ngram-residency ram-hot",
            "--ngram-residency ram-hot needs --ngram-hot-profile",
        ),
    ] {
        let message = refused(&format!("MODEL --text TEXT {options}"));
        assert!(message.contains(words), "{options}: {message}");
    }
}

#[test]
fn unknown_and_incomplete_options_are_named() {
    for (line, words) in [
        ("MODEL --text TEXT --frobnicate", "--frobnicate"),
        ("MODEL --text", "--text"),
        ("MODEL --text TEXT --context many", "--context"),
        ("MODEL --text TEXT --context -1", "--context"),
        ("MODEL --text TEXT --context 4294967296", "--context"),
        ("MODEL --text TEXT --context +64", "below 2^32, digits alone"),
        ("MODEL --text TEXT --stride +8", "digits alone"),
        ("MODEL --text TEXT --threads +1", "digits alone"),
        ("MODEL --text TEXT --rope-yarn-factor +2", "without a plus sign"),
        ("MODEL --text TEXT --ngram-io-depth +8", "digits alone"),
        ("MODEL --text TEXT --expert-cache-mib +8", "expected a number of MiB"),
        ("MODEL --text TEXT --shard +0/2", "a shard is written i/n"),
        ("synth o.ninfer --preset demo --seed +1", "below 2^64, digits alone"),
        ("bench MODEL --context 64,+64", "digits alone"),
        ("gate TEXT TEXT --nll +1", "without a plus sign"),
        ("MODEL --text TEXT --log-level loud", "--log-level"),
        ("MODEL --text TEXT --corpus TEXT", "cannot be used with"),
        ("MODEL --text TEXT --quick", "cannot be used with"),
        ("MODEL MODEL --text TEXT", "cannot be used with"),
        ("MODEL --text TEXT --kv-window maybe", "[possible values: on, off]"),
        (
            "MODEL --text TEXT --kv-emulation exact",
            "[possible values: format, kernel]",
        ),
        (
            "MODEL --text TEXT --shard 3/3",
            "a shard is written i/n with 0 <= i < n",
        ),
        (
            "MODEL --text TEXT --llama-chunks --save-logits l --resume s",
            "cannot be used with",
        ),
        ("merge TEXT", "--output"),
        ("merge --output o", "REPORT"),
        ("gate MODEL", "FAST"),
        ("convert MODEL", "OUT.ninfer"),
        ("inspect", "PATH"),
        ("completions tcsh", "tcsh"),
    ] {
        let message = refused(line);
        assert!(message.contains(words), "{line}: {message}");
    }
}

#[test]
fn resolved_options_are_refused_in_words() {
    for (line, words) in [
        ("MODEL", "pass --corpus MANIFEST or --text FILE"),
        ("--text TEXT", "pass the artifact"),
        ("MODEL --text TEXT --context 1", "context must be at least 2"),
        (
            "MODEL --text TEXT --context 2048",
            "stride must be at least 1 and less than the context of 2048",
        ),
        ("MODEL --text TEXT --stride 0", "stride must be at least 1"),
        ("MODEL --text TEXT --batch +2", "expected auto or a number of windows"),
        ("MODEL --text TEXT --device cuda:+0", "expected ndarray, flex, cuda:N"),
        ("MODEL --text TEXT --prefill-chunk 100", "a multiple of 128"),
        (
            "MODEL --text TEXT --device gpu",
            "expected ndarray, flex, cuda:N, vulkan:N or auto",
        ),
        (
            "MODEL --text TEXT --kv-dtype int7",
            "unknown KV codec `int7`; accepted: bf16, ",
        ),
        (
            "MODEL --text TEXT --kv-dtype k=int8",
            "expected a name or k=NAME,v=NAME",
        ),
        ("MODEL --text TEXT --kv-window off", "--kv-dtype bf16 has none"),
        (
            "MODEL --text TEXT --use-original-int8-prefill-kernel",
            "needs a KV cache of int8, got `bf16`",
        ),
        (
            "MODEL --text TEXT --kv-emulation format --prefill-8bit-pv",
            "belongs to --kv-emulation kernel",
        ),
        ("MODEL --text TEXT --route exact --kv-window on", "needs --kv-dtype"),
        (
            "MODEL --text TEXT --shard 0/2 --save-top-tokens t",
            "a reference must hold all windows",
        ),
        ("MODEL --text TEXT --resume nowhere/state", "does not exist"),
        ("gate MODEL TEXT --nll -1", "at least 0"),
        ("MODEL --text TEXT --route fast", "expected normal or exact"),
        ("MODEL --text TEXT --lossless --reference", "are different routes"),
        (
            "MODEL --text TEXT --lossless --kv-dtype int8",
            "--kv-dtype int8 would add a loss",
        ),
        (
            "MODEL --text TEXT --lossless --prefill-chunk 1024",
            "sees a window in one pass",
        ),
        ("MODEL --text nowhere.txt", "does not exist"),
        ("nowhere.ninfer --text TEXT", "does not exist"),
        ("MODEL --text TEXT --output TEXT", "is a file"),
    ] {
        let message = refused(line);
        assert!(message.contains(words), "{line}: {message}");
        assert!(
            message.starts_with("error: ") && message.ends_with("; try '--help'\n"),
            "{message}"
        );
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

#[cfg(not(any(feature = "cuda", feature = "vulkan")))]
#[test]
fn a_device_of_another_build_names_the_feature() {
    for (device, feature) in [("cuda:0", "cuda"), ("1", "cuda"), ("vulkan:0", "vulkan")] {
        let message = refused(&format!("MODEL --text TEXT --device {device}"));
        assert!(
            message.contains(&format!("build with --features {feature}")),
            "{message}"
        );
    }
}

#[test]
fn a_window_beyond_the_models_positions_is_refused_before_loading() {
    // The model has 4,096 positions.
    let message = refused("MODEL --text TEXT --context 8192 --log-level debug");
    assert!(message.contains("8192") && message.contains("4096"), "{message}");
    assert!(!message.contains("weights"), "{message}");
}

#[test]
fn options_of_later_builds_are_never_ignored() {
    for option in ["--prefill-cublas", "--fast-path x", "--devices 0,1"] {
        let message = refused(&format!("MODEL --text TEXT {option}"));
        assert!(message.contains("is not in this build"), "{message}");
    }
}

#[test]
fn log_level_off_leaves_only_the_exit_code() {
    assert_eq!(refused("MODEL --text TEXT --context 1 --log-level off"), "");
}
