//! Operations in f64: near the backend's own on random data of awkward sizes, and with roundings that a reader can check
//! by hand. What they give on a model is held against Hugging Face in the tests of the model.
#![cfg(feature = "flex")]

mod random;

use burn::tensor::{Tensor, TensorData};
use burn_flex::Flex;
use perplexity_kernels::backend::{BlockSelection, DeltaHeads, Expert, HeadRequest, RotaryTable, Routing};
use perplexity_kernels::evaluation::{Arithmetic, Steps};
use perplexity_kernels::ops::mixture_of_experts::Mixture;
use perplexity_kernels::ops::{hyper_connection, ngram_injection, rotary};
use perplexity_kernels::{Evaluation, EvaluatorBackend, Precision};
use random::Random;

type B = Flex;

/// The backend's own operations.
const NATIVE: Evaluation = Evaluation {
    arithmetic: Arithmetic::Native,
    to: Precision::Full,
};

fn precise(steps: Steps, to: Precision) -> Evaluation {
    let arithmetic = Arithmetic::Precise(steps);
    Evaluation { arithmetic, to }
}

fn of<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

fn vec<const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().into_vec().unwrap()
}

fn weight(values: Vec<f32>, shape: [usize; 2]) -> <B as EvaluatorBackend>::Weight {
    B::weight(values, shape, Precision::Full, &Default::default())
}

impl Random {
    fn tensor<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<B, D> {
        of(self.values(shape.iter().product(), 1.0), shape)
    }
}

/// The two ways agree to a few units of float32.
#[track_caller]
fn assert_near<const D: usize>(what: &str, of: impl Fn(Evaluation) -> Tensor<B, D>) {
    let (native, precise) = (of(NATIVE), of(precise(Steps::Once, Precision::Full)));
    assert_eq!(native.dims(), precise.dims(), "{what}");
    for (i, (native, precise)) in vec(native).into_iter().zip(vec(precise)).enumerate() {
        let bound = 4e-6 * precise.abs().max(1.0);
        assert!(
            (native - precise).abs() <= bound,
            "{what}: element {i} is {native}, {precise} in f64"
        );
    }
}

#[test]
fn every_operation_is_the_backends_in_f64() {
    let mut random = Random(3);
    for tokens in [1, 5, 63, 66] {
        let x = random.tensor([2, tokens, 37]);
        let residual = random.tensor([2, tokens, 35]);
        let w = weight(random.values(35 * 37, 1.0), [35, 37]);
        let up = weight(random.values(35 * 37, 1.0), [35, 37]);
        assert_near("project", |how| how.project(x.clone(), &w));
        assert_near("project_add", |how| how.project_add(residual.clone(), x.clone(), &w));
        assert_near("swiglu", |how| how.swiglu(x.clone(), &w, &up));

        let (norm, z) = (random.tensor([37]), random.tensor([2, tokens, 37]));
        assert_near("offset norm", |how| how.offset_rms_norm(x.clone(), norm.clone(), 1e-6));
        assert_near("gated norm", |how| {
            how.gated_rms_norm(x.clone(), norm.clone(), z.clone(), 1e-6)
        });
        assert_near("sigmoid gate", |how| how.sigmoid_gate(x.clone(), z.clone()));

        let (taps, tail) = (random.tensor([37, 4]), random.tensor([2, 3, 37]));
        assert_near("convolution", |how| {
            how.causal_conv_silu(x.clone(), taps.clone(), tail.clone()).0
        });
        assert_near("tail", |how| {
            how.causal_conv_silu(x.clone(), taps.clone(), tail.clone()).1
        });

        let (a, b) = (random.tensor([2, tokens, 6]), random.tensor([2, tokens, 6]));
        let (a_log, dt_bias) = (random.tensor([6]), random.tensor([6]));
        let gates = |how: Evaluation| how.delta_gates(a.clone() * 30.0, b.clone(), a_log.clone(), dt_bias.clone());
        assert_near("g", |how| gates(how).0);
        assert_near("beta", |how| gates(how).1);

        let heads = DeltaHeads {
            key_heads: 2,
            value_heads: 6,
            key_dim: 9,
            value_dim: 19,
        };
        let qkv = random.tensor([2, tokens, heads.channels()]);
        let state = random.tensor([2, 6, 9, 19]);
        let (g, beta) = gates(NATIVE);
        let rule = |how: Evaluation| how.gated_delta_rule(qkv.clone(), g.clone(), beta.clone(), state.clone(), heads);
        assert_near("delta rule", |how| rule(how).0);
        assert_near("state", |how| rule(how).1);

        let (first, capacity) = (7, 80);
        let q = random.tensor([2, tokens, 6, 19]);
        let (keys, values) = (random.tensor([2, 2, capacity, 19]), random.tensor([2, 2, capacity, 19]));
        assert_near("attention", |how| {
            how.causal_attention(q.clone() * 5.0, keys.clone(), values.clone(), first)
        });
        let table = RotaryTable::<B>::new(&rotary::frequencies(1e7, 10), 1.25, 80, &Default::default());
        assert_near("rotary", |how| how.rotary(q.clone(), &table, first));
    }
}

