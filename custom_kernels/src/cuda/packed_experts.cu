// Routed experts in packed records, multiplied in exact integers, as ops/packed_experts says:
//
// encode_rows      sorted rows of x -> integers
// expert_product   integers times a matrix of their own expert, all experts in one launch -> bfloat16
// activate_rows    SiLU(gate) * up, bfloat16 -> integers
// combine          outputs by weight in the order of the ranks, then the shared expert -> y
//
// A record's unit of 16 rows by 16 columns is the A operand of one `mma.m16n8k16` on bytes: lane (g, t) finds columns
// 4t..4t+3 of row g in the low nibbles of word 8t + g and those of row g + 8 in the high ones.
//
// Integers of a row come in chunks of 64 columns. With DIGITS 3 (16-bit activations) a chunk has the three digits to base
// 256 of each block of 16 columns, each between -128 and 127; with DIGITS 1 (4-bit ones) its four blocks, then their scales.
//
// Rows are sorted by expert; a tile is up to TILE_ROWS rows of one expert. DIGITS is defined in front of this text.

constexpr u32 ALL = 0xffffffffu;
constexpr int TILE_ROWS = 64, CHUNK = 64, BLOCKS = CHUNK / 16, UNIT_BYTES = 144;
constexpr int CHUNK_BYTES = DIGITS == 3 ? 192 : 80;
constexpr int ROW_BYTES = DIGITS == 3 ? 208 : 80; // in shared memory: eight rows fall on different banks
constexpr int WARPS = 8, STAGES = 3;
constexpr int STAGE_BYTES = TILE_ROWS * ROW_BYTES + WARPS * BLOCKS * UNIT_BYTES;
constexpr int GUARD_BITS = 13, NOT_FINITE = 255;

struct Tile {
    u32 expert, first, count, pad;
};

