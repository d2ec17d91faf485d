//! Divisors of 4-bit activations from a text: at every input of a projection the largest magnitude `a` that a forward pass
//! over the text meets, then
//!
//! ```text
//! d = 448 * 6 / a        so that `a` lands on the largest code under the largest scale
//! ```

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use burn::tensor::Tensor;
use perplexity_kernels::EvaluatorBackend;
use perplexity_kernels::numeric::{E2M1_MAX, E4M3FN_MAX};

use crate::config::TextConfig;
use crate::layers::loader::LoadOptions;
use crate::parameters::parameters;
use crate::qwen3_5::Qwen3_5;
use crate::route::Route;
use crate::scorer::ModelError;
use crate::source::TextSource;

/// The largest magnitude seen at one input; shared by the weights that read it.
#[derive(Debug, Clone, Default)]
pub struct Maximum(Arc<AtomicU32>);

impl PartialEq for Maximum {
    /// Whether both belong to one input.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Maximum {
    /// Takes the magnitudes of `x` into account; one that is not finite makes the maximum infinite.
    pub(crate) fn observe<B: EvaluatorBackend>(&self, x: Tensor<B, 3>) {
        let values = x.into_data().convert::<f32>();
        let largest = values
            .as_slice::<f32>()
            .into_iter()
            .flatten()
            .fold(0.0f32, |largest, x| {
                if x.is_finite() {
                    largest.max(x.abs())
                } else {
                    f32::INFINITY
                }
            });
        // Bits of floats that are not negative are ordered as their values.
        self.0.fetch_max(largest.to_bits(), Relaxed);
    }

    fn value(&self) -> f32 {
        f32::from_bits(self.0.load(Relaxed))
    }
}

/// The maxima of all inputs, by the parameters that read them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Maxima {
    by_parameter: HashMap<String, Maximum>,
    by_input: BTreeMap<String, Maximum>,
}

impl Maxima {
    fn new(config: &TextConfig) -> Self {
        let mut maxima = Self::default();
        for parameter in parameters(config) {
            if let Some(input) = parameter.input {
                let maximum = maxima.by_input.entry(input).or_default();
                maxima.by_parameter.insert(parameter.name, maximum.clone());
            }
        }
        maxima
    }

    /// The maximum of what parameter `name` reads.
    pub(crate) fn of(&self, name: &str) -> Option<&Maximum> {
        self.by_parameter.get(name)
    }
}

/// Divisors by input, such as `text/layers/0/ffn_input`, from a pass over every window of `windows`, in the normal route.
///
/// Inputs that were all zeros, and those of the output head, have none. `progress` is called after every window
/// with the tokens so far.
///
/// # Errors
/// When the model cannot be loaded, or a value is not finite.
pub fn activation_divisors<B: EvaluatorBackend>(
    source: &dyn TextSource,
    windows: &[&[u32]],
    device: &B::Device,
    progress: &mut dyn FnMut(usize),
) -> Result<BTreeMap<String, f32>, ModelError> {
    let maxima = Maxima::new(source.config());
    let options = LoadOptions {
        maxima: Some(maxima.clone()),
        ..LoadOptions::default()
    };
    let model = Qwen3_5::<B>::load_with(source, Route::Normal, &options, device)?;
    let mut tokens = 0;
    for window in windows.iter().filter(|window| !window.is_empty()) {
        model.pass(&mut model.begin(1, window.len()), window, |_, _| {});
        tokens += window.len();
        progress(tokens);
    }
    let mut divisors = BTreeMap::new();
    for (input, maximum) in maxima.by_input {
        let largest = maximum.value();
        if !largest.is_finite() {
            return Err(ModelError::NotFinite { input });
        }
        if largest > 0.0 {
            divisors.insert(input, E4M3FN_MAX * E2M1_MAX / largest);
        }
    }
    Ok(divisors)
}
