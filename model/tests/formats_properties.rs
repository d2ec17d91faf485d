//! Properties of encoders and decoders on random data of awkward sizes.

use perplexity_kernels::numeric::{bf16_to_f32, e2m1_to_f32, e4m3fn_to_f32, f16_to_f32, f32_to_e2m1};
use perplexity_model::formats::nvfp4_expert::{MatrixWords, Projection, decode_matrix};
use perplexity_model::formats::{
    EncodeMethod, Encoder, Format, FormatError, Layout, decode, encode, encoded_size, fp8_block, fp8_row, grouped,
    nvfp4, nvfp4_expert, reference, validate,
};
use proptest::prelude::*;

/// Deterministic pseudo-random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn bytes(&mut self, count: usize, limit: u64) -> Vec<u8> {
        (0..count).map(|_| self.below(limit) as u8).collect()
    }

    /// Roughly normal values whose scale changes every few elements.
    fn values(&mut self, count: usize) -> Vec<f32> {
        let mut scale = 1.0;
        (0..count)
            .map(|at| {
                if at % 13 == 0 {
                    scale = [0.05, 0.3, 1.0, 4.0][self.below(4) as usize];
                }
                let sum: f32 = (0..4).map(|_| (self.next() >> 40) as f32 / 16_777_216.0 - 0.5).sum();
                sum * scale
            })
            .collect()
    }
}

fn whole(format: Format, shape: &[u64], divisors: u64, bytes: &[u8]) -> Result<Vec<f32>, FormatError> {
    let mut out = vec![f32::NAN; shape.iter().product::<u64>() as usize];
    decode(
        format,
        format.layout(),
        shape,
        divisors,
        bytes,
        0..out.len() as u64,
        &mut out,
    )?;
    Ok(out)
}

/// A tensor of random legal words, every code and scale included.
fn random_tensor(format: Format, shape: &[u64], divisors: u64, random: &mut Random) -> Vec<u8> {
    let elements = shape.iter().product::<u64>() as usize;
    let (rows, columns) = match *shape {
        [.., rows, columns] => (rows as usize, columns as usize),
        _ => (1, elements),
    };
    let numbers = |random: &mut Random, count: usize| -> Vec<u8> {
        random
            .bytes(count, 256)
            .into_iter()
            .map(|code| if code & 0x7F == 0x7F { 0x7E } else { code })
            .collect()
    };
    match format {
        Format::Bf16 => (0..elements)
            .flat_map(|_| (random.below(0x7F80) as u16).to_le_bytes())
            .collect(),
        Format::Fp32 => (0..elements)
            .flat_map(|_| (random.below(0x7F80_0000) as u32).to_le_bytes())
            .collect(),
        Format::Int32 => (0..elements)
            .flat_map(|_| (random.below(1 << 25) as i32 - (1 << 24)).to_le_bytes())
            .collect(),
        Format::Q4G64Fp16 | Format::Q5G64Fp16 | Format::Q6G64Fp16 | Format::Q8G32Fp16 => {
            let (least, count, group) = match format {
                Format::Q4G64Fp16 => (-8, 16, 64),
                Format::Q5G64Fp16 => (-16, 32, 64),
                Format::Q6G64Fp16 => (-32, 64, 64),
                _ => (-127, 255, 32),
            };
            let codes: Vec<i8> = (0..elements)
                .map(|_| (random.below(count) as i64 + least) as i8)
                .collect();
            let scales: Vec<u16> = (0..rows * columns.div_ceil(group))
                .map(|_| 1 + random.below(0x7BFF) as u16)
                .collect();
            grouped::pack(format, shape, &codes, &scales).unwrap()
        }
        Format::Nvfp4 => {
            let divisors: Vec<f32> = (0..divisors)
                .map(|_| 1.0 + random.below(100_000) as f32 / 7.0)
                .collect();
            let (codes, scales) = (random.bytes(elements / 2, 256), random.bytes(elements / 16, 0x7F));
            nvfp4::pack(shape, &codes, &scales, &divisors).unwrap()
        }
        Format::Fp8E4m3fnRowBf16 => {
            let scales: Vec<u16> = (0..rows).map(|_| 0x3000 + random.below(0x1000) as u16).collect();
            fp8_row::pack(shape, &numbers(random, elements), &scales).unwrap()
        }
        Format::Fp8E4m3fnBlock128F32 => {
            let matrices = elements / (rows * columns);
            let tiles = matrices * rows.div_ceil(128) * columns.div_ceil(128);
            let scales: Vec<f32> = (0..tiles).map(|_| random.below(1 << 24) as f32 / 1e5).collect();
            fp8_block::pack(shape, &numbers(random, elements), &scales).unwrap()
        }
        Format::Nvfp4Mul => unreachable!("the bank has its own test"),
    }
}

