//! Every CubeCL kernel against the reference in burn tensor operations on the CPU: random data, awkward sizes.
//!
//! `cargo test --features vulkan` runs them through any Vulkan device, software rendering included, in float32 forms;
//! `--features cuda` on a card, where the hand-written kernels and bfloat16 storage take part.
#![cfg(any(feature = "cuda", feature = "vulkan"))]

use burn::tensor::{Tensor, TensorData};
use perplexity_kernels::backend::{
    ActivationFormat, DeltaHeads, EvaluatorBackend, Expert, HeadRequest, Mixture, Residency, RotaryTable, Routing,
};
use perplexity_kernels::ops::quantize_rows::Nvfp4Rounding;
use perplexity_kernels::ops::{
    append_rows, causal_attention, causal_conv_silu, delta_gates, embed_tokens,
    expand_weight::{self, Packing, StoredMatrix, StoredRows},
    expert_feed_forward, gated_delta_rule, gated_rms_norm, mixture_of_experts, offset_rms_norm, project, quantize_rows,
    rotary, route_experts, score_head, sigmoid_gate, swiglu,
};
use perplexity_kernels::precision::Precision::{self, Bf16, F16, Full};

/// The CPU backend that runs the references.
#[cfg(feature = "ndarray")]
type Reference = burn_ndarray::NdArray<f32>;
#[cfg(not(feature = "ndarray"))]
type Reference = burn_flex::Flex;

/// Values of spread `scale`, every one exactly bfloat16; the same for the same seed.
fn random(seed: u64, count: usize, scale: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    (0..count)
        .map(|_| {
            let mut sum = 0.0;
            for _ in 0..3 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                sum += (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            }
            f32::from_bits((sum * scale).to_bits() & 0xffff_0000)
        })
        .collect()
}

fn on<B: EvaluatorBackend, const D: usize>(values: &[f32], shape: [usize; D]) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &Default::default())
}

/// As [`on`], stored as the backend stores bfloat16 results.
fn narrow<B: EvaluatorBackend, const D: usize>(values: &[f32], shape: [usize; D]) -> Tensor<B, D> {
    B::round(on::<B, D>(values, shape), Bf16)
}

fn values<B: EvaluatorBackend, const D: usize>(x: Tensor<B, D>) -> Vec<f32> {
    x.into_data().convert::<f32>().into_vec().expect("converted just now")
}

/// Leaves NaN in the memory that the next allocations of this size get.
fn poison<B: EvaluatorBackend>(elements: usize) {
    let device = Default::default();
    let tensors: Vec<Tensor<B, 1>> = (0..4).map(|_| Tensor::full([elements], f32::NAN, &device)).collect();
    B::sync(&device).expect("device answers");
    drop(tensors);
}

/// Relative distance of the whole, and of the worst element against the largest expected value.
fn assert_close(what: &str, actual: &[f32], expected: &[f32], tolerance: f64) {
    assert_eq!(actual.len(), expected.len(), "{what}: number of values");
    let (mut error, mut size, mut worst, mut largest) = (0.0f64, 0.0f64, 0.0f64, 0.0f64);
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        assert!(a.is_finite(), "{what}: value {i} is {a}, expected {e}");
        let d = f64::from(a) - f64::from(e);
        error += d * d;
        size += f64::from(e) * f64::from(e);
        worst = worst.max(d.abs());
        largest = largest.max(f64::from(e).abs());
    }
    let relative = (error / size.max(1e-30)).sqrt();
    assert!(
        relative <= tolerance,
        "{what}: relative error {relative:.2e} above {tolerance:.0e}"
    );
    assert!(
        worst <= 8.0 * tolerance * largest.max(1e-6),
        "{what}: worst error {worst:.2e} of values up to {largest:.2}"
    );
}

/// Two roundings to bfloat16 of nearly equal values differ by one step in places: 2^-9 relative at most, rarely.
fn tolerance(to: Precision) -> f64 {
    match to {
        Full => 2e-5,
        Bf16 => 1.5e-3,
        F16 => 5e-4,
    }
}

fn rounding<B: EvaluatorBackend>() {
    let special = [
        0.0,
        -0.0,
        1.0,
        1.00390625,
        1.01171875,
        -1.00390625,
        3.0e38,
        65504.0,
        65519.0,
        65520.0,
        -65520.0,
        6.1e-5,
        5.96e-8,
        2.98e-8,
        2.99e-8,
        -8.9e-8,
        f32::INFINITY,
        f32::NEG_INFINITY,
        1e-40,
    ];
    let many = random(1, 1001, 1.0).into_iter().map(|x| x * 1.234_567);
    let input: Vec<f32> = special.into_iter().chain(many).collect();
    for to in [Full, Bf16, F16] {
        let expected: Vec<f32> = input
            .iter()
            .map(|&x| match to {
                Full => x,
                Bf16 => half::bf16::from_f32(x).to_f32(),
                F16 => half::f16::from_f32(x).to_f32(),
            })
            .collect();
        poison::<B>(input.len());
        let actual = values(B::round(on::<B, 1>(&input, [input.len()]), to));
        for ((&a, &e), &x) in actual.iter().zip(&expected).zip(&input) {
            // Denormal results may be flushed by the device.
            let flushed = e.abs() < f32::MIN_POSITIVE && a == 0.0;
            assert!(
                a.to_bits() == e.to_bits() || flushed,
                "{x:e} to {to:?}: {a:e}, expected {e:e}"
            );
        }
    }
    let nan = values(B::round(on::<B, 1>(&[f32::NAN; 3], [3]), Bf16));
    assert!(nan.iter().all(|x| x.is_nan()), "NaN stays NaN");
}

