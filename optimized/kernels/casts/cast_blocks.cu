// cast_blocks: to FP8 with a scale for each block of 128, alone or with a transposed copy.
//
//     amax      = max(max |x| over the block, epsilon)            NaN ignored
//     scale, scale_inv by the dialect (block_scale.cuh)
//     q         = satfinite_rne(fp32(x) * scale)                  one fp32 rounding, then one to FP8; NaN -> 0x7F
//     q_t       the same with blocks of 128 rows of one column; 0x00 for rows <= r < ceil16(rows)
//
// A block is 128 columns of a row; SQUARE: 128 rows of 128 columns, and q_t is the transpose of q. x [rows, cols] fp32,
// bf16 or fp16 (WIDE), cols a multiple of 16; q [rows, cols], q_t [cols, ceil16(rows)] FP8 (FP8); scales fp32,
//
//     not SQUARE  scale_inv [ceil(cols / 128), ceil4(rows)], scale_inv_t [ceil(rows / 128), ceil4(cols)]
//     SQUARE      scale_inv [ceil(rows / 128), ceil4(ceil(cols / 128))], scale_inv_t [ceil(cols / 128), ...]
//
// filled up with zeros. One block of threads has a tile of 128 x 128; a thread has 16 rows of one column group, 16 bytes of
// x wide, in registers from the amax to the codes.
#include "block_scale.cuh"
#include "common/quantize.cuh"
#include "common/transpose.cuh"
#include "common/wide.cuh"

using namespace twin;

constexpr int kBlock = 128, kRunRows = 16;
constexpr int kGroups = kBlock / kLanes, kRuns = kBlock / kRunRows, kThreads = kGroups * kRuns;
constexpr int kGroupsOfWarp = 8;  // side by side; a warp has four runs of each

// Neighbouring groups put the same run into different banks.
__device__ __forceinline__ int swizzled(int run, int group) { return run ^ group % kRuns; }

__device__ __forceinline__ int ceil4(int count) { return (count + 3) / 4 * 4; }
__device__ __forceinline__ int blocks_of(int count) { return (count + kBlock - 1) / kBlock; }