#[test]
fn head_scores_are_the_backends_in_f64() {
    let mut random = Random(5);
    let head = weight(random.values(300 * 24, 1.0), [300, 24]);
    let hidden = random.tensor([70, 24]);
    let targets: Vec<u32> = (0..70).collect();
    let ask = HeadRequest {
        public_rows: 290,
        targets: &targets,
        top_k: 9,
        candidates_per_row: 1,
        candidates: &targets,
    };
    let native = NATIVE.score_head(hidden.clone(), &head, &ask);
    let precise = precise(Steps::Each, Precision::Full).score_head(hidden, &head, &ask);
    assert_eq!(native.top_ids, precise.top_ids);
    assert_eq!(precise.logprobs, precise.candidate_logprobs);
    let pairs = native.logprobs.iter().zip(&precise.logprobs);
    pairs.for_each(|(native, precise)| assert!((native - precise).abs() < 4e-6, "{native} {precise}"));
}

/// One rounding to bfloat16, and Hugging Face's roundings.
fn both<const D: usize>(of: impl Fn(Evaluation) -> Tensor<B, D>) -> [f32; 2] {
    [Steps::Once, Steps::Each].map(|steps| vec(of(precise(steps, Precision::Bf16)))[0])
}

/// In bfloat16 the neighbour above 1; their middle 1 + 2^-8 goes to the even 1.
const ABOVE: f32 = 1.007_812_5;

#[test]
fn a_product_is_rounded_before_the_residual_sum_or_not() {
    // 2^-8 + 2^-17 is just above the middle; rounded first it is 2^-8, the middle itself.
    let w = weight(vec![1.0, 1.0], [1, 2]);
    let x = of(vec![2f32.powi(-8), 2f32.powi(-17)], [1, 1, 2]);
    let sums = both(|how| how.project_add(of(vec![1.0], [1, 1, 1]), x.clone(), &w));
    assert_eq!(sums, [ABOVE, 1.0]);
}

#[test]
fn a_sum_that_float32_would_lose_decides_the_rounding() {
    // 1 + 2^-8 + 2^-40: float32 holds only the middle.
    let w = weight(vec![1.0, 1.0, 1.0], [1, 3]);
    let x = of(vec![1.0, 2f32.powi(-8), 2f32.powi(-40)], [1, 1, 3]);
    assert_eq!(both(|how| how.project(x.clone(), &w)), [ABOVE, ABOVE]);
    let native = Evaluation {
        to: Precision::Bf16,
        ..NATIVE
    };
    assert_eq!(vec(native.project(x, &w)), [1.0]);
}

#[test]
fn a_gate_is_rounded_before_its_product_or_not() {
    // sigmoid(1) = 0.7310586, rounded 187/256 = 0.7304688; times 247 that is 180.57 or 180.43, and bfloat16 has integers
    // there.
    let gated = both(|how| how.sigmoid_gate(of(vec![247.0], [1]), of(vec![1.0], [1])));
    assert_eq!(gated, [181.0, 180.0]);
}

#[test]
fn the_taps_sum_is_rounded_before_its_silu_or_not() {
    // The sum 1 + 2^-8 is the middle of two neighbours and goes to 1: SiLU(1) = 0.73106 is 187/256 to bfloat16. Not
    // rounded first, SiLU(1.00390625) = 0.73469 is 188/256.
    let (x, w) = (of(vec![2f32.powi(-8), 1.0], [1, 2, 1]), of(vec![1.0, 1.0], [1, 2]));
    let convolved = [Steps::Once, Steps::Each].map(|steps| {
        let tail = of(vec![0.0], [1, 1, 1]);
        vec(precise(steps, Precision::Bf16)
            .causal_conv_silu(x.clone(), w.clone(), tail)
            .0)[1]
    });
    assert_eq!(convolved, [188.0 / 256.0, 187.0 / 256.0]);
}

