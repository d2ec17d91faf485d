//! Against Hugging Face transformers 5.24.0: logits, hidden states and likelihoods of the dense fixture, perplexities of
//! the demo model on the golden texts.

mod forward_common;

use forward_common::{checkpoint, data, json, sliding, tensors, total_nll};
use perplexity_model::route::Route;
use perplexity_model::scorer::{ModelError, Scorer, ScorerOptions, Window};
use perplexity_model::source::TextSource;
use tokenizers::Tokenizer;

type Load = fn(&dyn TextSource, &ScorerOptions) -> Result<Box<dyn Scorer>, ModelError>;

fn backends() -> Vec<(&'static str, Load)> {
    vec![
        #[cfg(feature = "flex")]
        ("flex", perplexity_model::backends::flex::load),
        #[cfg(feature = "ndarray")]
        ("ndarray", perplexity_model::backends::ndarray::load),
    ]
}

fn fixture_ids(fixture: &str) -> Vec<u32> {
    tensors(&format!("{fixture}/golden.safetensors"))["input_ids"]
        .iter()
        .map(|&id| id as u32)
        .collect()
}

#[track_caller]
fn assert_within(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let worst = got
        .iter()
        .zip(want)
        .map(|(got, want)| (got - want).abs())
        .fold(0.0, f32::max);
    println!("{what}: largest difference {worst:.2e}");
    assert!(worst <= tolerance, "{what} differs by {worst}");
}

#[test]
#[cfg(feature = "flex")]
fn fixtures_hidden_states_and_logits_equal_hugging_face() {
    // Dense, then a mixture of 16 experts, 4 per token: another choice of experts would show from its block on.
    hidden_states_and_logits("fixtures/dense");
    hidden_states_and_logits("fixtures/moe");
}

#[cfg(feature = "flex")]
fn hidden_states_and_logits(fixture: &str) {
    use burn_flex::{Flex, FlexDevice};
    use perplexity_model::qwen3_5::Qwen3_5;

    let golden = tensors(&format!("{fixture}/golden.safetensors"));
    let ids = fixture_ids(fixture);
    let source = checkpoint(fixture);
    let model = Qwen3_5::<Flex>::load(&source, Route::Exact, &FlexDevice).unwrap();
    let mut windows = model.begin(1, ids.len());
    let layers = source.config().layer_types.len();
    let mut seen = 0;
    let hidden = model.pass(&mut windows, &ids, |layer, x| {
        // The last state that Hugging Face returns has passed the final norm.
        let x = x.clone().squeeze::<2>();
        let x = if layer == layers { model.normalise(x) } else { x };
        let got: Vec<f32> = x.into_data().into_vec().unwrap();
        assert_within(
            &got,
            &golden[&format!("hidden_f32.{layer}")],
            1e-4,
            &format!("{fixture}: hidden state {layer}"),
        );
        seen += 1;
    });
    assert_eq!(seen, layers + 1);
    let logits: Vec<f32> = model.logits(hidden.squeeze::<2>()).into_data().into_vec().unwrap();
    assert_within(&logits, &golden["logits_f32"], 1e-4, &format!("{fixture}: logits"));
}

/// Share of bit-equal elements of each block's output, from the input that Hugging Face's block had: `file` holds
/// `{name}.0`, `{name}.1`, ...
#[cfg(feature = "flex")]
fn equal_shares(fixture: &str, route: Route, [file, name]: [&str; 2]) -> Vec<f64> {
    use burn::tensor::{Tensor, TensorData};
    use burn_flex::{Flex, FlexDevice};
    use perplexity_model::qwen3_5::Qwen3_5;

    let golden = tensors(&format!("fixtures/{fixture}/{file}"));
    let source = checkpoint(&format!("fixtures/{fixture}"));
    let model = Qwen3_5::<Flex>::load(&source, route, &FlexDevice).unwrap();
    let layer = |index: usize| &golden[&format!("{name}.{index}")];
    let hidden = source.config().hidden_size;
    let tokens = layer(0).len() / hidden;
    let share = |index: usize| {
        let x = TensorData::new(layer(index).clone(), [1, tokens, hidden]);
        let y = model.block(
            &mut model.begin(1, tokens),
            index,
            Tensor::<Flex, 3>::from_data(x, &FlexDevice),
        );
        let got: Vec<f32> = y.into_data().into_vec().unwrap();
        let equal = got
            .iter()
            .zip(layer(index + 1))
            .filter(|(got, want)| got == want)
            .count();
        equal as f64 / got.len() as f64
    };
    (0..source.config().layer_types.len()).map(share).collect()
}