fn norms<B: EvaluatorBackend>() {
    for (rows, width) in [
        (1, 1),
        (3, 63),
        (5, 64),
        (2, 65),
        (7, 128),
        (130, 256),
        (3, 1000),
        (2, 5120),
    ] {
        let (x, w, z) = (
            random(2, rows * width, 3.0),
            random(3, width, 0.3),
            random(4, rows * width, 2.0),
        );
        for to in [Full, Bf16] {
            let what = format!("norm of {rows} x {width} to {to:?}");
            let shape = [rows, width];
            let expected = offset_rms_norm::reference::<Reference, 2>(on(&x, shape), on(&w, [width]), 1e-6, to);
            poison::<B>(rows * width);
            let actual = B::offset_rms_norm(narrow::<B, 2>(&x, shape), narrow(&w, [width]), 1e-6, to);
            assert_close(&what, &values(actual), &values(expected), tolerance(to));
            let expected =
                gated_rms_norm::reference::<Reference, 2>(on(&x, shape), on(&w, [width]), on(&z, shape), 1e-6, to);
            poison::<B>(rows * width);
            let actual = B::gated_rms_norm(narrow::<B, 2>(&x, shape), on(&w, [width]), narrow(&z, shape), 1e-6, to);
            assert_close(&what, &values(actual), &values(expected), tolerance(to));
        }
    }
}

fn gates<B: EvaluatorBackend>() {
    for count in [1, 63, 64, 65, 1021, 4096] {
        let (x, y) = (random(5, count, 3.0), random(6, count, 5.0));
        for to in [Full, Bf16] {
            let expected = sigmoid_gate::reference::<Reference, 1>(on(&x, [count]), on(&y, [count]), to);
            poison::<B>(count);
            let actual = B::sigmoid_gate(narrow::<B, 1>(&x, [count]), narrow(&y, [count]), to);
            assert_close("sigmoid gate", &values(actual), &values(expected), tolerance(to));
        }
    }
    for heads in [1, 5, 48] {
        let shape = [2, 65, heads];
        let count = 130 * heads;
        let (a, b) = (random(7, count, 12.0), random(8, count, 4.0));
        let (mut a_log, bias) = (random(9, heads, 1.0), random(10, heads, 1.0));
        a_log[0] = f32::NEG_INFINITY;
        let expected =
            delta_gates::reference::<Reference>(on(&a, shape), on(&b, shape), on(&a_log, [heads]), on(&bias, [heads]));
        poison::<B>(count);
        let actual = B::delta_gates(
            on::<B, 3>(&a, shape),
            on(&b, shape),
            on(&a_log, [heads]),
            on(&bias, [heads]),
        );
        assert_close("decay", &values(actual.0), &values(expected.0), 2e-5);
        assert_close("write strength", &values(actual.1), &values(expected.1), 2e-5);
    }
}

fn rotations<B: EvaluatorBackend>() {
    for (tokens, heads, head_dim, rotary_dim, first) in [
        (1, 1, 64, 16, 0),
        (65, 3, 256, 64, 7),
        (127, 2, 64, 64, 0),
        (33, 5, 24, 12, 100),
        (9, 4, 10, 6, 1),
    ] {
        let shape = [2, tokens, heads, head_dim];
        let x = random(11, shape.iter().product(), 2.0);
        let inv = rotary::frequencies(1e7, rotary_dim);
        let here = RotaryTable::<B>::new(&inv, 1.0, first + tokens, &Default::default());
        let there = RotaryTable::<Reference>::new(&inv, 1.0, first + tokens, &Default::default());
        for to in [Full, Bf16] {
            let expected = rotary::reference::<Reference>(on(&x, shape), &there, first, to);
            poison::<B>(x.len());
            let actual = B::rotary(narrow::<B, 4>(&x, shape), &here, first, to);
            let what = format!("rotary of {tokens} x {heads} x {head_dim}");
            assert_close(&what, &values(actual), &values(expected), tolerance(to));
        }
    }
}

fn convolution<B: EvaluatorBackend>() {
    for (tokens, channels, width) in [
        (1, 6, 4),
        (2, 3, 4),
        (31, 8, 4),
        (32, 8, 2),
        (33, 100, 4),
        (129, 256, 4),
    ] {
        let shape = [2, tokens, channels];
        let x = random(12, shape.iter().product(), 2.0);
        let w = random(13, channels * width, 0.6);
        let tail_shape = [2, width - 1, channels];
        let tail = random(14, tail_shape.iter().product(), 2.0);
        for to in [Full, Bf16] {
            let expected = causal_conv_silu::reference::<Reference>(
                on(&x, shape),
                on(&w, [channels, width]),
                on(&tail, tail_shape),
                to,
            );
            poison::<B>(x.len());
            let actual = B::causal_conv_silu(
                narrow::<B, 3>(&x, shape),
                narrow(&w, [channels, width]),
                narrow(&tail, tail_shape),
                to,
            );
            let what = format!("convolution of {tokens} x {channels}");
            assert_close(&what, &values(actual.0), &values(expected.0), tolerance(to));
            assert_close(&format!("{what}, tail"), &values(actual.1), &values(expected.1), 0.0);
        }
    }
}

