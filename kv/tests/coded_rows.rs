//! The devices' kernels equal the host codecs bit for bit: words of coded rows, and decoded rows of any words.
#![cfg(any(feature = "cuda", feature = "vulkan"))]

use burn::tensor::{Int, Tensor, TensorData};
use perplexity_kernels::backend::{CodedSides, RowCoding};
use perplexity_kernels::ops::causal_attention::over_decoded;
use perplexity_kernels::{EvaluatorBackend, Precision};
use perplexity_kv::basis::Basis;
use perplexity_kv::codec::{decode_rows, encode_rows};
use perplexity_kv::codecs::int8::int4;
use perplexity_kv::conformance::{HEAD_DIM, Random, adversarial, gaussian};
use perplexity_kv::registry::{Side, variants};

const BATCH: usize = 2;
const HEADS: usize = 3;
const CAPACITY: usize = 223;
/// Tokens of the passes; what lies beyond them in the cache is not written.
const PASSES: [usize; 3] = [1, 63, 150];
const TOKENS: usize = 214;

/// Every side with a kernel, once.
fn sides() -> Vec<Side> {
    let mut sides: Vec<Side> = variants().flat_map(|variant| [variant.k, variant.v]).collect();
    sides.push(Side::Absmax(int4(Basis::Hadamard256, 64)));
    let mut kept: Vec<Side> = Vec::new();
    for side in sides {
        if side.row_coding().is_some() && !kept.contains(&side) {
            kept.push(side);
        }
    }
    kept
}

/// Rows on the formats' edges, in the stored basis where the way there is exact and in the model's, and rows of every
/// magnitude, in float32 or in bfloat16.
fn rows(side: &Side, sixteen_bits: bool) -> Vec<f32> {
    let mut random = Random(7);
    let mut edges: Vec<Vec<f32>> = adversarial(HEAD_DIM);
    // Halves are ties of a scale of one: of integers up to 127 and 7, of E4M3 and of E2M1.
    for most in [127.0, 7.0, 448.0, 6.0] {
        for _ in 0..8 {
            let half = |random: &mut Random| ((random.uniform() * 4.0 * most).floor() / 2.0 - most) as f32;
            let mut row: Vec<f32> = (0..HEAD_DIM).map(|_| half(&mut random)).collect();
            row.iter_mut().step_by(16).for_each(|first| *first = most as f32);
            edges.push(row);
        }
    }
    let mut turned = edges.clone();
    turned
        .iter_mut()
        .for_each(|row| side.spec().basis().inverse(row, HEAD_DIM));
    let mut rows: Vec<f32> = edges.into_iter().chain(turned).flatten().collect();
    rows.extend(gaussian(3, 300 * HEAD_DIM));
    let wanted = BATCH * TOKENS * HEADS * HEAD_DIM;
    while rows.len() < wanted {
        // Scales from below the smallest half to above the largest.
        let size = 2f32.powf(-34.0 + 56.0 * random.uniform() as f32);
        rows.extend((0..HEAD_DIM).map(|_| random.normal() * size));
    }
    assert_eq!(rows.len(), wanted);
    if sixteen_bits {
        rows.iter_mut().for_each(|x| *x = half::bf16::from_f32(*x).to_f32());
    }
    rows
}

fn tensor<B: EvaluatorBackend>(rows: &[f32], first: usize, tokens: usize) -> Tensor<B, 4> {
    let length = HEADS * HEAD_DIM;
    let windows = rows.chunks_exact(TOKENS * length);
    let part: Vec<f32> = windows
        .flat_map(|window| window[first * length..][..tokens * length].iter().copied())
        .collect();
    Tensor::from_data(
        TensorData::new(part, [BATCH, tokens, HEADS, HEAD_DIM]),
        &Default::default(),
    )
}

fn words<B: EvaluatorBackend>(cache: Tensor<B, 4, Int>) -> Vec<u32> {
    let data = cache.into_data().convert::<i32>();
    data.iter::<i32>().map(|word| word as u32).collect()
}

/// `[batch, tokens, heads]` of a row of `[batch, heads, capacity]`.
fn place(index: usize, capacity: usize) -> (usize, usize) {
    let (window, head, token) = (index / (HEADS * capacity), index / capacity % HEADS, index % capacity);
    ((window * TOKENS + token) * HEADS + head, token)
}

