//! The forward pass on a GPU against the CPU's: the demo model on the golden texts, reruns, batches and passes.
//!
//! `--features vulkan` runs on any Vulkan device, software rendering included; `--features cuda` needs a card.
#![cfg(any(feature = "cuda", feature = "vulkan"))]

mod forward_common;

use forward_common::{checkpoint, data, json, sliding, tensors, total_nll};
use perplexity_kv::options::KvOptions;
#[cfg(feature = "flex")]
use perplexity_model::activations::{Activations, Nvfp4Rounding, Permitted};
use perplexity_model::backends;
use perplexity_model::bindings::ArtifactSource;
use perplexity_model::convert::{ConvertOptions, Recipe, convert};
use perplexity_model::memory::Residency;
use perplexity_model::route::Route;
use perplexity_model::scorer::{Ask, ModelError, Scorer, ScorerOptions, Scores, Window};
use perplexity_model::source::TextSource;
use tokenizers::Tokenizer;

type Load = fn(&dyn TextSource, &ScorerOptions) -> Result<Box<dyn Scorer>, ModelError>;

fn devices() -> Vec<(&'static str, Load)> {
    vec![
        #[cfg(feature = "cuda")]
        (
            "cuda",
            (|source, options| backends::cuda::load(source, options, 0)) as Load,
        ),
        #[cfg(feature = "vulkan")]
        (
            "vulkan",
            (|source, options| backends::vulkan::load(source, options)) as Load,
        ),
    ]
}

/// The devices whose name the variable `DEVICE_TESTS` gives; all without it.
fn asked_devices() -> Vec<(&'static str, Load)> {
    let asked = std::env::var("DEVICE_TESTS").ok();
    let wanted = |name: &str| asked.as_deref().is_none_or(|asked| asked == name);
    devices().into_iter().filter(|(name, _)| wanted(name)).collect()
}

fn golden_windows(limit: usize) -> Vec<(String, Vec<Window>)> {
    let golden = json("golden/golden.json");
    let tokenizer = Tokenizer::from_file(data("demo_hf/tokenizer.json")).unwrap();
    let streams = golden["streams"].as_array().unwrap();
    streams
        .iter()
        .map(|stream| {
            let file = stream["file"].as_str().unwrap();
            let text = std::fs::read_to_string(data("golden").join(file)).unwrap();
            let ids = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
            (file.to_owned(), sliding(&ids[..ids.len().min(limit)], 1024, 512))
        })
        .collect()
}

fn options() -> ScorerOptions {
    let golden = json("golden/golden.json");
    ScorerOptions::new(golden["valid_rows"].as_u64().unwrap() as usize)
}

fn perplexity(scores: &[Scores]) -> f64 {
    let all = || scores.iter().flat_map(|scores| &scores.logprobs);
    (-all().map(|&lp| f64::from(lp)).sum::<f64>() / all().count() as f64).exp()
}

/// The asked devices that score whole texts in seconds: software rendering does not.
fn fast_devices() -> impl Iterator<Item = (&'static str, Load)> {
    asked_devices().into_iter().filter(|(name, _)| *name != "vulkan")
}

/// How many tokens of each text a device scores: software rendering is slow.
fn tokens_for(device: &str) -> usize {
    if device == "vulkan" { 150 } else { usize::MAX }
}

#[test]
fn golden_texts_have_hugging_faces_perplexities() {
    let golden = json("golden/golden.json");
    let source = checkpoint("demo_hf");
    for (name, load) in fast_devices() {
        for (route, key, tolerance) in [(Route::Exact, "f32_ppl", 1e-3), (Route::Normal, "bf16_ppl", 4e-3)] {
            let mut scorer = load(&source, &ScorerOptions { route, ..options() }).unwrap();
            for ((file, windows), stream) in golden_windows(usize::MAX)
                .iter()
                .zip(golden["streams"].as_array().unwrap())
            {
                let got = perplexity(&scorer.score(windows, &Ask::default()).unwrap());
                let relative = got / stream[key].as_f64().unwrap() - 1.0;
                println!(
                    "{name} {:6} {file}: {got:.6}, {relative:+.2e} from Hugging Face",
                    route.name()
                );
                assert!(
                    relative.abs() < tolerance,
                    "{name} {} {file}: {relative:e}",
                    route.name()
                );
            }
        }
    }
}

