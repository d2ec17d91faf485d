//! The packed cache and attention over it.

use perplexity_kernels::backend::BlockSelection;
use perplexity_kv::attention::{EightBitPv, Emulation, KernelOptions, attend, attend_exact};
use perplexity_kv::codec::{Window, decode_rows, encode_rows};
use perplexity_kv::codecs::vq2;
use perplexity_kv::conformance::gaussian;
use perplexity_kv::registry::{KvPair, variants};
use perplexity_kv::store::{LayerStore, ReadRows};

const DIM: usize = 256;
const KV_HEADS: usize = 2;
const HEADS: usize = 4;

struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

fn data(tokens: usize) -> Data {
    Data {
        q: gaussian(1, tokens * HEADS * DIM),
        k: gaussian(2, tokens * KV_HEADS * DIM),
        v: gaussian(3, tokens * KV_HEADS * DIM),
    }
}

/// Outputs of a sequence processed in passes of `pass` tokens, and the cache after it.
fn run(pair: &KvPair, data: &Data, pass: usize, window: bool, emulation: Emulation) -> (Vec<f32>, LayerStore) {
    let mut store = LayerStore::new(pair, window, KV_HEADS, DIM);
    let mut out = Vec::new();
    let passes = data.q.chunks(pass * HEADS * DIM);
    let rows = data
        .k
        .chunks(pass * KV_HEADS * DIM)
        .zip(data.v.chunks(pass * KV_HEADS * DIM));
    for (q, (k, v)) in passes.zip(rows) {
        let first = store.k.tokens();
        store.k.append(k);
        store.v.append(v);
        out.extend(attend(&store, Some(pair), q, HEADS, first, None, emulation));
    }
    (out, store)
}

fn relative(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(a - b))).sum();
    (error / b.iter().map(|b| square(f64::from(*b))).sum::<f64>()).sqrt()
}

/// Causal attention written out once more, in f64 on the unstored rows.
fn plain_attention(data: &Data, tokens: usize) -> Vec<f32> {
    let mut out = Vec::new();
    for t in 0..tokens {
        for h in 0..HEADS {
            let q = &data.q[(t * HEADS + h) * DIM..][..DIM];
            let row =
                |rows: &[f32], j: usize, d: usize| f64::from(rows[(j * KV_HEADS + h / (HEADS / KV_HEADS)) * DIM + d]);
            let score = |j: usize| (0..DIM).map(|d| f64::from(q[d]) * row(&data.k, j, d)).sum::<f64>() / 16.0;
            let weights: Vec<f64> = (0..=t).map(|j| score(j).exp()).collect();
            let sum: f64 = weights.iter().sum();
            out.extend((0..DIM).map(|d| ((0..=t).map(|j| weights[j] * row(&data.v, j, d)).sum::<f64>() / sum) as f32));
        }
    }
    out
}

#[test]
fn attention_over_a_bf16_cache_is_attention() {
    let data = data(37);
    let (out, _) = run(&"bf16".parse().unwrap(), &data, 10, true, Emulation::Format);
    assert!(relative(&out, &plain_attention(&data, 37)) < 1e-6);
}

#[test]
fn rotated_caches_give_unrotated_attention_up_to_their_error() {
    let data = data(37);
    let exact = plain_attention(&data, 37);
    // An output left in the rotated basis would be off by about sqrt 2.
    for (name, bound) in [
        ("int8", 0.02),
        ("int8@plain", 0.02),
        ("fp8", 0.08),
        ("nvfp4", 0.2),
        ("rk8v4@a", 0.2),
    ] {
        let (out, _) = run(&name.parse().unwrap(), &data, 37, true, Emulation::Format);
        let error = relative(&out, &exact);
        assert!(error > 1e-4 && error < bound, "{name}: {error}");
    }
}

