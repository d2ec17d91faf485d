//! Qwen3.8-Flash-Next on a device: packed experts against the host's exact integers, the tiny model and the fixture
//! against the CPU.
#![cfg(all(any(feature = "cuda", feature = "vulkan"), feature = "flex"))]

mod forward_common;

use burn::tensor::{Tensor, TensorData};
use forward_common::{checkpoint, json, tensors, total_nll};
use perplexity_kernels::ops::{gated_rms_norm, hyper_connection, offset_rms_norm};
use perplexity_kernels::{EvaluatorBackend, Precision};
use perplexity_model::backends;
use perplexity_model::bindings::ArtifactSource;
use perplexity_model::experts::Residency;
use perplexity_model::flash_next_tiny::{self, TinyOptions, words};
use perplexity_model::qwen4_exp::FlashNextOptions;
use perplexity_model::route::Route;
use perplexity_model::scorer::{Ask, ModelError, Scorer, ScorerOptions, Window};
use perplexity_model::source::TextSource;

type Load = fn(&dyn TextSource, &ScorerOptions) -> Result<Box<dyn Scorer>, ModelError>;

/// The devices whose name the variable `DEVICE_TESTS` gives; all without it.
fn devices() -> Vec<(&'static str, Load)> {
    let asked = std::env::var("DEVICE_TESTS").ok();
    let all: Vec<(&'static str, Load)> = vec![
        #[cfg(feature = "cuda")]
        ("cuda", |source, options| backends::cuda::load(source, options, 0)),
        #[cfg(feature = "vulkan")]
        ("vulkan", |source, options| backends::vulkan::load(source, options)),
    ];
    let wanted = |name: &str| asked.as_deref().is_none_or(|asked| asked == name);
    all.into_iter().filter(|(name, _)| wanted(name)).collect()
}

/// Windows of `lengths` tokens of the tiny model's vocabulary, with ends of text among them.
fn windows(lengths: &[usize]) -> Vec<Window> {
    let mut ids = words("windows").map(|word| (word % 96) as u32);
    let window = |length: &usize| Window {
        tokens: ids.by_ref().take(*length).collect(),
        first_target: 1,
    };
    lengths.iter().map(window).collect()
}

fn logprobs(load: Load, source: &dyn TextSource, options: &ScorerOptions, windows: &[Window]) -> Vec<f32> {
    let scores = load(source, options).unwrap().score(windows, &Ask::default()).unwrap();
    scores.into_iter().flat_map(|scores| scores.logprobs).collect()
}

fn mean(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x)).sum::<f64>() / values.len() as f64
}

struct Tiny {
    _folder: tempfile::TempDir,
    source: ArtifactSource,
}

fn tiny() -> Tiny {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.ninfer");
    flash_next_tiny::write(&path, &TinyOptions::default()).unwrap();
    Tiny {
        source: ArtifactSource::open(&path).unwrap(),
        _folder: folder,
    }
}

/// Where experts are, and how many windows and tokens run at once, changes no bit; the mean is near the CPU's.
#[test]
fn the_tiny_model_scores_as_on_the_cpu_wherever_its_experts_are() {
    let (tiny, windows) = (tiny(), windows(&[70, 70, 33, 24]));
    for (name, load) in devices() {
        for (route, four_bit, tolerance) in [
            (Route::Exact, false, 1e-4),
            (Route::Normal, false, 2e-2),
            (Route::Normal, true, 2e-2),
        ] {
            let with = |residency, expert_cache_bytes| ScorerOptions {
                route,
                flash_next: FlashNextOptions {
                    four_bit_experts: four_bit,
                    residency,
                    expert_cache_bytes,
                    ..FlashNextOptions::default()
                },
                ..ScorerOptions::new(96)
            };
            let resident = with(Residency::Device, 0);
            let got = logprobs(load, &tiny.source, &resident, &windows);
            let want = logprobs(backends::flex::load, &tiny.source, &resident, &windows);
            let distance = got
                .iter()
                .zip(&want)
                .map(|(a, b)| f64::from((a - b).abs()))
                .sum::<f64>()
                / want.len() as f64;
            println!(
                "{name} {} {}: mean {:.6}, CPU {:.6}, mean distance {distance:.2e}",
                route.name(),
                if four_bit { "4-bit" } else { "16-bit" },
                mean(&got),
                mean(&want)
            );
            assert!((mean(&got) - mean(&want)).abs() < tolerance, "{name} {}", route.name());
            // No place, one per block, and all.
            for residency in [Residency::Host, Residency::Disk] {
                for cache in [0, 4 * 4096, 1 << 20] {
                    let elsewhere = logprobs(load, &tiny.source, &with(residency, cache), &windows);
                    assert_eq!(elsewhere, got, "{name}: {} with {cache} bytes", residency.name());
                }
            }
        }
    }
}

