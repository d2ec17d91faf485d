//! What a finished run leaves behind: `report.json` and the table.

mod common;

use std::path::Path;

use common::Prepared;
use perplexity_eval::corpus::{CorpusPlan, CorpusText};
use perplexity_eval::evaluate::{Options, evaluate};
use perplexity_eval::report::{Artifact, Report, RunInfo, Settings};
use perplexity_eval::table;
use perplexity_eval::windows::{Protocol, WindowKind};

/// The ten letters a..j as tokens 0..9, the log-probability of token t being -t/4.
fn run(kind: WindowKind, context: usize) -> Report {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("demo.txt");
    std::fs::write(&path, "abcdefghij").unwrap();
    let corpus = CorpusText::from_text(&path).unwrap();
    let encode = |text: &str| Ok::<_, String>(text.bytes().map(|b| u32::from(b - b'a')).collect());
    let plan = corpus
        .plan(Protocol::new(kind, context, 2).unwrap(), None, encode)
        .unwrap();
    report(&plan)
}

fn report(plan: &CorpusPlan) -> Report {
    let mut scorer = Prepared((0..10u8).map(|t| -f32::from(t) / 4.0).collect());
    let mut results = evaluate(plan, &mut scorer, &Options::default(), &mut ()).unwrap();
    results.score_seconds = 2.0;
    let info = RunInfo {
        artifact: Artifact {
            name: "demo".into(),
            ..Artifact::default()
        },
        settings: Settings {
            kv_dtype: "bf16".into(),
            ..Settings::default()
        },
        ..RunInfo::default()
    };
    Report::build(plan, &results, info)
}

#[test]
fn json_is_sorted_indented_and_exact() {
    let report = run(WindowKind::Sliding, 6);
    let text = report.to_json().unwrap();
    assert!(text.ends_with("}\n") && text.starts_with("{\n  \"artifact\": {\n    \"architecture\": "));
    let keys: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("  \""))
        .map(|line| line.trim_start_matches("  \"").split('"').next().unwrap())
        .collect();
    let mut sorted = keys.clone();
    sorted.sort_unstable();
    assert_eq!(keys, sorted);
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["schema_version"], 6);
    assert_eq!(value["execution"]["windows"], "sliding");
    assert_eq!(value["overall"]["total_nll"], 11.25);
    assert_eq!(value["overall"]["mean_nll"], 1.25);
    assert_eq!(value["streams"][0]["unscored_tokens"], 1);
    assert_eq!(value["streams"][0]["windows"][1]["first_target"], 4);
    assert_eq!(value["timing"]["scored_tokens_per_second"], 4.5);
    // Ten bytes, one word.
    let bits = value["overall"]["bits_per_byte"].as_f64().unwrap();
    assert!((bits - 1.125 / std::f64::consts::LN_2).abs() < 1e-12);
    assert_eq!(value["denominators"]["words"], 1);
    assert_eq!(Report::from_json(&text).unwrap(), report);
}

#[test]
fn disjoint_windows_leave_tokens_unscored_and_have_no_text_figures() {
    let report = run(WindowKind::Disjoint, 4);
    let stream = &report.streams[0];
    assert_eq!(
        (
            stream.input_tokens,
            stream.unscored_tokens,
            stream.figures.scored_tokens
        ),
        (10, 4, 6)
    );
    assert_eq!(
        (
            stream.text.bytes,
            stream.text.bits_per_byte,
            report.overall.text.bits_per_byte
        ),
        (10, None, None)
    );
    assert_eq!(
        (report.execution.context_tokens, report.execution.stride_tokens),
        (4, 4)
    );
}

#[test]
fn a_figure_that_is_not_finite_is_never_written() {
    let dir = tempfile::tempdir().unwrap();
    let good = run(WindowKind::Sliding, 6);
    for spoil in [
        (|r: &mut Report| r.overall.figures.total_nll = f64::NAN) as fn(&mut Report),
        |r| r.overall.text.word_perplexity = Some(f64::INFINITY),
    ] {
        let mut bad = good.clone();
        spoil(&mut bad);
        assert!(bad.write(dir.path()).is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
    good.write(dir.path()).unwrap();
    let names: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names, ["report.json"]);
}

#[test]
fn the_table_has_fixed_columns() {
    let mut out = Vec::new();
    table::write(&mut out, &run(WindowKind::Sliding, 6), Path::new("/out/report.json")).unwrap();
    let text = String::from_utf8(out).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[..7],
        [
            "Perplexity result",
            "artifact: demo",
            "kv: bf16, corpus: custom-demo.txt / custom, context/stride: 6/2",
            "",
            "domain                            tokens        mean_nll             ppl",
            "custom                                 9        1.250000        3.490343",
            "overall                                9        1.250000        3.490343",
        ]
    );
    assert_eq!(
        lines[lines.len() - 2..],
        ["score rate: 4.5 tok/s", "report: \"/out/report.json\""]
    );
    let mut out = Vec::new();
    table::write(&mut out, &run(WindowKind::Disjoint, 4), Path::new("r")).unwrap();
    assert!(
        String::from_utf8(out)
            .unwrap()
            .contains("context/stride: 4/4 (disjoint windows)\n")
    );
}

/// The table of a report.
fn table(report: &Report) -> String {
    let mut out = Vec::new();
    table::write(&mut out, report, Path::new("r")).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn columns_of_large_numbers_stay_apart() {
    let mut report = run(WindowKind::Sliding, 6);
    let figures = &mut report.overall.figures;
    figures.scored_tokens = u64::MAX;
    figures.mean_nll = Some(38.870_443_760_709_97);
    figures.perplexity = Some(76_070_997_391_233_872.0);
    report.domains[0].figures.perplexity = Some(f64::MAX);
    report.domains[0].domain = "a domain whose name is longer than its column".into();
    let text = table(&report);
    let rows: Vec<&str> = text.lines().skip(5).take(2).collect();
    let words: Vec<&str> = rows[1].split_whitespace().collect();
    assert_eq!(words, ["overall", "18446744073709551615", "38.870444", "7.6070997e+16"]);
    let expected = format!("its column {:>15} {:>15} {:>15}", 9, "1.250000", "1.7976931e+308");
    assert!(rows[0].ends_with(&expected), "{text}");
}

#[test]
fn a_table_holds_no_control_characters() {
    let mut report = run(WindowKind::Sliding, 6);
    let lines = table(&report).lines().count();
    report.artifact.name = "a\n\x1b[31mRED".into();
    report.corpus.id = "c\r\x1b[2J".into();
    report.corpus.mode = "m\x07".into();
    report.domains[0].domain = "two\nlines\u{9b}".into();
    report.notes.push("n\n\x1b]0;title\x07".into());
    let text = table(&report);
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    assert_eq!(text.lines().count(), lines + 1);
    assert!(text.contains("\nartifact: a ?[31mRED\n"), "{text}");
}

#[test]
fn the_interval_says_what_is_resampled() {
    let report = run(WindowKind::Sliding, 6);
    let text = table(&report);
    let line = text
        .lines()
        .find(|line| line.starts_with("ppl standard error: "))
        .unwrap();
    assert!(line.contains(" windows of one stream); 95 % interval "), "{line}");
    assert!(line.ends_with(" (windows resampled)"), "{line}");
}
