// The operations in double precision, every result rounded where `ops/*/precise.rs` rounds it: those files hold the
// formulas, step by step, that the kernels in this folder repeat.
//
// Operands are float32, bfloat16, half or double, as their type says; products come from the matrix library and are
// finished here. `each` is whether the steps inside an operation are rounded too.

#include <cuda_fp16.h>

// Types of an operand, and what a result is rounded to.
constexpr u64 FULL = 0, BF16 = 1, F16 = 2, DOUBLE = 3;

__device__ __forceinline__ double load(const void *x, u64 type, u64 i) {
    switch (type) {
    case BF16: return __bfloat162float(((const bf16 *)x)[i]);
    case F16: return __half2float(((const __half *)x)[i]);
    case DOUBLE: return ((const double *)x)[i];
    default: return ((const float *)x)[i];
    }
}

// `x` as float32, inexact values with an odd last bit: rounding the result to fewer bits is then rounding `x` itself.
__device__ __forceinline__ float to_odd(double x) {
    const float down = __double2float_rz(x);
    return (double)down == x || x != x ? down : __int_as_float(__float_as_int(down) | 1);
}

__device__ __forceinline__ float nearest_bf16(double x) { return __bfloat162float(__float2bfloat16_rn(to_odd(x))); }

__device__ __forceinline__ float nearest(double x, u64 to) {
    switch (to) {
    case BF16: return nearest_bf16(x);
    case F16: return __half2float(__float2half_rn(to_odd(x)));
    default: return __double2float_rn(x);
    }
}

// `x` rounded to `to`, kept as `stored`, which holds it exactly.
__device__ __forceinline__ void store(void *out, u64 stored, u64 i, double x, u64 to) {
    const float y = nearest(x, to);
    switch (stored) {
    case BF16: ((bf16 *)out)[i] = __float2bfloat16_rn(y); break;
    case F16: ((__half *)out)[i] = __float2half_rn(y); break;
    case DOUBLE: ((double *)out)[i] = y; break;
    default: ((float *)out)[i] = y; break;
    }
}

// A step whose type is bfloat16, or float32.
__device__ __forceinline__ double step_bf16(double x, u64 each) { return each ? (double)nearest_bf16(x) : x; }
__device__ __forceinline__ double step_f32(double x, u64 each) { return each ? (double)__double2float_rn(x) : x; }

// Never contracted into one rounding.
__device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }

__device__ __forceinline__ double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
__device__ __forceinline__ double silu(double x) { return x / (1.0 + exp(-x)); }

// Over the lanes of a warp, every lane gets it.
__device__ __forceinline__ double warp_sum(double x) {
    for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffff, x, i);
    return x;
}
__device__ __forceinline__ double warp_max(double x) {
    for (int i = 16; i > 0; i /= 2) x = fmax(x, __shfl_xor_sync(0xffffffff, x, i));
    return x;
}
// Over a block of 256 threads, every thread gets it; `shared` holds 8.
template <bool MAX> __device__ __forceinline__ double block_reduce(double x, double *shared) {
    x = MAX ? warp_max(x) : warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared[0];
    for (int i = 1; i < 8; i++) x = MAX ? fmax(x, shared[i]) : x + shared[i];
    return x;
}
