//! Comparing two reports.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::ToyScorer;
use perplexity_eval::compare::{CompareError, compare};
use perplexity_eval::corpus::CorpusPlan;
use perplexity_eval::evaluate::{Options, SaveTopTokens, evaluate};
use perplexity_eval::gate::{Tolerances, Verdict, judge};
use perplexity_eval::report::{Report, RunInfo, Settings};
use perplexity_eval::uncertainty::ClusterKind;
use perplexity_eval::windows::{Protocol, WindowKind};
use serde_json::{Value, json};

type Sums<'a> = &'a [(u64, f64)];

/// A report of version 3 with the given sums: `(stream, domain, [(tokens, nll)])`.
fn version_3(streams: &[(&str, &str, Sums<'_>)], kv: &str) -> Value {
    let windows = |sums: Sums<'_>| -> Vec<Value> {
        let mut begin = 1;
        let mut windows = Vec::new();
        for (index, (tokens, nll)) in sums.iter().enumerate() {
            let end = begin + tokens;
            windows.push(
                json!({"index": index, "target_begin": begin, "target_end": end, "scored_tokens": tokens,
                "total_nll": nll}),
            );
            begin = end;
        }
        windows
    };
    let streams: Vec<Value> = streams
        .iter()
        .map(|(id, domain, sums)| json!({"id": id, "domain": domain, "windows": windows(sums)}))
        .collect();
    json!({"schema_version": 3, "artifact": {"name": "demo"}, "corpus": {"id": "c", "mode": "full"},
        "execution": {"context_tokens": 6, "stride_tokens": 2, "kv_dtype": kv}, "streams": streams})
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }
    fn write(&self, name: &str, report: &Value) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, report.to_string()).unwrap();
        path
    }
}

#[test]
fn paired_differences_by_hand() {
    let folder = Folder::new();
    let a = version_3(&[("s", "x", &[(2, 2.0), (2, 4.0)]), ("t", "y", &[(4, 8.0)])], "bf16");
    let b = version_3(&[("s", "x", &[(2, 2.5), (2, 3.5)]), ("t", "y", &[(4, 12.0)])], "fp8");
    let result = compare(&folder.write("a", &a), &folder.write("b", &b)).unwrap();
    // D = (0.5 - 0.5 + 4) / 8 = 0.5; clusters: s has 0 - 4·0.5 = -2, t has 4 - 4·0.5 = 2; SE² = 2/1·8/64 = 0.25.
    let paired = &result.mean_nll;
    assert_eq!(
        (paired.count, paired.first, paired.second, paired.difference),
        (8, 14.0 / 8.0, 18.0 / 8.0, 0.5)
    );
    assert_eq!(
        (paired.uncertainty.clustered_standard_error, paired.t),
        (Some(0.5), Some(1.0))
    );
    assert_eq!(paired.uncertainty.clusters, ClusterKind::Streams);
    assert_eq!(
        (result.windows_better, result.windows_worse, result.windows_equal),
        (1, 2, 0)
    );
    assert_eq!(result.perplexity_ratio, Some(0.5f64.exp()));
    assert_eq!(
        (result.domains["x"].difference, result.domains["y"].difference),
        (0.0, 1.0)
    );
    assert_eq!(result.domains["x"].uncertainty.clusters, ClusterKind::Windows);
    assert_eq!(result.streams[1].0, "t");
    assert!(!result.identical && result.kl_divergence.is_none());
    assert_eq!(result.differences.len(), 1);
    assert_eq!(
        (result.differences[0].field.as_str(), &result.differences[0].second),
        ("execution.kv_dtype", &json!("fp8"))
    );
    let mut table = Vec::new();
    result.write_table(&mut table).unwrap();
    let table = String::from_utf8(table).unwrap();
    assert!(
        table.contains("\n  execution.kv_dtype: \"bf16\" -> \"fp8\"\n"),
        "{table}"
    );
    assert!(
        table.contains("\noverall                              8      1.750000      2.250000     +0.500000      5.00e-01          1.00\n"),
        "{table}"
    );
}

