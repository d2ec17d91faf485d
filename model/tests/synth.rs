//! Artifacts of random weights: formats and permissions of the official recipes, words that the reader accepts, scale.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use perplexity_model::artifact::Artifact;
use perplexity_model::convert::{ConvertError, Plan, Recipe};
use perplexity_model::parameters::parameters;
use perplexity_model::source::ActivationPolicy::{self, A16Only, AllowA4, AllowA8};
use perplexity_model::source::{self, TextSource};
use perplexity_model::synth::{Preset, SynthOptions, synth};
use perplexity_model::tokenizer::{AddedTokens, TextTokenizer, TokenizerError};

fn options(preset: &str, recipe: &str) -> SynthOptions {
    SynthOptions::new(
        Preset::named(preset).expect(preset),
        Recipe::named(recipe).expect(recipe),
    )
}

fn demo() -> Box<dyn TextSource> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/demo_hf");
    source::open(&path).expect("the demo")
}

/// Writes the artifact of `options` into `directory`.
fn write(directory: &Path, name: &str, options: &SynthOptions) -> PathBuf {
    let out = directory.join(name);
    let summary = synth(demo().as_ref(), &out, options, &mut |_| ()).expect("writes");
    assert_eq!(summary.files, std::slice::from_ref(&out));
    out
}

/// Format and permission of a parameter.
fn stored(plan: &Plan, name: &str) -> (String, Option<ActivationPolicy>) {
    let holds = |name: &str| {
        plan.parents
            .iter()
            .find(|parent| parent.members.iter().any(|member| member.name == name))
    };
    let format = holds(name).expect(name).encoding.format;
    (format.to_string(), plan.policies.get(name).copied())
}

/// What the published artifacts hold, one row per role: names of formats for six recipes of the 27B model.
#[test]
fn formats_and_permissions_are_those_of_the_official_recipes() {
    const RECIPES: [&str; 6] = [
        "qwen3_6_27b",
        "qwen3_8_27b",
        "qwen3_8_27b_q6",
        "qwen3_8_27b_nvfp4",
        "qwen3_8_27b_nvfp4_nvidia",
        "qwen3_8_27b_nvfp4_orcarouter",
    ];
    // `/4` and `/8` are AllowA4 and AllowA8, nothing is A16Only.
    let table = [
        ("token_embedding", ["q6", "q8", "q8", "fp8", "fp8", "fp8"]),
        ("output_head", ["q6", "q8", "q8", "fp8/8", "fp8/8", "fp8"]),
        (
            "layers/3/attention/query",
            ["q4", "q4", "q4", "fp8/8", "fp8/8", "fp8/8"],
        ),
        ("layers/3/attention/key", ["q4", "q4", "q4", "fp8/8", "fp8/8", "fp8/8"]),
        ("layers/3/attention/gate", ["q5", "q5", "q5", "fp8/8", "fp8/8", "fp8/8"]),
        (
            "layers/3/attention/value",
            ["q5", "q5", "q5", "fp8/8", "fp8/8", "fp8/8"],
        ),
        (
            "layers/3/attention/output",
            ["q5", "q5", "q5", "fp8/8", "fp8/8", "fp8/8"],
        ),
        ("layers/0/gdn/query", ["q4", "q4", "q4", "fp8/8", "fp8/8", "fp8/8"]),
        ("layers/0/gdn/z", ["q5", "q5", "q5", "fp8/8", "fp8/8", "fp8/8"]),
        ("layers/0/gdn/output", ["q5", "q5", "q5", "fp8/8", "fp8/8", "fp8/8"]),
        ("layers/0/gdn/a_projection", ["bf16"; 6]),
        ("layers/0/gdn/a_log", ["fp32"; 6]),
        (
            "layers/55/mlp/gate",
            ["q4", "q4", "q6", "nvfp4/4", "nvfp4/4", "nvfp4/4"],
        ),
        ("layers/56/mlp/gate", ["q4", "q4", "q6", "fp8/8", "nvfp4/4", "fp8/8"]),
        ("layers/56/mlp/down", ["q5", "q5", "q5", "fp8/8", "nvfp4/4", "fp8/8"]),
        ("final_norm", ["bf16"; 6]),
    ];
    for (column, recipe) in RECIPES.into_iter().enumerate() {
        let plan = options("qwen3.8-27b", recipe).plan().expect("plans");
        for (role, formats) in table {
            let (format, policy) = stored(&plan, &format!("text/{role}"));
            let short = [
                ("q4_g64_fp16", "q4"),
                ("q5_g64_fp16", "q5"),
                ("q6_g64_fp16", "q6"),
                ("q8_g32_fp16", "q8"),
                ("fp8_e4m3fn_row_bf16", "fp8"),
            ];
            let short: HashMap<_, _> = short.into_iter().collect();
            let format = short.get(format.as_str()).copied().unwrap_or(&format);
            let permission = match policy {
                Some(AllowA4) => "/4",
                Some(AllowA8) => "/8",
                Some(A16Only) | None => "",
            };
            assert_eq!(format!("{format}{permission}"), formats[column], "{recipe} {role}");
        }
    }
    // Sizes of the text objects of published artifacts; the last one counts as whole 256 bytes.
    for (preset, recipe, objects, bytes) in [
        ("qwen3.8-27b", "qwen3_8_27b", 771, 17_093_490_688u64),
        ("qwen3.8-27b", "qwen3_8_27b_nvfp4", 659, 20_375_621_632),
        ("qwen3.8-27b", "qwen3_6_27b_nvfp4", 707, 17_206_931_200),
        ("qwen3.6-35b-a3b", "qwen3_6_35b_a3b", 533, 21_038_469_632),
    ] {
        let plan = options(preset, recipe).plan().expect("plans");
        let end = plan.end_from(0).expect("fits").next_multiple_of(256);
        assert_eq!((plan.parents.len(), end), (objects, bytes), "{recipe}");
    }
}

