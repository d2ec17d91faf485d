//! Rows of keys or values in codes, packed into words, the transform of their basis included:
//!
//! ```text
//! y = H_block x                                                              block 1: y = x
//! Absmax  per group:      s = FP16(max|y| / M)                               code_i = clamp(rne(y_i (1/s)), -M, M)
//! Fp8     per row:        s = FP16(clamp(max|y| / 448, 2^-24, 65504))        code_i = E4M3(y_i (1/s))
//! Nvfp4   per 16 values:  s = E4M3(clamp(max|y| f32(1/t), 2^-9, 448))        code_i = E2M1(y_i (1/s))
//!                         of the targets t the first whose sum of (y_i - code_i s)^2 is the smallest
//! decoded code_i * s
//! ```
//!
//! The codecs of `perplexity_kv` define these formats, zeros and values that are no numbers included; the kernels equal their
//! host form bit for bit wherever the device divides with correct rounding and keeps subnormal values. A row's words are
//! the bytes of the codec's planes there: codes, then scales, least significant bits first, filled up to whole words.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;

use crate::precision::Precision;

/// Values of a row: the formats are defined for this head size.
pub const ROW: usize = 256;

/// What the largest magnitude of an NVFP4 group is aimed at, in the order tried.
pub const NVFP4_TARGETS: [f32; 5] = [6.0, 4.0, 4.5, 5.0, 5.5];

/// How a row is coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowCoding {
    /// Features per block of the Hadamard transform before; 1 for none.
    pub block: usize,
    /// Codes and scales.
    pub format: RowFormat,
}

/// Codes and scales of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowFormat {
    /// Two's-complement codes up to `M = 2^(bits - 1) - 1`, an FP16 scale per group.
    Absmax {
        /// Consecutive values that share a scale, 32 or 64.
        group: usize,
        /// Bits of a code, 4 or 8.
        bits: u32,
    },
    /// E4M3 codes, one FP16 scale.
    Fp8,
    /// E2M1 codes, an E4M3 scale per 16 values.
    Nvfp4 {
        /// How many of [`NVFP4_TARGETS`] are tried.
        targets: usize,
    },
}

/// Keys and values in codes, as attention reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CodedSides {
    /// Format of the keys.
    pub keys: RowFormat,
    /// Format of the values.
    pub values: RowFormat,
    /// What decoded values are rounded to.
    pub precision: Precision,
}

impl RowFormat {
    /// Bits of a code.
    pub(crate) const fn code_bits(self) -> u32 {
        match self {
            Self::Absmax { bits, .. } => bits,
            Self::Fp8 => 8,
            Self::Nvfp4 { .. } => 4,
        }
    }

    /// Values that share a scale, and the bits of a scale.
    pub(crate) const fn scales(self) -> (usize, u32) {
        match self {
            Self::Absmax { group, .. } => (group, 16),
            Self::Fp8 => (ROW, 16),
            Self::Nvfp4 { .. } => (16, 8),
        }
    }

    /// 32-bit words of the codes of a row.
    pub(crate) const fn code_words(self) -> usize {
        ROW * self.code_bits() as usize / 32
    }

    /// 32-bit words of a row.
    pub const fn words(self) -> usize {
        let (group, bits) = self.scales();
        self.code_words() + (ROW / group * bits as usize).div_ceil(32)
    }
}
