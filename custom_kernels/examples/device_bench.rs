//! Times every operation and the whole layer stack of the 27B geometry on a CUDA card, with random bfloat16 weights.
//!
//! `device_bench [operations] [packed] [stack] [long]`: Markdown tables on standard output. Warm-up runs first, medians after.

use std::time::Instant;

use burn::backend::Cuda;
use burn::tensor::{DType, Distribution, FloatDType, Tensor, backend::Backend};
use perplexity_kernels::backend::{DeltaHeads, EvaluatorBackend, HeadRequest, RotaryTable};
use perplexity_kernels::cube_backend::CubeWeight;
use perplexity_kernels::ops::expand_weight::{Packing, StoredMatrix, StoredRows};
use perplexity_kernels::ops::rotary::frequencies;
use perplexity_kernels::precision::Precision::{Bf16, Full};

type B = Cuda<f32, i32>;
type Weight = <B as EvaluatorBackend>::Weight;
type Device = <B as burn::tensor::backend::BackendTypes>::Device;

const HIDDEN: usize = 5120;
const INNER: usize = 17408;
const HEADS: usize = 24;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 256;
const ROTARY_DIM: usize = 64;
const VOCABULARY: usize = 248_320;
const PUBLIC: usize = 248_077;
const LAYERS: usize = 64;
const EPS: f32 = 1e-6;
const DELTA: DeltaHeads = DeltaHeads {
    key_heads: 16,
    value_heads: 48,
    key_dim: 128,
    value_dim: 128,
};
const VALUES: usize = 48 * 128;

/// Uniform values of standard deviation `std`, bfloat16.
fn random<const D: usize>(shape: [usize; D], std: f64, device: &Device) -> Tensor<B, D> {
    let bound = std * 3f64.sqrt();
    Tensor::<B, D>::random(shape, Distribution::Uniform(-bound, bound), device).cast(FloatDType::BF16)
}

fn matrix(out: usize, width: usize, device: &Device) -> Weight {
    random([out, width], 1.0 / (width as f64).sqrt(), device).into()
}

fn sync(device: &Device) {
    B::sync(device).expect("the device answers");
}

