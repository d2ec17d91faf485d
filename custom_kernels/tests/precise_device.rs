//! The operations in f64 on a card against the host's, both on the same tensors: random data, awkward sizes, either choice
//! of inner roundings, every precision of the result.
//!
//! Sums are taken in another order and `exp` may differ in its last bit of 53, so that now and then a result falls on the
//! other side of a rounding: nearly all have the same bits, the others are neighbours.
#![cfg(feature = "cuda")]

mod random;

mod cuda {
    use burn::tensor::{Tensor, TensorData, backend::Backend};
    use perplexity_kernels::EvaluatorBackend;
    use perplexity_kernels::backend::{DeltaHeads, Expert, HeadRequest, Residency, RotaryTable};
    use perplexity_kernels::evaluation::Steps;
    use perplexity_kernels::ops::expand_weight::{Packing, StoredMatrix, StoredRows};
    use perplexity_kernels::ops::mixture_of_experts::Mixture;
    use perplexity_kernels::ops::rotary;
    use perplexity_kernels::precise::{Host, OUTPUT_TILE, Precise, ROW_TILE, Rounding};
    use perplexity_kernels::precision::Precision::{self, Bf16, F16, Full};

    use crate::random::Random;

    type Card = burn::backend::Cuda<f32, i32>;
    type Weight = <Card as EvaluatorBackend>::Weight;

    const HOST: &dyn Precise<Card> = &Host;

