// Sparse mixture of experts, tokens sorted by expert on the device:
//
//     y[t] = residual[t] + (sum_e w[t, e] h_e(t) down_e^T + sigmoid(x[t] . score) shared[t])
//     h_e(t) = SiLU(x[t] gate_e^T) * (x[t] up_e^T),   e the TOP_K experts of t, added in ascending id
//
// choose_experts   logits -> ids and weights of every token
// sort_choices     ids -> where the rows of each expert begin, the choice of every sorted row, the row of every choice
// gather_rows      x -> x in sorted order
// grouped_product  sorted rows times their own expert's matrix, all experts in one launch; with GATED SiLU(gate) * up
// combine_experts  outputs, shared expert and residual -> y
//
// A choice is token * TOP_K + place. Everything between memory accesses is float32; h, the routed outputs and y are bf16.
// EXPERTS, TOP_K (at most 32) and GATED (0 or 1) are defined in front of this text.

constexpr u32 ALL = 0xffffffffu;
constexpr int TILE_M = 128, TILE_K = 64, STAGES = 4;
constexpr int BYTES_A = TILE_M * 128;   // rows of 64 elements = one 128-byte swizzle row
constexpr int BYTES_B = 256 * 128;      // two boxes of 128 rows of the weight
constexpr int OUTPUTS = GATED ? 128 : 256; // outputs of one tile: gate and up of 128, or 256

// The TOP_K largest logits of a row, of equal ones the lower id first, and the softmax over them; a warp per row. What is
// no number comes first, and makes every weight of its row none.
struct ChooseInfo {
    u32 rows, pad;
};

extern "C" __global__ void __launch_bounds__(256)
    choose_experts(const float *__restrict__ logits, int *__restrict__ ids, float *__restrict__ weights,
                   const __grid_constant__ ChooseInfo info) {
    constexpr int PER_LANE = (EXPERTS + 31) / 32;
    const u64 row = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= info.rows) return;
    // Unsigned numbers in the order of the logits; 0 is below all of them.
    u32 keys[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int id = i * 32 + lane;
        keys[i] = 0;
        if (id < EXPERTS) {
            const float logit = logits[row * EXPERTS + id] + 0.f; // one zero
            const u32 bits = __float_as_uint(logit);
            keys[i] = isnan(logit) ? ALL : bits ^ ((bits >> 31) ? ALL : 0x80000000u);
        }
    }
    u32 chosen = 0, chosen_key = 0;
    for (int place = 0; place < TOP_K; place++) {
        u32 best = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) best = max(best, keys[i]);
        best = __reduce_max_sync(ALL, best);
        u32 id = ALL;
#pragma unroll
        for (int i = PER_LANE - 1; i >= 0; i--)
            if (keys[i] == best) id = i * 32 + lane;
        id = __reduce_min_sync(ALL, id);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (i * 32 + lane == id) keys[i] = 0;
        if (lane == place) {
            chosen = id;
            chosen_key = best;
        }
    }
    const float logit =
        chosen_key == ALL ? __uint_as_float(0x7fc00000u)
                          : __uint_as_float(chosen_key ^ ((chosen_key >> 31) ? 0x80000000u : ALL));
    const float largest = __shfl_sync(ALL, logit, 0);
    const float weight = lane < TOP_K ? expf(logit - largest) : 0.f;
    float sum = weight;
#pragma unroll
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(ALL, sum, i);
    if (lane < TOP_K) {
        ids[row * TOP_K + lane] = chosen;
        weights[row * TOP_K + lane] = weight / sum;
    }
}

// One block per expert; each thread owns a span of choices, so that rows keep the order of their choices.
struct SortInfo {
    u32 choices, pad;
};

