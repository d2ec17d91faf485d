//! The tensor form of every coder equals its host form on Flex.

use burn::tensor::{Tensor, TensorData};
use perplexity_kv::attention::{Emulation, attend};
use perplexity_kv::conformance::{HEAD_DIM, gaussian, tensor_equals_host};
use perplexity_kv::registry::{KvPair, variants};
use perplexity_kv::store::LayerStore;
use perplexity_kv::tensor_store::TensorStore;

type Tested = burn_flex::Flex;

#[test]
fn tensors_equal_host_rows() {
    for variant in variants() {
        for side in [variant.k, variant.v] {
            tensor_equals_host::<Tested>(&*side.host(), &*side.tensor(), HEAD_DIM, 5);
        }
    }
}

fn tensor(values: &[f32], heads: usize) -> Tensor<Tested, 3> {
    let shape = [values.len() / (heads * HEAD_DIM), heads, HEAD_DIM];
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &Default::default())
}

#[test]
fn the_device_cache_attends_as_the_host_cache_in_every_pass() {
    const HEADS: usize = 4;
    const KV_HEADS: usize = 2;
    // Long enough for the windows of 768 and of 96 to close, in passes that end inside blocks.
    for (name, passes) in [
        ("bf16", [5, 60]),
        ("fp8", [5, 60]),
        ("rk2v4-e8", [1, 70]),
        ("turbo3", [31, 34]),
        ("kivi2", [130, 53]),
        ("vq2", [850, 37]),
    ] {
        let pair: KvPair = name.parse().unwrap();
        let mut host = LayerStore::new(&pair, true, KV_HEADS, HEAD_DIM);
        let mut device = TensorStore::<Tested>::new(&pair, true, KV_HEADS, HEAD_DIM);
        let mut first = 0;
        for (seed, tokens) in passes.into_iter().enumerate() {
            let k = gaussian(10 + seed as u64, tokens * KV_HEADS * HEAD_DIM);
            let v = gaussian(20 + seed as u64, tokens * KV_HEADS * HEAD_DIM);
            let q = gaussian(30 + seed as u64, tokens * HEADS * HEAD_DIM);
            host.k.append(&k);
            host.v.append(&v);
            device.k.append(tensor(&k, KV_HEADS));
            device.v.append(tensor(&v, KV_HEADS));
            let want = attend(&host, None, &q, HEADS, first, None, Emulation::Format);
            let got: Vec<f32> = device.attend(tensor(&q, HEADS), first).into_data().into_vec().unwrap();
            let worst = got
                .iter()
                .zip(&want)
                .map(|(got, want)| (got - want).abs())
                .fold(0.0, f32::max);
            assert!(worst < 1e-4, "{name}, pass {seed}: {worst}");
            first += tokens;
        }
        assert_eq!(device.k.tokens(), first);
    }
}
