//! Every operation: numbers a reader can check by hand, then the CPU implementation against the reference in burn tensor
//! operations on random data of awkward sizes.
#![cfg(feature = "flex")]

use burn::tensor::{Tensor, TensorData};
use burn_flex::Flex;
use perplexity_kernels::backend::{DeltaHeads, HeadRequest, RotaryTable};
use perplexity_kernels::ops::{
    append_rows, causal_attention, causal_conv_silu, delta_gates, embed_tokens, gated_delta_rule, gated_rms_norm,
    offset_rms_norm, project, rotary, round, score_head, sigmoid_gate, swiglu,
};
use perplexity_kernels::{EvaluatorBackend, Precision};

type B = Flex;

/// Token counts around the sizes of tiles, blocks and chunks.
const AWKWARD: [usize; 6] = [1, 63, 64, 65, 127, 129];
const FULL: Precision = Precision::Full;

/// Deterministic values in `[-scale, scale)`.
struct Random(u64);

impl Random {
    fn values(&mut self, count: usize, scale: f32) -> Vec<f32> {
        let mut next = || {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            ((self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
        };
        (0..count).map(|_| next()).collect()
    }

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

fn weight(values: Vec<f32>, shape: [usize; 2]) -> <B as EvaluatorBackend>::Weight {
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