__device__ __forceinline__ float as_float(u32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ u32 as_word(float x) {
    return isnan(x) ? 0x7fc0u : (u32)__bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// e^x and SiLU as a fixed sequence of float32 operations.
__device__ float canonical_exp(float x) {
    if (x > 88.72283935546875f) return __uint_as_float(0x7f800000u);
    if (x < -103.97208404541015625f) return 0.f;
    const float n = __fsub_rn(__fadd_rn(__fmul_rn(x, 1.44269502162933349609375f), 12582912.f), 12582912.f);
    const float r = __fmaf_rn(-n, 1.428606765330187045e-06f, __fmaf_rn(-n, 0.693145751953125f, x));
    float p = 1.f / 5040.f;
    p = __fmaf_rn(p, r, 1.f / 720.f);
    p = __fmaf_rn(p, r, 1.f / 120.f);
    p = __fmaf_rn(p, r, 1.f / 24.f);
    p = __fmaf_rn(p, r, 1.f / 6.f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, r, 1.f);
    p = __fmaf_rn(p, r, 1.f);
    const int whole = (int)n, half = whole / 2;
    p = __fmul_rn(p, __int_as_float((half + 127) << 23));
    return __fmul_rn(p, __int_as_float((whole - half + 127) << 23));
}
__device__ float canonical_silu(float x) {
    if (x >= 0.f) return __fdiv_rn(x, __fadd_rn(1.f, canonical_exp(-x)));
    const float e = canonical_exp(x);
    return __fdiv_rn(__fmul_rn(x, e), __fadd_rn(1.f, e));
}

// Word of `x >= 0` in E4M3FN, saturating.
__device__ u32 e4m3_word(float x) {
    if (x >= 448.f) return 0x7e;
    if (x < 0.015625f) return (u32)__float2int_rn(__fmul_rn(x, 512.f));
    const u32 bits = __float_as_uint(x);
    return ((bits + 0x7ffffu + ((bits >> 20) & 1)) >> 20) - (120u << 3);
}
// 512 times the value of a word without sign.
__device__ __forceinline__ int scaled_512(u32 word) {
    const u32 exponent = word >> 3, fraction = word & 7;
    return exponent == 0 ? fraction : (8 + fraction) << (exponent - 1);
}
// Twice the nearest E2M1 value, ties to the even code.
__device__ int doubled_e2m1(float x) {
    const float size = fabsf(x);
    const int value = size > 5.f      ? 12
                      : size >= 3.5f  ? 8
                      : size > 2.5f   ? 6
                      : size >= 1.75f ? 4
                      : size > 1.25f  ? 3
                      : size >= 0.75f ? 2
                      : size > 0.25f  ? 1
                                      : 0;
    return x < 0.f ? -value : value;
}

// A bfloat16 against the largest exponent of its row, ties to even.
__device__ int aligned(u32 word, int emax) {
    const int field = word >> 7 & 0xff, fraction = word & 0x7f;
    const int value = (field == 0 ? fraction : 128 | fraction) << GUARD_BITS, shift = emax - max(field, 1);
    if (shift >= 24) return 0;
    const int low = value >> shift, rest = value & ((1 << shift) - 1), half = (1 << shift) / 2;
    const int x = low + (shift > 0 && (rest > half || (rest == half && (low & 1))));
    return word >> 15 ? -x : x;
}

// Writes the integers of one row; `load(block, words)` gives the 16 words of a block. A warp per row.
template <typename Load>
__device__ void encode(Load load, u32 blocks, float scale, unsigned char *__restrict__ out, int *__restrict__ emax_out) {
    const u32 lane = threadIdx.x % 32;
    int emax = 1;
    for (u32 block = lane; block < blocks; block += 32) {
        u32 words[16];
        load(block, words);
#pragma unroll
        for (int i = 0; i < 16; i++) emax = max(emax, (int)(words[i] >> 7 & 0xff));
    }
    emax = __reduce_max_sync(ALL, emax);
    if (lane == 0) *emax_out = emax;
    const u32 whole = (blocks + BLOCKS - 1) / BLOCKS * BLOCKS;
    for (u32 block = lane; block < whole; block += 32) {
        u32 words[16] = {};
        if (block < blocks && emax != NOT_FINITE) load(block, words);
        unsigned char *chunk = out + (u64)(block / BLOCKS) * CHUNK_BYTES;
        u32 digits[DIGITS][4] = {};
        if (DIGITS == 3) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                int x = aligned(words[i], emax);
#pragma unroll
                for (int d = 0; d < DIGITS; d++) {
                    const int digit = (int)(signed char)(x & 0xff);
                    digits[d][i / 4] |= (u32)(digit & 0xff) << (i % 4 * 8);
                    x = (x - digit) / 256;
                }
            }
        } else {
            float amax = 0.f;
#pragma unroll
            for (int i = 0; i < 16; i++) amax = fmaxf(amax, fabsf(as_float(words[i])));
            const u32 word = e4m3_word(__fdiv_rn(amax, __fmul_rn(6.f, scale)));
            const float d = __fmul_rn((float)scaled_512(word) / 512.f, scale);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int code = word == 0 ? 0 : doubled_e2m1(__fdiv_rn(as_float(words[i]), d));
                digits[0][i / 4] |= (u32)(code & 0xff) << (i % 4 * 8);
            }
            ((int *)(chunk + 64))[block % BLOCKS] = scaled_512(word);
        }
#pragma unroll
        for (int d = 0; d < DIGITS; d++)
            ((uint4 *)chunk)[block % BLOCKS * DIGITS + d] =
                make_uint4(digits[d][0], digits[d][1], digits[d][2], digits[d][3]);
    }
}

__device__ __forceinline__ void split(uint4 v, u32 *words) {
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        words[2 * i] = pairs[i] & 0xffff;
        words[2 * i + 1] = pairs[i] >> 16;
    }
}

struct EncodeInfo {
    u32 blocks, top_k;
};

// x [rows, 16 blocks]: sorted row r is row order[r] / top_k. `scales` are [experts, 3], at the inputs of gate, up, down.
extern "C" __global__ void __launch_bounds__(256)
    encode_rows(const uint4 *__restrict__ x, const u32 *__restrict__ order, const Tile *__restrict__ tiles,
                const float *__restrict__ scales, unsigned char *__restrict__ out, int *__restrict__ emax,
                const __grid_constant__ EncodeInfo info) {
    const Tile tile = tiles[blockIdx.y];
    const u32 at = blockIdx.x * 8 + threadIdx.x / 32;
    if (at >= tile.count) return;
    const u32 row = tile.first + at;
    const uint4 *from = x + (u64)(order[row] / info.top_k) * info.blocks * 2;
    auto load = [&](u32 block, u32 *words) {
        split(from[2 * block], words);
        split(from[2 * block + 1], words + 8);
    };
    const u64 width = (u64)((info.blocks + BLOCKS - 1) / BLOCKS) * CHUNK_BYTES;
    encode(load, info.blocks, scales[3 * tile.expert], out + row * width, emax + row);
}