/// Hugging Face's bfloat16 model as it runs on a CPU.
#[cfg(feature = "flex")]
const EAGER: [&str; 2] = ["golden.safetensors", "layer_bf16_eager"];

/// The same model with every PyTorch operation evaluated in f64 and rounded once (`scripts/hf_rounded.py`).
#[cfg(feature = "flex")]
const ROUNDED: [&str; 2] = ["lossless.safetensors", "layer_lossless"];

#[test]
#[cfg(feature = "flex")]
fn lossless_blocks_equal_hugging_faces_correctly_rounded_bit_for_bit() {
    for fixture in ["dense", "moe"] {
        let shares = equal_shares(fixture, Route::Lossless, ROUNDED);
        println!("{fixture}: {shares:?}");
        assert!(shares.iter().all(|share| *share == 1.0), "{fixture}: {shares:?}");
    }
}

#[test]
#[cfg(feature = "flex")]
fn lossless_blocks_equal_hugging_faces_bit_for_bit_in_98_percent() {
    use perplexity_model::config::LayerType;
    use perplexity_model::route::Boundary;

    let kinds = &checkpoint("fixtures/dense").config().layer_types.clone();
    let mixture = equal_shares("moe", Route::Lossless, EAGER);
    println!("mixture of experts: {mixture:.4?}");
    // A flipped routing weight moves a whole row.
    assert!(mixture.iter().all(|share| *share >= 0.97), "{mixture:?}");
    let lossless = equal_shares("dense", Route::Lossless, EAGER);
    println!("{lossless:.4?} {kinds:?}");
    assert!(lossless.iter().all(|share| *share >= 0.98), "{lossless:?}");

    // One boundary at a time without its inner roundings: fewer elements are equal wherever it has any.
    let linear = LayerType::LinearAttention;
    let full = LayerType::FullAttention;
    for (boundary, kind) in [
        (Boundary::DeltaNetControl, Some(linear)),
        (Boundary::Convolution, Some(linear)),
        (Boundary::GatedNorm, Some(linear)),
        (Boundary::Rotary, Some(full)),
        (Boundary::AttentionOutput, Some(full)),
        (Boundary::OutputGate, Some(full)),
        (Boundary::FeedForward, None),
        (Boundary::Residual, None),
    ] {
        let shares = equal_shares("dense", Route::LosslessBut(boundary), EAGER);
        println!("{boundary:?}: {shares:.4?}");
        for ((share, lossless), layer) in shares.iter().zip(&lossless).zip(kinds) {
            match kind.is_none_or(|kind| kind == *layer) {
                true => assert!(*share < 0.8, "{boundary:?}: {shares:?}"),
                false => assert_eq!(share, lossless, "{boundary:?}: {shares:?}"),
            }
        }
    }
}

