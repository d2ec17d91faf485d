//! The software Vulkan device (`--features vulkan`), and what of a card's options can be refused without one.

use crate::common::{Dir, demo_artifact};

#[cfg(feature = "vulkan")]
mod vulkan {
    use super::*;
    use crate::common::{number, repository};

    const PROTOCOL: &str = "--context 256 --stride 128 --log-level error";

    fn text(dir: &Dir) -> std::path::PathBuf {
        let whole = std::fs::read(repository("eval/corpora/open-1m/data/demo/english_long_form.txt")).unwrap();
        dir.file("a.txt", &whole[..600])
    }

    #[test]
    fn scores_as_the_cpu_does() {
        let dir = Dir::new();
        let text = text(&dir);
        // Roundings to 16 bits in another order move the log-probability of a token by 1e-2 on the mean, and there are 145.
        for (options, tolerance) in [("--route exact", 1e-5), ("", 1e-2), ("--kv-dtype int8", 1e-2)] {
            let score = |device: &str| {
                let line = format!("{PROTOCOL} {options} --device {device}");
                dir.report(&demo_artifact(), &text, &line)
            };
            let (cpu, device) = (score("flex"), score("vulkan:0"));
            let relative = number(&device, "/overall/perplexity") / number(&cpu, "/overall/perplexity") - 1.0;
            assert!(relative.abs() < tolerance, "{options:?}: {relative:e}");
            assert_eq!(device["execution"]["backend"], "vulkan:0");
            assert_eq!(device["execution"]["options"]["weight_residency"], "expanded");
        }
    }

    #[test]
    fn kv_formats_change_the_result_as_on_the_cpu() {
        let dir = Dir::new();
        let text = text(&dir);
        let score = |kv: &str, device: &str| {
            let line = format!("{PROTOCOL} --route exact --kv-dtype {kv} --device {device}");
            number(&dir.report(&demo_artifact(), &text, &line), "/overall/perplexity")
        };
        let plain = score("bf16", "vulkan:0");
        for kv in ["int8", "k8v4", "rk8v4", "turbo4"] {
            let (cpu, device) = (score(kv, "flex"), score(kv, "vulkan:0"));
            let (codec, rest) = (device / plain - 1.0, device / cpu - 1.0);
            assert!(rest.abs() < 1e-5, "{kv}: {rest:e} from the CPU");
            assert!(
                codec.abs() > 10.0 * rest.abs(),
                "{kv}: {codec:e} from bf16, {rest:e} from the CPU"
            );
        }
    }

    #[test]
    fn a_machine_without_a_device_is_told_so() {
        let dir = Dir::new();
        let (text, out) = (text(&dir), dir.path("out"));
        let run = std::process::Command::new(env!("CARGO_BIN_EXE_burn-perplexity"))
            .args([&demo_artifact(), &"--text".into(), &text, &"--output".into(), &out])
            .args(["--device", "vulkan:0"])
            .envs(["VK_DRIVER_FILES", "VK_ICD_FILENAMES"].map(|name| (name, "/nowhere.json")))
            .output()
            .unwrap();
        let words = String::from_utf8(run.stderr).unwrap();
        assert_eq!(run.status.code(), Some(1), "{words}");
        assert!(
            words.contains("error: device vulkan:0: the Vulkan loader finds no device; install a driver"),
            "{words}"
        );
        assert!(!words.contains("panicked"), "{words}");
        assert!(!out.exists());
    }

    #[test]
    fn a_budget_that_holds_no_window_is_refused_before_loading() {
        let dir = Dir::new();
        let (text, out) = (text(&dir), dir.path("out"));
        let line = format!(
            "{PROTOCOL} --device vulkan:0 --memory-budget 100MiB --output {}",
            out.display()
        );
        let run = dir.score(&demo_artifact(), &text, &line);
        assert_eq!(run.code, 2, "{}", run.stderr);
        for words in [
            "one window of",
            "on vulkan:0",
            "100.0 MiB may be taken",
            "--memory-budget",
        ] {
            assert!(run.stderr.contains(words), "{}", run.stderr);
        }
        assert!(!out.exists());
    }
}

#[test]
fn a_memory_budget_needs_a_card() {
    let dir = Dir::new();
    let text = dir.file("a.txt", b"Some text.");
    let run = dir.score(&demo_artifact(), &text, "--memory-budget 4GB");
    assert_eq!(run.code, 2, "{}", run.stderr);
    let words = "--memory-budget needs --device cuda:N or vulkan:0";
    assert!(run.stderr.contains(words), "{}", run.stderr);
}