#[test]
fn beta_is_bfloat16_only_step_by_step() {
    let beta = [Steps::Once, Steps::Each].map(|steps| {
        let one = || of(vec![1.0], [1, 1, 1]);
        let none = || of(vec![0.0], [1]);
        vec(precise(steps, Precision::Bf16)
            .delta_gates(one(), one(), none(), none())
            .1)[0]
    });
    // sigmoid(1) = 0.7310586; bfloat16 steps by 2^-8 there, and 187 of them are nearest.
    assert_eq!(beta, [0.731_058_6, 187.0 / 256.0]);
}

#[test]
fn hugging_faces_frequencies_are_these_words() {
    // torch 2.15: 1.0 / (1e7 ** (torch.arange(0, 64, 2).float() / 64))
    let words = "3f800000 3f1ab32b 3ebaf81b 3e61f835 3e088d77 3da50956 3d47763f 3cf11177 3c91ad39 3c301052 3bd4ca15 \
                 3b80967d 3b1b690d 3abbd3ed 3a6301e2 3a092e02 39a5cb60 394860c1 38f22ce2 3892587e 3830df52 37d5c441 \
                 37812dab 371c1fc4 36bcb0c1 36640cc6 3609cf4a 35a68e4c 35494c57 34f3499d 3493048e 3431af44";
    let found = rotary::stepwise_frequencies(&rotary::frequencies(1e7, 64));
    let found: Vec<String> = found.iter().map(|f| format!("{:08x}", f.to_bits())).collect();
    assert_eq!(found.join(" "), words);
    let positions: Vec<f64> = (0..3000).map(f64::from).collect();
    // And their angles: all of them bfloat16, position 0 without turn.
    let angles = rotary::Angles::stepwise(&rotary::frequencies(1e7, 64), 1.0, &positions);
    assert!(
        angles
            .cos
            .iter()
            .chain(&angles.sin)
            .all(|x| (*x as f32).to_bits() & 0xffff == 0)
    );
    assert_eq!((angles.cos[0], angles.sin[0]), (1.0, 0.0));
    // Pair 0 turns by the position itself; bfloat16 steps by 2^-8 below 1.
    assert!((angles.cos[2900 * 32] - 2900f64.cos()).abs() <= 2f64.powi(-9));
}

#[test]
fn mixture_of_experts() {
    let mut random = Random(31);
    for (tokens, experts, top_k, width, inner) in [(1, 1, 1, 1, 1), (5, 7, 3, 33, 17), (65, 16, 4, 40, 24)] {
        let mut matrix = |rows: usize, columns: usize| {
            let values = random
                .values(rows * columns, 1.0)
                .into_iter()
                .map(|value| 0.2 * value)
                .collect();
            weight(values, [rows, columns])
        };
        let weights = Mixture::<B> {
            router: matrix(experts, width),
            top_k,
            experts: (0..experts)
                .map(|_| Expert {
                    gate_up: matrix(2 * inner, width),
                    down: matrix(width, inner),
                })
                .collect(),
            shared_gate: matrix(inner + 2, width),
            shared_up: matrix(inner + 2, width),
            shared_down: matrix(width, inner + 2),
            shared_score: matrix(1, width),
        };
        let (residual, x) = (random.tensor([2, tokens, width]), random.tensor([2, tokens, width]));
        let of = |evaluation: Evaluation| evaluation.mixture_of_experts(residual.clone(), x.clone(), &weights);
        assert_near("mixture of experts", |evaluation| of(evaluation).0);
        let (native, precise) = (of(NATIVE).1, of(precise(Steps::Once, Precision::Full)).1);
        let ids = |routing: &Routing<B>| routing.experts.to_data().convert::<i64>().into_vec::<i64>().unwrap();
        assert_eq!(ids(&native), ids(&precise));
    }
}

/// For one feature that is 1: every gate is 20, whose SiLU is 20 to eight digits, the rest as given; `shared` is its down
/// and its score.
fn mixture(logits: &[f32], up: f32, down: &[f32], shared: [f32; 2]) -> Mixture<B> {
    let one = |value: f32| weight(vec![value], [1, 1]);
    Mixture {
        router: weight(logits.to_vec(), [logits.len(), 1]),
        top_k: logits.len(),
        experts: down
            .iter()
            .map(|&down| Expert {
                gate_up: weight(vec![20.0, up], [2, 1]),
                down: one(down),
            })
            .collect(),
        shared_gate: one(20.0),
        shared_up: one(1.0),
        shared_down: one(shared[0]),
        shared_score: one(shared[1]),
    }
}

