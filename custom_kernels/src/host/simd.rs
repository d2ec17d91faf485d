//! One loop body, compiled for each instruction set and chosen at run time.
//!
//! A body is `#[inline(always)] fn body<const LEVEL: u8>(..)` in plain Rust that the compiler vectorises;
//! [`per_instruction_set!`](crate::host::simd) wraps it. Bits are equal from [`AVX2`] on: both fuse multiply and add.

/// Whatever the target has by default; multiply and add round separately.
pub const BASE: u8 = 0;
/// 256-bit vectors, fused multiply-add.
pub const AVX2: u8 = 1;
/// 512-bit vectors, fused multiply-add.
pub const AVX512: u8 = 2;

/// The best level of this CPU.
pub fn level() -> u8 {
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f")
            && std::is_x86_feature_detected!("avx512bw")
            && std::is_x86_feature_detected!("avx512dq")
            && std::is_x86_feature_detected!("avx512vl")
        {
            return AVX512;
        }
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
            return AVX2;
        }
    }
    BASE
}

/// `a * b + c`, fused where the level has it.
#[inline(always)]
pub(crate) fn multiply_add<const LEVEL: u8>(a: f32, b: f32, c: f32) -> f32 {
    if LEVEL == BASE { a * b + c } else { a.mul_add(b, c) }
}

/// Defines a function that runs `body::<LEVEL>` compiled for the CPU's level.
macro_rules! per_instruction_set {
    ($(#[$meta:meta])* $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $body:ident;) => {
        $(#[$meta])*
        $visibility fn $name($($argument: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($argument: $type),*) $(-> $result)? {
                $body::<{ $crate::host::simd::AVX512 }>($($argument),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($argument: $type),*) $(-> $result)? {
                $body::<{ $crate::host::simd::AVX2 }>($($argument),*)
            }
            match $crate::host::simd::level() {
                // SAFETY: level() found these features on this CPU.
                #[cfg(target_arch = "x86_64")]
                $crate::host::simd::AVX512 => unsafe { avx512($($argument),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::host::simd::AVX2 => unsafe { avx2($($argument),*) },
                _ => $body::<{ $crate::host::simd::BASE }>($($argument),*),
            }
        }
    };
}
pub(crate) use per_instruction_set;
