// Gated delta rule in chunks of 64 tokens, head sizes 128 x 128, on Hopper and Ampere tensor cores (mma.sync).
//
// Per value head with key head j / group, state S [128, 128], gamma_t = sum of g inside the chunk, k and q normalised:
//
//     A[t, r] = beta_t (k_t . k_r) exp(gamma_t - gamma_r), r < t          T = (I + A)^-1
//     X       = beta (V - exp(gamma) K S)                                 Vn = T X
//     O       = exp(gamma) Q S + P Vn,  P[t, r] = (q_t . k_r) exp(gamma_t - gamma_r), r <= t
//     S      <- exp(gamma_64) S + sum_r exp(gamma_64 - gamma_r) k_r Vn_r^T
//
// `delta_prepare` does what needs no state, one block per chunk and key head: the row norms, T (by forward
// substitution in float32, one column per thread) and P. `delta_scan` walks the chunks, one block per value head and
// half of its columns. L2 norms stay float32 row factors, the unit diagonal of T is added in float32 and the state is
// float32; the other operands of a product are rounded to bf16, sums are float32.

constexpr int CHUNK = 64, DK = 128, DV = 128;
constexpr int ROW = DK + 8;          // padded shared row of q and k: 17 chunks of 16 bytes, no bank conflicts
constexpr int COLS = 64;             // value columns of one scan block
constexpr int CROW = COLS + 8;       // padded shared row of 64 columns
constexpr int AROW = CHUNK + 4;      // padded float row
constexpr float NORM_EPS = 1e-6f;

struct DeltaInfo {
    u64 q_stride, k_stride, v_stride;  // elements between tokens
    u64 q_offset, k_offset, v_offset;  // elements before the first head
    u32 tokens, chunks, key_heads, group;
    u32 has_state, pad;
};