#[test]
fn leaving_out_the_output_rotation_would_show() {
    let data = data(37);
    let pair: KvPair = "nvfp4".parse().unwrap();
    let (mut out, store) = run(&pair, &data, 37, true, Emulation::Format);
    store.v.codec().basis().forward(&mut out, DIM);
    assert!((relative(&out, &plain_attention(&data, 37)) - 2f64.sqrt()).abs() < 0.1);
}

#[test]
fn a_pass_split_changes_no_stored_row_and_no_output() {
    let data = data(150);
    for variant in variants() {
        let pair = KvPair::from(variant);
        let (whole, store) = run(&pair, &data, 150, true, Emulation::Format);
        for pass in [1, 7, 64] {
            let (split, split_store) = run(&pair, &data, pass, true, Emulation::Format);
            assert_eq!(whole, split, "{} in passes of {pass}", pair.name);
            assert_eq!(store.k.packed(), split_store.k.packed(), "{}", pair.name);
            assert_eq!(store.v.packed(), split_store.v.packed(), "{}", pair.name);
        }
    }
}

#[test]
fn a_second_run_gives_the_same_bits() {
    let data = data(150);
    for variant in variants() {
        let pair = KvPair::from(variant);
        for emulation in [Emulation::Format, Emulation::Kernel(KernelOptions::default())] {
            let bits = |out: Vec<f32>| out.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let runs = [0, 1].map(|_| bits(run(&pair, &data, 64, true, emulation).0));
            assert_eq!(runs[0], runs[1], "{}", pair.name);
            assert!(
                runs[0].iter().all(|word| f32::from_bits(*word).is_finite()),
                "{}",
                pair.name
            );
        }
    }
}

#[test]
fn a_later_token_changes_no_earlier_output() {
    for name in ["int8", "vq2", "kivi2"] {
        let mut data = data(100);
        let pair: KvPair = name.parse().unwrap();
        let (before, _) = run(&pair, &data, 100, true, Emulation::Format);
        let at = 70 * KV_HEADS * DIM;
        data.k[at..at + DIM].fill(3.0);
        data.v[at..at + DIM].fill(-2.0);
        let (after, _) = run(&pair, &data, 100, true, Emulation::Format);
        assert_eq!(before[..70 * HEADS * DIM], after[..70 * HEADS * DIM], "{name}");
        assert_ne!(before[70 * HEADS * DIM..], after[70 * HEADS * DIM..], "{name}");
    }
}

#[test]
fn every_column_is_read_from_its_own_row() {
    // One-hot attention: the query that matches key j alone must return value j, for every j.
    let tokens = 130;
    let mut k = vec![0.0; tokens * KV_HEADS * DIM];
    for j in 0..tokens {
        for head in 0..KV_HEADS {
            k[(j * KV_HEADS + head) * DIM + j] = 64.0;
        }
    }
    let mut v = gaussian(9, tokens * KV_HEADS * DIM);
    v.iter_mut().for_each(|value| *value *= 4.0);
    for name in ["bf16", "int8", "nvfp4", "rk8v4"] {
        let mut store = LayerStore::new(&name.parse().unwrap(), true, KV_HEADS, DIM);
        store.k.append(&k);
        store.v.append(&v);
        for j in 0..tokens {
            let mut q = vec![0.0; HEADS * DIM];
            (0..HEADS).for_each(|head| q[head * DIM + j] = 64.0);
            let out = attend(&store, None, &q, HEADS, tokens - 1, None, Emulation::Format);
            for head in 0..HEADS {
                let expected = &v[(j * KV_HEADS + head / 2) * DIM..][..DIM];
                assert!(
                    relative(&out[head * DIM..(head + 1) * DIM], expected) < 0.13,
                    "{name}, column {j}"
                );
            }
        }
    }
}

