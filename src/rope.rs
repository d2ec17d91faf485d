//! Rotary extensions of a run: what was typed, what the model is given, how far its windows may reach, what the report says.

use perplexity_eval::report::Settings;
use perplexity_model::config::TextConfig;
use perplexity_model::rope::RopeExtension;

use crate::args::RopeArgs;

/// Factors that the options take.
const YARN_FACTORS: [f64; 2] = [1.0, 4.0];
const LINEAR_FACTORS: [f64; 2] = [1.0, 32.0];

/// RoPE options that cannot be carried out as typed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RopeUsageError {
    #[error("{option} {value} is out of range: a number from {} to {}", .range[0], .range[1])]
    Factor {
        option: &'static str,
        value: f64,
        range: [f64; 2],
    },
    #[error("--rope-scaling-original-context 0 is out of range: at least 1")]
    NoOriginalContext,
    #[error("--context {context} is more than the model's {positions} positions{hint}")]
    BeyondPositions {
        context: usize,
        positions: usize,
        hint: String,
    },
}

/// The typed choice; which angles it gives depends on the model's native window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Rope {
    Native,
    /// YaRN at factor context / native window.
    YarnToContext,
    Yarn(f64),
    Linear {
        factor: f64,
        original_context: Option<usize>,
    },
}

impl Rope {
    /// Resolves what was typed.
    ///
    /// # Errors
    /// When a factor or the original context is out of range.
    pub(crate) fn resolve(args: &RopeArgs) -> Result<Self, RopeUsageError> {
        let factor = |option, value: f64, range: [f64; 2]| {
            // NaN is in no range.
            if (range[0]..=range[1]).contains(&value) {
                Ok(value)
            } else {
                Err(RopeUsageError::Factor { option, value, range })
            }
        };
        if args.rope_scaling_original_context == Some(0) {
            return Err(RopeUsageError::NoOriginalContext);
        }
        Ok(match (args.rope_yarn_factor, args.rope_scaling_factor) {
            (Some(value), _) => Self::Yarn(factor("--rope-yarn-factor", value, YARN_FACTORS)?),
            (None, Some(value)) => Self::Linear {
                factor: factor("--rope-scaling-factor", value, LINEAR_FACTORS)?,
                original_context: args.rope_scaling_original_context.map(|n| n as usize),
            },
            (None, None) if args.rope_yarn => Self::YarnToContext,
            (None, None) => Self::Native,
        })
    }

    /// The extension for windows of `context` tokens.
    ///
    /// # Errors
    /// When such a window goes beyond the positions that the extension gives the model.
    pub(crate) fn extension(self, config: &TextConfig, context: usize) -> Result<RopeExtension, RopeUsageError> {
        let native = config.max_position_embeddings;
        let extension = match self {
            // A factor of 1 is native RoPE, bit for bit.
            Self::Native | Self::Yarn(1.0) | Self::Linear { factor: 1.0, .. } => RopeExtension::None,
            Self::YarnToContext if context <= native => RopeExtension::None,
            Self::YarnToContext => RopeExtension::Yarn {
                factor: (context as f64 / native as f64).min(YARN_FACTORS[1]),
            },
            Self::Yarn(factor) => RopeExtension::Yarn { factor },
            Self::Linear {
                factor,
                original_context,
            } => RopeExtension::Linear {
                factor,
                original_context: original_context.unwrap_or(native),
            },
        };
        let positions = extension.positions(native);
        if context <= positions {
            return Ok(extension);
        }
        let hint = match extension {
            RopeExtension::None => "; --rope-yarn and --rope-scaling-factor reach further".into(),
            RopeExtension::Yarn { factor } => format!(" with YaRN at factor {factor}"),
            RopeExtension::Linear { .. } => " with linear interpolation".into(),
        };
        Err(RopeUsageError::BeyondPositions {
            context,
            positions,
            hint,
        })
    }

    /// What was typed without effect on windows of `context` tokens; `extension` is what runs.
    pub(crate) fn note(self, extension: RopeExtension, context: usize) -> Option<String> {
        let reason = match (self, extension) {
            (Self::Native, _) => return None,
            (Self::YarnToContext, RopeExtension::None) => "the windows fit into the native one",
            (_, RopeExtension::None) => "a factor of 1 is native RoPE",
            // The last token is a target only.
            (_, RopeExtension::Linear { original_context, .. }) if context - 1 <= original_context => {
                "no position of a window reaches the original context"
            }
            _ => return None,
        };
        let option = match self {
            Self::Native | Self::YarnToContext => "--rope-yarn",
            Self::Yarn(_) => "--rope-yarn-factor",
            Self::Linear { .. } => "--rope-scaling-factor",
        };
        Some(format!("{option} has no effect: {reason}"))
    }

