//! Names of the numeric formats, storage layouts and encoding methods, and which go together.

use super::FormatError;
use std::{fmt, str::FromStr};

/// How numbers are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Format {
    /// bfloat16 words.
    Bf16,
    /// binary32 words.
    Fp32,
    /// Two's complement 32-bit integers.
    Int32,
    /// 4-bit integers, one f16 scale per 64 columns.
    Q4G64Fp16,
    /// 5-bit integers, one f16 scale per 64 columns.
    Q5G64Fp16,
    /// 6-bit integers, one f16 scale per 64 columns.
    Q6G64Fp16,
    /// 8-bit integers, one f16 scale per 32 columns.
    Q8G32Fp16,
    /// E2M1, one E4M3FN scale per 16 columns, one f32 divisor per matrix.
    Nvfp4,
    /// E4M3FN, one bf16 scale per row.
    Fp8E4m3fnRowBf16,
    /// E2M1, one E4M3FN scale per 16 columns, one f32 multiplier per matrix.
    Nvfp4Mul,
    /// E4M3FN, one f32 scale per 128x128 tile.
    Fp8E4m3fnBlock128F32,
}

impl Format {
    /// All formats.
    pub const ALL: [Format; 11] = [
        Self::Bf16,
        Self::Fp32,
        Self::Int32,
        Self::Q4G64Fp16,
        Self::Q5G64Fp16,
        Self::Q6G64Fp16,
        Self::Q8G32Fp16,
        Self::Nvfp4,
        Self::Fp8E4m3fnRowBf16,
        Self::Nvfp4Mul,
        Self::Fp8E4m3fnBlock128F32,
    ];

    /// Name in the directory of an artifact.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp32 => "fp32",
            Self::Int32 => "int32",
            Self::Q4G64Fp16 => "q4_g64_fp16",
            Self::Q5G64Fp16 => "q5_g64_fp16",
            Self::Q6G64Fp16 => "q6_g64_fp16",
            Self::Q8G32Fp16 => "q8_g32_fp16",
            Self::Nvfp4 => "nvfp4",
            Self::Fp8E4m3fnRowBf16 => "fp8_e4m3fn_row_bf16",
            Self::Nvfp4Mul => "nvfp4_mul",
            Self::Fp8E4m3fnBlock128F32 => "fp8_e4m3fn_block128_f32",
        }
    }

    /// The only layout that holds this format.
    pub const fn layout(self) -> Layout {
        match self {
            Self::Bf16 | Self::Fp32 | Self::Int32 => Layout::ContiguousLeV1,
            Self::Q4G64Fp16 | Self::Q5G64Fp16 | Self::Q6G64Fp16 | Self::Q8G32Fp16 => Layout::RowSplitK128V1,
            Self::Nvfp4 => Layout::BlockScaleK16M128x4V1,
            Self::Fp8E4m3fnRowBf16 => Layout::RowScaleV1,
            Self::Nvfp4Mul => Layout::Nvfp4ExpertRg16V1,
            Self::Fp8E4m3fnBlock128F32 => Layout::Block128ScaleV1,
        }
    }
}

/// Where encoded words lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layout {
    /// Code plane, high-bit plane and scale plane, rows padded to 128 columns.
    RowSplitK128V1,
    /// Little-endian words in C order.
    ContiguousLeV1,
    /// Code plane, swizzled scale plane, divisors.
    BlockScaleK16M128x4V1,
    /// Code plane, one scale per row.
    RowScaleV1,
    /// One record of 16-row units per expert, then the multipliers.
    Nvfp4ExpertRg16V1,
    /// Code plane, one scale per 128x128 tile.
    Block128ScaleV1,
}

impl Layout {
    /// All layouts.
    pub const ALL: [Layout; 6] = [
        Self::RowSplitK128V1,
        Self::ContiguousLeV1,
        Self::BlockScaleK16M128x4V1,
        Self::RowScaleV1,
        Self::Nvfp4ExpertRg16V1,
        Self::Block128ScaleV1,
    ];

    /// Name in the directory of an artifact.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RowSplitK128V1 => "row_split_k128_v1",
            Self::ContiguousLeV1 => "contiguous_le_v1",
            Self::BlockScaleK16M128x4V1 => "block_scale_k16_m128x4_v1",
            Self::RowScaleV1 => "row_scale_v1",
            Self::Nvfp4ExpertRg16V1 => "nvfp4_expert_rg16_v1",
            Self::Block128ScaleV1 => "block128_scale_v1",
        }
    }

    /// What the logical payload offset of an object in this layout must be a multiple of, in bytes.
    pub const fn alignment(self) -> u64 {
        match self {
            Self::Nvfp4ExpertRg16V1 => 4096,
            _ => 256,
        }
    }
}

/// How float values become words of a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EncodeMethod {
    /// Each value rounded to bf16, fp32 or int32.
    CastDirect,
    /// Grouped integers with the group's largest magnitude on the largest code.
    GroupedAbsmax,
    /// Grouped integers with the scale of least squared error among a fixed list.
    GroupedMse,
    /// nvfp4 with the matrix's largest magnitude on the largest code and scale.
    Nvfp4Absmax,
    /// nvfp4 with the block scale of least squared error.
    Nvfp4Mse,
    /// fp8 rows with the row's largest magnitude on 448.
    Fp8RowMaxabs,
}

impl EncodeMethod {
    /// All methods.
    pub const ALL: [EncodeMethod; 6] = [
        Self::CastDirect,
        Self::GroupedAbsmax,
        Self::GroupedMse,
        Self::Nvfp4Absmax,
        Self::Nvfp4Mse,
        Self::Fp8RowMaxabs,
    ];

    /// Name used in recipes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CastDirect => "cast_direct",
            Self::GroupedAbsmax => "grouped_absmax",
            Self::GroupedMse => "grouped_mse",
            Self::Nvfp4Absmax => "nvfp4_absmax",
            Self::Nvfp4Mse => "nvfp4_mse",
            Self::Fp8RowMaxabs => "fp8_row_maxabs",
        }
    }

    /// Whether this method produces `format`.
    pub const fn encodes(self, format: Format) -> bool {
        match self {
            Self::CastDirect => matches!(format.layout(), Layout::ContiguousLeV1),
            Self::GroupedAbsmax | Self::GroupedMse => matches!(format.layout(), Layout::RowSplitK128V1),
            Self::Nvfp4Absmax | Self::Nvfp4Mse => matches!(format, Format::Nvfp4),
            Self::Fp8RowMaxabs => matches!(format, Format::Fp8E4m3fnRowBf16),
        }
    }
}

macro_rules! names {
    ($type:ty, $unknown:ident) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $type {
            type Err = FormatError;

            fn from_str(name: &str) -> Result<Self, FormatError> {
                Self::ALL
                    .into_iter()
                    .find(|item| item.name() == name)
                    .ok_or_else(|| FormatError::$unknown {
                        name: name.to_owned(),
                    })
            }
        }
    };
}

names!(Format, UnknownFormat);
names!(Layout, UnknownLayout);
names!(EncodeMethod, UnknownMethod);
