//! `nvfp4`: E2M1 codes with an E4M3 scale per 16 values, no second-level scale.
//!
//! ```text
//! per group of 16, a = max|v|,  a = 0: scale byte 0, codes 0
//! for t in targets:  raw = a * f32(1/t)
//!                    s = E4M3_rne_sat(clamp(raw, 2^-9, 448)),  c_i = E2M1_rne_sat(v_i * f32(1/s))
//!                    err = sum over i in order of (v_i - c_i s)^2
//! keep the first t with the smallest err                decode: c_i * s
//! ```
//!
//! Targets 6, 4, 4.5, 5, 5.5 in this order; `nvfp4@single` tries 6 only, as older engines did. K and V in the
//! Hadamard-256 basis. A non-finite group has no finite error and so keeps target 6.

use crate::arith::absmax;
use crate::basis::Basis;
use crate::codec::{CodecSpec, HostCodec, TensorCodec};
use crate::layout::{Layout, Plane};
use crate::registry::{Side, Variant};
use crate::tensor_ops::{self, decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3, split_entries};
use burn::tensor::{Int, Tensor, backend::Backend};
use perplexity_kernels::backend::RowFormat;
use perplexity_kernels::numeric::{
    E4M3FN_MAX, E4M3FN_NAN_WORD, e2m1_to_f32, e4m3fn_to_f32, f32_to_e2m1, f32_to_e4m3fn,
};
use perplexity_kernels::ops::coded_rows::NVFP4_TARGETS;

/// Values that share a scale.
const GROUP: usize = 16;
/// The smallest E4M3 value above zero, 2^-9.
const SMALLEST_SCALE: f32 = 1.0 / 512.0;

/// Five-target search, in the Hadamard-256 basis.
pub const SEARCHED: Nvfp4 = Nvfp4 {
    targets: &NVFP4_TARGETS,
};
/// Target 6 only, in the Hadamard-256 basis.
pub const SINGLE: Nvfp4 = Nvfp4 {
    targets: NVFP4_TARGETS.split_at(1).0,
};

/// The variants of this file.
pub const VARIANTS: &[Variant] = &[
    Variant {
        name: "nvfp4",
        recorded: "nvfp4",
        k: Side::Nvfp4(SEARCHED),
        v: Side::Nvfp4(SEARCHED),
    },
    Variant {
        name: "nvfp4@single",
        recorded: "nvfp4@single",
        k: Side::Nvfp4(SINGLE),
        v: Side::Nvfp4(SINGLE),
    },
];

/// E2M1 codes, an E4M3 scale per 16 values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Nvfp4 {
    /// Magnitudes that the group's largest value is aimed at, in the order tried.
    pub targets: &'static [f32],
}

impl CodecSpec for Nvfp4 {
    fn basis(&self) -> Basis {
        Basis::Hadamard256
    }
    fn row_format(&self) -> Option<RowFormat> {
        let targets = self.targets.len();
        NVFP4_TARGETS
            .starts_with(self.targets)
            .then_some(RowFormat::Nvfp4 { targets })
    }
    fn layout(&self, head_dim: usize) -> Layout {
        Layout(vec![
            Plane::new("codes", head_dim, 4),
            Plane::new("scales", head_dim / GROUP, 8),
        ])
    }
}

/// One group with its largest magnitude aimed at `1/reciprocal`: scale byte, codes, squared error.
#[inline]
fn encode_group(v: &[f32], largest: f32, reciprocal: f32) -> (u8, [u8; GROUP], f32) {
    let raw = (largest * reciprocal).clamp(SMALLEST_SCALE, E4M3FN_MAX);
    let byte = if raw.is_nan() {
        E4M3FN_NAN_WORD
    } else {
        f32_to_e4m3fn(raw)
    };
    let scale = e4m3fn_to_f32(byte);
    let factor = 1.0 / scale;
    let (mut codes, mut error) = ([0; GROUP], 0.0);
    for (code, value) in codes.iter_mut().zip(v) {
        let scaled = value * factor;
        // A NaN has no code; its group's scale is NaN already.
        *code = if scaled.is_nan() { 0 } else { f32_to_e2m1(scaled) };
        let difference = value - e2m1_to_f32(*code) * scale;
        error += difference * difference;
    }
    (byte, codes, error)
}

