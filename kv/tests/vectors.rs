//! Published bits of every coder on one test row, codes that never occur in it, and rows at the edge of the formats.
//!
//! The test row T1 comes from the generator `s = (1103515245 s + 12345) mod 2^31`, s = 12345: per value, bits 16..20 of
//! four states are added, 62 is subtracted, and the result divided by 16. Hashes are FNV-1a 64 over the packed row.

use perplexity_kv::basis::Basis;
use perplexity_kv::codec::{HostCodec, decode_rows, encode_rows};
use perplexity_kv::codecs::int8::{int4, int8};
use perplexity_kv::codecs::{
    bf16, fp8::Fp8, k4v2::Lloyd4Row, nvfp4, rk2v4_e8::E8Root, rk4v4, rk4v4_e8::E8Snap, vq2::Vq2,
};

fn t1() -> Vec<f32> {
    let mut state: u64 = 12345;
    let mut five_bits = || {
        state = (1_103_515_245 * state + 12345) % (1 << 31);
        (state >> 16 & 31) as i32
    };
    (0..256)
        .map(|_| ((0..4).map(|_| five_bits()).sum::<i32>() - 62) as f32 / 16.0)
        .collect()
}

fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(14_695_981_039_346_656_037, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(1_099_511_628_211)
    })
}

/// Relative error in the model's basis.
fn round_trip_error(codec: &dyn HostCodec, row: &[f32]) -> f64 {
    let mut rows = row.to_vec();
    codec.basis().forward(&mut rows, 256);
    let mut back = decode_rows(codec, &encode_rows(codec, &rows, 1, 256), 1, 256);
    codec.basis().inverse(&mut back, 256);
    let error: f64 = row.iter().zip(&back).map(|(x, y)| f64::from(x - y).powi(2)).sum();
    (error / row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>()).sqrt()
}

fn packed(codec: &dyn HostCodec, row: &[f32]) -> Vec<u8> {
    let mut rows = row.to_vec();
    codec.basis().forward(&mut rows, 256);
    encode_rows(codec, &rows, 1, 256)
}

fn half_words(bytes: &[u8]) -> Vec<u16> {
    bytes
        .chunks_exact(2)
        .map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
        .collect()
}

const H256: Basis = Basis::Hadamard256;
const H64: Basis = Basis::Hadamard64;
const PLAIN: Basis = Basis::Identity;

#[test]
fn the_test_row_and_its_transforms_are_the_published_ones() {
    let x = t1();
    let scaled: Vec<i32> = x.iter().map(|value| (value * 16.0) as i32).collect();
    assert_eq!(scaled[..8], [-15, 37, 8, 34, 20, 9, 3, -14]);
    assert_eq!(
        (scaled.iter().sum::<i32>(), scaled.iter().map(|v| v * v).sum::<i32>()),
        (253, 88_263)
    );
    let words = |values: &[i32], bytes: usize| -> u64 {
        fnv(&values
            .iter()
            .flat_map(|value| value.to_le_bytes()[..bytes].to_vec())
            .collect::<Vec<_>>())
    };
    assert_eq!(words(&scaled, 2), 0x7779_0c37_5eda_36e6);
    let transformed = |basis: Basis, unit: f32| -> Vec<i32> {
        let mut y = x.clone();
        basis.forward(&mut y, 256);
        y.iter().map(|value| (value * unit) as i32).collect()
    };
    let y = transformed(H256, 256.0);
    assert_eq!(y[..8], [253, -113, -387, -213, 207, 337, -197, -263]);
    assert_eq!(words(&y, 4), 0xed31_ac2f_4a23_d6dc);
    let z = transformed(H64, 128.0);
    assert_eq!(z[..8], [462, -78, -24, -184, -12, -72, 162, -126]);
    assert_eq!(words(&z, 4), 0x465c_1542_8d44_a70d);
    let mut twice = x.clone();
    H256.forward(&mut twice, 256);
    H256.forward(&mut twice, 256);
    assert_eq!(twice, x);
}

