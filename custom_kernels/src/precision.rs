//! The precision in which an operation's result is observable.

/// How a result is rounded, once, before anything else reads it.
///
/// Inside an operation precision is private, float32 or better. A backend may keep a [`Precision::Bf16`] result as a
/// bfloat16 tensor or as float32 values that are exactly bfloat16; every operation accepts both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Not rounded beyond float32.
    Full,
    /// Rounded to bfloat16, nearest, ties to even.
    Bf16,
    /// Rounded to IEEE half precision, nearest, ties to even; beyond 65,504 infinite.
    F16,
}
