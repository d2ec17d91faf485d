//! The KV cache of a run: what was typed, what the model is given, what the report says.
//!
//! Route normal and those with its boundaries store bf16 keys and FP16 values without a codec, which is `--kv-dtype bf16`;
//! route lossless stores bf16 for both and takes no codec; route exact stores float32 unless a codec is named, and then the
//! codec's loss is the only one of the run.

use perplexity_eval::humanize::{bytes, count};
use perplexity_eval::output::sanitised;
use perplexity_eval::report::Settings;
use perplexity_kv::attention::{EightBitPv, Emulation, KernelOptionError, KernelOptions};
use perplexity_kv::options::{KvOptions, KvOptionsError};
use perplexity_kv::registry::{KvDtype, KvError, variants};
use perplexity_model::config::TextConfig;
use perplexity_model::route::Route;

use crate::args::{EmulationLevel, KvArgs, Switch};

/// The format of route normal, which needs no codec.
const PLAIN: &str = "bf16";
/// Recorded name of unrounded rows.
const UNROUNDED: &str = "fp32";

/// Where the scales of every format come from: a checkpoint's own are never used.
const SCALES_SOURCE: &str = "computed from the stored rows";

/// KV options that cannot be carried out as typed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KvUsageError {
    #[error("--kv-dtype: {0}")]
    Dtype(#[from] KvError),
    #[error(transparent)]
    Kernel(#[from] KernelOptionError),
    #[error("{option} needs --kv-dtype: route exact keeps keys and values in float32 unless a codec is named")]
    NoCodec { option: &'static str },
    #[error(
        "--lossless keeps keys and values in bf16: {option} would add a loss to what is meant to have none; --reference \
         applies a codec exactly"
    )]
    Lossless { option: String },
    #[error("--reference reads a codec's rows by its definition: {option} imitates roundings of a kernel")]
    ReferenceKernel { option: &'static str },
    #[error("--reproducible excludes {option}: what a kernel rounds depends on the pass it sees a query in")]
    ReproducibleKernel { option: &'static str },
    #[error("{option} imitates kernels of dense attention: Qwen3.8-Flash-Next has sparse attention")]
    DenseKernels { option: &'static str },
    #[error("{option} belongs to --kv-emulation kernel, not to format")]
    NotKernel { option: &'static str },
    #[error("--kv-window needs a codec with an optional exact window ({windowed}); --kv-dtype {dtype} has none")]
    NoWindow { dtype: String, windowed: String },
}

impl From<KvOptionsError> for KvUsageError {
    fn from(error: KvOptionsError) -> Self {
        match error {
            KvOptionsError::Codec(error) => Self::Dtype(error),
            KvOptionsError::Kernel(error) => Self::Kernel(error),
        }
    }
}

/// How a run stores keys and values.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct KvCache {
    route: Route,
    /// `None` keeps the rows as the route rounds them.
    codec: Option<KvOptions>,
}

impl KvCache {
    /// Resolves what was typed.
    ///
    /// # Errors
    /// When a codec is not known, or options do not fit each other.
    pub(crate) fn resolve(args: &KvArgs, route: Route) -> Result<Self, KvUsageError> {
        let (kernel, kernel_option) = kernel_options(args);
        let emulation = match (args.kv_emulation, kernel_option) {
            (Some(EmulationLevel::Format), Some(option)) => return Err(KvUsageError::NotKernel { option }),
            (Some(EmulationLevel::Kernel), _) | (None, Some(_)) => Emulation::Kernel(kernel),
            _ => Emulation::Format,
        };
        let kernel_given = match emulation {
            Emulation::Kernel(_) => Some(kernel_option.unwrap_or("--kv-emulation kernel")),
            Emulation::Format => None,
        };
        let given = kernel_given.or(args.kv_window.map(|_| "--kv-window"));
        match (route, kernel_given) {
            (Route::Lossless, _) => {
                let dtype = args.kv_dtype.as_ref().filter(|dtype| *dtype != PLAIN);
                let option = dtype.map(|dtype| format!("--kv-dtype {dtype}"));
                return match option.or(given.map(Into::into)) {
                    Some(option) => Err(KvUsageError::Lossless { option }),
                    None => Ok(Self { route, codec: None }),
                };
            }
            (Route::Reference, Some(option)) => return Err(KvUsageError::ReferenceKernel { option }),
            (Route::Reproducible, Some(option)) => return Err(KvUsageError::ReproducibleKernel { option }),
            _ => {}
        }
        if route == Route::Exact && args.kv_dtype.is_none() {
            return match given {
                Some(option) => Err(KvUsageError::NoCodec { option }),
                None => Ok(Self { route, codec: None }),
            };
        }
        let options = KvOptions {
            window: args.kv_window != Some(Switch::Off),
            emulation,
            ..KvOptions::new(args.kv_dtype.as_deref().unwrap_or(PLAIN).parse()?)
        };
        if let Emulation::Kernel(kernel) = emulation {
            kernel.check(&options.dtype)?;
        }
        if args.kv_window.is_some() && !options.has_window() {
            return Err(KvUsageError::NoWindow {
                dtype: options.dtype.to_string(),
                windowed: base_names(|dtype| KvOptions::new(dtype).has_window()),
            });
        }
        let plain = route != Route::Exact && options == KvOptions::new(PLAIN.parse()?);
        let codec = (!plain).then_some(options);
        Ok(Self { route, codec })
    }

    /// Checks the codecs against the model's attention layers.
    ///
    /// # Errors
    /// When a codec cannot store the model's rows, the layer table names a layer without a cache, or kernels are to be
    /// imitated that the model does not have.
    pub(crate) fn check(&self, config: &TextConfig) -> Result<(), KvUsageError> {
        let head_dim = config.attention.as_ref().map_or(0, |attention| attention.head_dim);
        match &self.codec {
            Some(options) if options.emulation != Emulation::Format && config.flash_next.is_some() => {
                Err(KvUsageError::DenseKernels {
                    option: "--kv-emulation kernel",
                })
            }
            Some(options) => Ok(options.check(&config.attention_layers(), head_dim)?),
            None => Ok(()),
        }
    }

    /// What the model is given.
    pub(crate) fn codec(&self) -> Option<&KvOptions> {
        self.codec.as_ref()
    }

    /// Whether an engine would run this cache in whole waves of its fast prompt attention.
    pub(crate) fn prefills_in_waves(&self) -> bool {
        let Some(KvOptions { dtype, emulation, .. }) = &self.codec else {
            return false;
        };
        let original = matches!(emulation, Emulation::Kernel(kernel) if kernel.original_int8);
        std::iter::once(&dtype.default)
            .chain(dtype.layers.values())
            .any(|pair| match pair.name.split('@').next() {
                Some("int8") => !original,
                Some("nvfp4" | "fp8" | "k8v4") => true,
                _ => false,
            })
    }

    /// Name written to reports.
    pub(crate) fn recorded(&self) -> String {
        match &self.codec {
            Some(options) => options.dtype.recorded(),
            None => self.uncoded().into(),
        }
    }

    /// The format as asked for, variants spelled out.
    pub(crate) fn requested(&self) -> String {
        match &self.codec {
            Some(options) => options.dtype.to_string(),
            None => self.uncoded().into(),
        }
    }

    /// The recorded name with whatever else changes the stored rows or how they are read; for files and the log.
    pub(crate) fn described(&self) -> String {
        let mut text = self.recorded();
        if self.window() == Some(false) {
            text.push_str(", window off");
        }
        if self.emulation() == Some("kernel") {
            text.push_str(", kernel emulation");
        }
        text
    }

    /// A path component. A layer table may be longer than a file name can be, so it is only hinted at.
    pub(crate) fn directory_name(&self) -> String {
        match &self.codec {
            Some(options) if !options.dtype.layers.is_empty() => {
                sanitised(&format!("{}-and-others", options.dtype.default.recorded))
            }
            _ => sanitised(&self.recorded()),
        }
    }

    /// Stored bytes per token over all attention layers, exact copies not counted.
    pub(crate) fn bytes_per_token(&self, config: &TextConfig) -> f64 {
        let Some(attention) = &config.attention else { return 0.0 };
        let layers = config.attention_layers();
        match &self.codec {
            Some(options) => options
                .dtype
                .bytes_per_token(&layers, attention.num_kv_heads, attention.head_dim),
            None => {
                let element = match self.route {
                    Route::Exact => 4,
                    _ => 2,
                };
                (layers.len() * 2 * attention.num_kv_heads * attention.head_dim * element) as f64
            }
        }
    }

    /// Fills in what the report says of the cache, for windows that feed at most `tokens`.
    pub(crate) fn record(&self, settings: &mut Settings, config: &TextConfig, tokens: usize) {
        settings.kv_dtype = self.recorded();
        settings.kv_dtype_requested = self.requested();
        settings.kv_bytes_per_token = Some(self.bytes_per_token(config));
        settings.kv_bytes_total = Some(self.bytes_per_token(config) * tokens as f64);
        settings.kv_scales_source = self.has_scales(config).then(|| SCALES_SOURCE.into());
        settings.kv_window = self.window();
        settings.kv_emulation = self.emulation().map(Into::into);
        if let Some(Emulation::Kernel(kernel)) = self.codec.as_ref().map(|options| options.emulation) {
            settings.original_int8_prefill_kernel = kernel.original_int8;
            settings.original_nvfp4_prefill_kernel = kernel.original_nvfp4;
            settings.fast_prefill_kernel = kernel.fast_prefill;
            let form = match kernel.eight_bit_pv {
                EightBitPv::Auto => "auto",
                EightBitPv::On => "on",
                EightBitPv::Off => "off",
            };
            settings.prefill_8bit_pv = Some(form.into());
        }
    }

    /// Whether any layer stores scales beside its codes.
    fn has_scales(&self, config: &TextConfig) -> bool {
        let (Some(options), Some(attention)) = (&self.codec, &config.attention) else {
            return false;
        };
        config
            .attention_layers()
            .iter()
            .any(|layer| options.dtype.layer(*layer).has_scales(attention.head_dim))
    }

    /// `kv cache | int8-g64 | 1,056 B per token | 1.0 MiB in the longest window of 1,023 tokens`
    pub(crate) fn line(&self, config: &TextConfig, tokens: usize) -> String {
        let per_token = self.bytes_per_token(config);
        let shown = if per_token.fract() == 0.0 {
            count(per_token as u64)
        } else {
            format!("{per_token:.2}")
        };
        let total = bytes((per_token * tokens as f64) as u64);
        let tokens = count(tokens as u64);
        let described = self.described();
        format!("kv cache | {described} | {shown} B per token | {total} in the longest window of {tokens} tokens")
    }

    fn uncoded(&self) -> &'static str {
        match self.route {
            Route::Exact => UNROUNDED,
            _ => PLAIN,
        }
    }

    fn window(&self) -> Option<bool> {
        let options = self.codec.as_ref().filter(|options| options.has_window())?;
        Some(options.window)
    }

    fn emulation(&self) -> Option<&'static str> {
        self.codec.as_ref().map(|options| match options.emulation {
            Emulation::Format => "format",
            Emulation::Kernel(_) => "kernel",
        })
    }
}

/// Help text of `--kv-dtype`.
pub(crate) fn dtype_help() -> String {
    format!(
        "Representation of stored keys and values: CODEC, k=CODEC,v=CODEC, or with exceptions by layer \
         'CODEC;3,7-11=CODEC'; codecs are {} and their variants NAME@VARIANT [default: bf16; --route exact: float32]",
        base_names(|_| true)
    )
}

/// Names without variants of the pairs that `wanted` picks, in the order of the registry.
fn base_names(wanted: impl Fn(KvDtype) -> bool) -> String {
    let pairs = variants().filter(|variant| wanted(perplexity_kv::registry::KvPair::from(*variant).into()));
    let mut names: Vec<&str> = pairs.filter_map(|variant| variant.name.split('@').next()).collect();
    names.dedup();
    names.join(", ")
}

/// The kernel options, and the first that was typed.
fn kernel_options(args: &KvArgs) -> (KernelOptions, Option<&'static str>) {
    let typed = [
        (
            args.use_original_int8_prefill_kernel,
            "--use-original-int8-prefill-kernel",
        ),
        (
            args.use_original_nvfp4_prefill_kernel,
            "--use-original-nvfp4-prefill-kernel",
        ),
        (args.fast_prefill_kernel, "--fast-prefill-kernel"),
        (args.prefill_8bit_pv, "--prefill-8bit-pv"),
        (args.no_prefill_8bit_pv, "--no-prefill-8bit-pv"),
    ];
    let options = KernelOptions {
        original_int8: args.use_original_int8_prefill_kernel,
        original_nvfp4: args.use_original_nvfp4_prefill_kernel,
        fast_prefill: args.fast_prefill_kernel,
        eight_bit_pv: match (args.prefill_8bit_pv, args.no_prefill_8bit_pv) {
            (true, _) => EightBitPv::On,
            (false, true) => EightBitPv::Off,
            (false, false) => EightBitPv::Auto,
        },
    };
    (
        options,
        typed.iter().find(|(given, _)| *given).map(|(_, option)| *option),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::Parser;

    fn cache(line: &str) -> Result<KvCache, String> {
        let cli = Cli::try_parse_from(std::iter::once("burn-perplexity").chain(line.split_whitespace())).unwrap();
        let route = if line.contains("--route exact") {
            Route::Exact
        } else {
            Route::Normal
        };
        KvCache::resolve(&cli.score.kv, route).map_err(|error| error.to_string())
    }

    fn kernel(line: &str) -> KernelOptions {
        match cache(line).unwrap().codec.unwrap().emulation {
            Emulation::Kernel(options) => options,
            Emulation::Format => panic!("{line} is at the format level"),
        }
    }

    #[test]
    fn bf16_is_no_codec_in_route_normal_and_one_in_route_exact() {
        let plain = cache("").unwrap();
        assert_eq!((plain.codec(), plain.recorded().as_str()), (None, "bf16"));
        assert_eq!(cache("--kv-dtype bf16").unwrap(), plain);
        assert_eq!(cache("--route exact").unwrap().recorded(), "fp32");
        assert!(cache("--route exact --kv-dtype bf16").unwrap().codec().is_some());
    }

    #[test]
    fn names_are_recorded_as_reports_spell_them() {
        let names = |line: &str| {
            let cache = cache(line).unwrap();
            (cache.requested(), cache.recorded(), cache.directory_name())
        };
        let own = |a: &str, b: &str, c: &str| (a.to_owned(), b.to_owned(), c.to_owned());
        assert_eq!(names("--kv-dtype int8"), own("int8", "int8-g64", "int8-g64"));
        assert_eq!(
            names("--kv-dtype k=fp8,v=nvfp4"),
            own("k=fp8,v=nvfp4", "k=fp8-e4m3-r256,v=nvfp4", "k-fp8-e4m3-r256-v-nvfp4")
        );
        assert_eq!(
            names("--kv-dtype bf16;3,7=int8"),
            own("bf16;3=int8;7=int8", "bf16;3=int8-g64;7=int8-g64", "bf16-and-others")
        );
    }

    #[test]
    fn an_engines_kernel_options_select_the_kernel_level() {
        assert_eq!(kernel("--kv-emulation kernel"), KernelOptions::default());
        assert!(kernel("--kv-dtype int8 --use-original-int8-prefill-kernel").original_int8);
        assert!(kernel("--kv-dtype nvfp4 --use-original-nvfp4-prefill-kernel").original_nvfp4);
        assert!(kernel("--kv-dtype rk4v4 --fast-prefill-kernel").fast_prefill);
        let form = |line: &str| kernel(&format!("--kv-dtype k8v4 {line}")).eight_bit_pv;
        assert_eq!(form("--kv-emulation kernel"), EightBitPv::Auto);
        assert_eq!(form("--prefill-8bit-pv"), EightBitPv::On);
        assert_eq!(form("--prefill-8bit-pv --no-prefill-8bit-pv"), EightBitPv::Off);
        assert_eq!(form("--no-prefill-8bit-pv --prefill-8bit-pv"), EightBitPv::On);
    }

    #[test]
    fn options_that_would_do_nothing_are_refused() {
        for (line, words) in [
            ("--kv-dtype int7", "unknown KV codec `int7`; accepted: bf16, "),
            ("--kv-dtype k=int8", "expected a name or k=NAME,v=NAME"),
            ("--kv-dtype bf16;x=int8", "expected LAYERS=CODEC"),
            ("--kv-window off", "--kv-dtype bf16 has none"),
            (
                "--kv-dtype int8 --kv-window on",
                "optional exact window (vq2, k4v2, kivi4, kivi2)",
            ),
            (
                "--fast-prefill-kernel",
                "--fast-prefill-kernel needs a KV cache of int8 or rk*, got `bf16`",
            ),
            (
                "--kv-dtype k8v4 --kv-emulation format --prefill-8bit-pv",
                "--prefill-8bit-pv belongs to --kv-emulation kernel",
            ),
            ("--route exact --kv-window off", "--kv-window needs --kv-dtype"),
            (
                "--route exact --kv-emulation kernel",
                "--kv-emulation kernel needs --kv-dtype",
            ),
        ] {
            let message = cache(line).unwrap_err();
            assert!(message.contains(words), "{line}: {message}");
        }
    }
}
