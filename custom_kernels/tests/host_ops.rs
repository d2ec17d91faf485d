//! Every operation: numbers a reader can check by hand, then the CPU implementation against the reference in burn tensor
//! operations on random data of awkward sizes.
#![cfg(feature = "flex")]

mod random;
mod vectors;

use burn::tensor::{Tensor, TensorData, activation::silu};
use burn_flex::Flex;
use perplexity_kernels::backend::{
    ActivationFormat, BlockSelection, DeltaHeads, Expert, HeadRequest, RotaryTable, Routing,
};
use perplexity_kernels::ops::mixture_of_experts::{Mixture, mixture};
use perplexity_kernels::ops::quantize_rows::{self, Nvfp4Rounding};
use perplexity_kernels::ops::{
    append_rows, causal_attention, causal_conv_silu, delta_gates, embed_tokens, expert_feed_forward, gated_delta_rule,
    gated_rms_norm, offset_rms_norm, project, rotary, round, route_experts, score_head, sigmoid_gate, sparse_attention,
    swiglu,
};
use perplexity_kernels::{EvaluatorBackend, Precision};
use random::Random;

type B = Flex;
type Weight = <B as EvaluatorBackend>::Weight;

/// Token counts around the sizes of tiles, blocks and chunks.
const AWKWARD: [usize; 6] = [1, 63, 64, 65, 127, 129];
const FULL: Precision = Precision::Full;

impl Random {
    fn tensor<const D: usize>(&mut self, shape: [usize; D], scale: f32) -> Tensor<B, D> {
        of(self.values(shape.iter().product(), scale), shape)
    }
}

fn of<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

fn vec<const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().into_vec().unwrap()
}

fn weight(values: Vec<f32>, shape: [usize; 2]) -> Weight {
    B::weight(values, shape, FULL, &Default::default())
}

#[track_caller]
fn assert_close<const D: usize>(got: Tensor<B, D>, want: Tensor<B, D>, tolerance: f32, what: &str) {
    assert_eq!(got.dims(), want.dims(), "{what}");
    for (i, (got, want)) in vec(got).into_iter().zip(vec(want)).enumerate() {
        assert!(
            (got - want).abs() <= tolerance * want.abs().max(1.0),
            "{what}: element {i} is {got}, not {want}"
        );
    }
}

#[test]
fn rounding_is_to_nearest_even() {
    // bf16 has 8 significant bits: 257 lies between 256 and 258, 259 between 258 and 260.
    let x = of(vec![257.0, 259.0, -257.0, 1.0], [4]);
    assert_eq!(vec(B::round(x.clone(), Precision::Bf16)), [256.0, 260.0, -256.0, 1.0]);
    assert_eq!(vec(round::reference(x, Precision::Bf16)), [256.0, 260.0, -256.0, 1.0]);
    // Half precision has 11: 2049 lies between 2048 and 2050; 65,520 is the first that becomes infinite.
    let x = of(vec![2049.0, 65519.0, 65520.0], [3]);
    assert_eq!(vec(B::round(x, Precision::F16)), [2048.0, 65504.0, f32::INFINITY]);
}

#[test]
fn embedding_gathers_rows() {
    let table = weight((0..70).map(|i| i as f32).collect(), [35, 2]);
    let ids = [34, 0, 3, 3];
    let want = [68.0, 69.0, 0.0, 1.0, 6.0, 7.0, 6.0, 7.0];
    let got = B::embed_tokens(&table, &ids, 2, FULL);
    assert_eq!(got.dims(), [2, 2, 2]);
    assert_eq!(vec(got), want);
    assert_eq!(vec(embed_tokens::reference::<B>(B::dense(&table), &ids, 2, FULL)), want);
}

#[test]
fn projection_and_residual_round_once() {
    // 1 + 2^-8 rounds to 1 (ties to even); with the residual 2^-8 the sum 1 + 2^-7 is exact.
    let (x, w) = (of(vec![1.0, 1.0], [1, 1, 2]), weight(vec![1.0, 0.003_906_25], [1, 2]));
    assert_eq!(vec(B::project(x.clone(), &w, Precision::Bf16)), [1.0]);
    let residual = of(vec![0.003_906_25], [1, 1, 1]);
    assert_eq!(vec(B::project_add(residual, x, &w, Precision::Bf16)), [1.007_812_5]);
}

#[test]
fn projections_equal_the_reference() {
    let mut random = Random(1);
    for tokens in AWKWARD {
        let (n, k) = (tokens + 3, tokens * 5 + 1);
        let x = random.tensor([2, tokens, k], 1.0);
        let (w, up) = (
            weight(random.values(n * k, 0.1), [n, k]),
            weight(random.values(n * k, 0.1), [n, k]),
        );
        let residual = random.tensor([2, tokens, n], 1.0);
        let what = format!("{tokens} tokens");
        assert_close(
            B::project(x.clone(), &w, FULL),
            project::reference(x.clone(), B::dense(&w), FULL),
            1e-5,
            &what,
        );
        assert_close(
            B::project_add(residual.clone(), x.clone(), &w, FULL),
            project::reference_add(residual, x.clone(), B::dense(&w), FULL),
            1e-5,
            &what,
        );
        assert_close(
            B::swiglu(x.clone(), &w, &up, FULL),
            swiglu::reference(x, B::dense(&w), B::dense(&up), FULL),
            1e-5,
            &what,
        );
    }
}

const ENGINE: Nvfp4Rounding = Nvfp4Rounding::Engine;
const MODEL_OPT: Nvfp4Rounding = Nvfp4Rounding::ModelOpt;

fn nvfp4(divisor: f32, rounding: Nvfp4Rounding) -> ActivationFormat {
    ActivationFormat::Nvfp4 { divisor, rounding }
}

/// The CPU's and the reference's values for `x`; they must be the same.
#[track_caller]
fn narrowed(x: &[f32], width: usize, format: ActivationFormat) -> Vec<f32> {
    let x = || of(x.to_vec(), [1, x.len() / width, width]);
    let host = vec(B::quantize_rows(x(), format));
    let reference = vec(quantize_rows::reference(x(), format));
    for (i, (host, reference)) in host.iter().zip(&reference).enumerate() {
        let same = host == reference || host.is_nan() && reference.is_nan();
        assert!(same, "{format:?}: element {i} is {host}, the reference has {reference}");
    }
    host
}

