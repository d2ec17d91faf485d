//! Shards give the report of the whole run.

mod common;

use std::path::Path;

use common::{ToyScorer, merge};
use perplexity_eval::corpus::CorpusPlan;
use perplexity_eval::evaluate::{Options, SaveTopTokens, evaluate};
use perplexity_eval::merge::MergeError;
use perplexity_eval::report::{Report, RunInfo};
use perplexity_eval::windows::{Protocol, WindowKind};
use serde_json::{Value, json};

fn plan() -> CorpusPlan {
    let stream = |id: &str, domain: &str, n: u32, factor: u32| {
        (
            id.to_owned(),
            domain.to_owned(),
            (0..n).map(|i| i * factor % 37).collect::<Vec<u32>>(),
        )
    };
    let protocol = Protocol::new(WindowKind::Sliding, 16, 8).unwrap();
    let streams = [
        stream("a", "x", 61, 7),
        stream("b", "y", 30, 5),
        stream("c", "x", 12, 3),
    ];
    CorpusPlan::from_tokens("c", protocol, streams).unwrap()
}

fn run(shard: &str, seed: u64, reference: Option<&Path>) -> Report {
    let options = Options {
        shard: shard.parse().unwrap(),
        kl_reference: reference.map(Into::into),
        ..Options::default()
    };
    let results = evaluate(&plan(), &mut ToyScorer::new(40, 3.0, seed), &options, &mut ()).unwrap();
    let report = Report::build(
        &plan(),
        &results,
        RunInfo {
            total_seconds: 1.5,
            ..RunInfo::default()
        },
    );
    // Through text, as the program does.
    Report::from_json(&report.to_json().unwrap()).unwrap()
}

/// The report without its times.
fn timeless(mut report: Report) -> Report {
    report.timing.score_seconds = 0.0;
    report.timing.total_seconds = 0.0;
    report.timing.scored_tokens_per_second = None;
    for stream in &mut report.streams {
        stream.seconds = 0.0;
        stream.windows.iter_mut().for_each(|w| w.seconds = 0.0);
    }
    report
}

#[test]
fn shards_in_any_order_give_the_whole_bit_for_bit() {
    let whole = timeless(run("0/1", 1, None));
    for n in [2, 3, 7, 12] {
        let parts: Vec<Report> = (0..n).rev().map(|i| run(&format!("{i}/{n}"), 1, None)).collect();
        let merged = merge(parts).unwrap();
        assert_eq!(merged.timing.total_seconds, 1.5 * f64::from(n));
        assert_eq!(timeless(merged), whole);
    }
}

#[test]
fn a_run_that_was_not_cut_is_its_own_merge() {
    let folder = tempfile::tempdir().unwrap();
    let whole = run("0/1", 2, Some(&reference(&folder.path().join("ref"), 1)));
    // Order statistics included, which shards do not have.
    assert_eq!(merge(vec![whole.clone()]).unwrap(), whole);
}

/// A recorded reference of the toy with this seed.
fn reference(path: &Path, seed: u64) -> std::path::PathBuf {
    let options = Options {
        save_top_tokens: Some(SaveTopTokens {
            path: path.into(),
            per_position: 6,
        }),
        ..Options::default()
    };
    evaluate(&plan(), &mut ToyScorer::new(40, 3.0, seed), &options, &mut ()).unwrap();
    path.into()
}

#[test]
fn shards_of_several_machines_are_one_run_by_what_they_read_not_by_where_it_lies() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let here = reference(&at("ref"), 1);
    std::fs::copy(&here, at("copy")).unwrap();
    let first = run("0/2", 2, Some(&here));
    let mut second = run("1/2", 2, Some(&at("copy")));
    second.artifact.path = "/mnt/model".into();
    second.corpus.source = "/mnt/manifest.json".into();
    second.streams[0].path = "/mnt/a".into();
    second.execution.settings.device_name = Some("another".into());
    let same_build = merge(vec![second.clone(), first.clone()]).unwrap();
    assert_eq!(same_build.notes.len(), 1, "the coverage alone: {:?}", same_build.notes);
    second.build.version = "2".into();
    let merged = merge(vec![second, first.clone()]).unwrap();
    assert_eq!(
        (&merged.artifact.path, &merged.corpus.source),
        (&first.artifact.path, &first.corpus.source)
    );
    assert_eq!(merged.build, first.build);
    let note = merged.notes.last().unwrap();
    assert!(
        note.starts_with("the shards were scored by different builds: "),
        "{note}"
    );
    // Another reference under the same name.
    reference(&here, 3);
    let message = merge(vec![first, run("1/2", 2, Some(&here))]).unwrap_err().to_string();
    assert_eq!(
        message,
        "`kl_divergence.reference_sha256` differs between \"part0\" and \"part1\"; they belong to different runs"
    );
}

