//! Words, sizes and offsets worked out by hand for every format and layout.

use perplexity_model::formats::nvfp4_expert::{MatrixWords, Projection, decode_matrix};
use perplexity_model::formats::{
    EncodeMethod, Format, FormatError, Layout, decode, encode, encoded_size, fp8_block, fp8_row, grouped, nvfp4,
    nvfp4_expert, validate,
};

fn size(format: Format, shape: &[u64]) -> u64 {
    encoded_size(format, format.layout(), shape, 1).unwrap()
}

fn decode_all(format: Format, shape: &[u64], bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; shape.iter().product::<u64>() as usize];
    decode(format, format.layout(), shape, 1, bytes, 0..out.len() as u64, &mut out).unwrap();
    out
}

#[test]
fn names_are_those_of_the_directory_and_older_spellings_are_unknown() {
    let formats = [
        ("bf16", "contiguous_le_v1"),
        ("fp32", "contiguous_le_v1"),
        ("int32", "contiguous_le_v1"),
        ("q4_g64_fp16", "row_split_k128_v1"),
        ("q5_g64_fp16", "row_split_k128_v1"),
        ("q6_g64_fp16", "row_split_k128_v1"),
        ("q8_g32_fp16", "row_split_k128_v1"),
        ("nvfp4", "block_scale_k16_m128x4_v1"),
        ("fp8_e4m3fn_row_bf16", "row_scale_v1"),
        ("nvfp4_mul", "nvfp4_expert_rg16_v1"),
        ("fp8_e4m3fn_block128_f32", "block128_scale_v1"),
    ];
    assert_eq!(Format::ALL.len(), formats.len());
    for (format, layout) in formats {
        let parsed: Format = format.parse().unwrap();
        assert_eq!(parsed.to_string(), format);
        assert_eq!(parsed.layout(), layout.parse::<Layout>().unwrap());
        assert_eq!(parsed.layout().to_string(), layout);
    }
    for old in ["Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S", "BF16", ""] {
        assert_eq!(
            old.parse::<Format>(),
            Err(FormatError::UnknownFormat { name: old.into() })
        );
    }
    for old in ["row-split-k128-v1", "contiguous-le-v1", "raw_bytes_v1"] {
        assert_eq!(
            old.parse::<Layout>(),
            Err(FormatError::UnknownLayout { name: old.into() })
        );
    }
}

#[test]
fn every_format_has_exactly_one_layout() {
    for format in Format::ALL {
        let shape: &[u64] = if format == Format::Nvfp4Mul {
            &[2, 128, 128]
        } else {
            &[128, 128]
        };
        for layout in Layout::ALL {
            let result = encoded_size(format, layout, shape, 1);
            if layout == format.layout() {
                assert!(result.unwrap() > 0);
            } else {
                assert_eq!(result, Err(FormatError::LayoutMismatch { format, layout }));
            }
        }
    }
    assert!(Layout::ALL.iter().all(|layout| layout.alignment()
        == if *layout == Layout::Nvfp4ExpertRg16V1 {
            4096
        } else {
            256
        }));
}

#[test]
fn sizes_of_known_tensors() {
    assert_eq!(size(Format::Bf16, &[2, 3]), 12);
    assert_eq!(size(Format::Fp32, &[]), 4);
    for (format, bytes) in [
        (Format::Q4G64Fp16, 260),
        (Format::Q5G64Fp16, 516),
        (Format::Q6G64Fp16, 516),
        (Format::Q8G32Fp16, 264),
    ] {
        assert_eq!(size(format, &[1, 4]), bytes);
    }
    assert_eq!(size(Format::Q5G64Fp16, &[2, 130]), 528);
    assert_eq!(size(Format::Q4G64Fp16, &[7168, 5120]), 19_496_960);
    assert_eq!(size(Format::Q5G64Fp16, &[7168, 5120]), 24_084_480);
    assert_eq!(size(Format::Nvfp4, &[256, 128]), 18_436);
    assert_eq!(size(Format::Nvfp4, &[14336, 5120]), 41_287_684);
    assert_eq!(size(Format::Fp8E4m3fnRowBf16, &[3, 5]), 262);
    assert_eq!(size(Format::Fp8E4m3fnRowBf16, &[14336, 5120]), 73_428_992);
    assert_eq!(size(Format::Nvfp4Mul, &[2, 32, 16]), 8216);
    assert_eq!(size(Format::Nvfp4Mul, &[512, 2560, 640]), 1_415_583_744);
    assert_eq!(size(Format::Fp8E4m3fnBlock128F32, &[130, 200]), 26_128);
    // The tensors of the small example model.
    assert_eq!(size(Format::Q8G32Fp16, &[320, 128]), 43_520);
    assert_eq!(size(Format::Q4G64Fp16, &[128, 128]), 8_704);
    assert_eq!(size(Format::Q5G64Fp16, &[256, 128]), 21_504);
    assert_eq!(size(Format::Q5G64Fp16, &[128, 128]), 10_752);
    assert_eq!(size(Format::Nvfp4, &[128, 128]), 9_220);
    assert_eq!(size(Format::Fp8E4m3fnRowBf16, &[384, 128]), 49_920);
    assert_eq!(size(Format::Q6G64Fp16, &[320, 128]), 32_000);
}

