//! Memory of a card: the budget as typed, and what is made of it before anything is loaded.

use perplexity_eval::humanize::bytes;
use perplexity_eval::report::Settings;
use perplexity_model::activations::Activations;
use perplexity_model::backends::DeviceFacts;
use perplexity_model::config::TextConfig;
use perplexity_model::layers::kv_cache::is_decoded_on_devices;
use perplexity_model::memory::{Batch, DeviceStorage, Needs, Plan, Residency, Shortfall, WindowShape};
use perplexity_model::route::Route;
use perplexity_model::source::TextSource;

use crate::Failure;
use crate::args::decimal;
use crate::kv::KvCache;
use crate::options::{Device, ScoreOptions, UsageError};
use crate::prefill::Prefill;

/// Tokens of a batch beyond which a card's products are no faster.
const FULL_SPEED_TOKENS: usize = 16_384;

/// A memory budget that cannot be met as typed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MemoryError {
    #[error("--memory-budget {value:?} is no size; expected a number of bytes, MB, MiB, GB or GiB, such as 40GiB")]
    NoSize { value: String },
    #[error("--memory-budget needs --device cuda:N or vulkan:0: a run on the CPU takes no card's memory")]
    NoCard,
    #[error("--memory-budget is not for Qwen3.8-Flash-Next: no sum is made of what it takes of a card")]
    NoPlan,
    #[error(
        "{batch} {total} on {device}, {weights} of it for the weights, and {budget} may be taken; \
         pass a smaller --batch, --context or --prefill-chunk, or a larger --memory-budget",
        batch = match shortfall.batch {
            1 => format!("one window of {tokens} tokens needs"),
            batch => format!("{batch} windows of {tokens} tokens need"),
        },
        total = bytes(shortfall.total),
        weights = bytes(shortfall.weights),
        budget = bytes(shortfall.budget)
    )]
    Shortfall {
        shortfall: Shortfall,
        tokens: usize,
        device: Device,
    },
}

/// The budget in bytes.
///
/// # Errors
/// When it is no size, or the device has no memory of its own.
pub(crate) fn budget(typed: Option<&str>, device: Device) -> Result<Option<u64>, MemoryError> {
    let Some(text) = typed else { return Ok(None) };
    if device.index().is_none() {
        return Err(MemoryError::NoCard);
    }
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "B" => Some(1.0),
        "MB" => Some(1e6),
        "MiB" => Some(1048576.0),
        "GB" => Some(1e9),
        "GiB" => Some(1073741824.0),
        _ => None,
    };
    let size = decimal(digits).ok().zip(unit).map(|(number, unit)| number * unit);
    match size.filter(|size| (1.0..1e18).contains(size)) {
        Some(size) => Ok(Some(size as u64)),
        None => Err(MemoryError::NoSize { value: text.to_owned() }),
    }
}

/// The device before anything is on it, and how it stores tensors; `None` for a CPU.
///
/// # Errors
/// When the card cannot be used.
pub(crate) fn look_at(device: Device) -> Result<Option<(DeviceFacts, DeviceStorage)>, Failure> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(n) => {
            let facts = perplexity_model::backends::cuda::facts(n).map_err(Failure::failed)?;
            Ok(Some((facts, DeviceStorage::NARROW)))
        }
        #[cfg(feature = "vulkan")]
        Device::Vulkan(_) => {
            let facts = perplexity_model::backends::vulkan::facts().map_err(Failure::failed)?;
            Ok(Some((facts, DeviceStorage::WIDE)))
        }
        _ => Ok(None),
    }
}

/// What a run on a card takes of it.
#[derive(Debug, Clone)]
pub(crate) struct CardPlan {
    pub(crate) plan: Plan,
    facts: DeviceFacts,
    budget: Option<u64>,
    /// Whether inputs narrowed to FP8 meet FP8 weights code by code.
    eight_bit: bool,
}

/// What is to run on a card.
#[derive(Debug)]
pub(crate) struct Load<'a> {
    pub(crate) device: Device,
    pub(crate) route: Route,
    pub(crate) kv: &'a KvCache,
    pub(crate) prefill: Prefill,
    /// Inputs that are narrowed.
    pub(crate) activations: &'a Activations,
    /// What the longest window feeds.
    pub(crate) tokens: usize,
    /// Windows per batch; as many as are worth it and fit unless given.
    pub(crate) batch: Option<usize>,
    pub(crate) budget: Option<u64>,
}