#[test]
fn fixture_likelihood_equals_hugging_face() {
    let golden = json("fixtures/flash_next/golden.json");
    let window = fixture();
    for (name, load) in devices() {
        let options = ScorerOptions {
            route: Route::Exact,
            ..ScorerOptions::new(golden["rows"].as_u64().unwrap() as usize)
        };
        let got = total_nll(
            &mut *load(&checkpoint("fixtures/flash_next"), &options).unwrap(),
            std::slice::from_ref(&window),
        );
        let want = golden["f32_all_total_nll"].as_f64().unwrap();
        println!("{name}: {got}, {:+.2e}", got - want);
        assert!((got - want).abs() < 1e-2, "{name}: {got}, not {want}");
    }
}

fn fixture() -> Window {
    let ids = &tensors("fixtures/flash_next/golden.safetensors")["input_ids"];
    Window {
        tokens: ids.iter().map(|&id| id as u32).collect(),
        first_target: 1,
    }
}

/// In f64 only sums in another order can fall on the other side of a rounding.
#[test]
fn precise_routes_have_the_cpus_bits() {
    let (tiny, fixture_source) = (tiny(), checkpoint("fixtures/flash_next"));
    let rows = json("fixtures/flash_next/golden.json")["rows"].as_u64().unwrap() as usize;
    let of_tiny = windows(&[70, 70, 33, 24]);
    let of_fixture = [fixture()];
    let cases: [(&str, &dyn TextSource, usize, &[Window]); 2] = [
        ("tiny", &tiny.source, 96, &of_tiny),
        ("fixture", &fixture_source, rows, &of_fixture),
    ];
    for (name, load) in devices() {
        for (model, source, rows, windows) in cases {
            for route in [Route::Lossless, Route::Reference] {
                let options = ScorerOptions {
                    route,
                    ..ScorerOptions::new(rows)
                };
                let got = logprobs(load, source, &options, windows);
                let want = logprobs(backends::flex::load, source, &options, windows);
                let equal = got
                    .iter()
                    .zip(&want)
                    .filter(|(a, b)| a.to_bits() == b.to_bits())
                    .count();
                let what = format!(
                    "{name} {} {model}: {equal} of {} with equal bits",
                    route.name(),
                    want.len()
                );
                println!("{what}");
                assert!(equal as f64 >= 0.9 * want.len() as f64, "{what}");
            }
        }
    }
}