#[test]
fn shapes_outside_a_layout_are_refused() {
    let refused: [(Format, &[u64]); 14] = [
        (Format::Q4G64Fp16, &[4]),
        (Format::Q4G64Fp16, &[1, 2, 3]),
        (Format::Q4G64Fp16, &[0, 4]),
        (Format::Nvfp4, &[127, 64]),
        (Format::Nvfp4, &[128, 32]),
        (Format::Nvfp4, &[128]),
        (Format::Fp8E4m3fnRowBf16, &[4]),
        (Format::Fp8E4m3fnRowBf16, &[4, 0]),
        (Format::Nvfp4Mul, &[2, 8, 16]),
        (Format::Nvfp4Mul, &[2, 16, 24]),
        (Format::Nvfp4Mul, &[16, 16]),
        (Format::Fp8E4m3fnBlock128F32, &[4]),
        (Format::Bf16, &[1; 17]),
        (Format::Bf16, &[3, 0]),
    ];
    for (format, shape) in refused {
        let error = encoded_size(format, format.layout(), shape, 1).unwrap_err();
        assert!(
            matches!(error, FormatError::Shape { .. }),
            "{format} {shape:?}: {error}"
        );
    }
    let huge = [u64::MAX / 2, 128];
    for format in Format::ALL {
        let shape: &[u64] = if format == Format::Nvfp4Mul {
            &[1 << 40, 1 << 20, 1 << 20]
        } else {
            &huge
        };
        let error = encoded_size(format, format.layout(), shape, 1).unwrap_err();
        assert!(
            matches!(error, FormatError::Overflow { .. } | FormatError::Shape { .. }),
            "{format}: {error}"
        );
    }
}

#[test]
fn several_divisors_need_nvfp4_and_whole_tiles() {
    let nvfp4 = |rows, divisors| encoded_size(Format::Nvfp4, Layout::BlockScaleK16M128x4V1, &[rows, 128], divisors);
    assert_eq!(nvfp4(256, 2), Ok(18_436 + 4));
    for (rows, divisors) in [(256, 0), (256, 3), (256, 4), (256, 256)] {
        assert_eq!(
            nvfp4(rows, divisors),
            Err(FormatError::UnexpectedDivisors {
                format: Format::Nvfp4,
                divisors
            })
        );
    }
    let format = Format::Bf16;
    let expected = Err(FormatError::UnexpectedDivisors { format, divisors: 2 });
    assert_eq!(encoded_size(format, Layout::ContiguousLeV1, &[256], 2), expected);
}

#[test]
fn direct_words_are_little_endian_in_c_order() {
    let bytes = encode(
        Format::Bf16,
        EncodeMethod::CastDirect,
        &[2, 3],
        &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    )
    .unwrap();
    assert_eq!(
        bytes,
        [0x80, 0x3F, 0x00, 0x40, 0x40, 0x40, 0x80, 0x40, 0xA0, 0x40, 0xC0, 0x40]
    );
    assert_eq!(
        decode_all(Format::Bf16, &[2, 3], &bytes),
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    );
    let scalar = encode(Format::Fp32, EncodeMethod::CastDirect, &[], &[896.0]).unwrap();
    assert_eq!(scalar, [0x00, 0x00, 0x60, 0x44]);
    assert_eq!(decode_all(Format::Fp32, &[], &scalar), [896.0]);
    let integers = encode(Format::Int32, EncodeMethod::CastDirect, &[2], &[-2.0, 16_777_216.0]).unwrap();
    assert_eq!(integers, [0xFE, 0xFF, 0xFF, 0xFF, 0, 0, 0, 1]);
    assert_eq!(decode_all(Format::Int32, &[2], &integers), [-2.0, 16_777_216.0]);
}