fn delta_rule<B: EvaluatorBackend>() {
    let cases = [
        (1, 1, 1, 8, 8),
        (63, 2, 4, 64, 64),
        (65, 1, 3, 16, 24),
        (129, 1, 2, 128, 128),
        (200, 2, 6, 128, 128),
    ];
    for (tokens, key_heads, value_heads, key_dim, value_dim) in cases {
        let heads = DeltaHeads {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
        };
        let (shape, gate_shape) = ([2, tokens, heads.channels()], [2, tokens, value_heads]);
        let state_shape = [2, value_heads, key_dim, value_dim];
        let qkv = random(15, shape.iter().product(), 1.0);
        let g: Vec<f32> = random(16, gate_shape.iter().product(), 0.3)
            .iter()
            .map(|x| -x.abs())
            .collect();
        let beta: Vec<f32> = random(17, gate_shape.iter().product(), 1.0)
            .iter()
            .map(|x| 1.0 / (1.0 + x.exp()))
            .collect();
        let state = random(18, state_shape.iter().product(), 0.3);
        for (to, limit) in [(Full, 2e-5), (Bf16, 6e-3)] {
            let expected = gated_delta_rule::recurrent::<Reference>(
                on(&qkv, shape),
                on(&g, gate_shape),
                on(&beta, gate_shape),
                on(&state, state_shape),
                heads,
                to,
            );
            poison::<B>(2 * tokens * value_heads * value_dim);
            let actual = B::gated_delta_rule(
                narrow::<B, 3>(&qkv, shape),
                on(&g, gate_shape),
                on(&beta, gate_shape),
                on(&state, state_shape),
                heads,
                to,
            );
            let what = format!("delta rule of {tokens} tokens, heads {heads:?}, {to:?}");
            assert_close(&what, &values(actual.0), &values(expected.0), limit);
            assert_close(&format!("{what}, state"), &values(actual.1), &values(expected.1), limit);
        }
    }
}

fn attention<B: EvaluatorBackend>() {
    let cases = [
        (1, 0, 1, 1, 64),
        (63, 0, 4, 2, 64),
        (64, 64, 6, 1, 256),
        (65, 0, 6, 2, 128),
        (127, 5, 3, 3, 24),
        (129, 300, 4, 2, 256),
    ];
    for (tokens, first, heads, kv_heads, head_dim) in cases {
        let capacity = first + tokens + 3;
        let (shape, cache_shape) = ([2, tokens, heads, head_dim], [2, kv_heads, capacity, head_dim]);
        let q = random(19, shape.iter().product(), 1.5);
        let mut k = random(20, cache_shape.iter().product(), 1.0);
        let mut v = random(21, cache_shape.iter().product(), 1.0);
        let expected_inputs = (k.clone(), v.clone());
        // Rows not yet written must not be read.
        for (i, (k, v)) in k.iter_mut().zip(&mut v).enumerate() {
            if i / head_dim % capacity >= first + tokens {
                (*k, *v) = (f32::NAN, f32::NAN);
            }
        }
        for (to, limit) in [(Full, 2e-5), (Bf16, 4e-3)] {
            let expected = causal_attention::reference::<Reference>(
                on(&q, shape),
                on(&expected_inputs.0, cache_shape),
                on(&expected_inputs.1, cache_shape),
                first,
                to,
            );
            poison::<B>(q.len());
            let actual = B::causal_attention(
                narrow::<B, 4>(&q, shape),
                narrow(&k, cache_shape),
                narrow(&v, cache_shape),
                first,
                to,
            );
            let what =
                format!("attention of {tokens} tokens after {first}, {heads}/{kv_heads} heads of {head_dim}, {to:?}");
            assert_close(&what, &values(actual), &values(expected), limit);
        }
    }
}

fn cache<B: EvaluatorBackend>() {
    for (tokens, heads, head_dim, at) in [(1, 1, 8, 0), (65, 2, 24, 3), (7, 4, 256, 10)] {
        let (shape, cache_shape) = ([2, tokens, heads, head_dim], [2, heads, at + tokens + 2, head_dim]);
        let rows = random(22, shape.iter().product(), 1.0);
        let old = random(23, cache_shape.iter().product(), 1.0);
        let expected = append_rows::reference::<Reference>(on(&old, cache_shape), on(&rows, shape), at);
        let before = narrow::<B, 4>(&old, cache_shape);
        let shared = before.clone();
        let actual = B::append_rows(before, narrow(&rows, shape), at);
        // Rows before and within the appended ones; those beyond have no meaning yet.
        let meant = |x: Vec<f32>| -> Vec<f32> {
            let rows = x.chunks_exact(head_dim).enumerate();
            rows.filter(|(row, _)| row % cache_shape[2] < at + tokens)
                .flat_map(|(_, row)| row.to_vec())
                .collect()
        };
        assert_close("cache", &meant(values(actual)), &meant(values(expected)), 0.0);
        assert_close("a cache held elsewhere stays", &values(shared), &old, 0.0);
    }
}

