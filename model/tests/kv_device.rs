//! What attention reads from a cache on a device: the codec's rows, as on the host, and nothing else.
#![cfg(all(feature = "flex", any(feature = "cuda", feature = "vulkan")))]

use burn::tensor::{Tensor, TensorData};
use burn_flex::Flex;
use perplexity_kernels::Precision::{self, Bf16, Full};
use perplexity_kernels::{EvaluatorBackend, backend::BlockSelection};
use perplexity_kv::codec::bytes_per_row;
use perplexity_kv::conformance::gaussian;
use perplexity_kv::options::KvOptions;
use perplexity_model::layers::kv_cache::KvCache;

const BATCH: usize = 2;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 256;
const CAPACITY: usize = 140;
const PASSES: [usize; 3] = [65, 1, 37];

fn rows<B: EvaluatorBackend>(seed: u64, tokens: usize, heads: usize) -> Tensor<B, 4> {
    let values = gaussian(seed, BATCH * tokens * heads * HEAD_DIM);
    let data = TensorData::new(values, [BATCH, tokens, heads, HEAD_DIM]);
    Tensor::from_data(data, &Default::default())
}

/// Outputs of all passes.
fn attend<B: EvaluatorBackend>(cache: &mut KvCache<B>, to: Precision) -> Vec<f32> {
    let (mut first, mut outputs, none) = (0, Vec::new(), None::<&BlockSelection>);
    for (seed, tokens) in PASSES.into_iter().enumerate() {
        // As the layers hand them over: observable in 16 bits where the route says so.
        let row = |seed, heads| B::round(rows::<B>(seed, tokens, heads), to);
        cache.append(row(3 * seed as u64 + 1, KV_HEADS), row(3 * seed as u64 + 2, KV_HEADS));
        let o = cache.attend_from(row(3 * seed as u64 + 3, HEADS), first, none, to);
        outputs.extend(o.into_data().iter::<f32>());
        first += tokens;
    }
    outputs
}

/// Root mean square of the difference, relative.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let apart = square(&mut a.iter().zip(b).map(|(a, b)| a - b));
    (apart / square(&mut b.iter().copied())).sqrt()
}

fn attention_reads_the_codecs_rows<B: EvaluatorBackend>() {
    let shape = [BATCH, KV_HEADS, CAPACITY, HEAD_DIM];
    let device = Default::default();
    let plain = attend(&mut KvCache::<Flex>::new(shape, &Default::default()), Full);
    let packed = [
        "int8",
        "int8@plain",
        "fp8",
        "nvfp4",
        "nvfp4@single",
        "k8v4",
        "rk8v4",
        "rk8v4@a",
    ];
    let decoded = ["rk4v4", "turbo4", "k=int8,v=turbo4", "vq2"];
    for (names, is_packed) in [(&packed[..], true), (&decoded[..], false)] {
        for name in names {
            let kv = KvOptions {
                window: false,
                ..KvOptions::new(name.parse().unwrap())
            };
            let host = attend(&mut KvCache::<Flex>::coded(shape, &kv, 0), Full);
            for (to, rest) in [(Full, 1e-5), (Bf16, 3e-3)] {
                let mut cache = KvCache::<B>::on_device(shape, &kv, 0, to, &device).expect("single tokens, no window");
                let here = attend(&mut cache, to);
                assert!(here.iter().all(|x| x.is_finite()));
                let (from_host, from_plain) = (distance(&here, &host), distance(&here, &plain));
                println!("{name} in {to:?}: {from_host:.1e} from the host's codec, {from_plain:.1e} from plain rows");
                assert!(
                    from_host < rest,
                    "{name} in {to:?}: {from_host:e} from the host's codec"
                );
                assert!(
                    from_plain > 2.0 * from_host,
                    "{name} in {to:?}: {from_plain:e} from plain rows, {from_host:e} from the host's codec"
                );
                if is_packed {
                    let pair = kv.dtype.layer(0);
                    let declared: f64 = [&pair.k, &pair.v]
                        .map(|side| bytes_per_row(side.spec(), HEAD_DIM))
                        .iter()
                        .sum();
                    let tokens: usize = PASSES.iter().sum();
                    let (held, copies) = cache.packed_bytes().expect("a codec");
                    let excess = held as f64 / (BATCH * KV_HEADS * tokens) as f64 - declared;
                    // Rows end at whole words.
                    assert!(
                        (0.0..=4.0).contains(&excess) && copies == 0,
                        "{name}: {excess} bytes more per token"
                    );
                }
            }
        }
    }
}

#[cfg(feature = "vulkan")]
#[test]
fn attention_on_vulkan_reads_the_codecs_rows() {
    attention_reads_the_codecs_rows::<burn::backend::Vulkan<f32, i32, u8>>();
}

#[cfg(feature = "cuda")]
#[test]
fn attention_on_cuda_reads_the_codecs_rows() {
    attention_reads_the_codecs_rows::<burn::backend::Cuda<f32, i32>>();
}