// gate_up [rows, 16 blocks, 2]: gate and up side by side.
extern "C" __global__ void __launch_bounds__(256)
    activate_rows(const uint4 *__restrict__ gate_up, const Tile *__restrict__ tiles, const float *__restrict__ scales,
                  unsigned char *__restrict__ out, int *__restrict__ emax, const __grid_constant__ EncodeInfo info) {
    const Tile tile = tiles[blockIdx.y];
    const u32 at = blockIdx.x * 8 + threadIdx.x / 32;
    if (at >= tile.count) return;
    const u32 row = tile.first + at;
    const uint4 *from = gate_up + (u64)row * info.blocks * 4;
    auto load = [&](u32 block, u32 *words) {
        u32 pairs[32];
#pragma unroll
        for (int i = 0; i < 4; i++) split(from[4 * block + i], pairs + 8 * i);
#pragma unroll
        for (int i = 0; i < 16; i++)
            words[i] = as_word(__fmul_rn(canonical_silu(as_float(pairs[2 * i])), as_float(pairs[2 * i + 1])));
    };
    const u64 width = (u64)((info.blocks + BLOCKS - 1) / BLOCKS) * CHUNK_BYTES;
    encode(load, info.blocks, scales[3 * tile.expert + 2], out + row * width, emax + row);
}

__device__ __forceinline__ u32 permute(u32 low, u32 high, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
    return r;
}
// Four codes in the low nibbles of bytes, as bytes of twice their values.
__device__ __forceinline__ u32 doubled(u32 codes) {
    const u32 selector = permute(codes | codes >> 4, 0, 0x4420) & 0x7777;
    const u32 negative = permute(codes << 4, 0, 0xba98); // 0xff where bit 3 is set
    const u32 plus = permute(0x03020100, 0x0c080604, selector), minus = permute(0xfdfeff00, 0xf4f8fafc, selector);
    return (plus & ~negative) | (minus & negative);
}
// c[16, 8] = a[16, 16] b[16, 8] + c
__device__ __forceinline__ void multiply_bytes(int (&c)[4], u32 a0, u32 a1, u32 b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0), "r"(a1), "r"(b));
}

// `stride` is from record to record, `offset` the matrix's place in one, in bytes; the factors of its even and odd rows are
// those of the matrices `even` and `odd` of an expert. With `scatter` the output of sorted row r is row order[r].
struct ProductInfo {
    u64 stride, offset;
    u32 blocks, groups, even, odd, scatter, pad;
};

