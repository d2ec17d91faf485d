//! Evaluations with hand-made scorers: what is scored, in which order, and how failures read.

mod common;

use common::{Prepared, ToyScorer};
use perplexity_eval::corpus::CorpusPlan;
use perplexity_eval::evaluate::{Options, Progress, Results, Snapshot, StreamResult, Totals, evaluate};
use perplexity_eval::scorer::{CausalScorer, ScoreError, ScoreRequest, WindowScores, WindowTokens};
use perplexity_eval::windows::{Protocol, WindowKind};

fn protocol(context: usize, stride: usize) -> Protocol {
    Protocol::new(WindowKind::Sliding, context, stride).unwrap()
}

fn stream(id: &str, domain: &str, tokens: &[u32]) -> (String, String, Vec<u32>) {
    (id.into(), domain.into(), tokens.to_vec())
}

fn two_streams() -> CorpusPlan {
    let a: Vec<u32> = (0..40).map(|i| i * 7 % 11).collect();
    let b: Vec<u32> = (0..23).map(|i| i * 5 % 11).collect();
    CorpusPlan::from_tokens("c", protocol(10, 5), [stream("a", "x", &a), stream("b", "y", &b)]).unwrap()
}

fn run(plan: &CorpusPlan, scorer: &mut dyn CausalScorer, batch: usize) -> Results {
    evaluate(
        plan,
        scorer,
        &Options {
            batch,
            ..Options::default()
        },
        &mut (),
    )
    .unwrap()
}

/// Everything but the times.
fn figures(results: &Results) -> Vec<(u64, f64)> {
    let windows = results.streams.iter().flat_map(|s| &s.windows).map(|w| &w.aggregate);
    windows
        .chain([&results.overall])
        .map(|a| (a.scored_tokens, a.total_nll))
        .collect()
}

#[test]
fn the_mean_is_taken_over_tokens_not_windows() {
    // Ten tokens in three windows of 5, 2 and 2 targets; the log-probability of token t is -t/4.
    let tokens: Vec<u32> = (0..10).collect();
    let plan = CorpusPlan::from_tokens("c", protocol(6, 2), [stream("a", "d", &tokens)]).unwrap();
    let mut scorer = Prepared((0..10u8).map(|t| -f32::from(t) / 4.0).collect());
    let results = run(&plan, &mut scorer, 2);
    let totals: Vec<f64> = results.streams[0]
        .windows
        .iter()
        .map(|w| w.aggregate.total_nll)
        .collect();
    assert_eq!(totals, [15.0 / 4.0, 13.0 / 4.0, 17.0 / 4.0]);
    assert_eq!(
        (results.overall.scored_tokens, results.overall.mean_nll()),
        (9, Some(1.25))
    );
    assert_eq!(results.overall.perplexity(), Some(1.25f64.exp()));
    let running: Vec<f64> = results.streams[0].windows.iter().map(|w| w.running_mean_nll).collect();
    assert_eq!(running, [0.75, 1.0, 1.25]);
}

#[test]
fn batches_change_nothing_and_span_streams() {
    let plan = two_streams();
    let mut scorer = ToyScorer::new(11, 3.0, 1);
    let one = run(&plan, &mut scorer, 1);
    assert_eq!(scorer.batches, [1; 11]);
    for batch in [2, 4, 64] {
        let mut scorer = ToyScorer::new(11, 3.0, 1);
        let many = run(&plan, &mut scorer, batch);
        assert_eq!(figures(&many), figures(&one));
        assert_eq!(
            (many.uncertainty, many.domains),
            (one.uncertainty.clone(), one.domains.clone())
        );
        assert_eq!(scorer.batches[0], batch.min(11));
    }
    assert_eq!(one.domains.keys().collect::<Vec<_>>(), ["x", "y"]);
    assert_eq!(one.overall.scored_tokens, 39 + 22);
}

#[test]
fn equal_streams_score_equally_wherever_they_stand() {
    let a: Vec<u32> = (0..25).map(|i| i * 3 % 11).collect();
    let b: Vec<u32> = (0..31).map(|i| i * 4 % 11).collect();
    let totals = |order: [&[u32]; 3]| {
        let streams = order
            .iter()
            .enumerate()
            .map(|(i, tokens)| stream(&i.to_string(), "d", tokens));
        let plan = CorpusPlan::from_tokens("c", protocol(10, 5), streams).unwrap();
        let results = run(&plan, &mut ToyScorer::new(11, 3.0, 1), 3);
        results
            .streams
            .iter()
            .map(|s| s.aggregate.total_nll)
            .collect::<Vec<_>>()
    };
    let (aba, baa) = (totals([&a, &b, &a]), totals([&b, &a, &a]));
    assert_eq!((aba[0], aba[0], aba[1]), (aba[2], baa[1], baa[0]));
    assert_eq!(baa[1], baa[2]);
}