#[test]
fn the_exact_window_is_the_first_64_keys_and_768_before_the_query() {
    let exact = |key: usize, query: usize| vq2::WINDOW.exact(key, query, 1);
    for query in [0, 63, 64, 768, 832, 833, 4095] {
        let count = (0..=query).filter(|key| exact(*key, query)).count();
        // 64 sinks, 768 before the query and the query itself, without overlap from 833 on.
        assert_eq!(count, if query <= 832 { query + 1 } else { 64 + 769 }, "query {query}");
    }
    assert!(exact(64, 832) && !exact(64, 833) && exact(63, 833) && exact(65, 833));
    // Published shares of (query, key) pairs read exactly.
    let share = |queries: std::ops::Range<usize>| {
        let exact: usize = queries.clone().map(|q| if q <= 832 { q + 1 } else { 833 }).sum();
        exact as f64 / queries.map(|q| q + 1).sum::<usize>() as f64
    };
    for (queries, published) in [
        (0..4096, 0.365),
        (2048..4096, 0.271),
        (0..8192, 0.193),
        (0..65_536, 0.025),
        (32_768..65_536, 0.017),
    ] {
        assert!(
            (share(queries.clone()) - published).abs() < 5e-4 + 1e-9,
            "{queries:?}: {}",
            share(queries.clone())
        );
    }
}

#[test]
fn blocks_of_tokens_stay_exact_until_they_are_complete_and_old() {
    let window = Window {
        sinks: 0,
        recent: 96,
        ..vq2::WINDOW
    };
    for query in 0..400usize {
        for key in 0..=query {
            let complete_and_old = query >= (key / 32 + 1) * 32 + 96;
            assert_eq!(window.exact(key, query, 32), !complete_and_old);
        }
        let first = window.first_recent(query, 32);
        assert!(first == 0 || !window.exact(first - 1, query, 32), "query {query}");
        assert!(window.exact(first, query, 32), "query {query}");
    }
}

#[test]
fn windowed_codecs_read_exact_copies_only_inside_the_window() {
    let tokens = 1000;
    let data = data(tokens);
    let pair: KvPair = "vq2".parse().unwrap();
    let last = |out: &[f32], t: usize| out[t * HEADS * DIM..(t + 1) * HEADS * DIM].to_vec();
    let (on, store) = run(&pair, &data, 128, true, Emulation::Format);
    let (off, bare) = run(&pair, &data, 128, false, Emulation::Format);
    let (int8, _) = run(&"k=nvfp4,v=nvfp4".parse().unwrap(), &data, 128, true, Emulation::Format);
    let exact = plain_attention(&data, tokens);
    // Up to query 832 every key is exact: the error is that of INT8.
    assert!(relative(&last(&on, 832), &last(&exact, 832)) < 0.02);
    // Beyond, some keys are codes; with the window off all are.
    let (with, without) = (
        relative(&last(&on, 999), &last(&exact, 999)),
        relative(&last(&off, 999), &last(&exact, 999)),
    );
    assert!(with > 0.03 && with < without && without > 0.3, "{with} {without}");
    assert!(relative(&last(&int8, 999), &last(&exact, 999)) < without);
    // The copies are bounded: 64 sinks and what the last pass could still read.
    assert_eq!(bare.k.bytes(), (tokens * KV_HEADS * 66, 0));
    let (codes, copies) = store.k.bytes();
    assert_eq!(codes, tokens * KV_HEADS * 66);
    assert!(copies <= (64 + 768 + 128) * KV_HEADS * 264, "{copies}");
}

#[test]
fn a_nan_row_stays_visible_and_touches_no_other_head() {
    let mut data = data(20);
    data.v[5 * KV_HEADS * DIM + 3] = f32::NAN;
    for variant in variants() {
        let pair = KvPair::from(variant);
        let (out, _) = run(&pair, &data, 20, true, Emulation::Format);
        for (index, row) in out.chunks_exact(DIM).enumerate() {
            let (t, head) = (index / HEADS, index % HEADS);
            assert_eq!(
                row.iter().any(|x| x.is_nan()),
                t >= 5 && head < 2,
                "{}: token {t} head {head}",
                pair.name
            );
        }
    }
}