/// Shapes that exercise partial groups, tiles and rows; the last of each is decoded in parallel.
fn cases() -> Vec<(Format, Vec<u64>, u64)> {
    let mut cases = vec![
        (Format::Nvfp4, vec![128, 64], 1),
        (Format::Nvfp4, vec![256, 192], 2),
        (Format::Nvfp4, vec![768, 320], 3),
        (Format::Fp8E4m3fnBlock128F32, vec![130, 200], 1),
        (Format::Fp8E4m3fnBlock128F32, vec![3, 129, 257], 1),
        (Format::Fp8E4m3fnBlock128F32, vec![2, 2, 1, 5], 1),
        (Format::Fp8E4m3fnRowBf16, vec![1, 1], 1),
        (Format::Fp8E4m3fnRowBf16, vec![33, 77], 1),
        (Format::Fp8E4m3fnRowBf16, vec![300, 401], 1),
    ];
    for format in [Format::Bf16, Format::Fp32, Format::Int32] {
        cases.extend([
            (format, vec![], 1),
            (format, vec![5, 1, 7], 1),
            (format, vec![3, 60_001], 1),
        ]);
    }
    for format in [
        Format::Q4G64Fp16,
        Format::Q5G64Fp16,
        Format::Q6G64Fp16,
        Format::Q8G32Fp16,
    ] {
        for shape in [[1, 1], [2, 130], [7, 63], [3, 65], [5, 128], [257, 500]] {
            cases.push((format, shape.to_vec(), 1));
        }
    }
    cases
}

#[test]
fn fast_decoding_equals_the_definitions_for_random_words() {
    let mut random = Random(3);
    for (format, shape, divisors) in cases() {
        let bytes = random_tensor(format, &shape, divisors, &mut random);
        assert_eq!(
            bytes.len() as u64,
            encoded_size(format, format.layout(), &shape, divisors).unwrap()
        );
        validate(format, format.layout(), &shape, divisors, &bytes).unwrap();
        let fast = whole(format, &shape, divisors, &bytes).unwrap();
        for (element, value) in fast.iter().enumerate() {
            let exact =
                reference::decode_element(format, format.layout(), &shape, divisors, &bytes, element as u64).unwrap();
            assert_eq!(
                value.to_bits(),
                (exact as f32).to_bits(),
                "{format} {shape:?} element {element}"
            );
        }
    }
}

#[test]
fn any_range_equals_the_same_elements_of_the_whole() {
    let mut random = Random(5);
    for (format, shape, divisors) in cases() {
        let bytes = random_tensor(format, &shape, divisors, &mut random);
        let all = whole(format, &shape, divisors, &bytes).unwrap();
        let elements = all.len() as u64;
        for _ in 0..60 {
            let begin = random.below(elements);
            let end = begin + random.below(elements - begin + 1);
            let mut out = vec![f32::NAN; (end - begin) as usize];
            decode(format, format.layout(), &shape, divisors, &bytes, begin..end, &mut out).unwrap();
            assert_eq!(
                out,
                all[begin as usize..end as usize],
                "{format} {shape:?} {begin}..{end}"
            );
        }
        let mut one = [0.0];
        for wrong in [elements..elements + 1, u64::MAX - 1..u64::MAX] {
            let result = decode(format, format.layout(), &shape, divisors, &bytes, wrong, &mut one);
            assert!(matches!(result, Err(FormatError::Range { .. })));
        }
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = decode(format, format.layout(), &shape, divisors, &bytes, 1..0, &mut []);
        assert!(matches!(reversed, Err(FormatError::Range { .. })));
        let result = decode(format, format.layout(), &shape, divisors, &bytes, 0..0, &mut one);
        assert_eq!(result, Err(FormatError::OutputLength { expected: 0, actual: 1 }));
    }
}

#[test]
fn bytes_of_another_length_are_refused() {
    let mut random = Random(9);
    for (format, shape, divisors) in cases() {
        let mut bytes = random_tensor(format, &shape, divisors, &mut random);
        bytes.push(0);
        let expected = bytes.len() as u64 - 1;
        for actual in [expected + 1, expected - 1] {
            bytes.resize(actual as usize, 0);
            assert_eq!(
                whole(format, &shape, divisors, &bytes),
                Err(FormatError::Size { expected, actual })
            );
        }
    }
}