    fn card() -> &'static dyn Precise<Card> {
        Card::precise(&Default::default())
    }

    fn roundings() -> impl Iterator<Item = Rounding> {
        let steps = [Steps::Once, Steps::Each].into_iter();
        steps.flat_map(|steps| [Full, Bf16, F16].map(|to| Rounding { steps, to }))
    }

    impl Random {
        fn tensor<const D: usize>(&mut self, shape: [usize; D], scale: f32) -> Tensor<Card, D> {
            let values = self.values(shape.iter().product(), scale);
            Tensor::from_data(TensorData::new(values, shape), &Default::default())
        }

        /// Exactly bfloat16, and stored so.
        fn narrow<const D: usize>(&mut self, shape: [usize; D], scale: f32) -> Tensor<Card, D> {
            Card::round(self.tensor(shape, scale), Bf16)
        }

        fn weight(&mut self, shape: [usize; 2], stored: Precision) -> Weight {
            let mut values = self.values(shape[0] * shape[1], (shape[1] as f32).sqrt().recip());
            if stored == Bf16 {
                let narrowed = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000);
                values.iter_mut().for_each(|x| *x = narrowed(*x));
            }
            Card::weight(values, shape, stored, &Default::default())
        }
    }

    fn values<const D: usize>(x: Tensor<Card, D>) -> Vec<f32> {
        x.into_data().convert::<f32>().into_vec().expect("converted just now")
    }

    /// Leaves NaN in the memory that the next allocations of this size get.
    fn poison(elements: usize) {
        let device = Default::default();
        let tensors: Vec<Tensor<Card, 1>> = (0..4).map(|_| Tensor::full([elements], f32::NAN, &device)).collect();
        Card::sync(&device).expect("device answers");
        drop(tensors);
    }

    /// Equal bits and neighbours of one operation.
    #[derive(Default)]
    struct Tally {
        equal: usize,
        neighbours: usize,
    }

    impl Tally {
        fn compare(&mut self, what: &str, actual: &[f32], expected: &[f32], to: Precision) {
            assert_eq!(actual.len(), expected.len(), "{what}: number of values");
            // Steps of the narrow type, counted in bits of float32.
            let step = match to {
                Full => 1,
                Bf16 => 1 << 16,
                F16 => 1 << 13,
            };
            let ordered = |x: f32| match x.to_bits() as i32 {
                bits if bits < 0 => i64::from(i32::MIN) - i64::from(bits),
                bits => i64::from(bits),
            };
            for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
                if a.to_bits() == e.to_bits() || a.is_nan() && e.is_nan() {
                    self.equal += 1;
                } else {
                    let apart = (ordered(a) - ordered(e)).abs();
                    assert!(apart <= step, "{what}: value {i} is {a:e}, expected {e:e}");
                    self.neighbours += 1;
                }
            }
        }

        fn finish(&self, what: &str) {
            let share = self.equal as f64 / (self.equal + self.neighbours) as f64;
            println!(
                "{what}: {} values, share with equal bits {share:.7}",
                self.equal + self.neighbours
            );
            assert!(share >= 0.999, "{what}: only {share} have equal bits");
        }
    }

    /// Evaluates `of` on the card and on the host for every rounding.
    fn check<const D: usize>(
        tally: &mut Tally,
        what: &str,
        of: impl Fn(&dyn Precise<Card>, Rounding) -> Tensor<Card, D>,
    ) {
        for how in roundings() {
            let expected = values(of(HOST, how));
            poison(expected.len());
            let what = format!("{what}, {how:?}");
            tally.compare(&what, &values(of(card(), how)), &expected, how.to);
        }
    }

    #[test]
    fn products() {
        let mut random = Random(1);
        let (mut plain, mut added, mut gated) = (Tally::default(), Tally::default(), Tally::default());
        let tall = (ROW_TILE + 3, 8, 5);
        let wide = (3, 16, OUTPUT_TILE + 70);
        for (rows, width, outputs) in [(1, 1, 1), (3, 63, 65), (130, 257, 129), (64, 1024, 200), tall, wide] {
            for stored in [Bf16, Full] {
                let shape = [1, rows, width];
                let x = match stored {
                    Bf16 => random.narrow(shape, 2.0),
                    _ => random.tensor(shape, 2.0),
                };
                let (gate, up) = (
                    random.weight([outputs, width], stored),
                    random.weight([outputs, width], stored),
                );
                let residual = random.narrow([1, rows, outputs], 1.0);
                let what = format!("{rows} x {width} by {outputs}");
                check(&mut plain, &what, |on, how| on.project(x.clone(), &gate, how));
                check(&mut added, &what, |on, how| {
                    on.project_add(residual.clone(), x.clone(), &gate, how)
                });
                check(&mut gated, &what, |on, how| on.swiglu(x.clone(), &gate, &up, how));
            }
        }
        plain.finish("project");
        added.finish("project_add");
        gated.finish("swiglu");
    }

    #[test]
    fn products_without_the_library() {
        let plain = perplexity_kernels::cuda::precise::Card { library: false };
        let mut random = Random(11);
        let mut tally = Tally::default();
        for (rows, width, outputs) in [(1, 1, 1), (3, 63, 65), (130, 257, 129)] {
            let (x, weight) = (
                random.narrow([1, rows, width], 2.0),
                random.weight([outputs, width], Full),
            );
            for how in roundings() {
                let expected = values(HOST.project(x.clone(), &weight, how));
                poison(expected.len());
                let what = format!("{rows} x {width} by {outputs}, {how:?}");
                tally.compare(
                    &what,
                    &values(plain.project(x.clone(), &weight, how)),
                    &expected,
                    how.to,
                );
            }
        }
        tally.finish("project without the library");
    }

    #[test]
    fn packed_products() {
        let (rows, columns) = (200, 136);
        let packing = Packing::Fp8Row;
        let planes = packing.planes(rows, columns).expect("a legal shape");
        let mut random = Random(2);
        let mut bytes: Vec<u8> = (random.values(planes.bytes, 128.0).iter())
            .map(|x| (x + 128.0) as u8 & 0xbf)
            .collect();
        for row in 0..rows {
            let scale = half::bf16::from_f32(0.01 + 0.003 * row as f32).to_le_bytes();
            bytes[planes.scales + 2 * row..][..2].copy_from_slice(&scale);
        }
        let parts = [StoredRows {
            bytes: bytes.as_slice().into(),
            packing,
            shape: [rows, columns],
            rows: 0..rows,
        }];
        let matrix = StoredMatrix::stack(&parts).expect("legal").expect("one packing");
        let weight = Card::stored_weight(&matrix, Residency::Packed, &Default::default()).expect("all numbers");
        let x = random.narrow([2, 33, columns], 1.0);
        let mut tally = Tally::default();
        check(&mut tally, "codes", |on, how| on.project(x.clone(), &weight, how));
        tally.finish("project with codes");
    }

    #[test]
    fn norms_and_gates() {
        let mut random = Random(3);
        let (mut offset, mut gated, mut sigmoid) = (Tally::default(), Tally::default(), Tally::default());
        for (rows, width) in [(1, 1), (3, 63), (9, 128), (130, 256), (5, 1000), (17, 5120)] {
            let (x, z) = (random.narrow([rows, width], 3.0), random.tensor([rows, width], 6.0));
            let weight = random.tensor([width], 1.0);
            let what = format!("{rows} x {width}");
            check(&mut offset, &what, |on, how| {
                on.offset_rms_norm(x.clone(), weight.clone(), 1e-6, how)
            });
            check(&mut gated, &what, |on, how| {
                on.gated_rms_norm(x.clone(), weight.clone(), z.clone(), 1e-6, how)
            });
            let flat = |x: &Tensor<Card, 2>| x.clone().reshape([-1]);
            check(&mut sigmoid, &what, |on, how| on.sigmoid_gate(flat(&x), flat(&z), how));
        }
        offset.finish("offset_rms_norm");
        gated.finish("gated_rms_norm");
        sigmoid.finish("sigmoid_gate");
    }

    #[test]
    fn rotations() {
        let mut random = Random(4);
        let mut tally = Tally::default();
        for (tokens, heads, head_dim, rotated, first) in [(1, 1, 64, 16, 0), (65, 3, 256, 64, 7), (33, 5, 24, 12, 100)]
        {
            let table = RotaryTable::<Card>::new(
                &rotary::frequencies(1e7, rotated),
                1.25,
                first + tokens,
                &Default::default(),
            );
            for x in [
                random.narrow([2, tokens, heads, head_dim], 2.0),
                random.tensor([2, tokens, heads, head_dim], 2.0),
            ] {
                let what = format!("{tokens} x {heads} x {head_dim}");
                check(&mut tally, &what, |on, how| on.rotary(x.clone(), &table, first, how));
            }
        }
        tally.finish("rotary");
    }

    #[test]
    fn convolutions() {
        let mut random = Random(5);
        let (mut tally, mut tails) = (Tally::default(), Tally::default());
        for (tokens, channels, width) in [(1, 6, 4), (2, 3, 4), (33, 300, 4), (129, 256, 2)] {
            let (x, tail) = (
                random.narrow([2, tokens, channels], 2.0),
                random.tensor([2, width - 1, channels], 2.0),
            );
            let weight = random.tensor([channels, width], 1.0);
            let what = format!("{tokens} x {channels}, {width} taps");
            let of = |on: &dyn Precise<Card>, how| on.causal_conv_silu(x.clone(), weight.clone(), tail.clone(), how);
            check(&mut tally, &what, |on, how| of(on, how).0);
            check(&mut tails, &what, |on, how| of(on, how).1);
        }
        tally.finish("causal_conv_silu");
        tails.finish("next tail");
    }

    #[test]
    fn delta_rules() {
        let mut random = Random(6);
        let (mut decays, mut strengths) = (Tally::default(), Tally::default());
        let (mut outputs, mut states) = (Tally::default(), Tally::default());
        let cases = [
            (1, 1, 1, 8, 8),
            (7, 2, 4, 64, 64),
            (65, 1, 3, 20, 24),
            (129, 1, 2, 128, 128),
            (30, 2, 2, 200, 40),
            (9, 1, 1, 264, 16),
        ];
        for (tokens, key_heads, value_heads, key_dim, value_dim) in cases {
            let heads = DeltaHeads {
                key_heads,
                value_heads,
                key_dim,
                value_dim,
            };
            let what = format!("{tokens} tokens, {heads:?}");
            let shape = [2, tokens, value_heads];
            let (a, b) = (random.tensor(shape, 25.0), random.narrow(shape, 4.0));
            let (a_log, bias) = (random.tensor([value_heads], 1.0), random.tensor([value_heads], 1.0));
            let gates = |on: &dyn Precise<Card>, how: Rounding| {
                on.delta_gates(a.clone(), b.clone(), a_log.clone(), bias.clone(), how.steps)
            };
            // Float32 whatever the precision asked for.
            for how in [Steps::Once, Steps::Each].map(|steps| Rounding { steps, to: Full }) {
                let (here, there) = (gates(card(), how), gates(HOST, how));
                decays.compare(&what, &values(here.0), &values(there.0), Full);
                strengths.compare(&what, &values(here.1), &values(there.1), Full);
            }
            let (g, beta) = gates(
                HOST,
                Rounding {
                    steps: Steps::Once,
                    to: Full,
                },
            );
            let g = g * 0.05;
            let qkv = random.narrow([2, tokens, heads.channels()], 1.0);
            let state = random.tensor([2, value_heads, key_dim, value_dim], 0.5);
            for how in roundings() {
                let rule = |on: &dyn Precise<Card>| {
                    let (y, next) =
                        on.gated_delta_rule(qkv.clone(), g.clone(), beta.clone(), state.clone(), heads, how);
                    (values(y), values(next))
                };
                let there = rule(HOST);
                poison(there.0.len());
                let here = rule(card());
                let what = format!("{what}, {how:?}");
                outputs.compare(&what, &here.0, &there.0, how.to);
                states.compare(&format!("{what}, state"), &here.1, &there.1, Full);
            }
        }
        decays.finish("g");
        strengths.finish("beta");
        outputs.finish("gated_delta_rule");
        states.finish("state");
    }

    #[test]
    fn attention() {
        let mut random = Random(7);
        let mut tally = Tally::default();
        let cases = [
            (1, 0, 1, 1, 64),
            (63, 0, 4, 2, 64),
            (65, 64, 6, 1, 256),
            (127, 5, 3, 3, 24),
            (600, 0, 6, 2, 40),
        ];
        for (tokens, first, heads, kv_heads, head_dim) in cases {
            let capacity = first + tokens + 3;
            let q = random.narrow([2, tokens, heads, head_dim], 2.0);
            let mut cache = |stored: Precision| {
                let rows = random.values(2 * kv_heads * capacity * head_dim, 1.0);
                // Rows not yet written must not be read.
                let written = |i: usize| i / head_dim % capacity < first + tokens;
                let rows = rows.into_iter().enumerate();
                let rows: Vec<f32> = rows.map(|(i, x)| if written(i) { x } else { f32::NAN }).collect();
                let shape = [2, kv_heads, capacity, head_dim];
                Card::round(
                    Tensor::from_data(TensorData::new(rows, shape), &Default::default()),
                    stored,
                )
            };
            let (keys, rows) = (cache(Bf16), cache(F16));
            let what = format!("{tokens} tokens after {first}, {heads}/{kv_heads} heads of {head_dim}");
            check(&mut tally, &what, |on, how| {
                on.causal_attention(q.clone(), keys.clone(), rows.clone(), first, how)
            });
        }
        tally.finish("causal_attention");
    }

    #[test]
    fn mixtures() {
        let mut random = Random(8);
        let (mut tally, mut shares) = (Tally::default(), Tally::default());
        for (tokens, count, top_k, width, inner) in [(1, 1, 1, 16, 8), (33, 5, 2, 40, 24), (130, 16, 4, 64, 32)] {
            let mut weight = |shape| random.weight(shape, Bf16);
            let weights = Mixture::<Card> {
                router: weight([count, width]),
                top_k,
                experts: (0..count)
                    .map(|_| Expert {
                        gate_up: weight([2 * inner, width]),
                        down: weight([width, inner]),
                    })
                    .collect(),
                shared_gate: weight([inner + 3, width]),
                shared_up: weight([inner + 3, width]),
                shared_down: weight([width, inner + 3]),
                shared_score: weight([1, width]),
            };
            let (x, residual) = (
                random.narrow([2, tokens, width], 2.0),
                random.narrow([2, tokens, width], 1.0),
            );
            for how in roundings() {
                let mix = |on: &dyn Precise<Card>| {
                    let (y, routing) = on.mixture_of_experts(residual.clone(), x.clone(), &weights, how);
                    let experts = routing.experts.into_data().convert::<i64>();
                    (values(y), experts.to_vec::<i64>().unwrap(), values(routing.weights))
                };
                let (here, there) = (mix(card()), mix(HOST));
                let what = format!("{top_k} of {count} experts for {tokens} tokens, {how:?}");
                assert_eq!(here.1, there.1, "{what}");
                tally.compare(&what, &here.0, &there.0, how.to);
                shares.compare(&what, &here.2, &there.2, Full);
            }
        }
        tally.finish("mixture_of_experts");
        shares.finish("router weights");
    }

    #[test]
    fn heads() {
        let mut random = Random(9);
        let mut tally = Tally::default();
        let (rows, outputs, width) = (70, 2 * OUTPUT_TILE + 300, 24);
        let head = random.weight([outputs, width], Bf16);
        let hidden = random.narrow([rows, width], 4.0);
        let targets: Vec<u32> = (0..rows as u32).map(|row| row * 113).collect();
        let candidates: Vec<u32> = (0..2 * rows as u32).map(|i| i * 57).collect();
        let ask = HeadRequest {
            public_rows: outputs - 17,
            targets: &targets,
            top_k: 9,
            candidates_per_row: 2,
            candidates: &candidates,
        };
        for logits in [Full, Bf16] {
            let (here, there) = (
                card().score_head(hidden.clone(), &head, &ask, logits),
                HOST.score_head(hidden.clone(), &head, &ask, logits),
            );
            assert_eq!(here.top_ids, there.top_ids, "{logits:?}");
            tally.compare("log-probabilities", &here.logprobs, &there.logprobs, Full);
            tally.compare("top tokens", &here.top_logprobs, &there.top_logprobs, Full);
            tally.compare("candidates", &here.candidate_logprobs, &there.candidate_logprobs, Full);
        }
        tally.finish("score_head");
    }

    #[test]
    fn reruns_give_the_same_bits() {
        let mut random = Random(10);
        let x = random.narrow([1, 300, 500], 1.0);
        let weight = random.weight([700, 500], Bf16);
        let how = Rounding {
            steps: Steps::Once,
            to: Full,
        };
        let first = values(card().project(x.clone(), &weight, how));
        assert_eq!(first, values(card().project(x, &weight, how)));
    }
}