/// What stands between the projections, element by element, against the operations in tensors.
fn streams_are_the_references<B: EvaluatorBackend>() {
    let device = Default::default();
    let mut random = words("streams").map(|word| (word >> 40) as f32 / (1u32 << 22) as f32 - 2.0);
    let mut data = |shape: &[usize]| {
        let values: Vec<f32> = random.by_ref().take(shape.iter().product()).collect();
        TensorData::new(values, shape.to_vec())
    };
    for [batch, tokens, count, width] in [[1, 3, 4, 2560], [2, 5, 3, 33], [3, 1, 2, 8]] {
        for to in [Precision::Full, Precision::Bf16] {
            let u: Tensor<B, 3> = Tensor::from_data(data(&[batch, tokens, count * width]), &device);
            let normal: Tensor<B, 4> = Tensor::from_data(data(&[batch, tokens, count, width]), &device);
            let y: Tensor<B, 3> = Tensor::from_data(data(&[batch, tokens, width]), &device);
            let weights: Tensor<B, 3> = Tensor::from_data(data(&[batch, tokens, count]), &device);
            let norm: Tensor<B, 2> = Tensor::from_data(data(&[count, width]), &device);
            // Narrow operands where the device stores them.
            let (u, normal, y) = (B::round(u, to), B::round(normal, to), B::round(y, to));
            let near = |got: Vec<f32>, want: Vec<f32>, what: &str| {
                let tolerance = if to == Precision::Full { 1e-5 } else { 8e-3 };
                assert_eq!(got.len(), want.len(), "{what}");
                for (got, want) in got.iter().zip(&want) {
                    assert!(
                        (got - want).abs() <= tolerance * want.abs().max(0.1),
                        "{what}: {got}, not {want}"
                    );
                }
            };
            let flat = |x: Tensor<B, 3>| x.into_data().iter::<f32>().collect::<Vec<f32>>();
            let got = B::mix_streams(u.clone(), normal.clone(), to);
            let want = hyper_connection::mix_reference(u.clone(), normal.clone(), Precision::Full);
            near(flat(got), flat(want), "mix");
            let got = B::write_streams(u.clone(), y.clone(), weights.clone(), to);
            let want = hyper_connection::write_reference(u, y, weights, Precision::Full);
            near(flat(got), flat(want), "write");
            let got = B::stream_norm(normal.clone(), norm.clone(), 1e-6, to);
            let want = offset_rms_norm::stream_reference(normal.clone(), norm, 1e-6, Precision::Full);
            near(flat(got.flatten(1, 2)), flat(want.flatten(1, 2)), "norm");
            let plain = Tensor::ones([width], &device);
            let got = B::sigmoid_gated_rms_norm(normal.clone(), plain.clone(), normal.clone(), 1e-6, to);
            let want = gated_rms_norm::sigmoid_reference(normal.clone(), plain, normal, 1e-6, Precision::Full);
            near(flat(got.flatten(1, 2)), flat(want.flatten(1, 2)), "gated norm");
        }
    }
}