extern "C" __global__ void __launch_bounds__(1024)
    sort_choices(const int *__restrict__ ids, u32 *__restrict__ offsets, u32 *__restrict__ order,
                 u32 *__restrict__ position, const __grid_constant__ SortInfo info) {
    __shared__ u32 warp_equal[32], warp_less[32];
    const int expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 span = ((info.choices + 1023) / 1024 + 3) / 4 * 4; // whole vectors of four
    const u32 first = min(threadIdx.x * span, info.choices), last = min(first + span, info.choices);
    u32 less = 0, equal = 0;
    u32 i = first;
    for (; i + 4 <= last; i += 4) {
        const int4 id = *(const int4 *)(ids + i);
        less += (id.x < expert) + (id.y < expert) + (id.z < expert) + (id.w < expert);
        equal += (id.x == expert) + (id.y == expert) + (id.z == expert) + (id.w == expert);
    }
    for (; i < last; i++) {
        less += ids[i] < expert;
        equal += ids[i] == expert;
    }
    u32 before = equal; // inclusive over the warp
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(ALL, before, step);
        if (lane >= step) before += other;
    }
    less = __reduce_add_sync(ALL, less);
    if (lane == 31) warp_equal[warp] = before;
    if (lane == 0) warp_less[warp] = less;
    __syncthreads();
    u32 at = before - equal;
    for (int w = 0; w < 32; w++) {
        at += warp_less[w];
        if (w < warp) at += warp_equal[w];
    }
    // The first thread of the block has nothing before it but the lower experts.
    if (threadIdx.x == 0) offsets[expert] = at;
    if (threadIdx.x == 0 && expert == EXPERTS - 1) offsets[EXPERTS] = info.choices;
    if (equal == 0) return;
    for (i = first; i < last; i++)
        if (ids[i] == expert) {
            order[at] = i;
            position[i] = at++;
        }
}

// A warp per sorted row; rows are whole vectors of eight.
struct GatherInfo {
    u32 choices, vectors;
};

extern "C" __global__ void __launch_bounds__(256)
    gather_rows(const uint4 *__restrict__ x, const u32 *__restrict__ order, uint4 *__restrict__ out,
                const __grid_constant__ GatherInfo info) {
    const u64 row = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= info.choices) return;
    const uint4 *from = x + (u64)(order[row] / TOP_K) * info.vectors;
    uint4 *to = out + row * info.vectors;
    for (u32 i = threadIdx.x % 32; i < info.vectors; i += 32) to[i] = from[i];
}

// d[64, 256] += a[64, 16] b[16, 256], both operands in shared memory with the reduction axis contiguous.
__device__ __forceinline__ void wgmma_ss(float (&d)[128], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, 0, 0;\n}\n"
        : ACC8(d, 0), ACC8(d, 8), ACC8(d, 16), ACC8(d, 24), ACC8(d, 32), ACC8(d, 40), ACC8(d, 48), ACC8(d, 56),
          ACC8(d, 64), ACC8(d, 72), ACC8(d, 80), ACC8(d, 88), ACC8(d, 96), ACC8(d, 104), ACC8(d, 112), ACC8(d, 120)
        : "l"(a), "l"(b), "r"(accumulate));
}

// Rows [offsets[e], offsets[e + 1]) of the sorted rows [choices, width] times matrix e of the stack [EXPERTS * matrix_rows,
// width]: out[r, n] = a[r] . w_e[n], or SiLU(a[r] . w_e[n]) * (a[r] . w_e[outputs + n]) when GATED.
//
// Blocks stay and take tiles in turn: TILE_M rows of one expert by OUTPUTS outputs, the tiles of the same rows one after the
// other. Warpgroup 0 is the producer: one thread keeps STAGES steps of TILE_K in flight through the bulk copy engine, across
// tiles. Warpgroups 1 and 2 own 64 rows each. A tile that reaches beyond its expert's rows or matrix multiplies what lies
// there, or the zeros of the copy engine beyond the end, and does not write it.
struct GroupedInfo {
    u32 outputs, width, matrix_rows, pad;
};

struct Stages {
    u64 full[STAGES], empty[STAGES];
};

