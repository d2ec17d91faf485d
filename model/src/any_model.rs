//! Either text model, behind the few calls that scoring windows needs.

use burn::tensor::Tensor;
use perplexity_kernels::backend::{HeadRequest, HeadScores};
use perplexity_kernels::{EvaluatorBackend, Precision};

use crate::qwen3_5::{self, Qwen3_5};
use crate::qwen4_exp::{self, Qwen4Exp, Statistics};
use crate::scorer::{ModelError, ScorerOptions};
use crate::source::TextSource;

/// A loaded model.
pub(crate) enum AnyModel<B: EvaluatorBackend> {
    /// The Qwen3.5 family.
    Qwen3_5(Box<Qwen3_5<B>>),
    /// Qwen3.8-Flash-Next.
    Qwen4Exp(Box<Qwen4Exp<B>>),
}

/// A batch of windows on their way through it.
pub(crate) enum Windows<B: EvaluatorBackend> {
    Qwen3_5(qwen3_5::Windows<B>),
    Qwen4Exp(qwen4_exp::Windows<B>),
}

impl<B: EvaluatorBackend> Windows<B> {
    /// Tokens each window has passed so far.
    pub(crate) fn position(&self) -> usize {
        match self {
            Self::Qwen3_5(windows) => windows.position(),
            Self::Qwen4Exp(windows) => windows.position(),
        }
    }
}

impl<B: EvaluatorBackend> AnyModel<B> {
    /// Loads the model that the source's configuration describes.
    pub(crate) fn load(
        source: &dyn TextSource,
        options: &ScorerOptions,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let (config, route, kv) = (source.config(), options.route, options.kv.clone());
        if let Some(dims) = &config.flash_next {
            kv.iter().try_for_each(|kv| Qwen4Exp::<B>::check_kv(config, kv))?;
            let model =
                Qwen4Exp::load(source, dims, &options.flash_next, route, device)?.with_rope(config, options.rope);
            return Ok(Self::Qwen4Exp(Box::new(match kv {
                Some(kv) => model.with_kv(kv),
                None => model,
            })));
        }
        let model = Qwen3_5::load_with(source, route, &options.load, device)?
            .with_rope(config, options.rope)
            .with_delta_state(options.delta_state_f16);
        Ok(Self::Qwen3_5(Box::new(match kv {
            Some(kv) => model.with_kv(config, kv)?,
            None => model,
        })))
    }

    /// `batch` windows at position 0, each of at most `capacity` tokens.
    pub(crate) fn begin(&self, batch: usize, capacity: usize) -> Windows<B> {
        match self {
            Self::Qwen3_5(model) => Windows::Qwen3_5(model.begin(batch, capacity)),
            Self::Qwen4Exp(model) => Windows::Qwen4Exp(model.begin(batch, capacity)),
        }
    }

    /// One pass over the next tokens of every window; rows that [`Self::score`] takes.
    pub(crate) fn pass(&self, windows: &mut Windows<B>, ids: &[u32]) -> Result<Tensor<B, 3>, ModelError> {
        match (self, windows) {
            (Self::Qwen3_5(model), Windows::Qwen3_5(windows)) => Ok(model.pass(windows, ids, |_, _| {})),
            (Self::Qwen4Exp(model), Windows::Qwen4Exp(windows)) => model.pass(windows, ids, |_, _| {}),
            _ => unreachable!("windows are used with the model that began them"),
        }
    }

    /// Scores rows of what passes return.
    pub(crate) fn score(&self, rows: Tensor<B, 2>, ask: &HeadRequest<'_>) -> HeadScores {
        match self {
            Self::Qwen3_5(model) => model.score(rows, ask),
            Self::Qwen4Exp(model) => model.score(rows, ask),
        }
    }

    /// Final hidden states `[rows, hidden_size]` of rows of what passes return: what the output head reads.
    pub(crate) fn normalise(&self, rows: Tensor<B, 2>) -> Tensor<B, 2> {
        match self {
            Self::Qwen3_5(model) => model.normalise(rows),
            Self::Qwen4Exp(model) => model.mix(rows),
        }
    }

    /// Logits `[rows, vocab_size]` of final hidden states.
    pub(crate) fn apply_head(&self, hidden: Tensor<B, 2>, logits: Option<Precision>) -> Tensor<B, 2> {
        match self {
            Self::Qwen3_5(model) => model.apply_head(hidden, logits),
            Self::Qwen4Exp(model) => model.apply_head(hidden, logits),
        }
    }

    /// How often packed routed experts and rows of the n-gram table were ready.
    pub(crate) fn statistics(&self) -> Statistics {
        match self {
            Self::Qwen3_5(_) => Statistics::default(),
            Self::Qwen4Exp(model) => model.statistics(),
        }
    }
}
