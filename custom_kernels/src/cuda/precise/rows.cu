// RMS norm of rows [rows, width], one warp each: with weight `1 + w`, or GATED with weight `w` and `SiLU(z)`.
struct NormInfo {
    u64 rows, width, x_type, w_type, z_type, gated, each, to;
    double eps;
};
extern "C" __global__ void __launch_bounds__(256)
    f64_norm(const void *__restrict__ x, const void *__restrict__ w, const void *__restrict__ z, void *__restrict__ out,
             const __grid_constant__ NormInfo info) {
    const u64 row = (u64)blockIdx.x * 8 + threadIdx.x / 32, each = info.each, to = info.to;
    const int lane = threadIdx.x % 32;
    if (row >= info.rows) return;
    double sum = 0.0;
    for (u64 c = lane; c < info.width; c += 32) {
        const double value = load(x, info.x_type, row * info.width + c);
        sum = plus(sum, step_f32(times(value, value), each));
    }
    const double mean = step_f32(warp_sum(sum) / (double)info.width, each);
    const double scale = step_f32(1.0 / sqrt(step_f32(plus(mean, info.eps), each)), each);
    for (u64 c = lane; c < info.width; c += 32) {
        const u64 i = row * info.width + c;
        const double normalised = step_f32(times(load(x, info.x_type, i), scale), each), weight = load(w, info.w_type, c);
        double y;
        if (info.gated) {
            const double weighted = step_bf16(times(weight, step_bf16(normalised, each)), each);
            y = step_f32(times(weighted, step_f32(silu(load(z, info.z_type, i)), each)), each);
        } else {
            y = step_f32(times(normalised, step_f32(plus(1.0, weight), each)), each);
        }
        store(out, to, i, y, to);
    }
}

// Rotary embedding of x [batch, tokens, heads, head_dim], one block per head; cos and sin [tokens, pairs].
struct RotaryInfo {
    u64 tokens, heads, head_dim, pairs, type, each, to, stored;
};
extern "C" __global__ void __launch_bounds__(256)
    f64_rotary(const void *__restrict__ x, const double *__restrict__ cos, const double *__restrict__ sin,
               void *__restrict__ out, const __grid_constant__ RotaryInfo info) {
    const u64 half = info.pairs, each = info.each, first = (u64)blockIdx.x * info.head_dim;
    const u64 angles = blockIdx.x / info.heads % info.tokens * half;
    for (u64 c = threadIdx.x; c < info.head_dim; c += 256) {
        const double value = load(x, info.type, first + c);
        if (c >= 2 * half) {
            store(out, info.stored, first + c, value, info.stored);
            continue;
        }
        const u64 pair = c % half;
        const double other = load(x, info.type, first + (c < half ? c + half : c - half));
        const double own = step_bf16(times(value, cos[angles + pair]), each);
        const double across = step_bf16(times(other, sin[angles + pair]), each);
        store(out, info.stored, first + c, plus(own, c < half ? -across : across), info.to);
    }
}

// Causal convolution and SiLU of x [batch, tokens, channels] behind tail [batch, width - 1, channels]; blocks beyond the
// tokens of a window write its next tail, float32.
struct ConvolutionInfo {
    u64 tokens, channels, width, x_type, w_type, tail_type, each, to;
};
extern "C" __global__ void __launch_bounds__(256)
    f64_convolution(const void *__restrict__ x, const void *__restrict__ w, const void *__restrict__ tail,
                    void *__restrict__ out, float *__restrict__ next, const __grid_constant__ ConvolutionInfo info) {
    const u64 before = info.width - 1, padded = info.tokens + before;
    const u64 window = blockIdx.x / padded, t = blockIdx.x % padded, c = (u64)blockIdx.y * 256 + threadIdx.x;
    if (c >= info.channels) return;
    // Row `at` of the tail and x behind one another.
    auto row = [&](u64 at) {
        return at < before ? load(tail, info.tail_type, (window * before + at) * info.channels + c)
                           : load(x, info.x_type, (window * info.tokens + at - before) * info.channels + c);
    };
    if (t >= info.tokens) {
        next[(window * before + t - info.tokens) * info.channels + c] = (float)row(t);
        return;
    }
    double sum = -0.0;
    for (u64 tap = 0; tap < info.width; tap++)
        sum = plus(sum, times(load(w, info.w_type, c * info.width + tap), row(t + tap)));
    store(out, info.to, (window * info.tokens + t) * info.channels + c, silu(step_bf16(sum, info.each)), info.to);
}

// g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b), both float32 [rows, heads]; softplus(u) = u above `identity`.
struct GatesInfo {
    u64 count, heads, a_type, b_type, log_type, bias_type, each;
    double identity;
};
extern "C" __global__ void __launch_bounds__(256)
    f64_delta_gates(const void *__restrict__ a, const void *__restrict__ b, const void *__restrict__ a_log,
                    const void *__restrict__ dt_bias, float *__restrict__ g, float *__restrict__ beta,
                    const __grid_constant__ GatesInfo info) {
    const u64 i = (u64)blockIdx.x * 256 + threadIdx.x, head = i % info.heads, each = info.each;
    if (i >= info.count) return;
    const double u = step_f32(plus(load(a, info.a_type, i), load(dt_bias, info.bias_type, head)), each);
    const double softplus = u > info.identity ? u : step_f32(log1p(exp(u)), each);
    g[i] = __double2float_rn(times(-step_f32(exp(load(a_log, info.log_type, head)), each), softplus));
    beta[i] = __double2float_rn(step_bf16(sigmoid(load(b, info.b_type, i)), each));
}

// x * sigmoid(gate)
struct GateInfo {
    u64 count, x_type, gate_type, each, to;
};
extern "C" __global__ void __launch_bounds__(256)
    f64_sigmoid_gate(const void *__restrict__ x, const void *__restrict__ gate, void *__restrict__ out,
                     const __grid_constant__ GateInfo info) {
    const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= info.count) return;
    const double open = step_bf16(sigmoid(load(gate, info.gate_type, i)), info.each);
    store(out, info.to, i, times(load(x, info.x_type, i), open), info.to);
}