fn single(logits: &[f32], up: f32, down: &[f32], shared: [f32; 2], how: Evaluation) -> Tensor<B, 3> {
    let (residual, x) = (of(vec![0.0], [1, 1, 1]), of(vec![1.0], [1, 1, 1]));
    how.mixture_of_experts(residual, x, &mixture(logits, up, down, shared))
        .0
}

#[test]
fn a_mixture_rounds_every_step_or_its_result() {
    let off = [0.0, 0.0];
    // Up of 1 + 2^-8 goes to 1, a tie to even: 20. Not rounded first, 20.078 lies nearer 20.125.
    let up = both(|how| single(&[0.0], 257.0 / 256.0, &[1.0], off, how));
    assert_eq!(up, [20.125, 20.0]);
    // Equal weights of 1/4: outputs 1024 and 3.8, thrice. On a step of 2 each 0.95 is lost, and not all three.
    let sum = both(|how| single(&[0.0; 4], 1.0, &[51.2, 0.19, 0.19, 0.19], off, how));
    assert_eq!(sum, [258.0, 256.0]);
    // The first weight of logits 1 and 0, and the gate of a score of 1: 0.7310586, or 187/256; times 247 as above.
    let weight = both(|how| single(&[1.0, 0.0], 1.0, &[12.35, 0.0], off, how));
    assert_eq!(weight, [181.0, 180.0]);
    let gate = both(|how| single(&[0.0], 1.0, &[0.0], [12.35, 1.0], how));
    assert_eq!(gate, [181.0, 180.0]);
    // Logits 2 and 2 + 2^-8 are equal in bfloat16: the tie goes to the lower expert.
    let first = |how: Evaluation| {
        let weights = mixture(&[2.0, 513.0 / 256.0], 1.0, &[1.0, 2.0], off);
        let one = || of(vec![1.0], [1, 1, 1]);
        let chosen = how.mixture_of_experts(one(), one(), &Mixture { top_k: 1, ..weights }).1;
        chosen.experts.into_data().convert::<i64>().into_vec::<i64>().unwrap()[0]
    };
    assert_eq!(
        [Steps::Once, Steps::Each].map(|steps| first(precise(steps, Precision::Bf16))),
        [1, 0]
    );
}

#[test]
fn operations_between_streams_are_the_backends_in_f64() {
    let mut random = Random(41);
    for tokens in [1, 5, 66] {
        let (streams, width) = (3, 37);
        let all = streams * width;
        let r = random.tensor([2, tokens, all]);
        let norm = random.tensor([streams, width]);
        assert_near("stream norm", |how| how.stream_norm(r.clone(), norm.clone(), 1e-6));
        let z = random.tensor([2, tokens, 11]) * 4.0;
        assert_near("activation", |how| {
            hyper_connection::activate::<B>(z.clone(), streams, how)
        });
        let (u, normal) = (
            random.tensor([2, tokens, all]),
            random.tensor([2, tokens, streams, width]),
        );
        assert_near("mixture", |how| {
            hyper_connection::mix::<B>(u.clone(), normal.clone(), how)
        });
        let v = random.tensor([2, tokens, streams]) * 4.0;
        assert_near("weights", |how| hyper_connection::weights::<B>(v.clone(), how));
        let y = random.tensor([2, tokens, width]);
        assert_near("write", |how| {
            hyper_connection::write::<B>(r.clone(), y.clone(), v.clone(), how)
        });

        let query = random.tensor([2, tokens, streams, width]);
        assert_near("n-gram gate", |how| {
            ngram_injection::gate::<B>(normal.clone(), query.clone(), y.clone(), how)
        });
        let (taps, dilation) = (random.tensor([4, all]), 3);
        let (gated, inputs) = (random.tensor([2, tokens, all]), random.tensor([2, tokens + 9, all]));
        assert_near("injection", |how| {
            ngram_injection::inject::<B>(r.clone(), gated.clone(), inputs.clone(), taps.clone(), dilation, how)
        });

        let (w, z) = (random.tensor([width]), random.tensor([2, tokens, width]));
        assert_near("sigmoid norm", |how| {
            how.sigmoid_gated_rms_norm(y.clone(), w.clone(), z.clone(), 1e-6)
        });
        let router = weight(random.values(13 * width, 1.0), [13, width]);
        let routed = |how: Evaluation| how.route_experts(y.clone(), &router, 4);
        assert_near("routing weights", |how| routed(how).weights);
        let ids = |how| {
            routed(how)
                .experts
                .into_data()
                .convert::<i64>()
                .into_vec::<i64>()
                .unwrap()
        };
        assert_eq!(ids(NATIVE), ids(precise(Steps::Once, Precision::Full)));

        // Queries from position 9 on, blocks of four: all but every third of those that are complete.
        let (first_position, capacity) = (9, 80);
        let blocks = |query: usize| -> Vec<u32> {
            let complete = (first_position + query % tokens + 1) / 4;
            (0..complete as u32)
                .filter(|block| !(block + query as u32).is_multiple_of(3))
                .collect()
        };
        let selection = BlockSelection {
            ratio: 4,
            first_position,
            blocks: (0..2 * tokens).map(blocks).collect(),
        };
        let q = random.tensor([2, tokens, 6, 19]) * 5.0;
        let (keys, values) = (random.tensor([2, 2, capacity, 19]), random.tensor([2, 2, capacity, 19]));
        assert_near("sparse attention", |how| {
            how.sparse_attention(q.clone(), keys.clone(), values.clone(), &selection)
        });
        let dense = BlockSelection {
            blocks: (0..2 * tokens)
                .map(|query| (0..((first_position + query % tokens + 1) / 4) as u32).collect())
                .collect(),
            ..selection
        };
        let how = precise(Steps::Each, Precision::Bf16);
        assert_eq!(
            vec(how.sparse_attention(q.clone(), keys.clone(), values.clone(), &dense)),
            vec(how.causal_attention(q, keys, values, first_position)),
            "all blocks"
        );
    }
}