impl CardPlan {
    /// `None` on a CPU, and for Qwen3.8-Flash-Next, whose experts need not be on the card.
    ///
    /// # Errors
    /// When one window does not fit.
    pub(crate) fn make(
        load: &Load<'_>,
        card: Option<&(DeviceFacts, DeviceStorage)>,
        source: &dyn TextSource,
    ) -> Result<Option<Self>, Failure> {
        let &Load {
            device, route, tokens, ..
        } = load;
        if source.config().flash_next.is_some() {
            return match load.budget {
                Some(_) => Err(UsageError::from(MemoryError::NoPlan).into()),
                None => Ok(None),
            };
        }
        let Some((facts, storage)) = card else {
            return Ok(None);
        };
        let windows = WindowShape {
            tokens,
            prefill_chunk: load.prefill.effective(load.kv, source.config()),
        };
        let kv = load.kv.codec();
        let needs = Needs::of(source, route, *storage, windows, load.activations, kv).map_err(Failure::failed)?;
        let budget = load.budget.or(facts.free_bytes);
        let batch = match load.batch {
            Some(n) => Batch::Exactly(n),
            None => Batch::UpTo(FULL_SPEED_TOKENS / tokens.min(windows.prefill_chunk).max(1)),
        };
        let refused = |shortfall| MemoryError::Shortfall {
            shortfall,
            tokens,
            device,
        };
        let plan = needs.plan(budget, batch).map_err(refused).map_err(UsageError::from)?;
        let eight_bit = facts.multiplies_fp8 && load.activations.inputs().contains_key("fp8");
        Ok(Some(Self {
            plan,
            facts: facts.clone(),
            budget,
            eight_bit,
        }))
    }

    /// For the log.
    pub(crate) fn line(&self) -> String {
        let Plan {
            batch, weights, total, ..
        } = self.plan;
        let name = self
            .facts
            .name
            .as_deref()
            .map_or(String::new(), |name| format!("{name} | "));
        let windows = if batch == 1 { "window" } else { "windows" };
        let of = self
            .budget
            .map_or(String::new(), |budget| format!(" of {}", bytes(budget)));
        let (weights, total) = (bytes(weights), bytes(total));
        let form = match self.eight_bit {
            true => format!("{}, FP8 products", self.form()),
            false => self.form().into(),
        };
        format!("memory plan | {name}weights {form}, {weights} | {batch} {windows} per batch | at most {total}{of}")
    }

    /// For the report.
    pub(crate) fn record(&self, options: &ScoreOptions, config: &TextConfig, settings: &mut Settings) {
        let decoded = |layer: usize| options.kv.codec().is_some_and(|kv| is_decoded_on_devices(kv, layer));
        if options.numerics.route == Route::Normal && config.attention_layers().into_iter().any(decoded) {
            // Decoded rows and the queries that meet them are rounded to half precision, the output before its basis.
            settings.fast_paths.push("kv_decoded_f16".into());
        }
        if self.eight_bit {
            settings.fast_paths.push("fp8_products".into());
        }
        settings.device_name = self.facts.name.clone();
        settings.options.insert("weight_residency".into(), self.form().into());
        if let Some(budget) = self.budget {
            settings.options.insert("memory_budget_bytes".into(), budget.into());
        }
    }

    /// Form of the weights.
    pub(crate) fn form(&self) -> &'static str {
        match self.plan.residency {
            Residency::Dense => "expanded",
            Residency::Packed | Residency::EightBit => "packed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_numbers_with_units() {
        let size = |text| budget(Some(text), Device::Cuda(0)).map_err(|error| error.to_string());
        for (text, expected) in [
            ("1000000", 1_000_000),
            ("2.5GB", 2_500_000_000),
            ("40GiB", 40 << 30),
            ("512MiB", 512 << 20),
            ("3MB", 3_000_000),
        ] {
            assert_eq!(size(text), Ok(Some(expected)), "{text}");
        }
        for text in ["", "GiB", "-1GB", "0", "12TB", "NaN", "inf", "1e30", "4 GB"] {
            assert!(
                size(text).is_err_and(|message| message.contains("is no size")),
                "{text}"
            );
        }
        assert!(matches!(budget(Some("1GB"), Device::Flex), Err(MemoryError::NoCard)));
        assert_eq!(budget(None, Device::Flex).unwrap(), None);
    }
}
