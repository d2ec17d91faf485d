// out[r, c] = x[row(r), c]: rows `first..`, or with `gather` those that `ids`, divided by `divisor`, name.
struct WidenInfo {
    u64 type, first, width, count, gather, divisor;
};
extern "C" __global__ void __launch_bounds__(256)
    f64_widen(const void *__restrict__ x, const u32 *__restrict__ ids, double *__restrict__ out,
              const __grid_constant__ WidenInfo info) {
    const u64 start = (u64)blockIdx.x * 1024 + threadIdx.x;
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const u64 i = start + part * 256;
        if (i >= info.count) return;
        u64 source = info.first * info.width + i;
        if (info.gather) source = ids[i / info.width] / info.divisor * info.width + i % info.width;
        out[i] = load(x, info.type, source);
    }
}

// out[batch, m, n] = x[batch, m, k] w[batch, n, k]^T, where the matrix library is missing.
struct ProductInfo {
    u64 m, n, k;
};
extern "C" __global__ void __launch_bounds__(256)
    f64_product(const double *__restrict__ x, const double *__restrict__ w, double *__restrict__ out,
                const __grid_constant__ ProductInfo info) {
    __shared__ double xs[16][17], ws[16][17];
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    const u64 m0 = (u64)blockIdx.x * 16, n0 = (u64)blockIdx.y * 16;
    x += blockIdx.z * info.m * info.k;
    w += blockIdx.z * info.n * info.k;
    double sum = 0.0;
    for (u64 k = 0; k < info.k; k += 16) {
        const bool inside = k + column < info.k;
        xs[row][column] = inside && m0 + row < info.m ? x[(m0 + row) * info.k + k + column] : 0.0;
        ws[row][column] = inside && n0 + row < info.n ? w[(n0 + row) * info.k + k + column] : 0.0;
        __syncthreads();
        for (int i = 0; i < 16; i++) sum += xs[row][i] * ws[column][i];
        __syncthreads();
    }
    if (m0 + row < info.m && n0 + column < info.n)
        out[blockIdx.z * info.m * info.n + (m0 + row) * info.n + n0 + column] = sum;
}

// What becomes of a tile of products [rows, columns], rows `distance` apart, on its way to `out` [.., stride]:
// PLAIN it is rounded; ADDED to a residual of the shape of `out`; GATED by `SiLU`, with `other` products `offset` behind;
// the same as a hidden row of an EXPERT, which is float32 or narrower.
constexpr u64 PLAIN = 0, ADDED = 1, GATED = 2, EXPERT = 3;
struct FinishInfo {
    u64 columns, distance, stride, first_row, first_column, what, other_type, offset, each, to, stored;
};
extern "C" __global__ void __launch_bounds__(256)
    f64_finish(const double *__restrict__ product, const void *__restrict__ other, void *__restrict__ out,
               const __grid_constant__ FinishInfo info) {
    const u64 row = blockIdx.x, column = (u64)blockIdx.y * 256 + threadIdx.x, each = info.each;
    if (column >= info.columns) return;
    const u64 source = row * info.distance + column;
    const u64 target = (info.first_row + row) * info.stride + info.first_column + column;
    double y = product[source];
    if (info.what == ADDED) y = plus(load(other, info.other_type, target), step_bf16(y, each));
    if (info.what >= GATED) {
        const double up = ((const double *)other)[source + info.offset];
        y = times(step_bf16(silu(step_bf16(y, each)), each), step_bf16(up, each));
        if (info.what == EXPERT) y = step_bf16(y, each);
    }
    store(out, info.stored, target, y, info.to);
}
