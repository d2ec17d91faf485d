//! What every codec must satisfy, as functions that panic with the reason and a macro that turns them into tests.
//!
//! ```
//! perplexity_kv::codec_conformance!(my_int8, perplexity_kv::codecs::int8::IN_PLACE, bits = 8.25, error = 0.0062);
//! # fn main() {}
//! ```
//!
//! | test | guards against |
//! |---|---|
//! | `packed_size_is_the_declared_bits` | accounting that differs from what is stored |
//! | `gaussian_rows_stay_within_the_error` | wrong scales, orders, signs |
//! | `zero_rows_decode_to_zero` | division by a zero scale |
//! | `a_nan_never_becomes_a_number` | faults upstream that vanish in the cache |
//! | `every_code_decodes` | table overruns on codes that encoding never produces |
//! | `blocks_do_not_see_each_other` | state shared between rows, heads or threads |
//! | `passes_do_not_change_stored_rows` | dependence on how a sequence is split |
//!
//! With `backends = [..]` the tensor form is compared with the host form, entry by entry, on random and adversarial rows.
//! The macro needs `proptest` among the dev-dependencies of the crate that uses it.

use crate::codec::{HostCodec, TensorCodec, bits_per_value, decode_rows, encode_rows};
use crate::store::SideStore;
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use half::bf16;
use std::sync::Arc;

pub use crate::codec::HEAD_DIM;

/// KV heads of the test rows: odd, so that planes of neighbouring heads do not line up by accident.
const HEADS: usize = 3;

/// Deterministic pseudo-random numbers (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal (Box and Muller).
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.uniform()).cos()) as f32
    }
}

/// `values` standard normals rounded to bf16.
pub fn gaussian(seed: u64, values: usize) -> Vec<f32> {
    let mut random = Random(seed);
    (0..values).map(|_| bf16::from_f32(random.normal()).to_f32()).collect()
}

/// Rows of `head_dim` values that sit on the edges of the formats: zeros of both signs, one-hot rows, equal magnitudes,
/// ties, subnormal and very large values, FP16 scale under- and overflow, mixed exponents, infinities and NaN.
pub fn adversarial(head_dim: usize) -> Vec<Vec<f32>> {
    let fill = |f: &dyn Fn(usize) -> f32| {
        (0..head_dim)
            .map(|i| bf16::from_f32(f(i)).to_f32())
            .collect::<Vec<f32>>()
    };
    let one_hot = |at: usize, value: f32| fill(&|i| if i == at { value } else { 0.0 });
    let alternate = |value: f32| fill(&|i| if i % 2 == 0 { value } else { -value });
    let mut rows = vec![
        fill(&|_| 0.0),
        fill(&|_| -0.0),
        one_hot(0, 1.0),
        one_hot(head_dim - 1, -3.5),
        alternate(6.0),
        fill(&|i| (i % 17) as f32 * 0.5 - 4.0),
        fill(&|i| (i % 255) as f32 - 127.0),
        fill(&|i| [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0][i % 8] * if i % 3 == 0 { -1.0 } else { 1.0 }),
        fill(&|i| 2f32.powi(i as i32 % 40 - 20)),
        fill(&|i| if i < 16 { 0.0 } else { 1.0 + i as f32 }),
    ];
    for exponent in [
        -140, -126, -60, -40, -31, -26, -25, -24, -18, -14, -9, 0, 8, 15, 16, 22, 23, 40, 60, 120,
    ] {
        rows.push(alternate(2f32.powi(exponent)));
        rows.push(fill(&|i| 127.0 * 2f32.powi(exponent) * (i as f32 - 100.0) / 128.0));
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        rows.push(one_hot(5, bad));
        rows.push(fill(&|i| if i == 70 { bad } else { i as f32 * 0.125 - 3.0 }));
        rows.push(fill(&|_| bad));
    }
    rows
}

