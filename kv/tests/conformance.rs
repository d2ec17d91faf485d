//! The conformance tests on every coder of the built-in codecs.

use perplexity_kv::basis::Basis;
use perplexity_kv::codec_conformance;
use perplexity_kv::codecs::int8::{int4, int8};
use perplexity_kv::codecs::{
    bf16, fp8::Fp8, k4v2, kivi::KiviK, kivi::KiviV, nvfp4, rk2v4_e8::E8Root, rk4v4, rk4v4_e8::E8Snap, turbo, vq2,
};

const H256: Basis = Basis::Hadamard256;
const H64: Basis = Basis::Hadamard64;
const PLAIN: Basis = Basis::Identity;

codec_conformance!(bf16_word, bf16::Bf16, bits = 16.0, error = 0.0);
codec_conformance!(f16_word, bf16::F16, bits = 16.0, error = 1e-6);
codec_conformance!(int8_rotated, int8(H256), bits = 8.25, error = 0.0062);
codec_conformance!(int8_rotated_by_blocks, int8(H64), bits = 8.25, error = 0.0062);
codec_conformance!(int8_plain, int8(PLAIN), bits = 8.25, error = 0.0062);
codec_conformance!(int4_groups_of_32, int4(PLAIN, 32), bits = 4.5, error = 0.100);
codec_conformance!(int4_groups_of_64, int4(H64, 64), bits = 4.25, error = 0.111);
codec_conformance!(fp8_rotated, Fp8 { basis: H256 }, bits = 8.0625, error = 0.0269);
codec_conformance!(fp8_plain, Fp8 { basis: PLAIN }, bits = 8.0625, error = 0.0269);
codec_conformance!(nvfp4_searched, nvfp4::SEARCHED, bits = 4.5, error = 0.0875);
codec_conformance!(nvfp4_single, nvfp4::SINGLE, bits = 4.5, error = 0.0985);
codec_conformance!(vq2_words, vq2::Vq2, bits = 2.0625, error = 0.32);
codec_conformance!(lloyd4_row, k4v2::Lloyd4Row, bits = 4.0625, error = 0.102);
codec_conformance!(lloyd4_groups, rk4v4::Lloyd4, bits = 4.25, error = 0.098);
codec_conformance!(midrise4, rk4v4::MidRise4, bits = 4.25, error = 0.104);
codec_conformance!(
    e8_snapped_to_4_bits,
    E8Snap {
        basis: H256,
        bits: 4,
        max: 7.0
    },
    bits = 4.25,
    error = 0.169
);
codec_conformance!(
    e8_snapped_to_6_bits,
    E8Snap {
        basis: H256,
        bits: 6,
        max: 31.0
    },
    bits = 6.25,
    error = 0.0386
);
codec_conformance!(e8_roots, E8Root { basis: H256 }, bits = 2.25, error = 0.485);
codec_conformance!(e8_roots_by_blocks, E8Root { basis: H64 }, bits = 2.25, error = 0.485);
codec_conformance!(kivi_keys_4, KiviK { bits: 4 }, bits = 5.0, error = 0.1);
codec_conformance!(kivi_keys_2, KiviK { bits: 2 }, bits = 3.0, error = 0.45);
codec_conformance!(kivi_values_4, KiviV { bits: 4 }, bits = 5.0, error = 0.1);
codec_conformance!(kivi_values_2, KiviV { bits: 2 }, bits = 3.0, error = 0.45);
// Published distortion of the scalar quantisers on Gaussian coordinates: 0.0975, 0.186 and 0.342.
codec_conformance!(turbo_4, turbo::TURBO4, bits = 4.0625, error = 0.0990);
codec_conformance!(turbo_3, turbo::TURBO3, bits = 3.0625, error = 0.188);
codec_conformance!(turbo_2, turbo::TURBO2, bits = 2.0625, error = 0.345);

#[test]
#[should_panic(expected = "a NaN became a number")]
fn a_codec_that_swallows_nan_fails_conformance() {
    perplexity_kv::conformance::non_finite_rows(&Swallows, 256);
}

#[test]
#[should_panic(expected = "depends on others")]
fn a_codec_with_shared_state_fails_conformance() {
    let rows = perplexity_kv::conformance::gaussian(1, 2 * 3 * 256);
    perplexity_kv::conformance::independence(&Counts(std::sync::atomic::AtomicU16::new(0)), &rows, 256);
}

/// A wrong codec: NaN is stored as zero.
#[derive(Debug)]
struct Swallows;

/// A wrong codec: entries number the calls.
#[derive(Debug)]
struct Counts(std::sync::atomic::AtomicU16);

mod wrong {
    use super::{Counts, Swallows};
    use perplexity_kv::codec::{CodecSpec, HostCodec};
    use perplexity_kv::layout::{Layout, Plane};

    impl CodecSpec for Swallows {
        fn layout(&self, head_dim: usize) -> Layout {
            Layout(vec![Plane::new("values", head_dim, 16)])
        }
    }
    impl HostCodec for Swallows {
        fn encode(&self, rows: &[f32], entries: &mut [u16]) {
            let word = |value: &f32| {
                if value.is_nan() {
                    0
                } else {
                    (value.to_bits() >> 16) as u16
                }
            };
            entries
                .iter_mut()
                .zip(rows)
                .for_each(|(entry, value)| *entry = word(value));
        }
        fn decode(&self, entries: &[u16], rows: &mut [f32]) {
            rows.iter_mut()
                .zip(entries)
                .for_each(|(value, word)| *value = f32::from_bits(u32::from(*word) << 16));
        }
    }
    impl CodecSpec for Counts {
        fn layout(&self, head_dim: usize) -> Layout {
            Layout(vec![Plane::new("values", head_dim, 16)])
        }
    }
    impl HostCodec for Counts {
        fn encode(&self, _rows: &[f32], entries: &mut [u16]) {
            entries.fill(self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        }
        fn decode(&self, _entries: &[u16], rows: &mut [f32]) {
            rows.fill(0.0);
        }
    }
}