// Output rows 16 groups of tile y by matrix rows of group block x: out [rows, 16 groups].
extern "C" __global__ void __launch_bounds__(256, 2)
    expert_product(const unsigned char *__restrict__ records, const unsigned char *__restrict__ rows,
                   const int *__restrict__ emax, const u32 *__restrict__ order, const Tile *__restrict__ tiles,
                   const float *__restrict__ factors, bf16 *__restrict__ out, const __grid_constant__ ProductInfo info) {
    extern __shared__ __align__(128) unsigned char raw[];
    const Tile tile = tiles[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 group = blockIdx.x * WARPS + warp;
    const int chunks = (info.blocks + BLOCKS - 1) / BLOCKS;
    const unsigned char *units =
        records + tile.expert * info.stride + info.offset + (u64)group * info.blocks * UNIT_BYTES;
    const unsigned char *activations = rows + (u64)tile.first * chunks * CHUNK_BYTES;

    auto fetch = [&](int chunk) {
        if (chunk < chunks) {
            unsigned char *stage = raw + chunk % STAGES * STAGE_BYTES;
            constexpr int PIECES = CHUNK_BYTES / 16;
            for (int i = threadIdx.x; i < TILE_ROWS * PIECES; i += 256) {
                const int row = i / PIECES, piece = i % PIECES;
                const bool valid = row < tile.count;
                const u64 from = (u64)(valid ? row : 0) * chunks + chunk;
                copy16(smem_address(stage + row * ROW_BYTES + piece * 16), activations + from * CHUNK_BYTES + piece * 16,
                       valid);
            }
            const int present = min((int)info.blocks - chunk * BLOCKS, BLOCKS) * UNIT_BYTES / 16;
            unsigned char *own = stage + TILE_ROWS * ROW_BYTES + warp * BLOCKS * UNIT_BYTES;
            if (group < info.groups)
                for (int i = lane; i < present; i += 32)
                    copy16(smem_address(own + i * 16), units + (u64)chunk * BLOCKS * UNIT_BYTES + i * 16, true);
        }
        copy_commit();
    };

    long long sums[TILE_ROWS / 8][4] = {};
    for (int chunk = 0; chunk < STAGES - 1; chunk++) fetch(chunk);
    for (int chunk = 0; chunk < chunks; chunk++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        fetch(chunk + STAGES - 1);
        const unsigned char *stage = raw + chunk % STAGES * STAGE_BYTES;
        const unsigned char *own = stage + TILE_ROWS * ROW_BYTES + warp * BLOCKS * UNIT_BYTES;
        const int present = group < info.groups ? min((int)info.blocks - chunk * BLOCKS, BLOCKS) : 0;
        for (int block = 0; block < present; block++) {
            const unsigned char *unit = own + block * UNIT_BYTES;
            const u32 codes = *(const u32 *)(unit + 32 * t + 4 * g);
            const u32 low = doubled(codes & 0x0f0f0f0f), high = doubled(codes >> 4 & 0x0f0f0f0f);
            const int low_scale = scaled_512(unit[128 + g]), high_scale = scaled_512(unit[136 + g]);
#pragma unroll
            for (int n = 0; n < TILE_ROWS / 8; n++) {
                const unsigned char *row = stage + (n * 8 + g) * ROW_BYTES + block * DIGITS * 16 + 4 * t;
                int c[4] = {};
#pragma unroll
                for (int d = DIGITS - 1; d >= 0; d--) {
                    multiply_bytes(c, low, high, *(const u32 *)(row + d * 16));
                    if (d > 0) {
#pragma unroll
                        for (int i = 0; i < 4; i++) c[i] <<= 8;
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int scale = i < 2 ? low_scale : high_scale;
                    if (DIGITS == 3) {
                        sums[n][i] += (long long)c[i] * scale;
                    } else {
                        const unsigned char *own_row = stage + (n * 8 + 2 * t + i % 2) * ROW_BYTES;
                        sums[n][i] += (long long)(c[i] * scale) * ((const int *)(own_row + 64))[block];
                    }
                }
            }
        }
    }
    if (group >= info.groups) return;

    const u64 width = 16ull * info.groups;
    const float factor = factors[3 * tile.expert + (g % 2 ? info.odd : info.even)];
#pragma unroll
    for (int n = 0; n < TILE_ROWS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 at = n * 8 + 2 * t + i % 2;
            if (at >= tile.count) continue;
            const u32 row = tile.first + at;
            const int largest = emax[row], exponent = DIGITS == 3 ? largest - 144 - GUARD_BITS : -20;
            // Both products are exact in f64, so that one rounding to float32 is left.
            const double power = __hiloint2double((1023 + exponent) << 20, 0);
            const float y = (float)((double)__ll2float_rn(sums[n][i]) * power * (double)factor);
            const u32 word = largest == NOT_FINITE ? 0x7fc0u : as_word(y);
            const u64 to = info.scatter ? order[row] : row;
            out[to * width + group * 16 + g + (i < 2 ? 0 : 8)] = __ushort_as_bfloat16((unsigned short)word);
        }
}

struct CombineInfo {
    u32 rows, vectors, top_k, pad;
};

// y [rows, 8 vectors]: outputs [rows, top_k, 8 vectors] by weight, then the shared expert by the sigmoid of its score.
extern "C" __global__ void __launch_bounds__(256)
    combine(const uint4 *__restrict__ outputs, const float *__restrict__ weights, const uint4 *__restrict__ shared,
            const float *__restrict__ scores, uint4 *__restrict__ y, const __grid_constant__ CombineInfo info) {
    const u64 row = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= info.rows) return;
    const float open = __fdiv_rn(1.f, __fadd_rn(1.f, expf(-scores[row])));
    for (u32 i = threadIdx.x % 32; i < info.vectors; i += 32) {
        float sum[8] = {};
        u32 words[8];
        for (u32 rank = 0; rank <= info.top_k; rank++) {
            const bool last = rank == info.top_k;
            split(last ? shared[row * info.vectors + i] : outputs[(row * info.top_k + rank) * info.vectors + i], words);
            const float weight = last ? open : weights[row * info.top_k + rank];
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] = __fadd_rn(sum[j], __fmul_rn(weight, as_float(words[j])));
        }
        y[row * info.vectors + i] = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                                               pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
    }
}