#[test]
fn narrowed_activations_have_the_bits_of_their_definitions() {
    let floats = |words: &[u32]| words.iter().map(|word| f32::from_bits(*word)).collect::<Vec<_>>();
    let row = floats(&vectors::ROW);
    for (format, words) in [
        (ActivationFormat::Fp8, vectors::FP8),
        (nvfp4(1.0, ENGINE), vectors::NVFP4_ENGINE_1),
        (nvfp4(123.4, ENGINE), vectors::NVFP4_ENGINE),
        (nvfp4(123.4, MODEL_OPT), vectors::NVFP4_MODELOPT),
        (ActivationFormat::Int8, vectors::INT8),
    ] {
        assert_eq!(narrowed(&row, row.len(), format), floats(&words), "{format:?}");
    }
}

#[test]
fn four_bit_activations_round_ties_to_even_and_lose_tiny_groups() {
    // The largest is 6 and the divisor 1, so the scale is 1 and the codes are the values.
    let ties = [
        6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0.0,
    ];
    let even = [
        6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, 0.0,
    ];
    for rounding in [ENGINE, MODEL_OPT] {
        assert_eq!(narrowed(&ties, 16, nvfp4(1.0, rounding)), even);
        // a / 6 = 2^-10 is half the smallest scale: to even, zero. Just above it is not.
        let tiny = |a: f32| narrowed(&[a; 16], 16, nvfp4(1.0, rounding))[0];
        assert_eq!(tiny(6.0 * 2f32.powi(-10)), 0.0);
        assert_eq!(tiny(6.1 * 2f32.powi(-10)), 2f32.powi(-9) * 3.0);
        // Beyond the largest scale everything saturates.
        assert_eq!(tiny(1e6), 448.0 * 6.0);
    }
}

#[test]
fn the_orders_of_four_bit_rounding_differ_where_the_reciprocal_is_rounded() {
    // 29 * 1.5 / 6 = 7.25 lies between the scales 7 and 7.5 and goes to the even one; 1.5 / (6 * fp32(1 / 29)) is a little
    // more than 7.25.
    let largest = |rounding| narrowed(&[1.5; 16], 16, nvfp4(29.0, rounding))[0];
    assert_eq!(largest(ENGINE), 6.0 * 7.0 / 29.0);
    assert!((largest(MODEL_OPT) - 6.0 * 7.5 / 29.0).abs() < 1e-6);
}

#[test]
fn narrowed_activations_equal_the_reference_on_awkward_rows() {
    let mut random = Random(59);
    for width in [16, 48, 64, 80, 130, 272] {
        for scale in [1e-30, 1e-3, 1.0, 5e4] {
            let mut x = random.values(5 * width, scale);
            x[..width].fill(0.0);
            x[width] = 300.0 * scale;
            for format in [
                ActivationFormat::Fp8,
                nvfp4(2688.0 / scale, ENGINE),
                nvfp4(77.7, MODEL_OPT),
                nvfp4(2688.0 / scale, MODEL_OPT),
                ActivationFormat::Int8,
            ] {
                let y = narrowed(&x, width, format);
                assert!(y[..width].iter().all(|y| *y == 0.0), "a row of zeros");
                assert!(y.iter().all(|y| y.is_finite()), "{format:?} at {scale}");
            }
        }
    }
}

#[test]
fn activations_that_are_no_numbers_stay_none() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for format in [
            ActivationFormat::Fp8,
            nvfp4(1.0, ENGINE),
            nvfp4(1.0, MODEL_OPT),
            ActivationFormat::Int8,
        ] {
            let mut x = vec![1.0; 64];
            x[3] = bad;
            let x = of(x, [1, 1, 64]);
            assert!(
                vec(B::quantize_rows(x.clone(), format))[3].is_nan(),
                "{format:?}: {bad}"
            );
            assert!(
                vec(quantize_rows::reference(x, format))[3].is_nan(),
                "{format:?}: {bad}"
            );
        }
    }
}

#[test]
fn offset_norm_with_zero_weights_only_normalises_and_the_gated_norm_uses_its_weight_plainly() {
    // rms of (3, 4) is sqrt(12.5).
    let x = || of(vec![3.0, 4.0], [1, 2]);
    let (a, b) = (3.0 / 12.5f32.sqrt(), 4.0 / 12.5f32.sqrt());
    assert_close(
        B::offset_rms_norm(x(), of(vec![0.0, 0.0], [2]), 0.0, FULL),
        of(vec![a, b], [1, 2]),
        1e-6,
        "w = 0",
    );
    assert_close(
        B::offset_rms_norm(x(), of(vec![1.0, -1.0], [2]), 0.0, FULL),
        of(vec![2.0 * a, 0.0], [1, 2]),
        1e-6,
        "1 + w",
    );
    // SiLU(1) = 1 / (1 + e^-1).
    let z = of(vec![1.0, 0.0], [1, 2]);
    let silu = 1.0 / (1.0 + (-1.0f32).exp());
    assert_close(
        B::gated_rms_norm(x(), of(vec![0.5, 7.0], [2]), z.clone(), 0.0, FULL),
        of(vec![a * 0.5 * silu, 0.0], [1, 2]),
        1e-6,
        "w",
    );
    assert_eq!(
        vec(B::gated_rms_norm(x(), of(vec![0.0, 0.0], [2]), z, 0.0, FULL)),
        [0.0, 0.0]
    );
}

#[test]
fn norms_and_gates_equal_the_reference() {
    let mut random = Random(2);
    for width in AWKWARD {
        let (x, z) = (
            random.tensor([2, 3, 5, width], 3.0),
            random.tensor([2, 3, 5, width], 4.0),
        );
        let w = random.tensor([width], 1.0);
        let what = format!("width {width}");
        assert_close(
            B::offset_rms_norm(x.clone(), w.clone(), 1e-6, FULL),
            offset_rms_norm::reference(x.clone(), w.clone(), 1e-6, FULL),
            1e-6,
            &what,
        );
        assert_close(
            B::gated_rms_norm(x.clone(), w.clone(), z.clone(), 1e-6, FULL),
            gated_rms_norm::reference(x.clone(), w, z.clone(), 1e-6, FULL),
            2e-6,
            &what,
        );
        assert_close(
            B::sigmoid_gate(x.clone(), z.clone(), FULL),
            sigmoid_gate::reference(x, z, FULL),
            1e-6,
            &what,
        );
    }
}

