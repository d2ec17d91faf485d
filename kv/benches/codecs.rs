//! Time to encode and to decode one row of 256 values, per coder, on one thread.
//!
//! ```text
//! cargo bench -p perplexity-kv [-- FILTER]        a FILTER such as vq2 or decode
//! ```
//!
//! A measured step handles 64 rows, rotation and packing included; the throughput printed is rows per second.

use criterion::{BenchmarkId, Criterion, Throughput};
use perplexity_kv::codec::HostCodec;
use perplexity_kv::codecs::vq2;
use perplexity_kv::conformance::{HEAD_DIM, gaussian};
use perplexity_kv::registry::variants;
use std::hint::black_box;
use std::sync::Arc;

/// Rows per step: long enough for the clock, short enough to stay in the cache.
const ROWS: usize = 64;

/// Every coder once, under the first pair that has it.
fn coders() -> Vec<(String, Arc<dyn HostCodec>)> {
    let mut seen: Vec<String> = Vec::new();
    let mut coders = Vec::new();
    for variant in variants() {
        for (side, name) in [(variant.k, "K"), (variant.v, "V")] {
            let codec = side.host();
            let description = format!("{codec:?}");
            if !seen.contains(&description) {
                seen.push(description);
                coders.push((format!("{} {name}", variant.name), codec));
            }
        }
    }
    coders
}

fn codecs(criterion: &mut Criterion) {
    let rows = gaussian(1, ROWS * HEAD_DIM);
    for (name, codec) in coders() {
        let (layout, block) = (codec.layout(HEAD_DIM), codec.block_tokens() * HEAD_DIM);
        let mut entries = vec![0; layout.entries()];
        let mut packed = vec![0; rows.len() / block * layout.bytes()];
        let mut stored = rows.clone();
        let mut decoded = vec![0.0; block];

        let mut group = criterion.benchmark_group("row");
        group.throughput(Throughput::Elements(ROWS as u64));
        group.bench_function(BenchmarkId::new("encode", &name), |bench| {
            bench.iter(|| {
                stored.copy_from_slice(black_box(&rows));
                codec.basis().forward(&mut stored, HEAD_DIM);
                for (rows, bytes) in stored.chunks_exact(block).zip(packed.chunks_exact_mut(layout.bytes())) {
                    codec.encode(rows, &mut entries);
                    layout.pack(&entries, bytes);
                }
            });
        });
        group.bench_function(BenchmarkId::new("decode", &name), |bench| {
            bench.iter(|| {
                for bytes in packed.chunks_exact(layout.bytes()) {
                    layout.unpack(black_box(bytes), &mut entries);
                    codec.decode(&entries, &mut decoded);
                    black_box(&decoded);
                }
            });
        });
        group.finish();
    }
}

/// The search of `vq2` for the nearest of 512 patterns, over lanes of patterns and by its definition.
fn vq2_search(criterion: &mut Criterion) {
    let words = gaussian(2, ROWS * vq2::WORD);
    let mut group = criterion.benchmark_group("vq2 search");
    group.throughput(Throughput::Elements(ROWS as u64));
    type Search = fn(&[f32; vq2::WORD], bool) -> usize;
    let searches: [(&str, Search); 2] = [
        ("lanes", vq2::nearest_pattern),
        ("definition", vq2::nearest_pattern_reference),
    ];
    for (name, search) in searches {
        group.bench_function(name, |bench| {
            bench.iter(|| {
                for (at, word) in black_box(&words).as_chunks().0.iter().enumerate() {
                    black_box(search(word, at % 2 == 1));
                }
            });
        });
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    codecs(&mut criterion);
    vq2_search(&mut criterion);
    criterion.final_summary();
}