fn products<B: EvaluatorBackend>() {
    for (rows, width, out) in [
        (1, 8, 3),
        (63, 64, 65),
        (65, 200, 40),
        (70, 192, 48),
        (129, 512, 96),
        (300, 256, 1000),
    ] {
        let (x, w) = (random(24, 2 * rows * width, 1.0), random(25, out * width, 0.1));
        let (up, residual) = (random(26, out * width, 0.1), random(27, 2 * rows * out, 1.0));
        let (shape, out_shape) = ([2, rows, width], [2, rows, out]);
        let weight = |w: &[f32]| B::weight(w.to_vec(), [out, width], Bf16, &Default::default());
        let finer: Vec<f32> = w.iter().map(|w| w * 1.001_234).collect();
        let fine = B::weight(finer.clone(), [out, width], Full, &Default::default());
        let dense = |w: &[f32]| on::<Reference, 2>(w, [out, width]);
        for (to, limit) in [(Full, 2e-5), (Bf16, 3e-3)] {
            let what = format!("product of 2 x {rows} x {width} by {out}, {to:?}");
            let expected = project::reference::<Reference>(on(&x, shape), dense(&w), to);
            poison::<B>(2 * rows * out);
            let actual = B::project(narrow::<B, 3>(&x, shape), &weight(&w), to);
            assert_close(&what, &values(actual), &values(expected), limit);
            let wide: Vec<f32> = x.iter().map(|x| x * 1.000_123).collect();
            let expected = project::reference::<Reference>(on(&wide, shape), dense(&w), Full);
            let actual = B::project(on::<B, 3>(&wide, shape), &weight(&w), Full);
            assert_close(
                &format!("{what}, float32 rows"),
                &values(actual),
                &values(expected),
                2e-5,
            );
            let expected = project::reference::<Reference>(on(&wide, shape), dense(&finer), Full);
            let actual = B::project(on::<B, 3>(&wide, shape), &fine, Full);
            assert_close(
                &format!("{what}, all float32"),
                &values(actual),
                &values(expected),
                2e-5,
            );
            let expected = project::reference::<Reference>(on(&x, shape), dense(&finer), to);
            let actual = B::project(narrow::<B, 3>(&x, shape), &fine, to);
            assert_close(
                &format!("{what}, float32 weight"),
                &values(actual),
                &values(expected),
                4e-3,
            );
            let expected = project::reference_add::<Reference>(on(&residual, out_shape), on(&x, shape), dense(&w), to);
            poison::<B>(2 * rows * out);
            let actual = B::project_add(narrow(&residual, out_shape), narrow::<B, 3>(&x, shape), &weight(&w), to);
            assert_close(&format!("{what}, added"), &values(actual), &values(expected), limit);
            let expected = swiglu::reference::<Reference>(on(&x, shape), dense(&w), dense(&up), to);
            let actual = B::swiglu(narrow::<B, 3>(&x, shape), &weight(&w), &weight(&up), to);
            assert_close(
                &format!("{what}, SwiGLU"),
                &values(actual),
                &values(expected),
                2.0 * limit,
            );
        }
    }
    let (table, ids) = (random(28, 50 * 24, 1.0), [0, 49, 7, 7, 13, 1]);
    let weight = B::weight(table.clone(), [50, 24], Bf16, &Default::default());
    let expected = embed_tokens::reference::<Reference>(on(&table, [50, 24]), &ids, 2, Bf16);
    let actual = B::embed_tokens(&weight, &ids, 2, Bf16);
    assert_eq!(actual.dims(), [2, 3, 24]);
    assert_close("embedding", &values(actual), &values(expected), 0.0);
}

fn head<B: EvaluatorBackend>() {
    for (rows, width, vocabulary, public, top_k) in [(1, 8, 5, 5, 5), (3, 16, 300, 257, 1), (70, 64, 2000, 1999, 20)] {
        let (x, mut w) = (random(29, rows * width, 1.0), random(30, vocabulary * width, 0.5));
        // Equal rows of the head give equal logits: ids decide.
        let copy = w[..width].to_vec();
        w[(public - 1) * width..][..width].copy_from_slice(&copy);
        // A row that is no token would win everything.
        for row in public..vocabulary {
            for (a, b) in w[row * width..][..width].iter_mut().zip(&x) {
                *a = 50.0 * b;
            }
        }
        let targets: Vec<u32> = (0..rows).map(|i| (i * 7919 % public) as u32).collect();
        let candidates: Vec<u32> = (0..rows * 3).map(|i| (i * 104_729 % public) as u32).collect();
        let ask = HeadRequest {
            public_rows: public,
            targets: &targets,
            top_k,
            candidates_per_row: 3,
            candidates: &candidates,
        };
        let weight = B::weight(w.clone(), [vocabulary, width], Bf16, &Default::default());
        let actual = B::score_head(narrow::<B, 2>(&x, [rows, width]), &weight, &ask, Full);
        let logits = project::reference::<Reference>(on(&x, [1, rows, width]), on(&w, [vocabulary, width]), Full);
        let mut expected = score_head::HeadScores::default();
        for (row, logits) in values(logits).chunks_exact(vocabulary).enumerate() {
            expected.push(&logits[..public], &ask, row);
        }
        assert_close("target", &actual.logprobs, &expected.logprobs, 1e-5);
        assert_close("top", &actual.top_logprobs, &expected.top_logprobs, 1e-5);
        assert_close(
            "candidates",
            &actual.candidate_logprobs,
            &expected.candidate_logprobs,
            1e-5,
        );
        assert_eq!(
            actual.top_ids, expected.top_ids,
            "top ids of {rows} rows over {public} tokens"
        );
    }
}

const PACKINGS: [(Packing, usize, usize); 8] = [
    (Packing::Grouped { bits: 4 }, 3, 130),
    (Packing::Grouped { bits: 5 }, 65, 129),
    (Packing::Grouped { bits: 6 }, 7, 512),
    (Packing::Grouped { bits: 8 }, 33, 100),
    (Packing::Nvfp4 { divisors: 2 }, 256, 192),
    (Packing::Fp8Row, 63, 77),
    (Packing::Fp8Tile, 130, 200),
    (Packing::Bf16, 63, 75),
];

