//! Prefilled tokens per second on the CPU, and where the time goes:
//!
//! ```text
//! cargo bench -p perplexity-model --bench forward [-- CHECKPOINT] [--context N] [--route normal|exact] [--threads N]
//! ```
//!
//! Windows of `context` tokens with the second half scored, as in the sliding protocol with a stride of half the context.
//! One warm-up, then the median of seven; shares from a separate timed run, as seen by the calling thread.

use std::path::PathBuf;
use std::time::Instant;

use perplexity_kernels::timing;
use perplexity_model::checkpoint::CheckpointSource;
use perplexity_model::route::Route;
use perplexity_model::scorer::{Ask, ModelError, Scorer, ScorerOptions, Window};
use perplexity_model::source::TextSource;

const RUNS: usize = 7;
const WINDOWS: usize = 4;

type Load = fn(&dyn TextSource, &ScorerOptions) -> Result<Box<dyn Scorer>, ModelError>;

fn main() {
    let mut context = 1024;
    let mut checkpoint = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/demo_hf"));
    let mut options = ScorerOptions::new(1);
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|value| value.parse().ok()).expect("a number");
        match argument.as_str() {
            "--context" => context = number(),
            "--threads" => options.threads = Some(number()),
            "--batch" => options.batch = number(),
            "--route" => match arguments.next().as_deref() {
                Some("normal") => options.route = Route::Normal,
                Some("exact") => options.route = Route::Exact,
                _ => panic!("--route is normal or exact"),
            },
            _ => checkpoint = argument.into(),
        }
    }
    let source = CheckpointSource::open(&checkpoint).expect("a checkpoint");
    options.public_tokens = source.config().vocab_size;
    let backends: Vec<(&str, Load)> = vec![
        #[cfg(feature = "flex")]
        ("flex", perplexity_model::backends::flex::load),
        #[cfg(feature = "ndarray")]
        ("ndarray", perplexity_model::backends::ndarray::load),
    ];
    for (name, load) in backends {
        let scorer = load(&source, &options).expect("a model");
        measure(name, scorer, context, &options);
    }
    if let Some(peak) = peak_memory() {
        println!("peak memory {peak}");
    }
}

fn measure(name: &str, mut scorer: Box<dyn Scorer>, context: usize, options: &ScorerOptions) {
    let vocabulary = options.public_tokens as u64;
    let windows: Vec<Window> = (0..WINDOWS as u64)
        .map(|seed| Window {
            tokens: (0..context as u64)
                .map(|i| ((i * 2_654_435_761 + seed * 97) % vocabulary) as u32)
                .collect(),
            first_target: context / 2,
        })
        .collect();
    let mut run = || {
        let start = Instant::now();
        scorer.score(&windows, &Ask::default()).expect("scores");
        start.elapsed().as_secs_f64()
    };
    run();
    let mut seconds: Vec<f64> = (0..RUNS).map(|_| run()).collect();
    seconds.sort_by(f64::total_cmp);
    let (median, best) = (seconds[RUNS / 2], seconds[0]);
    let fed = (WINDOWS * (context - 1)) as f64;
    println!(
        "{name}, route {}, context {context}: {:.0} prefilled tokens/s (best of {RUNS}: {:.0})",
        options.route.name(),
        fed / median,
        fed / best,
    );

    timing::enable(true);
    let total = run();
    let mut spent = timing::spent();
    timing::enable(false);
    spent.sort_by_key(|&(_, time)| std::cmp::Reverse(time));
    let accounted: f64 = spent.iter().map(|(_, time)| time.as_secs_f64()).sum();
    for (operation, time) in spent {
        let seconds = time.as_secs_f64();
        println!(
            "  {:>5.1} % {:>7.1} us/token  {operation:?}",
            100.0 * seconds / total,
            1e6 * seconds / fed
        );
    }
    println!(
        "  {:>5.1} % outside the operations",
        100.0 * (total - accounted) / total
    );
}

/// The process's largest resident set, where the system tells.
fn peak_memory() -> Option<String> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some(
        status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))?
            .trim()
            .to_owned(),
    )
}
