// Causal grouped-query prompt attention on Hopper tensor cores:
//
//     o[b, t, h] = softmax_j(scale * q[b, t, h] . k[b, h / group, j]) v[b, h / group, j],   j <= query_offset + t
//
// q, out [batch, queries, heads, HEAD_DIM] and k, v [batch, kv_heads, keys, HEAD_DIM], 16-bit floats: q and k of one type
// (SCORE_TYPE), v of another or the same (VALUE_TYPE), out bf16. Scores, softmax and sums in float32, probabilities rounded
// to the type of v.
//
// One block owns BLOCK_M query rows of one head. Warpgroup 0 is the producer: one thread keeps STAGES tiles of BLOCK_N
// keys and values in flight through the bulk copy engine. Warpgroups 1 and 2 own 64 rows each: the scores of the next
// tile are issued before the value product of the current one, so that the softmax runs while the tensor cores work.
// Tiles go from the diagonal downwards: only the first few need the causal mask.
//
// HEAD_DIM (64, 128 or 256) and the two types are defined in front of this text.

constexpr int BLOCK_M = 128;
// 80 keys of 256 elements are what two stages leave room for beside the queries in 227 KiB.
constexpr int BLOCK_N = HEAD_DIM == 256 ? 80 : 128;
constexpr int STAGES = 2;
constexpr int PANELS = HEAD_DIM / 64;               // columns of 64 elements = one 128-byte swizzle row
constexpr int PANEL_Q = BLOCK_M * 128;              // bytes of one panel of queries
constexpr int PANEL_KV = BLOCK_N * 128;             // bytes of one panel of keys or values
constexpr int TILE_Q = PANELS * PANEL_Q;
constexpr int TILE_KV = PANELS * PANEL_KV;
constexpr int ACC_N = HEAD_DIM == 64 ? 64 : 128;    // columns of one value product instruction
constexpr int ACCS = HEAD_DIM / ACC_N;

struct AttentionInfo {
    u32 queries, keys, heads, group;
    u32 query_offset;
    float scale_log2; // scale * log2(e)
};