/// A matrix of random codes whose scales have ordinary size and whose words are all numbers.
fn legal_bytes(packing: Packing, rows: usize, columns: usize) -> Vec<u8> {
    let planes = packing.planes(rows, columns).expect("a legal shape");
    let noise = random(31, planes.bytes, 1e9);
    let mut bytes: Vec<u8> = noise.iter().map(|x| (x.to_bits() >> 16) as u8).collect();
    for (i, byte) in bytes.iter_mut().enumerate() {
        match packing {
            Packing::Grouped { .. } if i >= planes.scales => {
                *byte = if i % 2 == 1 { 0x20 | *byte & 0x1f } else { *byte }
            }
            Packing::Nvfp4 { .. } if i >= planes.scales => *byte &= 0x77,
            Packing::Fp8Row | Packing::Fp8Tile if i < planes.scales => *byte &= 0xbf,
            Packing::Fp8Row => *byte = if i % 2 == 1 { 0x3c } else { *byte },
            Packing::Bf16 if i % 2 == 1 => *byte = 0x3c | *byte & 0x83,
            _ => {}
        }
    }
    for (i, at) in (planes.divisors..planes.bytes).step_by(4).enumerate() {
        bytes[at..at + 4].copy_from_slice(&(896.0 + i as f32).to_le_bytes());
    }
    if packing == Packing::Fp8Tile {
        for at in (planes.scales..planes.bytes).step_by(4) {
            bytes[at..at + 4].copy_from_slice(&(0.001 * at as f32).to_le_bytes());
        }
    }
    bytes
}

fn whole(bytes: &[u8], packing: Packing, shape: [usize; 2]) -> StoredRows<'_> {
    StoredRows {
        bytes: bytes.into(),
        packing,
        shape,
        rows: 0..shape[0],
    }
}

fn expansion<B: EvaluatorBackend>(upload: impl Fn(&StoredMatrix<'_>) -> B::Weight) {
    for (packing, rows, columns) in PACKINGS {
        let bytes = legal_bytes(packing, rows, columns);
        let expected = expand_weight::reference(&bytes, packing, rows, columns).expect("a legal matrix");
        let parts = [whole(&bytes, packing, [rows, columns])];
        let matrix = StoredMatrix::stack(&parts).expect("legal").expect("one packing");
        poison::<B>(rows * columns);
        let actual = values(B::dense(&upload(&matrix)));
        // A division by a scale may be one step off.
        let what = format!("{packing:?} of {rows} x {columns}");
        assert_close(&what, &actual, &expected, 1e-7);
    }
}

/// Products with a matrix that stays in codes and with one expanded on loading; rows gathered from either.
fn stored_weights<B: EvaluatorBackend>() {
    for (packing, rows, columns) in PACKINGS {
        let bytes = legal_bytes(packing, rows, columns);
        let dense = expand_weight::reference(&bytes, packing, rows, columns).expect("a legal matrix");
        let parts = [whole(&bytes, packing, [rows, columns])];
        let matrix = StoredMatrix::stack(&parts).expect("legal").expect("one packing");
        let (shape, x) = ([2, 65, columns], random(36, 130 * columns, 1.0));
        let ids: Vec<u32> = (0..12).map(|i| (i * 7919 % rows) as u32).collect();
        for residency in [Residency::Dense, Residency::Packed] {
            let what = format!("{residency:?} {packing:?} of {rows} x {columns}");
            let weight = B::stored_weight(&matrix, residency, &Default::default()).expect("all numbers");
            let weight_values = || on::<Reference, 2>(&dense, [rows, columns]);
            let expected = project::reference::<Reference>(on(&x, shape), weight_values(), Bf16);
            let actual = B::project(narrow::<B, 3>(&x, shape), &weight, Bf16);
            assert_close(&what, &values(actual), &values(expected), 4e-3);
            let expected = embed_tokens::reference::<Reference>(weight_values(), &ids, 3, Bf16);
            let actual = B::embed_tokens(&weight, &ids, 3, Bf16);
            assert_eq!(actual.dims(), [3, 4, columns]);
            assert_close(
                &format!("{what}, rows"),
                &values(actual),
                &values(expected),
                tolerance(Bf16),
            );
        }
        let packed = B::stored_weight(&matrix, Residency::Packed, &Default::default()).expect("all numbers");
        let wide: Vec<f32> = x.iter().map(|x| x * 1.000_123).collect();
        let expected = project::reference::<Reference>(on(&wide, shape), on(&dense, [rows, columns]), Full);
        let actual = B::project(on::<B, 3>(&wide, shape), &packed, Full);
        let what = format!("{packing:?}, float32 rows");
        assert_close(&what, &values(actual), &values(expected), 2e-5);
    }
}

/// A code or scale that stands for no number is left to the decoder, wherever it lies.
fn non_numbers<B: EvaluatorBackend>() {
    for (packing, rows, columns, at, words) in [
        (Packing::Fp8Row, 63, 77, 63 * 77 - 1, vec![0x7f]),
        (Packing::Fp8Tile, 130, 200, 0, vec![0xff]),
        (Packing::Nvfp4 { divisors: 1 }, 128, 64, 128 * 32 + 5, vec![0x7f]),
        (Packing::Grouped { bits: 5 }, 65, 128, usize::MAX, vec![0x00, 0x7c]),
    ] {
        let mut bytes = legal_bytes(packing, rows, columns);
        let at = at.min(bytes.len() - words.len());
        bytes[at..][..words.len()].copy_from_slice(&words);
        let parts = [whole(&bytes, packing, [rows, columns])];
        let matrix = StoredMatrix::stack(&parts).expect("legal").expect("one packing");
        for residency in [Residency::Dense, Residency::Packed] {
            let taken = B::stored_weight(&matrix, residency, &Default::default());
            assert!(taken.is_none(), "{packing:?}, {residency:?}");
        }
    }
}

/// Rows in FP8 and NVFP4, bit for bit: ordinary ones, zeros, the smallest and the largest numbers.
#[cfg(feature = "cuda")]
fn quantized_rows<B: EvaluatorBackend>() {
    for (rows, width) in [(1, 16), (65, 192), (129, 5120)] {
        let mut x = random(31, rows * width, 2.0);
        for (row, factor) in [(3, 0.0), (5, 1e-38), (7, 1e-30), (11, 1e36), (13, 0.125)] {
            if let Some(row) = x.chunks_exact_mut(width).nth(row) {
                row.iter_mut()
                    .for_each(|x| *x = half::bf16::from_f32(*x * factor).to_f32());
            }
        }
        let formats = [Nvfp4Rounding::Engine, Nvfp4Rounding::ModelOpt]
            .into_iter()
            .flat_map(|rounding| [168.0, 0.37].map(|divisor| ActivationFormat::Nvfp4 { divisor, rounding }));
        for format in formats.chain([ActivationFormat::Fp8]) {
            let mut expected = x.clone();
            quantize_rows::host::quantize(&mut expected, width, format);
            for x in [narrow::<B, 3>(&x, [1, rows, width]), on(&x, [1, rows, width])] {
                poison::<B>(rows * width);
                let actual = values(B::quantize_rows(x, format));
                for (i, (a, e)) in actual.iter().zip(&expected).enumerate() {
                    assert_eq!(a, e, "{format:?}, {rows} x {width}: value {i}");
                }
            }
        }
    }
}

/// What is no number makes its own row's products none, in every format that is multiplied as codes.
#[cfg(feature = "cuda")]
fn quantized_non_numbers<B: EvaluatorBackend>() {
    let (rows, width, outputs) = (4, 64, 32);
    let nvfp4 = ActivationFormat::Nvfp4 {
        divisor: 100.0,
        rounding: Nvfp4Rounding::Engine,
    };
    for format in [ActivationFormat::Fp8, nvfp4] {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = random(35, rows * width, 1.0);
            x[width + 17] = bad;
            let weight = fp8_weight::<B>(outputs, width).0;
            let y = values(B::project_quantized(
                narrow(&x, [1, rows, width]),
                format,
                &weight,
                None,
                Bf16,
            ));
            for (row, y) in y.chunks_exact(outputs).enumerate() {
                assert!(
                    y.iter().all(|y| y.is_finite() == (row != 1)),
                    "{format:?} with {bad}: row {row} is {y:?}"
                );
            }
        }
    }
}

