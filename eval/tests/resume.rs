//! An interrupted run, continued, gives what an uninterrupted one gives.

mod common;

use std::fs;
use std::path::Path;

use common::ToyScorer;
use perplexity_eval::corpus::CorpusPlan;
use perplexity_eval::evaluate::{EvaluateError, Options, Results, SaveTopTokens, evaluate};
use perplexity_eval::report::{Artifact, Report, RunInfo, Settings};
use perplexity_eval::resume::{Dropped, Resumable, ResumeError, State, identity};
use perplexity_eval::scorer::{CausalScorer, ScoreError, ScoreRequest, WindowScores, WindowTokens};
use perplexity_eval::windows::{Protocol, WindowKind};

fn plan(seed: u32) -> CorpusPlan {
    let stream = |id: &str, n: u32| {
        (
            id.to_owned(),
            "d".to_owned(),
            (0..n).map(|i| (i * 7 + seed) % 37).collect(),
        )
    };
    let protocol = Protocol::new(WindowKind::Sliding, 16, 8).unwrap();
    CorpusPlan::from_tokens("c", protocol, [stream("a", 90), stream("b", 40)]).unwrap()
}

/// Loses the device after some calls.
struct Mortal {
    toy: ToyScorer,
    calls: usize,
}

impl Mortal {
    fn new(calls: usize) -> Self {
        Self {
            toy: ToyScorer::new(40, 3.0, 2),
            calls,
        }
    }
}

impl CausalScorer for Mortal {
    fn public_tokens(&self) -> usize {
        40
    }
    fn score(&mut self, windows: &[WindowTokens], ask: &ScoreRequest) -> Result<Vec<WindowScores>, ScoreError> {
        self.calls = self
            .calls
            .checked_sub(1)
            .ok_or_else(|| ScoreError("device lost".into()))?;
        self.toy.score(windows, ask)
    }
}

fn run(scorer: &mut dyn CausalScorer, state: &Path, options: &Options) -> Result<Results, EvaluateError> {
    let identity = identity(&plan(0), &Artifact::default(), &Settings::default(), options);
    let mut scorer = Resumable::new(scorer, State::open(state, &identity).unwrap());
    let results = evaluate(&plan(0), &mut scorer, options, &mut ())?;
    scorer.finish().unwrap();
    Ok(results)
}

/// The report's text without times.
fn text(results: &Results) -> String {
    let mut report = Report::build(&plan(0), results, RunInfo::default());
    report.timing.score_seconds = 0.0;
    report.timing.scored_tokens_per_second = None;
    for stream in &mut report.streams {
        stream.seconds = 0.0;
        stream.windows.iter_mut().for_each(|w| w.seconds = 0.0);
    }
    report.to_json().unwrap()
}

struct Setup {
    folder: tempfile::TempDir,
    options: Options,
    whole: String,
    saved: Vec<u8>,
}

/// A run that compares and saves, done without interruption.
fn setup() -> Setup {
    let folder = tempfile::tempdir().unwrap();
    let reference = folder.path().join("reference");
    let save = |path: &Path| {
        Some(SaveTopTokens {
            path: path.into(),
            per_position: 5,
        })
    };
    let options = Options {
        save_top_tokens: save(&reference),
        ..Options::default()
    };
    evaluate(&plan(0), &mut ToyScorer::new(40, 3.0, 1), &options, &mut ()).unwrap();
    let saved = folder.path().join("saved");
    let options = Options {
        batch: 3,
        kl_reference: Some(reference),
        save_top_tokens: save(&saved),
        ..Options::default()
    };
    let whole = text(&evaluate(&plan(0), &mut Mortal::new(99), &options, &mut ()).unwrap());
    let bytes = fs::read(&saved).unwrap();
    fs::remove_file(&saved).unwrap();
    Setup {
        folder,
        options,
        whole,
        saved: bytes,
    }
}

#[test]
fn a_continued_run_writes_the_same_bytes() {
    let Setup {
        folder,
        options,
        whole,
        saved,
    } = setup();
    let state = folder.path().join("state");
    for calls in [0, 1, 2, 4] {
        let error = run(&mut Mortal::new(calls), &state, &options).unwrap_err().to_string();
        assert!(error.contains("device lost"), "{error}");
        assert!(!folder.path().join("saved").exists());
        // The rest of the five batches, and not one call more.
        let results = run(&mut Mortal::new(5 - calls), &state, &options).unwrap();
        assert_eq!(text(&results), whole);
        assert_eq!(fs::read(folder.path().join("saved")).unwrap(), saved);
        fs::remove_file(folder.path().join("saved")).unwrap();
        assert!(!state.exists());
    }
}

#[test]
fn a_torn_batch_is_scored_again() {
    let Setup {
        folder, options, whole, ..
    } = setup();
    let state = folder.path().join("state");
    run(&mut Mortal::new(2), &state, &options).unwrap_err();
    let two = fs::read(&state).unwrap();
    run(&mut Mortal::new(1), &state, &options).unwrap_err();
    let three = fs::read(&state).unwrap();
    assert!(three.starts_with(&two) && three.len() > two.len());
    for length in [two.len() + 1, two.len() + 40, three.len() - 1] {
        fs::write(&state, &three[..length]).unwrap();
        let expected = Dropped {
            begin: two.len() as u64,
            bytes: (length - two.len()) as u64,
            damaged: false,
        };
        assert_eq!(opened(&state, &options), (2, Some(expected)));
        fs::write(&state, &three[..length]).unwrap();
        assert_eq!(text(&run(&mut Mortal::new(3), &state, &options).unwrap()), whole);
        fs::remove_file(folder.path().join("saved")).unwrap();
    }
}