#[test]
fn rotary_turns_half_split_pairs_by_the_position_times_the_frequency() {
    // Head of 4, 2 rotated features: one pair (0, 1) at frequency 1; position 1 turns (1, 0) to (cos 1, sin 1).
    let table = RotaryTable::<B>::new(&rotary::frequencies(1e7, 2), 1.0, 2, &Default::default());
    let x = of(vec![1.0, 0.0, 5.0, 6.0], [1, 1, 1, 4]);
    let want = of(vec![1f32.cos(), 1f32.sin(), 5.0, 6.0], [1, 1, 1, 4]);
    assert_close(B::rotary(x, &table, 1, FULL), want, 1e-7, "one pair");
    // 4 rotated features pair (0, 2) and (1, 3), not neighbours; the second pair turns by theta^(-1/2) = 1/10.
    let table = RotaryTable::<B>::new(&rotary::frequencies(100.0, 4), 1.0, 4, &Default::default());
    let x = of(vec![1.0, 0.0, 0.0, 1.0], [1, 1, 1, 4]);
    let want = of(vec![3f32.cos(), -0.3f32.sin(), 3f32.sin(), 0.3f32.cos()], [1, 1, 1, 4]);
    assert_close(B::rotary(x.clone(), &table, 3, FULL), want.clone(), 1e-6, "half-split");
    assert_close(
        rotary::reference(x, &table, 3, FULL),
        want,
        1e-6,
        "half-split reference",
    );
}

#[test]
fn partial_rotary_leaves_the_other_dimensions_bit_for_bit() {
    let table = RotaryTable::<B>::new(&rotary::frequencies(1e7, 4), 1.0, 1001, &Default::default());
    let x = Random(3).tensor([1, 1, 2, 16], 1.0);
    let (before, after) = (vec(x.clone()), vec(B::rotary(x, &table, 1000, Precision::Bf16)));
    for head in 0..2 {
        assert_eq!(before[head * 16 + 4..][..12], after[head * 16 + 4..][..12]);
        assert_ne!(before[head * 16..][..4], after[head * 16..][..4]);
    }
}

#[test]
fn rotary_equals_the_reference() {
    let mut random = Random(4);
    let table = RotaryTable::<B>::new(&rotary::frequencies(1e7, 10), 1.25, 300, &Default::default());
    for tokens in AWKWARD {
        let x = random.tensor([2, tokens, 3, 24], 2.0);
        assert_close(
            B::rotary(x.clone(), &table, 7, FULL),
            rotary::reference(x, &table, 7, FULL),
            1e-6,
            "rotary",
        );
    }
}

#[test]
fn convolution_is_causal_and_its_last_tap_meets_the_current_token() {
    // One channel, taps (1, 10, 100): sums 300+20... by hand; SiLU of numbers this large is the identity.
    let w = of(vec![1.0, 10.0, 100.0], [1, 3]);
    let (y, tail) = B::causal_conv_silu(
        of(vec![3.0, 4.0, 5.0], [1, 3, 1]),
        w,
        of(vec![1.0, 2.0], [1, 2, 1]),
        FULL,
    );
    assert_eq!(vec(y), [321.0, 432.0, 543.0]);
    assert_eq!(vec(tail), [4.0, 5.0]);
}

#[test]
fn convolution_equals_the_reference_and_carries_its_tail() {
    let mut random = Random(5);
    for tokens in AWKWARD {
        let (x, w) = (random.tensor([2, tokens, 37], 2.0), random.tensor([37, 4], 1.0));
        let tail = random.tensor([2, 3, 37], 2.0);
        let (y, next) = B::causal_conv_silu(x.clone(), w.clone(), tail.clone(), FULL);
        let (want, want_next) = causal_conv_silu::reference(x.clone(), w.clone(), tail.clone(), FULL);
        assert_close(y.clone(), want, 2e-6, "convolution");
        assert_close(next, want_next, 0.0, "tail");
        // In two passes, the first shorter than the tail.
        let cut = tokens.min(2);
        let (first, tail) = B::causal_conv_silu(x.clone().narrow(1, 0, cut), w.clone(), tail, FULL);
        let joined = if tokens > cut {
            let (second, _) = B::causal_conv_silu(x.narrow(1, cut, tokens - cut), w, tail, FULL);
            Tensor::cat(vec![first, second], 1)
        } else {
            first
        };
        assert_close(joined, y, 0.0, "two passes");
    }
}

#[test]
fn delta_gates_take_the_logarithm_of_the_rate_and_survive_no_decay() {
    // A_log = ln 4, a + dt_bias = 0: g = -4 ln 2. A_log = -inf: no decay, not NaN. Above 20 softplus is its argument.
    let a_log = of(vec![4f32.ln(), f32::NEG_INFINITY, 0.0], [3]);
    let dt_bias = of(vec![1.0, 50.0, 0.0], [3]);
    let (a, b) = (
        of(vec![-1.0, 50.0, 21.0], [1, 1, 3]),
        of(vec![0.0, 1e5, -1e5], [1, 1, 3]),
    );
    let want_g = of(vec![-4.0 * 2f32.ln(), 0.0, -21.0], [1, 1, 3]);
    let want_beta = of(vec![0.5, 1.0, 0.0], [1, 1, 3]);
    for (g, beta) in [
        B::delta_gates(a.clone(), b.clone(), a_log.clone(), dt_bias.clone()),
        delta_gates::reference(a, b, a_log, dt_bias),
    ] {
        assert_close(g, want_g.clone(), 1e-6, "g");
        assert_close(beta, want_beta.clone(), 1e-6, "beta");
    }
}