/// A matrix of FP8 rows for 8-bit products, and its values.
fn fp8_weight<B: EvaluatorBackend>(outputs: usize, width: usize) -> (B::Weight, Vec<f32>) {
    let packing = Packing::Fp8Row;
    let planes = packing.planes(outputs, width).expect("a legal shape");
    let mut bytes: Vec<u8> = random(32, planes.bytes, 1e9)
        .iter()
        .map(|x| (x.to_bits() >> 16) as u8 & 0xbf)
        .collect();
    for row in 0..outputs {
        let scale = half::bf16::from_f32(0.3 + 0.03 * row as f32).to_le_bytes();
        bytes[planes.scales + 2 * row..][..2].copy_from_slice(&scale);
    }
    let parts = [whole(&bytes, packing, [outputs, width])];
    let matrix = StoredMatrix::stack(&parts).expect("legal").expect("one packing");
    let weight = B::stored_weight(&matrix, Residency::EightBit, &Default::default()).expect("all numbers");
    let values = expand_weight::reference(&bytes, packing, outputs, width).expect("a legal matrix");
    (weight, values)
}

/// Products of narrowed rows against the same product of the rows' own values, up to the order of the sum, or where the width
/// has no product of codes to the rounding of both operands to bfloat16. That of the rows as they are differs by more than
/// three tolerances, so it does not pass for either.
fn narrowed_products<B: EvaluatorBackend>() {
    let nvfp4 = |rounding| ActivationFormat::Nvfp4 {
        divisor: 1300.0,
        rounding,
    };
    let formats = [
        ActivationFormat::Fp8,
        nvfp4(Nvfp4Rounding::Engine),
        nvfp4(Nvfp4Rounding::ModelOpt),
    ];
    // Width 100 has no 8-bit product on a card and no whole group of 16.
    for (rows, width, outputs, tolerance) in [
        (1, 64, 32, 1.5e-3),
        (65, 192, 48, 1.5e-3),
        (129, 100, 48, 4e-3),
        (300, 5120, 256, 1.5e-3),
    ] {
        let (fp8, fp8_values) = fp8_weight::<B>(outputs, width);
        let plain_values = random(37, outputs * width, 0.1);
        let plain = weight::<B>(&plain_values, [outputs, width]);
        let (x, residual) = (random(33, rows * width, 2.0), random(34, rows * outputs, 1.0));
        let (shape, out_shape) = ([1, rows, width], [1, rows, outputs]);
        for format in formats {
            let (weight, weight_values) = match format {
                ActivationFormat::Fp8 => (&fp8, &fp8_values),
                _ => (&plain, &plain_values),
            };
            let mut narrowed = x.clone();
            quantize_rows::host::quantize(&mut narrowed, width, format);
            let on_reference = || on::<Reference, 2>(weight_values, [outputs, width]);
            let product = |x: &[f32]| {
                values(project::reference_add::<Reference>(
                    on(&residual, out_shape),
                    on(x, shape),
                    on_reference(),
                    Bf16,
                ))
            };
            let what = format!("{format:?} product of {rows} x {width} by {outputs}");
            let expected = product(&narrowed);
            poison::<B>(rows * outputs);
            let actual = values(B::project_quantized(
                narrow::<B, 3>(&x, shape),
                format,
                weight,
                Some(narrow(&residual, out_shape)),
                Bf16,
            ));
            let distance = |a: &[f32]| {
                let pairs = || expected.iter().zip(a);
                let apart: f32 = pairs().map(|(e, a)| (e - a).powi(2)).sum();
                (apart / pairs().map(|(e, _)| e * e).sum::<f32>()).sqrt()
            };
            println!("{what}: {:.2e} from the reference", distance(&actual));
            assert_close(&what, &actual, &expected, tolerance);
            assert!(
                f64::from(distance(&product(&x))) > 3.0 * tolerance,
                "{what}: too close to that of the rows as they are"
            );
            let expected = swiglu::reference::<Reference>(on(&narrowed, shape), on_reference(), on_reference(), Bf16);
            let actual = B::swiglu_quantized(narrow::<B, 3>(&x, shape), format, weight, weight, Bf16);
            // Gate and up, here one and the same, are rounded on their way.
            assert_close(&format!("{what}, SwiGLU"), &values(actual), &values(expected), 9e-3);
        }
    }
}