extern "C" __global__ void __launch_bounds__(kThreads)
    cast_blocks(const wide_t* __restrict__ x, unsigned char* __restrict__ q, unsigned char* __restrict__ q_t,
                float* __restrict__ scale_inv, float* __restrict__ scale_inv_t, float epsilon, int dialect, int rows,
                int cols) {
    __shared__ unsigned row_amax[kBlock], column_amax[kBlock];
    __shared__ float row_scale[kBlock], column_scale[kBlock];
    __shared__ uint4
        columns[TRANSPOSE ? kLanes : 1][kGroups][kRuns];  // [column][group][swizzled(run)]: 16 rows of codes
    const int tile_row = blockIdx.z * gridDim.y + blockIdx.y, tile_col = blockIdx.x;
    if (tile_row >= blocks_of(rows)) return;  // the grid is rounded up where its third dimension is in use
    const int first_row = tile_row * kBlock, first_col = tile_col * kBlock;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int kAcross = kGroups / kGroupsOfWarp;  // warps side by side
    const int run = warp / kAcross * 4 + lane / kGroupsOfWarp;
    const int group = warp % kAcross * kGroupsOfWarp + lane % kGroupsOfWarp;
    const int row = first_row + run * kRunRows, col = first_col + group * kLanes;
    const size_t width = static_cast<unsigned>(cols);
    const int left = col < cols ? rows - row : 0;

    for (int i = threadIdx.x; i < kBlock; i += kThreads) row_amax[i] = column_amax[i] = 0;
    Vector<kLanes> v[kRunRows];
#pragma unroll
    for (int r = 0; r < kRunRows; r++)
        v[r] = r < left ? load_once<kLanes>(x + (row + r) * width + col) : Vector<kLanes>{};
    __syncthreads();

    // The words of floats that are not negative have the order of their values.
    float of_column[kLanes] = {};
#pragma unroll
    for (int r = 0; r < kRunRows; r++) {
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < kLanes; i++) {
            amax = amax_of(amax, widen(v[r], i));
            of_column[i] = amax_of(of_column[i], widen(v[r], i));
        }
#pragma unroll
        for (int mask = 1; mask < kGroupsOfWarp; mask *= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, mask));
        if (lane % kGroupsOfWarp == 0) atomicMax(&row_amax[SQUARE ? 0 : run * kRunRows + r], __float_as_uint(amax));
    }
    if constexpr (TRANSPOSE && !SQUARE) {
#pragma unroll
        for (int i = 0; i < kLanes; i++) {
#pragma unroll
            for (int mask = kGroupsOfWarp; mask < 32; mask *= 2)
                of_column[i] = fmaxf(of_column[i], __shfl_xor_sync(0xFFFFFFFF, of_column[i], mask));
            if (lane < kGroupsOfWarp) atomicMax(&column_amax[group * kLanes + i], __float_as_uint(of_column[i]));
        }
    }
    __syncthreads();

    if constexpr (SQUARE) {
        const BlockScale found = block_scale(__uint_as_float(row_amax[0]), epsilon, dialect);
        for (int i = threadIdx.x; i < kBlock; i += kThreads) row_scale[i] = found.scale;
        const int down = blocks_of(rows), across = blocks_of(cols);
        // The last tile of a row of tiles fills the scales up.
        if (threadIdx.x < (tile_col == across - 1 ? ceil4(across) - tile_col : 1))
            scale_inv[static_cast<size_t>(tile_row) * ceil4(across) + tile_col + threadIdx.x] =
                threadIdx.x == 0 ? found.scale_inv : 0.0f;
        if (TRANSPOSE && threadIdx.x < (tile_row == down - 1 ? ceil4(down) - tile_row : 1))
            scale_inv_t[static_cast<size_t>(tile_col) * ceil4(down) + tile_row + threadIdx.x] =
                threadIdx.x == 0 ? found.scale_inv : 0.0f;
    } else {
        for (int i = threadIdx.x; i < kBlock; i += kThreads) {
            const BlockScale found = block_scale(__uint_as_float(row_amax[i]), epsilon, dialect);
            row_scale[i] = found.scale;
            if (first_row + i < ceil4(rows))
                scale_inv[static_cast<size_t>(tile_col) * ceil4(rows) + first_row + i] =
                    first_row + i < rows ? found.scale_inv : 0.0f;
            if constexpr (TRANSPOSE) {
                const BlockScale other = block_scale(__uint_as_float(column_amax[i]), epsilon, dialect);
                column_scale[i] = other.scale;
                if (first_col + i < cols) scale_inv_t[tile_row * width + first_col + i] = other.scale_inv;
            }
        }
    }
    __syncthreads();

    // Four columns at a time, so that registers become free on the way.
#pragma unroll
    for (int w = 0; w < kLanes / 4; w++) {
        unsigned codes[kRunRows];
#pragma unroll
        for (int r = 0; r < kRunRows; r++) {
            float f[4];
#pragma unroll
            for (int i = 0; i < 4; i++) f[i] = widen(v[r], 4 * w + i);
            codes[r] = quantize4(f, row_scale[run * kRunRows + r]);
            if (r < left) *reinterpret_cast<unsigned*>(q + (row + r) * width + col + 4 * w) = codes[r];
        }
        if constexpr (TRANSPOSE) {
            unsigned of_rows[4][4];  // [group of four rows][column]
#pragma unroll
            for (int g = 0; g < 4; g++) {
                if constexpr (SQUARE) {
                    transpose4(codes[4 * g], codes[4 * g + 1], codes[4 * g + 2], codes[4 * g + 3], of_rows[g]);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float f[4];
#pragma unroll
                        for (int r = 0; r < 4; r++) f[r] = widen(v[4 * g + r], 4 * w + i);
                        of_rows[g][i] = quantize4(f, column_scale[group * kLanes + 4 * w + i]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                columns[4 * w + i][group][swizzled(run, group)] =
                    make_uint4(of_rows[0][i], of_rows[1][i], of_rows[2][i], of_rows[3][i]);
        }
    }
    if constexpr (TRANSPOSE) {
        // Eight threads write 128 bytes of a row of q_t.
        __syncthreads();
        const size_t stride = q_t_stride(rows);
        const int to_group = threadIdx.x / kRuns, to_run = threadIdx.x % kRuns;
        const int to_col = first_col + to_group * kLanes, to_row = first_row + to_run * kRunRows;
        if (to_col < cols && to_row < rows) {
#pragma unroll
            for (int c = 0; c < kLanes; c++)
                *reinterpret_cast<uint4*>(q_t + (to_col + c) * stride + to_row) =
                    columns[c][to_group][swizzled(to_run, to_group)];
        }
    }
}
