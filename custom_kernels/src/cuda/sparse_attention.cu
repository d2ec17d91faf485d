// Attention of queries over the blocks of keys that they name, and the choice of those blocks.
//
// sparse_attention  a block of threads per query and key head: its GROUP query heads read the same keys, gathered
//                   KEYS at a time; each warp has its own 16 of them, its own maximum and sum, and all are joined at the end
// choose_blocks     a block of threads per query: scores of all complete blocks, the largest of them, of equal ones the
//                   lowest numbers
//
// DIM (a multiple of 16) and GROUP (at most 16) are defined in front of this text.

constexpr u32 ALL = 0xffffffffu;
constexpr int WARPS = 4, KEYS = 16 * WARPS, STAGES = 2;
constexpr int ROW = DIM * 2 + 16; // bytes in shared memory: rows fall on different banks
constexpr int STAGE = 2 * KEYS * ROW;

struct SparseInfo {
    u32 tokens, capacity, list, ratio, first_position, pad;
    float scale, pad2;
};

// q, out [batch, tokens, kv_heads, GROUP, DIM]; keys, values [batch, kv_heads, capacity, DIM]; lists [batch * tokens, list], of
// which the first counts[..] are block numbers. Grid: tokens, kv_heads, batch.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    sparse_attention(const bf16 *__restrict__ q, const bf16 *__restrict__ keys, const bf16 *__restrict__ values,
                     const u32 *__restrict__ lists, const u32 *__restrict__ counts, bf16 *__restrict__ out,
                     const __grid_constant__ SparseInfo info) {
    extern __shared__ __align__(128) unsigned char raw[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u64 query = (u64)blockIdx.z * info.tokens + blockIdx.x;
    const u64 head = (u64)blockIdx.z * gridDim.y + blockIdx.y;
    const bf16 *own_q = q + (query * gridDim.y + blockIdx.y) * GROUP * DIM;
    const bf16 *k = keys + head * info.capacity * DIM, *v = values + head * info.capacity * DIM;
    const u32 *list = lists + query * info.list;
    const u32 position = info.first_position + blockIdx.x;
    const u32 complete = (position + 1) / info.ratio * info.ratio;
    const u32 chosen = counts[query] * info.ratio, total = chosen + position + 1 - complete;
    auto key_of = [&](u32 at) {
        return at < chosen ? list[at / info.ratio] * info.ratio + at % info.ratio : complete + at - chosen;
    };

    u32 a[DIM / 16][4];
#pragma unroll
    for (int step = 0; step < DIM / 16; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = g + i % 2 * 8, column = step * 16 + 2 * t + i / 2 * 8;
            a[step][i] = row < GROUP ? *(const u32 *)(own_q + row * DIM + column) : 0;
        }

    const u32 steps = (total + KEYS - 1) / KEYS;
    auto fetch = [&](u32 step) {
        if (step < steps) {
            unsigned char *stage = raw + step % STAGES * STAGE;
            constexpr int PIECES = DIM / 8;
            for (int i = threadIdx.x; i < KEYS * PIECES; i += 32 * WARPS) {
                const int row = i / PIECES, piece = i % PIECES;
                const u32 at = step * KEYS + row;
                const bool valid = at < total;
                const u64 from = (u64)(valid ? key_of(at) : 0) * DIM + piece * 8;
                copy16(smem_address(stage + row * ROW + piece * 16), k + from, valid);
                copy16(smem_address(stage + (KEYS + row) * ROW + piece * 16), v + from, valid);
            }
        }
        copy_commit();
    };

    float o[DIM / 8][4] = {};
    float most[2] = {NO_SCORE, NO_SCORE}, sum[2] = {0.f, 0.f};
    fetch(0);
    for (u32 step = 0; step < steps; step++) {
        fetch(step + 1);
        copy_wait<1>();
        __syncthreads();
        const u32 stage = smem_address(raw + step % STAGES * STAGE);
        const u32 own_keys = stage + warp * 16 * ROW, own_values = own_keys + KEYS * ROW;
        float s[2][4] = {};
        const u32 k_row = own_keys + (lane / 16 * 8 + lane % 8) * ROW + lane / 8 % 2 * 16;
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
            u32 b[4];
            ldmatrix4(b, k_row + i * 32);
            mma(s[0], a[i], b[0], b[1]);
            mma(s[1], a[i], b[2], b[3]);
        }
        const u32 first = step * KEYS + warp * 16;
        float top[2] = {most[0], most[1]};
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool valid = first + n * 8 + 2 * t + i % 2 < total;
                s[n][i] = valid ? s[n][i] * info.scale : NO_SCORE;
                top[i / 2] = fmaxf(top[i / 2], s[n][i]);
            }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(ALL, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(ALL, top[r], 2));
        }
        // A warp without keys so far keeps its zeros.
        const float base[2] = {top[0] == NO_SCORE ? 0.f : top[0], top[1] == NO_SCORE ? 0.f : top[1]};
        const float shrink[2] = {exp2_approx(most[0] - base[0]), exp2_approx(most[1] - base[1])};
        const bool moved = top[0] != most[0] || top[1] != most[1];
        if (__any_sync(ALL, moved)) {
#pragma unroll
            for (int n = 0; n < DIM / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[n][i] *= shrink[i / 2];
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            most[r] = top[r];
            sum[r] *= shrink[r];
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[n][i] = exp2_approx(s[n][i] - base[i / 2]);
                sum[i / 2] += s[n][i];
            }
        const u32 p[4] = {pack_bf16(s[0][0], s[0][1]), pack_bf16(s[0][2], s[0][3]), pack_bf16(s[1][0], s[1][1]),
                          pack_bf16(s[1][2], s[1][3])};
        const u32 v_row = own_values + (lane / 8 % 2 * 8 + lane % 8) * ROW + lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
            u32 b[4];
            ldmatrix4_trans(b, v_row + i * 32);
            mma(o[2 * i], p, b[0], b[1]);
            mma(o[2 * i + 1], p, b[2], b[3]);
        }
        __syncthreads();
    }
    copy_wait<0>();
    __syncthreads();

    // Sums over the lanes of a row, then over the warps.
    float *tops = (float *)raw, *sums = tops + WARPS * 16, *outputs = sums + WARPS * 16;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(ALL, sum[r], 1);
        sum[r] += __shfl_xor_sync(ALL, sum[r], 2);
        if (t == 0) {
            tops[warp * 16 + r * 8 + g] = most[r];
            sums[warp * 16 + r * 8 + g] = sum[r];
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = r * 8 + g;
        float all = NO_SCORE, norm = 0.f;
        for (int w = 0; w < WARPS; w++) all = fmaxf(all, tops[w * 16 + row]);
        for (int w = 0; w < WARPS; w++) norm += sums[w * 16 + row] * exp2_approx(tops[w * 16 + row] - all);
        const float factor = exp2_approx(most[r] - all) / norm;
        if (row < GROUP) {
#pragma unroll
            for (int n = 0; n < DIM / 8; n++) {
                float *to = outputs + ((warp * GROUP + row) * DIM + n * 8 + 2 * t);
                to[0] = o[n][2 * r] * factor;
                to[1] = o[n][2 * r + 1] * factor;
            }
        }
    }
    __syncthreads();
    bf16 *own_out = out + (query * gridDim.y + blockIdx.y) * GROUP * DIM;
    for (int i = threadIdx.x; i < GROUP * DIM / 2; i += 32 * WARPS) {
        float low = 0.f, high = 0.f;
        for (int w = 0; w < WARPS; w++) {
            low += outputs[w * GROUP * DIM + 2 * i];
            high += outputs[w * GROUP * DIM + 2 * i + 1];
        }
        ((u32 *)own_out)[i] = pack_bf16(low, high);
    }
}

