// Attention goes through tiles of `rows` query tokens of one window: scores[kv_heads, rows * group, visible] from queries
// [kv_heads, rows * group, head_dim] and the keys seen, softmax in place, then the values seen, transposed.
struct QueryInfo {
    u64 window, first, rows, tokens, heads, kv_heads, head_dim, type, to;
};

// The index in [batch, tokens, heads, head_dim] of row `index` of a tile.
__device__ __forceinline__ u64 query_row(const QueryInfo &info, u64 index) {
    const u64 group = info.heads / info.kv_heads, kv_head = index / (info.rows * group), rest = index % (info.rows * group);
    const u64 token = info.window * info.tokens + info.first + rest / group;
    return (token * info.heads + kv_head * group + rest % group) * info.head_dim;
}

extern "C" __global__ void __launch_bounds__(256)
    f64_queries(const void *__restrict__ q, double *__restrict__ out, const __grid_constant__ QueryInfo info) {
    for (u64 c = threadIdx.x; c < info.head_dim; c += 256)
        out[blockIdx.x * info.head_dim + c] = load(q, info.type, query_row(info, blockIdx.x) + c);
}

extern "C" __global__ void __launch_bounds__(256)
    f64_outputs(const double *__restrict__ o, void *__restrict__ out, const __grid_constant__ QueryInfo info) {
    for (u64 c = threadIdx.x; c < info.head_dim; c += 256)
        store(out, info.to, query_row(info, blockIdx.x) + c, o[blockIdx.x * info.head_dim + c], info.to);
}

// Rows 0..visible of one window of cache [batch, kv_heads, capacity, head_dim], [kv_heads, visible, head_dim], or with
// `transpose` [kv_heads, head_dim, visible]; one block per 32 x 32 of a head.
struct CacheInfo {
    u64 window, kv_heads, capacity, visible, head_dim, type, transpose;
};
extern "C" __global__ void __launch_bounds__(256)
    f64_cache(const void *__restrict__ cache, double *__restrict__ out, const __grid_constant__ CacheInfo info) {
    __shared__ double tile[32][33];
    const u64 head = blockIdx.z, row0 = (u64)blockIdx.x * 32, column0 = (u64)blockIdx.y * 32;
    const u64 x = threadIdx.x % 32, y = threadIdx.x / 32;
    const u64 from = (info.window * info.kv_heads + head) * info.capacity * info.head_dim;
    for (u64 i = y; i < 32; i += 8)
        if (row0 + i < info.visible && column0 + x < info.head_dim)
            tile[i][x] = load(cache, info.type, from + (row0 + i) * info.head_dim + column0 + x);
    __syncthreads();
    out += head * info.visible * info.head_dim;
    for (u64 i = y; i < 32; i += 8) {
        const u64 row = row0 + (info.transpose ? x : i), column = column0 + (info.transpose ? i : x);
        if (row >= info.visible || column >= info.head_dim) continue;
        if (info.transpose)
            out[column * info.visible + row] = tile[x][i];
        else
            out[row * info.head_dim + column] = tile[i][x];
    }
}

// Scores [kv_heads, rows * group, visible] to probabilities, one block per row; `seen` keys for the first token, then one
// more each.
struct SoftmaxInfo {
    u64 rows, group, visible, seen, each;
    double scale;
};
extern "C" __global__ void __launch_bounds__(256)
    f64_softmax(double *__restrict__ scores, const __grid_constant__ SoftmaxInfo info) {
    __shared__ double shared[8];
    const u64 each = info.each, seen = info.seen + blockIdx.x % (info.rows * info.group) / info.group;
    double *s = scores + blockIdx.x * info.visible;
    double most = __longlong_as_double(0xfff0000000000000ll);
    for (u64 i = threadIdx.x; i < seen; i += 256) {
        s[i] = step_bf16(times(step_bf16(s[i], each), info.scale), each);
        most = fmax(most, s[i]);
    }
    most = block_reduce<true>(most, shared);
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < seen; i += 256) {
        s[i] = exp(s[i] - most);
        sum += s[i];
    }
    sum = block_reduce<false>(sum, shared);
    for (u64 i = threadIdx.x; i < info.visible; i += 256)
        s[i] = i < seen ? step_bf16(step_f32(s[i] / sum, each), each) : 0.0;
}
