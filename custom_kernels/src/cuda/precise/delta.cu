// Queries, times `scale`, and keys of unit length, qk[rows, 2, key_heads, key_dim]: the first channels of qkv, one warp each.
struct UnitInfo {
    u64 rows, channels, key_heads, key_dim, type, each;
    double scale, eps;
};
extern "C" __global__ void __launch_bounds__(256)
    f64_delta_units(const void *__restrict__ qkv, double *__restrict__ qk, const __grid_constant__ UnitInfo info) {
    const u64 unit = (u64)blockIdx.x * 8 + threadIdx.x / 32, heads = 2 * info.key_heads, each = info.each;
    const int lane = threadIdx.x % 32;
    if (unit >= info.rows * heads) return;
    const u64 head = unit % heads, from = unit / heads * info.channels + head * info.key_dim;
    double sum = 0.0;
    for (u64 c = lane; c < info.key_dim; c += 32) {
        const double value = load(qkv, info.type, from + c);
        sum = plus(sum, step_f32(times(value, value), each));
    }
    sum = step_f32(warp_sum(sum), each);
    const double inverse = step_f32(1.0 / sqrt(step_f32(plus(sum, info.eps), each)), each);
    const double scale = step_f32(head < info.key_heads ? info.scale : 1.0, each);
    for (u64 c = lane; c < info.key_dim; c += 32) {
        const double value = step_f32(times(load(qkv, info.type, from + c), inverse), each);
        qk[unit * info.key_dim + c] = step_f32(times(value, scale), each);
    }
}

// The recurrence of the gated delta rule, state in registers: every warp owns 4 columns of it, 8 lanes a column, lane `g`
// rows g, g + 8, ..; KEY_ROWS of them, defined in front of this text, hold key_dim. Per token and column
//
//     s *= exp(g);  u = beta (v - k . s);  s += k u;  o = q . s
#ifdef KEY_ROWS
constexpr int KEYS = 8 * KEY_ROWS;                    // key_dim, filled up with zeros
constexpr int STAGE = KEY_ROWS <= 16 ? 8 : 4;         // tokens whose keys and queries are in shared memory at once
constexpr int DELTA_COLUMNS = 16;                     // columns of a block of four warps

struct DeltaInfo {
    u64 tokens, channels, key_heads, value_heads, key_dim, value_dim, type, to;
};
extern "C" __global__ void __launch_bounds__(128)
    f64_delta(const void *__restrict__ qkv, const double *__restrict__ qk, const float *__restrict__ g,
              const float *__restrict__ beta, const float *__restrict__ state, float *__restrict__ next,
              void *__restrict__ out, const __grid_constant__ DeltaInfo info) {
    __shared__ __align__(16) double units[2][2][STAGE][KEYS]; // stage, query or key
    __shared__ double values[2][STAGE][DELTA_COLUMNS], decays[2][STAGE], betas[2][STAGE];
    const int tid = threadIdx.x, lane = tid % 32, group = lane % 8, own = tid / 32 * 4 + lane / 8;
    const u64 head = blockIdx.y, window = blockIdx.z, column = (u64)blockIdx.x * DELTA_COLUMNS + own;
    const u64 key_head = head / (info.value_heads / info.key_heads);
    const bool valid = column < info.value_dim;
    const u64 matrix = (window * info.value_heads + head) * info.key_dim * info.value_dim;

    double s[KEY_ROWS];
#pragma unroll
    for (int j = 0; j < KEY_ROWS; j++) {
        const u64 row = j * 8 + group;
        s[j] = valid && row < info.key_dim ? state[matrix + row * info.value_dim + column] : 0.0;
    }
    for (int i = tid; i < 4 * STAGE * KEYS; i += 128) (&units[0][0][0][0])[i] = 0.0; // what no copy writes
    __syncthreads();

    const int rows_here = tid / DELTA_COLUMNS; // the token and column of a stage whose value this thread loads
    const u64 column_here = (u64)blockIdx.x * DELTA_COLUMNS + tid % DELTA_COLUMNS;
    double value = 0.0, decay = 0.0, strength = 0.0;
    auto fetch = [&](u64 stage) {
        const u64 first = stage * STAGE;
        for (u64 i = tid; i < 2 * STAGE * info.key_dim; i += 128) {
            const u64 c = i % info.key_dim, t = i / info.key_dim % STAGE, which = i / info.key_dim / STAGE;
            if (first + t >= info.tokens) continue;
            const u64 row = (window * info.tokens + first + t) * 2 + which;
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(smem_address(&units[stage % 2][which][t][c])),
                         "l"(qk + (row * info.key_heads + key_head) * info.key_dim + c)
                         : "memory");
        }
        copy_commit();
        const u64 row = window * info.tokens + first + rows_here;
        if (rows_here < STAGE && first + rows_here < info.tokens && column_here < info.value_dim)
            value = load(qkv, info.type,
                         row * info.channels + 2 * info.key_heads * info.key_dim + head * info.value_dim + column_here);
        if (tid < STAGE && first + tid < info.tokens) {
            const u64 control = (window * info.tokens + first + tid) * info.value_heads + head;
            decay = exp((double)g[control]);
            strength = beta[control];
        }
    };

    const u64 stages = (info.tokens + STAGE - 1) / STAGE;
    fetch(0);
    for (u64 stage = 0; stage < stages; stage++) {
        const int half = stage % 2;
        if (rows_here < STAGE) values[half][rows_here][tid % DELTA_COLUMNS] = value;
        if (tid < STAGE) {
            decays[half][tid] = decay;
            betas[half][tid] = strength;
        }
        copy_wait<0>();
        __syncthreads();
        if (stage + 1 < stages) fetch(stage + 1);
        for (int t = 0; t < STAGE && stage * STAGE + t < info.tokens; t++) {
            const double *q = units[half][0][t] + group, *k = units[half][1][t] + group;
            const double fade = decays[half][t];
            double predicted = 0.0, o = 0.0;
#pragma unroll
            for (int j = 0; j < KEY_ROWS; j++) {
                s[j] *= fade;
                predicted += k[j * 8] * s[j];
            }
            for (int i = 1; i < 8; i *= 2) predicted += __shfl_xor_sync(0xffffffff, predicted, i);
            const double u = betas[half][t] * (values[half][t][own] - predicted);
#pragma unroll
            for (int j = 0; j < KEY_ROWS; j++) {
                s[j] += k[j * 8] * u;
                o += q[j * 8] * s[j];
            }
            for (int i = 1; i < 8; i *= 2) o += __shfl_xor_sync(0xffffffff, o, i);
            const u64 row = window * info.tokens + stage * STAGE + t;
            if (group == 0 && valid)
                store(out, info.to, (row * info.value_heads + head) * info.value_dim + column, o, info.to);
        }
    }
#pragma unroll
    for (int j = 0; j < KEY_ROWS; j++) {
        const u64 row = j * 8 + group;
        if (valid && row < info.key_dim) next[matrix + row * info.value_dim + column] = __double2float_rn(s[j]);
    }
}
#endif