impl HostCodec for Nvfp4 {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        let (codes, scales) = entries.split_at_mut(rows.len());
        for ((v, out), scale) in rows.chunks_exact(GROUP).zip(codes.chunks_exact_mut(GROUP)).zip(scales) {
            let largest = absmax(v);
            if largest == 0.0 {
                out.fill(0);
                *scale = 0;
                continue;
            }
            let mut best = encode_group(v, largest, 1.0 / self.targets[0]);
            for target in &self.targets[1..] {
                let candidate = encode_group(v, largest, 1.0 / target);
                if candidate.2 < best.2 {
                    best = candidate;
                }
            }
            *scale = u16::from(best.0);
            out.iter_mut()
                .zip(best.1)
                .for_each(|(entry, code)| *entry = u16::from(code));
        }
    }

    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        let (codes, scales) = entries.split_at(rows.len());
        for ((v, codes), byte) in rows.chunks_exact_mut(GROUP).zip(codes.chunks_exact(GROUP)).zip(scales) {
            let scale = e4m3fn_to_f32(*byte as u8);
            v.iter_mut()
                .zip(codes)
                .for_each(|(value, code)| *value = e2m1_to_f32(*code as u8) * scale);
        }
    }
}

/// Scale bytes, codes and squared errors of all groups for one target.
type Candidate<B> = (Tensor<B, 3, Int>, Tensor<B, 4, Int>, Tensor<B, 3>);

impl<B: Backend> TensorCodec<B> for Nvfp4 {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let [tokens, heads, dim] = rows.dims();
        let v = rows.reshape([tokens, heads, dim / GROUP, GROUP]);
        let largest = tensor_ops::absmax(v.clone());
        let mut best: Option<Candidate<B>> = None;
        for target in self.targets {
            let raw = tensor_ops::clamp(largest.clone() * (1.0 / target), SMALLEST_SCALE, E4M3FN_MAX);
            let byte = encode_e4m3(raw);
            let scale: Tensor<B, 4> = decode_e4m3(byte.clone()).unsqueeze_dim(3);
            let codes = encode_e2m1(v.clone() * tensor_ops::reciprocal(scale.clone()));
            let difference = v.clone() - decode_e2m1(codes.clone()) * scale;
            let error = tensor_ops::sum_in_order(difference.clone() * difference);
            best = Some(match best {
                None => (byte, codes, error),
                Some((best_byte, best_codes, best_error)) => {
                    let better = error.clone().lower(best_error.clone());
                    let better_codes = better.clone().unsqueeze_dim::<4>(3).expand(codes.dims());
                    (
                        best_byte.mask_where(better.clone(), byte),
                        best_codes.mask_where(better_codes, codes),
                        best_error.mask_where(better, error),
                    )
                }
            });
        }
        let (scales, codes, _) = best.expect("at least one target");
        let zero = largest.equal_elem(0.0);
        let codes = codes.mask_fill(zero.clone().unsqueeze_dim::<4>(3).expand(v.dims()), 0);
        Tensor::cat(vec![codes.reshape([tokens, heads, dim]), scales.mask_fill(zero, 0)], 2)
    }

    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let [tokens, heads, count] = entries.dims();
        let dim = count * GROUP / (GROUP + 1);
        let [codes, scales] = split_entries(entries, [dim, dim / GROUP]);
        let values = decode_e2m1(codes).reshape([tokens, heads, dim / GROUP, GROUP]);
        (values * decode_e4m3(scales).unsqueeze_dim(3)).reshape([tokens, heads, dim])
    }
}