#[test]
fn dense_fixture_likelihood_equals_hugging_face() {
    fixture_likelihood_equals_hugging_face("fixtures/dense", [1e-4, 4e-3]);
}

/// Not trained, so that experts nearly tie: a row that goes to another one moves the mean by a step.
#[test]
fn mixture_fixture_likelihood_equals_hugging_face() {
    fixture_likelihood_equals_hugging_face("fixtures/moe", [5e-3, 5e-3]);
}

/// `tolerances` per token in the routes exact and normal.
fn fixture_likelihood_equals_hugging_face(folder: &str, tolerances: [f64; 2]) {
    let golden = json(&format!("{folder}/golden.json"));
    let ids = &tensors(&format!("{folder}/golden.safetensors"))["input_ids"];
    let window = Window {
        tokens: ids.iter().map(|&id| id as u32).collect(),
        first_target: 1,
    };
    let source = checkpoint(folder);
    for (name, load) in asked_devices() {
        for (route, prefix, tolerance) in [
            (Route::Exact, "f32", tolerances[0]),
            (Route::Normal, "bf16_eager", tolerances[1]),
        ] {
            for (rows, kind) in [("public_tokens", "public"), ("rows", "all")] {
                let rows = golden[rows].as_u64().unwrap() as usize;
                let options = ScorerOptions {
                    route,
                    ..ScorerOptions::new(rows)
                };
                let got = total_nll(&mut *load(&source, &options).unwrap(), std::slice::from_ref(&window));
                let want = golden[format!("{prefix}_{kind}_total_nll")].as_f64().unwrap();
                let mean = (got - want) / window.positions() as f64;
                println!(
                    "{name} {folder} {:6} {rows} rows: {got:.4}, not {want:.4}: {mean:+.2e} per token",
                    route.name()
                );
                assert!(
                    mean.abs() < tolerance,
                    "{name} {folder} {}, {rows} rows: {got}, not {want}",
                    route.name()
                );
            }
        }
    }
}

#[cfg(feature = "flex")]
#[test]
fn perplexities_are_the_cpus() {
    let source = checkpoint("demo_hf");
    for (name, load) in asked_devices() {
        for route in [Route::Exact, Route::Normal] {
            let options = ScorerOptions { route, ..options() };
            let mut here = load(&source, &options).unwrap();
            let mut there = backends::flex::load(&source, &options).unwrap();
            for (file, windows) in golden_windows(tokens_for(name)) {
                let ask = Ask {
                    top_k: 5,
                    ..Ask::default()
                };
                let (got, want) = (
                    here.score(&windows, &ask).unwrap(),
                    there.score(&windows, &ask).unwrap(),
                );
                let relative = perplexity(&got) / perplexity(&want) - 1.0;
                let pairs = || got.iter().zip(&want);
                let count = pairs().map(|(a, _)| a.logprobs.len()).sum::<usize>();
                let distance = pairs()
                    .flat_map(|(a, b)| a.logprobs.iter().zip(&b.logprobs))
                    .map(|(a, b)| f64::from((a - b).abs()))
                    .sum::<f64>()
                    / count as f64;
                let same_top = pairs()
                    .flat_map(|(a, b)| a.top_ids.chunks(5).zip(b.top_ids.chunks(5)))
                    .filter(|(a, b)| a[0] == b[0])
                    .count() as f64
                    / count as f64;
                println!(
                    "{name} {:6} {file}: {:.6}, {relative:+.2e} from the CPU, mean |d log-prob| {distance:.2e}, same top {same_top:.4}",
                    route.name(),
                    perplexity(&got)
                );
                assert!(relative.abs() < 1e-3, "{name} {} {file}: {relative:e}", route.name());
                assert!(
                    distance < 2e-2,
                    "{name} {} {file}: mean distance {distance:e}",
                    route.name()
                );
                assert!(same_top > 0.97, "{name} {} {file}: same top {same_top}", route.name());
            }
        }
    }
}