#[test]
#[cfg(feature = "flex")]
fn every_token_of_the_moe_fixture_chooses_hugging_faces_experts() {
    use burn_flex::{Flex, FlexDevice};
    use perplexity_model::qwen3_5::Qwen3_5;

    let golden = tensors("fixtures/moe/routing.safetensors");
    let ids = fixture_ids("fixtures/moe");
    let source = checkpoint("fixtures/moe");
    let model = Qwen3_5::<Flex>::load(&source, Route::Exact, &FlexDevice).unwrap();
    let mut windows = model.begin(1, ids.len());
    windows.keep_routing();
    model.pass(&mut windows, &ids, |_, _| {});
    assert_eq!(windows.routing().len(), source.config().layer_types.len());
    for (layer, routing) in windows.routing().iter().enumerate() {
        let experts: Vec<f32> = routing.experts.to_data().convert::<f32>().into_vec().unwrap();
        // The smallest margin between an expert taken and one left is 1.2e-4 in the logits.
        assert_eq!(experts, golden[&format!("experts.{layer}")], "block {layer}");
        let weights: Vec<f32> = routing.weights.to_data().into_vec().unwrap();
        assert_within(
            &weights,
            &golden[&format!("weights.{layer}")],
            1e-5,
            &format!("weights of block {layer}"),
        );
    }
}

#[test]
fn fixtures_likelihoods_equal_hugging_face() {
    for fixture in ["fixtures/dense", "fixtures/moe"] {
        let golden = json(&format!("{fixture}/golden.json"));
        let window = Window {
            tokens: fixture_ids(fixture),
            first_target: 1,
        };
        for (name, load) in backends() {
            for (rows, key) in [("public_tokens", "f32_public_total_nll"), ("rows", "f32_all_total_nll")] {
                let rows = golden[rows].as_u64().unwrap() as usize;
                let options = ScorerOptions {
                    route: Route::Exact,
                    ..ScorerOptions::new(rows)
                };
                let source = checkpoint(fixture);
                let got = total_nll(&mut *load(&source, &options).unwrap(), std::slice::from_ref(&window));
                let want = golden[key].as_f64().unwrap();
                println!("{fixture}, {name}, {rows} rows: {:+.1e} from Hugging Face", got - want);
                assert!(
                    (got - want).abs() < 1e-3,
                    "{fixture}, {name}, {rows} rows: {got}, not {want}"
                );
            }
        }
    }
}

#[test]
fn golden_texts_have_hugging_faces_perplexities() {
    let golden = json("golden/golden.json");
    let lossless = json("golden/lossless.json");
    let number = |value: &serde_json::Value, key: &str| value[key].as_f64().unwrap();
    let tokenizer = Tokenizer::from_file(data("demo_hf/tokenizer.json")).unwrap();
    let source = checkpoint("demo_hf");
    let public_tokens = number(&golden, "valid_rows") as usize;
    for (name, load) in backends() {
        for (route, key, tolerance) in [
            (Route::Exact, "f32_ppl", 1e-5),
            (Route::Normal, "bf16_ppl", 3e-3),
            // Of Hugging Face's bfloat16 model with every operation evaluated in f64 and rounded once.
            (Route::Lossless, "float32_logits_ppl", 1e-7),
        ] {
            // In f64 the backend has no part.
            if route.is_precise() && name != backends()[0].0 {
                continue;
            }
            let options = ScorerOptions {
                route,
                ..ScorerOptions::new(public_tokens)
            };
            let mut scorer = load(&source, &options).unwrap();
            for (index, stream) in golden["streams"].as_array().unwrap().iter().enumerate() {
                let file = stream["file"].as_str().unwrap();
                let text = std::fs::read_to_string(data("golden").join(file)).unwrap();
                let ids = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
                assert_eq!(ids.len(), number(stream, "tokens") as usize, "{file}");
                let windows = sliding(
                    &ids,
                    number(&golden, "context") as usize,
                    number(&golden, "stride") as usize,
                );
                assert_eq!(windows.len(), number(stream, "windows") as usize, "{file}");
                let perplexity = (total_nll(&mut *scorer, &windows) / (ids.len() - 1) as f64).exp();
                let want = match route {
                    Route::Lossless => &lossless["streams"][index],
                    _ => stream,
                };
                assert_eq!(want["id"], stream["id"]);
                let relative = perplexity / number(want, key) - 1.0;
                println!(
                    "{name} {:6} {file}: {perplexity:.6}, {relative:+.2e} from Hugging Face",
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
