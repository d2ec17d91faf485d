// out[m, n] = x[m, k] w[n, k]^T for a few outputs and rows in float32, on tensor cores without rounding the rows to bf16:
//
//     x = high + low + e,  high = bf16(x),  low = bf16(x - high),  |e| <= 2^-17 |x|
//
// Both terms meet the bf16 weight in the same float32 accumulator. The kernel is bound by reading x once.
//
// One block owns 64 rows, 16 per warp. Fragments of x come straight from memory, one step ahead; tiles of w pass through
// shared memory, two stages. OUTPUTS, a multiple of 16 up to 64, is defined in front of this text; k is a multiple of 64.

constexpr int STEP = 64;              // reduction length of one stage
constexpr int WROW = STEP + 8;        // padded shared row: 9 chunks of 16 bytes, no bank conflicts
constexpr int TILES = OUTPUTS / 8;

struct WideInfo {
    u32 rows, width, outputs, pad;
};

extern "C" __global__ void __launch_bounds__(128)
    project_wide_rows(const float *__restrict__ x, const bf16 *__restrict__ w, float *__restrict__ out,
                      const __grid_constant__ WideInfo info) {
    __shared__ __align__(16) bf16 sw[2][OUTPUTS * WROW];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const u64 row = (u64)blockIdx.x * 64 + warp * 16 + lane / 4; // and row + 8
    const u64 last = info.rows - 1;
    const float *x0 = x + min(row, last) * info.width + (lane % 4) * 2;
    const float *x1 = x + min(row + 8, last) * info.width + (lane % 4) * 2;
    const int stages = info.width / STEP;

    auto fetch = [&](int stage) {
        for (int i = tid; i < OUTPUTS * (STEP / 8); i += 128) {
            const int n = i / (STEP / 8), c = i % (STEP / 8);
            copy16(smem_address(&sw[stage % 2][n * WROW + c * 8]), w + (u64)min(n, (int)info.outputs - 1) * info.width + stage * STEP + c * 8,
                   n < info.outputs);
        }
        copy_commit();
    };
    float2 next[STEP / 16][4];
    auto load = [&](int stage) {
#pragma unroll
        for (int s = 0; s < STEP / 16; s++) {
            const int at = stage * STEP + s * 16;
            next[s][0] = *(const float2 *)(x0 + at);
            next[s][1] = *(const float2 *)(x1 + at);
            next[s][2] = *(const float2 *)(x0 + at + 8);
            next[s][3] = *(const float2 *)(x1 + at + 8);
        }
    };
    float c[TILES][4] = {};
    fetch(0);
    load(0);
    for (int stage = 0; stage < stages; stage++) {
        u32 high[STEP / 16][4], low[STEP / 16][4];
#pragma unroll
        for (int s = 0; s < STEP / 16; s++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                high[s][i] = pack_bf16(next[s][i].x, next[s][i].y);
                const float2 h = unpack(high[s][i]);
                low[s][i] = pack_bf16(next[s][i].x - h.x, next[s][i].y - h.y);
            }
        copy_wait<0>();
        __syncthreads();
        if (stage + 1 < stages) {
            fetch(stage + 1);
            load(stage + 1);
        }
        const u32 base = smem_address(&sw[stage % 2][((lane / 16) * 8 + lane % 8) * WROW + ((lane / 8) % 2) * 8]);
#pragma unroll
        for (int s = 0; s < STEP / 16; s++)
#pragma unroll
            for (int n = 0; n < TILES / 2; n++) {
                u32 b[4];
                ldmatrix4(b, base + n * 16 * WROW * 2 + s * 32);
                mma(c[2 * n], high[s], b[0], b[1]);
                mma(c[2 * n], low[s], b[0], b[1]);
                mma(c[2 * n + 1], high[s], b[2], b[3]);
                mma(c[2 * n + 1], low[s], b[2], b[3]);
            }
    }
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u64 r = row + (i / 2) * 8;
            const u32 column = n * 8 + (lane % 4) * 2 + i % 2;
            if (r < info.rows && column < info.outputs) out[r * info.outputs + column] = c[n][i];
        }
}
