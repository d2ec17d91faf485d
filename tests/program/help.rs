//! Help, version, completions and manual pages.

use crate::common::Dir;

#[test]
fn help_goes_to_stdout_in_groups() {
    let run = Dir::new().run(["--help"]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    let headings = [
        "Input:",
        "Protocol:",
        "Model and device:",
        "KV cache:",
        "Prefill and numerical route:",
        "RoPE:",
        "Qwen3.8-Flash-Next:",
        "Comparison files:",
        "Output and logging:",
    ];
    let places: Vec<_> = headings
        .iter()
        .map(|heading| run.stdout.find(&format!("\n{heading}\n")))
        .collect();
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{places:?}");
}

#[test]
fn version_names_the_program() {
    let run = Dir::new().run(["--version"]);
    assert_eq!(
        (run.code, run.stdout),
        (0, format!("burn-perplexity {}\n", env!("CARGO_PKG_VERSION")))
    );
}

#[test]
fn every_shell_gets_a_completion_script() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let run = Dir::new().run(["completions", shell]);
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert!(
            run.stdout.contains("kv-dtype") && run.stdout.contains("inspect"),
            "{shell}"
        );
    }
}

#[test]
fn manual_pages_are_printed_or_written_for_every_command() {
    let dir = Dir::new();
    let page = dir.run(["man"]);
    assert!(
        page.code == 0 && page.stdout.contains(".TH burn-perplexity"),
        "{}",
        page.stdout
    );
    assert_eq!(dir.run(["man", "--dir", "pages"]).code, 0);
    let pages = dir.files();
    for name in [
        "burn-perplexity.1",
        "burn-perplexity-convert.1",
        "burn-perplexity-inspect.1",
    ] {
        assert!(pages.contains(&format!("pages/{name}")), "{pages:?}");
    }
}