#[test]
fn every_coder_gives_the_published_bits() {
    let plain_int4_h256 = int4(H256, 64);
    let snap = |basis| E8Snap {
        basis,
        bits: 4,
        max: 7.0,
    };
    let root = |basis| E8Root { basis };
    let cases: [(&str, &dyn HostCodec, u64); 17] = [
        ("int8 K", &int8(H256), 0x812a_0c86_4773_ae8f),
        ("int8 V", &int8(PLAIN), 0x63ca_2f6a_b534_f874),
        ("int8 on H64", &int8(H64), 0xefc1_3b0d_707e_72d9),
        ("fp8 K", &Fp8 { basis: H256 }, 0x71fd_31ec_0e72_6109),
        ("fp8 V", &Fp8 { basis: PLAIN }, 0xd363_eb47_36b9_decf),
        ("nvfp4", &nvfp4::SEARCHED, 0x111a_f762_af58_2921),
        ("nvfp4 single", &nvfp4::SINGLE, 0xb2a0_3c70_d70c_087f),
        ("k4v2 K", &Lloyd4Row, 0xcb35_0507_a4ea_0a7d),
        ("vq2", &Vq2, 0xb2a9_03aa_60bd_e4d1),
        ("rk4v4 B K", &rk4v4::Lloyd4, 0x22cb_dbff_5f8b_03cf),
        ("int4 G32 V", &int4(PLAIN, 32), 0x0ab4_2d97_66b9_4ea5),
        ("int4 G64 H64", &int4(H64, 64), 0xbe47_58c4_9159_c3b5),
        ("mid-rise H64", &rk4v4::MidRise4, 0xb312_b87a_493c_d32c),
        ("e8 H256", &snap(H256), 0x7b99_b69c_d4b0_2fd6),
        ("e8 H64", &snap(H64), 0xfad5_562c_91fb_20f6),
        ("e8 root H256", &root(H256), 0x8063_e372_b54d_6108),
        ("e8 root H64", &root(H64), 0x4cd4_cfbd_f19e_e45f),
    ];
    let row = t1();
    for (name, codec, hash) in cases {
        assert_eq!(fnv(&packed(codec, &row)), hash, "{name}");
    }
    // For comparison with the snapped codes: the same scales, one code apart.
    let (plain, snapped) = (packed(&plain_int4_h256, &row), packed(&snap(H256), &row));
    assert_eq!(plain[128..], snapped[128..]);
    assert_eq!(
        (&plain[..4], &snapped[..4]),
        (&[0xf3, 0xec, 0x42, 0xde][..], &[0xf3, 0xec, 0x32, 0xde][..])
    );
}

#[test]
fn first_codes_and_scales_are_the_published_ones() {
    let row = t1();
    let int8_k = packed(&int8(H256), &row);
    assert_eq!(
        int8_k[..8].iter().map(|b| *b as i8).collect::<Vec<_>>(),
        [48, -22, -74, -41, 40, 64, -38, -50]
    );
    assert_eq!(half_words(&int8_k[256..]), [0x253c, 0x260a, 0x2585, 0x25f6]);
    let int8_v = packed(&int8(PLAIN), &row);
    assert_eq!(
        int8_v[..8].iter().map(|b| *b as i8).collect::<Vec<_>>(),
        [-41, 102, 22, 94, 55, 25, 8, -39]
    );
    let fp8 = packed(&Fp8 { basis: H256 }, &row);
    assert_eq!(fp8[..8], [0x71, 0xe8, 0xf6, 0xf0, 0x6f, 0x74, 0xee, 0xf2]);
    assert_eq!(half_words(&fp8[256..]), [0x1ed9]);
    let fp4 = packed(&nvfp4::SEARCHED, &row);
    assert_eq!(fp4[..8], [0xa4, 0xcd, 0x54, 0xcc, 0x88, 0x6d, 0x34, 0xcd]);
    assert_eq!(
        fp4[128..],
        [
            0x2e, 0x2f, 0x2e, 0x30, 0x2f, 0x2a, 0x30, 0x33, 0x2e, 0x30, 0x2f, 0x2f, 0x30, 0x2e, 0x2e, 0x2c
        ]
    );
    let k4 = packed(&Lloyd4Row, &row);
    assert_eq!(
        (&k4[..4], half_words(&k4[128..])),
        (&[0x6b, 0x53, 0xca, 0x45][..], vec![0x28a9])
    );
    let vq2 = packed(&Vq2, &row);
    assert_eq!(
        (half_words(&vq2[..8]), half_words(&vq2[64..])),
        (vec![0x98c4, 0x8a4f, 0x85ec, 0xc499], vec![0x2ce0])
    );
    let lloyd = packed(&rk4v4::Lloyd4, &row);
    assert_eq!(lloyd[..4], [0x93, 0xac, 0x42, 0xba]);
    assert_eq!(half_words(&lloyd[128..]), [0x2628, 0x2680, 0x26c5, 0x2637]);
    let root = packed(&E8Root { basis: H256 }, &row);
    assert_eq!(root[..8], [0xa3, 0xc3, 0xaa, 0xc6, 0xad, 0xe0, 0x8d, 0xc8]);
    assert_eq!(half_words(&root[64..]), [0x35f0, 0x36d9, 0x3642, 0x36c2]);
    // 3 1 -3 -3 3 3 -3 -3 times the first scale.
    let scale = half::f16::from_bits(0x35f0).to_f32();
    let decoded = decode_rows(&E8Root { basis: H256 }, &root, 1, 256);
    assert_eq!(
        decoded[..8],
        [3.0, 1.0, -3.0, -3.0, 3.0, 3.0, -3.0, -3.0].map(|code| code * scale)
    );
}