#[test]
fn every_protocol_mismatch_is_named() {
    let folder = Folder::new();
    let sums: Sums<'_> = &[(2, 2.0), (2, 4.0)];
    let good = version_3(&[("s", "x", sums)], "bf16");
    let first = folder.write("a", &good);
    let refusal = |change: fn(&mut Value)| {
        let mut other = good.clone();
        change(&mut other);
        match compare(&first, &folder.write("b", &other)) {
            Err(CompareError::Protocol(found)) => found,
            other => panic!("{other:?}"),
        }
    };
    let both = refusal(|v| {
        v["corpus"]["id"] = json!("d");
        v["execution"]["stride_tokens"] = json!(3);
    });
    let expected = [
        "corpus id is \"c\" in the first and \"d\" in the second",
        "stride_tokens is 2 in the first and 3 in the second",
    ];
    assert_eq!(both, expected);
    assert_eq!(refusal(|v| v["execution"]["windows"] = json!("disjoint")).len(), 1);
    assert_eq!(
        refusal(|v| v["streams"] = json!([])),
        ["1 streams in the first, 0 in the second"]
    );
    assert_eq!(
        refusal(|v| v["streams"][0]["id"] = json!("q")),
        ["stream `s` (x) faces stream `q` (x)"]
    );
    let windows = ["stream `s` has different windows"];
    assert_eq!(
        refusal(|v| {
            v["streams"][0]["windows"][1]["target_end"] = json!(6);
            v["streams"][0]["windows"][1]["scored_tokens"] = json!(3);
        }),
        windows
    );
    assert_eq!(
        refusal(|v| drop(v["streams"][0]["windows"].as_array_mut().unwrap().pop())),
        windows
    );
    // A version that states its window kind agrees with one that knows no other.
    let mut newer = good.clone();
    newer["execution"]["windows"] = json!("sliding");
    assert!(compare(&first, &folder.write("b", &newer)).unwrap().identical);
    let error = compare(&first, &folder.write("b", &json!({"schema_version": 3})))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("is not a perplexity report: missing field `artifact`"),
        "{error}"
    );
}

fn run(folder: &Path, name: &str, seed: u64, tokens: &[u32], reference: Option<&Path>) -> PathBuf {
    let protocol = Protocol::new(WindowKind::Sliding, 16, 8).unwrap();
    let stream = |id: &str, tokens: &[u32]| (id.to_owned(), "d".to_owned(), tokens.to_vec());
    let streams = [stream("a", tokens), stream("b", &tokens[3..])];
    let plan = CorpusPlan::from_tokens("c", protocol, streams).unwrap();
    let directory = folder.join(name);
    fs::create_dir(&directory).unwrap();
    let options = Options {
        kl_reference: reference.map(Into::into),
        save_top_tokens: Some(SaveTopTokens {
            path: directory.join("top"),
            per_position: 8,
        }),
        ..Options::default()
    };
    let results = evaluate(&plan, &mut ToyScorer::new(40, 3.0, seed), &options, &mut ()).unwrap();
    let settings = Settings {
        kv_dtype: format!("kv{seed}"),
        ..Settings::default()
    };
    Report::build(
        &plan,
        &results,
        RunInfo {
            settings,
            ..RunInfo::default()
        },
    )
    .write(&directory)
    .unwrap();
    directory.join("report.json")
}

