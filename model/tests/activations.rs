//! Narrowed activations: which projections get them, what a product then is, and divisors from a text.
#![cfg(feature = "flex")]

mod forward_common;

use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::{Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use forward_common::{Generated, checkpoint, data, json};
use perplexity_kernels::backend::ActivationFormat;
use perplexity_kernels::{EvaluatorBackend, Precision};
use perplexity_model::activations::{Activations, Nvfp4Rounding, Permitted};
use perplexity_model::backends::flex;
use perplexity_model::bindings::ArtifactSource;
use perplexity_model::config::{AttentionConfig, DeltaNetConfig, FeedForwardConfig, LayerType, TextConfig};
use perplexity_model::convert::{ConvertOptions, Recipe, convert};
use perplexity_model::layers::linear::{Input, Linear};
use perplexity_model::layers::loader::LoadOptions;
use perplexity_model::scorer::{Ask, ScorerOptions, Window};
use perplexity_model::source::{ActivationPolicy, SourceError, StoredParameter, StoredPart, TextSource};

const ENGINE: Permitted = Permitted {
    integer: true,
    rounding: Nvfp4Rounding::Engine,
};

fn inputs(source: &dyn TextSource, permitted: Permitted) -> BTreeMap<&'static str, Vec<String>> {
    let activations = Activations::permitted(source, permitted).unwrap();
    let owned = |inputs: BTreeSet<&str>| {
        inputs
            .into_iter()
            .map(|input| input.replace("text/layers/", ""))
            .collect()
    };
    activations
        .inputs()
        .into_iter()
        .map(|(format, inputs)| (format, owned(inputs)))
        .collect()
}

fn divisor(activations: &Activations, name: &str) -> Option<f32> {
    match activations.of(&format!("text/layers/{name}")) {
        Some(ActivationFormat::Nvfp4 { divisor, .. }) => Some(divisor),
        _ => None,
    }
}

#[test]
fn checkpoints_narrow_where_they_were_quantised_to() {
    let mixed = checkpoint("quantised/nvfp4_compressed");
    let found = inputs(&mixed, ENGINE);
    // Layers 0 to 2 have an NVFP4 feed-forward, everything else is FP8.
    let mut nvfp4 = Vec::new();
    let mut fp8 = vec![
        "3/attention/gated_output".to_owned(),
        "3/ffn_input".into(),
        "3/mixer_input".into(),
    ];
    fp8.push("3/mlp/product".into());
    for layer in 0..3 {
        nvfp4.extend([format!("{layer}/ffn_input"), format!("{layer}/mlp/product")]);
        fp8.extend([format!("{layer}/gdn/gated_output"), format!("{layer}/mixer_input")]);
    }
    fp8.sort();
    assert_eq!(found, BTreeMap::from([("fp8", fp8), ("nvfp4", nvfp4)]));
    // The divisors are the input scales as the script that wrote the checkpoint states them.
    let activations = Activations::permitted(&mixed, ENGINE).unwrap();
    for (name, wanted) in json("quantised/nvfp4_compressed/golden.json").as_object().unwrap() {
        let name = name.trim_start_matches("text/layers/");
        let wanted = wanted["activation_divisor"].as_f64().map(|divisor| divisor as f32);
        assert_eq!(divisor(&activations, name), wanted, "{name}");
    }
    // The output head is FP8 there and keeps 16 bits, as do the control projections.
    assert_eq!(activations.of("text/output_head"), None);
    assert_eq!(activations.of("text/layers/0/gdn/a_projection"), None);

    let model_opt = inputs(&checkpoint("quantised/nvfp4_modelopt"), ENGINE);
    assert_eq!(
        (model_opt["fp8"].len(), model_opt["nvfp4"].len()),
        (1, 15),
        "{model_opt:?}"
    );
    assert_eq!(model_opt["fp8"], ["3/attention/gated_output"]);
    for name in ["fp8_row", "fp8_block"] {
        let found = inputs(&checkpoint(&format!("quantised/{name}")), ENGINE);
        assert_eq!((found.len(), found["fp8"].len()), (1, 16), "{name}");
    }
    assert!(inputs(&checkpoint("demo_hf"), ENGINE).is_empty());
}