#[test]
fn random_bytes_decode_or_fail_without_panic() {
    let mut random = Random(11);
    for (format, shape, divisors) in cases() {
        let size = encoded_size(format, format.layout(), &shape, divisors).unwrap() as usize;
        for limit in [256, 128, 2] {
            let bytes = random.bytes(size, limit);
            let _ = validate(format, format.layout(), &shape, divisors, &bytes);
            if let Ok(values) = whole(format, &shape, divisors, &bytes) {
                let direct = format.layout() == Layout::ContiguousLeV1;
                assert!(direct || values.iter().all(|value| !value.is_nan()), "{format}");
            }
        }
    }
    let shape = [3, 32, 48];
    let size = encoded_size(Format::Nvfp4Mul, Layout::Nvfp4ExpertRg16V1, &shape, 1).unwrap() as usize;
    for _ in 0..20 {
        let bytes = random.bytes(size, 256);
        let _ = validate(Format::Nvfp4Mul, Layout::Nvfp4ExpertRg16V1, &shape, 1, &bytes);
        for projection in Projection::ALL {
            let _ = decode_matrix(&shape, &bytes, 2, projection, &mut [0.0; 32 * 48]);
        }
    }
}

#[test]
fn expert_banks_give_back_the_words_they_were_packed_from() {
    let mut random = Random(13);
    for (experts, hidden, inner) in [(1, 16, 16), (3, 48, 32), (2, 16, 80)] {
        let shape = [experts as u64, hidden as u64, inner as u64];
        let matrix = |random: &mut Random| {
            (
                random.bytes(hidden * inner / 2, 256),
                random.bytes(hidden * inner / 16, 0x7F),
                random.below(999) as f32 + 0.1,
            )
        };
        let words: Vec<_> = (0..3 * experts).map(|_| matrix(&mut random)).collect();
        let bytes = nvfp4_expert::pack::<FormatError>(&shape, |expert, projection| {
            let (codes, scales, multiplier) = &words[3 * expert + projection as usize];
            Ok(MatrixWords {
                codes,
                scales,
                multiplier: *multiplier,
            })
        })
        .unwrap();
        validate(Format::Nvfp4Mul, Layout::Nvfp4ExpertRg16V1, &shape, 1, &bytes).unwrap();
        for expert in 0..experts {
            for projection in Projection::ALL {
                let (codes, scales, multiplier) = &words[3 * expert + projection as usize];
                let mut out = vec![0.0; hidden * inner];
                decode_matrix(&shape, &bytes, expert, projection, &mut out).unwrap();
                for (at, value) in out.iter().enumerate() {
                    let code = e2m1_to_f32(codes[at / 2] >> (4 * (at % 2)));
                    let exact = f64::from(code) * f64::from(e4m3fn_to_f32(scales[at / 16])) * f64::from(*multiplier);
                    assert_eq!(value.to_bits(), (exact as f32).to_bits(), "{projection:?} {at}");
                }
            }
        }
        let mut short = vec![0.0; hidden * inner - 1];
        let result = decode_matrix(&shape, &bytes, 0, Projection::Up, &mut short);
        assert!(matches!(result, Err(FormatError::OutputLength { .. })));
        let mut out = vec![0.0; hidden * inner];
        let result = decode_matrix(&shape, &bytes, experts, Projection::Up, &mut out);
        assert!(matches!(result, Err(FormatError::Range { .. })));
    }
}

/// Every (format, method) pair with a shape of partial groups.
const ENCODERS: [(Format, EncodeMethod, [u64; 2]); 14] = [
    (Format::Bf16, EncodeMethod::CastDirect, [33, 77]),
    (Format::Fp32, EncodeMethod::CastDirect, [33, 77]),
    (Format::Int32, EncodeMethod::CastDirect, [33, 77]),
    (Format::Q4G64Fp16, EncodeMethod::GroupedAbsmax, [13, 200]),
    (Format::Q5G64Fp16, EncodeMethod::GroupedAbsmax, [13, 200]),
    (Format::Q6G64Fp16, EncodeMethod::GroupedAbsmax, [13, 200]),
    (Format::Q8G32Fp16, EncodeMethod::GroupedAbsmax, [13, 200]),
    (Format::Q4G64Fp16, EncodeMethod::GroupedMse, [13, 200]),
    (Format::Q5G64Fp16, EncodeMethod::GroupedMse, [13, 200]),
    (Format::Q6G64Fp16, EncodeMethod::GroupedMse, [13, 200]),
    (Format::Q8G32Fp16, EncodeMethod::GroupedMse, [13, 200]),
    (Format::Nvfp4, EncodeMethod::Nvfp4Absmax, [128, 128]),
    (Format::Nvfp4, EncodeMethod::Nvfp4Mse, [128, 128]),
    (Format::Fp8E4m3fnRowBf16, EncodeMethod::Fp8RowMaxabs, [33, 77]),
];