/// Routed experts, each backend by its own router and by the reference's; idle and crowded experts among them.
fn mixtures<B: EvaluatorBackend>() {
    for (tokens, count, top_k, width, inner) in [(1, 1, 1, 16, 8), (33, 5, 2, 40, 24), (130, 16, 4, 64, 32)] {
        let (shape, rows) = ([2, tokens, width], 2 * tokens);
        let x = random(60, rows * width, 1.0);
        let router = random(61, count * width, 0.5);
        let matrices: Vec<[Vec<f32>; 2]> = (0..count as u64)
            .map(|e| {
                [
                    random(62 + 2 * e, 2 * inner * width, 0.2),
                    random(63 + 2 * e, width * inner, 0.2),
                ]
            })
            .collect();
        let expected = route_experts::reference::<Reference>(on(&x, shape), on(&router, [count, width]), top_k);
        let actual = B::route_experts(narrow(&x, shape), &weight::<B>(&router, [count, width]), top_k);
        let what = format!("{top_k} of {count} experts for {rows} rows");
        let ids = expected.experts.to_data().convert::<i64>();
        let chosen = actual.experts.into_data().convert::<i64>();
        assert_eq!(chosen.to_vec::<i64>().unwrap(), ids.to_vec::<i64>().unwrap(), "{what}");
        assert_close(&what, &values(actual.weights), &values(expected.weights.clone()), 1e-4);

        let same = Routing {
            experts: Tensor::from_data(ids, &Default::default()),
            weights: on(&values(expected.weights.clone()), [rows, top_k]),
        };
        let expected =
            expert_feed_forward::reference(on(&x, shape), &expected, &experts::<Reference>(&matrices, width, inner));
        let experts = experts::<B>(&matrices, width, inner);
        for (to, x) in [(Full, on(&x, shape)), (Bf16, narrow(&x, shape))] {
            poison::<B>(rows * width);
            let actual = values(B::expert_feed_forward(x, &same, &experts));
            // Where rows are 16 bits wide, so is what stands between the products.
            let limit = if to == Full { 2e-5 } else { 6e-3 };
            assert_close(&format!("{what}, {to:?}"), &actual, &values(expected.clone()), limit);
        }
    }
}

