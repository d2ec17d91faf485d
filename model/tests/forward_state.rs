//! What is carried between passes, and what must not be: windows, batches, threads and pass sizes change no bit on the
//! CPU.
#![cfg(feature = "flex")]

mod forward_common;

use forward_common::Generated;
use perplexity_kernels::Precision;
use perplexity_model::backends::{flex, ndarray};
use perplexity_model::config::{AttentionConfig, DeltaNetConfig, FeedForwardConfig, LayerType, MoeConfig, TextConfig};
use perplexity_model::rope::RopeExtension;
use perplexity_model::route::{Boundary, Route};
use perplexity_model::rows::Reference;
use perplexity_model::scorer::{Ask, ModelError, ScorerOptions, Scores, Window};

const PUBLIC: usize = 61;

fn tiny() -> TextConfig {
    TextConfig {
        hidden_size: 32,
        vocab_size: 64,
        max_position_embeddings: 4096,
        tie_word_embeddings: false,
        rms_norm_eps: 1e-6,
        layer_types: vec![
            LayerType::LinearAttention,
            LayerType::FullAttention,
            LayerType::LinearAttention,
        ],
        attention: Some(AttentionConfig {
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 16,
            rope_theta: 1e4,
            partial_rotary_factor: 0.25,
            mrope_section: [1, 1, 0],
        }),
        delta_net: Some(DeltaNetConfig {
            num_key_heads: 2,
            key_head_dim: 16,
            num_value_heads: 4,
            value_head_dim: 12,
            conv_kernel_dim: 4,
        }),
        feed_forward: FeedForwardConfig::Dense { intermediate_size: 48 },
        flash_next: None,
    }
}

fn source() -> Generated {
    Generated::new(tiny())
}

/// The same with seven experts, three per token.
fn moe() -> Generated {
    Generated::new(TextConfig {
        feed_forward: FeedForwardConfig::Moe(MoeConfig {
            num_experts: 7,
            num_experts_per_tok: 3,
            moe_intermediate_size: 20,
            shared_expert_intermediate_size: 12,
        }),
        ..tiny()
    })
}

fn ids(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32)
        .map(|i| (i * i * 7 + i * 13 + seed * 29 + 5) % PUBLIC as u32)
        .collect()
}

fn window(count: usize, seed: u32) -> Window {
    Window {
        tokens: ids(count, seed),
        first_target: 1,
    }
}

fn options(route: Route) -> ScorerOptions {
    ScorerOptions {
        route,
        ..ScorerOptions::new(PUBLIC)
    }
}

fn scored(source: &Generated, options: &ScorerOptions, windows: &[Window], ask: &Ask) -> Vec<Scores> {
    let scores = flex::load(source, options).unwrap().score(windows, ask).unwrap();
    assert!(
        scores.iter().flat_map(|s| &s.logprobs).all(|lp| lp.is_finite()),
        "a log-probability is not finite"
    );
    scores
}

fn plain(options: &ScorerOptions, windows: &[Window]) -> Vec<Vec<f32>> {
    scored(&source(), options, windows, &Ask::default())
        .into_iter()
        .map(|scores| scores.logprobs)
        .collect()
}

#[test]
fn every_length_to_130_equals_the_token_by_token_recurrence() {
    for route in [Route::Exact, Route::Normal] {
        let stepwise = ScorerOptions {
            prefill_chunk: 1,
            ..options(route)
        };
        let steps = &plain(&stepwise, &[window(131, 0)])[0];
        let windows: Vec<Window> = (2..=131).map(|count| window(count, 0)).collect();
        for (scores, window) in plain(&options(route), &windows).iter().zip(&windows) {
            assert_eq!(
                scores[..],
                steps[..window.positions()],
                "{} tokens",
                window.tokens.len()
            );
        }
    }
}

#[test]
fn passes_of_16_48_64_128_and_the_whole_window_give_equal_bits() {
    for route in [Route::Exact, Route::Normal] {
        let windows = [window(300, 1)];
        let whole = plain(&options(route), &windows);
        for prefill_chunk in [16, 48, 64, 65, 128, 256] {
            let passes = ScorerOptions {
                prefill_chunk,
                ..options(route)
            };
            assert_eq!(plain(&passes, &windows), whole, "passes of {prefill_chunk}");
        }
    }
}