#[cfg(feature = "vulkan")]
#[test]
fn streams_on_vulkan_are_the_references() {
    if devices().iter().any(|(name, _)| *name == "vulkan") {
        streams_are_the_references::<burn::backend::Vulkan<f32, i32>>();
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use burn::tensor::{Tensor, TensorData};
    use perplexity_kernels::backend::{BlockSelection, PackedExperts};
    use perplexity_kernels::numeric::round_bf16;
    use perplexity_kernels::ops::sparse_attention;
    use perplexity_kernels::{EvaluatorBackend, Precision};
    use perplexity_model::experts::arithmetic::{IntegerExpert, IntegerMatrix};
    use perplexity_model::flash_next_tiny::words;
    use perplexity_model::formats::nvfp4_expert::{Geometry, Projection};
    use perplexity_model::layers::indexer;

    type Card = burn::backend::Cuda<f32, i32>;

    /// Random records: any code, any scale that is a number.
    fn records(geometry: &Geometry) -> Vec<u8> {
        let mut bytes: Vec<u8> = words("records")
            .map(|word| (word >> 20) as u8)
            .take(geometry.experts * geometry.stride)
            .collect();
        for record in bytes.chunks_exact_mut(geometry.stride) {
            for unit in record[..geometry.record_bytes].chunks_exact_mut(144) {
                unit[128..].iter_mut().for_each(|word| *word %= 0x7F);
            }
        }
        bytes
    }

    /// Every output of every choice, with the bits of the host's exact integers.
    #[test]
    fn packed_experts_have_the_hosts_bits() {
        let device = Default::default();
        // Experts, hidden, inner, rows, experts per row: blocks that fill no chunk, groups that fill no block of threads, tiles
        // of one row and of 64, experts without rows.
        let mut wrong = Vec::new();
        for [count, hidden, inner, rows, top_k] in [
            [8, 32, 16, 24, 3],
            [5, 48, 80, 131, 2],
            [3, 208, 144, 65, 1],
            [40, 2560, 640, 64, 10],
        ] {
            let geometry = Geometry::new(&[count as u64, hidden as u64, inner as u64]).unwrap();
            let bytes = records(&geometry);
            let mut random = words("rows").map(|word| (word >> 40) as f32 / (1u32 << 24) as f32);
            let mut next = |low: f32, high: f32| low + (high - low) * random.next().unwrap();
            // Exponents far apart, zeros, and a row with an infinity.
            let x: Vec<f32> = (0..rows * hidden)
                .map(|_| round_bf16(next(-1.0, 1.0) * 2f32.powi(next(-26.0, 2.0) as i32)))
                .enumerate()
                .map(|(i, x)| {
                    if i % 7 == 3 {
                        0.0
                    } else if i == (rows - 1) * hidden + 5 {
                        f32::INFINITY
                    } else {
                        x
                    }
                })
                .collect();
            let factors: Vec<[f32; 3]> = (0..count)
                .map(|_| [next(1e-4, 2e-3), next(1e-4, 2e-3), next(1e-4, 2e-3)])
                .collect();
            let scales: Vec<[f32; 3]> = (0..count)
                .map(|_| {
                    let g = next(1e-4, 1e-3);
                    [g, g, next(1e-3, 1e-1)]
                })
                .collect();
            // Expert 1 has no rows where there are others.
            let mut ids: Vec<usize> = Vec::new();
            for row in 0..rows {
                let all = (0..count).filter(|e| *e != 1).cycle();
                ids.extend(all.skip(if row % 3 == 0 { 0 } else { row }).take(top_k));
            }
            let mut order: Vec<u32> = (0..ids.len() as u32).collect();
            order.sort_by_key(|place| ids[*place as usize]);
            let counts: Vec<usize> = (0..count).map(|e| ids.iter().filter(|id| **id == e).count()).collect();

            let on_card: Tensor<Card, 2> = Tensor::from_data(TensorData::new(x.clone(), [rows, hidden]), &device);
            let on_card = Card::round(on_card, Precision::Bf16);
            let uploaded = Card::records(bytes.len(), &mut [(0, &bytes[..])].into_iter(), &device).unwrap();
            for four_bit in [false, true] {
                let multipliers = |e: usize| factors[e];
                let with_scales: Vec<[f32; 3]> = (0..count)
                    .map(|e| {
                        std::array::from_fn(|i| {
                            if four_bit {
                                factors[e][i] * scales[e][i]
                            } else {
                                factors[e][i]
                            }
                        })
                    })
                    .collect();
                let experts = PackedExperts {
                    records: &uploaded,
                    stride: geometry.stride,
                    inner,
                    factors: &with_scales,
                    scales: four_bit.then_some(&scales[..]),
                    counts: &counts,
                    choices: &order,
                    top_k,
                };
                let got = Card::packed_experts(&on_card, &experts, None).expect("a card of these kernels");
                let got: Vec<f32> = got.into_data().iter::<f32>().collect();
                for (e, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
                    let record = &bytes[e * geometry.stride..][..geometry.stride];
                    let expert = IntegerExpert {
                        matrices: Projection::ALL.map(|which| IntegerMatrix::unpack(&geometry, record, which).unwrap()),
                        multipliers: multipliers(e),
                    };
                    let places: Vec<usize> = (0..ids.len()).filter(|place| ids[*place] == e).collect();
                    assert_eq!(places.len(), *count);
                    let gathered: Vec<f32> = places
                        .iter()
                        .flat_map(|place| &x[place / top_k * hidden..][..hidden])
                        .copied()
                        .collect();
                    let want = expert.forward(&gathered, four_bit.then_some(scales[e]));
                    for (place, want) in places.iter().zip(want.chunks_exact(hidden)) {
                        let got = &got[place * hidden..][..hidden];
                        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                        let equal = got.iter().zip(want).filter(|pair| same(*pair)).count();
                        if equal < hidden {
                            wrong.push(format!(
                                "{count} {hidden} {inner} 4-bit {four_bit} expert {e} place {place}: {equal}"
                            ));
                        }
                    }
                }
                let finite = got.iter().filter(|x| x.is_finite()).count();
                let distinct = got
                    .iter()
                    .map(|x| x.to_bits())
                    .collect::<std::collections::BTreeSet<_>>()
                    .len();
                println!(
                    "{count} experts of {hidden} by {inner}, 4-bit {four_bit}: {finite} of {} finite, {distinct} values",
                    got.len()
                );
                assert!(finite > got.len() / 2 && distinct > 100, "outputs that tell something");
            }
        }
        assert!(
            wrong.is_empty(),
            "{} rows differ: {:?}",
            wrong.len(),
            &wrong[..wrong.len().min(5)]
        );
    }

    #[test]
    fn streams_are_the_references() {
        super::streams_are_the_references::<Card>();
    }

    fn random(name: &str, count: usize) -> Vec<f32> {
        let random = words(name).map(|word| (word >> 40) as f32 / (1u32 << 23) as f32 - 1.0);
        random.take(count).collect()
    }

    /// Scores that differ by more than their rounding decide as on the host; equal ones go to the lowest numbers.
    #[test]
    fn blocks_are_chosen_as_on_the_host() {
        let device = Default::default();
        let ratio = 4;
        for [batch, tokens, heads, width, first, count] in [
            [1, 24, 2, 16, 0, 2],
            [2, 40, 4, 128, 700, 100],
            [1, 9, 4, 128, 9000, 512],
            [3, 5, 3, 40, 61, 15],
        ] {
            let blocks = (first + tokens) / ratio;
            let q = random("queries", batch * tokens * heads * width);
            let mut keys = random("keys", batch * blocks * width);
            // Every third block has the key of the one before, every seventh no positive product.
            for block in 1..batch * blocks {
                if block % 3 == 0 {
                    keys.copy_within((block - 1) * width..block * width, block * width);
                } else if block % 7 == 0 {
                    keys[block * width..][..width].fill(0.0);
                }
            }
            let on_card: Tensor<Card, 4> =
                Tensor::from_data(TensorData::new(q.clone(), [batch, tokens, heads, width]), &device);
            let keys_on_card: Tensor<Card, 3> =
                Tensor::from_data(TensorData::new(keys.clone(), [batch, blocks, width]), &device);
            let got =
                Card::choose_blocks(&on_card, &keys_on_card, first, ratio, count).expect("a card of these kernels");
            assert_eq!(
                (got.first_position, got.ratio, got.blocks.len()),
                (first, ratio, batch * tokens)
            );
            for (query, chosen) in got.blocks.iter().enumerate() {
                let complete = (first + query % tokens + 1) / ratio;
                let q = &q[query * heads * width..][..heads * width];
                let keys = &keys[query / tokens * blocks * width..][..complete * width];
                let scores = indexer::scores(q, keys, width);
                let want = indexer::choose(&scores, count);
                assert!(chosen.is_sorted() && chosen.len() == want.len(), "{chosen:?}");
                // The lowest score that was taken, and what was taken instead of it.
                let least = want
                    .iter()
                    .map(|block| scores[*block as usize])
                    .fold(f64::INFINITY, f64::min);
                for block in chosen.iter().filter(|block| !want.contains(block)) {
                    let near = (scores[*block as usize] - least).abs();
                    assert!(
                        near > 0.0 && near < 1e-5,
                        "query {query}: block {block} is {near:e} from the least"
                    );
                }
            }
        }
    }

    #[test]
    fn attention_over_blocks_is_the_references() {
        let device = Default::default();
        for [batch, tokens, heads, kv_heads, dim, first, count] in [
            [1, 24, 4, 2, 16, 0, 2],
            [2, 7, 24, 2, 256, 300, 20],
            [1, 3, 3, 1, 64, 4000, 512],
        ] {
            let (ratio, capacity) = (4, first + tokens + 3);
            let tensor = |name: &str, shape: [usize; 4]| -> Tensor<Card, 4> {
                let x = TensorData::new(random(name, shape.iter().product()), shape);
                Card::round(Tensor::from_data(x, &device), Precision::Bf16)
            };
            let q = tensor("q", [batch, tokens, heads, dim]) * 3.0;
            let q = Card::round(q, Precision::Bf16);
            let keys = tensor("k", [batch, kv_heads, capacity, dim]);
            let values = tensor("v", [batch, kv_heads, capacity, dim]);
            let list = |query: usize| {
                let complete = (first + query % tokens + 1) / ratio;
                let scores: Vec<f64> = words(&format!("list {query}"))
                    .map(|x| (x >> 40) as f64)
                    .take(complete)
                    .collect();
                indexer::choose(&scores, count)
            };
            let selection = BlockSelection {
                ratio,
                first_position: first,
                blocks: (0..batch * tokens).map(list).collect(),
            };
            let flat = |x: Tensor<Card, 4>| x.into_data().iter::<f32>().collect::<Vec<f32>>();
            let wide = |x: &Tensor<Card, 4>| Card::round(x.clone(), Precision::Full);
            let want = sparse_attention::reference(wide(&q), wide(&keys), wide(&values), &selection, Precision::Full);
            let got = flat(Card::sparse_attention(q, keys, values, &selection, Precision::Bf16));
            let want = flat(want);
            let [error, size] = got.iter().zip(&want).fold([0.0f64; 2], |[error, size], (got, want)| {
                [error + f64::from(got - want).powi(2), size + f64::from(*want).powi(2)]
            });
            println!("{heads}/{kv_heads} heads of {dim}: {:.2e}", (error / size).sqrt());
            assert!((error / size).sqrt() < 6e-3, "{}", (error / size).sqrt());
        }
    }

    /// Against the operation in tensors: another order of two additions at most.
    #[test]
    fn mixtures_of_outputs_are_the_references() {
        let device = Default::default();
        let mut random = words("mixtures").map(|word| (word >> 40) as f32 / (1u32 << 23) as f32 - 1.0);
        let mut tensor = |shape: &[usize]| {
            let values: Vec<f32> = random.by_ref().take(shape.iter().product()).collect();
            TensorData::new(values, shape.to_vec())
        };
        for [batch, tokens, top_k, hidden] in [[1, 7, 3, 32], [2, 65, 10, 2560]] {
            let rows = batch * tokens;
            let outputs: Tensor<Card, 3> = Tensor::from_data(tensor(&[rows, top_k, hidden]), &device);
            let weights: Tensor<Card, 2> = Tensor::from_data(tensor(&[rows, top_k]), &device);
            let shared: Tensor<Card, 3> = Tensor::from_data(tensor(&[batch, tokens, hidden]), &device);
            let scores: Tensor<Card, 3> = Tensor::from_data(tensor(&[batch, tokens, 1]), &device);
            let [outputs, shared] = [outputs, shared].map(|x| Card::round(x, Precision::Bf16));
            let want = perplexity_kernels::ops::packed_experts::reference(
                outputs.clone(),
                weights.clone(),
                shared.clone(),
                scores.clone(),
                Precision::Full,
            );
            let got = Card::combine_experts(outputs, weights, shared, scores, Precision::Bf16);
            let values = |x: Tensor<Card, 3>| x.into_data().iter::<f32>().collect::<Vec<f32>>();
            for (got, want) in values(got).iter().zip(values(want)) {
                assert!((got - want).abs() <= 0.005 * want.abs().max(0.05), "{got}, not {want}");
            }
        }
    }
}