#[test]
fn errors_on_the_test_row_are_the_published_ones() {
    let cases: [(&dyn HostCodec, f64); 14] = [
        (&int8(H256), 0.00558),
        (&int8(PLAIN), 0.00564),
        (&Fp8 { basis: H256 }, 0.02731),
        (&Fp8 { basis: PLAIN }, 0.02231),
        (&nvfp4::SEARCHED, 0.08170),
        (&Lloyd4Row, 0.09587),
        (&Vq2, 0.29136),
        (&rk4v4::Lloyd4, 0.09267),
        (&int4(PLAIN, 32), 0.09465),
        (&int4(H64, 64), 0.11469),
        (&rk4v4::MidRise4, 0.10433),
        (
            &E8Snap {
                basis: H256,
                bits: 4,
                max: 7.0,
            },
            0.13502,
        ),
        (&int4(H256, 64), 0.09531),
        (&E8Root { basis: H256 }, 0.47346),
    ];
    for (codec, published) in cases {
        let error = round_trip_error(codec, &t1());
        assert!((error - published).abs() < 1e-5, "{codec:?}: {error}");
    }
}

/// Encodes one row that is already in the stored basis and decodes it.
fn stored(codec: &dyn HostCodec, row: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let bytes = encode_rows(codec, row, 1, 256);
    let decoded = decode_rows(codec, &bytes, 1, 256);
    (bytes, decoded)
}

#[test]
fn int8_ties_go_to_even_and_scales_round_before_the_codes() {
    // Scale 127/127 = 1: codes are the values, ties to even.
    let mut row = vec![0.0; 256];
    row[..6].copy_from_slice(&[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]);
    let (bytes, decoded) = stored(&int8(PLAIN), &row);
    assert_eq!(decoded[..6], [127.0, 0.0, 2.0, 2.0, 0.0, -2.0]);
    assert_eq!(half_words(&bytes[256..]), [0x3c00, 0, 0, 0]);
    // 1/127 rounds to FP16 0x2008 = 0.007873535..; its reciprocal is 127.008, so the maximum still takes code 127.
    row[..6].copy_from_slice(&[1.0, 0.0, 0.0, 0.0, 0.0, -1.0]);
    let (bytes, _) = stored(&int8(PLAIN), &row);
    assert_eq!(
        (bytes[0], bytes[5], half_words(&bytes[256..258])[0]),
        (127, 129, 0x2008)
    );
}