/// Bits per value derived from the planes equal `bits`, and no plane ends inside a byte.
pub fn packed_size(codec: &dyn HostCodec, head_dim: usize, bits: f64) {
    let layout = codec.layout(head_dim);
    assert_eq!(
        8 * layout.bytes(),
        layout.bits(),
        "a plane ends inside a byte: {layout:?}"
    );
    assert_eq!(bits_per_value(codec, head_dim), bits, "bits per value of {codec:?}");
    let rows = gaussian(1, 2 * codec.block_tokens() * HEADS * head_dim);
    let packed = encode_rows(codec, &rows, HEADS, head_dim);
    assert_eq!(
        packed.len() as f64 * 8.0,
        bits * rows.len() as f64,
        "packed bytes of {codec:?}"
    );
}

/// Error of encoding and decoding rows `[tokens, head_dim]` of one head, in the model's basis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoundTripError {
    /// `sqrt(sum e^2 / sum x^2)` over all rows.
    pub relative: f64,
    /// Largest relative L2 error of a row.
    pub worst: f64,
    /// Mean cosine between a row and its reconstruction.
    pub cosine: f64,
    /// Largest `|e|` relative to the largest magnitude of its row.
    pub max: f64,
}

/// Measures a codec on rows in the model's basis.
pub fn round_trip_error(codec: &dyn HostCodec, rows: &[f32], head_dim: usize) -> RoundTripError {
    let mut stored = rows.to_vec();
    codec.basis().forward(&mut stored, head_dim);
    let mut back = decode_rows(codec, &encode_rows(codec, &stored, 1, head_dim), 1, head_dim);
    codec.basis().inverse(&mut back, head_dim);
    let dot = |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
    let (mut errors, mut energy, mut worst, mut cosine, mut max) = (0.0, 0.0, 0f64, 0.0, 0f64);
    for (x, y) in rows.chunks_exact(head_dim).zip(back.chunks_exact(head_dim)) {
        let error: f64 = x.iter().zip(y).map(|(x, y)| f64::from(x - y).powi(2)).sum();
        let square = dot(x, x);
        (errors, energy, worst) = (errors + error, energy + square, worst.max((error / square).sqrt()));
        cosine += dot(x, y) / (square * dot(y, y)).sqrt();
        let largest = x.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        max = x
            .iter()
            .zip(y)
            .fold(max, |max, (x, y)| max.max(f64::from((x - y).abs() / largest)));
    }
    let relative = (errors / energy).sqrt();
    RoundTripError {
        relative,
        worst,
        cosine: cosine / (rows.len() / head_dim) as f64,
        max,
    }
}

/// Rows of [`gaussian_error`]: sampling moves the error of 512 x 256 values by some 0.3 % (one standard deviation).
const ERROR_ROWS: usize = 512;

/// The relative error on Gaussian rows is at most `error`, for rows of three magnitudes. Leave `error` 1 % above what is
/// expected: it is measured on a sample.
pub fn gaussian_error(codec: &dyn HostCodec, head_dim: usize, error: f64, seed: u64) {
    for magnitude in [0.25, 1.0, 16.0] {
        let rows: Vec<f32> = gaussian(seed, ERROR_ROWS.next_multiple_of(codec.block_tokens()) * head_dim)
            .iter()
            .map(|x| x * magnitude)
            .collect();
        let measured = round_trip_error(codec, &rows, head_dim).relative;
        assert!(
            measured <= error,
            "relative error {measured} of {codec:?} on Gaussian rows times {magnitude}"
        );
    }
}

/// Rows of zeros, of either sign, decode to zeros.
pub fn zero_rows(codec: &dyn HostCodec, head_dim: usize) {
    for zero in [0.0, -0.0] {
        let rows = vec![zero; codec.block_tokens() * HEADS * head_dim];
        let back = decode_rows(codec, &encode_rows(codec, &rows, HEADS, head_dim), HEADS, head_dim);
        assert!(
            back.iter().all(|value| *value == 0.0),
            "a zero row of {codec:?} decodes to something else"
        );
    }
}