/// Median seconds of one `run` in batches of `repeat`.
fn median(device: &Device, repeat: usize, mut run: impl FnMut()) -> f64 {
    run();
    sync(device);
    let mut times: Vec<f64> = (0..5)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..repeat {
                run();
            }
            sync(device);
            start.elapsed().as_secs_f64() / repeat as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

struct Mlp {
    norm: Tensor<B, 1>,
    gate: Weight,
    up: Weight,
    down: Weight,
}

enum Mixer {
    Attention {
        q: Weight,
        gate: Weight,
        k: Weight,
        v: Weight,
        q_norm: Tensor<B, 1>,
        k_norm: Tensor<B, 1>,
        out: Weight,
    },
    Delta {
        qkv: Weight,
        z: Weight,
        a: Weight,
        b: Weight,
        conv: Tensor<B, 2>,
        a_log: Tensor<B, 1>,
        dt_bias: Tensor<B, 1>,
        norm: Tensor<B, 1>,
        out: Weight,
    },
}

struct Layer {
    norm: Tensor<B, 1>,
    mixer: Mixer,
    mlp: Mlp,
}

impl Layer {
    fn new(index: usize, device: &Device) -> Self {
        let norm = |width: usize| random([width], 0.1, device);
        let mixer = if index % 4 == 3 {
            Mixer::Attention {
                q: matrix(HEADS * HEAD_DIM, HIDDEN, device),
                gate: matrix(HEADS * HEAD_DIM, HIDDEN, device),
                k: matrix(KV_HEADS * HEAD_DIM, HIDDEN, device),
                v: matrix(KV_HEADS * HEAD_DIM, HIDDEN, device),
                q_norm: norm(HEAD_DIM),
                k_norm: norm(HEAD_DIM),
                out: matrix(HIDDEN, HEADS * HEAD_DIM, device),
            }
        } else {
            Mixer::Delta {
                qkv: matrix(DELTA.channels(), HIDDEN, device),
                z: matrix(VALUES, HIDDEN, device),
                a: matrix(DELTA.value_heads, HIDDEN, device),
                b: matrix(DELTA.value_heads, HIDDEN, device),
                conv: random([DELTA.channels(), 4], 0.5, device),
                a_log: random([DELTA.value_heads], 0.5, device).cast(FloatDType::F32),
                dt_bias: random([DELTA.value_heads], 0.5, device).cast(FloatDType::F32),
                norm: norm(DELTA.value_dim),
                out: matrix(HIDDEN, VALUES, device),
            }
        };
        let mlp = Mlp {
            norm: norm(HIDDEN),
            gate: matrix(INNER, HIDDEN, device),
            up: matrix(INNER, HIDDEN, device),
            down: matrix(HIDDEN, INNER, device),
        };
        Self {
            norm: norm(HIDDEN),
            mixer,
            mlp,
        }
    }

    fn forward(&self, x: Tensor<B, 3>, table: &RotaryTable<B>) -> Tensor<B, 3> {
        let [batch, tokens, _] = x.dims();
        let device = x.device();
        let h = B::offset_rms_norm(x.clone(), self.norm.clone(), EPS, Bf16);
        let x = match &self.mixer {
            Mixer::Attention {
                q,
                gate,
                k,
                v,
                q_norm,
                k_norm,
                out,
            } => {
                let heads =
                    |w: &Weight, count: usize| B::project(h.clone(), w, Bf16).reshape([batch, tokens, count, HEAD_DIM]);
                let (q, gate) = (heads(q, HEADS), heads(gate, HEADS));
                let (k, v) = (heads(k, KV_HEADS), heads(v, KV_HEADS));
                let q = B::rotary(B::offset_rms_norm(q, q_norm.clone(), EPS, Bf16), table, 0, Bf16);
                let k = B::rotary(B::offset_rms_norm(k, k_norm.clone(), EPS, Bf16), table, 0, Bf16);
                let cache = || Tensor::<B, 4>::empty([batch, KV_HEADS, tokens, HEAD_DIM], (&device, DType::BF16));
                let keys = B::append_rows(cache(), k, 0);
                let values = B::append_rows(cache(), v, 0);
                let o = B::causal_attention(q, keys, values, 0, Bf16);
                let o = B::sigmoid_gate(o, gate, Bf16).reshape([batch, tokens, HEADS * HEAD_DIM]);
                B::project_add(x, o, out, Bf16)
            }
            Mixer::Delta {
                qkv,
                z,
                a,
                b,
                conv,
                a_log,
                dt_bias,
                norm,
                out,
            } => {
                let qkv = B::project(h.clone(), qkv, Bf16);
                let z = B::project(h.clone(), z, Bf16).reshape([batch, tokens, DELTA.value_heads, DELTA.value_dim]);
                let (a, b) = (B::project(h.clone(), a, Full), B::project(h, b, Full));
                let (g, beta) = B::delta_gates(a, b, a_log.clone(), dt_bias.clone());
                let tail = Tensor::<B, 3>::zeros([batch, 3, DELTA.channels()], (&device, DType::BF16));
                let (qkv, _) = B::causal_conv_silu(qkv, conv.clone(), tail, Bf16);
                let state = Tensor::zeros([batch, DELTA.value_heads, DELTA.key_dim, DELTA.value_dim], &device);
                let (o, _) = B::gated_delta_rule(qkv, g, beta, state, DELTA, Bf16);
                let o = B::gated_rms_norm(o, norm.clone(), z, EPS, Bf16).reshape([batch, tokens, VALUES]);
                B::project_add(x, o, out, Bf16)
            }
        };
        let h = B::offset_rms_norm(x.clone(), self.mlp.norm.clone(), EPS, Bf16);
        let h = B::swiglu(h, &self.mlp.gate, &self.mlp.up, Bf16);
        B::project_add(x, h, &self.mlp.down, Bf16)
    }
}

/// One line per operation: milliseconds, and the rate of what it does.
fn operations(device: &Device, batch: usize, tokens: usize) {
    let rows = batch * tokens;
    println!("\n### Operations at {batch} x {tokens} tokens\n\n| operation | ms | rate |\n|---|---:|---:|");
    let line = |name: &str, seconds: f64, amount: f64, unit: &str| {
        println!("| {name} | {:.3} | {:.0} {unit} |", seconds * 1e3, amount / seconds);
    };
    let x = random([batch, tokens, HIDDEN], 1.0, device);
    for (name, out, width) in [
        ("gate or up", INNER, HIDDEN),
        ("down", HIDDEN, INNER),
        ("qkv of the delta rule", DELTA.channels(), HIDDEN),
        ("z, q or gate", VALUES, HIDDEN),
        ("k or v", KV_HEADS * HEAD_DIM, HIDDEN),
        ("a or b", DELTA.value_heads, HIDDEN),
        ("out", HIDDEN, VALUES),
    ] {
        let (x, w) = (random([batch, tokens, width], 1.0, device), matrix(out, width, device));
        let seconds = median(device, 10, || drop(B::project(x.clone(), &w, Bf16)));
        let flops = 2.0 * rows as f64 * out as f64 * width as f64;
        line(
            &format!("GEMM {name}, {width} to {out}"),
            seconds,
            flops / 1e12,
            "TFLOP/s",
        );
    }
    let bytes = |per_token: usize| rows as f64 * per_token as f64 / 1e9;
    let w = random([HIDDEN], 0.1, device);
    let seconds = median(device, 10, || drop(B::offset_rms_norm(x.clone(), w.clone(), EPS, Bf16)));
    line("offset RMS norm, 5120", seconds, bytes(4 * HIDDEN), "GB/s");
    let q = random([batch, tokens, HEADS, HEAD_DIM], 1.0, device);
    let w = random([HEAD_DIM], 0.1, device);
    let seconds = median(device, 10, || drop(B::offset_rms_norm(q.clone(), w.clone(), EPS, Bf16)));
    line("q norm, 24 x 256", seconds, bytes(4 * HEADS * HEAD_DIM), "GB/s");
    let table = RotaryTable::<B>::new(&frequencies(1e7, ROTARY_DIM), 1.0, tokens, device);
    let seconds = median(device, 10, || drop(B::rotary(q.clone(), &table, 0, Bf16)));
    line("rotary, 24 x 256", seconds, bytes(4 * HEADS * HEAD_DIM), "GB/s");
    let seconds = median(device, 10, || drop(B::sigmoid_gate(q.clone(), q.clone(), Bf16)));
    line("sigmoid gate, 6144", seconds, bytes(6 * VALUES), "GB/s");
    let o = random([batch, tokens, DELTA.value_heads, DELTA.value_dim], 1.0, device);
    let w = random([DELTA.value_dim], 0.1, device);
    let seconds = median(device, 10, || {
        drop(B::gated_rms_norm(o.clone(), w.clone(), o.clone(), EPS, Bf16))
    });
    line("gated RMS norm, 48 x 128", seconds, bytes(6 * VALUES), "GB/s");
    let qkv = random([batch, tokens, DELTA.channels()], 1.0, device);
    let conv = random([DELTA.channels(), 4], 0.5, device);
    let tail = random([batch, 3, DELTA.channels()], 1.0, device);
    let seconds = median(device, 10, || {
        drop(B::causal_conv_silu(qkv.clone(), conv.clone(), tail.clone(), Bf16))
    });
    line(
        "convolution + SiLU, 10240",
        seconds,
        bytes(4 * DELTA.channels()),
        "GB/s",
    );
    let gates = random([batch, tokens, DELTA.value_heads], 1.0, device);
    let g = gates.clone().cast(FloatDType::F32).abs().neg() * 0.1;
    let beta = burn::tensor::activation::sigmoid(gates.cast(FloatDType::F32));
    let state = Tensor::<B, 4>::zeros([batch, DELTA.value_heads, DELTA.key_dim, DELTA.value_dim], device);
    let seconds = median(device, 10, || {
        drop(B::gated_delta_rule(
            qkv.clone(),
            g.clone(),
            beta.clone(),
            state.clone(),
            DELTA,
            Bf16,
        ));
    });
    line(
        "gated delta rule, 16/48 heads",
        seconds,
        bytes(2 * (DELTA.channels() + VALUES)),
        "GB/s",
    );
    let k = random([batch, KV_HEADS, tokens, HEAD_DIM], 1.0, device);
    let seconds = median(device, 5, || {
        drop(B::causal_attention(q.clone(), k.clone(), k.clone(), 0, Bf16))
    });
    let flops = 2.0 * (batch * HEADS * HEAD_DIM) as f64 * (tokens as f64) * (tokens as f64 + 1.0);
    line(
        "attention, 24/4 heads of 256",
        seconds,
        flops / 1e12,
        "TFLOP/s (causal)",
    );
    let up = random([batch, tokens, INNER], 1.0, device);
    let (gate_w, up_w) = (matrix(INNER, HIDDEN, device), matrix(INNER, HIDDEN, device));
    let both = median(device, 5, || drop(B::swiglu(x.clone(), &gate_w, &up_w, Bf16)));
    line(
        "gate, up and SwiGLU",
        both,
        4.0 * (rows * INNER * HIDDEN) as f64 / 1e12,
        "TFLOP/s",
    );
    drop(up);
    let half = rows / 2;
    let hidden = random([half, HIDDEN], 1.0, device);
    let head = matrix(VOCABULARY, HIDDEN, device);
    let targets: Vec<u32> = (0..half).map(|i| (i * 7919 % PUBLIC) as u32).collect();
    for top_k in [0, 20] {
        let ask = request(&targets, top_k);
        let seconds = median(device, 1, || drop(B::score_head(hidden.clone(), &head, &ask, Full)));
        let flops = 2.0 * half as f64 * VOCABULARY as f64 * HIDDEN as f64;
        line(
            &format!("score head, {half} rows, top {top_k}"),
            seconds,
            flops / 1e12,
            "TFLOP/s",
        );
    }
}

/// Products with stored codes: expanded to bfloat16 for each use, or E4M3 rows against E4M3 codes.
fn packed(device: &Device, rows: usize) {
    println!("\n### Products of packed weights, {rows} rows\n\n| product | ms | rate |\n|---|---:|---:|");
    for (out, width) in [(INNER, HIDDEN), (HIDDEN, INNER)] {
        let x = random([1, rows, width], 1.0, device);
        let flops = 2.0 * rows as f64 * out as f64 * width as f64;
        let line = |name: &str, weight: &Weight| {
            let seconds = median(device, 10, || drop(B::project(x.clone(), weight, Bf16)));
            let rate = flops / seconds / 1e12;
            println!(
                "| {name}, {width} to {out} | {:.3} | {rate:.0} TFLOP/s |",
                seconds * 1e3
            );
        };
        line("bfloat16", &matrix(out, width, device));
        for (name, packing, eight_bit) in [
            ("FP8 by row, 8-bit rows", Packing::Fp8Row, true),
            ("FP8 by row, 16-bit rows", Packing::Fp8Row, false),
            ("FP8 by tile", Packing::Fp8Tile, false),
            ("NVFP4", Packing::Nvfp4 { divisors: 1 }, false),
            ("grouped 4 bits", Packing::Grouped { bits: 4 }, false),
        ] {
            let bytes = packing.planes(out, width).expect("a legal shape").bytes;
            // Codes and scales of a mixed bit pattern, none a NaN in any of the formats.
            let bytes: Vec<u8> = (0..bytes).map(|i| (i * 2_654_435_761 >> 13) as u8 & 0x3b).collect();
            let rows = [StoredRows {
                bytes: bytes.into(),
                packing,
                shape: [out, width],
                rows: 0..out,
            }];
            let matrix = StoredMatrix::stack(&rows)
                .expect("a legal matrix")
                .expect("one packing");
            line(
                name,
                &CubeWeight::packed(&matrix, eight_bit, device).expect("addressable"),
            );
        }
    }
}

fn request(targets: &[u32], top_k: usize) -> HeadRequest<'_> {
    HeadRequest {
        public_rows: PUBLIC,
        targets,
        top_k,
        candidates_per_row: 0,
        candidates: &[],
    }
}