#[test]
fn stored_scales_are_those_of_the_rows() {
    // A cache that took its scales from elsewhere (1.0, a warm-up) would not see that these rows are an eighth.
    let rows = gaussian(5, 64 * KV_HEADS * DIM);
    let eighth: Vec<f32> = rows.iter().map(|value| value / 8.0).collect();
    for variant in variants() {
        let pair = KvPair::from(variant);
        for (side, codec) in [("K", pair.k.host()), ("V", pair.v.host())] {
            let stored = [&rows, &eighth].map(|rows| encode_rows(&*codec, rows, KV_HEADS, DIM));
            assert_ne!(stored[0], stored[1], "{} {side}", pair.name);
            let [whole, small] = stored.map(|bytes| decode_rows(&*codec, &bytes, KV_HEADS, DIM));
            let small: Vec<f32> = small.iter().map(|value| value * 8.0).collect();
            // A factor of 8 is exact in most scales; subnormal E4M3 scales and radii at a boundary move a few values.
            assert!(
                relative(&small, &whole) < 0.05,
                "{} {side}: {}",
                pair.name,
                relative(&small, &whole)
            );
        }
    }
}

#[test]
fn what_buffers_held_before_reaches_no_result() {
    for variant in variants() {
        let pair = KvPair::from(variant);
        for codec in [pair.k.host(), pair.v.host()] {
            let (layout, block) = (codec.layout(DIM), codec.block_tokens() * DIM);
            let rows = gaussian(6, block);
            let results = [(0u16, 0.0f32), (u16::MAX, f32::NAN)].map(|(word, value)| {
                let mut entries = vec![word; layout.entries()];
                let mut bytes = vec![word as u8; layout.bytes()];
                let mut decoded = vec![value; block];
                codec.encode(&rows, &mut entries);
                layout.pack(&entries, &mut bytes);
                entries.fill(word);
                layout.unpack(&bytes, &mut entries);
                codec.decode(&entries, &mut decoded);
                (bytes, decoded)
            });
            assert!(results[1].1.iter().all(|value| value.is_finite()), "{}", pair.name);
            assert_eq!(results[0], results[1], "{}", pair.name);
        }
    }
}

#[test]
fn the_fast_kernel_sums_a_tile_in_fp16() {
    // Equal scores, so every p is 1. Values 127 (scale 1) for 32 keys, then one 1 (scale FP16(1/127)), then zeros: the
    // sum 4064 + 0.99994 is between the FP16 numbers 4064 and 4066.
    let mut data = Data {
        q: vec![0.0; 64 * HEADS * DIM],
        k: gaussian(7, 64 * KV_HEADS * DIM),
        v: vec![0.0; 64 * KV_HEADS * DIM],
    };
    data.v[..32 * KV_HEADS * DIM].fill(127.0);
    data.v[32 * KV_HEADS * DIM..33 * KV_HEADS * DIM].fill(1.0);
    let pair: KvPair = "int8".parse().unwrap();
    let last = |original_int8| {
        let options = KernelOptions {
            original_int8,
            eight_bit_pv: EightBitPv::Off,
            ..KernelOptions::default()
        };
        let (out, _) = run(&pair, &data, 64, true, Emulation::Kernel(options));
        out[63 * HEADS * DIM]
    };
    assert_eq!(last(false), 4064.0 / 64.0);
    let one = half::f16::from_f32(127.0 * half::f16::from_f32(1.0 / 127.0).to_f32()).to_f32();
    assert!((last(true) - (4064.0 + one) / 64.0).abs() < 1e-5, "{}", last(true));
    assert!(last(true) > 63.51);
}

