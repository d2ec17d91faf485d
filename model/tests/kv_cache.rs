//! KV-cache codecs in the forward pass, on the demo model.

mod forward_common;

use forward_common::{checkpoint, data};
use perplexity_kv::attention::{EightBitPv, Emulation, KernelOptions};
use perplexity_kv::options::KvOptions;
use perplexity_kv::registry::variants;
use perplexity_model::scorer::{Ask, ModelError, Scorer, ScorerOptions, Window};
use perplexity_model::source::TextSource;
use tokenizers::Tokenizer;

type Load = fn(&dyn TextSource, &ScorerOptions) -> Result<Box<dyn Scorer>, ModelError>;

const PUBLIC: usize = 8195;
/// The demo model's attention layers.
const LAYERS: [usize; 2] = [3, 7];

fn backends() -> Vec<(&'static str, Load)> {
    vec![
        #[cfg(feature = "flex")]
        ("flex", perplexity_model::backends::flex::load),
        #[cfg(feature = "ndarray")]
        ("ndarray", perplexity_model::backends::ndarray::load),
    ]
}

/// The first tokens of a golden text as one window.
fn window(tokens: usize) -> Window {
    let tokenizer = Tokenizer::from_file(data("demo_hf/tokenizer.json")).unwrap();
    let text = std::fs::read_to_string(data("golden/english_long_form-00.txt")).unwrap();
    let ids = tokenizer.encode(text, false).unwrap().get_ids()[..tokens].to_vec();
    Window {
        tokens: ids,
        first_target: 1,
    }
}

fn kv(name: &str) -> Option<KvOptions> {
    Some(KvOptions::new(name.parse().unwrap()))
}

fn logprobs(load: Load, kv: Option<KvOptions>, prefill_chunk: usize, window: &Window) -> Vec<f32> {
    let options = ScorerOptions {
        kv,
        prefill_chunk,
        ..ScorerOptions::new(PUBLIC)
    };
    let mut scorer = load(&checkpoint("demo_hf"), &options).unwrap();
    scorer
        .score(std::slice::from_ref(window), &Ask::default())
        .unwrap()
        .remove(0)
        .logprobs
}

/// Mean squared change of the targets' log-probabilities.
fn change(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / a.len() as f64
}

#[test]
fn a_bf16_cache_equals_no_codec_bit_for_bit() {
    let window = window(200);
    for (name, load) in backends() {
        let plain = logprobs(load, None, 1024, &window);
        assert_eq!(plain, logprobs(load, kv("bf16"), 1024, &window), "{name}");
        // The route caches V in FP16; a bf16 V may differ, where a value is below 2^-14.
        assert!(
            change(&plain, &logprobs(load, kv("bf16@bf16v"), 1024, &window)) < 1e-4,
            "{name}"
        );
    }
}

#[test]
fn passes_and_reruns_give_the_same_bits_with_every_codec() {
    let window = window(90);
    let (_, load) = backends()[0];
    for variant in variants() {
        let whole = logprobs(load, kv(variant.name), 1024, &window);
        assert!(whole.iter().all(|logprob| logprob.is_finite()), "{}", variant.name);
        assert_eq!(
            whole,
            logprobs(load, kv(variant.name), 40, &window),
            "{} in passes of 40",
            variant.name
        );
    }
}

#[test]
fn backends_agree_on_every_stored_row() {
    // The same rows are stored up to the backends' own rounding: changes stay far below those of the codec.
    let window = window(150);
    let all = backends();
    for name in ["int8", "nvfp4", "vq2"] {
        let results: Vec<Vec<f32>> = all
            .iter()
            .map(|(_, load)| logprobs(*load, kv(name), 1024, &window))
            .collect();
        assert!(change(&results[0], &results[results.len() - 1]) < 1e-3, "{name}");
    }
}

#[test]
fn coarser_codecs_change_more() {
    let window = window(400);
    let (_, load) = backends()[0];
    let exact = logprobs(load, kv("bf16"), 1024, &window);
    let changes: Vec<f64> = ["int8", "fp8", "nvfp4", "rk2v4-e8"]
        .iter()
        .map(|name| change(&exact, &logprobs(load, kv(name), 1024, &window)))
        .collect();
    assert!(
        changes[0] > 0.0 && changes.windows(2).all(|pair| pair[0] < pair[1]),
        "{changes:?}"
    );
}

#[test]
fn layer_tables_reach_their_layers_only() {
    let window = window(150);
    let (_, load) = backends()[0];
    let run = |name: &str| logprobs(load, kv(name), 1024, &window);
    let (none, third, seventh, both) = (run("bf16"), run("bf16;3=nvfp4"), run("bf16;7=nvfp4"), run("nvfp4"));
    assert!(none != third && third != seventh && both != third && both != seventh);
    assert_eq!(both, run("nvfp4;3=k=nvfp4,v=nvfp4"));
    assert_eq!(both, run("k=nvfp4,v=nvfp4;7=nvfp4"));
}

#[test]
fn kernel_emulation_and_the_window_switch_change_the_result() {
    let window = window(900);
    let (_, load) = backends()[0];
    let run = |name: &str, exact_window: bool, emulation: Emulation| {
        let options = KvOptions {
            window: exact_window,
            emulation,
            ..kv(name).unwrap()
        };
        logprobs(load, Some(options), 1024, &window)
    };
    let exact = run("bf16", true, Emulation::Format);
    let (on, off) = (
        run("vq2", true, Emulation::Format),
        run("vq2", false, Emulation::Format),
    );
    assert!(change(&on, &exact) < change(&off, &exact));
    let kernel = |eight_bit_pv| {
        Emulation::Kernel(KernelOptions {
            eight_bit_pv,
            ..KernelOptions::default()
        })
    };
    let (format, f16) = (
        run("int8", true, Emulation::Format),
        run("int8", true, kernel(EightBitPv::Auto)),
    );
    let eight_bit = run("int8", true, kernel(EightBitPv::On));
    assert!(format != f16 && f16 != eight_bit);
}

#[test]
fn options_that_do_not_fit_the_model_are_refused_before_it_runs() {
    let refuse = |options: KvOptions| {
        let options = ScorerOptions {
            kv: Some(options),
            ..ScorerOptions::new(PUBLIC)
        };
        let (_, load) = backends()[0];
        load(&checkpoint("demo_hf"), &options)
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    let message = refuse(kv("bf16;4=int8").unwrap());
    assert_eq!(
        message,
        format!("the KV layer table names layer 4, which has no KV cache; layers with one: {LAYERS:?}")
    );
    let original = KernelOptions {
        original_int8: true,
        ..KernelOptions::default()
    };
    let message = refuse(KvOptions {
        emulation: Emulation::Kernel(original),
        ..kv("fp8").unwrap()
    });
    assert_eq!(
        message,
        "--use-original-int8-prefill-kernel needs a KV cache of int8, got `fp8`"
    );
}