/// Embedding, every layer, final norm and the head on the second half of each window.
fn stack(device: &Device, layers: &[Layer], embedding: &Weight, head: &Weight, batch: usize, tokens: usize) {
    let table = RotaryTable::<B>::new(&frequencies(1e7, ROTARY_DIM), 1.0, tokens, device);
    let norm = random([HIDDEN], 0.1, device);
    let ids: Vec<u32> = (0..batch * tokens).map(|i| (i * 104_729 % PUBLIC) as u32).collect();
    let half = tokens / 2;
    let targets = &ids[..batch * half];
    let ask = request(targets, 0);
    let mut host = 0.0;
    let mut run = || {
        let start = Instant::now();
        let mut x = B::embed_tokens(embedding, &ids, batch, Bf16);
        for layer in layers {
            x = layer.forward(x, &table);
        }
        let scored = x.narrow(1, half, half);
        let hidden = B::offset_rms_norm(scored, norm.clone(), EPS, Bf16).reshape([batch * half, HIDDEN]);
        host = start.elapsed().as_secs_f64();
        let scores = B::score_head(hidden, head, &ask, Full);
        assert!(
            scores.logprobs.iter().all(|lp| lp.is_finite() && *lp < 0.0),
            "log-probabilities are finite"
        );
    };
    let first = Instant::now();
    run();
    let first = first.elapsed().as_secs_f64();
    let mut times: Vec<f64> = (0..3)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let seconds = times[1];
    let prefilled = (batch * tokens) as f64 * layers.len() as f64 / LAYERS as f64 / seconds;
    println!(
        "| {batch} x {tokens} | {} | {first:.2} | {seconds:.3} | {host:.3} | {prefilled:.0} | {:.0} |",
        layers.len(),
        prefilled / 2.0
    );
}