#[test]
fn encoding_does_not_depend_on_how_rows_are_cut_into_slabs() {
    let mut random = Random(17);
    for (format, method, shape) in ENCODERS {
        let columns = shape[1] as usize;
        let values = random.values(shape[0] as usize * columns);
        let expected = encode(format, method, &shape, &values).unwrap();
        validate(format, format.layout(), &shape, 1, &expected).unwrap();
        let largest = values.iter().fold(0.0, |max: f32, value| max.max(value.abs()));
        for _ in 0..3 {
            let mut encoder = Encoder::new(format, method, &shape, largest).unwrap();
            let mut rest = &values[..];
            while !rest.is_empty() {
                let rows = random.below(6) as usize;
                let (now, after) = rest.split_at(rest.len().min(rows * columns));
                encoder.push(now).unwrap();
                rest = after;
            }
            assert_eq!(encoder.finish().unwrap(), expected, "{format} {method}");
        }
        // Too few, too many, and part of a row.
        let mut encoder = Encoder::new(format, method, &shape, largest).unwrap();
        encoder.push(&values[..columns]).unwrap();
        assert!(matches!(encoder.push(&values), Err(FormatError::Count { .. })));
        if format.layout() != Layout::ContiguousLeV1 {
            assert!(matches!(
                encoder.push(&values[..columns - 1]),
                Err(FormatError::PartialRow { .. })
            ));
        }
        assert!(matches!(encoder.finish(), Err(FormatError::Count { .. })));
    }
}

#[test]
fn methods_encode_their_own_formats_only() {
    for format in Format::ALL {
        for method in EncodeMethod::ALL {
            assert_eq!(method.name().parse::<EncodeMethod>().unwrap(), method);
            let known = ENCODERS.iter().any(|(a, b, _)| (*a, *b) == (format, method));
            assert_eq!(method.encodes(format), known, "{format} {method}");
            if !known {
                let result = encode(format, method, &[128, 64], &[0.0; 128 * 64]);
                assert_eq!(result, Err(FormatError::Method { format, method }));
            }
        }
    }
}

/// Squared error of each group of `size` columns.
fn group_errors(values: &[f32], decoded: &[f32], columns: usize, size: usize) -> Vec<f64> {
    values
        .chunks(columns)
        .zip(decoded.chunks(columns))
        .flat_map(|(values, decoded)| values.chunks(size).zip(decoded.chunks(size)))
        .map(|(values, decoded)| {
            values
                .iter()
                .zip(decoded)
                .map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2))
                .sum()
        })
        .collect()
}

#[test]
fn grouped_mse_is_never_worse_than_absmax_and_mostly_better() {
    let mut random = Random(19);
    for format in [
        Format::Q4G64Fp16,
        Format::Q5G64Fp16,
        Format::Q6G64Fp16,
        Format::Q8G32Fp16,
    ] {
        let shape = [40, 200];
        let size = if format == Format::Q8G32Fp16 { 32 } else { 64 };
        let values = random.values(8000);
        let errors = |method| {
            let bytes = encode(format, method, &shape, &values).unwrap();
            group_errors(&values, &whole(format, &shape, 1, &bytes).unwrap(), 200, size)
        };
        let (absmax, mse) = (errors(EncodeMethod::GroupedAbsmax), errors(EncodeMethod::GroupedMse));
        assert!(absmax.iter().zip(&mse).all(|(absmax, mse)| mse <= absmax));
        let better = absmax.iter().zip(&mse).filter(|(absmax, mse)| mse < absmax).count();
        assert!(better * 2 > absmax.len(), "{format}: {better} of {}", absmax.len());
    }
}