#[test]
fn int32_values_that_f32_cannot_hold_are_refused_both_ways() {
    let bytes = 16_777_217i32.to_le_bytes();
    let result = decode(Format::Int32, Layout::ContiguousLeV1, &[1], 1, &bytes, 0..1, &mut [0.0]);
    assert_eq!(
        result,
        Err(FormatError::InexactInteger {
            index: 0,
            value: 16_777_217
        })
    );
    for value in [2_147_483_648.0, -2_147_483_904.0, f32::NAN, f32::INFINITY] {
        let result = encode(Format::Int32, EncodeMethod::CastDirect, &[1], &[value]);
        assert!(
            matches!(result, Err(FormatError::OutOfRange { index: 0, .. })),
            "{value}"
        );
    }
    assert_eq!(
        encode(Format::Int32, EncodeMethod::CastDirect, &[1], &[-2_147_483_648.0]).unwrap(),
        [0, 0, 0, 0x80]
    );
}

#[test]
fn bf16_refuses_finite_values_that_would_round_to_infinity() {
    let result = encode(Format::Bf16, EncodeMethod::CastDirect, &[2], &[0.0, f32::MAX]);
    assert_eq!(
        result,
        Err(FormatError::OutOfRange {
            format: Format::Bf16,
            index: 1,
            value: f32::MAX
        })
    );
    let kept = encode(Format::Bf16, EncodeMethod::CastDirect, &[1], &[f32::NEG_INFINITY]).unwrap();
    assert_eq!(kept, [0x80, 0xFF]);
}

/// `(format, scale word, codes, decoded, base prefix, high prefix, high offset, scale offset, scale plane)`.
type GroupedVector = (
    Format,
    u16,
    [i8; 4],
    [f32; 4],
    &'static [u8],
    &'static [u8],
    usize,
    usize,
    &'static [u8],
);

/// The row `[3.5, -1.75, 0.25, -3.5]` in the four formats.
const GROUPED: [GroupedVector; 4] = [
    (
        Format::Q4G64Fp16,
        0x3800,
        [7, -4, 0, -7],
        [3.5, -2.0, 0.0, -3.5],
        &[0xC7, 0x90],
        &[],
        256,
        256,
        &[0x00, 0x38, 0, 0],
    ),
    (
        Format::Q5G64Fp16,
        0x3377,
        [15, -8, 1, -15],
        [3.499_145_5, -1.866_210_9, 0.233_276_37, -3.499_145_5],
        &[0x8F, 0x11],
        &[0x0A],
        256,
        512,
        &[0x77, 0x33, 0, 0],
    ),
    (
        Format::Q6G64Fp16,
        0x2F3A,
        [31, -15, 2, -31],
        [3.500_366_2, -1.693_725_6, 0.225_830_08, -3.500_366_2],
        &[0x1F, 0x12],
        &[0x8D],
        256,
        512,
        &[0x3A, 0x2F, 0, 0],
    ),
    (
        Format::Q8G32Fp16,
        0x270E,
        [127, -64, 9, -127],
        [3.499_786_4, -1.763_671_9, 0.248_016_36, -3.499_786_4],
        &[0x7F, 0xC0, 0x09, 0x81],
        &[],
        256,
        256,
        &[0x0E, 0x27, 0, 0, 0, 0, 0, 0],
    ),
];

#[test]
fn grouped_absmax_of_the_worked_row() {
    for (format, scale, codes, decoded, base, high, high_offset, scale_offset, scales) in GROUPED {
        let bytes = encode(format, EncodeMethod::GroupedAbsmax, &[1, 4], &[3.5, -1.75, 0.25, -3.5]).unwrap();
        let mut expected = vec![0u8; size(format, &[1, 4]) as usize];
        expected[..base.len()].copy_from_slice(base);
        expected[high_offset..high_offset + high.len()].copy_from_slice(high);
        expected[scale_offset..].copy_from_slice(scales);
        assert_eq!(bytes, expected, "{format}");
        assert_eq!(
            grouped::pack(format, &[1, 4], &codes, &[scale]).unwrap(),
            expected,
            "{format}"
        );
        assert_eq!(decode_all(format, &[1, 4], &bytes), decoded, "{format}");
        validate(format, Layout::RowSplitK128V1, &[1, 4], 1, &bytes).unwrap();
    }
}

