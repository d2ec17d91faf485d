//! `bench`: what the operations of a pass reach of the device's ability, and how fast windows are scored.

use std::fmt::Write as _;
use std::time::Instant;

use perplexity_eval::humanize::count;
use perplexity_model::backends::{self, DeviceFacts};
use perplexity_model::bench::{Operations, PassShape};
use perplexity_model::config::TextConfig;
use perplexity_model::layers::loader::LoadOptions;
use perplexity_model::memory::{DeviceStorage, Residency};
use perplexity_model::route::Route;
use perplexity_model::scorer::{Ask, Scorer, ScorerOptions, Window};
use perplexity_model::source::{self, TextSource};
use perplexity_model::tokenizer::{AddedTokens, TextTokenizer};
use serde::Serialize;

use crate::args::{BenchArgs, KvArgs};
use crate::kv::KvCache;
use crate::log::Log;
use crate::memory::{self, CardPlan, Load, look_at};
use crate::options::{Device, UsageError, device, threads};
use crate::precision::Narrowing;
use crate::prefill::Prefill;
use crate::route;
use crate::score::load_scorer;
use crate::{Failure, limit_threads};

/// What was asked for, checked.
struct Options {
    device: Device,
    route: Route,
    prefill: Prefill,
    contexts: Vec<usize>,
    batches: Vec<usize>,
    caches: Vec<KvCache>,
    narrowing: Narrowing,
    memory_budget: Option<u64>,
    runs: usize,
}

/// What was measured.
#[derive(Debug, Serialize)]
struct Measured {
    model: String,
    device: String,
    route: &'static str,
    threads: usize,
    /// How scoring narrows its inputs.
    activations: String,
    /// The measured pass.
    pass: Pass,
    #[serde(flatten)]
    operations: Operations,
    speeds: Vec<Speed>,
}

#[derive(Debug, Serialize)]
struct Pass {
    windows: usize,
    tokens: usize,
    tokens_before: usize,
}

/// Speed of scoring whole windows, each scored in its second half.
#[derive(Debug, Serialize)]
struct Speed {
    context: usize,
    batch: usize,
    kv_dtype: String,
    /// Form of the weights on a card.
    #[serde(skip_serializing_if = "Option::is_none")]
    weight_residency: Option<&'static str>,
    /// Median of all runs.
    seconds: f64,
    prefilled_tokens_per_second: f64,
    scored_tokens_per_second: f64,
}

/// Measures what `args` ask for and returns the table, or JSON, for standard output.
pub(crate) fn run(args: &BenchArgs, log: &Log) -> Result<Vec<u8>, Failure> {
    let options = Options::resolve(args)?;
    limit_threads(threads(args.threads)?)?;
    let source = source::open(&args.artifact).map_err(Failure::failed)?;
    options.check(source.config())?;
    let tokenizer = TextTokenizer::from_source(source.as_ref(), AddedTokens::Match).map_err(Failure::failed)?;
    let pass = options.pass(source.config());
    let card = look_at(options.device)?;
    for slower in card.iter().flat_map(|(facts, _)| &facts.slower) {
        log.warning(slower);
    }
    log.info(format_args!("measuring operations on {}", options.device));
    let operations = measure(&options, source.as_ref(), pass)?;
    let load = options
        .narrowing
        .load_options(source.as_ref())
        .map_err(Failure::failed)?;
    log.info(format_args!("activations | {}", Narrowing::described(&load)));
    let mut speeds = Vec::new();
    for cache in &options.caches {
        let plan = options.plan(card.as_ref(), source.as_ref(), cache, &load)?;
        if let Some(plan) = &plan {
            log.info(plan.line());
        }
        log.info(format_args!("loading weights | kv {}", cache.recorded()));
        let scorer_options = ScorerOptions {
            route: options.route,
            kv: cache.codec().cloned(),
            load: LoadOptions {
                residency: plan.as_ref().map_or(Residency::Dense, |plan| plan.plan.residency),
                ..load.clone()
            },
            prefill_chunk: options.prefill.effective(cache, source.config()),
            batch: most(&options.batches),
            ..ScorerOptions::new(tokenizer.public_tokens())
        };
        let mut scorer = load_scorer(source.as_ref(), &scorer_options, options.device)?;
        for &context in &options.contexts {
            for &batch in &options.batches {
                log.info(format_args!("scoring {batch} x {} tokens", count(context as u64)));
                let seconds = seconds(scorer.as_mut(), context, batch, options.runs)?;
                let fed = batch * (context - 1);
                let scored = batch * (context - first_target(context));
                speeds.push(Speed {
                    context,
                    batch,
                    kv_dtype: cache.recorded(),
                    weight_residency: plan.as_ref().map(CardPlan::form),
                    seconds,
                    prefilled_tokens_per_second: fed as f64 / seconds,
                    scored_tokens_per_second: scored as f64 / seconds,
                });
            }
        }
    }
    let measured = Measured {
        model: source.name().to_owned(),
        device: options.device.to_string(),
        route: options.route.name(),
        threads: rayon::current_num_threads(),
        activations: Narrowing::described(&load),
        pass: Pass {
            windows: pass.batch,
            tokens: pass.tokens,
            tokens_before: pass.before,
        },
        operations,
        speeds,
    };
    if args.json {
        return crate::json(&measured);
    }
    Ok(measured.table().into_bytes())
}