/// Bytes of the published Qwen3.8-Flash-Next: banks of experts, token embedding, everything else.
#[test]
fn flash_next_has_the_published_sizes() {
    for (recipe, dense) in [
        ("qwen3_8_flash_next_nvfp4", 8_624_005_634u64),
        ("qwen3_8_flash_next_nvfp4_dense8", 5_120_655_874),
        ("qwen3_8_flash_next_nvfp4_orcarouter", 4_557_521_410),
    ] {
        let options = SynthOptions {
            ngram_base: Some(Preset::PUBLISHED_NGRAM_BASE),
            ..options("qwen3.8-flash-next", recipe)
        };
        let (plan, config) = (options.plan().expect("plans"), options.config());
        let bytes = |role: &str| -> u64 {
            let parents = plan.parents.iter().filter(|parent| parent.members[0].role == role);
            parents.map(|parent| parent.bytes).sum()
        };
        let (banks, embedding) = (bytes("moe/experts"), bytes("token_embedding"));
        assert_eq!((banks, embedding), (67_948_019_712, 1_271_398_400), "{recipe}");
        let all: u64 = plan.parents.iter().map(|parent| parent.bytes).sum();
        assert_eq!(all - banks - embedding, dense, "{recipe}");
        assert!(plan.activation_divisors.is_empty(), "{recipe}");
        let dims = config.flash_next.expect("a model of this kind");
        let geometry = dims.geometry(config.vocab_size);
        assert_eq!((geometry.rows, geometry.file_bytes()), (320_001_536, 52_429_058_048));
        // One table for every recipe and number of layers.
        let fewer = SynthOptions {
            layers: Some(8),
            ..options
        };
        assert_eq!(
            fewer.config().flash_next.and_then(|dims| dims.volume_id),
            dims.volume_id
        );
    }
}