fn main() {
    let device = Device::default();
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let asked = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    match perplexity_kernels::cuda::gemm::availability(&device) {
        Ok(()) => println!("Dense products: cuBLASLt"),
        Err(error) => println!("Dense products: {error}"),
    }
    if asked("operations") {
        operations(&device, 4, 4096);
    }
    if asked("packed") {
        packed(&device, 16_384);
    }
    if asked("stack") || asked("long") {
        let start = Instant::now();
        let layers: Vec<Layer> = (0..LAYERS).map(|i| Layer::new(i, &device)).collect();
        let (embedding, head) = (matrix(VOCABULARY, HIDDEN, &device), matrix(VOCABULARY, HIDDEN, &device));
        sync(&device);
        println!(
            "\n{LAYERS} layers of random weights in {:.1} s",
            start.elapsed().as_secs_f64()
        );
        println!("\n| windows | layers | first s | s | host s | prefilled tokens/s | scored tokens/s |");
        println!("|---|---:|---:|---:|---:|---:|---:|");
        if asked("stack") {
            for batch in [1, 2, 4, 8] {
                stack(&device, &layers, &embedding, &head, batch, 4096);
            }
        }
        if asked("long") {
            stack(&device, &layers, &embedding, &head, 1, 65_536);
        }
    }
}