/// A row with a NaN decodes with a NaN, other blocks and heads do not change, and infinities are survived.
pub fn non_finite_rows(codec: &dyn HostCodec, head_dim: usize) {
    let block = codec.block_tokens();
    let clean = gaussian(3, 3 * block * HEADS * head_dim);
    let expected = decode_rows(codec, &encode_rows(codec, &clean, HEADS, head_dim), HEADS, head_dim);
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        // Token `block` opens the second block; its head 1 is spoiled at one value.
        let at = (block * HEADS + 1) * head_dim + 7;
        let mut rows = clean.clone();
        rows[at] = bad;
        let packed = encode_rows(codec, &rows, HEADS, head_dim);
        assert_eq!(
            packed,
            encode_rows(codec, &rows, HEADS, head_dim),
            "encoding of {bad} is not deterministic"
        );
        let back = decode_rows(codec, &packed, HEADS, head_dim);
        let mut spoiled = 0;
        for (index, (got, want)) in back.iter().zip(&expected).enumerate() {
            let (token, head) = (index / (HEADS * head_dim), index / head_dim % HEADS);
            if token / block == 1 && head == 1 {
                spoiled += usize::from(got.is_nan());
            } else {
                assert_eq!(got.to_bits(), want.to_bits(), "{bad} in one block changed another");
            }
        }
        assert!(!bad.is_nan() || spoiled > 0, "a NaN became a number in {codec:?}");
    }
}

/// Every value of every entry decodes, to the same rows each time.
pub fn every_code(codec: &dyn HostCodec, head_dim: usize) {
    let layout = codec.layout(head_dim);
    let mut random = Random(11);
    let mut entries = vec![0; layout.entries()];
    let (mut once, mut twice) = (
        vec![0.0; codec.block_tokens() * head_dim],
        vec![0.0; codec.block_tokens() * head_dim],
    );
    let mut first = 0;
    for plane in &layout.0 {
        for code in 0..1u32 << plane.bits {
            let mut at = 0;
            for other in &layout.0 {
                entries[at..at + other.count].fill_with(|| (random.bits() & ((1 << other.bits) - 1)) as u16);
                at += other.count;
            }
            entries[first..first + plane.count].fill(code as u16);
            codec.decode(&entries, &mut once);
            codec.decode(&entries, &mut twice);
            assert!(
                once.iter()
                    .zip(&twice)
                    .all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
            );
            let mut bytes = vec![0; layout.bytes()];
            layout.pack(&entries, &mut bytes);
            let mut back = vec![0; entries.len()];
            layout.unpack(&bytes, &mut back);
            assert_eq!(
                entries, back,
                "code {code} of plane {} does not survive packing",
                plane.name
            );
        }
        first += plane.count;
    }
}

/// Each block of each head encodes alone to the bytes it has among its neighbours.
pub fn independence(codec: &dyn HostCodec, rows: &[f32], head_dim: usize) {
    let block = codec.block_tokens();
    let bytes = codec.layout(head_dim).bytes();
    let packed = encode_rows(codec, rows, HEADS, head_dim);
    for (index, alone) in packed.chunks_exact(bytes).enumerate() {
        let (b, head) = (index / HEADS, index % HEADS);
        let rows: Vec<f32> = (0..block)
            .flat_map(|t| {
                let at = ((b * block + t) * HEADS + head) * head_dim;
                rows[at..at + head_dim].to_vec()
            })
            .collect();
        assert_eq!(
            encode_rows(codec, &rows, 1, head_dim),
            alone,
            "block {b} of head {head} depends on others"
        );
    }
}