#[test]
fn int8_scale_underflow_gives_zero_and_overflow_shows() {
    // 127 * 2^-25 is a tie between 0 and the smallest FP16 and goes to zero; the next bf16 above does not.
    let tie = 127.0 * 2f32.powi(-25);
    let (bytes, decoded) = stored(&int8(PLAIN), &vec![tie; 256]);
    assert!(bytes.iter().all(|byte| *byte == 0) && decoded.iter().all(|value| *value == 0.0));
    let (bytes, _) = stored(&int8(PLAIN), &vec![128.0 * 2f32.powi(-25); 256]);
    // Scale 2^-24, value 2^-18: code 64.
    assert_eq!((bytes[0], half_words(&bytes[256..258])[0]), (64, 0x0001));
    // 127 * 65520 overflows FP16: the scale becomes infinite and the group decodes to NaN, not to a plausible number.
    let (bytes, decoded) = stored(&int8(PLAIN), &vec![127.0 * 65520.0; 256]);
    assert_eq!(half_words(&bytes[256..258])[0], 0x7c00);
    assert!(decoded.iter().all(|value| value.is_nan()));
    let (_, decoded) = stored(&int8(PLAIN), &vec![127.0 * 65504.0; 256]);
    assert!(decoded.iter().all(|value| *value == 127.0 * 65504.0));
}

#[test]
fn fp8_scales_are_clamped_and_zero_rows_have_scale_zero() {
    let codec = Fp8 { basis: PLAIN };
    let (bytes, decoded) = stored(&codec, &[0.0; 256]);
    assert!(bytes.iter().all(|byte| *byte == 0) && decoded.iter().all(|value| *value == 0.0));
    let (bytes, _) = stored(&codec, &[-0.0; 256]);
    assert!(bytes.iter().all(|byte| *byte == 0), "negative zeros are a zero row");
    // Below 448 * 2^-24 the scale stays 2^-24 and small values step by 2^-9 of it.
    let (bytes, decoded) = stored(&codec, &[2f32.powi(-30); 256]);
    assert_eq!((bytes[0], half_words(&bytes[256..])[0]), (0x08, 0x0001));
    assert_eq!(decoded[0], 2f32.powi(-30));
    // Above 448 * 65504 the scale stays 65504 and codes saturate.
    let (bytes, decoded) = stored(&codec, &[1e9; 256]);
    assert_eq!(
        (bytes[0], half_words(&bytes[256..])[0], decoded[0]),
        (0x7e, 0x7bff, 448.0 * 65504.0)
    );
    // A negative value that rounds to zero keeps its sign.
    let mut row = [448.0; 256];
    row[1] = -2f32.powi(-11);
    assert_eq!(stored(&codec, &row).0[1], 0x80);
}

#[test]
fn nvfp4_group_zero_of_the_worked_example_picks_target_four() {
    let mut y = t1();
    H256.forward(&mut y, 256);
    let (bytes, decoded) = stored(&nvfp4::SEARCHED, &y);
    assert_eq!((bytes[128], bytes[0] & 15, decoded[0]), (0x2e, 4, 0.875));
    let (single, _) = stored(&nvfp4::SINGLE, &y);
    // Target 6 on the same group: scale 0.3125.
    assert_eq!(single[128], 0x2a);
}

#[test]
fn nvfp4_scales_are_clamped_and_ties_keep_the_earlier_target() {
    // All magnitudes equal: every target is exact up to its scale, target 6 (scale 1) has error 0 and comes first.
    let (bytes, decoded) = stored(&nvfp4::SEARCHED, &[6.0; 256]);
    assert_eq!((bytes[128], bytes[0], decoded[0]), (0x38, 0x77, 6.0));
    let (bytes, decoded) = stored(&nvfp4::SEARCHED, &[1e-6; 256]);
    assert_eq!((bytes[128], bytes[0], decoded[0]), (0x01, 0x00, 0.0));
    let (bytes, decoded) = stored(&nvfp4::SEARCHED, &[-1e-6; 256]);
    assert_eq!((bytes[128], bytes[0]), (0x01, 0x88));
    assert!(decoded[0] == 0.0 && decoded[0].is_sign_negative());
    let (bytes, decoded) = stored(&nvfp4::SEARCHED, &[1e6; 256]);
    assert_eq!((bytes[128], bytes[0], decoded[0]), (0x7e, 0x77, 6.0 * 448.0));
    // A group with an infinity keeps the encoding of target 6; the others are untouched.
    let mut row = [1.0; 256];
    row[3] = f32::INFINITY;
    let (bytes, decoded) = stored(&nvfp4::SEARCHED, &row);
    assert_eq!((bytes[128], bytes[1], decoded[16]), (0x7e, 0x70, 1.0));
}

