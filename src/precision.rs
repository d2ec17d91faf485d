//! Precision options of a run: what was typed, what the model is given, what the report says.

use perplexity_eval::report::Settings;
use perplexity_model::activations::{Activations, Nvfp4Rounding, Permitted};
use perplexity_model::config::TextConfig;
use perplexity_model::formats::Format;
use perplexity_model::layers::loader::LoadOptions;
use perplexity_model::source::{SourceError, TextSource};

use crate::args::{A4Rounding, DeviceArgs, RouteArgs};
use crate::options::UsageError;

/// Precision as typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Narrowing {
    output_head: Option<Format>,
    embedding: Option<Format>,
    gdn_state_fp16: bool,
    mlp_a8_decode: bool,
    /// `None` for 16-bit activations everywhere.
    activations: Option<Permitted>,
    a16_activations: bool,
    a4_rounding: A4Rounding,
}

impl Narrowing {
    /// Resolves what was typed; `narrow` is whether the numerical route narrows activations at all.
    pub(crate) fn resolve(device: &DeviceArgs, route: &RouteArgs, narrow: bool) -> Self {
        let format = |q4: bool, q6: bool| match (q4, q6) {
            (true, _) => Some(Format::Q4G64Fp16),
            (false, true) => Some(Format::Q6G64Fp16),
            (false, false) => None,
        };
        Self {
            output_head: format(device.lm_head_q4, device.lm_head_q6),
            embedding: format(device.embedding_q4, device.embedding_q6),
            gdn_state_fp16: device.gdn_state_fp16,
            mlp_a8_decode: route.mlp_a8_decode,
            activations: (narrow && !route.a16_activations).then_some(Permitted {
                integer: !route.no_prefill_a8,
                rounding: match route.a4_rounding {
                    A4Rounding::Engine => Nvfp4Rounding::Engine,
                    A4Rounding::Modelopt => Nvfp4Rounding::ModelOpt,
                },
            }),
            a16_activations: route.a16_activations,
            a4_rounding: route.a4_rounding,
        }
    }

    /// Weights as stored, activations as the model permits or all of 16 bits; `narrow` as for [`Self::resolve`].
    pub(crate) fn of_activations(a16_activations: bool, narrow: bool) -> Self {
        Self {
            output_head: None,
            embedding: None,
            gdn_state_fp16: false,
            mlp_a8_decode: false,
            activations: (narrow && !a16_activations).then_some(Permitted {
                integer: true,
                rounding: Nvfp4Rounding::Engine,
            }),
            a16_activations,
            a4_rounding: A4Rounding::Engine,
        }
    }

    /// Refuses what the model at hand does not take.
    ///
    /// # Errors
    /// When an option was typed that Qwen3.8-Flash-Next does not have in this build.
    pub(crate) fn check(self, config: &TextConfig) -> Result<(), UsageError> {
        let typed = [
            (self.output_head.is_some(), "lm-head-q4 or q6"),
            (self.embedding.is_some(), "embedding-q4 or q6"),
            (self.gdn_state_fp16, "gdn-state-fp16"),
        ];
        match typed.iter().find(|(typed, _)| *typed && config.flash_next.is_some()) {
            Some((_, option)) => Err(UsageError::NotForFlashNext(option)),
            None => Ok(()),
        }
    }

    /// What becomes of the weights of `source` on loading.
    ///
    /// # Errors
    /// When the source does not say how its projections are stored.
    pub(crate) fn load_options(self, source: &dyn TextSource) -> Result<LoadOptions, SourceError> {
        // Qwen3.8-Flash-Next has its own option for the only activations that are narrowed there.
        let activations = self
            .activations
            .filter(|_| source.config().flash_next.is_none())
            .map(|permitted| Activations::permitted(source, permitted));
        Ok(LoadOptions {
            residency: Default::default(),
            output_head: self.output_head,
            embedding: self.embedding,
            activations: activations.transpose()?.unwrap_or_default(),
            maxima: None,
        })
    }

    /// Whether the delta rule's state is kept in half precision.
    pub(crate) fn delta_state_f16(self) -> bool {
        self.gdn_state_fp16
    }

    /// Fills in what the report says; `load` is what ran.
    pub(crate) fn record(self, settings: &mut Settings, load: &LoadOptions) {
        let inputs = load.activations.inputs();
        settings.a16_activations = self.a16_activations;
        settings.prefill_a8 = inputs.contains_key("int8");
        if let Some(permitted) = self.activations.filter(|_| inputs.contains_key("nvfp4")) {
            let rule = match permitted.rounding {
                Nvfp4Rounding::Engine => "engine",
                Nvfp4Rounding::ModelOpt => "modelopt",
            };
            settings.options.insert("a4-rounding".into(), rule.into());
        }
        settings.narrowed_activations = inputs
            .into_iter()
            .map(|(format, inputs)| (format.into(), inputs.into_iter().map(Into::into).collect()))
            .collect();
        settings.lm_head_format = self.output_head.map(|format| format.name().into());
        settings.embedding_format = self.embedding.map(|format| format.name().into());
        settings.gdn_state_fp16 = self.gdn_state_fp16;
        settings.mlp_a8_decode = self.mlp_a8_decode;
    }

    /// `16 bits`, or `fp8 at 10 inputs, nvfp4 at 6 inputs, 16 bits at the others`
    pub(crate) fn described(load: &LoadOptions) -> String {
        let inputs = load.activations.inputs();
        if inputs.is_empty() {
            return "16 bits".into();
        }
        let counts: Vec<String> = inputs
            .iter()
            .map(|(format, inputs)| format!("{format} at {} inputs", inputs.len()))
            .collect();
        format!("{}, 16 bits at the others", counts.join(", "))
    }

    /// What was typed without effect; `load` is what runs.
    pub(crate) fn notes(self, load: &LoadOptions) -> Vec<String> {
        let narrows = load.activations.inputs().contains_key("nvfp4");
        let unused = [
            (
                self.mlp_a8_decode,
                "--mlp-a8-decode has no effect: it concerns decoding, and scoring only prefills",
            ),
            (
                self.a4_rounding == A4Rounding::Modelopt && !narrows,
                "--a4-rounding has no effect: no input that it is about is narrowed to 4 bits in this run",
            ),
        ];
        let unused = unused.into_iter().filter(|(unused, _)| *unused);
        unused.map(|(_, note)| note.into()).collect()
    }
}