#[test]
fn delta_rule_of_two_tokens_by_hand() {
    // One head, Dk = 1, so the normalised key and query are 1 up to the epsilon; Dv = 1, q scaled by 1.
    // S0 = 0, token 0: u = 0.5 * 4 = 2, S = 2, o = 2. Token 1, decay 1/2: S = 1, u = 0.25 (3 - 1) = 0.5, S = o = 1.5.
    let heads = DeltaHeads {
        key_heads: 1,
        value_heads: 1,
        key_dim: 1,
        value_dim: 1,
    };
    let qkv = of(vec![1e3, 1e3, 4.0, 1e3, 1e3, 3.0], [1, 2, 3]);
    let g = of(vec![-7.0, 0.5f32.ln()], [1, 2, 1]);
    let beta = of(vec![0.5, 0.25], [1, 2, 1]);
    let zero = || Tensor::<B, 4>::zeros([1, 1, 1, 1], &Default::default());
    for (o, s) in [
        B::gated_delta_rule(qkv.clone(), g.clone(), beta.clone(), zero(), heads, FULL),
        gated_delta_rule::recurrent(qkv.clone(), g.clone(), beta.clone(), zero(), heads, FULL),
        gated_delta_rule::chunked(qkv, g, beta, zero(), heads, FULL),
    ] {
        assert_close(o, of(vec![2.0, 1.5], [1, 2, 1, 1]), 1e-6, "o");
        assert_close(s, of(vec![1.5], [1, 1, 1, 1]), 1e-6, "S");
    }
}

/// Unequal decays, one of them `exp(-90)`, unequal strengths, keys of tiny and ordinary norm, correlated.
fn delta_operands(random: &mut Random, tokens: usize, heads: DeltaHeads) -> [Tensor<B, 3>; 3] {
    let qkv = random.tensor([2, tokens, heads.channels()], 1.0) + 0.3;
    let mut g: Vec<f32> = random
        .values(2 * tokens * heads.value_heads, 1.0)
        .iter()
        .map(|x| -x.abs() * x.abs())
        .collect();
    for (i, g) in g.iter_mut().enumerate() {
        if i % 23 == 11 {
            *g = -90.0;
        }
    }
    let beta = random.tensor([2, tokens, heads.value_heads], 0.5) + 0.5;
    [qkv, of(g, [2, tokens, heads.value_heads]), beta]
}

#[test]
fn delta_rule_forms_agree_across_chunk_boundaries_under_strong_and_unequal_decay() {
    let mut random = Random(6);
    for tokens in [1, 2, 63, 64, 65, 127, 129, 200] {
        for heads in [
            DeltaHeads {
                key_heads: 2,
                value_heads: 4,
                key_dim: 16,
                value_dim: 40,
            },
            DeltaHeads {
                key_heads: 1,
                value_heads: 3,
                key_dim: 7,
                value_dim: 33,
            },
        ] {
            let [qkv, g, beta] = delta_operands(&mut random, tokens, heads);
            let state = random.tensor([2, heads.value_heads, heads.key_dim, heads.value_dim], 0.5);
            let run = (qkv, g, beta, state);
            let args = || (run.0.clone(), run.1.clone(), run.2.clone(), run.3.clone());
            let (qkv, g, beta, state) = args();
            let (want, want_state) = gated_delta_rule::recurrent(qkv, g, beta, state, heads, FULL);
            let (qkv, g, beta, state) = args();
            let (host, host_state) = B::gated_delta_rule(qkv, g, beta, state, heads, FULL);
            let (qkv, g, beta, state) = args();
            let (chunked, chunked_state) = gated_delta_rule::chunked(qkv, g, beta, state, heads, FULL);
            assert_close(host, want.clone(), 2e-5, &format!("host, {tokens} tokens"));
            assert_close(host_state, want_state.clone(), 2e-5, "host state");
            // A cumulated decay of -200 has a step of 1.5e-5, which its exponential takes over.
            assert_close(chunked, want, 6e-5, &format!("chunked, {tokens} tokens"));
            assert_close(chunked_state, want_state, 6e-5, "chunked state");
        }
    }
}

#[test]
fn delta_rule_of_every_length_to_130_equals_the_recurrence() {
    let heads = DeltaHeads {
        key_heads: 1,
        value_heads: 2,
        key_dim: 8,
        value_dim: 8,
    };
    let [qkv, g, beta] = delta_operands(&mut Random(14), 130, heads);
    let mut state = Tensor::<B, 4>::zeros([2, 2, 8, 8], &Default::default());
    let mut outputs = Vec::new();
    for length in 1..=130 {
        let last = |x: &Tensor<B, 3>| x.clone().narrow(1, length - 1, 1);
        let (o, next) = gated_delta_rule::recurrent(last(&qkv), last(&g), last(&beta), state, heads, FULL);
        outputs.push(o);
        state = next;
        let want = Tensor::cat(outputs.clone(), 1);
        let rows = |x: &Tensor<B, 3>| x.clone().narrow(1, 0, length);
        for (o, s) in [
            B::gated_delta_rule(rows(&qkv), rows(&g), rows(&beta), state.zeros_like(), heads, FULL),
            gated_delta_rule::chunked(rows(&qkv), rows(&g), rows(&beta), state.zeros_like(), heads, FULL),
        ] {
            assert_close(o, want.clone(), 6e-5, &format!("{length} tokens"));
            assert_close(s, state.clone(), 6e-5, &format!("state after {length} tokens"));
        }
    }
}

#[test]
fn delta_rule_in_passes_of_any_length_gives_equal_bits() {
    let heads = DeltaHeads {
        key_heads: 1,
        value_heads: 2,
        key_dim: 16,
        value_dim: 32,
    };
    let mut random = Random(7);
    let [qkv, g, beta] = delta_operands(&mut random, 130, heads);
    let zero = || Tensor::<B, 4>::zeros([2, 2, 16, 32], &Default::default());
    let (whole, last) = B::gated_delta_rule(qkv.clone(), g.clone(), beta.clone(), zero(), heads, FULL);
    for pass in [1, 16, 48, 64, 65] {
        let (mut state, mut parts) = (zero(), Vec::new());
        for start in (0..130).step_by(pass) {
            let rows = |x: &Tensor<B, 3>| x.clone().narrow(1, start, pass.min(130 - start));
            let (o, next) = B::gated_delta_rule(rows(&qkv), rows(&g), rows(&beta), state, heads, FULL);
            parts.push(o);
            state = next;
        }
        assert_close(Tensor::cat(parts, 1), whole.clone(), 0.0, &format!("passes of {pass}"));
        assert_close(state, last.clone(), 0.0, "state");
    }
}