#[test]
fn zero_rows_of_the_rms_codecs_have_their_own_codes() {
    let (bytes, decoded) = stored(&Lloyd4Row, &[0.0; 256]);
    assert!(bytes[..128].iter().all(|byte| *byte == 0x77) && half_words(&bytes[128..]) == [0]);
    assert!(decoded.iter().all(|value| *value == 0.0));
    let (bytes, _) = stored(&Vq2, &[0.0; 256]);
    assert!(bytes.iter().all(|byte| *byte == 0));
    let (bytes, _) = stored(&rk4v4::Lloyd4, &[0.0; 256]);
    assert!(bytes.iter().all(|byte| *byte == 0));
}

#[test]
fn the_unbiased_scale_keeps_the_projection_of_the_row() {
    for codec in [&Vq2 as &dyn HostCodec, &Lloyd4Row] {
        let mut y = t1();
        H256.forward(&mut y, 256);
        let (_, decoded) = stored(codec, &y);
        let dot = |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
        assert!(
            (dot(&decoded, &y) / dot(&y, &y) - 1.0).abs() <= 2f64.powi(-11),
            "{codec:?}"
        );
    }
}

#[test]
fn vq2_word_zero_of_the_worked_example() {
    let mut y = t1();
    H256.forward(&mut y, 256);
    let (bytes, decoded) = stored(&Vq2, &y);
    // Pattern 196, stored signs 1001100b, eighth sign 1; S = 0.076171875.
    assert_eq!(half_words(&bytes[..2])[0], 196 | 0b100_1100 << 9);
    let levels = [20.0, -1.0, -24.0, -7.0, 8.0, 21.0, -8.0, -13.0];
    assert_eq!(decoded[..8], levels.map(|level: f32| level * 0.076_171_875));
}

#[test]
fn most_negative_integer_codes_decode_though_they_are_never_produced() {
    let decode = |codec: &dyn HostCodec, first: u8, scales: usize| {
        let mut bytes = vec![first; codec.layout(256).bytes() - 2 * scales];
        bytes.extend(std::iter::repeat_n([0x00, 0x3c], scales).flatten());
        decode_rows(codec, &bytes, 1, 256)[0]
    };
    assert_eq!(decode(&int8(PLAIN), 0x80, 4), -128.0);
    assert_eq!(decode(&int4(PLAIN, 32), 0x88, 8), -8.0);
    assert_eq!(
        decode(
            &E8Snap {
                basis: H256,
                bits: 4,
                max: 7.0
            },
            0x88,
            4
        ),
        -8.0
    );
    assert_eq!(decode(&rk4v4::MidRise4, 0x88, 4), -15.0);
    assert_eq!(decode(&rk4v4::MidRise4, 0x77, 4), 15.0);
}

#[test]
fn bf16_keys_are_exact_and_values_lose_only_below_two_to_minus_fourteen() {
    // Every bf16 value of magnitude 2^-14 .. 65504 survives FP16; below, the error is at most 2^-25.
    let values: Vec<f32> = (0..=u16::MAX)
        .map(|word| f32::from_bits(u32::from(word) << 16))
        .collect();
    for block in values.chunks_exact(256) {
        let (_, k) = stored(&bf16::Bf16, block);
        let (_, v) = stored(&bf16::F16, block);
        for ((value, k), v) in block.iter().zip(k).zip(v) {
            assert!(k.to_bits() == value.to_bits() || value.is_nan() && k.is_nan());
            let magnitude = value.abs();
            if (2f32.powi(-14)..=65504.0).contains(&magnitude) {
                assert_eq!(v.to_bits(), value.to_bits());
            } else if magnitude < 2f32.powi(-14) {
                assert!((v - value).abs() <= 2f32.powi(-25) && v.is_sign_negative() == value.is_sign_negative());
            } else if magnitude >= 65520.0 {
                assert!(v.is_infinite() && (v > 0.0) == (*value > 0.0));
            } else {
                assert!(value.is_nan() && v.is_nan() || !value.is_nan());
            }
        }
    }
}