#[test]
fn grouped_planes_of_a_padded_matrix() {
    // q5 [2,130]: Kp 256, 4 groups a row, base 256 bytes, high 64, planes at 0, 256, 512.
    let geometry = grouped::Geometry::new(Format::Q5G64Fp16, &[2, 130]).unwrap();
    assert_eq!(
        (
            geometry.groups_per_row,
            geometry.high_offset,
            geometry.scale_offset,
            geometry.size
        ),
        (4, 256, 512, 528)
    );
}

#[test]
fn grouped_absmax_of_tiny_groups_uses_the_smallest_scale() {
    // 2^-26 / 7 rounds to f16 zero, so the scale becomes 2^-24 and the code rint(2^-26 * 2^24) = rint(0.25) = 0.
    let tiny = 2f32.powi(-26);
    let bytes = encode(
        Format::Q4G64Fp16,
        EncodeMethod::GroupedAbsmax,
        &[1, 2],
        &[tiny, 8.0 * tiny],
    )
    .unwrap();
    assert_eq!(bytes[256..258], [0x01, 0x00]);
    assert_eq!(bytes[0], 0x20); // 0 and rint(2) = 2
    // Coarse subnormal scales reach the most negative code: A/7 = 2^-24 * 8/7 rounds to 2^-24, so -8 is a code.
    let bytes = encode(
        Format::Q4G64Fp16,
        EncodeMethod::GroupedAbsmax,
        &[1, 2],
        &[-(2f32.powi(-21)), 0.0],
    )
    .unwrap();
    assert_eq!((bytes[0], &bytes[256..258]), (0x08, &[0x01, 0x00][..]));
}

#[test]
fn grouped_absmax_refuses_what_has_no_scale() {
    for method in [EncodeMethod::GroupedAbsmax, EncodeMethod::GroupedMse] {
        let result = encode(Format::Q4G64Fp16, method, &[1, 65], &[&[0.0; 64][..], &[1e6]].concat());
        assert_eq!(
            result,
            Err(FormatError::OutOfRange {
                format: Format::Q4G64Fp16,
                index: 64,
                value: 1e6
            })
        );
        let result = encode(Format::Q8G32Fp16, method, &[2, 2], &[0.0, 0.0, 1.0, f32::NAN]);
        assert!(matches!(result, Err(FormatError::NonFinite { index: 3, .. })));
    }
}

#[test]
fn nvfp4_absmax_of_the_worked_group() {
    let mut values = vec![0.0f32; 128 * 64];
    values[..4].copy_from_slice(&[3.0, -1.5, 0.625, 0.125]);
    let bytes = encode(Format::Nvfp4, EncodeMethod::Nvfp4Absmax, &[128, 64], &values).unwrap();
    let geometry = nvfp4::Geometry::new(&[128, 64], 1).unwrap();
    assert_eq!(bytes[..3], [0xD7, 0x02, 0x00]);
    assert_eq!(bytes[geometry.scale_offset], 0x7E);
    assert_eq!(bytes[geometry.divisor_offset..], [0x00, 0x00, 0x60, 0x44]); // 896
    assert_eq!(
        decode_all(Format::Nvfp4, &[128, 64], &bytes)[..5],
        [3.0, -1.5, 0.5, 0.0, 0.0]
    );
    assert!(bytes[2..geometry.scale_offset].iter().all(|byte| *byte == 0));
}

#[test]
fn nvfp4_divides_by_the_divisor_once() {
    // 1.5 * 1.125 / 3 in f32; multiplying by 1/3 would give another last bit for some words.
    let mut codes = vec![0u8; 128 * 32];
    codes[0] = 0x3;
    let mut scales = vec![0u8; 128 * 4];
    scales[0] = 0x39;
    let bytes = nvfp4::pack(&[128, 64], &codes, &scales, &[3.0]).unwrap();
    assert_eq!(decode_all(Format::Nvfp4, &[128, 64], &bytes)[0], 1.5f32 * 1.125 / 3.0);
}

#[test]
fn nvfp4_scale_positions() {
    for ((row, group), position) in [
        ((0, 0), 0),
        ((1, 0), 16),
        ((31, 3), 499),
        ((32, 0), 4),
        ((33, 5), 533),
        ((127, 7), 1023),
        ((128, 0), 1024),
        ((255, 7), 2047),
    ] {
        assert_eq!(nvfp4::scale_position(128, row, group), position);
        assert_eq!(nvfp4::scale_owner(128, position), (row, group));
    }
}