// Grid (chunks, key_heads, batch), 64 * GROUP threads. Matrices T - I and P go out as mma fragments: per chunk and value
// head 16 fragments [row tile][reduction step][lane][4 words], the ones above the diagonal unwritten.
extern "C" __global__ void __launch_bounds__(64 * GROUP)
    delta_prepare(const bf16 *__restrict__ q, const bf16 *__restrict__ k, const float *__restrict__ g,
                  const float *__restrict__ beta, uint4 *__restrict__ t_out, uint4 *__restrict__ p_out,
                  float4 *__restrict__ factors, float *__restrict__ decay, const __grid_constant__ DeltaInfo info) {
    extern __shared__ __align__(16) unsigned char raw[];
    float *kk = (float *)raw;               // [64, AROW]
    float *qk = kk + CHUNK * AROW;          // [64, AROW]
    bf16 *sq = (bf16 *)(qk + CHUNK * AROW); // [64, ROW], later the matrices A
    bf16 *sk = sq + CHUNK * ROW;            // [64, ROW]
    float *sa = (float *)sq;                // GROUP x [64, AROW]
    __shared__ float norm_q[CHUNK], norm_k[CHUNK], sum_g[GROUP][CHUNK], sb[GROUP][CHUNK];

    constexpr int THREADS = 64 * GROUP, WARPS = 2 * GROUP;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int chunk = blockIdx.x, key_head = blockIdx.y, batch = blockIdx.z;
    const int token0 = chunk * CHUNK, valid = min(CHUNK, (int)info.tokens - token0);
    const u32 value_heads = info.key_heads * GROUP;
    const bf16 *q_head = q + info.q_offset + (u64)batch * info.tokens * info.q_stride + key_head * DK;
    const bf16 *k_head = k + info.k_offset + (u64)batch * info.tokens * info.k_stride + key_head * DK;

    // All reads from memory at once: rows of q and k, then this thread's gate and write strength.
    for (int i = tid; i < CHUNK * 16; i += THREADS) {
        const int r = i / 16, c = i % 16;
        const u64 at = token0 + min(r, valid - 1);
        copy16(smem_address(sq + r * ROW + c * 8), q_head + at * info.q_stride + c * 8, r < valid);
        copy16(smem_address(sk + r * ROW + c * 8), k_head + at * info.k_stride + c * 8, r < valid);
    }
    copy_commit();
    const int h = tid / 64, col = tid % 64; // this thread's value head of the group and column of T
    const u32 value_head = key_head * GROUP + h;
    {
        float x = 0.f, b = 0.f;
        if (col < valid) {
            const u64 at = ((u64)batch * info.tokens + token0 + col) * value_heads + value_head;
            x = g[at];
            b = beta[at];
        }
        for (int d = 1; d < 32; d *= 2) {
            const float y = __shfl_up_sync(0xffffffff, x, d);
            if (lane >= d) x += y;
        }
        sum_g[h][col] = x;
        sb[h][col] = b;
    }
    copy_wait<0>();
    __syncthreads();
    // Row norms: 16 threads of 8 elements per row.
    for (int i = tid; i < CHUNK * 16; i += THREADS) {
        const int r = i / 16, c = i % 16;
        const uint4 a = *(const uint4 *)(sq + r * ROW + c * 8), b = *(const uint4 *)(sk + r * ROW + c * 8);
        float squares_q = 0.f, squares_k = 0.f;
        const u32 wa[4] = {a.x, a.y, a.z, a.w}, wb[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 x = unpack(wa[j]), y = unpack(wb[j]);
            squares_q += x.x * x.x + x.y * x.y;
            squares_k += y.x * y.x + y.y * y.y;
        }
#pragma unroll
        for (int m = 8; m > 0; m /= 2) {
            squares_q += __shfl_xor_sync(0xffffffff, squares_q, m);
            squares_k += __shfl_xor_sync(0xffffffff, squares_k, m);
        }
        if (c == 0) {
            norm_q[r] = rsqrtf(squares_q + NORM_EPS) * rsqrtf((float)DK);
            norm_k[r] = rsqrtf(squares_k + NORM_EPS);
        }
    }
    if (col >= 32) sum_g[h][col] += sum_g[h][31];
    // Products k k^T and q k^T: 8 tasks of 16 rows.
    for (int task = warp; task < 8; task += WARPS) {
        const int rows = task % 4;
        const u32 a_base = smem_address((task < 4 ? sk : sq) + (rows * 16 + lane % 16) * ROW + (lane / 16) * 8);
        const u32 b_base = smem_address(sk + ((lane / 16) * 8 + lane % 8) * ROW + ((lane / 8) % 2) * 8);
        float c[8][4] = {};
#pragma unroll
        for (int step = 0; step < DK / 16; step++) {
            u32 a[4], b[4];
            ldmatrix4(a, a_base + step * 32);
#pragma unroll
            for (int n = 0; n < 4; n++)
                if (n <= rows) {
                    ldmatrix4(b, b_base + n * 16 * ROW * 2 + step * 32);
                    mma(c[2 * n], a, b[0], b[1]);
                    mma(c[2 * n + 1], a, b[2], b[3]);
                }
        }
        float *dst = (task < 4 ? kk : qk) + (rows * 16 + lane / 4) * AROW + (lane % 4) * 2;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            *(float2 *)(dst + n * 8) = make_float2(c[n][0], c[n][1]);
            *(float2 *)(dst + 8 * AROW + n * 8) = make_float2(c[n][2], c[n][3]);
        }
    }
    __syncthreads();
    // A^T of this thread's head, row `col` = column `col` of A; the rows of q and k are no longer needed.
    float *a_head = sa + h * CHUNK * AROW;
    const int first = col & 32; // rows above this thread's half of the columns hold nothing
    {
        const float k_norm = norm_k[col], gamma = sum_g[h][col];
#pragma unroll 4
        for (int t = first; t < CHUNK; t += 4) {
            float a[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i] = t + i > col ? sb[h][t + i] * norm_k[t + i] * k_norm * kk[(t + i) * AROW + col] *
                                         __expf(sum_g[h][t + i] - gamma)
                                   : 0.f;
            *(float4 *)(a_head + col * AROW + t) = make_float4(a[0], a[1], a[2], a[3]);
        }
    }
    __syncthreads();
    // Column `col` of T: once x_r is known, it is taken out of every later row, x_t -= A[t, r] x_r.
    {
        float x[CHUNK];
#pragma unroll
        for (int t = 0; t < CHUNK; t++) x[t] = t == col ? 1.f : 0.f;
        if (first == 0) {
#pragma unroll
            for (int r = 0; r < CHUNK - 1; r++)
#pragma unroll
                for (int t = r + 1; t < CHUNK; t++) x[t] = fmaf(-a_head[r * AROW + t], x[r], x[t]);
        } else {
#pragma unroll
            for (int r = 32; r < CHUNK - 1; r++)
#pragma unroll
                for (int t = r + 1; t < CHUNK; t++) x[t] = fmaf(-a_head[r * AROW + t], x[r], x[t]);
        }
        __syncthreads();
#pragma unroll
        for (int t = 0; t < CHUNK; t++) a_head[t * AROW + col] = t == col ? 0.f : x[t];
    }
    __syncthreads();
    // Fragments out: 10 on and below the diagonal, two warps per head.
    const u64 fragment0 = (((u64)batch * value_heads + value_head) * info.chunks + chunk) * 16 * 32;
    for (int f = warp % 2; f < 16; f += 2) {
        const int rows = f / 4, step = f % 4;
        if (step > rows) continue;
        const int t0 = rows * 16 + lane / 4, r0 = step * 16 + (lane % 4) * 2;
        u32 tw[4], pw[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = t0 + (i % 2) * 8, r = r0 + (i / 2) * 8;
            tw[i] = pack_bf16(a_head[t * AROW + r], a_head[t * AROW + r + 1]);
            float p[2];
#pragma unroll
            for (int j = 0; j < 2; j++)
                p[j] = r + j <= t ? norm_q[t] * norm_k[r + j] * qk[t * AROW + r + j] * __expf(sum_g[h][t] - sum_g[h][r + j])
                                  : 0.f;
            pw[i] = pack_bf16(p[0], p[1]);
        }
        t_out[fragment0 + f * 32 + lane] = make_uint4(tw[0], tw[1], tw[2], tw[3]);
        p_out[fragment0 + f * 32 + lane] = make_uint4(pw[0], pw[1], pw[2], pw[3]);
    }
    const u64 chunk0 = ((u64)batch * value_heads + value_head) * info.chunks + chunk;
    const float e = __expf(sum_g[h][col]), last = sum_g[h][CHUNK - 1];
    factors[chunk0 * CHUNK + col] =
        col < valid ? make_float4(sb[h][col], e * norm_k[col], e * norm_q[col], norm_k[col] * __expf(last - sum_g[h][col]))
                    : make_float4(0.f, 0.f, 0.f, 0.f);
    if (col == 0) decay[chunk0] = __expf(last);
}

