//! Recording a reference and comparing with it.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::ToyScorer;
use perplexity_eval::corpus::CorpusPlan;
use perplexity_eval::divergence::row_divergence;
use perplexity_eval::evaluate::{Options, Results, SaveLogits, SaveTopTokens, evaluate};
use perplexity_eval::hidden::{Header, Precision, SaveHidden};
use perplexity_eval::progress::stream_kl_line;
use perplexity_eval::report::{Report, RunInfo};
use perplexity_eval::scorer::{
    CausalScorer, HiddenStates, Row, RowVisitor, ScoreError, ScoreRequest, WindowScores, WindowTokens,
};
use perplexity_eval::top_tokens::Provenance;
use perplexity_eval::windows::{Protocol, WindowKind};

const VOCABULARY: usize = 40;

fn tokens(n: u32, factor: u32) -> Vec<u32> {
    (0..n).map(|i| i * factor % 37).collect()
}

fn plan_with(kind: WindowKind, context: usize, stride: usize, streams: &[(&str, &str, Vec<u32>)]) -> CorpusPlan {
    let protocol = Protocol::new(kind, context, stride).unwrap();
    let streams = streams
        .iter()
        .map(|(id, domain, tokens)| ((*id).into(), (*domain).into(), tokens.clone()));
    CorpusPlan::from_tokens("c", protocol, streams).unwrap()
}

fn plan() -> CorpusPlan {
    let streams = [
        ("a", "x", tokens(61, 7)),
        ("b", "y", tokens(30, 5)),
        ("c", "x", tokens(12, 3)),
    ];
    plan_with(WindowKind::Sliding, 16, 8, &streams)
}

fn run(plan: &CorpusPlan, scorer: &mut dyn CausalScorer, options: Options) -> Results {
    evaluate(plan, scorer, &options, &mut ()).unwrap()
}

fn record(plan: &CorpusPlan, scorer: &mut dyn CausalScorer, folder: &Path, k: u32) -> PathBuf {
    let path = folder.join(format!("ref-{k}"));
    let options = Options {
        save_top_tokens: save(path.clone(), k),
        batch: 3,
        ..Options::default()
    };
    let results = run(plan, scorer, options);
    assert_eq!(results.top_tokens, save(path.clone(), k));
    path
}

fn save(path: PathBuf, per_position: u32) -> Option<SaveTopTokens> {
    Some(SaveTopTokens { path, per_position })
}

fn compare(reference: &Path) -> Options {
    Options {
        kl_reference: Some(reference.into()),
        batch: 4,
        ..Options::default()
    }
}

#[test]
fn a_scorer_does_not_differ_from_itself() {
    let folder = tempfile::tempdir().unwrap();
    // Sharpness 0 is the uniform distribution; 160 spreads the logits over 160 nats.
    for (sharpness, k) in [(0.0, 5), (3.0, 32), (40.0, 7), (160.0, VOCABULARY as u32)] {
        let mut scorer = ToyScorer::new(VOCABULARY, sharpness, 1);
        let path = record(&plan(), &mut scorer, folder.path(), k);
        let results = run(&plan(), &mut scorer, compare(&path));
        let kl = results.kl.unwrap();
        assert_eq!(
            (kl.overall.figures.positions, kl.overall.figures.top1_agreement),
            (60 + 29 + 11, 1.0)
        );
        assert_eq!(
            (kl.overall.quantiles.min_kl, kl.overall.quantiles.max_kl),
            (Some(0.0), Some(0.0))
        );
        assert_eq!(
            (kl.overall.figures.mean_delta_nll, kl.overall.delta_p.unwrap().rms),
            (0.0, 0.0)
        );
        for window in results.streams.iter().flat_map(|s| &s.windows) {
            assert_eq!(window.kl.unwrap().figures().mean_kl, 0.0);
        }
        assert_eq!(kl.mean_kl.clustered_standard_error, Some(0.0));
    }
}