fn coded_rows_equal_the_host<B: EvaluatorBackend>(keeps_subnormals: bool) {
    for side in sides() {
        let RowCoding { format, .. } = side.row_coding().unwrap();
        let (codec, layout) = (side.host(), side.spec().layout(HEAD_DIM));
        for sixteen_bits in [false, true] {
            let rows = rows(&side, sixteen_bits);
            let shape = [BATCH, HEADS, CAPACITY, format.words()];
            let mut cache = Tensor::<B, 4, Int>::full(shape, 0x5a5a_5a5a, &Default::default());
            let mut first = 0;
            for tokens in PASSES {
                let x = tensor::<B>(&rows, first, tokens);
                let x = if sixteen_bits { B::round(x, Precision::Bf16) } else { x };
                cache = B::append_coded(cache, x, first, side.row_coding().unwrap()).expect("a device codes rows");
                first += tokens;
            }
            assert_eq!(first, TOKENS);
            let mut stored = rows.clone();
            codec.basis().forward(&mut stored, HEAD_DIM);
            let expected = encode_rows(&*codec, &stored, HEADS, HEAD_DIM);
            let decoded = decode_rows(&*codec, &expected, HEADS, HEAD_DIM);
            let got = words(cache);
            for (index, words) in got.chunks_exact(format.words()).enumerate() {
                let (row, token) = place(index, CAPACITY);
                if token >= TOKENS {
                    assert!(
                        words.iter().all(|word| *word == 0x5a5a_5a5a),
                        "{side:?}: row {index} was written"
                    );
                    continue;
                }
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                let (bytes, padding) = bytes.split_at(layout.bytes());
                let want = &expected[row * layout.bytes()..][..layout.bytes()];
                assert!(padding.iter().all(|byte| *byte == 0), "{side:?}: padding of row {row}");
                let x = &rows[row * HEAD_DIM..][..HEAD_DIM];
                if bytes != want {
                    // A device that flushes subnormal values may lose their signs; what the row decodes to may not change.
                    let tiny = !keeps_subnormals && x.iter().any(|x| *x != 0.0 && x.abs() < 2f32.powi(-100));
                    let got = decode_rows(&*codec, bytes, 1, HEAD_DIM);
                    let same = got == decoded[row * HEAD_DIM..][..HEAD_DIM];
                    let at = bytes.iter().zip(want).position(|(a, b)| a != b).unwrap();
                    assert!(
                        tiny && same,
                        "{side:?} row {row}: byte {at} is {}, {} on the host; {x:?}",
                        bytes[at],
                        want[at]
                    );
                }
            }
        }
    }
}

fn any_words_decode_as_on_the_host<B: EvaluatorBackend>() {
    let mut random = Random(11);
    for side in sides() {
        let RowCoding { format, .. } = side.row_coding().unwrap();
        let (codec, layout) = (side.host(), side.spec().layout(HEAD_DIM));
        let shape = [BATCH, HEADS, CAPACITY, format.words()];
        let stored: Vec<i32> = (0..shape.iter().product()).map(|_| random.bits() as i32).collect();
        let bytes: Vec<u8> = stored
            .chunks_exact(format.words())
            .flat_map(|words| {
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                bytes[..layout.bytes()].to_vec()
            })
            .collect();
        let expected = decode_rows(&*codec, &bytes, 1, HEAD_DIM);
        let data = TensorData::new(stored, shape).convert::<B::IntElem>();
        let cache = Tensor::<B, 4, Int>::from_data(data, &Default::default());
        for visible in [1, 65, CAPACITY] {
            for to in [Precision::Full, Precision::F16] {
                let rows = B::decoded_rows(cache.clone(), visible, format, to).expect("a device decodes rows");
                assert_eq!(rows.dims(), [BATCH, HEADS, visible, HEAD_DIM]);
                let rows: Vec<f32> = rows.into_data().iter::<f32>().collect();
                for (index, got) in rows.iter().enumerate() {
                    let (window, row) = (index / (visible * HEAD_DIM), index % (visible * HEAD_DIM));
                    let want = expected[window * CAPACITY * HEAD_DIM + row];
                    let want = to.nearest(f64::from(want));
                    assert!(
                        got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                        "{side:?} in {to:?}: value {index} is {got:e}, {want:e} on the host"
                    );
                }
            }
        }
    }
}

fn bases_equal_the_host<B: EvaluatorBackend>() {
    let bases = [
        Basis::Identity,
        Basis::Hadamard64,
        Basis::Hadamard256,
        Basis::SignedHadamard { seed: 7 },
    ];
    let x = &gaussian(5, 2 * 65 * 3 * HEAD_DIM);
    for basis in bases {
        for to in [Precision::Full, Precision::Bf16, Precision::F16] {
            for inverse in [false, true] {
                let data = TensorData::new(x.clone(), [2, 65, 3, HEAD_DIM]);
                let rows = Tensor::<B, 4>::from_data(data, &Default::default());
                let mut want = x.clone();
                let got = if inverse {
                    basis.inverse(&mut want, HEAD_DIM);
                    basis.inverse_on(rows, to)
                } else {
                    basis.forward(&mut want, HEAD_DIM);
                    basis.forward_on(rows, to)
                };
                let got: Vec<f32> = got.into_data().iter::<f32>().collect();
                let want: Vec<f32> = want.into_iter().map(|x| to.nearest(f64::from(x))).collect();
                assert!(got == want, "{basis:?} in {to:?}, inverse {inverse}");
            }
        }
    }
}