#[test]
fn nvfp4_mse_takes_the_best_of_all_scale_words() {
    let mut random = Random(23);
    let mut values = random.values(128 * 64);
    values[16..32].fill(0.0);
    // Extremes: a lone spike, groups far below the largest magnitude.
    values[32..48].fill(0.0);
    values[33] = 9.0;
    values[48..64].iter_mut().for_each(|value| *value *= 1e-5);
    values[64..80].iter_mut().for_each(|value| *value *= 1e-3);
    let bytes = encode(Format::Nvfp4, EncodeMethod::Nvfp4Mse, &[128, 64], &values).unwrap();
    let geometry = nvfp4::Geometry::new(&[128, 64], 1).unwrap();
    let divisor = nvfp4::divisor(EncodeMethod::Nvfp4Mse, 9.0).unwrap();
    assert_eq!(divisor, 4.0 * 448.0 / 9.0);
    for (at, group) in values.chunks(16).enumerate() {
        let mut best = (f64::INFINITY, 0, vec![]);
        for word in 1..=0x7E {
            let scale = e4m3fn_to_f32(word);
            let codes: Vec<u8> = group.iter().map(|value| f32_to_e2m1(value * divisor / scale)).collect();
            let error: f64 = group
                .iter()
                .zip(&codes)
                .map(|(value, code)| (f64::from(*value) - f64::from(e2m1_to_f32(*code) * scale / divisor)).powi(2))
                .sum();
            if error < best.0 {
                best = (error, word, codes);
            }
        }
        let (row, column) = (at / 4, at % 4);
        assert_eq!(
            bytes[geometry.scale_offset + nvfp4::scale_position(64, row, column)],
            best.1,
            "group {at}"
        );
        let packed: Vec<u8> = best.2.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect();
        assert_eq!(bytes[8 * at..8 * at + 8], packed, "group {at}");
    }
}