#[test]
fn disjoint_windows_are_compared_too() {
    let folder = tempfile::tempdir().unwrap();
    let disjoint = plan_with(WindowKind::Disjoint, 16, 8, &[("a", "x", tokens(61, 7))]);
    let path = record(&disjoint, &mut ToyScorer::new(VOCABULARY, 3.0, 1), folder.path(), 6);
    let results = run(&disjoint, &mut ToyScorer::new(VOCABULARY, 3.0, 1), compare(&path));
    let figures = results.kl.unwrap().overall.figures;
    assert_eq!(
        (figures.positions, figures.mean_kl, figures.top1_agreement),
        (45, 0.0, 1.0)
    );
    let sliding = plan_with(WindowKind::Sliding, 16, 8, &[("a", "x", tokens(61, 7))]);
    let error = evaluate(
        &sliding,
        &mut ToyScorer::new(VOCABULARY, 3.0, 1),
        &compare(&path),
        &mut (),
    )
    .unwrap_err();
    assert!(
        error.to_string().contains("context 16, stride 16, this run has"),
        "{error}"
    );
}

/// KL, agreement and ΔNLL of every scored position, computed from whole rows without any of the code under test but the
/// sum over a row.
fn expected(plan: &CorpusPlan, reference: &ToyScorer, other: &ToyScorer) -> Vec<(f64, bool, f64)> {
    let mut all = Vec::new();
    let best = |row: &[f32]| (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
    for stream in &plan.streams {
        for window in stream.windows.iter() {
            for i in window.target_begin..window.target_end() {
                let (before, context) = (stream.tokens[i - 1], i - window.input_begin);
                let (r, e) = (reference.row(before, context), other.row(before, context));
                let target = stream.tokens[i] as usize;
                let delta = f64::from(r[target]) - f64::from(e[target]);
                all.push((row_divergence(&r, &e), best(&r) == best(&e), delta));
            }
        }
    }
    all
}

#[test]
fn all_tokens_as_top_tokens_give_the_full_divergence() {
    let folder = tempfile::tempdir().unwrap();
    let (mut reference, mut other) = (ToyScorer::new(VOCABULARY, 3.0, 1), ToyScorer::new(VOCABULARY, 3.0, 2));
    let path = record(&plan(), &mut reference, folder.path(), VOCABULARY as u32);
    let results = run(&plan(), &mut other, compare(&path));
    let positions = expected(&plan(), &reference, &other);
    let n = positions.len() as f64;
    let kl = results.kl.as_ref().unwrap();
    let figures = kl.overall.figures;
    let mean = |value: fn(&(f64, bool, f64)) -> f64| positions.iter().map(value).sum::<f64>() / n;
    assert!(figures.mean_kl > 0.1);
    assert!((figures.mean_kl - mean(|p| p.0)).abs() < 1e-5, "{figures:?}");
    assert_eq!(figures.top1_agreement, mean(|p| f64::from(u8::from(p.1))));
    assert!((figures.mean_delta_nll - mean(|p| p.2)).abs() < 1e-12);
    assert!((figures.mean_reference_top_mass - 1.0).abs() < 1e-5);
    // A domain and a stream are the figures of their own positions: a 60, b 29, c 11; a and c are domain x.
    let part = |positions: &[(f64, bool, f64)]| positions.iter().map(|p| p.0).sum::<f64>() / positions.len() as f64;
    assert!((kl.domains["x"].figures.mean_kl - part(&[&positions[..60], &positions[89..]].concat())).abs() < 1e-5);
    let stream = results.streams[1].kl.as_ref().unwrap();
    assert!((stream.figures.mean_kl - part(&positions[60..89])).abs() < 1e-5);
    let window = results.streams[0].windows[1].kl.unwrap().figures();
    assert_eq!(window.positions, 8);
    assert!((window.mean_kl - part(&positions[15..23])).abs() < 1e-5);
    let max = positions.iter().map(|p| p.0).fold(0.0, f64::max);
    assert!((kl.overall.quantiles.max_kl.unwrap() - max).abs() < 1e-5);
    let line = stream_kl_line(&plan(), 1, &results.streams[1]).unwrap();
    assert!(
        line.starts_with("[2/3] b | KL ") && line.contains(" | by context 0-1K "),
        "{line}"
    );
}

#[test]
fn fewer_top_tokens_bound_the_divergence_from_below() {
    let folder = tempfile::tempdir().unwrap();
    let mut means = Vec::new();
    for k in [1, 4, 16, VOCABULARY as u32] {
        let path = record(&plan(), &mut ToyScorer::new(VOCABULARY, 3.0, 1), folder.path(), k);
        let results = run(&plan(), &mut ToyScorer::new(VOCABULARY, 3.0, 2), compare(&path));
        means.push(results.kl.unwrap().overall.figures.mean_kl);
    }
    assert!(means.windows(2).all(|pair| pair[0] < pair[1]), "{means:?}");
}

#[test]
fn one_run_saves_and_compares() {
    let folder = tempfile::tempdir().unwrap();
    let (mut reference, mut other) = (ToyScorer::new(VOCABULARY, 3.0, 1), ToyScorer::new(VOCABULARY, 3.0, 2));
    let path = record(&plan(), &mut reference, folder.path(), 4);
    let saved = folder.path().join("saved");
    let both = Options {
        save_top_tokens: save(saved.clone(), 9),
        ..compare(&path)
    };
    let results = run(&plan(), &mut other, both);
    let alone = run(&plan(), &mut other, compare(&path));
    assert_eq!(results.kl.as_ref().unwrap().overall, alone.kl.unwrap().overall);
    let separate = record(&plan(), &mut other, folder.path(), 9);
    assert_eq!(fs::read(&saved).unwrap(), fs::read(&separate).unwrap());
    let same = Options {
        save_top_tokens: save(path.clone(), 4),
        ..compare(&folder.path().join(".").join("ref-4"))
    };
    let error = evaluate(&plan(), &mut other, &same, &mut ()).unwrap_err().to_string();
    assert!(error.contains("is also the top-token reference"), "{error}");
    assert!(path.exists());
}

#[test]
fn batches_and_shards_do_not_change_a_comparison() {
    let folder = tempfile::tempdir().unwrap();
    let path = record(&plan(), &mut ToyScorer::new(VOCABULARY, 3.0, 1), folder.path(), 6);
    let with = |batch, shard: &str| {
        let options = Options {
            batch,
            shard: shard.parse().unwrap(),
            ..compare(&path)
        };
        run(&plan(), &mut ToyScorer::new(VOCABULARY, 3.0, 2), options)
    };
    let whole = with(1, "0/1");
    assert_eq!(with(7, "0/1").kl.unwrap().overall, whole.kl.as_ref().unwrap().overall);
    let of_windows = |results: &Results| -> Vec<_> {
        let streams = results.streams.iter().enumerate();
        streams
            .flat_map(|(s, stream)| stream.windows.iter().map(move |w| ((s, w.index), w.kl.unwrap())))
            .collect()
    };
    let mut parts: Vec<_> = (0..3).flat_map(|i| of_windows(&with(2, &format!("{i}/3")))).collect();
    parts.sort_by_key(|(key, _)| *key);
    assert_eq!(parts, of_windows(&whole));
}

#[test]
fn references_of_other_runs_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = record(&plan(), &mut ToyScorer::new(VOCABULARY, 3.0, 1), folder.path(), 6);
    let refusal = |plan: &CorpusPlan, vocabulary| {
        let mut scorer = ToyScorer::new(vocabulary, 3.0, 1);
        evaluate(plan, &mut scorer, &compare(&path), &mut ())
            .unwrap_err()
            .to_string()
    };
    let streams = |last: Vec<u32>| [("a", "x", tokens(61, 7)), ("b", "y", tokens(30, 5)), ("c", "x", last)];
    // Another text of equal length.
    let other = plan_with(WindowKind::Sliding, 16, 8, &streams(tokens(12, 4)));
    assert!(refusal(&other, VOCABULARY).contains("window 0 of stream `c` was recorded over different tokens"));
    let other = plan_with(WindowKind::Sliding, 16, 7, &streams(tokens(12, 3)));
    assert!(refusal(&other, VOCABULARY).contains("context 16, stride 8, this run has"));
    let other = plan_with(WindowKind::Sliding, 17, 8, &streams(tokens(12, 3)));
    assert!(refusal(&other, VOCABULARY).contains("context 16, stride 8, this run has"));
    let fewer = plan_with(WindowKind::Sliding, 16, 8, &streams(tokens(12, 3))[..2]);
    assert!(refusal(&fewer, VOCABULARY).contains("holds more windows than this run"));
    let mut more = streams(tokens(12, 3)).to_vec();
    more.push(("d", "x", tokens(5, 1)));
    let more = plan_with(WindowKind::Sliding, 16, 8, &more);
    assert!(refusal(&more, VOCABULARY).contains("it ends before window 0 of stream `d`"));

    let provenance = Provenance {
        public_tokens: VOCABULARY as u64,
        ..Provenance::default()
    };
    let path = folder.path().join("told");
    let saving = Options {
        save_top_tokens: save(path.clone(), 6),
        provenance: Some(provenance),
        ..Options::default()
    };
    run(&plan(), &mut ToyScorer::new(VOCABULARY, 3.0, 1), saving);
    let mut wider = ToyScorer::new(VOCABULARY + 1, 3.0, 1);
    let error = evaluate(&plan(), &mut wider, &compare(&path), &mut ())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("recorded over 40 tokens of vocabulary, this model has 41"),
        "{error}"
    );
}