/// Log-probabilities of routes in f64, token by token: the bits of the CPU, or, where a sum in another order fell on the
/// other side of a rounding, near them.
#[cfg(feature = "flex")]
#[test]
fn precise_routes_have_the_cpus_bits() {
    let fixture = |name: &str| {
        let ids = &tensors(&format!("fixtures/{name}/golden.safetensors"))["input_ids"];
        let golden = json(&format!("fixtures/{name}/golden.json"));
        let window = Window {
            tokens: ids.iter().map(|&id| id as u32).collect(),
            first_target: 1,
        };
        let rows = golden["rows"].as_u64().unwrap() as usize;
        (
            format!("fixtures/{name}"),
            ScorerOptions::new(rows),
            vec![("input_ids".to_owned(), vec![window])],
        )
    };
    let demo = ("demo_hf".to_owned(), options(), golden_windows(1500));
    for (name, load) in fast_devices() {
        for (folder, options, texts) in [fixture("dense"), fixture("moe"), demo.clone()] {
            let source = checkpoint(&folder);
            for route in [Route::Lossless, Route::Reference] {
                let options = ScorerOptions {
                    route,
                    batch: 2,
                    ..options.clone()
                };
                let mut here = load(&source, &options).unwrap();
                let mut there = backends::flex::load(&source, &options).unwrap();
                for (file, windows) in &texts {
                    let all = |scorer: &mut dyn Scorer| -> Vec<f32> {
                        let scores = scorer.score(windows, &Ask::default()).unwrap();
                        scores.into_iter().flat_map(|scores| scores.logprobs).collect()
                    };
                    let (got, want) = (all(&mut *here), all(&mut *there));
                    let pairs = || got.iter().zip(&want);
                    let equal = pairs().filter(|(a, b)| a.to_bits() == b.to_bits()).count();
                    let largest = pairs().map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    let what = format!("{name} {} {folder} {file}", route.name());
                    println!(
                        "{what}: {equal} of {} log-probabilities with equal bits, largest difference {largest:.2e}",
                        want.len()
                    );
                    assert!(
                        equal as f64 >= 0.9 * want.len() as f64,
                        "{what}: {equal} of {}",
                        want.len()
                    );
                    assert!(largest < 0.1, "{what}: {largest}");
                }
            }
        }
    }
}

#[test]
fn reruns_and_batches_give_the_same_bits() {
    let source = checkpoint("demo_hf");
    for (name, load) in asked_devices() {
        let tokens = tokens_for(name).min(700);
        let windows: Vec<Window> = golden_windows(tokens).into_iter().map(|(_, w)| w[0].clone()).collect();
        let ask = Ask {
            top_k: 3,
            candidates_per_position: 2,
            candidates: windows
                .iter()
                .map(|w| (0..2 * w.positions() as u32).map(|i| i % 997).collect())
                .collect(),
            ..Ask::default()
        };
        let score = |batch: usize| {
            load(&source, &ScorerOptions { batch, ..options() })
                .unwrap()
                .score(&windows, &ask)
                .unwrap()
        };
        let alone = score(1);
        assert_eq!(alone, score(1), "{name}: a second run");
        let together = score(4);
        let difference = alone
            .iter()
            .zip(&together)
            .flat_map(|(a, b)| a.logprobs.iter().zip(&b.logprobs))
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        println!("{name}: largest difference between one window and four at a time {difference:e}");
        // The library may reduce products of another height in another order: a step of bfloat16 now and then.
        assert!(difference < 0.3, "{name}: batches differ by {difference}");
    }
}

#[test]
fn passes_continue_where_the_last_one_ended() {
    let source = checkpoint("demo_hf");
    for (name, load) in asked_devices() {
        let windows = vec![golden_windows(tokens_for(name).min(600))[1].1[0].clone()];
        let score = |prefill_chunk: usize| {
            let options = ScorerOptions {
                prefill_chunk,
                route: Route::Exact,
                ..options()
            };
            load(&source, &options)
                .unwrap()
                .score(&windows, &Ask::default())
                .unwrap()
        };
        let whole = perplexity(&score(4096));
        for chunk in [48, 64, 100] {
            let relative = perplexity(&score(chunk)) / whole - 1.0;
            assert!(
                relative.abs() < 1e-4,
                "{name}: passes of {chunk} tokens change the perplexity by {relative:e}"
            );
        }
    }
}