#[test]
fn one_pass_of_65_tokens_equals_64_and_1() {
    let whole = plain(&options(Route::Exact), &[window(66, 2)]);
    assert_eq!(
        plain(
            &ScorerOptions {
                prefill_chunk: 64,
                ..options(Route::Exact)
            },
            &[window(66, 2)]
        ),
        whole
    );
}

#[test]
fn a_window_does_not_depend_on_those_before_it() {
    let (a, b) = (window(70, 3), window(90, 4));
    let first = plain(&options(Route::Normal), &[a.clone(), b.clone(), a.clone()]);
    let second = plain(&options(Route::Normal), &[b, a.clone(), a]);
    assert_eq!(first[0], first[2]);
    assert_eq!(first[0], second[1]);
    assert_eq!(first[0], second[2]);
    assert_eq!(first[1], second[0]);
    // And over two calls of one scorer.
    let mut scorer = flex::load(&source(), &options(Route::Normal)).unwrap();
    let again = |scorer: &mut dyn perplexity_model::scorer::Scorer| {
        scorer.score(&[window(70, 3)], &Ask::default()).unwrap()[0]
            .logprobs
            .clone()
    };
    assert_eq!(again(&mut *scorer), first[0]);
    assert_eq!(again(&mut *scorer), first[0]);
}

#[test]
fn batches_and_threads_change_no_bit() {
    let windows: Vec<Window> = (0..5)
        .map(|i| Window {
            first_target: 1 + 11 * i,
            ..window(if i == 3 { 50 } else { 80 }, i as u32)
        })
        .collect();
    let candidates = windows.iter().map(|w| w.tokens[..w.positions()].to_vec()).collect();
    let ask = Ask {
        top_k: 5,
        candidates_per_position: 1,
        candidates,
        hidden: true,
    };
    let one = scored(&source(), &options(Route::Normal), &windows, &ask);
    for (scores, window) in one.iter().zip(&windows) {
        assert_eq!(scores.logprobs.len(), window.positions());
        assert_eq!(scores.top_ids.len(), 5 * window.positions());
        assert_eq!(scores.top_logprobs.len(), 5 * window.positions());
        assert_eq!(scores.candidate_logprobs.len(), window.positions());
    }
    for (batch, threads, prefill_chunk) in [(3, Some(1), 1024), (2, Some(2), 33), (5, None, 64)] {
        let options = ScorerOptions {
            batch,
            threads,
            prefill_chunk,
            ..options(Route::Normal)
        };
        assert_eq!(
            scored(&source(), &options, &windows, &ask),
            one,
            "batch {batch}, threads {threads:?}"
        );
    }
}

#[test]
fn whole_rows_hold_the_scores_and_the_head_of_given_states_gives_them_back() {
    // More positions than a tile, passes that end within tiles, predictors that begin within a pass.
    let window = Window {
        first_target: 7,
        ..window(150, 6)
    };
    let ask = Ask {
        top_k: 3,
        hidden: true,
        ..Ask::default()
    };
    for route in [Route::Exact, Route::Normal] {
        let options = ScorerOptions {
            prefill_chunk: 50,
            threads: Some(2),
            ..options(route)
        };
        let source = source();
        for mut scorer in [
            flex::load(&source, &options).unwrap(),
            ndarray::load(&source, &options).unwrap(),
        ] {
            let scores = scorer.score(std::slice::from_ref(&window), &ask).unwrap().remove(0);
            let width = scorer.hidden_size().unwrap();
            assert_eq!(scores.hidden.len(), window.positions() * width);
            let mut rows = 0;
            let (precision, logits) = match route {
                Route::Exact => (Precision::Full, Precision::Full),
                _ => (Precision::Bf16, Precision::Bf16),
            };
            let reference = Reference {
                states: &scores.hidden,
                precision,
                logits,
            };
            scorer
                .rows(&window, Some(&reference), &mut |position| {
                    let row = position.run;
                    assert_eq!((row.len(), row), (PUBLIC, position.reference), "row {rows}");
                    assert_eq!(position.logprob, scores.logprobs[rows], "row {rows}");
                    let target = window.tokens[window.first_target + rows] as usize;
                    // The head that reduces and the one that does not add up the same terms in another order.
                    let same = |a: f32, b: f32| assert!((a - b).abs() <= 2e-6 * (1.0 + b.abs()), "row {rows}: {a} {b}");
                    same(row[target], scores.logprobs[rows]);
                    for top in 3 * rows..3 * rows + 3 {
                        same(row[scores.top_ids[top] as usize], scores.top_logprobs[top]);
                    }
                    let mass: f64 = row.iter().map(|&lp| f64::from(lp).exp()).sum();
                    assert!((mass - 1.0).abs() < 1e-5, "row {rows} adds up to {mass}");
                    rows += 1;
                    Ok(())
                })
                .unwrap();
            assert_eq!(rows, window.positions());
            let plain = scorer.rows(&window, None, &mut |position| {
                assert!(position.reference.is_empty());
                Err("seen enough".into())
            });
            assert_eq!(plain.unwrap_err().to_string(), "seen enough");
            let short = Reference {
                states: &scores.hidden[1..],
                ..reference
            };
            assert!(scorer.rows(&window, Some(&short), &mut |_| Ok(())).is_err());
        }
    }
}

