//! `turbo4`, `turbo3`, `turbo2`: a random rotation, then one scalar quantiser for every coordinate.
//!
//! References: A. Zandieh et al., "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate", 2025
//! (arXiv:2504.19874); S. Ashkboos et al., "QuaRot", NeurIPS 2024 (arXiv:2404.00456). After a random rotation the
//! coordinates of any row are close to Gaussian, so a Lloyd-Max quantiser of N(0, 1) serves all of them with one scale:
//!
//! ```text
//! y = H_256 (s * x), s random signs       S = FP16(sqrt(|y|^2 / 256))       code = number of thresholds <= y / S
//! decode: S * level[code]
//! ```
//!
//! The rotation here is the Hadamard transform with random signs, as in QuaRot; the mean-squared-error form of TurboQuant
//! without its one-bit sketch of the residual.

use crate::arith::{f16_scale, sum_of_squares};
use crate::basis::Basis;
use crate::codec::{CodecSpec, HEAD_DIM, HostCodec, TensorCodec};
use crate::layout::{Layout, Plane};
use crate::registry::{Side, Variant};
use crate::tensor_ops::{self, code_factor, count_at_least, decode_f16, encode_f16, lookup, split_entries};
use burn::tensor::{Int, Tensor, backend::Backend};
use perplexity_kernels::numeric::f16_to_f32;

/// The variants of this file.
pub const VARIANTS: &[Variant] = &[
    Variant {
        name: "turbo4",
        recorded: "turbo4",
        k: Side::Turbo(TURBO4),
        v: Side::Turbo(TURBO4),
    },
    Variant {
        name: "turbo3",
        recorded: "turbo3",
        k: Side::Turbo(TURBO3),
        v: Side::Turbo(TURBO3),
    },
    Variant {
        name: "turbo2",
        recorded: "turbo2",
        k: Side::Turbo(TURBO2),
        v: Side::Turbo(TURBO2),
    },
];

/// Seed of the sign vector; any value does.
const SEED: u64 = 0x7475_7262_6F00_0001;

/// Four bits per coordinate.
pub const TURBO4: Turbo = Turbo {
    bits: 4,
    thresholds: &[
        -2.4008, -1.8435, -1.4371, -1.0993, -0.7996, -0.5224, -0.2582, 0.0, 0.2582, 0.5224, 0.7996, 1.0993, 1.4371,
        1.8435, 2.4008,
    ],
    levels: &[
        -2.7326, -2.0690, -1.6181, -1.2562, -0.9424, -0.6568, -0.3881, -0.1284, 0.1284, 0.3881, 0.6568, 0.9424, 1.2562,
        1.6181, 2.0690, 2.7326,
    ],
};
/// Three bits per coordinate.
pub const TURBO3: Turbo = Turbo {
    bits: 3,
    thresholds: &[-1.7480, -1.0500, -0.5006, 0.0, 0.5006, 1.0500, 1.7480],
    levels: &[-2.1520, -1.3439, -0.7560, -0.2451, 0.2451, 0.7560, 1.3439, 2.1520],
};
/// Two bits per coordinate.
pub const TURBO2: Turbo = Turbo {
    bits: 2,
    thresholds: &[-0.9816, 0.0, 0.9816],
    levels: &[-1.5104, -0.4528, 0.4528, 1.5104],
};

/// A scalar quantiser of unit-variance coordinates (Max, 1960) in a random basis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Turbo {
    /// Bits of a code.
    pub bits: u32,
    /// Decision thresholds, ascending.
    pub thresholds: &'static [f32],
    /// Reconstruction levels.
    pub levels: &'static [f32],
}

impl CodecSpec for Turbo {
    fn basis(&self) -> Basis {
        Basis::SignedHadamard { seed: SEED }
    }
    fn layout(&self, head_dim: usize) -> Layout {
        Layout(vec![
            Plane::new("codes", head_dim, self.bits),
            Plane::new("scale", 1, 16),
        ])
    }
}

impl HostCodec for Turbo {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        let (codes, word) = entries.split_at_mut(HEAD_DIM);
        let energy = sum_of_squares(rows);
        // An energy beyond float32 is treated like a NaN: the row must not come back as plausible numbers.
        let rms = if energy.is_finite() {
            (energy / HEAD_DIM as f32).sqrt()
        } else {
            f32::NAN
        };
        let (stored, scale) = f16_scale(rms);
        word[0] = stored;
        let factor = crate::arith::code_factor(scale);
        for (code, y) in codes.iter_mut().zip(rows) {
            let unit = if factor == 0.0 { 0.0 } else { y * factor };
            *code = self
                .thresholds
                .iter()
                .map(|threshold| u16::from(*threshold <= unit))
                .sum();
        }
    }

    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        let (codes, word) = entries.split_at(HEAD_DIM);
        let scale = f16_to_f32(word[0]);
        rows.iter_mut()
            .zip(codes)
            .for_each(|(value, code)| *value = scale * self.levels[usize::from(*code)]);
    }
}

impl<B: Backend> TensorCodec<B> for Turbo {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let [tokens, heads, dim] = rows.dims();
        let energy = tensor_ops::sum_of_squares(rows.clone().reshape([tokens * heads, dim]));
        let finite = energy.clone().is_finite();
        let rms = (energy / HEAD_DIM as f32).sqrt().mask_fill(finite.bool_not(), f32::NAN);
        let word = encode_f16(rms.reshape([tokens, heads, 1]));
        let unit = tensor_ops::scaled(rows, code_factor(decode_f16(word.clone())));
        Tensor::cat(vec![count_at_least(unit, self.thresholds), word], 2)
    }

    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let [codes, word] = split_entries(entries, [HEAD_DIM, 1]);
        lookup(codes, self.levels) * decode_f16(word)
    }
}