/// Whole mixtures under routings that are not even: experts that nobody chose, one that everybody did, rows that fill no
/// tile. A rerun has the same bits; a row that is no number leaves its neighbours alone.
fn whole_mixtures<B: EvaluatorBackend>() {
    // What the router adds to an expert's logit, whatever the row.
    let even = |_: usize| 0.0;
    let idle = |e: usize| if e % 3 == 1 { -60.0 } else { 0.0 };
    let crowded = |e: usize| if e == 3 { 60.0 } else { 0.0 };
    type Bias<'a> = &'a dyn Fn(usize) -> f32;
    let cases: [([usize; 2], usize, usize, [usize; 2], Bias<'_>); 7] = [
        ([1, 1], 4, 1, [64, 32], &even),
        ([1, 63], 5, 2, [72, 40], &idle),
        ([1, 65], 4, 1, [64, 128], &crowded),
        ([1, 129], 16, 4, [200, 136], &idle),
        ([2, 65], 40, 8, [256, 64], &crowded),
        ([3, 129], 6, 3, [128, 264], &crowded),
        ([2, 300], 8, 4, [520, 128], &even),
    ];
    for ([batch, tokens], count, top_k, [width, inner], bias) in cases {
        let (rows, shape) = (batch * tokens, [batch, tokens, width]);
        let what = format!("{top_k} of {count} experts of {width} x {inner} for {rows} rows");
        let mut x = random(70, rows * width, 1.0);
        x.iter_mut().step_by(width).for_each(|x| *x = 1.0);
        let mut router = random(71, count * width, 0.5);
        for (e, row) in router.chunks_exact_mut(width).enumerate() {
            row[0] = bias(e);
        }
        let gate_up = random(72, count * 2 * inner * width, 0.2);
        let down = random(73, count * width * inner, 0.2);
        let shared = [74, 75, 76].map(|seed| random(seed, inner * width, 0.2));
        let score = random(77, width, 0.2);
        let residual = random(78, rows * width, 0.5);
        fn mixture<B: EvaluatorBackend>(
            [router, gate_up, down, score]: [&[f32]; 4],
            shared: &[Vec<f32>; 3],
            [count, top_k, width, inner]: [usize; 4],
        ) -> Mixture<B> {
            let gate_up = B::rows(
                weight::<B>(gate_up, [count * 2 * inner, width]),
                &vec![2 * inner; count],
            );
            let down = B::rows(weight::<B>(down, [count * width, inner]), &vec![width; count]);
            let experts = gate_up.into_iter().zip(down);
            Mixture {
                router: weight::<B>(router, [count, width]),
                top_k,
                experts: experts.map(|(gate_up, down)| Expert { gate_up, down }).collect(),
                shared_gate: weight::<B>(&shared[0], [inner, width]),
                shared_up: weight::<B>(&shared[1], [inner, width]),
                shared_down: weight::<B>(&shared[2], [width, inner]),
                shared_score: weight::<B>(score, [1, width]),
            }
        }
        let (parts, sizes) = ([&*router, &gate_up, &down, &score], [count, top_k, width, inner]);
        let expected = mixture_of_experts::mixture(
            on::<Reference, 3>(&residual, shape),
            on(&x, shape),
            &mixture::<Reference>(parts, &shared, sizes),
            Bf16,
        );
        let weights = mixture::<B>(parts, &shared, sizes);
        let run = |x: &[f32]| {
            poison::<B>(rows * width);
            poison::<B>(rows * top_k * width / 2);
            let (y, routing) =
                B::mixture_of_experts(narrow(&residual, shape), narrow::<B, 3>(x, shape), &weights, Bf16);
            let ids = routing
                .experts
                .into_data()
                .convert::<i64>()
                .to_vec::<i64>()
                .expect("converted");
            (values(y), ids, values(routing.weights))
        };
        let (y, ids, shares) = run(&x);
        let chosen = expected.1.experts.into_data().convert::<i64>();
        assert_eq!(ids, chosen.to_vec::<i64>().expect("converted"), "{what}");
        assert_close(&format!("{what}, weights"), &shares, &values(expected.1.weights), 1e-4);
        assert_close(&what, &y, &values(expected.0), 6e-3);
        assert_eq!(run(&x).0, y, "{what}, once more");

        let (bad, mut x) = (rows / 2, x);
        x[bad * width + 1] = f32::NAN;
        let (broken, _, shares) = run(&x);
        assert!(
            shares[bad * top_k..][..top_k].iter().all(|share| share.is_nan()),
            "{what}"
        );
        for (row, (broken, y)) in broken.chunks_exact(width).zip(y.chunks_exact(width)).enumerate() {
            match row == bad {
                true => assert!(broken.iter().all(|y| y.is_nan()), "{what}: row {row}"),
                false => assert_eq!(broken, y, "{what}: row {row} beside one that is no number"),
            }
        }
    }
}

fn weight<B: EvaluatorBackend>(values: &[f32], shape: [usize; 2]) -> B::Weight {
    B::weight(values.to_vec(), shape, Bf16, &Default::default())
}

fn experts<B: EvaluatorBackend>(matrices: &[[Vec<f32>; 2]], width: usize, inner: usize) -> Vec<Expert<B::Weight>> {
    let expert = |[gate_up, down]: &[Vec<f32>; 2]| Expert {
        gate_up: weight::<B>(gate_up, [2 * inner, width]),
        down: weight::<B>(down, [width, inner]),
    };
    matrices.iter().map(expert).collect()
}

/// One test per kernel on one backend.
macro_rules! suite {
    ($name:ident, $backend:ty, [$($test:ident),*]) => {
        mod $name {
            use perplexity_kernels::cube_backend::CubeWeight;

            #[test]
            fn expansion() {
                super::expansion::<$backend>(|matrix| {
                    CubeWeight::packed(matrix, false, &Default::default()).expect("addressable")
                });
            }

            $(#[test]
            fn $test() {
                super::$test::<$backend>();
            })*
        }
    };
}

#[cfg(feature = "vulkan")]
suite!(
    vulkan,
    burn::backend::Vulkan<f32, i32, u8>,
    [rounding, norms, gates, rotations, convolution, delta_rule, attention, cache, products, narrowed_products, mixtures, whole_mixtures, head, stored_weights, non_numbers]
);
#[cfg(feature = "cuda")]
suite!(
    cuda,
    burn::backend::Cuda<f32, i32>,
    [rounding, norms, gates, rotations, convolution, delta_rule, attention, cache, products, quantized_rows, quantized_non_numbers, narrowed_products, mixtures, whole_mixtures, head, stored_weights, non_numbers]
);