#[test]
fn scored_positions_are_those_from_the_first_target_on() {
    let whole = &plain(&options(Route::Exact), &[window(40, 5)])[0];
    let part = &plain(
        &options(Route::Exact),
        &[Window {
            first_target: 30,
            ..window(40, 5)
        }],
    )[0];
    assert_eq!(part[..], whole[29..]);
}

#[test]
fn the_normal_route_keeps_bfloat16_between_blocks_and_the_exact_route_does_not() {
    use burn_flex::{Flex, FlexDevice};
    use perplexity_model::qwen3_5::Qwen3_5;

    let share_of_bf16 = |route| {
        let model = Qwen3_5::<Flex>::load(&source(), route, &FlexDevice).unwrap();
        let (mut count, mut narrow) = (0, 0);
        model.pass(&mut model.begin(1, 50), &ids(50, 6), |layer, x| {
            let values: Vec<f32> = x.clone().into_data().into_vec().unwrap();
            // Embedding rows are the checkpoint's bfloat16 in both routes.
            if layer > 0 {
                count += values.len();
                narrow += values.iter().filter(|x| x.to_bits() & 0xffff == 0).count();
            }
        });
        narrow as f64 / count as f64
    };
    assert_eq!(share_of_bf16(Route::Normal), 1.0);
    assert!(share_of_bf16(Route::Exact) < 0.01);
}

#[test]
fn delta_rule_controls_are_not_rounded_to_bf16() {
    assert_eq!(Route::Normal.at(Boundary::DeltaNetControl), Precision::Full);
    assert_eq!(Route::Normal.at(Boundary::CachedValue), Precision::F16);
    assert_eq!(Route::Normal.at(Boundary::Logits), Precision::Bf16);
    assert_eq!(Route::Exact.at(Boundary::Logits), Precision::Full);
}

#[test]
fn final_norm_with_zero_weights_leaves_the_normalised_vector() {
    use burn::tensor::Tensor;
    use burn_flex::{Flex, FlexDevice};
    use perplexity_model::qwen3_5::Qwen3_5;

    let source = source().with("text/final_norm", 0.0);
    let model = Qwen3_5::<Flex>::load(&source, Route::Exact, &FlexDevice).unwrap();
    let row = Tensor::<Flex, 2>::full([1, 32], 3.0, &FlexDevice);
    let normalised: Vec<f32> = model.normalise(row).into_data().into_vec().unwrap();
    assert!(normalised.iter().all(|x| (x - 1.0).abs() < 1e-6), "{normalised:?}");
}

#[test]
fn gated_norm_weight_is_plain_so_that_zero_silences_the_delta_net() {
    use burn_flex::{Flex, FlexDevice};
    use perplexity_model::qwen3_5::Qwen3_5;

    let source = source()
        .with("text/layers/0/gdn/norm", 0.0)
        .with("text/layers/0/mlp/down", 0.0);
    let model = Qwen3_5::<Flex>::load(&source, Route::Exact, &FlexDevice).unwrap();
    let mut states = Vec::new();
    model.pass(&mut model.begin(1, 20), &ids(20, 7), |_, x| {
        states.push(x.clone().into_data().into_vec::<f32>().unwrap());
    });
    assert_eq!(states[0], states[1], "block 0 adds nothing");
    assert_ne!(states[1], states[2]);
}