#[test]
fn a_failing_run_leaves_no_reference() {
    struct Fails(usize);
    impl CausalScorer for Fails {
        fn public_tokens(&self) -> usize {
            VOCABULARY
        }
        fn score(&mut self, windows: &[WindowTokens], ask: &ScoreRequest) -> Result<Vec<WindowScores>, ScoreError> {
            self.0 += 1;
            if self.0 > 2 {
                return Err(ScoreError("device lost".into()));
            }
            ToyScorer::new(VOCABULARY, 3.0, 1).score(windows, ask)
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let options = Options {
        save_top_tokens: save(folder.path().join("ref"), 4),
        ..Options::default()
    };
    assert!(evaluate(&plan(), &mut Fails(0), &options, &mut ()).is_err());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn widths_beyond_file_or_vocabulary_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (k, limit) in [(0, 64), (65, 64), (41, 40)] {
        let options = Options {
            save_top_tokens: save(folder.path().join("ref"), k),
            ..Options::default()
        };
        let error = evaluate(&plan(), &mut ToyScorer::new(VOCABULARY, 3.0, 1), &options, &mut ()).unwrap_err();
        let expected = format!("{k} top tokens per position were asked for; ask for 1 to {limit}");
        assert_eq!(error.to_string(), expected);
    }
    let options = Options {
        save_top_tokens: save(folder.path().join("ref"), 4),
        shard: "0/2".parse().unwrap(),
        ..Options::default()
    };
    assert!(
        options
            .check()
            .unwrap_err()
            .to_string()
            .contains("record it without a shard")
    );
}

#[test]
fn the_report_says_when_little_is_covered() {
    let folder = tempfile::tempdir().unwrap();
    let path = record(&plan(), &mut ToyScorer::new(VOCABULARY, 0.0, 1), folder.path(), 4);
    let results = run(&plan(), &mut ToyScorer::new(VOCABULARY, 0.0, 1), compare(&path));
    let report = Report::build(&plan(), &results, RunInfo::default());
    assert!(
        report.notes[0].starts_with("the reference's 4 tokens cover only 10.0 %"),
        "{:?}",
        report.notes
    );
    let value: serde_json::Value = serde_json::from_str(&report.to_json().unwrap()).unwrap();
    let kl = &value["kl_divergence"];
    assert_eq!(
        (kl["mean_kl"].as_f64(), kl["top1_agreement"].as_f64()),
        (Some(0.0), Some(1.0))
    );
    assert_eq!(
        (
            kl["reference_top_tokens"].as_u64(),
            kl["by_context"][0]["positions"].as_u64()
        ),
        (Some(4), Some(100))
    );
    assert_eq!(value["streams"][0]["windows"][0]["kl_divergence"]["positions"], 15);
    assert_eq!(kl["perplexity_ratio"], 1.0);
    let mut table = Vec::new();
    perplexity_eval::table::write(&mut table, &report, Path::new("r")).unwrap();
    let table = String::from_utf8(table).unwrap();
    assert!(
        table.contains("\nKL divergence from reference: mean 0.0000e+00, top-1 agreement 1.0000\n"),
        "{table}"
    );
    assert!(table.contains("\nby context: 0-1K 0.00e+00\n"), "{table}");
}

/// The toy scorer with whole rows. Its hidden state is the row of log-probabilities, and its head leaves it as it is.
struct Rows(ToyScorer);

const HIDDEN: usize = VOCABULARY;

fn head(state: &[f32]) -> Vec<f32> {
    state.to_vec()
}

impl CausalScorer for Rows {
    fn public_tokens(&self) -> usize {
        self.0.vocabulary
    }
    fn hidden_size(&self) -> Option<usize> {
        Some(HIDDEN)
    }
    fn score(&mut self, windows: &[WindowTokens], ask: &ScoreRequest) -> Result<Vec<WindowScores>, ScoreError> {
        let mut all = self.0.score(windows, ask)?;
        for (scores, window) in all.iter_mut().zip(windows).filter(|_| ask.hidden) {
            let states = (window.first_target..window.tokens.len()).map(|i| self.0.row(window.tokens[i - 1], i));
            scores.hidden = states.flatten().collect();
        }
        Ok(all)
    }
    fn score_rows(
        &mut self,
        window: &WindowTokens,
        reference: Option<&HiddenStates>,
        row: &mut RowVisitor<'_>,
    ) -> Result<(), ScoreError> {
        let states = reference.map_or(&[][..], |reference| &reference.values);
        let mut given = states.chunks(HIDDEN);
        (window.first_target..window.tokens.len()).try_for_each(|i| {
            let run = self.0.row(window.tokens[i - 1], i);
            let reference = given.next().map_or_else(Vec::new, head);
            row(Row {
                logprob: run[window.tokens[i] as usize],
                run: &run,
                reference: &reference,
            })
        })
    }
}

#[test]
fn logit_bases_give_the_full_divergence_within_their_codes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("base");
    let chunks = plan_with(WindowKind::LlamaChunks, 16, 0, &[("a", "x", tokens(61, 7))]);
    let rows = |seed| Rows(ToyScorer::new(VOCABULARY, 3.0, seed));
    // Rows wider than the public vocabulary are padded.
    let saving = Options {
        logits_out: Some(SaveLogits {
            path: path.clone(),
            row_width: Some(43),
        }),
        ..Options::default()
    };
    let saved = run(&chunks, &mut rows(1), saving);
    let plain = run(&chunks, &mut rows(1), Options::default());
    assert_eq!(saved.overall, plain.overall);
    // Three chunks of 7 rows of 2·22 + 4 words, read as the format says.
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len(), 20 + 48 * 4 + 21 * 96);
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!((&bytes[..8], [8, 12, 16].map(word)), (&b"_logits_"[..], [16, 43, 3]));
    assert!((0..48).all(|i| word(20 + 4 * i) == chunks.streams[0].tokens[i]));
    for r in 0..21 {
        let at = 20 + 48 * 4 + r * 96;
        let (scale, least) = (f32::from_bits(word(at)), f32::from_bits(word(at + 4)));
        // Chunk r / 7 scores its tokens 9 to 15; the row of token i follows token i - 1.
        let (start, i) = (r / 7 * 16, 9 + r % 7);
        let expected = rows(1).0.row(chunks.streams[0].tokens[start + i - 1], i);
        for (id, expected) in expected.iter().enumerate() {
            let code = u16::from_le_bytes(bytes[at + 8 + 2 * id..][..2].try_into().unwrap());
            assert!(
                (least + scale * f32::from(code) - expected).abs() < scale,
                "row {r}, token {id}"
            );
        }
        assert!(bytes[at + 8 + 2 * VOCABULARY..at + 96].iter().all(|&byte| byte == 0));
    }
    let compare = |seed| {
        let options = Options {
            logits_reference: Some(path.clone()),
            ..Options::default()
        };
        run(&chunks, &mut rows(seed), options).kl.unwrap()
    };
    let own = compare(1).overall;
    assert_eq!((own.figures.positions, own.figures.top1_agreement), (21, 1.0));
    assert!(own.quantiles.max_kl.unwrap().abs() < 1e-4, "{own:?}");
    assert_eq!(own.figures.mean_reverse_kl, None);
    let other = compare(2).overall.figures;
    let positions = expected(&chunks, &rows(1).0, &rows(2).0);
    let mean = positions.iter().map(|p| p.0).sum::<f64>() / positions.len() as f64;
    assert!((other.mean_kl - mean).abs() < 1e-4, "{} {mean}", other.mean_kl);

    let sliding = evaluate(
        &plan(),
        &mut rows(1),
        &Options {
            logits_reference: Some(path),
            ..Options::default()
        },
        &mut (),
    );
    assert!(sliding.unwrap_err().to_string().contains("holds one stream"));
    let saving = Options {
        logits_out: Some(SaveLogits {
            path: folder.path().join("new"),
            row_width: None,
        }),
        ..Options::default()
    };
    let error = evaluate(&chunks, &mut ToyScorer::new(VOCABULARY, 3.0, 1), &saving, &mut ())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("window 0 (first of a batch of 1): this model does not give full rows"),
        "{error}"
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

fn save_states(plan: &CorpusPlan, path: &Path, precision: Precision) -> Options {
    let options = Options {
        save_hidden: Some(SaveHidden {
            path: path.into(),
            hidden_size: HIDDEN as u32,
            precision,
            logits: precision,
        }),
        batch: 3,
        ..Options::default()
    };
    run(plan, &mut Rows(ToyScorer::new(VOCABULARY, 3.0, 1)), options.clone());
    options
}

fn with_states(path: &Path) -> Options {
    Options {
        kl_hidden: Some(path.into()),
        ..Options::default()
    }
}

#[test]
fn hidden_states_give_the_whole_divergence_in_both_directions() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("states");
    let saved = save_states(&plan(), &path, Precision::F32).save_hidden.unwrap();
    let header = Header::of(&plan(), &saved, VOCABULARY).unwrap();
    // 40 bytes of fixed fields, the two strings, records of 28 bytes and 4 + 160 per position, a footer.
    let windows = plan().windows();
    assert_eq!(
        header.file_bytes(&plan()),
        40 + 5 + 10 + windows * 28 + 100 * (4 + 160) + 4
    );
    assert_eq!(fs::metadata(&path).unwrap().len(), header.file_bytes(&plan()));

    let compare = |seed| {
        let mut scorer = Rows(ToyScorer::new(VOCABULARY, 3.0, seed));
        run(&plan(), &mut scorer, with_states(&path))
    };
    let own = compare(1).kl.unwrap();
    assert_eq!(
        (own.overall.figures.mean_kl, own.overall.figures.mean_reverse_kl),
        (0.0, Some(0.0))
    );
    assert_eq!(
        (own.overall.figures.top1_agreement, own.source.head_error),
        (1.0, Some(0.0))
    );
    let results = compare(2);
    let kl = results.kl.as_ref().unwrap();
    let (reference, other) = (ToyScorer::new(VOCABULARY, 3.0, 1), ToyScorer::new(VOCABULARY, 3.0, 2));
    for (found, expected) in [
        (kl.overall.figures.mean_kl, expected(&plan(), &reference, &other)),
        (
            kl.overall.figures.mean_reverse_kl.unwrap(),
            expected(&plan(), &other, &reference),
        ),
    ] {
        let mean = expected.iter().map(|p| p.0).sum::<f64>() / expected.len() as f64;
        assert!((found - mean).abs() < 1e-12, "{found} {mean}");
    }
    assert_eq!(kl.overall.figures.mean_reference_top_mass, 1.0);
    let report = Report::build(&plan(), &results, RunInfo::default());
    Report::from_json(&report.to_json().unwrap()).unwrap();
    assert!(report.notes.is_empty(), "{:?}", report.notes);
    // Shards read their own windows.
    let parts = (0..3).map(|i| {
        let options = Options {
            shard: format!("{i}/3").parse().unwrap(),
            ..with_states(&path)
        };
        let mut scorer = Rows(ToyScorer::new(VOCABULARY, 3.0, 2));
        let results = run(&plan(), &mut scorer, options);
        Report::build(&plan(), &results, RunInfo::default())
    });
    let merged = common::merge(parts.collect()).unwrap();
    let figures = merged.kl_divergence.unwrap().detail.figures;
    assert!((figures.mean_reverse_kl.unwrap() - kl.overall.figures.mean_reverse_kl.unwrap()).abs() < 1e-12);
}

