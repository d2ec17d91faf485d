//! The numerical route as asked for: which one, what it may not be combined with and why, and what the report says.

use std::collections::BTreeMap;

use clap::ValueEnum;
use perplexity_eval::report::Settings;
use perplexity_model::config::TextConfig;
use perplexity_model::route::{ROUNDING_CONTRACT, Route, TRANSFORMERS};

use crate::args::{RouteArgs, ScoreArgs};
use crate::options::Device;

/// A choice of route that cannot be carried out as typed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RouteUsageError {
    #[error("{first} and {second} are different routes; give one")]
    Two { first: String, second: String },
    #[error("--route {0:?} is not known; expected normal or exact")]
    Unknown(String),
    #[error(
        "--prefill-chunk {found} is less than the window of {context} tokens: --{route} sees a window in one pass, since \
         between passes its f64 states would be rounded; leave the option out, or pass at least the context"
    )]
    OnePass {
        route: &'static str,
        found: u32,
        context: usize,
    },
    #[error("--lossless adds no loss: {option} would; --reference applies the losses that are asked for")]
    Loss { option: &'static str },
    #[error("--{route} does not run on --device {device}: {why}; pass --device {others}")]
    Device {
        route: &'static str,
        device: Device,
        why: &'static str,
        others: &'static str,
    },
}

/// Which rows of the output head take part in the softmax.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SoftmaxRows {
    /// The ids that the tokenizer can produce
    Public,
    /// Every row, padding included
    All,
}

impl SoftmaxRows {
    /// How many these are of `head_rows`.
    pub(crate) fn count(self, public_tokens: usize, head_rows: usize) -> usize {
        match self {
            Self::Public => public_tokens,
            Self::All => head_rows,
        }
    }
}

/// How a run computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Numerics {
    pub(crate) route: Route,
    pub(crate) softmax_rows: SoftmaxRows,
}

impl Numerics {
    /// Resolves what was typed, for windows of `context` tokens.
    ///
    /// # Errors
    /// When two routes are named, or the route excludes the pass size, the device or a loss that was asked for.
    pub(crate) fn resolve(args: &ScoreArgs, context: usize, device: Device) -> Result<Self, RouteUsageError> {
        let route = route(&args.route)?;
        let name = route.name();
        if let Some(found) = args.route.prefill_chunk
            && route.is_precise()
            && (found as usize) < context
        {
            return Err(RouteUsageError::OnePass {
                route: name,
                found,
                context,
            });
        }
        let refused = match (route, device) {
            (Route::Lossless | Route::Reference, Device::Vulkan(_)) => {
                Some(("there is no f64 there", "cuda:N, flex or ndarray"))
            }
            (Route::Reproducible, Device::Cuda(_) | Device::Vulkan(_)) => Some((
                "sums of its kernels depend on the pass and the batch",
                "flex or ndarray",
            )),
            _ => None,
        };
        if let Some((why, others)) = refused {
            return Err(RouteUsageError::Device {
                route: name,
                device,
                why,
                others,
            });
        }
        let losses = [
            (args.device.lm_head_q4, "--lm-head-q4"),
            (args.device.lm_head_q6, "--lm-head-q6"),
            (args.device.embedding_q4, "--embedding-q4"),
            (args.device.embedding_q6, "--embedding-q6"),
            (args.device.gdn_state_fp16, "--gdn-state-fp16"),
            (args.flash_next.expert_a4_activations, "--expert-a4-activations"),
        ];
        if let Some((_, option)) = losses.iter().find(|(given, _)| *given && route == Route::Lossless) {
            return Err(RouteUsageError::Loss { option });
        }
        let softmax_rows = args.route.softmax_rows.unwrap_or(match route {
            Route::Lossless => SoftmaxRows::All,
            _ => SoftmaxRows::Public,
        });
        Ok(Self { route, softmax_rows })
    }

    /// Fills in what the report says of the route.
    pub(crate) fn record(self, settings: &mut Settings, config: &TextConfig) {
        settings.route = self.route.name().into();
        settings.lossless = self.route == Route::Lossless;
        settings.reference = self.route == Route::Reference;
        settings.reproducible = self.route == Route::Reproducible;
        settings.numeric_contract = BTreeMap::from([("rounding".into(), ROUNDING_CONTRACT.into())]);
        if settings.lossless {
            let versions = &mut settings.numeric_contract;
            versions.insert("transformers".into(), TRANSFORMERS.into());
        }
        settings.logits_dtype = self.route.logits_dtype(config).into();
        let rows = match self.softmax_rows {
            SoftmaxRows::Public => "public",
            SoftmaxRows::All => "all",
        };
        settings.options.insert("softmax-rows".into(), rows.into());
    }
}

fn route(args: &RouteArgs) -> Result<Route, RouteUsageError> {
    let by_name = match args.route.as_deref() {
        None => None,
        Some(name) => Some((format!("--route {name}"), by_name(name)?)),
    };
    let flags = [
        (args.lossless, Route::Lossless),
        (args.reference, Route::Reference),
        (args.reproducible, Route::Reproducible),
    ];
    let given = flags.iter().filter(|(given, _)| *given);
    let mut named = by_name
        .into_iter()
        .chain(given.map(|(_, route)| (format!("--{}", route.name()), *route)));
    match (named.next(), named.next()) {
        (Some((first, _)), Some((second, _))) => Err(RouteUsageError::Two { first, second }),
        (Some((_, route)), None) => Ok(route),
        (None, _) => Ok(Route::default()),
    }
}

/// The route that `--route` names.
///
/// # Errors
/// When there is none of that name.
pub(crate) fn by_name(name: &str) -> Result<Route, RouteUsageError> {
    match name {
        "normal" => Ok(Route::Normal),
        "exact" => Ok(Route::Exact),
        _ => Err(RouteUsageError::Unknown(name.to_owned())),
    }
}
