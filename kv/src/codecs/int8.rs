//! `int8`, and the symmetric absmax integer coder that the INT4 formats share with it.
//!
//! ```text
//! per group of G consecutive values:  s = FP16_rne(max|y| / M)          stored
//!                                     code_i = clamp(rne(y_i * (1/s)), -M, M)
//! decode                              y_i = code_i * s
//! ```
//!
//! `int8`: G = 64, M = 127; K in the Hadamard-256 basis, V as projected. `int8@plain` leaves K unrotated, as older
//! engines did. The scale is rounded before codes are formed, so |error| <= s/2 wherever the FP16 scale is normal; a
//! group whose scale underflows FP16 becomes zero.

use crate::arith::{absmax, code_factor, f16_scale, rne};
use crate::basis::Basis;
use crate::codec::{CodecSpec, HostCodec, TensorCodec};
use crate::layout::{Layout, Plane};
use crate::registry::{Side, Variant};
use crate::tensor_ops::{self, code_factor as tensor_code_factor, decode_f16, encode_f16, split_entries};
use burn::tensor::{Int, Tensor, backend::Backend};
use perplexity_kernels::backend::RowFormat;
use perplexity_kernels::numeric::f16_to_f32;

/// The variants of this file.
pub const VARIANTS: &[Variant] = &[
    Variant {
        name: "int8",
        recorded: "int8-g64",
        k: Side::Absmax(int8(Basis::Hadamard256)),
        v: Side::Absmax(IN_PLACE),
    },
    Variant {
        name: "int8@plain",
        recorded: "int8-g64@plain",
        k: Side::Absmax(IN_PLACE),
        v: Side::Absmax(IN_PLACE),
    },
];

/// INT8 rows as projected: V of `int8`, and the exact copies of windowed codecs.
pub const IN_PLACE: Absmax = int8(Basis::Identity);

/// 8-bit codes, groups of 64.
pub const fn int8(basis: Basis) -> Absmax {
    Absmax {
        basis,
        group: 64,
        bits: 8,
        max: 127,
    }
}

/// 4-bit codes in [-7, 7].
pub const fn int4(basis: Basis, group: usize) -> Absmax {
    Absmax {
        basis,
        group,
        bits: 4,
        max: 7,
    }
}

/// Symmetric integers with an FP16 scale per group, from the group's largest magnitude.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Absmax {
    /// Basis of the stored rows.
    pub basis: Basis,
    /// Consecutive values that share a scale.
    pub group: usize,
    /// Bits of a code, two's complement.
    pub bits: u32,
    /// Largest code produced; the scale is `max|y| / max`.
    pub max: i16,
}

impl Absmax {
    /// The two's-complement value of an entry, the unproduced most negative one included.
    #[inline]
    fn code(&self, entry: u16) -> f32 {
        let unused = 16 - self.bits;
        f32::from((entry << unused) as i16 >> unused)
    }
}

impl CodecSpec for Absmax {
    fn basis(&self) -> Basis {
        self.basis
    }
    fn row_format(&self) -> Option<RowFormat> {
        let &Self { group, bits, max, .. } = self;
        let known = matches!(group, 32 | 64) && matches!((bits, max), (8, 127) | (4, 7));
        known.then_some(RowFormat::Absmax { group, bits })
    }
    fn layout(&self, head_dim: usize) -> Layout {
        Layout(vec![
            Plane::new("codes", head_dim, self.bits),
            Plane::new("scales", head_dim / self.group, 16),
        ])
    }
}

impl HostCodec for Absmax {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        let (codes, scales) = entries.split_at_mut(rows.len());
        let (max, mask) = (f32::from(self.max), (1u32 << self.bits) - 1);
        for ((y, codes), word) in rows
            .chunks_exact(self.group)
            .zip(codes.chunks_exact_mut(self.group))
            .zip(scales)
        {
            let (stored, scale) = f16_scale(absmax(y) / max);
            *word = stored;
            let factor = code_factor(scale);
            if factor == 0.0 {
                codes.fill(0);
                continue;
            }
            for (code, value) in codes.iter_mut().zip(y) {
                *code = (rne(value * factor).clamp(-max, max) as i32 as u32 & mask) as u16;
            }
        }
    }

    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        let (codes, scales) = entries.split_at(rows.len());
        for ((y, codes), word) in rows
            .chunks_exact_mut(self.group)
            .zip(codes.chunks_exact(self.group))
            .zip(scales)
        {
            let scale = f16_to_f32(*word);
            y.iter_mut()
                .zip(codes)
                .for_each(|(value, code)| *value = self.code(*code) * scale);
        }
    }
}

impl<B: Backend> TensorCodec<B> for Absmax {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let [tokens, heads, dim] = rows.dims();
        let max = f32::from(self.max);
        let groups = rows.reshape([tokens, heads, dim / self.group, self.group]);
        let scales = encode_f16(tensor_ops::absmax(groups.clone()) / max);
        let factor = tensor_code_factor(decode_f16(scales.clone())).unsqueeze_dim(3);
        let codes = tensor_ops::scaled(groups, factor);
        let codes = tensor_ops::rne(codes)
            .clamp(-max, max)
            .int()
            .remainder_scalar(1 << self.bits);
        Tensor::cat(
            vec![
                codes.reshape([tokens, heads, dim]),
                scales.reshape([tokens, heads, dim / self.group]),
            ],
            2,
        )
    }

    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let [tokens, heads, count] = entries.dims();
        let dim = count * self.group / (self.group + 1);
        let [codes, scales] = split_entries(entries, [dim, dim / self.group]);
        let half = 1 << (self.bits - 1);
        let codes = (codes + half).remainder_scalar(2 * half) - half;
        let groups = codes.float().reshape([tokens, heads, dim / self.group, self.group]);
        (groups * decode_f16(scales).unsqueeze_dim(3)).reshape([tokens, heads, dim])
    }
}