#[test]
fn every_recipe_gives_words_that_the_reader_accepts_at_the_scale_of_trained_weights() {
    let directory = tempfile::tempdir().expect("a directory");
    for recipe in Recipe::NAMES {
        let options = SynthOptions {
            layers: Some(4),
            ..options("demo", recipe)
        };
        let out = write(directory.path(), recipe, &options);
        let artifact = Artifact::open(&out).expect("opens");
        for index in 0..artifact.objects().len() {
            artifact.validate_object(index).expect(recipe);
        }
        let source = source::open(&out).expect("opens");
        assert_eq!(source.config(), &options.config(), "{recipe}");
        for parameter in parameters(source.config()) {
            let values = source.load(&parameter.name, &parameter.shape).expect(&parameter.name);
            let count = values.len() as f64;
            let mean = values.iter().map(|value| f64::from(*value)).sum::<f64>() / count;
            let square = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>() / count;
            let (low, high) = values.iter().fold((f32::MAX, f32::MIN), |(low, high), value| {
                (low.min(*value), high.max(*value))
            });
            let name = &parameter.name;
            match parameter.role {
                "gdn/a_log" => assert!(0.0 <= low && high <= 2.77, "{name}: {low} {high}"),
                "gdn/dt_bias" => assert!(-6.9 <= low && high <= -2.3, "{name}: {low} {high}"),
                "gdn/convolution" => assert!((square.sqrt() - 0.289).abs() < 0.03 && high <= 0.5, "{name}"),
                "gdn/norm" => assert_eq!((low, high), (1.0, 1.0), "{name}"),
                role if role.ends_with("norm") => assert_eq!((low, high), (0.0, 0.0), "{name}"),
                _ => {
                    // Five standard errors of a deviation from `count` values, and 4 % for the coarsest format.
                    let tolerance = 0.02 * (0.04 + 5.0 / (2.0 * count).sqrt());
                    assert!(
                        (square.sqrt() - 0.02).abs() < tolerance,
                        "{recipe} {name}: {}",
                        square.sqrt()
                    );
                    assert!(mean.abs() < 5.0 * 0.02 / count.sqrt(), "{recipe} {name}: {mean}");
                    // Nothing cut off: 64 Gaussian values reach 2 deviations nearly always.
                    assert!(
                        high > 0.04 && low < -0.04 && high < 0.13,
                        "{recipe} {name}: {low} {high}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_seed_decides_the_bytes() {
    let directory = tempfile::tempdir().expect("a directory");
    let bytes = |name: &str, seed| {
        let options = SynthOptions {
            layers: Some(1),
            seed,
            ..options("demo", "nvfp4")
        };
        fs::read(write(directory.path(), name, &options)).expect("reads")
    };
    let first = bytes("a", 1);
    assert_eq!(first, bytes("b", 1));
    assert_ne!(first, bytes("c", 2));
    // Neighbouring rows and matrices of the same shape differ.
    let source = source::open(&directory.path().join("a")).expect("opens");
    let load = |name: &str| source.load(name, &[512, 256]).expect(name);
    let (gate, up) = (load("text/layers/0/mlp/gate"), load("text/layers/0/mlp/up"));
    assert_ne!(gate, up);
    assert_ne!(gate[..256], gate[256..512]);
}

#[test]
fn the_tokenizer_is_padded_to_the_published_ids_and_splits_text_as_before() {
    let directory = tempfile::tempdir().expect("a directory");
    // One narrow matrix format keeps this small: the embedding alone has 248,320 rows.
    let options = SynthOptions {
        layers: Some(1),
        ..options("qwen3.5-0.8b", "nvfp4")
    };
    let out = write(directory.path(), "wide.ninfer", &options);
    let source = source::open(&out).expect("opens");
    let padded = TextTokenizer::from_source(source.as_ref(), AddedTokens::Match).expect("builds");
    assert_eq!((padded.public_tokens(), source.config().vocab_size), (248_077, 248_320));
    let original = TextTokenizer::from_source(demo().as_ref(), AddedTokens::Match).expect("builds");
    let text = "A line of <|im_start|> text,\nand <|unused_9000|> spelled out.";
    // The three added tokens stay the last ones.
    let moved: Vec<u32> = original
        .encode(text)
        .expect("encodes")
        .into_iter()
        .map(|id| if id < 8192 { id } else { id + 248_077 - 8195 })
        .collect();
    assert!(moved.contains(&248_075), "{moved:?}");
    assert_eq!(padded.encode(text).expect("encodes"), moved);
    // The head is the embedding, stored once, as in the published model of this size.
    let object = |name: &str| source.stored(name).expect(name).parts[0].object.clone();
    assert_eq!(object("text/output_head"), object("text/token_embedding"));
}

#[test]
fn a_tokenizer_with_too_many_ids_and_an_existing_file_are_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let wide = SynthOptions {
        layers: Some(1),
        ..options("qwen3.5-0.8b", "nvfp4")
    };
    let wide = source::open(&write(directory.path(), "wide", &wide)).expect("opens");
    let small = options("demo", "bf16");
    let out = directory.path().join("small");
    let error = synth(wide.as_ref(), &out, &small, &mut |_| ()).expect_err("too many");
    assert!(
        matches!(
            error,
            ConvertError::Tokenizer(TokenizerError::MoreTokensThanRows {
                tokens: 248_077,
                rows: 8195
            })
        ),
        "{error}"
    );
    fs::write(&out, "mine").expect("writes");
    let error = synth(demo().as_ref(), &out, &small, &mut |_| ()).expect_err("exists");
    assert!(error.to_string().contains("small"), "{error}");
    assert_eq!(fs::read(&out).expect("reads"), b"mine");
}