#[test]
fn reports_of_this_program_are_compared_with_their_divergences() {
    let folder = Folder::new();
    let folder = folder.0.path();
    let tokens: Vec<u32> = (0..90).map(|i| i * 7 % 37).collect();
    let reference = run(folder, "ref", 1, &tokens, None);
    let reference = reference.with_file_name("top");
    let exact = run(folder, "exact", 1, &tokens, Some(&reference));
    let again = run(folder, "again", 1, &tokens, Some(&reference));
    let other = run(folder, "other", 2, &tokens, Some(&reference));
    let same = compare(&exact, &again).unwrap();
    assert!(same.identical && same.differences.is_empty());
    assert_eq!((same.mean_nll.difference, same.mean_nll.t), (0.0, None));
    let result = compare(&exact, &other).unwrap();
    assert!(!result.identical);
    let kl = result.kl_divergence.unwrap();
    assert_eq!((kl.mean_kl.first, kl.top1_agreement.first), (0.0, 1.0));
    let report: Value = serde_json::from_slice(&fs::read(&other).unwrap()).unwrap();
    let mean_kl = report["kl_divergence"]["mean_kl"].as_f64().unwrap();
    assert!(mean_kl > 0.1 && (kl.mean_kl.difference - mean_kl).abs() < 1e-12);
    let delta = report["kl_divergence"]["mean_delta_nll"].as_f64().unwrap();
    assert!((result.mean_nll.difference - delta).abs() < 1e-9);

    // The same reference elsewhere, and another one under its name.
    let copy = folder.join("copy");
    fs::copy(&reference, &copy).unwrap();
    let elsewhere = run(folder, "with-copy", 2, &tokens, Some(&copy));
    assert!(compare(&exact, &elsewhere).unwrap().kl_divergence.is_some());
    fs::copy(run(folder, "ref-3", 3, &tokens, None).with_file_name("top"), &reference).unwrap();
    let elsewhere = run(folder, "with-another", 2, &tokens, Some(&reference));
    assert!(compare(&exact, &elsewhere).unwrap().kl_divergence.is_none());

    let shifted: Vec<u32> = tokens.iter().map(|t| (t + 1) % 37).collect();
    let elsewhere = run(folder, "elsewhere", 1, &shifted, None);
    match compare(&exact, &elsewhere) {
        Err(CompareError::Protocol(found)) => {
            assert_eq!(
                found,
                ["stream `a` has different tokens", "stream `b` has different tokens"]
            );
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_report_of_this_program_is_checked_as_shards_are() {
    let folder = Folder::new();
    let tokens: Vec<u32> = (0..90).map(|i| i * 7 % 37).collect();
    let reference = run(folder.0.path(), "ref", 1, &tokens, None).with_file_name("top");
    let path = run(folder.0.path(), "good", 2, &tokens, Some(&reference));
    let good: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (place, field, value) in [
        ("", "schema_version", json!(7)),
        ("/overall", "scored_tokens", json!(1_000_000)),
        ("/overall", "perplexity", json!(2.0)),
        ("/streams/0/windows/0", "input_end", json!(17)),
        ("/streams/0/windows/0", "first_target", json!(3)),
        ("/streams/0/windows/0", "mean_nll", json!(0.0)),
        ("/kl_divergence", "positions", json!(3)),
        ("/kl_divergence", "mean_kl", json!(0.0)),
    ] {
        let mut other = good.clone();
        other.pointer_mut(place).unwrap()[field] = value;
        let bad = folder.write("bad.json", &other);
        for (a, b) in [(&path, &bad), (&bad, &path)] {
            let message = compare(a, b).unwrap_err().to_string();
            assert!(message.contains("bad.json: `") && message.contains(field), "{message}");
        }
    }
    let mut other = good.clone();
    other["overall"]["scored_tokens"] = json!(1e30);
    other["timing"].as_object_mut().unwrap().remove("load_seconds");
    let message = compare(&path, &folder.write("bad.json", &other))
        .unwrap_err()
        .to_string();
    assert!(message.contains("bad.json: not a report of schema 6: "), "{message}");
}

#[test]
fn no_window_is_no_agreement() {
    let folder = Folder::new();
    let tokens: Vec<u32> = (0..9).collect();
    let protocol = Protocol::new(WindowKind::Sliding, 16, 8).unwrap();
    let streams = [("a", &tokens[..]), ("b", &tokens[3..])].map(|(id, t)| (id.to_owned(), "d".to_owned(), t.to_vec()));
    let plan = CorpusPlan::from_tokens("c", protocol, streams).unwrap();
    let options = Options {
        shard: "2/3".parse().unwrap(),
        ..Options::default()
    };
    let results = evaluate(&plan, &mut ToyScorer::new(40, 3.0, 1), &options, &mut ()).unwrap();
    let report = Report::build(&plan, &results, RunInfo::default());
    assert_eq!(report.denominators.windows, 0);
    report.write(folder.0.path()).unwrap();
    let path = folder.0.path().join("report.json");
    let result = compare(&path, &path).unwrap();
    assert!(!result.identical);
    let verdict = judge(&result, &Tolerances::default()).unwrap();
    assert!(matches!(verdict, Verdict::Inconclusive(_)), "{verdict}");
}

#[test]
fn absurd_numbers_are_refused_with_file_and_field() {
    let folder = Folder::new();
    let good = version_3(&[("s", "x", &[(2, 2.0), (2, 4.0)]), ("t", "y", &[(4, 8.0)])], "bf16");
    let first = folder.write("a", &good);
    let window = "streams[0].windows[0]";
    for (pointer, value, field) in [
        (
            "/streams/0/windows/0/scored_tokens",
            json!(u64::MAX),
            format!("{window}.scored_tokens"),
        ),
        (
            "/streams/0/windows/0/target_end",
            json!(0),
            format!("{window}.scored_tokens"),
        ),
        (
            "/streams/0/windows/0/total_nll",
            json!(-8.0),
            format!("{window}.total_nll"),
        ),
        (
            "/streams/0/windows/0/total_nll",
            json!(1e300),
            format!("{window}.total_nll"),
        ),
        ("/streams/1/total_nll", json!(9.0), "streams[1].total_nll".into()),
        ("/streams/1/scored_tokens", json!(5), "streams[1].scored_tokens".into()),
    ] {
        let mut other = good.clone();
        let (parent, name) = pointer.rsplit_once('/').unwrap();
        other.pointer_mut(parent).unwrap()[name] = value;
        let message = compare(&first, &folder.write("bad.json", &other))
            .unwrap_err()
            .to_string();
        assert!(
            message.contains(&format!("bad.json: `{field}` ")),
            "{pointer}: {message}"
        );
    }
    for (version, expected) in [(0, false), (3, true), (4, true), (5, false), (7, false), (100, false)] {
        let mut other = good.clone();
        other["schema_version"] = json!(version);
        let result = compare(&first, &folder.write("bad.json", &other)).map_err(|error| error.to_string());
        match result {
            Ok(_) => assert!(expected, "{version}"),
            Err(message) => {
                assert!(
                    !expected && message.ends_with(&format!("`schema_version` is {version}, expected 3, 4 or 6")),
                    "{message}"
                );
            }
        }
    }
    // As many tokens as the format can state, consistently.
    let mut other = good.clone();
    other["streams"][1]["windows"][0]["scored_tokens"] = json!(u64::MAX - 1);
    other["streams"][1]["windows"][0]["target_end"] = json!(u64::MAX);
    let message = compare(&folder.write("huge.json", &other), &first)
        .unwrap_err()
        .to_string();
    assert!(message.contains("too much for a text"), "{message}");
    // The greatest differences that are believed give finite figures or none.
    let far = version_3(&[("s", "x", &[(2, 6e38), (2, 4.0)]), ("t", "y", &[(4, 8.0)])], "bf16");
    let result = compare(&first, &folder.write("far.json", &far)).unwrap();
    assert_eq!(result.perplexity_ratio, None);
    let mut table = Vec::new();
    result.write_table(&mut table).unwrap();
    let table = String::from_utf8(table).unwrap();
    assert!(!table.contains("NaN") && !table.contains("inf"), "{table}");
}