#[test]
fn a_log_of_minus_infinity_means_no_decay_and_no_nan() {
    let source = source().with("text/layers/0/gdn/a_log", f32::NEG_INFINITY);
    scored(&source, &options(Route::Normal), &[window(130, 8)], &Ask::default());
}

#[test]
fn strong_decay_and_huge_activations_stay_finite() {
    let source = source()
        .with("text/layers/0/gdn/a_log", 90f32.ln())
        .with("text/layers/0/gdn/dt_bias", 1.0)
        .with("text/layers/1/input_norm", 1e5)
        .with("text/layers/2/input_norm", 1e5);
    // Values of 1e5 overflow the normal route's half-precision cache by definition; the exact route holds them.
    scored(&source, &options(Route::Exact), &[window(130, 9)], &Ask::default());
}

#[test]
fn an_untied_head_is_used_and_an_equal_one_is_the_tied_model() {
    let logprobs = |source: &Generated| scored(source, &options(Route::Exact), &[window(30, 10)], &Ask::default());
    let untied = logprobs(&source());
    let zero_head = scored(
        &source().with("text/output_head", 0.0),
        &options(Route::Exact),
        &[window(30, 10)],
        &Ask::default(),
    );
    assert_ne!(untied, zero_head);
    let uniform = -(PUBLIC as f32).ln();
    assert!(zero_head[0].logprobs.iter().all(|lp| (lp - uniform).abs() < 1e-6));
    // The flag decides nothing: only the values do.
    let mut tied = source();
    tied.config.tie_word_embeddings = true;
    assert_eq!(logprobs(&tied), untied);
}

#[test]
fn senseless_requests_are_refused_in_words() {
    let mut scorer = flex::load(&source(), &options(Route::Normal)).unwrap();
    let mut refused = |window: Window, ask: Ask| scorer.score(&[window], &ask).unwrap_err().to_string();
    let none = Ask::default;
    for (count, first_target) in [(0, 1), (1, 1), (5, 0), (5, 5)] {
        let message = refused(
            Window {
                first_target,
                ..window(count, 0)
            },
            none(),
        );
        assert!(message.contains("1 <= first target < tokens"), "{message}");
    }
    let outside = Window {
        tokens: vec![1, PUBLIC as u32, 2],
        first_target: 1,
    };
    assert_eq!(
        refused(outside, none()),
        "window 0: id 61 at 1 is not below the public token count 61"
    );
    let message = refused(window(5, 0), Ask { top_k: 62, ..none() });
    assert!(message.contains("at most the 61 public tokens"), "{message}");
    let message = refused(
        window(5, 0),
        Ask {
            candidates_per_position: 2,
            candidates: vec![vec![0; 7]],
            ..none()
        },
    );
    assert_eq!(message, "window 0 has 7 candidates: expected 8");
    let message = refused(
        window(3, 0),
        Ask {
            candidates_per_position: 1,
            candidates: vec![vec![0, 63]],
            ..none()
        },
    );
    assert!(message.contains("id 63 at 1"), "{message}");
}

#[test]
fn senseless_options_are_refused_before_loading() {
    for options in [
        ScorerOptions {
            prefill_chunk: 0,
            ..options(Route::Normal)
        },
        ScorerOptions {
            batch: 0,
            ..options(Route::Normal)
        },
        ScorerOptions {
            threads: Some(0),
            ..options(Route::Normal)
        },
        ScorerOptions::new(0),
        ScorerOptions::new(65),
    ] {
        let error = flex::load(&source(), &options).err().unwrap();
        assert!(matches!(error, ModelError::Option { .. }), "{error}");
    }
}

#[test]
fn a_mixture_of_experts_has_equal_bits_for_every_pass_size_batch_and_thread_count() {
    let windows: Vec<Window> = (0..5).map(|i| window(if i == 3 { 50 } else { 230 }, 20 + i)).collect();
    for route in [Route::Exact, Route::Normal] {
        let whole = scored(&moe(), &options(route), &windows, &Ask::default());
        for (prefill_chunk, batch, threads) in [(1, 1, None), (16, 5, Some(1)), (65, 2, Some(2)), (128, 3, None)] {
            let options = ScorerOptions {
                prefill_chunk,
                batch,
                threads,
                ..options(route)
            };
            let got = scored(&moe(), &options, &windows, &Ask::default());
            assert_eq!(
                got, whole,
                "passes of {prefill_chunk}, batches of {batch}, threads {threads:?}"
            );
        }
    }
}