#[test]
fn delta_rule_normalises_keys_of_norm_a_thousandth_in_float32() {
    // Key (1e-3, 0): its norm squared is 1e-6, so the fixed epsilon halves the square: k = (1/sqrt 2, 0).
    let heads = DeltaHeads {
        key_heads: 1,
        value_heads: 1,
        key_dim: 2,
        value_dim: 1,
    };
    let qkv = of(vec![1e3, 0.0, 1e-3, 0.0, 1.0], [1, 1, 5]);
    let (g, beta) = (of(vec![0.0], [1, 1, 1]), of(vec![1.0], [1, 1, 1]));
    let (o, s) = B::gated_delta_rule(
        qkv,
        g,
        beta,
        Tensor::zeros([1, 1, 2, 1], &Default::default()),
        heads,
        FULL,
    );
    assert_close(s, of(vec![0.5f32.sqrt(), 0.0], [1, 1, 2, 1]), 1e-5, "S");
    assert_close(o, of(vec![0.5], [1, 1, 1, 1]), 1e-5, "o = S / sqrt(Dk)");
}

#[test]
fn attention_by_hand() {
    // D = 4, scale 1/2; q = (2 ln 2, 0, 0, 0) against keys (1, ..) and (0, ..): scores ln 2 and 0, weights 2/3 and 1/3.
    let q = of(vec![2.0 * 2f32.ln(), 0.0, 0.0, 0.0], [1, 1, 1, 4]);
    let keys = of([[1.0, 0.0, 0.0, 0.0], [0.0; 4]].concat(), [1, 1, 2, 4]);
    let values = of([[3.0, 0.0, 0.0, 0.0], [0.0, 6.0, 0.0, 0.0]].concat(), [1, 1, 2, 4]);
    let want = of(vec![2.0, 2.0, 0.0, 0.0], [1, 1, 1, 4]);
    assert_close(
        B::causal_attention(q.clone(), keys.clone(), values.clone(), 1, FULL),
        want.clone(),
        1e-6,
        "host",
    );
    assert_close(
        causal_attention::reference(q, keys, values, 1, FULL),
        want,
        1e-6,
        "reference",
    );
}

#[test]
fn attention_equals_the_reference_and_never_reads_beyond_the_last_token() {
    let mut random = Random(8);
    for tokens in AWKWARD {
        for (heads, kv_heads, head_dim, first) in [(2, 1, 32, 0), (6, 2, 40, 5), (4, 4, 64, 100)] {
            let capacity = first + tokens + 9;
            let q = random.tensor([2, tokens, heads, head_dim], 2.0);
            let mut cache = || {
                let mut rows = random.values(2 * kv_heads * capacity * head_dim, 2.0);
                for (i, x) in rows.iter_mut().enumerate() {
                    if i / head_dim % capacity >= first + tokens {
                        *x = f32::NAN;
                    }
                }
                of(rows, [2, kv_heads, capacity, head_dim])
            };
            let (keys, values) = (cache(), cache());
            assert_close(
                B::causal_attention(q.clone(), keys.clone(), values.clone(), first, FULL),
                causal_attention::reference(q, keys, values, first, FULL),
                3e-6,
                &format!("{tokens} tokens, {heads} heads over {kv_heads}, from {first}"),
            );
        }
    }
}

#[test]
fn attention_in_passes_of_any_length_gives_equal_bits() {
    let mut random = Random(9);
    let (q, keys) = (random.tensor([1, 150, 2, 32], 3.0), random.tensor([1, 1, 150, 32], 3.0));
    let values = random.tensor([1, 1, 150, 32], 3.0);
    let whole = B::causal_attention(q.clone(), keys.clone(), values.clone(), 0, FULL);
    for pass in [1, 16, 48, 64, 128] {
        let parts = (0..150)
            .step_by(pass)
            .map(|start| {
                let q = q.clone().narrow(1, start, pass.min(150 - start));
                B::causal_attention(q, keys.clone(), values.clone(), start, FULL)
            })
            .collect();
        assert_close(Tensor::cat(parts, 1), whole.clone(), 0.0, &format!("passes of {pass}"));
    }
}

#[test]
fn attention_of_huge_activations_stays_finite() {
    let mut random = Random(10);
    let q = random.tensor([1, 65, 1, 32], 1e5);
    let (keys, values) = (random.tensor([1, 1, 65, 32], 1e5), random.tensor([1, 1, 65, 32], 1e5));
    assert!(
        vec(B::causal_attention(q, keys, values, 0, FULL))
            .iter()
            .all(|x| x.is_finite())
    );
}

#[test]
fn sparse_attention_by_hand() {
    // As above with a key in between whose block is not chosen: blocks of one key, the query at position 2 reads 0 and 2.
    // Position 2 completes its block, so that its own key is read because it is chosen.
    let q = of(vec![2.0 * 2f32.ln(), 0.0, 0.0, 0.0], [1, 1, 1, 4]);
    let keys = of([[1.0, 0.0, 0.0, 0.0], [9.0; 4], [0.0; 4]].concat(), [1, 1, 3, 4]);
    let values = of(
        [[3.0, 0.0, 0.0, 0.0], [9.0; 4], [0.0, 6.0, 0.0, 0.0]].concat(),
        [1, 1, 3, 4],
    );
    let selection = BlockSelection {
        ratio: 1,
        first_position: 2,
        blocks: vec![vec![0, 2]],
    };
    let want = of(vec![2.0, 2.0, 0.0, 0.0], [1, 1, 1, 4]);
    let host = B::sparse_attention(q.clone(), keys.clone(), values.clone(), &selection, FULL);
    assert_close(host, want.clone(), 1e-6, "host");
    let reference = sparse_attention::reference(q, keys, values, &selection, FULL);
    assert_close(reference, want, 1e-6, "reference");
    // Blocks of four: position 6 has one complete block and the tail 4, 5, 6.
    let selection = BlockSelection {
        ratio: 4,
        first_position: 6,
        blocks: vec![vec![0], vec![1]],
    };
    let ranges = |query, position| selection.ranges(query, position).collect::<Vec<_>>();
    assert_eq!((ranges(0, 6), ranges(1, 7)), (vec![0..4, 4..7], vec![4..8]));
}

