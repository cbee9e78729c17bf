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
// filled up with zeros. One block of threads has a tile of 128 x 128; a thread has 8 rows of one column group, 16 bytes of
// x wide, in registers from the amax to the codes.
#include "block_scale.cuh"
#include "common/quantize.cuh"
#include "common/transpose.cuh"
#include "common/wide.cuh"

using namespace twin;

constexpr int kBlock = 128, kRunRows = 8;
// The groups of a run stand side by side in a warp, or in half of one (16-bit elements): a row's threads.
constexpr int kGroups = kBlock / kLanes, kRuns = kBlock / kRunRows, kThreads = kGroups * kRuns, kWarps = kThreads / 32;
constexpr int kLanesOfRow = kGroups / kRunRows;  // in which a row's scale is found

// Where a run's codes of a column lie in shared memory: two runs, 16 rows, side by side. Neighbouring groups put the same
// run into different banks, and those eight groups apart change the places of the two.
__device__ __forceinline__ int pair_place(int pair, int group) { return pair ^ group % 8; }
__device__ __forceinline__ int place(int run, int group) {
    return pair_place(run / 2, group) * 2 + (run + group / 8) % 2;
}

__device__ __forceinline__ int ceil4(int count) { return (count + 3) / 4 * 4; }
__device__ __forceinline__ int blocks_of(int count) { return (count + kBlock - 1) / kBlock; }

// The maximum over a run's groups of each of its rows: thread `group` gets that of row group / kLanesOfRow. In each step a
// thread gives half of the rows away and keeps half.
__device__ __forceinline__ float maximum_of_row(float (&of_rows)[kRunRows], int group) {
#pragma unroll
    for (int kept = kRunRows / 2; kept > 0; kept /= 2) {
        const int mask = kept * kLanesOfRow;
        const bool upper = group & mask;
#pragma unroll
        for (int i = 0; i < kept; i++) {
            const float given = upper ? of_rows[i] : of_rows[i + kept], own = upper ? of_rows[i + kept] : of_rows[i];
            of_rows[i] = fmaxf(own, __shfl_xor_sync(0xFFFFFFFF, given, mask));
        }
    }
#pragma unroll
    for (int mask = kLanesOfRow / 2; mask > 0; mask /= 2)
        of_rows[0] = fmaxf(of_rows[0], __shfl_xor_sync(0xFFFFFFFF, of_rows[0], mask));
    return of_rows[0];
}