#[test]
fn imported_artifacts_narrow_as_their_source() {
    let directory = tempfile::tempdir().unwrap();
    for (name, recipe) in [
        ("nvfp4_compressed", "qwen3_8_27b_nvfp4"),
        ("nvfp4_compressed", "qwen3_8_27b_nvfp4_orcarouter"),
        ("nvfp4_modelopt", "qwen3_8_27b_nvfp4_nvidia"),
        ("nvfp4_modelopt", "qwen3_6_27b_nvfp4"),
    ] {
        let out = directory.path().join(format!("{recipe}.ninfer"));
        let from = data("quantised").join(name);
        convert(
            &from,
            &out,
            &ConvertOptions::new(Recipe::named(recipe).unwrap()),
            &mut |_| (),
        )
        .unwrap();
        let original = Activations::permitted(&checkpoint(&format!("quantised/{name}")), ENGINE).unwrap();
        let artifact = ArtifactSource::open(&out).unwrap();
        let imported = Activations::permitted(&artifact, ENGINE).unwrap();
        let mut kept = 0;
        for (parameter, _) in json(&format!("quantised/{name}/golden.json")).as_object().unwrap() {
            if let Some(format) = imported.of(parameter) {
                assert_eq!(original.of(parameter), Some(format), "{recipe}: {parameter}");
                kept += 1;
            }
        }
        let wanted = match recipe {
            // Eight projections in three layers and five in the last, whose FP8 feed-forward the recipe wants in NVFP4.
            "qwen3_8_27b_nvfp4" | "qwen3_8_27b_nvfp4_orcarouter" => 3 * 8 + 5,
            // Every feed-forward, and the FP8 output projection of the attention.
            "qwen3_8_27b_nvfp4_nvidia" => 4 * 3 + 1,
            // Everything but the attention, which is bf16 below layer 24.
            _ => 3 * 8 + 3,
        };
        assert_eq!(kept, wanted, "{recipe}");
    }
}

/// Generated weights that claim to be stored in given formats.
struct Claimed {
    weights: Generated,
    /// Format, permission and divisor by the end of the name.
    claims: Vec<(&'static str, &'static str, ActivationPolicy, Option<f32>)>,
}

impl TextSource for Claimed {
    fn config(&self) -> &TextConfig {
        self.weights.config()
    }

    fn name(&self) -> &str {
        "claimed"
    }