    /// Fills in what the report says; `extension` is what ran.
    pub(crate) fn record(self, settings: &mut Settings, extension: RopeExtension) {
        settings.rope_yarn = self == Self::YarnToContext;
        if let RopeExtension::Yarn { factor } = extension {
            settings.rope_yarn_factor = factor;
        }
        if let Self::Linear {
            factor,
            original_context,
        } = self
        {
            settings.rope_scaling_factor = factor;
            settings.rope_scaling_original_context = original_context.unwrap_or(0) as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::Parser;

    fn rope(line: &str) -> Result<Rope, String> {
        let line = std::iter::once("burn-perplexity").chain(line.split_whitespace());
        let cli = Cli::try_parse_from(line).map_err(|error| error.to_string())?;
        Rope::resolve(&cli.score.rope).map_err(|error| error.to_string())
    }

    fn config(native: usize) -> TextConfig {
        TextConfig {
            max_position_embeddings: native,
            hidden_size: 1,
            vocab_size: 1,
            tie_word_embeddings: true,
            rms_norm_eps: 1e-6,
            layer_types: Vec::new(),
            attention: None,
            delta_net: None,
            feed_forward: perplexity_model::config::FeedForwardConfig::Dense { intermediate_size: 1 },
            flash_next: None,
        }
    }

    #[test]
    fn factors_out_of_range_are_refused() {
        for (line, words) in [
            (
                "--rope-yarn-factor 0.5",
                "--rope-yarn-factor 0.5 is out of range: a number from 1 to 4",
            ),
            ("--rope-yarn-factor 4.001", "from 1 to 4"),
            ("--rope-yarn-factor nan", "from 1 to 4"),
            ("--rope-yarn-factor inf", "from 1 to 4"),
            ("--rope-yarn-factor -1", "from 1 to 4"),
            ("--rope-yarn-factor x", "invalid value"),
            (
                "--rope-scaling-factor 33",
                "--rope-scaling-factor 33 is out of range: a number from 1 to 32",
            ),
            ("--rope-scaling-factor 0.99", "from 1 to 32"),
            (
                "--rope-scaling-factor 2 --rope-scaling-original-context 0",
                "at least 1",
            ),
            ("--rope-scaling-original-context 8", "--rope-scaling-factor <F>"),
            ("--rope-yarn --rope-yarn-factor 2", "cannot be used with"),
            ("--rope-yarn --rope-scaling-factor 2", "cannot be used with"),
            ("--rope-yarn-factor 2 --rope-scaling-factor 2", "cannot be used with"),
        ] {
            let message = rope(line).unwrap_err();
            assert!(message.contains(words), "{line}: {message}");
        }
    }

    #[test]
    fn ceilings_are_those_of_the_extension() {
        let reaches = |line: &str, native: usize, most: usize| {
            let rope = rope(line).unwrap();
            assert!(rope.extension(&config(native), most).is_ok(), "{line}");
            let message = rope.extension(&config(native), most + 1).unwrap_err().to_string();
            assert!(
                message.contains(&format!("the model's {most} positions")),
                "{line}: {message}"
            );
        };
        reaches("", 262_144, 262_144);
        reaches("--rope-yarn-factor 1", 262_144, 262_144);
        reaches("--rope-yarn-factor 1.5", 262_144, 393_216);
        reaches("--rope-yarn-factor 4", 262_144, 1_048_576);
        reaches("--rope-yarn-factor 4", 300_000, 1_048_576);
        reaches("--rope-yarn", 1_000, 4_000);
        reaches("--rope-scaling-factor 1", 1_000, 1_000);
        reaches("--rope-scaling-factor 2", 1_000, 4_000);
        reaches("--rope-scaling-factor 32", 262_144, 1_048_576);
    }

    #[test]
    fn the_report_says_what_ran() {
        let recorded = |line: &str, context: usize| {
            let rope = rope(line).unwrap();
            let mut settings = Settings::default();
            rope.record(&mut settings, rope.extension(&config(1_000), context).unwrap());
            (
                settings.rope_yarn,
                settings.rope_yarn_factor,
                settings.rope_scaling_factor,
                settings.rope_scaling_original_context,
            )
        };
        assert_eq!(recorded("", 1_000), (false, 1.0, 1.0, 0));
        assert_eq!(recorded("--rope-yarn-factor 2", 10), (false, 2.0, 1.0, 0));
        assert_eq!(recorded("--rope-yarn", 1_000), (true, 1.0, 1.0, 0));
        assert_eq!(recorded("--rope-yarn", 2_500), (true, 2.5, 1.0, 0));
        assert_eq!(recorded("--rope-scaling-factor 8", 10), (false, 1.0, 8.0, 0));
        let line = "--rope-scaling-factor 8 --rope-scaling-original-context 500";
        assert_eq!(recorded(line, 10), (false, 1.0, 8.0, 500));
    }
}