#[test]
fn sparse_attention_equals_the_reference_and_with_all_blocks_dense_attention() {
    let mut random = Random(12);
    for (tokens, first, ratio) in [(1, 30, 4), (37, 9, 4), (300, 0, 4), (65, 70, 3)] {
        for (heads, kv_heads, head_dim) in [(2, 1, 32), (6, 2, 40)] {
            let capacity = first + tokens + 5;
            let q = random.tensor([2, tokens, heads, head_dim], 2.0);
            let keys = random.tensor([2, kv_heads, capacity, head_dim], 2.0);
            let values = random.tensor([2, kv_heads, capacity, head_dim], 2.0);
            let complete = |query: usize| ((first + query % tokens + 1) / ratio) as u32;
            let select = |choose: &dyn Fn(usize, u32) -> bool| BlockSelection {
                ratio,
                first_position: first,
                blocks: (0..2 * tokens)
                    .map(|query| (0..complete(query)).filter(|block| choose(query, *block)).collect())
                    .collect(),
            };
            let what = format!("{tokens} tokens from {first}, {heads} heads over {kv_heads}");
            let some = select(&|query, block| block == 0 || (query as u32 * 7 + block * 5).is_multiple_of(3));
            assert_close(
                B::sparse_attention(q.clone(), keys.clone(), values.clone(), &some, FULL),
                sparse_attention::reference(q.clone(), keys.clone(), values.clone(), &some, FULL),
                3e-6,
                &what,
            );
            assert_close(
                B::sparse_attention(q.clone(), keys.clone(), values.clone(), &select(&|_, _| true), FULL),
                B::causal_attention(q, keys, values, first, FULL),
                3e-6,
                &format!("{what}, all blocks"),
            );
        }
    }
}

#[test]
fn the_sigmoid_gate_of_a_norm_by_hand() {
    // (3, 4) has the mean square 12.5; weights 2 and 1; gates 1/2 and 3/4.
    let (x, z) = (of(vec![3.0, 4.0], [1, 2]), of(vec![0.0, 3f32.ln()], [1, 2]));
    let got = B::sigmoid_gated_rms_norm(x, of(vec![2.0, 1.0], [2]), z, 0.0, FULL);
    let rms = 12.5f32.sqrt();
    assert_close(got, of(vec![3.0 / rms, 3.0 / rms], [1, 2]), 1e-6, "gated norm");
}

#[test]
fn appended_rows_lie_where_attention_reads_them() {
    let mut random = Random(11);
    let cache = of(vec![f32::NAN; 2 * 3 * 7 * 5], [2, 3, 7, 5]);
    let rows = random.tensor([2, 4, 3, 5], 1.0);
    let got = B::append_rows(cache.clone(), rows.clone(), 2);
    let want = append_rows::reference(cache, rows.clone(), 2);
    let bits = |x: Tensor<B, 4>| vec(x).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(got.clone()), bits(want));
    assert_close(got.slice([0..2, 0..3, 2..6, 0..5]).swap_dims(1, 2), rows, 0.0, "rows");
}

#[test]
fn head_scores_leave_out_the_rows_that_are_no_tokens() {
    // Logits of the one row: ln 1, ln 2, ln 2, ln 5, then a padding row that would dominate.
    let head = weight(vec![0.0, 2f32.ln(), 2f32.ln(), 5f32.ln(), 1e4], [5, 1]);
    let hidden = of(vec![1.0], [1, 1]);
    let ask = HeadRequest {
        public_rows: 4,
        targets: &[1],
        top_k: 3,
        candidates_per_row: 2,
        candidates: &[0, 3],
    };
    for scores in [
        B::score_head(hidden.clone(), &head, &ask, FULL),
        score_head::tiled::<B>(hidden.clone(), &head, &ask, FULL),
    ] {
        let close = |got: &[f32], want: &[f32]| {
            assert_eq!(got.len(), want.len());
            got.iter()
                .zip(want)
                .for_each(|(got, want)| assert!((got - want.ln()).abs() < 1e-6, "{got} {want}"));
        };
        close(&scores.logprobs, &[0.2]);
        assert_eq!(scores.top_ids, [3, 1, 2], "equal logits in ascending id");
        close(&scores.top_logprobs, &[0.5, 0.2, 0.2]);
        close(&scores.candidate_logprobs, &[0.1, 0.5]);
    }
}

#[test]
fn head_scores_equal_the_reference_and_agree_with_themselves() {
    let mut random = Random(12);
    for rows in AWKWARD {
        let (vocabulary, public) = (2100, 2077);
        let head = weight(random.values(vocabulary * 24, 1.0), [vocabulary, 24]);
        let hidden = random.tensor([rows, 24], 1.0);
        let targets: Vec<u32> = (0..rows as u32).map(|i| i * 37 % public as u32).collect();
        // bf16 logits tie often, so the order of the top tokens is decided by the tie rule.
        for precision in [FULL, Precision::Bf16] {
            let ask = HeadRequest {
                public_rows: public,
                targets: &targets,
                top_k: 40,
                candidates_per_row: 1,
                candidates: &targets,
            };
            let got = B::score_head(hidden.clone(), &head, &ask, precision);
            let want = score_head::tiled::<B>(hidden.clone(), &head, &ask, precision);
            assert_eq!(got.top_ids, want.top_ids);
            let close = |got: &[f32], want: &[f32]| {
                assert_eq!(got.len(), want.len());
                got.iter()
                    .zip(want)
                    .for_each(|(got, want)| assert!((got - want).abs() < 2e-6, "{got} {want}"));
            };
            close(&got.logprobs, &want.logprobs);
            close(&got.top_logprobs, &want.top_logprobs);
            assert_eq!(got.candidate_logprobs, got.logprobs, "the same id scored twice");
            let again = HeadRequest {
                top_k: 0,
                candidates_per_row: 40,
                candidates: &got.top_ids,
                ..ask
            };
            let again = B::score_head(hidden.clone(), &head, &again, precision);
            assert_eq!(
                again.candidate_logprobs, got.top_logprobs,
                "top tokens scored as candidates"
            );
            assert!(again.top_ids.is_empty());
        }
    }
}