/// What a state file gives on opening: sound batches, and what was dropped.
fn opened(state: &Path, options: &Options) -> (u64, Option<Dropped>) {
    let identity = identity(&plan(0), &Artifact::default(), &Settings::default(), options);
    let state = State::open(state, &identity).unwrap();
    (state.recorded_batches(), state.dropped())
}

#[test]
fn a_damaged_batch_is_told_from_a_torn_one_and_sound_batches_before_it_are_kept() {
    let Setup {
        folder, options, whole, ..
    } = setup();
    let state = folder.path().join("state");
    let lengths: Vec<usize> = (0..4)
        .map(|batches| {
            run(&mut Mortal::new(usize::from(batches > 0)), &state, &options).unwrap_err();
            fs::metadata(&state).unwrap().len() as usize
        })
        .collect();
    let sound = fs::read(&state).unwrap();
    assert_eq!(opened(&state, &options), (3, None));
    // Length, key, hash of both, payload and its hash, of every batch.
    for (batch, ends) in lengths.windows(2).enumerate() {
        for at in [
            ends[0],
            ends[0] + 7,
            ends[0] + 8,
            ends[0] + 16,
            ends[0] + 24,
            ends[1] - 9,
            ends[1] - 1,
        ] {
            let mut damaged = sound.clone();
            damaged[at] ^= 0x40;
            fs::write(&state, &damaged).unwrap();
            let expected = Dropped {
                begin: ends[0] as u64,
                bytes: (sound.len() - ends[0]) as u64,
                damaged: true,
            };
            assert_eq!(opened(&state, &options), (batch as u64, Some(expected)), "byte {at}");
            assert_eq!(fs::read(&state).unwrap(), sound[..ends[0]]);
        }
        assert_eq!(
            text(&run(&mut Mortal::new(5 - batch), &state, &options).unwrap()),
            whole
        );
        fs::remove_file(folder.path().join("saved")).unwrap();
    }
}

#[test]
fn states_of_other_runs_are_refused() {
    let Setup { folder, options, .. } = setup();
    let state = folder.path().join("state");
    run(&mut Mortal::new(2), &state, &options).unwrap_err();
    let field = |plan: &CorpusPlan, settings: &Settings, options: &Options| {
        let identity = identity(plan, &Artifact::default(), settings, options);
        match State::open(&state, &identity) {
            Err(ResumeError::Identity { field, .. }) => field,
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("accepted"),
        }
    };
    let int8 = Settings {
        kv_dtype: "int8".into(),
        ..Settings::default()
    };
    assert_eq!(field(&plan(0), &int8, &options), "settings.kv_dtype");
    assert_eq!(
        field(&plan(1), &Settings::default(), &options),
        "corpus.streams.0.tokens_sha256"
    );
    let other = Options {
        batch: 4,
        ..options.clone()
    };
    assert_eq!(field(&plan(0), &Settings::default(), &other), "batch");
    // The reference does not belong to the identity: it changes the request, which each batch carries.
    let plain = Options {
        kl_reference: None,
        ..options.clone()
    };
    let error = run(&mut Mortal::new(9), &state, &plain).unwrap_err().to_string();
    assert!(
        error.contains("batch 0 was recorded for other windows or another request"),
        "{error}"
    );

    for junk in [
        &b"x"[..],
        b"NINFTOPK\x01\0\0\0\x20\0\0\0",
        b"PPLSTATE\x02\0\0\0\xff\xff\xff\x7f",
    ] {
        fs::write(&state, junk).unwrap();
        let opened = State::open(&state, "{}");
        assert!(matches!(opened, Err(ResumeError::Kind { .. })));
        assert_eq!(fs::read(&state).unwrap(), junk, "a file of another kind stays as it is");
    }
}

#[test]
fn two_runs_never_share_a_state_file() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let first = State::open(&state, "{}").unwrap();
    assert!(matches!(State::open(&state, "{}"), Err(ResumeError::Busy { .. })));
    drop(first);
    assert!(State::open(&state, "{}").is_ok());
}

#[test]
fn scores_that_are_not_finite_are_not_remembered() {
    struct Flaky(bool);
    impl CausalScorer for Flaky {
        fn public_tokens(&self) -> usize {
            40
        }
        fn score(&mut self, windows: &[WindowTokens], ask: &ScoreRequest) -> Result<Vec<WindowScores>, ScoreError> {
            let mut scores = ToyScorer::new(40, 3.0, 2).score(windows, ask)?;
            if self.0 {
                scores[0].logprobs[0] = f32::NAN;
            }
            Ok(scores)
        }
    }
    let Setup {
        folder, options, whole, ..
    } = setup();
    let state = folder.path().join("state");
    assert!(run(&mut Flaky(true), &state, &options).is_err());
    assert_eq!(text(&run(&mut Flaky(false), &state, &options).unwrap()), whole);
}