/// A sequence appended in passes of `pass` tokens is stored, and read by every query, as in one pass.
pub fn pass_invariance(codec: Arc<dyn HostCodec>, rows: &[f32], head_dim: usize, pass: usize) {
    let mut whole = SideStore::new(codec.clone(), true, HEADS, head_dim);
    whole.append(rows);
    let all = whole.read();
    let token = HEADS * head_dim;
    let mut split = SideStore::new(codec, true, HEADS, head_dim);
    let same = |a: &[f32], b: &[f32]| {
        a.iter()
            .zip(b)
            .all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
    };
    for part in rows.chunks(pass * token) {
        let first_query = split.tokens();
        split.append(part);
        let read = split.read();
        for query in first_query..split.tokens() {
            for key in 0..=query {
                let at = key * token..(key + 1) * token;
                match (&read.exact, &all.exact) {
                    (Some(exact), Some(all)) if exact.reads(key, query) => {
                        assert!(
                            same(&exact.rows[at.clone()], &all.rows[at]),
                            "exact copy of key {key}, query {query}"
                        );
                    }
                    _ => assert!(
                        same(&read.coded[at.clone()], &all.coded[at]),
                        "codes of key {key}, query {query}"
                    ),
                }
            }
        }
    }
    assert_eq!(split.bytes().0, whole.bytes().0);
}

/// The tensor form equals the host form: entries of Gaussian and adversarial rows, decoded rows of those and of random
/// entries. Where a row's scales are all zero its codes do not matter and only the decoded row is compared.
pub fn tensor_equals_host<B: Backend>(codec: &dyn HostCodec, tensors: &dyn TensorCodec<B>, head_dim: usize, seed: u64) {
    let device = B::Device::default();
    let (layout, block) = (codec.layout(head_dim), codec.block_tokens());
    let mut rows = gaussian(seed, 37 * head_dim);
    let mut random = Random(seed ^ 0xA5A5);
    rows.iter_mut()
        .for_each(|value| *value = bf16::from_f32(*value * 2f32.powi((random.bits() % 5) as i32)).to_f32());
    rows.extend(adversarial(head_dim).into_iter().flatten());
    rows.resize(rows.len().next_multiple_of(block * head_dim), 0.5);
    codec.basis().forward(&mut rows, head_dim);
    let blocks = rows.len() / (block * head_dim);

    // One head: blocks are consecutive rows.
    let mut expected = vec![0u16; blocks * layout.entries()];
    for (rows, entries) in rows
        .chunks_exact(block * head_dim)
        .zip(expected.chunks_exact_mut(layout.entries()))
    {
        codec.encode(rows, entries);
    }
    let shape = [blocks * block, 1, head_dim];
    let tensor = Tensor::<B, 3>::from_data(TensorData::new(rows.clone(), shape), &device);
    let stored = tensors.store(tensor);
    assert_eq!(stored.dims(), [blocks, 1, layout.entries()]);
    let stored: Vec<u16> = stored
        .into_data()
        .iter::<i64>()
        .map(|word| u16::try_from(word).expect("an entry"))
        .collect();

    let mut random_entries = Vec::new();
    for _ in 0..200 {
        for plane in &layout.0 {
            random_entries.extend((0..plane.count).map(|_| (random.bits() & ((1 << plane.bits) - 1)) as u16));
        }
    }
    let decode = |entries: &[u16]| -> Vec<f32> {
        let mut out = vec![0.0; entries.len() / layout.entries() * block * head_dim];
        let rows = out.chunks_exact_mut(block * head_dim);
        entries
            .chunks_exact(layout.entries())
            .zip(rows)
            .for_each(|(entries, row)| codec.decode(entries, row));
        out
    };
    let host = decode(&expected);
    for (b, (got, want)) in stored
        .chunks_exact(layout.entries())
        .zip(expected.chunks_exact(layout.entries()))
        .enumerate()
    {
        let decoded = &host[b * block * head_dim..(b + 1) * block * head_dim];
        if got != want && decoded.iter().any(|value| *value != 0.0) {
            let at = got
                .iter()
                .zip(want)
                .position(|(got, want)| got != want)
                .expect("a difference");
            let row = &rows[b * block * head_dim..(b + 1) * block * head_dim];
            panic!(
                "{codec:?} row {b}: entry {at} is {} in tensors, {} on the host; row {row:?}",
                got[at], want[at]
            );
        }
    }
    for entries in [&expected, &random_entries] {
        let blocks = entries.len() / layout.entries();
        let words: Vec<i64> = entries.iter().map(|word| i64::from(*word)).collect();
        let words = TensorData::new(words, [blocks, 1, layout.entries()]).convert::<B::IntElem>();
        let loaded = tensors.load(Tensor::<B, 3, Int>::from_data(words, &device));
        assert_eq!(loaded.dims(), [blocks * block, 1, head_dim]);
        let loaded: Vec<f32> = loaded.into_data().iter::<f32>().collect();
        for (at, (got, want)) in loaded.iter().zip(decode(entries)).enumerate() {
            let same =
                got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()) || (*got == 0.0 && want == 0.0);
            assert!(
                same,
                "{codec:?} decoded value {at}: {got} in tensors, {want} on the host"
            );
        }
    }
}

