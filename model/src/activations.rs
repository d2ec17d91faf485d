//! Which projections see their inputs in 8 or 4 bits.
//!
//! The model's file states for every weight which activations it permits. Weights that share an input are limited by the
//! least of their permissions; the control projections, which read the row before its rounding, and the output head always
//! have 16-bit activations and take no part. What becomes of a permission depends on how the weight is stored:
//!
//! | weight | A16Only | AllowA8 | AllowA4 |
//! |---|---|---|---|
//! | FP8 | 16 bits | FP8 per token | FP8 per token |
//! | NVFP4 | 16 bits | 16 bits | NVFP4 with the input's divisor |
//! | grouped integers | 16 bits | INT8 per 64 inputs | INT8 per 64 inputs |
//! | anything else | 16 bits | 16 bits | 16 bits |

use std::collections::{BTreeMap, BTreeSet, HashMap};

use perplexity_kernels::backend::ActivationFormat;
pub use perplexity_kernels::ops::quantize_rows::Nvfp4Rounding;

use crate::parameters::{Parameter, parameters};
use crate::source::{ActivationPolicy, SourceError, StoredParameter, TextSource};

/// Projections whose inputs are never narrowed, and the ones inside the routed feed-forward, which multiplies in 16 bits.
fn is_sixteen_bit(role: &str) -> bool {
    matches!(role, "output_head" | "gdn/a_projection" | "gdn/b_projection") || role.starts_with("moe/")
}

/// What may be narrowed, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permitted {
    /// Whether grouped-integer weights meet 8-bit integers.
    pub integer: bool,
    /// How 4-bit activations are rounded.
    pub rounding: Nvfp4Rounding,
}

/// The activation format of every projection that has one, by parameter.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Activations(BTreeMap<String, Site>);

#[derive(Debug, Clone, PartialEq)]
struct Site {
    input: String,
    format: ActivationFormat,
}

impl Activations {
    /// Everything that `source` permits.
    ///
    /// # Errors
    /// When the source does not say how a projection is stored.
    pub fn permitted(source: &dyn TextSource, permitted: Permitted) -> Result<Self, SourceError> {
        let mut projections: Vec<(Parameter, String, StoredParameter)> = Vec::new();
        let mut limits: HashMap<String, ActivationPolicy> = HashMap::new();
        for parameter in parameters(source.config()) {
            let Some(input) = parameter.input.clone().filter(|_| !is_sixteen_bit(parameter.role)) else {
                continue;
            };
            let stored = source.stored(&parameter.name)?;
            let policy = stored.policy.unwrap_or(ActivationPolicy::A16Only);
            let limit = limits.entry(input.clone()).or_insert(policy);
            *limit = policy.min(*limit);
            projections.push((parameter, input, stored));
        }
        let sites = projections.into_iter().filter_map(|(parameter, input, stored)| {
            let format = format(&stored, limits[&input], permitted)?;
            Some((parameter.name, Site { input, format }))
        });
        Ok(Self(sites.collect()))
    }

    /// How parameter `name` sees its input; `None` as it is.
    pub fn of(&self, name: &str) -> Option<ActivationFormat> {
        self.0.get(name).map(|site| site.format)
    }

    /// The narrowed inputs by the name of their format: `fp8`, `nvfp4` or `int8`.
    pub fn inputs(&self) -> BTreeMap<&'static str, BTreeSet<&str>> {
        let mut inputs: BTreeMap<&'static str, BTreeSet<&str>> = BTreeMap::new();
        for site in self.0.values() {
            inputs.entry(name(site.format)).or_default().insert(&site.input);
        }
        inputs
    }
}

/// Name in reports.
fn name(format: ActivationFormat) -> &'static str {
    match format {
        ActivationFormat::Fp8 => "fp8",
        ActivationFormat::Nvfp4 { .. } => "nvfp4",
        ActivationFormat::Int8 => "int8",
    }
}

/// What the weight's own format makes of the `limit` of its input.
fn format(stored: &StoredParameter, limit: ActivationPolicy, permitted: Permitted) -> Option<ActivationFormat> {
    let mut formats = stored.parts.iter().map(|part| part.format);
    let first = formats.next()?;
    if !formats.all(|format| format == first) {
        return None;
    }
    match first {
        fp8 if fp8.starts_with("fp8") => (limit >= ActivationPolicy::AllowA8).then_some(ActivationFormat::Fp8),
        "nvfp4" | "nvfp4_mul" => {
            let divisor = stored
                .activation_divisor
                .filter(|_| limit == ActivationPolicy::AllowA4)?;
            let rounding = permitted.rounding;
            Some(ActivationFormat::Nvfp4 { divisor, rounding })
        }
        grouped if grouped.starts_with('q') && permitted.integer => {
            (limit >= ActivationPolicy::AllowA8).then_some(ActivationFormat::Int8)
        }
        _ => None,
    }
}