#[test]
fn a_comparison_is_merged_up_to_its_order_statistics() {
    let folder = tempfile::tempdir().unwrap();
    let path = reference(&folder.path().join("ref"), 1);
    let whole = run("0/1", 2, Some(&path));
    let merged = merge((0..3).map(|i| run(&format!("{i}/3"), 2, Some(&path))).collect()).unwrap();
    let (a, b) = (merged.kl_divergence.unwrap(), whole.kl_divergence.unwrap());
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
    assert_eq!(a.detail.figures.positions, 100);
    close(a.detail.figures.mean_kl, b.detail.figures.mean_kl);
    close(
        a.detail.figures.kl_standard_deviation,
        b.detail.figures.kl_standard_deviation,
    );
    assert_eq!(a.detail.figures.top1_agreement, b.detail.figures.top1_agreement);
    close(a.perplexity_ratio.unwrap(), b.perplexity_ratio.unwrap());
    close(
        a.uncertainty.mean_kl.clustered_standard_error.unwrap(),
        b.uncertainty.mean_kl.clustered_standard_error.unwrap(),
    );
    for (x, y) in merged.domains.iter().zip(&whole.domains) {
        let mean = |d: &perplexity_eval::report::DomainReport| d.kl_divergence.as_ref().unwrap().figures.mean_kl;
        close(mean(x), mean(y));
    }
    assert_eq!((a.detail.quantiles.median_kl, a.detail.delta_p), (None, None));
    // The coverage note speaks of the whole, once.
    assert_eq!(merged.notes, whole.notes);
    assert_eq!(merged.notes.len(), 1);
}

#[test]
fn what_is_no_complete_set_of_shards_is_refused() {
    let part = |shard: &str| run(shard, 1, None);
    let message = |parts: Vec<Report>| merge(parts).unwrap_err().to_string();
    assert_eq!(
        message(vec![part("0/3"), part("2/3")]),
        "of the 3 shards these are missing: 1"
    );
    assert_eq!(
        message(vec![part("19/20")]),
        "of the 20 shards these are missing: 0, 1, 2, 3, 4, 5, 6, 7, ..."
    );
    assert_eq!(
        message(vec![part("0/2"), part("1/2"), part("0/2")]),
        "\"part0\" and \"part2\" are both shard 0/2; every shard is needed once"
    );
    assert_eq!(
        message(vec![part("0/2"), part("1/3"), part("2/3")]),
        "\"part0\" is shard 0/2 and \"part1\" is shard 1/3; they belong to different runs"
    );
    assert_eq!(
        message(vec![part("0/2"), part("0/1")]),
        "\"part1\" is shard 0/1 and \"part0\" is shard 0/2; they belong to different runs"
    );
    assert!(matches!(merge(vec![]), Err(MergeError::Nothing)));
    let with = |change: fn(&mut Report)| {
        let mut other = part("1/2");
        change(&mut other);
        message(vec![part("0/2"), other])
    };
    assert_eq!(
        with(|r| r.execution.settings.kv_dtype = "int8".into()),
        "`execution.kv_dtype` differs between \"part0\" and \"part1\"; they belong to different runs"
    );
    assert!(with(|r| r.streams[1].tokens_sha256 = "0".into()).starts_with("`streams[1].tokens_sha256` differs"));
    assert_eq!(
        with(|r| r.streams[0].windows.retain(|w| w.index != 3)),
        "stream `a`: window 3 is missing, doubled or in the wrong shard"
    );
    assert!(with(|r| r.streams[1].sha256 = "0".into()).starts_with("`streams[1].sha256` differs"));
    assert!(with(|r| r.artifact.header_sha256 = Some("0".into())).starts_with("`artifact.header_sha256` differs"));
    // So may what changes no score, wherever it is set; what does is named.
    let with_option = |name: &str, of: [usize; 2]| {
        let mut parts = [part("0/2"), part("1/2")];
        for i in of {
            let options = &mut parts[i].execution.settings.options;
            options.insert(name.into(), json!(i));
        }
        merge(parts.into()).map_err(|error| error.to_string())
    };
    for name in [
        "expert_residency",
        "expert_cache_bytes",
        "expert_stripe",
        "ngram_volume",
        "ngram_access",
        "ngram_ram_bytes",
        "ngram_hot_profile",
    ] {
        for of in [[0, 1], [0, 0], [1, 1]] {
            assert!(with_option(name, of).is_ok(), "{name}");
        }
    }
    for name in ["no_ngram_table", "expert_arithmetic"] {
        for of in [[0, 1], [0, 0], [1, 1]] {
            let message = with_option(name, of).unwrap_err();
            let words = format!("`execution.options.{name}` differs between");
            assert!(message.starts_with(&words), "{message}");
        }
    }
}