extern "C" __global__ void __launch_bounds__(kThreads, kLanes == 8 ? 3 : 2)
    cast_blocks(const wide_t* __restrict__ x, unsigned char* __restrict__ q, unsigned char* __restrict__ q_t,
                float* __restrict__ scale_inv, float* __restrict__ scale_inv_t, float epsilon, int dialect, int rows,
                int cols) {
    constexpr bool kColumns = TRANSPOSE && !SQUARE;  // have scales of their own
    __shared__ unsigned tile_amax[kWarps];
    __shared__ float column_amax[kColumns ? kWarps : 1][kBlock], column_scale[kBlock];
    __shared__ __align__(16) uint2 columns[TRANSPOSE ? kLanes : 1][kGroups][kRuns];  // [column][group][place]: 8 rows
    const int tile_row = blockIdx.z * gridDim.y + blockIdx.y, tile_col = blockIdx.x;
    if (tile_row >= blocks_of(rows)) return;  // the grid is rounded up where its third dimension is in use
    const int first_row = tile_row * kBlock, first_col = tile_col * kBlock;
    const int run = threadIdx.x / kGroups, group = threadIdx.x % kGroups;
    const int row = first_row + run * kRunRows, col = first_col + group * kLanes;
    const size_t width = static_cast<unsigned>(cols);
    const int left = col < cols ? rows - row : 0;

    Vector<kLanes> v[kRunRows];
#pragma unroll
    for (int r = 0; r < kRunRows; r++)
        v[r] = r < left ? load_once<kLanes>(x + (row + r) * width + col) : Vector<kLanes>{};

    float of_row[kRunRows] = {}, of_column[kLanes] = {};
#pragma unroll
    for (int r = 0; r < kRunRows; r++) {
#pragma unroll
        for (int i = 0; i < kLanes; i++) {
            of_row[r] = amax_of(of_row[r], widen(v[r], i));
            if constexpr (kColumns) of_column[i] = amax_of(of_column[i], widen(v[r], i));
        }
    }

    float scale;  // of row group / kLanesOfRow of the run; of the tile
    if constexpr (SQUARE) {
        // The words of floats that are not negative have the order of their values.
        unsigned most = 0;
#pragma unroll
        for (int r = 0; r < kRunRows; r++) most = max(most, __float_as_uint(of_row[r]));
        most = __reduce_max_sync(0xFFFFFFFF, most);
        if (threadIdx.x % 32 == 0) tile_amax[threadIdx.x / 32] = most;
        __syncthreads();
#pragma unroll
        for (int warp = 0; warp < kWarps; warp++) most = max(most, tile_amax[warp]);
        const BlockScale found = block_scale(__uint_as_float(most), epsilon, dialect);
        scale = found.scale;
        const int down = blocks_of(rows), across = blocks_of(cols);
        // The last tile of a row of tiles fills the scales up.
        if (threadIdx.x < (tile_col == across - 1 ? ceil4(across) - tile_col : 1))
            scale_inv[static_cast<size_t>(tile_row) * ceil4(across) + tile_col + threadIdx.x] =
                threadIdx.x == 0 ? found.scale_inv : 0.0f;
        if (TRANSPOSE && threadIdx.x < (tile_row == down - 1 ? ceil4(down) - tile_row : 1))
            scale_inv_t[static_cast<size_t>(tile_col) * ceil4(down) + tile_row + threadIdx.x] =
                threadIdx.x == 0 ? found.scale_inv : 0.0f;
    } else {
        const BlockScale found = block_scale(maximum_of_row(of_row, group), epsilon, dialect);
        scale = found.scale;
        const int mine = row + group / kLanesOfRow;
        if (group % kLanesOfRow == 0 && mine < ceil4(rows))
            scale_inv[static_cast<size_t>(tile_col) * ceil4(rows) + mine] = mine < rows ? found.scale_inv : 0.0f;
    }
    if constexpr (kColumns) {
#pragma unroll
        for (int i = 0; i < kLanes; i++) {
            if constexpr (kGroups == 16)
                of_column[i] = fmaxf(of_column[i], __shfl_xor_sync(0xFFFFFFFF, of_column[i], 16));
            if (threadIdx.x % 32 < kGroups) column_amax[threadIdx.x / 32][group * kLanes + i] = of_column[i];
        }
        __syncthreads();
        if (threadIdx.x < kBlock) {
            float most = 0.0f;
#pragma unroll
            for (int warp = 0; warp < kWarps; warp++) most = fmaxf(most, column_amax[warp][threadIdx.x]);
            const BlockScale found = block_scale(most, epsilon, dialect);
            column_scale[threadIdx.x] = found.scale;
            const int mine = first_col + threadIdx.x;
            if (mine < cols) scale_inv_t[tile_row * width + mine] = found.scale_inv;
        }
        __syncthreads();
    }

    constexpr int kWords = kLanes / 4;
    unsigned codes[kRunRows][kWords];
#pragma unroll
    for (int r = 0; r < kRunRows; r++) {
        const float of_this =
            SQUARE ? scale : __shfl_sync(0xFFFFFFFF, scale, threadIdx.x % 32 / kGroups * kGroups + r * kLanesOfRow);
#pragma unroll
        for (int w = 0; w < kWords; w++) {
            float f[4];
#pragma unroll
            for (int i = 0; i < 4; i++) f[i] = widen(v[r], 4 * w + i);
            codes[r][w] = quantize4(f, of_this);
        }
        if (r < left) {
            unsigned char* to = q + (row + r) * width + col;
            if constexpr (kWords == 2)
                *reinterpret_cast<uint2*>(to) = make_uint2(codes[r][0], codes[r][kWords - 1]);
            else
                *reinterpret_cast<unsigned*>(to) = codes[r][0];
        }
    }
    if constexpr (TRANSPOSE) {
#pragma unroll
        for (int w = 0; w < kWords; w++) {
            unsigned of_rows[2][4];  // [group of four rows][column]
#pragma unroll
            for (int g = 0; g < 2; g++) {
                if constexpr (SQUARE) {
                    transpose4(codes[4 * g][w], codes[4 * g + 1][w], codes[4 * g + 2][w], codes[4 * g + 3][w],
                               of_rows[g]);
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
                columns[4 * w + i][group][place(run, group)] = make_uint2(of_rows[0][i], of_rows[1][i]);
        }
        // Eight threads write 128 bytes of a row of q_t; each has every other column of a group.
        __syncthreads();
        const size_t stride = q_t_stride(rows);
        const int to_group = threadIdx.x / 16, pair = threadIdx.x % 8;
        const int to_col = first_col + to_group * kLanes, to_row = first_row + pair * 16;
        if (to_col < cols && to_row < rows) {
#pragma unroll
            for (int c = threadIdx.x / 8 % 2; c < kLanes; c += 2) {
                const uint2* found = &columns[c][to_group][2 * pair_place(pair, to_group)];
                const uint2 first = found[to_group / 8 % 2], second = found[1 - to_group / 8 % 2];
                *reinterpret_cast<uint4*>(q_t + (to_col + c) * stride + to_row) =
                    make_uint4(first.x, first.y, second.x, second.y);
            }
        }
    }
}