/// Every stored format, expanded on loading and for each use: without rounding the CPU's figures, else near them.
#[cfg(feature = "flex")]
#[test]
fn stored_formats_score_as_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    for recipe in ["bf16", "q4", "q5", "q6", "q8", "fp8", "nvfp4", "qwen3_8_27b_nvfp4"] {
        let path = folder.path().join(format!("{recipe}.ninfer"));
        let recipe_options = ConvertOptions::new(Recipe::named(recipe).unwrap());
        convert(&data("demo_hf"), &path, &recipe_options, &mut |_| ()).unwrap();
        let source = ArtifactSource::open(&path).unwrap();
        for (name, load) in fast_devices() {
            let windows: Vec<Window> = golden_windows(700)
                .into_iter()
                .map(|(_, windows)| windows[0].clone())
                .collect();
            for (route, residency, tolerance) in [
                (Route::Exact, Residency::Packed, 1e-5),
                (Route::Normal, Residency::Packed, 3e-3),
                (Route::Normal, Residency::Dense, 3e-3),
            ] {
                let mut options = ScorerOptions { route, ..options() };
                options.load.residency = residency;
                let score = |load: Load| {
                    let mut scorer = load(&source, &options).unwrap();
                    perplexity(&scorer.score(&windows, &Ask::default()).unwrap())
                };
                let (got, want) = (score(load), score(backends::flex::load));
                let relative = got / want - 1.0;
                let what = format!("{name} {recipe}, {}, {residency:?}", route.name());
                println!("{what}: {got:.6}, {relative:+.2e} from the CPU");
                assert!(relative.abs() < tolerance, "{what}: {relative:e}");
            }
        }
    }
}

/// A device's mean log-probability is far nearer to the CPU's than that is to the mean with 16 bits. So are the tokens' own in
/// route exact; in route normal another rounding to bfloat16 somewhere changes 4-bit codes and with them those of all later
/// layers, and single tokens move by as much as narrowing moves them.
#[cfg(feature = "flex")]
fn narrowed_inputs_score_as_on_the_cpu(source: &ArtifactSource, windows: &[Window], routes: &[Route]) {
    let permitted = Permitted {
        integer: true,
        rounding: Nvfp4Rounding::Engine,
    };
    let narrowed = Activations::permitted(source, permitted).unwrap();
    let score = |load: Load, activations: &Activations, route, residency| -> Vec<f32> {
        let mut options = ScorerOptions::new(source.config().vocab_size);
        options.route = route;
        options.load.activations = activations.clone();
        options.load.residency = residency;
        let scores = load(source, &options).unwrap().score(windows, &Ask::default()).unwrap();
        scores.into_iter().flat_map(|scores| scores.logprobs).collect()
    };
    let distance = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f32>() / a.len() as f32;
    let mean = |lp: &[f32]| lp.iter().map(|&lp| f64::from(lp)).sum::<f64>() / lp.len() as f64;
    for &route in routes {
        let want = score(backends::flex::load, &narrowed, route, Residency::Dense);
        let sixteen = score(backends::flex::load, &Activations::default(), route, Residency::Dense);
        let far = distance(&sixteen, &want);
        for (name, load) in fast_devices() {
            for residency in [Residency::Dense, Residency::Packed] {
                let got = score(load, &narrowed, route, residency);
                let near = distance(&got, &want);
                let case = format!("{name} {}, {residency:?}", route.name());
                let [on_device, on_cpu, of_16_bits] = [&got, &want, &sixteen].map(|lp| mean(lp));
                println!(
                    "{case}: mean log-prob {on_device:.5}, on the CPU {on_cpu:.5}, with 16 bits {of_16_bits:.5}; mean distance \
                     {near:.2e} from the CPU, which is {far:.2e} from 16 bits"
                );
                let [apart, effect] = [on_device, of_16_bits].map(|mean| (mean - on_cpu).abs());
                assert!(
                    apart < effect / 4.0,
                    "{case}: means {apart:e} from the CPU, {effect:e} to 16 bits"
                );
                let as_on_the_cpu = route != Route::Exact || near < far / 4.0;
                assert!(as_on_the_cpu, "{case}: {near:e} from the CPU, {far:e} to 16 bits");
            }
        }
    }
}

/// FP8 and NVFP4 inputs of an imported mix. Not trained, so that where roundings to bfloat16 differ, 4-bit codes differ and
/// experts change: only the route without those roundings can tell.
#[cfg(feature = "flex")]
#[test]
fn inputs_narrowed_as_an_imported_mix_permits_score_as_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mix.ninfer");
    let recipe = ConvertOptions::new(Recipe::named("qwen3_8_27b_nvfp4").unwrap());
    convert(&data("quantised/nvfp4_compressed"), &path, &recipe, &mut |_| ()).unwrap();
    let source = ArtifactSource::open(&path).unwrap();
    // Ids below the rows of its head.
    let ids = &tensors("fixtures/moe/golden.safetensors")["input_ids"];
    let windows = [Window {
        tokens: ids.iter().map(|&id| id as u32).collect(),
        first_target: 1,
    }];
    narrowed_inputs_score_as_on_the_cpu(&source, &windows, &[Route::Exact]);
}