/// The experts of every token in block 0.
fn experts(source: &Generated) -> Vec<i64> {
    use burn_flex::{Flex, FlexDevice};
    use perplexity_model::qwen3_5::Qwen3_5;

    let model = Qwen3_5::<Flex>::load(source, Route::Exact, &FlexDevice).unwrap();
    let mut windows = model.begin(1, 20);
    windows.keep_routing();
    model.pass(&mut windows, &ids(20, 11), |_, _| {});
    assert_eq!(windows.routing().len(), 3, "one choice per block");
    let ids = windows.routing()[0].experts.to_data().convert::<i64>();
    ids.into_vec().unwrap()
}

#[test]
fn tokens_choose_different_experts_and_a_tied_router_takes_the_lowest() {
    let chosen = experts(&moe());
    assert!((0..7).all(|expert| chosen.contains(&expert)), "{chosen:?}");
    assert_eq!(
        experts(&moe().with("text/layers/0/moe/router", 0.0)),
        [0, 1, 2].repeat(20)
    );
}

#[test]
fn every_part_of_the_mixture_takes_part() {
    let logprobs = |source: &Generated| scored(source, &options(Route::Exact), &[window(30, 12)], &Ask::default());
    let whole = logprobs(&moe());
    let name = |part: &str| format!("text/layers/1/moe/{part}");
    // A tied router still uses experts 0 to 2, never the others.
    let tied = || moe().with(&name("router"), 0.0);
    assert_ne!(logprobs(&tied()), whole);
    for expert in 0..7 {
        for matrix in ["gate", "up", "down"] {
            let part = name(&format!("experts/{expert}/{matrix}"));
            let silenced = logprobs(&tied().with(&part, 0.0));
            assert_eq!(silenced == logprobs(&tied()), expert > 2, "{part}");
        }
    }
    for part in ["shared/gate", "shared/up", "shared/down", "shared_score"] {
        assert_ne!(logprobs(&moe().with(&name(part), 0.0)), whole, "{part}");
    }
}

#[test]
fn a_half_precision_state_does_not_depend_on_the_passes() {
    let windows = [window(300, 1)];
    let run = |route, prefill_chunk, delta_state_f16| {
        let options = ScorerOptions {
            prefill_chunk,
            delta_state_f16,
            ..options(route)
        };
        plain(&options, &windows).remove(0)
    };
    for route in [Route::Exact, Route::Normal] {
        let whole = run(route, 1024, true);
        let float32 = run(route, 1024, false);
        // The first 64 tokens see a state that was never rounded.
        assert_eq!(whole[..64], float32[..64]);
        assert_ne!(whole[64..], float32[64..]);
        for prefill_chunk in [1, 16, 48, 64, 65, 128] {
            assert_eq!(run(route, prefill_chunk, true), whole, "passes of {prefill_chunk}");
        }
    }
}

#[test]
fn rotary_extensions_change_what_they_say() {
    let windows = [window(200, 1)];
    let run = |rope| {
        let options = ScorerOptions {
            rope,
            ..options(Route::Exact)
        };
        plain(&options, &windows).remove(0)
    };
    let native = run(RopeExtension::None);
    assert_eq!(
        run(RopeExtension::Yarn { factor: 1.0 }),
        native,
        "a factor of 1 is none, bit for bit"
    );
    assert_ne!(
        run(RopeExtension::Yarn { factor: 2.0 })[..10],
        native[..10],
        "YaRN reaches every position"
    );
    let linear = |factor, original_context| {
        run(RopeExtension::Linear {
            factor,
            original_context,
        })
    };
    assert_eq!(linear(1.0, 50), native);
    assert_eq!(linear(8.0, 199), native);
    let past = linear(8.0, 50);
    // Log-probability j is predicted at position j.
    assert_eq!(past[..=50], native[..=50]);
    assert_ne!(past[51..], native[51..]);
}
