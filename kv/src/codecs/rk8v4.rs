//! `rk8v4`: INT8 keys, INT4 values, in two incompatible lineages.
//!
//! | variant | K | V |
//! |---|---|---|
//! | `rk8v4` = `rk8v4@b` | Hadamard-256, INT8 per 64 (as `int8`) | INT4 per 32, not rotated |
//! | `rk8v4@a` | Hadamard-64, INT8 per 64 | Hadamard-64, INT4 per 64, output rotated back |
//!
//! INT4 is the absmax coder of [`int8`](super::int8) with M = 7: codes in [-7, 7], two's-complement nibbles; -8 is never
//! produced and decodes as -8.

use crate::basis::Basis;
use crate::codecs::int8::{int4, int8};
use crate::registry::{Side, Variant};

/// V of the current lineage: INT4 with eight FP16 scales per row, not rotated.
pub const VALUES_B: Side = Side::Absmax(int4(Basis::Identity, 32));
/// V of the first lineage: INT4 with four FP16 scales per row in the Hadamard-64 basis.
pub const VALUES_A: Side = Side::Absmax(int4(Basis::Hadamard64, 64));

/// The variants of this file.
pub const VARIANTS: &[Variant] = &[
    Variant {
        name: "rk8v4@b",
        recorded: "rotated-k8g64-v4g32",
        k: Side::Absmax(int8(Basis::Hadamard256)),
        v: VALUES_B,
    },
    Variant {
        name: "rk8v4@a",
        recorded: "rk8v4@a",
        k: Side::Absmax(int8(Basis::Hadamard64)),
        v: VALUES_A,
    },
];
