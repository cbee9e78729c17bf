// norm_cast_transpose: LayerNorm or RMSNorm, cast to FP8 from fp32, with the transposed copy and the amax.
//
//     y         as in norm.cu, fp32, not rounded further
//     q[r, c]   = satfinite_rne(y[r, c] * scale[0])         NaN -> 0x7F
//     q_t[c, r] = q[r, c]; 0x00 for rows <= r < ceil16(rows)
//     scale_inv = 1 / scale[0]                              IEEE division
//     amax[0]   = max(amax[0], max |y|)                     y not scaled, NaN ignored; skipped if amax is null
//
// x [rows, hidden] of type WIDE; hidden a multiple of 16, at most 256 * STRIPES; q [rows, hidden], q_t
// [hidden, ceil16(rows)] FP8; mean, rstd fp32 [rows].
//
// Bound by memory: 4 bytes an element in bf16. A block takes 32 rows: a sector (32 bytes) of every row of q_t. A warp
// holds one row in registers, as in norm.cu, writes its codes to q and to shared memory, and loads its next row
// while others finish. Then threads take 16 rows by 4 columns of codes, transpose them in registers and write 16
// bytes of 4 rows of q_t; lanes 2 k and 2 k + 1 fill a sector. Blocks are persistent, so that the loads of the next
// 32 rows fly during that.
#include "norm_row.cuh"
#include "quantize.cuh"
#include "transpose.cuh"

constexpr int THREADS = 32 * TILE_WARPS;
constexpr int TILE_ROWS = 32;
constexpr int RUN = 16;
constexpr int SKEW = 64;  // bytes between the two runs of rows: lanes of both read other banks

extern __shared__ unsigned char codes[];  // [2][16 rows][hidden], SKEW bytes between

// The 16 rows by 4 columns of a thread to q_t.
__device__ __forceinline__ void store_transposed(unsigned char* q_t, size_t stride, int tile, int hidden, int rows) {
    const int groups = hidden / 4;
    const int padded = (rows + 15) / 16 * 16;
    for (int unit = threadIdx.x; unit < 2 * groups; unit += THREADS) {
        // Of 32 units in a row, even ones are run 0 and odd ones run 1.
        const int run = unit % 2, group = unit / 2;
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
    const float scale = *scale_slot;
    const Parameters affine = {weight, bias, zero_centered != 0};
    const int warp = threadIdx.x / 32;
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const size_t stride = (static_cast<size_t>(rows) + 15) / 16 * 16;
    float amax = 0.0f;
    const auto fetch = [&](Row<STRIPES>& row, int index) {
        if (index < rows) row.load(x + static_cast<size_t>(index) * hidden, hidden);
    };
    Row<STRIPES> row;
    if (blockIdx.x < tiles) fetch(row, blockIdx.x * TILE_ROWS + warp);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll 1
        for (int local = warp; local < TILE_ROWS; local += TILE_WARPS) {
            const int index = tile * TILE_ROWS + local;
            unsigned char* staged = codes + local * hidden + (local >= RUN ? SKEW : 0);
            // The same for all lanes; the rows beyond the end are zero codes.
            if (index < rows) {
                const Statistics s = statistics(row, hidden, eps);
                if (threadIdx.x % 32 == 0) {
                    if (KIND == 0) mean[index] = s.mean;
                    rstd[index] = s.rstd;
                }
                unsigned char* target = q + static_cast<size_t>(index) * hidden;
                const auto store = [&](int at, const float(&y)[8]) {
#pragma unroll
                    for (int j = 0; j < 8; ++j) amax = amax_of(amax, y[j]);
                    const uint2 words = make_uint2(
                        quantize2(y[0], y[1], scale) | quantize2(y[2], y[3], scale) << 16,
                        quantize2(y[4], y[5], scale) | quantize2(y[6], y[7], scale) << 16);
                    *reinterpret_cast<uint2*>(target + at) = words;
                    *reinterpret_cast<uint2*>(staged + at) = words;
                };
                if (parameters == 0)
                    for_each_output<STRIPES, 0>(row, s, affine, hidden, store);
                else if (parameters == 1)
                    for_each_output<STRIPES, 1>(row, s, affine, hidden, store);
                else
                    for_each_output<STRIPES, 2>(row, s, affine, hidden, store);
            } else {
                for (int at = threadIdx.x % 32 * 8; at < hidden; at += STRIPE)
                    *reinterpret_cast<uint2*>(staged + at) = make_uint2(0, 0);
            }
            const bool last = local + TILE_WARPS >= TILE_ROWS;
            fetch(row, last ? (tile + gridDim.x) * TILE_ROWS + warp : index + TILE_WARPS);
        }
        __syncthreads();
        store_transposed(q_t, stride, tile, hidden, rows);
        __syncthreads();
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
    if (amax_slot != nullptr) commit_amax<TILE_WARPS>(amax, amax_slot);
}