impl Options {
    fn resolve(args: &BenchArgs) -> Result<Self, UsageError> {
        if !args.artifact.exists() {
            return Err(UsageError::Missing {
                what: "artifact",
                path: args.artifact.clone(),
            });
        }
        let at_least = |option, least: u32, values: &[u32]| match values.iter().find(|value| **value < least) {
            Some(&value) => Err(UsageError::OutOfRange {
                option,
                value,
                expected: format!("at least {least}"),
            }),
            None => Ok(values.iter().map(|value| *value as usize).collect::<Vec<_>>()),
        };
        let route = route::by_name(&args.route)?;
        let cache = |dtype: Option<&String>| {
            let typed = KvArgs {
                kv_dtype: dtype.cloned(),
                ..KvArgs::default()
            };
            KvCache::resolve(&typed, route)
        };
        let caches = match args.kv_dtype.as_slice() {
            [] => vec![cache(None)?],
            dtypes => dtypes
                .iter()
                .map(|dtype| cache(Some(dtype)))
                .collect::<Result<_, _>>()?,
        };
        let device = device(&args.device)?;
        Ok(Self {
            device,
            route,
            prefill: Prefill::of(args.prefill_chunk, device)?,
            contexts: at_least("--context", 2, &args.context)?,
            batches: at_least("--batch", 1, &args.batch)?,
            caches,
            narrowing: Narrowing::of_activations(args.a16_activations, route.narrows_activations()),
            memory_budget: memory::budget(args.memory_budget.as_deref(), device)?,
            runs: at_least("--runs", 1, &[args.runs])?[0],
        })
    }

    fn check(&self, config: &TextConfig) -> Result<(), UsageError> {
        if config.flash_next.is_some() {
            return Err(UsageError::NoBench);
        }
        let positions = config.max_position_embeddings;
        if let Some(&context) = self.contexts.iter().find(|context| **context > positions) {
            return Err(UsageError::OutOfRange {
                option: "--context",
                value: context as u32,
                expected: format!("at most the model's {positions} positions"),
            });
        }
        self.caches
            .iter()
            .try_for_each(|cache| cache.check(config))
            .map_err(UsageError::Kv)
    }

    /// What scoring with `cache` takes of a card.
    fn plan(
        &self,
        card: Option<&(DeviceFacts, DeviceStorage)>,
        source: &dyn TextSource,
        cache: &KvCache,
        load: &LoadOptions,
    ) -> Result<Option<CardPlan>, Failure> {
        let load = Load {
            device: self.device,
            route: self.route,
            kv: cache,
            prefill: self.prefill,
            activations: &load.activations,
            tokens: most(&self.contexts) - 1,
            batch: Some(most(&self.batches)),
            budget: self.memory_budget,
        };
        CardPlan::make(&load, card, source)
    }

    /// The last pass of the first context, batch and format: its attention sees the most keys.
    fn pass(&self, config: &TextConfig) -> PassShape {
        let fed = self.contexts[0] - 1;
        let chunk = self.prefill.effective(&self.caches[0], config);
        let before = (fed - 1) / chunk * chunk;
        PassShape {
            batch: self.batches[0],
            tokens: fed - before,
            before,
        }
    }
}

/// Operations of `pass` with the first format, where the device keeps it packed.
fn measure(options: &Options, source: &dyn TextSource, pass: PassShape) -> Result<Operations, Failure> {
    let kv = options.caches[0].codec();
    let measured = match options.device {
        #[cfg(feature = "ndarray")]
        Device::NdArray => backends::ndarray::measure(source, options.route, pass, kv),
        #[cfg(feature = "flex")]
        Device::Flex => backends::flex::measure(source, options.route, pass, kv),
        #[cfg(feature = "cuda")]
        Device::Cuda(n) => backends::cuda::measure(source, options.route, pass, kv, n),
        #[cfg(feature = "vulkan")]
        Device::Vulkan(_) => backends::vulkan::measure(source, options.route, pass, kv),
        #[allow(unreachable_patterns, reason = "not every build has every device")]
        other => return Err(UsageError::DeviceNotBuilt(other).into()),
    };
    measured.map_err(Failure::failed)
}

