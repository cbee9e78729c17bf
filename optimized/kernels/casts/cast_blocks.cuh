// The tile of a cast in blocks of 128 (cast_blocks.cu), of a matrix that is read or made on the way.
//
// One block of threads has a tile of 128 x 128; a thread has 8 rows of one column group, 16 bytes wide, in registers from
// the amax to the codes. A source's load(v, row, col, left, width) gives them: zeros from the `left`-th row on.
#pragma once
#include "block_scale.cuh"
#include "common/quantize.cuh"
#include "common/row_sum.cuh"
#include "common/transpose.cuh"
#include "common/wide.cuh"
#include "ptx/l2_policy.cuh"

namespace twin {

constexpr int kBlock = 128, kThreadRows = 8;
// The groups of a run stand side by side in a warp, or in half of one (16-bit elements): a row's threads.
constexpr int kGroups = kBlock / kLanes, kRuns = kBlock / kThreadRows, kThreads = kGroups * kRuns,
              kWarps = kThreads / 32;
constexpr int kLanesOfRow = kGroups / kThreadRows;  // in which a row's scale is found

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
__device__ __forceinline__ float maximum_of_row(float (&of_rows)[kThreadRows], int group) {
#pragma unroll
    for (int kept = kThreadRows / 2; kept > 0; kept /= 2) {
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

// A contiguous x [rows, width].
struct Matrix {
    const wide_t* x;
    __device__ __forceinline__ void load(Vector<kLanes> (&v)[kThreadRows], int row, int col, int left,
                                         size_t width) const {
#pragma unroll
        for (int r = 0; r < kThreadRows; r++)
            v[r] = r < left ? load_once<kLanes>(x + (row + r) * width + col) : Vector<kLanes>{};
    }
};

// The sums of the tile's runs of 16 rows, in the order of row_sum.cuh.
template <bool kSums>
struct Sums {
    float of_16[kSums ? kBlock / kRunRows : 1][kBlock];
};

// Two threads of a warp have 16 rows of eight columns: each sums four columns.
__device__ __forceinline__ void put_sums(const Vector<kLanes> (&v)[kThreadRows],
                                         float (&sums)[kBlock / kRunRows][kBlock], int run, int group) {
    const bool later = run % 2;
    float sum[4];
#pragma unroll
    for (int w = 0; w < 2; w++) {
        Vector<2> own[kThreadRows], other[kThreadRows];
#pragma unroll
        for (int r = 0; r < kThreadRows; r++) {
            own[r] = {later ? v[r].words[2 + w] : v[r].words[w]};
            other[r] = {__shfl_xor_sync(kAllLanes, later ? v[r].words[w] : v[r].words[2 + w], 16)};
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float column[kThreadRows];  // the tree's first step, h = 8
#pragma unroll
            for (int r = 0; r < kThreadRows; r++) column[r] = widen(own[r], i) + widen(other[r], i);
            sum[2 * w + i] = halving_sum(column);
        }
    }
    *reinterpret_cast<float4*>(&sums[run / 2][group * kLanes + later * 4]) =
        make_float4(sum[0], sum[1], sum[2], sum[3]);
}

// partial [ceil(rows / 64), cols]: the sums of 64 rows.
__device__ __forceinline__ void store_sums(const float (&sums)[kBlock / kRunRows][kBlock], float* partial, int rows,
                                           int cols, int first_row, int first_col) {
    const int half = threadIdx.x / kBlock, within = threadIdx.x % kBlock;
    float runs[4], sum[1];
#pragma unroll
    for (int r = 0; r < 4; r++) runs[r] = sums[4 * half + r][within];
    sum[0] = halving_sum(runs);
    const int row = first_row + half * kBlockRows;
    if (row < rows && first_col + within < cols)
        store(partial + static_cast<size_t>(row / kBlockRows) * cols + first_col + within, sum, evict_last());
}

template <bool kSquare, bool kTranspose, bool kSums, class Source>
__device__ __forceinline__ void cast_tile_in_blocks(const Source& source, unsigned char* __restrict__ q,
                                                    unsigned char* __restrict__ q_t, float* __restrict__ scale_inv,
                                                    float* __restrict__ scale_inv_t, float* __restrict__ partial,
                                                    float epsilon, int dialect, int rows, int cols) {
    // Of 16-bit numbers a warp has 16 rows, and a thread stores the sum of 64 rows of a column.
    static_assert(!kSums || (kTranspose && kLanes == 8), "sums are those of 16-bit numbers, cast with their transpose");
    constexpr bool kColumns = kTranspose && !kSquare;  // have scales of their own
    __shared__ unsigned tile_amax[kWarps];
    __shared__ float column_amax[kColumns ? kWarps : 1][kBlock], column_scale[kBlock];
    __shared__ Sums<kSums> tile_sums;
    __shared__ __align__(16) uint2 columns[kTranspose ? kLanes : 1][kGroups][kRuns];  // [column][group][place]: 8 rows
    const int tile_row = blockIdx.z * gridDim.y + blockIdx.y, tile_col = blockIdx.x;
    if (tile_row >= blocks_of(rows)) return;  // the grid is rounded up where its third dimension is in use
    const int first_row = tile_row * kBlock, first_col = tile_col * kBlock;
    const int run = threadIdx.x / kGroups, group = threadIdx.x % kGroups;
    const int row = first_row + run * kThreadRows, col = first_col + group * kLanes;
    const size_t width = static_cast<unsigned>(cols);
    const int left = col < cols ? rows - row : 0;

    Vector<kLanes> v[kThreadRows];
    source.load(v, row, col, left, width);
    if constexpr (kSums) put_sums(v, tile_sums.of_16, run, group);

    float of_row[kThreadRows] = {}, of_column[kLanes] = {};
#pragma unroll
    for (int r = 0; r < kThreadRows; r++) {
#pragma unroll
        for (int i = 0; i < kLanes; i++) {
            of_row[r] = amax_of(of_row[r], widen(v[r], i));
            if constexpr (kColumns) of_column[i] = amax_of(of_column[i], widen(v[r], i));
        }
    }

    float scale;  // of row group / kLanesOfRow of the run; of the tile
    if constexpr (kSquare) {
        // The words of floats that are not negative have the order of their values.
        unsigned most = 0;
#pragma unroll
        for (int r = 0; r < kThreadRows; r++) most = max(most, __float_as_uint(of_row[r]));
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
        if (kTranspose && threadIdx.x < (tile_row == down - 1 ? ceil4(down) - tile_row : 1))
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
    unsigned codes[kThreadRows][kWords];
#pragma unroll
    for (int r = 0; r < kThreadRows; r++) {
        const float of_this =
            kSquare ? scale : __shfl_sync(0xFFFFFFFF, scale, threadIdx.x % 32 / kGroups * kGroups + r * kLanesOfRow);
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
    if constexpr (kTranspose) {
#pragma unroll
        for (int w = 0; w < kWords; w++) {
            unsigned of_rows[2][4];  // [group of four rows][column]
#pragma unroll
            for (int g = 0; g < 2; g++) {
                if constexpr (kSquare) {
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
        __syncthreads();
        if constexpr (kSums) store_sums(tile_sums.of_16, partial, rows, cols, first_row, first_col);
        // Eight threads write 128 bytes of a row of q_t; each has every other column of a group.
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

}  // namespace twin