#[test]
fn operations_between_streams_round_every_step_or_their_result() {
    let one = |value: f32| of(vec![value], [1, 1, 1]);
    // One stream of one feature. sigmoid(1) is 0.7310586, or 187/256; times 247 that is 180.57 or 180.43.
    let normal = || of(vec![247.0], [1, 1, 1, 1]);
    assert_eq!(
        both(|how| hyper_connection::mix::<B>(one(1.0), normal(), how)),
        [181.0, 180.0]
    );
    // Twice that as a weight, times 123.5: 180.57 or 180.43 again.
    let written = both(|how| {
        let weights = hyper_connection::weights::<B>(one(1.0), how);
        hyper_connection::write::<B>(one(0.0), one(123.5), weights, how)
    });
    assert_eq!(written, [181.0, 180.0]);
    // 2^-8 (1 + 2^-8) added to 1 is above the middle; rounded first it is 2^-8 (1 + 2^-7) or 2^-8, a tie to even.
    let product = both(|how| hyper_connection::write::<B>(one(1.0), one(2f32.powi(-8)), one(257.0 / 256.0), how));
    assert_eq!(product, [ABOVE, 1.0]);
    // SiLU of a third that is rounded first, or not.
    let z = 3.0 + 2f32.powi(-6);
    let activated = both(|how| hyper_connection::activate::<B>(one(z), 3, how));
    let exact = f64::from(z) / 3.0;
    let silu = |x: f64| x / (1.0 + (-x).exp());
    assert_eq!(
        activated,
        [exact, f64::from(Precision::Bf16.nearest(exact))].map(|x| Precision::Bf16.nearest(silu(x)))
    );

    // a = 1 and a root of 1: the gate is sigmoid(1), of a value of 247. A sum of zero opens it by half.
    let head = |value: f32| of(vec![value], [1, 1, 1, 1]);
    let gate = |k: f32, q: f32| both(|how| ngram_injection::gate::<B>(head(k), head(q), one(247.0), how));
    assert_eq!(gate(1.0, 1.0), [181.0, 180.0]);
    assert_eq!(gate(1.0, 0.0), [123.5, 123.5]);
    // 1e-9 has the root of 1e-6, 0.001, and the sign: sigmoid(-0.001) = 0.49975.
    let small = gate(1e-9, -1.0);
    assert!(small.iter().all(|x| (*x - 123.5).abs() <= 0.5), "{small:?}");

    // The taps add up to 1 + 2^-8, rounded before SiLU or not, as in the other convolution.
    let inputs = || of(vec![2f32.powi(-8), 1.0], [1, 2, 1]);
    let taps = || of(vec![1.0, 1.0], [2, 1]);
    let injected = both(|how| ngram_injection::inject::<B>(one(0.0), one(0.0), inputs(), taps(), 1, how));
    assert_eq!(injected, [188.0 / 256.0, 187.0 / 256.0]);
}