fn most(values: &[usize]) -> usize {
    values.iter().copied().max().unwrap_or(1)
}

/// The first scored token of a window: its second half is.
fn first_target(context: usize) -> usize {
    (context / 2).max(1)
}

/// Median seconds of scoring `batch` windows of pseudo-random tokens, after one run that is not timed.
fn seconds(scorer: &mut dyn Scorer, context: usize, batch: usize, runs: usize) -> Result<f64, Failure> {
    let public = scorer.public_tokens();
    let windows: Vec<Window> = (0..batch)
        .map(|seed| Window {
            tokens: (0..context)
                .map(|at| ((at * 2_654_435_761 + seed * 97) % public) as u32)
                .collect(),
            first_target: first_target(context),
        })
        .collect();
    let mut once = || -> Result<f64, Failure> {
        let start = Instant::now();
        scorer.score(&windows, &Ask::default()).map_err(Failure::failed)?;
        Ok(start.elapsed().as_secs_f64())
    };
    once()?;
    let mut seconds = (0..runs).map(|_| once()).collect::<Result<Vec<_>, _>>()?;
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[runs / 2])
}

impl Measured {
    fn table(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, text: &mut String) -> std::fmt::Result {
        let Pass {
            windows,
            tokens,
            tokens_before,
        } = self.pass;
        let ceilings = self.operations.ceilings;
        let n = ceilings.product_size;
        writeln!(
            text,
            "{} | {} | route {} | {} CPU threads\nceilings: copy {:.1} GB/s | product {:.3} TFLOP/s ({n} x {n} x {n})\n",
            self.model,
            self.device,
            self.route,
            self.threads,
            ceilings.copy_bytes_per_second / 1e9,
            ceilings.product_flops_per_second / 1e12
        )?;
        writeln!(
            text,
            "Operations of a pass of {windows} x {} tokens after {}, alone, 16-bit activations, median\n",
            count(tokens as u64),
            count(tokens_before as u64)
        )?;
        writeln!(
            text,
            "{:<30} {:>5} {:>9} {:>9} {:>6} {:>8} {:>5} {:>8} {:>5}",
            "operation", "calls", "ms/call", "ms/pass", "share", "TFLOP/s", "of it", "GB/s", "of it"
        )?;
        let all: f64 = self
            .operations
            .operations
            .iter()
            .map(|time| time.seconds_per_pass())
            .sum();
        for time in &self.operations.operations {
            write!(
                text,
                "{:<30} {:>5} {:>9.3} {:>9.2} {:>4.1} %",
                time.name,
                time.calls,
                time.seconds * 1e3,
                time.seconds_per_pass() * 1e3,
                100.0 * time.seconds_per_pass() / all
            )?;
            let percent = |reached: f64, ceiling: f64| 100.0 * reached / ceiling;
            if time.flops > 0.0 {
                let reached = time.flops_per_second();
                let share = percent(reached, ceilings.product_flops_per_second);
                write!(text, " {:>8.3} {share:>3.0} %", reached / 1e12)?;
            } else {
                write!(text, " {:>8} {:>5}", "", "")?;
            }
            let reached = time.bytes_per_second();
            let share = percent(reached, ceilings.copy_bytes_per_second);
            writeln!(text, " {:>8.2} {share:>3.0} %", reached / 1e9)?;
        }
        writeln!(text, "{:<30} {:>5} {:>9} {:>9.2}\n", "all", "", "", all * 1e3)?;
        writeln!(
            text,
            "Scoring, second half of each window, activations of {}\n\n{:>8} {:>6} {:<20} {:>10} {:>12} {:>10}",
            self.activations, "context", "batch", "kv", "seconds", "prefilled/s", "scored/s"
        )?;
        for speed in &self.speeds {
            writeln!(
                text,
                "{:>8} {:>6} {:<20} {:>10.3} {:>12.0} {:>10.0}",
                count(speed.context as u64),
                speed.batch,
                speed.kv_dtype,
                speed.seconds,
                speed.prefilled_tokens_per_second,
                speed.scored_tokens_per_second
            )?;
        }
        Ok(())
    }
}
