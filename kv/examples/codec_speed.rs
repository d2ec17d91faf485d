//! Median time to encode and to decode one row of 256 values, per coder, on one thread.
//!
//! `cargo run --release --example codec_speed -p perplexity-kv`

use perplexity_kv::codec::HostCodec;
use perplexity_kv::conformance::{HEAD_DIM, gaussian};
use perplexity_kv::registry::variants;
use std::hint::black_box;
use std::time::Instant;

/// Rows per sample: long enough for the clock, short enough to stay in the cache.
const ROWS: usize = 64;
const SAMPLES: usize = 101;

/// Median nanoseconds per row of `work`, which handles [`ROWS`] rows.
fn median(mut work: impl FnMut()) -> f64 {
    work();
    let mut times: Vec<f64> = (0..SAMPLES)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64() * 1e9 / ROWS as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[SAMPLES / 2]
}

fn main() {
    println!(
        "{:<14} {:>14} {:>14}   median of {SAMPLES} samples of {ROWS} rows",
        "", "encode ns/row", "decode ns/row"
    );
    let mut seen: Vec<String> = Vec::new();
    for variant in variants() {
        for (side, name) in [(variant.k, "K"), (variant.v, "V")] {
            let codec = side.host();
            // A coder shared by several pairs is measured once, under the first name.
            let description = format!("{codec:?}");
            if seen.contains(&description) {
                continue;
            }
            seen.push(description);
            let (encode, decode) = measure(&*codec);
            println!(
                "{:<14} {encode:>14.0} {decode:>14.0}",
                format!("{} {name}", variant.name)
            );
        }
    }
}

fn measure(codec: &dyn HostCodec) -> (f64, f64) {
    let rows = gaussian(1, ROWS * HEAD_DIM);
    let (layout, block) = (codec.layout(HEAD_DIM), codec.block_tokens() * HEAD_DIM);
    let mut entries = vec![0; layout.entries()];
    let mut packed = vec![0; rows.len() / block * layout.bytes()];
    let mut stored = rows.clone();
    let encode = median(|| {
        stored.copy_from_slice(&rows);
        codec.basis().forward(&mut stored, HEAD_DIM);
        for (rows, bytes) in stored.chunks_exact(block).zip(packed.chunks_exact_mut(layout.bytes())) {
            codec.encode(black_box(rows), &mut entries);
            layout.pack(&entries, bytes);
        }
    });
    let mut decoded = vec![0.0; block];
    let decode = median(|| {
        for bytes in packed.chunks_exact(layout.bytes()) {
            layout.unpack(black_box(bytes), &mut entries);
            codec.decode(&entries, &mut decoded);
            black_box(&decoded);
        }
    });
    (encode, decode)
}