/// The refusal of a report after a change of its JSON.
fn refusal(report: &Report, change: impl FnOnce(&mut Value)) -> String {
    let mut value: Value = serde_json::from_str(&report.to_json().unwrap()).unwrap();
    change(&mut value);
    Report::from_json(&value.to_string())
        .expect_err("must be refused")
        .to_string()
}

#[test]
fn a_report_with_a_window_removed_is_refused() {
    // Its last window, with every count made to fit: only the protocol knows that a window is missing.
    let mut last = run("1/2", 1, None);
    let windows = &mut last.streams[0].windows;
    let removed = windows.pop().unwrap().figures;
    let rest = windows.iter().map(|w| w.figures.total_nll).sum::<f64>();
    for figures in [&mut last.streams[0].figures, &mut last.overall.figures] {
        figures.scored_tokens -= removed.scored_tokens;
    }
    last.streams[0].figures.total_nll = rest;
    let text = last.to_json().unwrap();
    let message = Report::from_json(&text).unwrap_err().to_string();
    assert_eq!(message, "`streams[0].windows` is 2, expected 3");
    assert!(merge(vec![run("0/2", 1, None), last]).is_err());
    // One in the middle.
    let message = refusal(&run("0/1", 1, None), |v| {
        drop(v["streams"][0]["windows"].as_array_mut().unwrap().remove(2))
    });
    assert_eq!(message, "`streams[0].windows` is 6, expected 7");
}

#[test]
fn absurd_numbers_in_a_report_name_their_field() {
    let folder = tempfile::tempdir().unwrap();
    let path = reference(&folder.path().join("ref"), 1);
    let good = run("0/1", 2, Some(&path));
    let first = "streams[0].windows[1]";
    for (place, field, value) in [
        (first, "total_nll", json!(-4.0)),
        (first, "total_nll", json!(1e300)),
        (first, "mean_nll", json!(1.5)),
        (first, "running_mean_nll", json!(-1.0)),
        (first, "squared_deviations", json!(-1.0)),
        (first, "scored_tokens", json!(u64::MAX)),
        (first, "target_end", json!(25)),
        (first, "seconds", json!(-1.0)),
        ("streams[0].windows[1].kl_divergence", "top1_agreement", json!(1.5)),
        ("streams[0].windows[1].kl_divergence", "mean_kl", json!(-3.0)),
        ("streams[0].windows[1].kl_divergence", "positions", json!(0)),
        ("streams[0]", "total_nll", json!(1.0)),
        ("streams[0]", "input_tokens", json!(u64::MAX)),
        ("streams[0]", "input_tokens", json!(1)),
        ("streams[0]", "unscored_tokens", json!(2)),
        ("domains[0]", "perplexity", json!(1.0)),
        ("domains[0]", "domain", json!("z")),
        ("overall", "scored_tokens", json!(7)),
        ("overall", "mean_nll", json!(null)),
        ("kl_divergence", "positions", json!(1)),
        ("kl_divergence", "mean_kl", json!(0.0)),
        ("domains[1].kl_divergence", "top1_agreement", json!(0.5)),
        ("streams[0].kl_divergence", "mean_reverse_kl", json!(0.5)),
        ("denominators", "bytes", json!(u64::MAX)),
        ("execution", "stride_tokens", json!(7)),
        ("execution", "context_tokens", json!(1)),
        ("execution", "window_limit", json!(99)),
        ("timing", "score_seconds", json!(1e300)),
    ] {
        let pointer = format!("/{}", place.replace(['.', '['], "/").replace(']', ""));
        let message = refusal(&good, |v| v.pointer_mut(&pointer).expect(place)[field] = value.clone());
        let expected = match (place, field) {
            // Another stride makes another number of windows.
            ("execution", "stride_tokens") => "`streams[0].windows` ".to_owned(),
            _ => format!("`{place}.{field}` "),
        };
        assert!(message.starts_with(&expected), "{place}.{field} {value}: {message}");
    }
}