#[test]
fn head_scores_of_a_row_do_not_depend_on_the_tile() {
    let mut random = Random(13);
    let head = weight(random.values(1100 * 16, 1.0), [1100, 16]);
    let hidden = random.tensor([101, 16], 2.0);
    let targets: Vec<u32> = (0..101).collect();
    let ask = |targets| HeadRequest {
        public_rows: 1100,
        targets,
        top_k: 0,
        candidates_per_row: 0,
        candidates: &[],
    };
    let all = B::score_head(hidden.clone(), &head, &ask(&targets), FULL);
    for row in [0, 47, 48, 63, 64, 100] {
        let alone = B::score_head(hidden.clone().narrow(0, row, 1), &head, &ask(&targets[row..=row]), FULL);
        assert_eq!(alone.logprobs[0], all.logprobs[row]);
    }
}

/// Logits as the router's result: one input feature that is 1, so that a column of the router is the row of logits.
fn routed(logits: &[f32], top_k: usize) -> (Vec<i64>, Vec<f32>) {
    let router = weight(logits.to_vec(), [logits.len(), 1]);
    let one = || of(vec![1.0], [1, 1, 1]);
    let values = |routing: Routing<B>| {
        let ids = routing.experts.into_data().convert::<i64>().into_vec().unwrap();
        (ids, vec(routing.weights))
    };
    let fast = values(B::route_experts(one(), &router, top_k));
    let plain = values(route_experts::reference::<B>(one(), B::dense(&router), top_k));
    assert_eq!(fast.0, plain.0, "{logits:?}");
    for (fast, plain) in fast.1.iter().zip(&plain.1) {
        assert!((fast - plain).abs() < 1e-6, "{logits:?}: {fast}, not {plain}");
    }
    fast
}

#[test]
fn router_takes_the_largest_probabilities_and_makes_them_sum_to_one() {
    // e^0 : e^-ln 3 is 3 : 1, whatever the others are.
    let (ids, weights) = routed(&[-5.0, 0.0, -3f32.ln(), -9.0], 2);
    assert_eq!(ids, [1, 2]);
    assert!((weights[0] - 0.75).abs() < 1e-6 && (weights[1] - 0.25).abs() < 1e-6);
    // All below zero: still the largest, not the largest magnitudes and not padding.
    assert_eq!(routed(&[-7.0, -3.0, -2.0, -9.0, -2.5], 3).0, [2, 4, 1]);
    // All of them, however unlikely: a probability that underflows keeps its place and weighs nothing.
    let (ids, weights) = routed(&[0.0, -200.0, -1.0, -300.0], 4);
    assert_eq!((ids, &weights[2..]), (vec![0, 2, 1, 3], &[0.0, 0.0][..]));
    assert_eq!(routed(&[-42.0], 1), (vec![0], vec![1.0]));
}

#[test]
fn equal_logits_go_to_the_lower_expert() {
    // A tie at the last place, all below zero.
    let (ids, weights) = routed(&[-2.0, -1.0, -2.0, -2.0], 2);
    assert_eq!(ids, [1, 0]);
    assert!((weights[0] - 1.0 / (1.0 + (-1f32).exp())).abs() < 1e-6);
    // Ties above it, and everywhere.
    assert_eq!(routed(&[1.0, 3.0, 3.0, 2.0, 3.0], 4).0, [1, 2, 4, 3]);
    assert_eq!(routed(&[-0.5; 9], 5), (vec![0, 1, 2, 3, 4], vec![0.2; 5]));
    assert_eq!(routed(&[-0.0, 0.0, -0.0], 2).0, [0, 1]);
    // Logits that differ in the last bit are no tie, even where their probabilities are.
    assert_eq!(routed(&[100.0, 1.0, 1.0 + f32::EPSILON], 2).0, [0, 2]);
}

#[test]
fn what_is_not_a_number_in_the_router_shows_in_the_weights() {
    for nan in [f32::NAN, -f32::NAN] {
        let router = weight(vec![3.0, nan, 2.0, 1.0], [4, 1]);
        let routing = B::route_experts(of(vec![1.0], [1, 1, 1]), &router, 2);
        assert!(vec(routing.weights).iter().all(|weight| weight.is_nan()));
    }
}

#[test]
fn routing_equals_the_reference() {
    let mut random = Random(20);
    for (tokens, experts, top_k, width) in [(1, 1, 1, 3), (63, 5, 5, 17), (65, 16, 4, 33), (129, 256, 8, 64)] {
        let x = random.tensor([2, tokens, width], 1.0);
        // Coarse values make ties.
        let values = random.values(experts * width, 3.0).iter().map(|v| v.round()).collect();
        let (x, router) = (x.mul_scalar(2.0).round(), weight(values, [experts, width]));
        let fast = B::route_experts(x.clone(), &router, top_k);
        let plain = route_experts::reference(x, B::dense(&router), top_k);
        assert_eq!(fast.experts.dims(), [2 * tokens, top_k]);
        let ids = |routing: &Routing<B>| routing.experts.to_data().convert::<i64>().into_vec::<i64>().unwrap();
        assert_eq!(ids(&fast), ids(&plain), "{experts} experts");
        assert_close(fast.weights, plain.weights, 1e-6, "weights");
    }
}

/// Experts of random matrices.
fn bank(random: &mut Random, count: usize, width: usize, inner: usize) -> Vec<Expert<Weight>> {
    let mut matrix = |shape: [usize; 2]| weight(random.values(shape[0] * shape[1], 0.3), shape);
    let expert = |_| Expert {
        gate_up: matrix([2 * inner, width]),
        down: matrix([width, inner]),
    };
    (0..count).map(expert).collect()
}

fn routing(ids: Vec<i64>, weights: Vec<f32>, top_k: usize) -> Routing<B> {
    let shape = [weights.len() / top_k, top_k];
    Routing {
        experts: Tensor::from_data(TensorData::new(ids, shape), &Default::default()),
        weights: of(weights, shape),
    }
}

/// What a backend without a method of its own does.
fn grouped(x: Tensor<B, 3>, routing: &Routing<B>, experts: &[Expert<Weight>]) -> Tensor<B, 3> {
    expert_feed_forward::grouped(x, routing, experts, FULL, |gate, up| silu(gate) * up)
}