#[test]
fn nvfp4_scale_positions_are_a_bijection() {
    for (rows, columns) in [(128, 64), (128, 192), (256, 128), (384, 320), (640, 64)] {
        let groups = columns / 16;
        let mut seen = vec![false; rows * groups];
        for row in 0..rows {
            for group in 0..groups {
                let position = nvfp4::scale_position(columns, row, group);
                assert!(!std::mem::replace(&mut seen[position], true));
                assert_eq!(nvfp4::scale_owner(columns, position), (row, group));
            }
        }
        assert!(seen.into_iter().all(|seen| seen));
    }
}

#[test]
fn each_nvfp4_row_block_uses_its_own_divisor() {
    let mut codes = vec![0u8; 256 * 32];
    let scales = vec![0x38u8; 256 * 4]; // 1.0
    for row in [0, 127, 128, 255] {
        codes[row * 32] = 0x7; // 6
    }
    let bytes = nvfp4::pack(&[256, 64], &codes, &scales, &[2.0, 8.0]).unwrap();
    assert_eq!(bytes[bytes.len() - 8..], [0, 0, 0, 0x40, 0, 0, 0, 0x41]);
    let mut out = vec![0.0; 256 * 64];
    decode(
        Format::Nvfp4,
        Layout::BlockScaleK16M128x4V1,
        &[256, 64],
        2,
        &bytes,
        0..256 * 64,
        &mut out,
    )
    .unwrap();
    assert_eq!([0, 127, 128, 255].map(|row| out[row * 64]), [3.0, 3.0, 0.75, 0.75]);
    // A range across the two blocks.
    let mut out = vec![0.0; 66];
    decode(
        Format::Nvfp4,
        Layout::BlockScaleK16M128x4V1,
        &[256, 64],
        2,
        &bytes,
        127 * 64..127 * 64 + 66,
        &mut out,
    )
    .unwrap();
    assert_eq!((out[0], out[64]), (3.0, 0.75));
}

#[test]
fn fp8_row_maxabs_of_the_worked_row() {
    let values = [1.0, -0.5, 0.3, -2.0];
    let bytes = encode(Format::Fp8E4m3fnRowBf16, EncodeMethod::Fp8RowMaxabs, &[1, 4], &values).unwrap();
    assert_eq!(bytes.len(), 258);
    assert_eq!(bytes[..4], [0x76, 0xEE, 0x68, 0xFE]);
    assert_eq!(bytes[256..], [0x92, 0x3B]);
    let decoded = decode_all(Format::Fp8E4m3fnRowBf16, &[1, 4], &bytes);
    assert_eq!(decoded, [0.998_046_9, -0.499_023_44, 0.285_156_25, -1.996_093_8]);
    assert_eq!(
        fp8_row::pack(&[1, 4], &[0x76, 0xEE, 0x68, 0xFE], &[0x3B92]).unwrap(),
        bytes
    );
}

#[test]
fn fp8_rows_of_zeros_have_scale_zero_and_negative_zeros_keep_their_sign() {
    let bytes = encode(
        Format::Fp8E4m3fnRowBf16,
        EncodeMethod::Fp8RowMaxabs,
        &[2, 2],
        &[0.0, -0.0, 448.0, -0.0],
    )
    .unwrap();
    assert_eq!(bytes[..4], [0x00, 0x00, 0x7E, 0x80]);
    assert_eq!(bytes[256..], [0x00, 0x00, 0x80, 0x3F]);
}

#[test]
fn expert_units_hold_rows_in_the_stated_bytes() {
    let (experts, hidden, inner) = (2, 32, 16);
    let shape = [experts as u64, hidden as u64, inner as u64];
    let zero_codes = vec![0u8; hidden * inner / 2];
    let mut down_codes = zero_codes.clone();
    // Rows 3 and 11 at column 5 of the down matrix [32, 16]: codes 0x2 (1.0) and 0xF (-6.0).
    down_codes[(3 * inner + 5) / 2] |= 0x2 << 4;
    down_codes[(11 * inner + 5) / 2] |= 0xF << 4;
    let mut down_scales = vec![0u8; hidden];
    down_scales[3] = 0x40; // 2.0
    down_scales[11] = 0x38; // 1.0
    let zero_scales = vec![0u8; hidden * inner / 16];
    let bytes = nvfp4_expert::pack::<FormatError>(&shape, |expert, projection| {
        let down = expert == 1 && projection == Projection::Down;
        Ok(MatrixWords {
            codes: if down { &down_codes } else { &zero_codes },
            scales: if down { &down_scales } else { &zero_scales },
            multiplier: if down { 0.5 } else { 1.0 },
        })
    })
    .unwrap();
    assert_eq!(bytes.len(), 8216);
    let down = 4096 + 576;
    assert_eq!(bytes[down + 45], 0xF2);
    assert_eq!((bytes[down + 128 + 3], bytes[down + 128 + 11]), (0x40, 0x38));
    assert_eq!(bytes[8192 + 12 + 8..8192 + 24], 0.5f32.to_le_bytes());
    assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 3 + 6 * 2 - 1);
    let mut out = vec![f32::NAN; hidden * inner];
    decode_matrix(&shape, &bytes, 1, Projection::Down, &mut out).unwrap();
    assert_eq!((out[3 * inner + 5], out[11 * inner + 5]), (1.0, -3.0));
    assert_eq!(out.iter().filter(|value| **value != 0.0).count(), 2);
}