/// Instantiates the conformance tests of a codec in a module of the given name.
///
/// `codec_conformance!(name, codec, bits = B, error = E)` with the bits per value including scales and the largest
/// relative error on Gaussian rows of 256 values; `backends = [..]` adds the comparison of the tensor form with the host
/// form on these backends.
#[macro_export]
macro_rules! codec_conformance {
    ($name:ident, $codec:expr, bits = $bits:expr, error = $error:expr $(, backends = [$($backend:ty),* $(,)?])? $(,)?) => {
        #[cfg(test)]
        mod $name {
            #[allow(unused_imports)]
            use super::*;
            use $crate::conformance as check;

            #[test]
            fn packed_size_is_the_declared_bits() {
                check::packed_size(&$codec, check::HEAD_DIM, $bits);
            }

            #[test]
            fn zero_rows_decode_to_zero() {
                check::zero_rows(&$codec, check::HEAD_DIM);
            }

            #[test]
            fn a_nan_never_becomes_a_number() {
                check::non_finite_rows(&$codec, check::HEAD_DIM);
            }

            #[test]
            fn every_code_decodes() {
                check::every_code(&$codec, check::HEAD_DIM);
            }

            $(
                #[test]
                fn tensors_equal_host_rows() {
                    $(check::tensor_equals_host::<$backend>(&$codec, &$codec, check::HEAD_DIM, 5);)*
                }
            )?

            ::proptest::proptest! {
                #![proptest_config(::proptest::test_runner::Config::with_cases(8))]

                #[test]
                fn gaussian_rows_stay_within_the_error(seed in ::proptest::prelude::any::<u64>()) {
                    check::gaussian_error(&$codec, check::HEAD_DIM, $error, seed);
                }

                #[test]
                fn blocks_do_not_see_each_other(words in ::proptest::collection::vec(::proptest::prelude::any::<u16>(), 768)) {
                    let block = $crate::codec::CodecSpec::block_tokens(&$codec);
                    let values = words.iter().map(|word| f32::from_bits(u32::from(*word) << 16));
                    let rows: Vec<f32> = values.cycle().take(2 * block * 3 * check::HEAD_DIM).collect();
                    check::independence(&$codec, &rows, check::HEAD_DIM);
                }

                #[test]
                fn passes_do_not_change_stored_rows(seed in ::proptest::prelude::any::<u64>(), pass in 1usize..40) {
                    let rows = check::gaussian(seed, 90 * 3 * check::HEAD_DIM);
                    check::pass_invariance(::std::sync::Arc::new($codec), &rows, check::HEAD_DIM, pass);
                }
            }
        }
    };
}