extern "C" __global__ void __launch_bounds__(384, 1)
    grouped_product(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap w_map, const bf16 *,
                    const bf16 *, const u32 *__restrict__ offsets, bf16 *__restrict__ out,
                    const __grid_constant__ GroupedInfo info) {
    extern __shared__ unsigned char raw[];
    unsigned char *sa = (unsigned char *)(((u64)raw + 1023) & ~1023ull);
    unsigned char *sb = sa + STAGES * BYTES_A;
    __shared__ Stages bars;
    __shared__ u32 first_row[EXPERTS + 1], first_tile[EXPERTS + 1]; // tiles of rows before each expert
    const int warpgroup = threadIdx.x / 128;

    for (int e = threadIdx.x; e <= EXPERTS; e += 384) first_row[e] = offsets[e];
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&bars.full[s], 1);
            barrier_init(&bars.empty[s], 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        u32 total = 0;
        for (int e = 0; e < EXPERTS; e += 32) {
            const u32 count = e + lane < EXPERTS ? first_row[e + lane + 1] - first_row[e + lane] : 0;
            const u32 tiles = (count + TILE_M - 1) / TILE_M;
            u32 before = tiles;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const u32 other = __shfl_up_sync(ALL, before, step);
                if (lane >= step) before += other;
            }
            if (e + lane < EXPERTS) first_tile[e + lane] = total + before - tiles;
            total += __shfl_sync(ALL, before, 31);
        }
        if (lane == 0) first_tile[EXPERTS] = total;
    }
    __syncthreads();

    const u32 columns = (info.outputs + OUTPUTS - 1) / OUTPUTS;
    const u32 tiles = first_tile[EXPERTS] * columns;
    const int steps = (info.width + TILE_K - 1) / TILE_K;
    int expert = 0;
    u32 step = 0; // of all tiles
    // Tiles come in ascending order, so experts do.
    auto find = [&](u32 tile) {
        while (first_tile[expert + 1] <= tile / columns) expert++;
        return first_row[expert] + (tile / columns - first_tile[expert]) * TILE_M;
    };

    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                const int row = find(tile);
                const int n0 = tile % columns * OUTPUTS;
                const int w0 = expert * info.matrix_rows + n0;
                const int w1 = w0 + (GATED ? info.outputs : 128);
                for (int k = 0; k < steps; k++, step++) {
                    const int stage = step % STAGES;
                    // The first round finds the stages empty.
                    barrier_wait(&bars.empty[stage], ((step / STAGES) & 1) ^ 1);
                    barrier_expect(&bars.full[stage], BYTES_A + BYTES_B);
                    load_box(sa + stage * BYTES_A, &a_map, &bars.full[stage], k * TILE_K, row, 0, 0);
                    load_box(sb + stage * BYTES_B, &w_map, &bars.full[stage], k * TILE_K, w0, 0, 0);
                    load_box(sb + stage * BYTES_B + BYTES_B / 2, &w_map, &bars.full[stage], k * TILE_K, w1, 0, 0);
                }
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int part = warpgroup - 1;
    const int lane = threadIdx.x % 32, warp = (threadIdx.x % 128) / 32;
    const bool leader = threadIdx.x % 128 == 0;
    const u32 a_address = smem_address(sa) + part * 64 * 128, b_address = smem_address(sb);
    float d[128];
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u32 row = find(tile) + part * 64 + warp * 16 + lane / 4; // and row + 8
        const u32 end = first_row[expert + 1];
        const u32 n0 = tile % columns * OUTPUTS + lane % 4 * 2;
        for (int k = 0; k < steps; k++, step++) {
            const int stage = step % STAGES;
            barrier_wait(&bars.full[stage], (step / STAGES) & 1);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < TILE_K / 16; i++)
                wgmma_ss(d, swizzled_descriptor(a_address + stage * BYTES_A + i * 32, 0),
                         swizzled_descriptor(b_address + stage * BYTES_B + i * 32, 0), k + i > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (leader && k > 0) barrier_arrive(&bars.empty[(step - 1) % STAGES]);
        }
        wgmma_wait<0>();
        if (leader) barrier_arrive(&bars.empty[(step - 1) % STAGES]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (row + r * 8 >= end) continue;
            bf16 *to = out + (u64)(row + r * 8) * info.outputs;
#pragma unroll
            for (int j = 0; j < OUTPUTS / 8; j++) {
                const u32 n = n0 + j * 8;
                float low = d[j * 4 + r * 2], high = d[j * 4 + r * 2 + 1];
                if (GATED) {
                    low = __fdividef(low, 1.f + __expf(-low)) * d[(j * 4 + r * 2 + 64) % 128];
                    high = __fdividef(high, 1.f + __expf(-high)) * d[(j * 4 + r * 2 + 65) % 128];
                }
                if (n < info.outputs) *(u32 *)(to + n) = pack_bf16(low, high);
            }
        }
    }
}