#[test]
fn large_values_do_not_overflow_the_fast_kernels_sums() {
    // 64 equal values of 3e4 add up to 1.9e6, thirty times the largest FP16 number.
    let tokens = 64;
    let data = Data {
        q: vec![0.0; tokens * HEADS * DIM],
        k: gaussian(8, tokens * KV_HEADS * DIM),
        v: vec![30_000.0; tokens * KV_HEADS * DIM],
    };
    for name in ["int8", "fp8"] {
        let kernel = Emulation::Kernel(KernelOptions {
            eight_bit_pv: EightBitPv::Off,
            ..KernelOptions::default()
        });
        let (out, _) = run(&name.parse().unwrap(), &data, tokens, true, kernel);
        assert!(
            out.iter().all(|value| (value / 30_000.0 - 1.0).abs() < 2e-3),
            "{name}: {:?}",
            &out[out.len() - 4..]
        );
    }
}

/// A query that names its keys reads their rows as a dense query reads them, exact windows included, and no others.
#[test]
fn a_query_that_names_its_keys_reads_those_alone() {
    let (tokens, first_position) = (1100usize, 1090usize);
    let data = data(tokens);
    for name in ["bf16", "int8", "rk4v4", "vq2", "k4v2", "kivi4"] {
        let mut store = LayerStore::new(&name.parse().unwrap(), true, KV_HEADS, DIM);
        store.k.append(&data.k);
        store.v.append(&data.v);
        let selection = BlockSelection {
            ratio: 4,
            first_position,
            blocks: (first_position..tokens)
                .map(|p| (0..(p as u32 + 1) / 4).filter(|block| block * 7 % 5 < 2).collect())
                .collect(),
        };
        let queries = &data.q[first_position * HEADS * DIM..];
        let got = attend(
            &store,
            None,
            queries,
            HEADS,
            first_position,
            Some(&selection),
            Emulation::Format,
        );

        // Once more in f64, row by row.
        let mut q = queries.to_vec();
        store.query_basis(&mut q);
        let (k, v) = (store.k.read(), store.v.read());
        let mut want = Vec::new();
        let mut exact_rows = 0;
        for (index, q) in q.chunks(DIM).enumerate() {
            let (query, head) = (index / HEADS, index % HEADS / (HEADS / KV_HEADS));
            let p = first_position + query;
            let tail = (p + 1) / 4 * 4..=p;
            let blocks = selection.blocks[query]
                .iter()
                .flat_map(|block| 4 * block..4 * block + 4);
            let keys: Vec<usize> = blocks.map(|key| key as usize).chain(tail).collect();
            let mut row = |side: &ReadRows, key: usize| -> Vec<f64> {
                let at = (key * KV_HEADS + head) * DIM;
                let exact = side.exact.as_ref().filter(|exact| exact.reads(key, p));
                exact_rows += usize::from(exact.is_some());
                let rows = exact.map_or(&side.coded, |exact| &exact.rows);
                rows[at..at + DIM].iter().map(|x| f64::from(*x)).collect()
            };
            let scores: Vec<f64> = keys
                .iter()
                .map(|key| row(&k, *key).iter().zip(q).map(|(k, q)| k * f64::from(*q)).sum::<f64>() / 16.0)
                .collect();
            let sum: f64 = scores.iter().map(|score| score.exp()).sum();
            let mut out = vec![0.0; DIM];
            for (key, score) in keys.iter().zip(&scores) {
                let row = row(&v, *key);
                out.iter_mut()
                    .zip(row)
                    .for_each(|(out, v)| *out += score.exp() / sum * v);
            }
            want.extend(out.into_iter().map(|x| x as f32));
        }
        store.output_basis(&mut want);
        assert!(relative(&got, &want) < 1e-6, "{name}: {}", relative(&got, &want));
        assert_eq!(exact_rows > 0, store.k.has_window() || store.v.has_window(), "{name}");
        let f64s = attend_exact(&store, queries, HEADS, first_position, Some(&selection));
        let f64s: Vec<f32> = f64s.into_iter().map(|x| x as f32).collect();
        assert!(relative(&f64s, &want) < 1e-6, "{name} in f64");
        let dense = attend(&store, None, queries, HEADS, first_position, None, Emulation::Format);
        assert!(relative(&dense, &want) > 1e-2, "{name}: the other keys count");
    }
}