struct Barriers {
    u64 q, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_kernel(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                   const __grid_constant__ TensorMap v_map, const bf16 *, const bf16 *, const bf16 *,
                   bf16 *__restrict__ out, const __grid_constant__ AttentionInfo info) {
    extern __shared__ unsigned char raw[];
    unsigned char *base = (unsigned char *)(((u64)raw + 1023) & ~1023ull);
    unsigned char *sq = base;
    unsigned char *sk = sq + TILE_Q;
    unsigned char *sv = sk + STAGES * TILE_KV;
    __shared__ Barriers bars;

    const int head = blockIdx.x, batch = blockIdx.y;
    const int block = gridDim.z - 1 - blockIdx.z; // longest rows first
    const int row0 = block * BLOCK_M;
    const int last_key = min((int)info.keys, (int)info.query_offset + row0 + BLOCK_M); // exclusive
    const int tiles = (last_key + BLOCK_N - 1) / BLOCK_N;
    const int warpgroup = threadIdx.x / 128;

    if (threadIdx.x == 0) {
        barrier_init(&bars.q, 1);
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&bars.k_full[s], 1);
            barrier_init(&bars.v_full[s], 1);
            barrier_init(&bars.k_empty[s], 2);
            barrier_init(&bars.v_empty[s], 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) {
            const int kv_head = head / info.group;
            barrier_expect(&bars.q, TILE_Q);
            for (int p = 0; p < PANELS; p++) load_box(sq + p * PANEL_Q, &q_map, &bars.q, p * 64, head, row0, batch);
            for (int i = 0; i < tiles; i++) {
                const int stage = i % STAGES, key0 = (tiles - 1 - i) * BLOCK_N;
                const u32 parity = ((i / STAGES) & 1) ^ 1; // the first round finds the stages empty
                barrier_wait(&bars.k_empty[stage], parity);
                barrier_expect(&bars.k_full[stage], TILE_KV);
                for (int p = 0; p < PANELS; p++)
                    load_box(sk + stage * TILE_KV + p * PANEL_KV, &k_map, &bars.k_full[stage], p * 64, key0, kv_head, batch);
                barrier_wait(&bars.v_empty[stage], parity);
                barrier_expect(&bars.v_full[stage], TILE_KV);
                for (int p = 0; p < PANELS; p++)
                    load_box(sv + stage * TILE_KV + p * PANEL_KV, &v_map, &bars.v_full[stage], p * 64, key0, kv_head, batch);
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int part = warpgroup - 1;
    const int lane = threadIdx.x % 32, warp = (threadIdx.x % 128) / 32;
    const int row = row0 + part * 64 + warp * 16 + lane / 4; // and row + 8
    const int position = (int)info.query_offset + row;
    const bool leader = threadIdx.x % 128 == 0;
    const u32 q_address = smem_address(sq) + part * 64 * 128;
    const u32 k_address = smem_address(sk), v_address = smem_address(sv);
    const float scale = info.scale_log2;

    float o[ACCS][ACC_N / 2];
#pragma unroll
    for (int a = 0; a < ACCS; a++)
#pragma unroll
        for (int i = 0; i < ACC_N / 2; i++) o[a][i] = 0.f;
    float top[2] = {NO_SCORE, NO_SCORE}, sum[2] = {0.f, 0.f}, correction[2];
    float s[BLOCK_N / 2];
    u32 p[BLOCK_N / 16][4];

    auto scores = [&](int stage) {
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
            for (int step = 0; step < 4; step++)
                wgmma_ss(s, swizzled_descriptor(q_address + panel * PANEL_Q + step * 32, 0),
                         swizzled_descriptor(k_address + stage * TILE_KV + panel * PANEL_KV + step * 32, 0),
                         panel + step > 0);
    };
    auto values = [&](int stage) {
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; step++)
#pragma unroll
            for (int a = 0; a < ACCS; a++)
                wgmma_rs(o[a], p[step],
                         swizzled_descriptor(v_address + stage * TILE_KV + a * (ACC_N / 64) * PANEL_KV + step * 2048, PANEL_KV));
    };
    // Masks and exponentiates s in place, updates the running maximum and sum.
    auto softmax = [&](int key0) {
        if (key0 + BLOCK_N > last_key || key0 + BLOCK_N - 1 > (int)info.query_offset + row0 + part * 64) {
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; i++) {
                const int key = key0 + (i / 4) * 8 + (lane % 4) * 2 + i % 2;
                if (key > position + ((i / 2) % 2) * 8 || key >= (int)info.keys) s[i] = NO_SCORE;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float m = top[r];
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; i++)
                if ((i / 2) % 2 == r) m = fmaxf(m, s[i]);
            m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
            const float shift = m == NO_SCORE ? 0.f : m * scale; // a row without any key yet
            correction[r] = exp2_approx(top[r] * scale - shift);
            top[r] = m;
            float l = 0.f;
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; i++)
                if ((i / 2) % 2 == r) {
                    s[i] = exp2_approx(fmaf(s[i], scale, -shift));
                    l += s[i];
                }
            sum[r] = sum[r] * correction[r] + l;
        }
    };
    auto pack = [&]() {
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) PACK_VALUES(p[step][i], s[step * 8 + 2 * i], s[step * 8 + 2 * i + 1]);
    };

    barrier_wait(&bars.q, 0);
    barrier_wait(&bars.k_full[0], 0);
    wgmma_fence();
    scores(0);
    wgmma_commit();
    wgmma_wait<0>();
    if (leader) barrier_arrive(&bars.k_empty[0]);
    softmax((tiles - 1) * BLOCK_N);
    pack();
    for (int i = 0; i + 1 < tiles; i++) {
        const int here = i % STAGES, next = (i + 1) % STAGES;
        barrier_wait(&bars.k_full[next], ((i + 1) / STAGES) & 1);
        wgmma_fence();
        scores(next);
        wgmma_commit();
        barrier_wait(&bars.v_full[here], (i / STAGES) & 1);
        values(here);
        wgmma_commit();
        wgmma_wait<1>();
        if (leader) barrier_arrive(&bars.k_empty[next]);
        softmax((tiles - 2 - i) * BLOCK_N);
        wgmma_wait<0>();
        if (leader) barrier_arrive(&bars.v_empty[here]);
#pragma unroll
        for (int a = 0; a < ACCS; a++)
#pragma unroll
            for (int j = 0; j < ACC_N / 2; j++) o[a][j] *= correction[(j / 2) % 2];
        pack();
    }
    {
        const int here = (tiles - 1) % STAGES;
        barrier_wait(&bars.v_full[here], ((tiles - 1) / STAGES) & 1);
        wgmma_fence();
        values(here);
        wgmma_commit();
        wgmma_wait<0>();
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(0xffffffff, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xffffffff, sum[r], 2);
        if (row + r * 8 < (int)info.queries) {
            const float inverse = 1.f / sum[r];
            u32 *dst = (u32 *)(out + (((u64)batch * info.queries + row + r * 8) * info.heads + head) * HEAD_DIM);
#pragma unroll
            for (int a = 0; a < ACCS; a++)
#pragma unroll
                for (int j = 0; j < ACC_N / 8; j++)
                    dst[a * (ACC_N / 2) + j * 4 + lane % 4] =
                        pack_bf16(o[a][j * 4 + r * 2] * inverse, o[a][j * 4 + r * 2 + 1] * inverse);
        }
    }
}