// A warp per token; rows are whole vectors of eight.
struct CombineInfo {
    u32 rows, vectors;
};

__device__ __forceinline__ void add8(float (&sum)[8], float weight, uint4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = unpack(words[i]);
        sum[2 * i] = fmaf(weight, pair.x, sum[2 * i]);
        sum[2 * i + 1] = fmaf(weight, pair.y, sum[2 * i + 1]);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    combine_experts(const uint4 *__restrict__ outputs, const u32 *__restrict__ position,
                    const float *__restrict__ weights, const float4 *__restrict__ shared, const uint4 *__restrict__ x,
                    const uint4 *__restrict__ score, const uint4 *__restrict__ residual, uint4 *__restrict__ y,
                    const __grid_constant__ CombineInfo info) {
    const u64 row = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= info.rows) return;
    // Sorted rows ascend with their experts.
    const u32 own = lane < TOP_K ? position[row * TOP_K + lane] : ALL;
    const float own_weight = lane < TOP_K ? weights[row * TOP_K + lane] : 0.f;
    int rank = 0;
#pragma unroll
    for (int j = 0; j < TOP_K; j++) rank += __shfl_sync(ALL, own, j) < own;
    u32 at[TOP_K];
    float weight[TOP_K];
#pragma unroll
    for (int j = 0; j < TOP_K; j++) {
        const int from = __ffs(__ballot_sync(ALL, lane < TOP_K && rank == j)) - 1;
        at[j] = __shfl_sync(ALL, own, from);
        weight[j] = __shfl_sync(ALL, own_weight, from);
    }
    float dot[8] = {};
    for (u32 i = lane; i < info.vectors; i += 32) {
        const uint4 a = x[row * info.vectors + i], b = score[i];
        const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 l = unpack(left[j]), r = unpack(right[j]);
            dot[2 * j] = fmaf(l.x, r.x, dot[2 * j]);
            dot[2 * j + 1] = fmaf(l.y, r.y, dot[2 * j + 1]);
        }
    }
    float open = ((dot[0] + dot[1]) + (dot[2] + dot[3])) + ((dot[4] + dot[5]) + (dot[6] + dot[7]));
#pragma unroll
    for (int i = 16; i > 0; i /= 2) open += __shfl_xor_sync(ALL, open, i);
    open = 1.f / (1.f + expf(-open));
    for (u32 i = lane; i < info.vectors; i += 32) {
        uint4 routed[TOP_K];
#pragma unroll
        for (int j = 0; j < TOP_K; j++) routed[j] = outputs[(u64)at[j] * info.vectors + i];
        const u64 here = row * info.vectors + i;
        const float4 s0 = shared[2 * here], s1 = shared[2 * here + 1];
        const uint4 r = residual[here];
        float sum[8] = {};
#pragma unroll
        for (int j = 0; j < TOP_K; j++) add8(sum, weight[j], routed[j]);
        const float own_expert[8] = {s0.x, s0.y, s0.z, s0.w, s1.x, s1.y, s1.z, s1.w};
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] = fmaf(open, own_expert[j], sum[j]);
        add8(sum, 1.f, r);
        y[here] = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
                             pack_bf16(sum[6], sum[7]));
    }
}