// Grid (DV / COLS, value_heads, batch), 128 threads. Warp w owns tokens 16 w .. of a chunk and state rows 32 w ...
extern "C" __global__ void __launch_bounds__(128, 2)
    delta_scan(const bf16 *__restrict__ q, const bf16 *__restrict__ k, const bf16 *__restrict__ v,
               const uint4 *__restrict__ t_in, const uint4 *__restrict__ p_in, const float4 *__restrict__ factors,
               const float *__restrict__ decay, const float *__restrict__ state_in, float *__restrict__ state_out,
               bf16 *__restrict__ out, const __grid_constant__ DeltaInfo info) {
    extern __shared__ __align__(16) unsigned char raw[];
    bf16 *sk = (bf16 *)raw;              // 2 x [64, ROW]
    bf16 *sq = sk + 2 * CHUNK * ROW;     // 2 x [64, ROW]
    bf16 *ss = sq + 2 * CHUNK * ROW;     // [128, CROW] the state in bf16; its start later holds the scaled Vn
    bf16 *sx = ss + DK * CROW;           // [64, CROW]
    bf16 *sv = sx + CHUNK * CROW;        // [64, CROW]

    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int slice = blockIdx.x, value_head = blockIdx.y, batch = blockIdx.z;
    const int key_head = value_head / GROUP, value_heads = gridDim.y;
    const u64 token_base = (u64)batch * info.tokens;
    const bf16 *q_head = q + info.q_offset + token_base * info.q_stride + key_head * DK;
    const bf16 *k_head = k + info.k_offset + token_base * info.k_stride + key_head * DK;
    const bf16 *v_head = v + info.v_offset + token_base * info.v_stride + value_head * DV + slice * COLS;
    bf16 *o_head = out + (token_base * value_heads + value_head) * DV + slice * COLS;
    const u64 head = (u64)batch * value_heads + value_head;
    const int chunks = info.chunks, tokens = info.tokens;

    auto prefetch = [&](int chunk) {
        const int stage = chunk % 2;
#pragma unroll
        for (int i = 0; i < CHUNK * 16 / 128; i++) {
            const int r = (i * 128 + tid) / 16, c = tid % 16, t = chunk * CHUNK + r;
            const bool ok = t < tokens;
            const u64 at = ok ? t : 0;
            copy16(smem_address(sk + (stage * CHUNK + r) * ROW + c * 8), k_head + at * info.k_stride + c * 8, ok);
            copy16(smem_address(sq + (stage * CHUNK + r) * ROW + c * 8), q_head + at * info.q_stride + c * 8, ok);
        }
        copy_commit();
    };
    prefetch(0);

    // State rows 32 warp + 16 m + lane / 4 (+ 8), columns 8 n + 2 (lane % 4) (+ 1).
    float s[2][8][4];
    const u64 state0 = (head * DK + warp * 32 + lane / 4) * DV + slice * COLS + (lane % 4) * 2;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float2 a = make_float2(0.f, 0.f), b = a;
            if (info.has_state) {
                a = *(const float2 *)(state_in + state0 + (u64)(m * 16) * DV + n * 8);
                b = *(const float2 *)(state_in + state0 + (u64)(m * 16 + 8) * DV + n * 8);
            }
            s[m][n][0] = a.x, s[m][n][1] = a.y, s[m][n][2] = b.x, s[m][n][3] = b.y;
        }
    bf16 *ss_own = ss + (warp * 32 + lane / 4) * CROW + (lane % 4) * 2;
    auto publish_state = [&]() {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 8; n++) {
                *(u32 *)(ss_own + (m * 16) * CROW + n * 8) = pack_bf16(s[m][n][0], s[m][n][1]);
                *(u32 *)(ss_own + (m * 16 + 8) * CROW + n * 8) = pack_bf16(s[m][n][2], s[m][n][3]);
            }
    };
    publish_state();

    const int row = warp * 16 + lane / 4; // and row + 8
    const u32 a_row = (warp * 16 + lane % 16) * ROW * 2 + (lane / 16) * 16;               // fragment A of token rows
    const u32 b_trans = ((lane % 16) * CROW + (lane / 16) * 8) * 2;                       // fragment B, 16 x 16, rows = reduction
    const u32 a_trans = (((lane / 16) * 8 + lane % 8) * ROW + ((lane / 8) % 2) * 8) * 2;  // fragment A of k^T
    const u32 ss_address = smem_address(ss), sx_address = smem_address(sx), sv_address = smem_address(sv);
    bf16 *own_x = sx + row * CROW + (lane % 4) * 2, *own_v = sv + row * CROW + (lane % 4) * 2;
    bf16 *own_d = ss + row * CROW + (lane % 4) * 2;

    for (int chunk = 0; chunk < chunks; chunk++) {
        const int stage = chunk % 2, token0 = chunk * CHUNK;
        // Everything this chunk reads straight from memory.
        const u64 at = head * chunks + chunk;
        const float4 f0 = factors[at * CHUNK + row], f1 = factors[at * CHUNK + row + 8];
        const float keep = decay[at];
        u32 vv[8][2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int t = token0 + row + r * 8;
            const u32 *src = (const u32 *)(v_head + (u64)(t < tokens ? t : 0) * info.v_stride) + lane % 4;
#pragma unroll
            for (int n = 0; n < 8; n++) vv[n][r] = t < tokens ? src[n * 4] : 0;
        }
        uint4 tf[4], pf[4];
#pragma unroll
        for (int step = 0; step < 4; step++)
            if (step <= warp) {
                tf[step] = t_in[(at * 16 + warp * 4 + step) * 32 + lane];
                pf[step] = p_in[(at * 16 + warp * 4 + step) * 32 + lane];
            }
        copy_wait<0>();
        __syncthreads(); // the tiles of this chunk and the bf16 state are in place
        if (chunk + 1 < chunks) prefetch(chunk + 1);

        float x[8][4] = {}, o[8][4] = {};
        {
            const u32 k_address = smem_address(sk + stage * CHUNK * ROW) + a_row;
            const u32 q_address = smem_address(sq + stage * CHUNK * ROW) + a_row;
#pragma unroll
            for (int step = 0; step < DK / 16; step++) {
                u32 a[4], c[4], b[4];
                ldmatrix4(a, k_address + step * 32);
                ldmatrix4(c, q_address + step * 32);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    ldmatrix4_trans(b, ss_address + step * 16 * CROW * 2 + b_trans + n * 32);
                    mma(x[2 * n], a, b[0], b[1]);
                    mma(x[2 * n + 1], a, b[2], b[3]);
                    mma(o[2 * n], c, b[0], b[1]);
                    mma(o[2 * n + 1], c, b[2], b[3]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 v0 = unpack(vv[n][0]), v1 = unpack(vv[n][1]);
            x[n][0] = f0.x * (v0.x - f0.y * x[n][0]);
            x[n][1] = f0.x * (v0.y - f0.y * x[n][1]);
            x[n][2] = f1.x * (v1.x - f1.y * x[n][2]);
            x[n][3] = f1.x * (v1.y - f1.y * x[n][3]);
            *(u32 *)(own_x + n * 8) = pack_bf16(x[n][0], x[n][1]);
            *(u32 *)(own_x + 8 * CROW + n * 8) = pack_bf16(x[n][2], x[n][3]);
            o[n][0] *= f0.z, o[n][1] *= f0.z, o[n][2] *= f1.z, o[n][3] *= f1.z;
        }
        __syncthreads();
#pragma unroll
        for (int step = 0; step < 4; step++)
            if (step <= warp) {
                const u32 a[4] = {tf[step].x, tf[step].y, tf[step].z, tf[step].w};
                u32 b[4];
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    ldmatrix4_trans(b, sx_address + step * 16 * CROW * 2 + b_trans + n * 32);
                    mma(x[2 * n], a, b[0], b[1]);
                    mma(x[2 * n + 1], a, b[2], b[3]);
                }
            }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            *(u32 *)(own_v + n * 8) = pack_bf16(x[n][0], x[n][1]);
            *(u32 *)(own_v + 8 * CROW + n * 8) = pack_bf16(x[n][2], x[n][3]);
            *(u32 *)(own_d + n * 8) = pack_bf16(x[n][0] * f0.w, x[n][1] * f0.w);
            *(u32 *)(own_d + 8 * CROW + n * 8) = pack_bf16(x[n][2] * f1.w, x[n][3] * f1.w);
        }
        __syncthreads();
#pragma unroll
        for (int step = 0; step < 4; step++)
            if (step <= warp) {
                const u32 a[4] = {pf[step].x, pf[step].y, pf[step].z, pf[step].w};
                u32 b[4];
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    ldmatrix4_trans(b, sv_address + step * 16 * CROW * 2 + b_trans + n * 32);
                    mma(o[2 * n], a, b[0], b[1]);
                    mma(o[2 * n + 1], a, b[2], b[3]);
                }
            }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int t = token0 + row + r * 8;
            if (t < tokens) {
                u32 *dst = (u32 *)(o_head + (u64)t * value_heads * DV) + lane % 4;
#pragma unroll
                for (int n = 0; n < 8; n++) dst[n * 4] = pack_bf16(o[n][2 * r], o[n][2 * r + 1]);
            }
        }
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[m][n][i] *= keep;
        {
            const u32 k_address = smem_address(sk + stage * CHUNK * ROW) + a_trans + warp * 64;
#pragma unroll
            for (int step = 0; step < 4; step++) {
                u32 a[2][4], b[4];
                ldmatrix4_trans(a[0], k_address + step * 16 * ROW * 2);
                ldmatrix4_trans(a[1], k_address + step * 16 * ROW * 2 + 32);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    ldmatrix4_trans(b, ss_address + step * 16 * CROW * 2 + b_trans + n * 32);
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        mma(s[m][2 * n], a[m], b[0], b[1]);
                        mma(s[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }
        __syncthreads(); // the scaled Vn is read, its place becomes the state again
        publish_state();
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 8; n++) {
            *(float2 *)(state_out + state0 + (u64)(m * 16) * DV + n * 8) = make_float2(s[m][n][0], s[m][n][1]);
            *(float2 *)(state_out + state0 + (u64)(m * 16 + 8) * DV + n * 8) = make_float2(s[m][n][2], s[m][n][3]);
        }
}
