//! `k8v4`: K exactly as `fp8` stores it, V exactly as `nvfp4` stores it. A fixed pair, not a parameter.

use crate::basis::Basis;
use crate::codecs::{fp8::Fp8, nvfp4};
use crate::registry::{Side, Variant};

const KEYS: Side = Side::Fp8(Fp8 {
    basis: Basis::Hadamard256,
});

/// The variants of this file.
pub const VARIANTS: &[Variant] = &[
    Variant {
        name: "k8v4",
        recorded: "k8v4",
        k: KEYS,
        v: Side::Nvfp4(nvfp4::SEARCHED),
    },
    Variant {
        name: "k8v4@single",
        recorded: "k8v4@single",
        k: KEYS,
        v: Side::Nvfp4(nvfp4::SINGLE),
    },
];