/// NVFP4 inputs of the demo, their divisors calibrated.
#[cfg(feature = "flex")]
#[test]
fn four_bit_inputs_of_a_trained_model_score_as_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("demo.ninfer");
    let texts = golden_windows(1024);
    let ids: Vec<&[u32]> = texts.iter().map(|(_, windows)| &windows[0].tokens[..]).collect();
    let mut recipe = ConvertOptions::new(Recipe::named("qwen3_8_27b_nvfp4").unwrap());
    recipe.activation_divisors =
        backends::flex::activation_divisors(&checkpoint("demo_hf"), &ids, &mut |_| ()).unwrap();
    convert(&data("demo_hf"), &path, &recipe, &mut |_| ()).unwrap();
    let windows: Vec<Window> = texts.into_iter().flat_map(|(_, windows)| windows).collect();
    let source = ArtifactSource::open(&path).unwrap();
    narrowed_inputs_score_as_on_the_cpu(&source, &windows, &[Route::Exact, Route::Normal]);
}

/// A mixture of experts in codes, expanded on loading and for each use.
#[cfg(feature = "flex")]
#[test]
fn stored_experts_score_as_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("moe.ninfer");
    let recipe = ConvertOptions::new(Recipe::named("qwen3_6_35b_a3b").unwrap());
    convert(&data("fixtures/moe"), &path, &recipe, &mut |_| ()).unwrap();
    let source = ArtifactSource::open(&path).unwrap();
    let rows = json("fixtures/moe/golden.json")["rows"].as_u64().unwrap() as usize;
    let ids = &tensors("fixtures/moe/golden.safetensors")["input_ids"];
    let window = Window {
        tokens: ids.iter().map(|&id| id as u32).collect(),
        first_target: 1,
    };
    for (name, load) in asked_devices() {
        for (route, residency, tolerance) in [
            // Rounding sends rows of this untrained model to other experts.
            (Route::Exact, Residency::Packed, 1e-5),
            (Route::Normal, Residency::Packed, 3e-2),
            (Route::Normal, Residency::Dense, 3e-2),
        ] {
            let mut options = ScorerOptions {
                route,
                ..ScorerOptions::new(rows)
            };
            options.load.residency = residency;
            let nll = |load: Load| total_nll(&mut *load(&source, &options).unwrap(), std::slice::from_ref(&window));
            let mean = (nll(load) - nll(backends::flex::load)) / window.positions() as f64;
            let what = format!("{name}, {}, {residency:?}", route.name());
            println!("{what}: {mean:+.2e} per token from the CPU");
            assert!(mean.abs() < tolerance, "{what}: {mean:e} per token");
        }
    }
}

/// Every KV format, rows decoded on the device where the format allows it.
#[cfg(feature = "flex")]
#[test]
fn kv_formats_score_as_on_the_cpu() {
    let source = checkpoint("demo_hf");
    for (name, load) in fast_devices() {
        let windows: Vec<Window> = golden_windows(500)
            .into_iter()
            .map(|(_, windows)| windows[0].clone())
            .collect();
        for dtype in [
            "bf16", "int8", "fp8", "nvfp4", "k8v4", "vq2", "rk4v4", "rk4v4-e8", "turbo4", "kivi4",
        ] {
            for (route, tolerance) in [(Route::Exact, 2e-5), (Route::Normal, 3e-3)] {
                let options = ScorerOptions {
                    route,
                    kv: Some(KvOptions::new(dtype.parse().unwrap())),
                    batch: 4,
                    ..options()
                };
                let score = |load: Load| {
                    let mut scorer = load(&source, &options).unwrap();
                    perplexity(&scorer.score(&windows, &Ask::default()).unwrap())
                };
                let (got, want) = (score(load), score(backends::flex::load));
                let relative = got / want - 1.0;
                let what = format!("{name} {dtype}, {}", route.name());
                println!("{what}: {got:.6}, {relative:+.2e} from the CPU");
                assert!(relative.abs() < tolerance, "{what}: {relative:e}");
            }
        }
    }
}