#[test]
fn shards_divide_the_windows() {
    let plan = two_streams();
    let whole = run(&plan, &mut ToyScorer::new(11, 3.0, 1), 4);
    let mut parts: Vec<(String, usize, f64)> = Vec::new();
    for i in 0..3 {
        let options = Options {
            batch: 2,
            shard: format!("{i}/3").parse().unwrap(),
            ..Options::default()
        };
        let part = evaluate(&plan, &mut ToyScorer::new(11, 3.0, 1), &options, &mut ()).unwrap();
        for (planned, stream) in plan.streams.iter().zip(&part.streams) {
            parts.extend(
                stream
                    .windows
                    .iter()
                    .map(|w| (planned.id.clone(), w.index, w.aggregate.total_nll)),
            );
        }
    }
    parts.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
    let all = plan.streams.iter().zip(&whole.streams);
    let expected: Vec<_> = all
        .flat_map(|(p, s)| s.windows.iter().map(|w| (p.id.clone(), w.index, w.aggregate.total_nll)))
        .collect();
    assert_eq!(parts, expected);
}

#[derive(Default)]
struct Recorder(Vec<String>);

impl Progress for Recorder {
    fn started(&mut self, totals: Totals) {
        self.0
            .push(format!("start {} {} {}", totals.streams, totals.tokens, totals.windows));
    }
    fn stream_started(&mut self, plan: &CorpusPlan, stream: usize) {
        self.0.push(format!("begin {}", plan.streams[stream].id));
    }
    fn batch_scored(&mut self, snapshot: &Snapshot) {
        self.0
            .push(format!("batch {} {}", snapshot.windows, snapshot.running.scored_tokens));
    }
    fn stream_finished(&mut self, plan: &CorpusPlan, stream: usize, result: &StreamResult) {
        self.0
            .push(format!("end {} {}", plan.streams[stream].id, result.windows.len()));
    }
}

#[test]
fn the_observer_hears_every_step_in_order() {
    let mut recorder = Recorder::default();
    let options = Options {
        batch: 4,
        ..Options::default()
    };
    evaluate(&two_streams(), &mut ToyScorer::new(11, 3.0, 1), &options, &mut recorder).unwrap();
    // Stream a has 7 windows (9 + 6 × 5 targets), b has 4 (9 + 5 + 5 + 3).
    let expected = [
        "start 2 61 11",
        "begin a",
        "batch 4 24",
        "begin b",
        "end a 7",
        "batch 8 48",
        "end b 4",
        "batch 11 61",
    ];
    assert_eq!(recorder.0, expected);
}

type Change = Box<dyn FnMut(&mut Vec<WindowScores>) -> Result<(), ScoreError>>;

/// Answers like a toy scorer, then spoils the answer.
struct Broken(Change);

impl CausalScorer for Broken {
    fn public_tokens(&self) -> usize {
        11
    }
    fn score(&mut self, windows: &[WindowTokens], ask: &ScoreRequest) -> Result<Vec<WindowScores>, ScoreError> {
        let mut scores = ToyScorer::new(11, 3.0, 1).score(windows, ask)?;
        (self.0)(&mut scores)?;
        Ok(scores)
    }
}

fn failure(batch: usize, change: impl FnMut(&mut Vec<WindowScores>) -> Result<(), ScoreError> + 'static) -> String {
    let options = Options {
        batch,
        ..Options::default()
    };
    evaluate(&two_streams(), &mut Broken(Box::new(change)), &options, &mut ())
        .unwrap_err()
        .to_string()
}

#[test]
fn failures_name_stream_and_window() {
    let mut calls = 0;
    // The third call of four windows holds windows 1, 2 and 3 of stream b.
    let message = failure(4, move |scores| {
        calls += 1;
        if calls == 3 {
            scores[1].logprobs[2] = f32::NAN;
        }
        Ok(())
    });
    assert!(
        message.starts_with("stream `b`, window 2: log-probability NaN at scored position 2 is not"),
        "{message}"
    );
    let message = failure(4, |scores| {
        scores[1].logprobs.pop();
        Ok(())
    });
    assert_eq!(
        message,
        "stream `a`, window 1: the model returned 4 log-probabilities, expected 5"
    );
    let message = failure(4, |scores| {
        scores.pop();
        Ok(())
    });
    assert_eq!(
        message,
        "stream `a`, window 0: the model scored 3 windows of a batch of 4"
    );
    let message = failure(4, |_| Err(ScoreError("out of memory".into())));
    assert_eq!(message, "stream `a`, window 0 (first of a batch of 4): out of memory");
    assert_eq!(failure(0, |_| Ok(())), "the batch must hold at least 1 window");
}

#[test]
fn tokens_of_another_vocabulary_are_refused() {
    let plan = CorpusPlan::from_tokens("c", protocol(6, 2), [stream("a", "d", &[1, 2, 11])]).unwrap();
    let message = evaluate(&plan, &mut ToyScorer::new(11, 3.0, 1), &Options::default(), &mut ()).unwrap_err();
    assert!(
        message
            .to_string()
            .starts_with("stream `a`: token 11 at index 2 is outside the model's 11 public")
    );
}