struct ChooseInfo {
    u32 tokens, blocks, heads, width, first_position, ratio, count, pad;
};

// q [batch, tokens, heads, width], keys [batch, blocks, width], float32, width a multiple of 32; out [batch * tokens, count].
// Grid: tokens, batch. Shared: the query, then a word per block.
extern "C" __global__ void __launch_bounds__(256)
    choose_blocks(const float *__restrict__ q, const float *__restrict__ keys, u32 *__restrict__ out,
                  const __grid_constant__ ChooseInfo info) {
    extern __shared__ __align__(128) unsigned char raw[];
    __shared__ u32 found[8], found_equal[8];
    float *own_q = (float *)raw;
    u32 *scores = (u32 *)(own_q + info.heads * info.width);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u64 query = (u64)blockIdx.y * info.tokens + blockIdx.x;
    for (u32 i = threadIdx.x; i < info.heads * info.width; i += 256) own_q[i] = q[query * info.heads * info.width + i];
    const u32 complete = (info.first_position + blockIdx.x + 1) / info.ratio;
    u32 *own = out + query * info.count;
    if (complete <= info.count) {
        for (u32 i = threadIdx.x; i < complete; i += 256) own[i] = i;
        return;
    }
    __syncthreads();
    const float scale = 1.f / sqrtf((float)info.width);
    for (u32 block = warp; block < complete; block += 8) {
        const float *key = keys + ((u64)blockIdx.y * info.blocks + block) * info.width;
        float score = 0.f;
        for (u32 head = 0; head < info.heads; head++) {
            float dot = 0.f;
            for (u32 i = lane; i < info.width; i += 32) dot = fmaf(own_q[head * info.width + i], key[i], dot);
#pragma unroll
            for (int i = 16; i > 0; i /= 2) dot += __shfl_xor_sync(ALL, dot, i);
            score += dot > 0.f ? dot : 0.f;
        }
        // Words of numbers that are not negative are in their order.
        if (lane == 0) scores[block] = __float_as_uint(score * scale);
    }
    __syncthreads();

    auto total = [&](u32 own_count) {
        own_count = __reduce_add_sync(ALL, own_count);
        __syncthreads();
        if (lane == 0) found[warp] = own_count;
        __syncthreads();
        u32 sum = 0;
#pragma unroll
        for (int w = 0; w < 8; w++) sum += found[w];
        return sum;
    };
    // The largest word that at least `count` scores reach.
    u32 least = 0;
    for (int bit = 30; bit >= 0; bit--) {
        const u32 tried = least | 1u << bit;
        u32 reached = 0;
        for (u32 i = threadIdx.x; i < complete; i += 256) reached += scores[i] >= tried;
        if (total(reached) >= info.count) least = tried;
    }
    const u32 span = (complete + 255) / 256, first = min(threadIdx.x * span, complete), last = min(first + span, complete);
    u32 above = 0, equal = 0;
    for (u32 i = first; i < last; i++) {
        above += scores[i] > least;
        equal += scores[i] == least;
    }
    const u32 wanted = info.count - total(above);
    u32 above_before = above, equal_before = equal; // inclusive over the warp
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(ALL, above_before, step), other_equal = __shfl_up_sync(ALL, equal_before, step);
        if (lane >= step) {
            above_before += other;
            equal_before += other_equal;
        }
    }
    __syncthreads();
    if (lane == 31) {
        found[warp] = above_before;
        found_equal[warp] = equal_before;
    }
    __syncthreads();
    above_before -= above;
    equal_before -= equal;
    for (int w = 0; w < warp; w++) {
        above_before += found[w];
        equal_before += found_equal[w];
    }
    for (u32 i = first; i < last; i++) {
        const bool is_above = scores[i] > least, is_equal = scores[i] == least;
        if (is_above || (is_equal && equal_before < wanted)) own[above_before + min(equal_before, wanted)] = i;
        above_before += is_above;
        equal_before += is_equal;
    }
}