/// Attention over codes equals attention over the same rows decoded first, bit for bit.
fn attention_over_codes_is_over_decoded_rows<B: EvaluatorBackend>() {
    let side = |name: &str| *variants().find(|variant| variant.name == name).expect("a pair by name");
    let (int8, fp8, nvfp4, rk8v4) = (side("int8"), side("fp8"), side("nvfp4"), side("rk8v4@b"));
    let pairs = [
        (int8.k, int8.v),
        (fp8.k, fp8.v),
        (nvfp4.k, nvfp4.v),
        (int8.k, nvfp4.v),
        (rk8v4.k, rk8v4.v),
        (nvfp4.k, fp8.v),
    ];
    // Tokens of the pass, tokens before, query and key heads, windows.
    let shapes = [
        (1, 0, [4, 4], 1),
        (63, 0, [6, 2], 2),
        (64, 1, [5, 1], 1),
        (65, 0, [2, 2], 1),
        (127, 66, [6, 3], 1),
        (129, 0, [3, 1], 2),
        (1, 128, [24, 4], 1),
    ];
    let device = Default::default();
    let tensor = |seed, shape: [usize; 4]| {
        let data = TensorData::new(gaussian(seed, shape.iter().product()), shape);
        Tensor::<B, 4>::from_data(data, &device)
    };
    for (k, v) in pairs {
        for (tokens, first, [heads, kv_heads], batch) in shapes {
            let (visible, capacity) = (first + tokens, first + tokens + 3);
            let words = |side: Side, seed| {
                let coding = side.row_coding().expect("a kernel");
                // What lies beyond the visible rows decodes to NaN.
                let shape = [batch, kv_heads, capacity, coding.format.words()];
                let cache = Tensor::<B, 4, Int>::full(shape, -1, &device);
                let rows = tensor(seed, [batch, visible, kv_heads, HEAD_DIM]);
                let words = B::append_coded(cache, rows, 0, coding).expect("a device codes rows");
                (words, coding.format)
            };
            let ((keys, k_format), (values, v_format)) = (words(k, 1), words(v, 2));
            // To float32, where codes are read by every device; tensor cores, whose results are 16 bits, never do.
            let to = Precision::Full;
            for precision in [Precision::Full, Precision::F16] {
                let sides = CodedSides {
                    keys: k_format,
                    values: v_format,
                    precision,
                };
                let q = B::round(tensor(3, [batch, tokens, heads, HEAD_DIM]), precision);
                // Freed at once, for the outputs to be made of.
                let poison = Tensor::<B, 4>::full([batch, tokens, heads, HEAD_DIM], f32::NAN, &device);
                drop(B::round(poison, to));
                let over_codes = B::coded_attention(q.clone(), keys.clone(), values.clone(), sides, first, to);
                let decoded = over_decoded::<B>(q, keys.clone(), values.clone(), sides, first, to);
                let [got, want] = [over_codes, decoded].map(|o| {
                    let o = o.expect("a device reads codes");
                    assert_eq!(o.dims(), [batch, tokens, heads, HEAD_DIM]);
                    o.into_data().iter::<f32>().collect::<Vec<f32>>()
                });
                assert!(want.iter().all(|x| x.is_finite()));
                let apart = got.iter().zip(&want).position(|(a, b)| a.to_bits() != b.to_bits());
                assert!(
                    apart.is_none(),
                    "{k_format:?}, {v_format:?}: element {apart:?} at {tokens} tokens after {first}, {heads}/{kv_heads} heads \
                     of {batch} windows, rows in {precision:?}"
                );
            }
        }
    }
}

/// The tests on one backend.
macro_rules! suite {
    ($name:ident, $backend:ty, $keeps_subnormals:expr) => {
        mod $name {
            #[test]
            fn attention_over_codes_is_over_decoded_rows() {
                super::attention_over_codes_is_over_decoded_rows::<$backend>();
            }

            #[test]
            fn coded_rows_equal_the_host() {
                super::coded_rows_equal_the_host::<$backend>($keeps_subnormals);
            }

            #[test]
            fn any_words_decode_as_on_the_host() {
                super::any_words_decode_as_on_the_host::<$backend>();
            }

            #[test]
            fn bases_equal_the_host() {
                super::bases_equal_the_host::<$backend>();
            }
        }
    };
}

#[cfg(feature = "vulkan")]
suite!(vulkan, burn::backend::Vulkan<f32, i32, u8>, false);
#[cfg(feature = "cuda")]
suite!(cuda, burn::backend::Cuda<f32, i32>, true);
