// norm_cast_transpose: LayerNorm or RMSNorm, cast to FP8 from fp32, with the transposed copy and the amax.
//
//     y         as in norm.cu, fp32, not rounded further
//     q[r, c]   = satfinite_rne(y[r, c] * scale[0])         NaN -> 0x7F
//     q_t[c, r] = q[r, c]; 0x00 for rows <= r < ceil16(rows)
//     scale_inv = 1 / scale[0]                              IEEE division
//     amax[0]   = max(amax[0], max |y|)                     y not scaled, NaN ignored; skipped if amax is null
//
// x [rows, hidden] of type WIDE; hidden a multiple of 16, at most 1024 * ROW_WARPS; q [rows, hidden], q_t
// [hidden, ceil16(rows)] FP8; mean, rstd fp32 [rows].
//
// Bound by memory: 4 bytes an element in bf16. A block takes TILE_ROWS rows: 32, a sector (32 bytes) of every row of
// q_t, or 16 where shared memory does not hold more. ROW_WARPS warps hold one row in registers, as in norm.cu, write
// its codes to q and to shared memory, and have their next row on the way meanwhile. Then threads take 16 rows by 4
// columns of codes, transpose them in registers and write 16 bytes of 4 rows of q_t; lanes 2 k and 2 k + 1 fill a
// sector. Blocks are persistent, so that the loads of the next tile fly during that.
#include "norm_row.cuh"
#include "quantize.cuh"
#include "transpose.cuh"

constexpr int THREADS = 32 * TILE_WARPS;
constexpr int AT_ONCE = TILE_WARPS / ROW_WARPS;  // rows in registers
constexpr int RUN = 16;
constexpr int RUNS = TILE_ROWS / RUN;
constexpr int SKEW = 64;  // bytes between the two runs of rows: lanes of both read other banks

extern __shared__ __align__(16) unsigned char codes[];  // [RUNS][16 rows][hidden], SKEW bytes between; gamma and beta

// The 16 rows by 4 columns of a thread to q_t.
__device__ __forceinline__ void store_transposed(unsigned char* q_t, size_t stride, int tile, int hidden, int rows) {
    const int groups = hidden / 4;
    const int padded = (rows + 15) / 16 * 16;
    for (int unit = threadIdx.x; unit < RUNS * groups; unit += THREADS) {
        const int run = unit % RUNS, group = unit / RUNS;
        const int row = tile * TILE_ROWS + run * RUN;
        if (row >= padded) continue;
        const unsigned char* from = codes + run * (RUN * hidden + SKEW) + 4 * group;
        unsigned columns[4][4];  // [four rows][column]
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            unsigned word[4];
#pragma unroll
            for (int r = 0; r < 4; ++r)
                word[r] = *reinterpret_cast<const unsigned*>(from + (4 * g + r) * hidden);
            transpose4(word[0], word[1], word[2], word[3], columns[g]);
        }
        unsigned char* to = q_t + static_cast<size_t>(4 * group) * stride + row;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<uint4*>(to + i * stride) =
                make_uint4(columns[0][i], columns[1][i], columns[2][i], columns[3][i]);
    }
}

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void norm_cast_transpose(
    const wide_t* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
    const float* __restrict__ scale_slot, float* amax_slot, unsigned char* __restrict__ q,
    unsigned char* __restrict__ q_t, float* __restrict__ scale_inv, float* __restrict__ mean,
    float* __restrict__ rstd, int rows, int hidden, float eps, int zero_centered, int parameters) {
    __shared__ float slots[AT_ONCE][2][ROW_WARPS];
    const float scale = *scale_slot;
    float* const affine = reinterpret_cast<float*>(codes + TILE_ROWS * hidden + SKEW);
    const int group = threadIdx.x / (32 * ROW_WARPS), part = threadIdx.x / 32 % ROW_WARPS;
    const int first = part * STRIPE * STRIPES + threadIdx.x % 32 * 8;
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const size_t stride = (static_cast<size_t>(rows) + 15) / 16 * 16;
    float amax = 0.0f;
    int turn = 0;
    const auto fetch = [&](Packed& packed, int index) {
        if (index < rows) packed.load(x + static_cast<size_t>(index) * hidden + first, hidden - first);
    };
    Packed packed, next;
    if (blockIdx.x < tiles) fetch(packed, blockIdx.x * TILE_ROWS + group);
    stage_parameters(affine, weight, bias, parameters, zero_centered != 0, hidden);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll 1
        for (int local = group; local < TILE_ROWS; local += AT_ONCE) {
            const int index = tile * TILE_ROWS + local;
            const bool last = local + AT_ONCE >= TILE_ROWS;
            fetch(next, last ? (tile + gridDim.x) * TILE_ROWS + group : index + AT_ONCE);
            unsigned char* const staged = codes + local * hidden + (local >= RUN ? SKEW : 0);
            // The same for all warps of a row; the rows beyond the end are zero codes.
            if (index < rows) {
                Values row(packed);
                const Statistics s =
                    center<ROW_WARPS>(row, hidden - first, hidden, eps, slots[group], turn, group + 1);
                if (first == 0) {
                    if (KIND == 0) mean[index] = s.mean;
                    rstd[index] = s.rstd;
                }
                unsigned char* const target = q + static_cast<size_t>(index) * hidden;
                for_each_output(row, s.rstd, affine, bias != nullptr, first, hidden, [&](int at, const float(&y)[8]) {
#pragma unroll
                    for (int j = 0; j < 8; ++j) amax = amax_of(amax, y[j]);
                    const uint2 words = make_uint2(
                        quantize2(y[0], y[1], scale) | quantize2(y[2], y[3], scale) << 16,
                        quantize2(y[4], y[5], scale) | quantize2(y[6], y[7], scale) << 16);
                    *reinterpret_cast<uint2*>(target + at) = words;
                    *reinterpret_cast<uint2*>(staged + at) = words;
                });
            } else {
#pragma unroll
                for (int i = 0; i < STRIPES; ++i)
                    if (first + STRIPE * i < hidden)
                        *reinterpret_cast<uint2*>(staged + first + STRIPE * i) = make_uint2(0, 0);
            }
            packed = next;
        }
        __syncthreads();
        store_transposed(q_t, stride, tile, hidden, rows);
        __syncthreads();
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
    if (amax_slot != nullptr) commit_amax<TILE_WARPS>(amax, amax_slot);
}
