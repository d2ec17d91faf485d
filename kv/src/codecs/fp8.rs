//! `fp8`: E4M3FN codes with one FP16 scale per row.
//!
//! ```text
//! a = max|y|,  a = 0: scale +0, codes 0
//! else s = FP16_rne(clamp(a / 448, 2^-24, 65504)),  code_i = E4M3_rne_sat(y_i * (1/s))
//! decode: E4M3(code_i) * s
//! ```
//!
//! K in the Hadamard-256 basis, V as projected. E4M3 carries its own exponent, so the rotation does not help its RMS
//! error; the format rotates K all the same.

use crate::arith::{absmax, f16_scale};
use crate::basis::Basis;
use crate::codec::{CodecSpec, HostCodec, TensorCodec};
use crate::layout::{Layout, Plane};
use crate::registry::{Side, Variant};
use crate::tensor_ops::{self, decode_e4m3, decode_f16, encode_e4m3, encode_f16, split_entries};
use burn::tensor::{Int, Tensor, backend::Backend};
use perplexity_kernels::backend::RowFormat;
use perplexity_kernels::numeric::{E4M3FN_MAX, E4M3FN_NAN_WORD, e4m3fn_to_f32, f16_to_f32, f32_to_e4m3fn};

/// The variants of this file.
pub const VARIANTS: &[Variant] = &[Variant {
    name: "fp8",
    recorded: "fp8-e4m3-r256",
    k: Side::Fp8(Fp8 {
        basis: Basis::Hadamard256,
    }),
    v: Side::Fp8(Fp8 { basis: Basis::Identity }),
}];

/// Smallest and largest row scale: the FP16 subnormal unit and the largest finite FP16 value.
const SCALE_RANGE: (f32, f32) = (1.0 / 16_777_216.0, 65504.0);

/// E4M3FN codes, one FP16 scale per row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8 {
    /// Basis of the stored rows.
    pub basis: Basis,
}

impl CodecSpec for Fp8 {
    fn basis(&self) -> Basis {
        self.basis
    }
    fn row_format(&self) -> Option<RowFormat> {
        Some(RowFormat::Fp8)
    }
    fn layout(&self, head_dim: usize) -> Layout {
        Layout(vec![Plane::new("codes", head_dim, 8), Plane::new("scale", 1, 16)])
    }
}

impl HostCodec for Fp8 {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        let (codes, word) = entries.split_at_mut(rows.len());
        let largest = absmax(rows);
        if largest == 0.0 {
            codes.fill(0);
            word[0] = 0;
            return;
        }
        let (stored, scale) = f16_scale((largest / E4M3FN_MAX).clamp(SCALE_RANGE.0, SCALE_RANGE.1));
        word[0] = stored;
        let factor = 1.0 / scale;
        for (code, value) in codes.iter_mut().zip(rows) {
            let value = value * factor;
            *code = u16::from(if value.is_nan() {
                E4M3FN_NAN_WORD
            } else {
                f32_to_e4m3fn(value)
            });
        }
    }

    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        let (codes, word) = entries.split_at(rows.len());
        let scale = f16_to_f32(word[0]);
        rows.iter_mut()
            .zip(codes)
            .for_each(|(value, code)| *value = e4m3fn_to_f32(*code as u8) * scale);
    }
}

impl<B: Backend> TensorCodec<B> for Fp8 {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let [tokens, heads, dim] = rows.dims();
        let largest = tensor_ops::absmax(rows.clone().reshape([tokens, heads, 1, dim]));
        let zero = largest.clone().equal_elem(0.0);
        let scale = tensor_ops::clamp(largest / E4M3FN_MAX, SCALE_RANGE.0, SCALE_RANGE.1);
        let word = encode_f16(scale);
        let factor = tensor_ops::reciprocal(decode_f16(word.clone()));
        let codes = encode_e4m3(rows * factor).mask_fill(zero.clone().expand([tokens, heads, dim]), 0);
        Tensor::cat(vec![codes, word.mask_fill(zero, 0)], 2)
    }

    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let dim = entries.dims()[2] - 1;
        let [codes, word] = split_entries(entries, [dim, 1]);
        decode_e4m3(codes) * decode_f16(word)
    }
}