#[test]
fn experts_by_hand() {
    // Two experts of one inner unit; SiLU(20) is 20 to nine digits. Expert 0: 20 * 2 * (1, 10), expert 1: 20 * 3 * (5, 0).
    let expert = |up: f32, down: [f32; 2]| Expert {
        gate_up: weight(vec![20.0, 0.0, up, 0.0], [2, 2]),
        down: weight(down.to_vec(), [2, 1]),
    };
    let experts = [expert(2.0, [1.0, 10.0]), expert(3.0, [5.0, 0.0])];
    let x = || of(vec![1.0, 7.0, 1.0, 7.0], [1, 2, 2]);
    let want = of(vec![0.25 * 40.0 + 0.75 * 300.0, 0.25 * 400.0, 300.0, 0.0], [1, 2, 2]);
    let routing = routing(vec![1, 0, 1, 0], vec![0.75, 0.25, 1.0, 0.0], 2);
    assert_close(
        B::expert_feed_forward(x(), &routing, &experts),
        want.clone(),
        1e-6,
        "host",
    );
    let plain = expert_feed_forward::reference(x(), &routing, &experts);
    assert_close(plain, want.clone(), 1e-6, "reference");
    let grouped = grouped(x(), &routing, &experts);
    assert_close(grouped, want, 1e-6, "grouped");
}

#[test]
fn experts_equal_the_reference_whoever_is_idle_or_crowded() {
    let mut random = Random(21);
    for (tokens, count, top_k, width, inner) in [
        (1, 1, 1, 3, 1),
        (1, 7, 2, 33, 17),
        (65, 7, 3, 33, 17),
        (129, 16, 4, 65, 40),
    ] {
        let experts = bank(&mut random, count, width, inner);
        let x = random.tensor([2, tokens, width], 1.0);
        let rows = 2 * tokens;
        let weights = random.values(rows * top_k, 1.0);
        let spread = |row: usize, place: usize| (row * 3 + place) % count;
        // All rows to the last experts, the others idle; then spread; then only the first few rows to expert 0.
        let crowded = |_: usize, place: usize| count - 1 - place;
        let lonely = |row: usize, place: usize| if row < 3 { place } else { (place + 1) % count };
        for choice in [&spread as &dyn Fn(usize, usize) -> usize, &crowded, &lonely] {
            let ids = (0..rows * top_k).map(|i| choice(i / top_k, i % top_k) as i64).collect();
            let routing = routing(ids, weights.clone(), top_k);
            let what = format!("{tokens} tokens, {count} experts");
            let fast = B::expert_feed_forward(x.clone(), &routing, &experts);
            let plain = expert_feed_forward::reference(x.clone(), &routing, &experts);
            assert_close(fast, plain.clone(), 1e-5, &what);
            let grouped = grouped(x.clone(), &routing, &experts);
            assert_close(grouped, plain, 1e-5, &what);
        }
    }
}

#[test]
fn a_row_of_experts_does_not_depend_on_its_neighbours() {
    let mut random = Random(22);
    let (count, top_k, width, rows) = (9, 4, 48, 4200);
    let experts = bank(&mut random, count, width, 24);
    let router = weight(random.values(count * width, 1.0), [count, width]);
    let x = random.tensor([1, rows, width], 1.0);
    let moe = |x: Tensor<B, 3>| {
        let routing = B::route_experts(x.clone(), &router, top_k);
        vec(B::expert_feed_forward(x, &routing, &experts))
    };
    let all = moe(x.clone());
    for row in [0, 1, 95, 96, 4095, 4096, 4199] {
        let alone = moe(x.clone().slice([0..1, row..row + 1, 0..width]));
        assert_eq!(alone, all[row * width..][..width], "row {row}");
    }
}

#[test]
fn an_idle_expert_is_not_read() {
    // Its weights are not numbers, and nobody notices.
    let poisoned = |value| Expert {
        gate_up: weight(vec![value; 4], [2, 2]),
        down: weight(vec![value; 2], [2, 1]),
    };
    let experts = [poisoned(f32::NAN), poisoned(1.0), poisoned(f32::NAN)];
    let routing = routing(vec![1, 1], vec![1.0, 0.5], 1);
    let x = || of(vec![1.0; 4], [1, 2, 2]);
    let fast = B::expert_feed_forward(x(), &routing, &experts);
    let plain = expert_feed_forward::reference(x(), &routing, &experts);
    assert!(vec(fast.clone()).iter().all(|y| y.is_finite()));
    assert_close(fast.clone(), plain, 1e-6, "poisoned");
    assert_close(grouped(x(), &routing, &experts), fast, 1e-6, "poisoned");
}

#[test]
fn mixture_by_hand() {
    // Two rows, SiLU(20) = 20 and SiLU(0) = 0. Logits (ln 3, 0) and (0, ln 3): weights 3/4 and 1/4 either way round.
    let ln3 = 3f32.ln();
    let column = |values: [f32; 2]| weight(values.to_vec(), [2, 1]);
    let row = |values: [f32; 2]| weight(values.to_vec(), [1, 2]);
    let expert = |gain: f32| Expert {
        gate_up: weight(vec![20.0, 20.0, gain, gain], [2, 2]),
        down: column([1.0, 0.0]),
    };
    let weights = Mixture::<B> {
        router: weight(vec![ln3, 0.0, 0.0, ln3], [2, 2]),
        top_k: 2,
        experts: vec![expert(1.0), expert(2.0)],
        shared_gate: row([20.0, 20.0]),
        shared_up: row([1.0, 1.0]),
        shared_down: column([0.0, 8.0]),
        // sigmoid(ln 3) = 3/4, sigmoid(0) = 1/2.
        shared_score: row([ln3, 0.0]),
    };
    let (residual, x) = (
        of(vec![1.0, 2.0, 3.0, 4.0], [1, 2, 2]),
        of(vec![1.0, 0.0, 0.0, 1.0], [1, 2, 2]),
    );
    let (y, routing) = mixture(residual, x, &weights, FULL);
    assert_eq!(
        routing.experts.into_data().convert::<i64>().into_vec::<i64>().unwrap(),
        [0, 1, 1, 0]
    );
    // Routed: 20 (3/4 + 2/4) and 20 (2 * 3/4 + 1/4); shared: 160 times its gate.
    let want = of(vec![1.0 + 25.0, 2.0 + 120.0, 3.0 + 35.0, 4.0 + 80.0], [1, 2, 2]);
    assert_close(y, want, 1e-6, "mixture");
}