#[test]
fn top_tokens_bound_the_whole_divergence_at_every_position() {
    let folder = tempfile::tempdir().unwrap();
    // With a stride of 1 every window but the first scores one position.
    let plan = plan_with(WindowKind::Sliding, 16, 1, &[("a", "x", tokens(61, 7))]);
    let states = folder.path().join("states");
    save_states(&plan, &states, Precision::F32);
    let of_windows = |results: &Results| -> Vec<f64> {
        let windows = results.streams[0].windows.iter();
        windows.map(|w| w.kl.unwrap().figures().mean_kl).collect()
    };
    let mut other = Rows(ToyScorer::new(VOCABULARY, 3.0, 2));
    let whole = of_windows(&run(&plan, &mut other, with_states(&states)));
    assert_eq!(whole.len(), 46);
    for k in [1, 4, 16, VOCABULARY as u32] {
        let path = record(&plan, &mut ToyScorer::new(VOCABULARY, 3.0, 1), folder.path(), k);
        let bounds = of_windows(&run(&plan, &mut other, compare(&path)));
        for (window, (bound, whole)) in bounds.iter().zip(&whole).enumerate() {
            assert!(*bound <= whole + 1e-6, "{k} tokens, window {window}: {bound} > {whole}");
        }
    }
}

#[test]
fn hidden_states_of_another_run_or_another_length_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("states");
    save_states(&plan(), &path, Precision::F32);
    let refusal = |plan: &CorpusPlan, vocabulary| {
        let mut scorer = Rows(ToyScorer::new(vocabulary, 3.0, 1));
        let error = evaluate(plan, &mut scorer, &with_states(&path), &mut ()).unwrap_err();
        error.to_string()
    };
    let streams = |last: Vec<u32>| [("a", "x", tokens(61, 7)), ("b", "y", tokens(30, 5)), ("c", "x", last)];
    let other = plan_with(WindowKind::Sliding, 16, 8, &streams(tokens(12, 4)));
    assert!(refusal(&other, VOCABULARY).contains("window 0 of stream `c` was recorded over different tokens"));
    let other = plan_with(WindowKind::Sliding, 16, 7, &streams(tokens(12, 3)));
    assert!(refusal(&other, VOCABULARY).contains("context 16, stride 8"));
    assert!(refusal(&plan(), VOCABULARY + 1).contains("recorded over 40 tokens of vocabulary, this model has 41"));
    let mut without = ToyScorer::new(VOCABULARY, 3.0, 1);
    let error = evaluate(&plan(), &mut without, &with_states(&path), &mut ()).unwrap_err();
    assert!(
        error.to_string().contains("this model does not give its own"),
        "{error}"
    );

    let whole = fs::read(&path).unwrap();
    for (bytes, words) in [
        (whole[..whole.len() - 1].to_vec(), "is truncated in the footer"),
        (
            whole[..whole.len() - 5].to_vec(),
            "is truncated in window 0 of stream `c`",
        ),
        ([&whole[..], b"x"].concat(), "has 1 byte(s) after its footer"),
        (
            b"NINFTOPK\x01\0\0\0\x20\0\0\0".to_vec(),
            "give it with --kl-reference instead",
        ),
    ] {
        fs::write(&path, bytes).unwrap();
        let message = refusal(&plan(), VOCABULARY);
        assert!(message.contains(words), "{message}");
    }
    // The toy's rows are no bf16 numbers: storing them so would lose something.
    let narrow = Options {
        save_hidden: Some(SaveHidden {
            path: folder.path().join("narrow"),
            hidden_size: HIDDEN as u32,
            precision: Precision::Bf16,
            logits: Precision::Bf16,
        }),
        ..Options::default()
    };
    let error = evaluate(&plan(), &mut Rows(ToyScorer::new(VOCABULARY, 3.0, 1)), &narrow, &mut ()).unwrap_err();
    assert!(error.to_string().contains("which bf16 does not hold"), "{error}");
    assert!(!folder.path().join("narrow").exists() && !folder.path().join("narrow.partial").exists());
    let both = Options {
        kl_reference: Some(path.clone()),
        ..with_states(&path)
    };
    assert!(both.check().unwrap_err().to_string().contains("run twice"));
}

#[test]
fn the_tokens_file_lists_the_windows_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens.json");
    let options = Options {
        save_tokens: Some(path.clone()),
        ..Options::default()
    };
    run(&plan(), &mut ToyScorer::new(VOCABULARY, 3.0, 1), options);
    let value: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(value["windows"].as_array().unwrap().len() as u64, plan().windows());
    assert_eq!(value["public_tokens"], 40);
}