    fn load(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>, SourceError> {
        self.weights.load(name, expected)
    }

    fn resource(&self, _: &str) -> Result<Option<Vec<u8>>, SourceError> {
        Ok(None)
    }

    fn stored(&self, name: &str) -> Result<StoredParameter, SourceError> {
        let claim = self.claims.iter().find(|(end, ..)| name.ends_with(end));
        let (_, format, policy, divisor) = *claim.unwrap_or(&("", "bf16", ActivationPolicy::A16Only, None));
        let part = StoredPart {
            object: name.into(),
            object_shape: vec![1],
            format,
            layout: "",
            range: None,
            bytes: 0,
        };
        Ok(StoredParameter {
            elements: 1,
            parts: vec![part],
            policy: Some(policy),
            activation_divisor: divisor,
        })
    }
}

fn claimed(claims: &[(&'static str, &'static str, ActivationPolicy, Option<f32>)]) -> Claimed {
    Claimed {
        weights: Generated::new(TextConfig {
            hidden_size: 64,
            vocab_size: 64,
            max_position_embeddings: 4096,
            tie_word_embeddings: false,
            rms_norm_eps: 1e-6,
            layer_types: vec![LayerType::LinearAttention, LayerType::FullAttention],
            attention: Some(AttentionConfig {
                num_heads: 4,
                num_kv_heads: 2,
                head_dim: 16,
                rope_theta: 1e4,
                partial_rotary_factor: 0.25,
                mrope_section: [1, 1, 0],
            }),
            delta_net: Some(DeltaNetConfig {
                num_key_heads: 2,
                key_head_dim: 16,
                num_value_heads: 4,
                value_head_dim: 16,
                conv_kernel_dim: 4,
            }),
            feed_forward: FeedForwardConfig::Dense { intermediate_size: 48 },
            flash_next: None,
        }),
        claims: claims.to_vec(),
    }
}

#[test]
fn weights_of_one_input_are_limited_by_the_least_permission() {
    use ActivationPolicy::{A16Only, AllowA4, AllowA8};
    let found = |claims: &[_]| inputs(&claimed(claims), ENGINE);
    let gate_up = |gate, up| {
        found(&[
            ("mlp/gate", "nvfp4", gate, Some(9.0)),
            ("mlp/up", "nvfp4", up, Some(9.0)),
        ])
    };
    assert_eq!(gate_up(AllowA4, AllowA4)["nvfp4"], ["0/ffn_input", "1/ffn_input"]);
    assert!(gate_up(AllowA4, AllowA8).is_empty() && gate_up(A16Only, AllowA4).is_empty());
    // FP8 and grouped integers need eight bits; NVFP4 beside them is limited by what they permit.
    let mixed = [
        ("mlp/gate", "nvfp4", AllowA4, Some(9.0)),
        ("mlp/up", "fp8_e4m3fn_row_bf16", AllowA8, None),
    ];
    assert_eq!(
        found(&mixed),
        BTreeMap::from([("fp8", vec!["0/ffn_input".into(), "1/ffn_input".to_owned()])])
    );
    let grouped = [("mlp/down", "q5_g64_fp16", AllowA8, None)];
    assert_eq!(found(&grouped)["int8"], ["0/mlp/product", "1/mlp/product"]);
    let no_integer = Permitted {
        integer: false,
        ..ENGINE
    };
    assert!(inputs(&claimed(&grouped), no_integer).is_empty());
    assert!(found(&[("mlp/down", "bf16", AllowA4, Some(1.0))]).is_empty());
    assert!(found(&[("output_head", "fp8_e4m3fn_row_bf16", AllowA8, None)]).is_empty());
}

fn logprobs(source: &dyn TextSource, load: LoadOptions, prefill_chunk: usize, tokens: usize) -> Vec<f32> {
    let options = ScorerOptions {
        load,
        prefill_chunk,
        ..ScorerOptions::new(61)
    };
    let window = Window {
        tokens: (0..tokens as u32).map(|i| (i * i * 7 + i * 13 + 5) % 61).collect(),
        first_target: 1,
    };
    let mut scorer = flex::load(source, &options).unwrap();
    scorer.score(&[window], &Ask::default()).unwrap().remove(0).logprobs
}

fn narrowed(source: &dyn TextSource) -> LoadOptions {
    LoadOptions {
        activations: Activations::permitted(source, ENGINE).unwrap(),
        ..LoadOptions::default()
    }
}

#[test]
fn rows_of_a_stack_may_see_their_input_differently() {
    let four = |name, divisor| (name, "nvfp4", ActivationPolicy::AllowA4, Some(divisor));
    let alike = claimed(&[
        four("gdn/query", 9.0),
        four("gdn/key", 9.0),
        four("gdn/value", 9.0),
        four("gdn/z", 9.0),
    ]);
    let apart = claimed(&[
        four("gdn/query", 9.0),
        four("gdn/key", 11.0),
        four("gdn/value", 9.0),
        four("gdn/z", 9.0),
    ]);
    let run = |source: &Claimed| logprobs(source, narrowed(source), 1024, 100);
    assert_ne!(run(&alike), run(&apart));
    assert_ne!(run(&alike), logprobs(&alike, LoadOptions::default(), 1024, 100));
}

#[test]
fn passes_of_whole_tiles_give_equal_bits_in_every_format() {
    for (format, policy, divisor) in [
        ("fp8_e4m3fn_row_bf16", ActivationPolicy::AllowA8, None),
        ("nvfp4", ActivationPolicy::AllowA4, Some(40.0)),
        ("q4_g64_fp16", ActivationPolicy::AllowA8, None),
    ] {
        let source = claimed(&[("", format, policy, divisor)]);
        let whole = logprobs(&source, narrowed(&source), 1024, 400);
        assert_ne!(whole, logprobs(&source, LoadOptions::default(), 1024, 400), "{format}");
        for chunk in [128, 256] {
            assert_eq!(
                logprobs(&source, narrowed(&source), chunk, 400),
                whole,
                "{format} in passes of {chunk}"
            );
        }
    }
}

fn random(count: usize, seed: u64, scale: f32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
    };
    (0..count).map(|_| next()).collect()
}

/// The nearest of `values`, a tie to the even index, keeping the sign.
fn nearest(values: &[f64], x: f64) -> f64 {
    let size = x.abs().min(values[values.len() - 1]);
    let index = (0..values.len())
        .min_by(|a, b| {
            let distance = |i: usize| (values[i] - size).abs();
            distance(*a).total_cmp(&distance(*b)).then((a % 2).cmp(&(b % 2)))
        })
        .unwrap();
    values[index].copysign(x)
}

fn e4m3() -> Vec<f64> {
    let value = |word: i32| match (word >> 3, word & 7) {
        (0, m) => f64::from(m) / 512.0,
        (e, m) => (1.0 + f64::from(m) / 8.0) * 2f64.powi(e - 7),
    };
    (0..127).map(value).collect()
}