#[test]
fn nvfp4_absmax_of_tiny_and_zero_matrices() {
    let zero = encode(Format::Nvfp4, EncodeMethod::Nvfp4Absmax, &[128, 64], &[0.0; 8192]).unwrap();
    assert_eq!(zero[zero.len() - 4..], 1.0f32.to_le_bytes());
    assert!(zero[..zero.len() - 4].iter().all(|byte| *byte == 0));
    // A group far below the largest magnitude keeps the smallest positive scale word.
    let mut values = vec![0.0; 8192];
    values[0] = 1.0;
    values[16] = 1e-6;
    let bytes = encode(Format::Nvfp4, EncodeMethod::Nvfp4Absmax, &[128, 64], &values).unwrap();
    let geometry = nvfp4::Geometry::new(&[128, 64], 1).unwrap();
    assert_eq!(bytes[geometry.scale_offset..][..2], [0x7E, 0x01]);
    // No finite divisor.
    values.fill(1e-38);
    let result = encode(Format::Nvfp4, EncodeMethod::Nvfp4Absmax, &[128, 64], &values);
    assert!(matches!(result, Err(FormatError::Divisor { .. })));
    values[77] = f32::NAN;
    values[78] = 1.0;
    let result = encode(Format::Nvfp4, EncodeMethod::Nvfp4Absmax, &[128, 64], &values);
    assert!(matches!(result, Err(FormatError::NonFinite { index: 77, .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// `|x - w| <= s/2`, plus what the scale's own rounding (2^-11) moves the largest value.
    #[test]
    fn grouped_absmax_errs_by_half_a_step(seed: u64, rows in 1u64..5, columns in 1u64..150, exponent in -6i32..7) {
        let values: Vec<f32> = Random(seed)
            .values((rows * columns) as usize)
            .into_iter()
            .map(|value| (value + 0.011) * 2f32.powi(exponent))
            .collect();
        for (format, size, qmax) in [
            (Format::Q4G64Fp16, 64, 7.0),
            (Format::Q5G64Fp16, 64, 15.0),
            (Format::Q6G64Fp16, 64, 31.0),
            (Format::Q8G32Fp16, 32, 127.0),
        ] {
            let bytes = encode(format, EncodeMethod::GroupedAbsmax, &[rows, columns], &values).unwrap();
            validate(format, format.layout(), &[rows, columns], 1, &bytes).unwrap();
            let decoded = whole(format, &[rows, columns], 1, &bytes).unwrap();
            for (values, decoded) in values.chunks(columns as usize).zip(decoded.chunks(columns as usize)) {
                for (values, decoded) in values.chunks(size).zip(decoded.chunks(size)) {
                    let largest = values.iter().fold(0.0, |max: f32, value| max.max(value.abs()));
                    // Half the f16 spacing of a subnormal scale, when it is one.
                    let scale = largest / qmax;
                    let scale_error = (scale * 2f32.powi(-11)).max(2f32.powi(-25));
                    let bound = 0.5 * (scale + scale_error) * 1.001 + qmax * scale_error * 1.001;
                    for (value, decoded) in values.iter().zip(decoded) {
                        prop_assert!((value - decoded).abs() <= bound, "{format}: {value} {decoded} {bound}");
                    }
                }
            }
        }
    }

    /// Half a step of the largest code (1 of 6) and of the scale (1 of 16), both relative to the group's largest.
    #[test]
    fn nvfp4_absmax_errs_by_a_quarter_of_the_largest(seed: u64, exponent in -20i32..20) {
        let values: Vec<f32> =
            Random(seed).values(128 * 64).into_iter().map(|value| value * 2f32.powi(exponent)).collect();
        let bytes = encode(Format::Nvfp4, EncodeMethod::Nvfp4Absmax, &[128, 64], &values).unwrap();
        validate(Format::Nvfp4, Layout::BlockScaleK16M128x4V1, &[128, 64], 1, &bytes).unwrap();
        let decoded = whole(Format::Nvfp4, &[128, 64], 1, &bytes).unwrap();
        for (values, decoded) in values.chunks(16).zip(decoded.chunks(16)) {
            let largest = values.iter().fold(0.0, |max: f32, value| max.max(value.abs()));
            for (value, decoded) in values.iter().zip(decoded) {
                prop_assert!((value - decoded).abs() <= largest * (1.0 / 6.0 + 1.0 / 16.0 + 0.02));
            }
        }
    }

    /// E4M3 keeps 4 significant bits (2^-4 of the value), bf16 8 (2^-8 for source and scale), below that a fixed step.
    #[test]
    fn fp8_rows_err_by_a_sixteenth_of_the_value(seed: u64, columns in 1u64..100, exponent in -30i32..30) {
        let values: Vec<f32> =
            Random(seed).values(3 * columns as usize).into_iter().map(|value| value * 2f32.powi(exponent)).collect();
        let format = Format::Fp8E4m3fnRowBf16;
        let bytes = encode(format, EncodeMethod::Fp8RowMaxabs, &[3, columns], &values).unwrap();
        validate(format, format.layout(), &[3, columns], 1, &bytes).unwrap();
        let decoded = whole(format, &[3, columns], 1, &bytes).unwrap();
        let geometry = fp8_row::Geometry::new(&[3, columns]).unwrap();
        for (row, (values, decoded)) in
            values.chunks(columns as usize).zip(decoded.chunks(columns as usize)).enumerate()
        {
            let at = geometry.scale_offset + 2 * row;
            let scale = bf16_to_f32(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
            for (value, decoded) in values.iter().zip(decoded) {
                let bound = value.abs() * (1.0 / 16.0 + 1.0 / 128.0) + scale * 2f32.powi(-10);
                prop_assert!((value - decoded).abs() <= bound, "{value} {decoded}");
            }
        }
    }

    /// Direct formats round once.
    #[test]
    fn direct_words_are_nearest(values in prop::collection::vec(-1e30f32..1e30, 1..40)) {
        let shape = [values.len() as u64];
        let bytes = encode(Format::Fp32, EncodeMethod::CastDirect, &shape, &values).unwrap();
        prop_assert_eq!(&whole(Format::Fp32, &shape, 1, &bytes).unwrap(), &values);
        let bytes = encode(Format::Bf16, EncodeMethod::CastDirect, &shape, &values).unwrap();
        for (value, decoded) in values.iter().zip(whole(Format::Bf16, &shape, 1, &bytes).unwrap()) {
            prop_assert!((value - decoded).abs() <= value.abs() / 256.0);
            let neighbours = [bf16_to_f32((decoded.to_bits() >> 16) as u16 ^ 1), decoded];
            prop_assert!((value - decoded).abs() <= (value - neighbours[0]).abs());
        }
    }
}

/// A tensor with one byte changed, and what validation says.
fn with_byte(format: Format, shape: &[u64], bytes: &[u8], at: usize, byte: u8) -> (Vec<u8>, Result<(), FormatError>) {
    let mut bytes = bytes.to_vec();
    bytes[at] = byte;
    let result = validate(format, format.layout(), shape, 1, &bytes);
    (bytes, result)
}

#[test]
fn illegal_grouped_words() {
    let shape = [2, 70];
    let codes = vec![3i8; 140];
    let bytes = grouped::pack(Format::Q4G64Fp16, &shape, &codes, &[0x3C00; 4]).unwrap();
    let geometry = grouped::Geometry::new(Format::Q4G64Fp16, &shape).unwrap();
    let change = |at, byte| with_byte(Format::Q4G64Fp16, &shape, &bytes, at, byte);
    validate(Format::Q4G64Fp16, Layout::RowSplitK128V1, &shape, 1, &bytes).unwrap();
    // Group 1 of row 0 has 6 logical lanes: bytes 32..35 of the base plane, then padding.
    change(34, 0x44).1.unwrap();
    assert!(matches!(change(35, 0x01).1, Err(FormatError::InvalidWord { .. })));
    // The gap after the base plane (4 groups of 32 bytes).
    assert_eq!(change(128, 1).1, Err(FormatError::Padding { at: 128, word: 1 }));
    let high_of = |group: usize| geometry.scale_offset + 2 * group + 1;
    // Negative scale: decoded, but not valid. Infinite and NaN scales: neither.
    let (negative, result) = change(high_of(0), 0xBC);
    assert!(matches!(
        result,
        Err(FormatError::InvalidWord { what: "f16 scale", .. })
    ));
    assert_eq!(whole(Format::Q4G64Fp16, &shape, 1, &negative).unwrap()[0], -3.0);
    for word in [0x7C, 0x7E, 0xFC] {
        let (broken, result) = change(high_of(3), word);
        assert!(matches!(
            result,
            Err(FormatError::InvalidWord {
                what: "f16 scale",
                index: 3,
                ..
            })
        ));
        let result = whole(Format::Q4G64Fp16, &shape, 1, &broken);
        assert!(matches!(
            result,
            Err(FormatError::InvalidWord {
                what: "f16 scale",
                index: 3,
                ..
            })
        ));
        // Elements that do not touch the group can still be read.
        decode(
            Format::Q4G64Fp16,
            Layout::RowSplitK128V1,
            &shape,
            1,
            &broken,
            0..134,
            &mut [0.0; 134],
        )
        .unwrap();
    }
    // A zero scale needs zero codes; a positive scale over zero codes is legal.
    assert!(matches!(change(high_of(1), 0).1, Err(FormatError::InvalidWord { .. })));
    let zeros = grouped::pack(Format::Q5G64Fp16, &shape, &[0; 140], &[0, 1, 0x7BFF, 0]).unwrap();
    validate(Format::Q5G64Fp16, Layout::RowSplitK128V1, &shape, 1, &zeros).unwrap();
    assert_eq!(f16_to_f32(0x7BFF), 65504.0);
    // -128 is no q8 code; a group of padding alone has scale 0.
    let bytes = grouped::pack(Format::Q8G32Fp16, &[1, 33], &[-127; 33], &[1, 1]).unwrap();
    let q8 = |at, byte| with_byte(Format::Q8G32Fp16, &[1, 33], &bytes, at, byte).1;
    q8(0, 0x81).unwrap();
    assert!(matches!(q8(0, 0x80), Err(FormatError::InvalidWord { .. })));
    assert!(matches!(q8(256 + 4, 1), Err(FormatError::InvalidWord { index: 2, .. })));
    assert!(matches!(
        grouped::pack(Format::Q8G32Fp16, &[1, 1], &[-128], &[1]),
        Err(FormatError::InvalidWord { .. })
    ));
    assert!(matches!(
        grouped::pack(Format::Q4G64Fp16, &[1, 1], &[8], &[1]),
        Err(FormatError::InvalidWord { .. })
    ));
    assert!(matches!(
        grouped::pack(Format::Q4G64Fp16, &[1, 1], &[7], &[1, 1]),
        Err(FormatError::Count { .. })
    ));
}

#[test]
fn illegal_nvfp4_words() {
    let shape = [128, 64];
    let bytes = nvfp4::pack(&shape, &[0x21; 4096], &[0x38; 512], &[2.0]).unwrap();
    let geometry = nvfp4::Geometry::new(&shape, 1).unwrap();
    let change = |at, byte| with_byte(Format::Nvfp4, &shape, &bytes, at, byte);
    change(geometry.scale_offset, 0x7E).1.unwrap();
    change(geometry.scale_offset, 0x00).1.unwrap();
    for word in [0x7F, 0x80, 0xB8, 0xFF] {
        assert!(matches!(
            change(geometry.scale_offset, word).1,
            Err(FormatError::InvalidWord { .. })
        ));
        let decoded = whole(Format::Nvfp4, &shape, 1, &change(geometry.scale_offset, word).0);
        assert_eq!(decoded.is_err(), word & 0x7F == 0x7F);
        assert!(nvfp4::pack(&shape, &[0; 4096], &[word; 512], &[1.0]).is_err());
    }
    for divisor in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let mut bytes = bytes.clone();
        bytes[geometry.divisor_offset..].copy_from_slice(&divisor.to_le_bytes());
        let check =
            |result: Result<(), FormatError>| assert!(matches!(result, Err(FormatError::Divisor { index: 0, .. })));
        check(validate(
            Format::Nvfp4,
            Layout::BlockScaleK16M128x4V1,
            &shape,
            1,
            &bytes,
        ));
        check(whole(Format::Nvfp4, &shape, 1, &bytes).map(|_| ()));
        check(nvfp4::pack(&shape, &[0; 4096], &[0; 512], &[divisor]).map(|_| ()));
    }
}

#[test]
fn illegal_fp8_words() {
    let bytes = fp8_row::pack(&[2, 3], &[0x38; 6], &[0x3F80, 0x3F80]).unwrap();
    let change = |at, byte| with_byte(Format::Fp8E4m3fnRowBf16, &[2, 3], &bytes, at, byte);
    for code in [0x7F, 0xFF] {
        let (broken, result) = change(4, code);
        assert_eq!(
            result,
            Err(FormatError::InvalidWord {
                what: "code",
                index: 4,
                word: code.into()
            })
        );
        assert_eq!(whole(Format::Fp8E4m3fnRowBf16, &[2, 3], 1, &broken).map(|_| ()), result);
    }
    assert_eq!(change(6, 1).1, Err(FormatError::Padding { at: 6, word: 1 }));
    for high in [0xBF, 0x80, 0x7F, 0xFF] {
        assert!(matches!(
            change(259, high).1,
            Err(FormatError::InvalidWord {
                what: "row scale",
                index: 1,
                ..
            })
        ));
    }
    // Under a zero scale only zero codes, of either sign.
    let zero = fp8_row::pack(&[1, 2], &[0x00, 0x80], &[0]).unwrap();
    validate(Format::Fp8E4m3fnRowBf16, Layout::RowScaleV1, &[1, 2], 1, &zero).unwrap();
    assert!(with_byte(Format::Fp8E4m3fnRowBf16, &[1, 2], &zero, 0, 1).1.is_err());
    for scale in [-1.0, -0.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(
            fp8_block::pack(&[1, 1], &[0], &[scale]),
            Err(FormatError::InvalidWord { .. })
        ));
    }
    assert!(matches!(
        fp8_block::pack(&[1, 1], &[0x7F], &[1.0]),
        Err(FormatError::InvalidWord { .. })
    ));
    fp8_block::pack(&[1, 1], &[0x7E], &[0.0]).unwrap();
}

#[test]
fn illegal_expert_words() {
    let shape = [1, 16, 16];
    let (codes, scales) = ([0x12; 128], [0x38; 16]);
    let words = MatrixWords {
        codes: &codes,
        scales: &scales,
        multiplier: 1.0,
    };
    let bytes = nvfp4_expert::pack::<FormatError>(&shape, |_, _| Ok(words)).unwrap();
    let change = |at, byte| with_byte(Format::Nvfp4Mul, &shape, &bytes, at, byte).1;
    change(0, 0xFF).unwrap();
    for word in [0x7F, 0x80] {
        assert!(matches!(change(128, word), Err(FormatError::InvalidWord { .. })));
    }
    assert_eq!(change(3 * 144, 1), Err(FormatError::Padding { at: 432, word: 1 }));
    assert!(matches!(
        change(4096 + 3, 0x80 | 0x3F),
        Err(FormatError::Divisor { index: 0, .. })
    ));
    let zero = MatrixWords {
        multiplier: 0.0,
        ..words
    };
    let result = nvfp4_expert::pack::<FormatError>(&shape, |_, _| Ok(zero));
    assert!(matches!(result, Err(FormatError::Divisor { .. })));
    let short = MatrixWords {
        codes: &codes[1..],
        ..words
    };
    let result = nvfp4_expert::pack::<FormatError>(&shape, |_, _| Ok(short));
    assert!(matches!(result, Err(FormatError::Count { .. })));
}