#[test]
fn expert_gate_and_up_rows_interleave() {
    let (hidden, inner) = (16, 32);
    let shape = [1, hidden as u64, inner as u64];
    // Row i of gate holds code i % 8 everywhere, of up code 8 + i % 8.
    let rows = |sign: u8, rows: usize, columns: usize| -> Vec<u8> {
        (0..rows)
            .flat_map(|row| vec![(sign + (row % 8) as u8) * 0x11; columns / 2])
            .collect()
    };
    let (gate, up, down) = (rows(0, inner, hidden), rows(8, inner, hidden), rows(0, hidden, inner));
    let scales = vec![0x38u8; hidden * inner / 16];
    let bytes = nvfp4_expert::pack::<FormatError>(&shape, |_, projection| {
        let codes: &[u8] = match projection {
            Projection::Gate => &gate,
            Projection::Up => &up,
            Projection::Down => &down,
        };
        Ok(MatrixWords {
            codes,
            scales: &scales,
            multiplier: 1.0,
        })
    })
    .unwrap();
    // First unit, stored row 1 (= up row 0) and stored row 9 (= up row 4): low nibble 8, high nibble 12.
    assert_eq!(bytes[4], 0xC8);
    for (projection, words) in [
        (Projection::Gate, &gate),
        (Projection::Up, &up),
        (Projection::Down, &down),
    ] {
        let mut out = vec![0.0; hidden * inner];
        decode_matrix(&shape, &bytes, 0, projection, &mut out).unwrap();
        let expected: Vec<u32> = words
            .iter()
            .flat_map(|byte| [byte & 15, byte >> 4])
            .map(|code| perplexity_kernels::numeric::e2m1_to_f32(code).to_bits())
            .collect();
        assert_eq!(
            out.iter().map(|value| value.to_bits()).collect::<Vec<_>>(),
            expected,
            "{projection:?}"
        );
    }
}

#[test]
fn an_expert_bank_has_no_element_order() {
    let bytes = vec![0u8; 8216];
    let result = decode(
        Format::Nvfp4Mul,
        Layout::Nvfp4ExpertRg16V1,
        &[2, 32, 16],
        1,
        &bytes,
        0..16,
        &mut [0.0; 16],
    );
    assert_eq!(
        result,
        Err(FormatError::NoElementOrder {
            layout: Layout::Nvfp4ExpertRg16V1
        })
    );
}

#[test]
fn tile_scales_cover_cut_tiles() {
    let codes = vec![0x38u8; 130 * 200]; // 1.0
    let bytes = fp8_block::pack(&[130, 200], &codes, &[1.0, 2.0, 3.0, 4.0]).unwrap();
    assert_eq!(bytes.len(), 26_128);
    let out = decode_all(Format::Fp8E4m3fnBlock128F32, &[130, 200], &bytes);
    let at = |row: usize, column: usize| out[row * 200 + column];
    assert_eq!([at(0, 0), at(127, 127), at(0, 128), at(127, 199)], [1.0, 1.0, 2.0, 2.0]);
    assert_eq!(
        [at(128, 0), at(129, 127), at(128, 128), at(129, 199)],
        [3.0, 3.0, 4.0, 4.0]
    );
    // Leading axes: every matrix has its own tiles.
    let bytes = fp8_block::pack(&[2, 1, 1, 3], &[0x38; 6], &[5.0, 7.0]).unwrap();
    assert_eq!(
        decode_all(Format::Fp8E4m3fnBlock128F32, &[2, 1, 1, 3], &bytes),
        [5.0, 5.0, 5.0, 7.0, 7.0, 7.0]
    );
}