/// The products of the formats' definitions, in f64 but for the scales, which are float32.
#[test]
fn a_product_is_that_of_the_codes_and_scales() {
    const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let (tokens, width, rows) = (131, 64, 7);
    let (x, w) = (random(tokens * width, 3, 2.5), random(rows * width, 5, 1.0));
    let e4m3 = e4m3();
    let magnitude = |x: &[f32]| x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    let divisor = 700.5f32;
    let product = |row: &[f32], w: &[f32], format| -> f64 {
        let dot = |x: &mut dyn FnMut(usize) -> f64| (0..width).map(|k| x(k) * f64::from(w[k])).sum::<f64>();
        match format {
            ActivationFormat::Fp8 => {
                let s = magnitude(row) / 448.0;
                f64::from(s) * dot(&mut |k| nearest(&e4m3, f64::from(row[k] * (1.0 / s))))
            }
            ActivationFormat::Nvfp4 { .. } => {
                let mut code = |k: usize| {
                    let group = &row[k / 16 * 16..][..16];
                    let s = nearest(&e4m3, f64::from(divisor * magnitude(group) / 6.0));
                    s * nearest(&E2M1, f64::from(row[k] * divisor / s as f32))
                };
                dot(&mut code) / f64::from(divisor)
            }
            ActivationFormat::Int8 => {
                let s = magnitude(row) / 127.0;
                f64::from(s) * dot(&mut |k| f64::from((row[k] / s).round_ties_even()))
            }
        }
    };
    let engine = ActivationFormat::Nvfp4 {
        divisor,
        rounding: Nvfp4Rounding::Engine,
    };
    let weight = <Flex as EvaluatorBackend>::weight(w.clone(), [rows, width], Precision::Full, &FlexDevice);
    for format in [ActivationFormat::Fp8, engine, ActivationFormat::Int8] {
        let linear = Linear::<Flex>::new(weight.clone(), Input::Quantized(format));
        let input = Tensor::from_data(TensorData::new(x.clone(), [1, tokens, width]), &FlexDevice);
        let y: Vec<f32> = linear
            .forward(input, Precision::Full.into())
            .into_data()
            .into_vec()
            .unwrap();
        for (t, row) in x.chunks(width).enumerate() {
            for (n, w) in w.chunks(width).enumerate() {
                // An integer product takes whole tiles of 128 tokens; the last three stay as they are.
                let plain = (0..width).map(|k| f64::from(row[k]) * f64::from(w[k])).sum::<f64>();
                let wanted = match format {
                    ActivationFormat::Int8 if t >= 128 => plain,
                    _ => product(row, w, format),
                };
                let found = f64::from(y[t * rows + n]);
                assert!(
                    (found - wanted).abs() < 2e-5,
                    "{format:?} [{t}, {n}]: {found}, not {wanted}"
                );
                assert!((found - plain).abs() < 5.0, "{format:?}");
            }
        }
    }
}

#[test]
fn calibration_puts_the_largest_value_on_the_largest_code() {
    let source = claimed(&[]);
    let ids: Vec<u32> = (0..150u32).map(|i| (i * 17 + 3) % 61).collect();
    let windows: Vec<&[u32]> = ids.chunks(64).collect();
    let mut seen = Vec::new();
    let divisors = flex::activation_divisors(&source, &windows, &mut |tokens| seen.push(tokens)).unwrap();
    assert_eq!(seen, [64, 128, 150]);
    let names: Vec<&str> = divisors.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "text/layers/0/ffn_input",
            "text/layers/0/gdn/gated_output",
            "text/layers/0/mixer_input",
            "text/layers/0/mlp/product",
            "text/layers/1/attention/gated_output",
            "text/layers/1/ffn_input",
            "text/layers/1/mixer_input",
            "text/layers/1/mlp/product",
        ]
    );
    // A norm with the generated weights (at most 1 + 0.85) of a row of 64 values is at most sqrt(64) times as large.
    for (input, divisor) in &divisors {
        assert!(*divisor > 0.0 && divisor.is_finite());
        if input.ends_with("mixer_input") || input.ends_with("ffn_input") {
            let largest = 2688.0 / divisor;
            assert!((1.0..1.85 * 8.0).contains(&largest), "{input}: {largest}");
        }
    }
    // More text can only lower a divisor.
    let part = flex::activation_divisors(&source, &windows[..1], &mut |_| ()).unwrap();
    assert!(part.iter().all(|(input, divisor)| *divisor >= divisors[input]));
}
