// Casts with a transposed copy: q, q_t, the amax and, with kSums, the sums of blocks of 64 rows (cast_transpose.cu).
//
// Bound by memory: 4 bytes an element in bf16. The transposition happens in registers: a thread owns a run of 16 rows
// of one column group, 16 bytes of x wide, so that a column of its codes is 16 bytes that are adjacent in q_t. All of
// its loads are in flight at once. A warp takes 4 runs by 8 groups: it reads 128 bytes of a row and writes 64 (fp32:
// 32) of q. Two by two warps make a tile of 128 rows; they put columns of codes, and sums of runs, into shared memory,
// from which whole lines are stored.
#pragma once
#include "ptx/l2_policy.cuh"
#include "common/quantize.cuh"
#include "common/row_sum.cuh"
#include "common/transpose.cuh"
#include "common/wide.cuh"

namespace twin {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpCols = 8 * kLanes;
constexpr int kTileRows = 2 * kBlockRows, kTileCols = 2 * kWarpCols;
constexpr int kGroups = kTileCols / kLanes, kRuns = kTileRows / kRunRows;

// What a tile's threads leave for one another.
template <bool kSums>
struct Tile {
    uint4 columns[kLanes][kGroups][kRuns];  // [column of a group][group][swizzled(run, group)]: 16 rows of codes
    float sums[kSums ? kRuns : 1][kTileCols];
};

// Neighbouring groups put the same run into different banks.
__device__ __forceinline__ int swizzled(int run, int group) { return run ^ group % kRuns; }

// Where a thread's first row begins, and how far apart its rows are.
template <class Stride>
struct Rows {
    static constexpr bool kSome = false;  // whether some of the rows count as zeros
    const wide_t* x;
    Stride stride;
    __device__ __forceinline__ bool whole() const { return true; }  // whether none of the tile does
};

// A contiguous x [rows, cols]: its offsets are those of q.
struct Matrix {
    const wide_t* x;
    __device__ __forceinline__ Rows<size_t> rows(size_t at, size_t cols, int, int) const { return {x + at, cols}; }
};

// A thread's 16 rows, of which `left` exist (kWhole: all), and kCount columns of its group from `first` on: stores q,
// and puts the rest into the tile.
template <bool kWhole, int kCount, bool kSums, class In>
__device__ __forceinline__ void cast_run(const In& in, unsigned char* q, size_t cols, Tile<kSums>& tile, int run,
                                         int group, int first, int left, float scale, float& amax) {
    constexpr int kWords = kCount / 4;  // of codes a row
    Vector<kCount> v[kRunRows];
#pragma unroll
    for (int r = 0; r < kRunRows; r++)
        v[r] = kWhole || r < left ? load_once<kCount>(in.x + first + static_cast<size_t>(r) * in.stride)
                                  : Vector<kCount>{};
    if constexpr (!kWhole && In::kSome) {
#pragma unroll
        for (int r = 0; r < kRunRows; r++)
            if (!in.has(r)) v[r] = {};
    }

    // Four columns at a time from the load to the transposed store, so that registers become free on the way.
    unsigned codes[kRunRows][kWords];
#pragma unroll
    for (int w = 0; w < kWords; w++) {
#pragma unroll
        for (int r = 0; r < kRunRows; r++) {
            float f[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                f[i] = widen(v[r], 4 * w + i);
                amax = amax_of(amax, f[i]);
            }
            codes[r][w] = quantize4(f, scale);
            // Rows that do not exist give code 0, not 0 * scale, which is NaN if scale is infinite.
            if (!kWhole && r >= left) codes[r][w] = 0;
            if constexpr (!kWhole && In::kSome) {
                if (!in.has(r)) codes[r][w] = 0;
            }
        }
        if constexpr (kSums) {
            float sum[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float column[kRunRows];
#pragma unroll
                for (int r = 0; r < kRunRows; r++) column[r] = widen(v[r], 4 * w + i);
                sum[i] = halving_sum(column);
            }
            *reinterpret_cast<float4*>(&tile.sums[run][group * kLanes + first + 4 * w]) =
                make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
        unsigned columns[4][4];  // [group of four rows][column]
#pragma unroll
        for (int g = 0; g < 4; g++)
            transpose4(codes[4 * g][w], codes[4 * g + 1][w], codes[4 * g + 2][w], codes[4 * g + 3][w], columns[g]);
#pragma unroll
        for (int i = 0; i < 4; i++)
            tile.columns[first + 4 * w + i][group][swizzled(run, group)] =
                make_uint4(columns[0][i], columns[1][i], columns[2][i], columns[3][i]);
    }
#pragma unroll
    for (int r = 0; r < kRunRows; r++) {
        if (kWhole || r < left) {
            if constexpr (kWords == 2)
                *reinterpret_cast<uint2*>(q + first + r * cols) = make_uint2(codes[r][0], codes[r][1]);
            else
                *reinterpret_cast<unsigned*>(q + first + r * cols) = codes[r][0];
        }
    }
}

// From the tile to memory: eight threads write 128 bytes of a row of q_t; then the sums of 64 rows.
template <bool kSums>
__device__ __forceinline__ void store_tile(const Tile<kSums>& tile, unsigned char* q_t, float* partial, int rows,
                                           int cols, int first_row, int first_col) {
    static_assert(kThreads == kGroups * kRuns, "a thread takes all columns of a group");
    const size_t width = static_cast<unsigned>(cols), stride = q_t_stride(rows);
    const int group = threadIdx.x / kRuns, run = threadIdx.x % kRuns;
    const int col = first_col + group * kLanes, row = first_row + run * kRunRows;
    if (col < cols && row < rows) {
        q_t += col * stride + row;
#pragma unroll
        for (int c = 0; c < kLanes; c++)
            *reinterpret_cast<uint4*>(q_t + c * stride) = tile.columns[c][group][swizzled(run, group)];
    }
    if constexpr (kSums) {
        constexpr int kColumns = 2 * kTileCols / kThreads;
        const int half = threadIdx.x / (kThreads / 2), within = threadIdx.x % (kThreads / 2) * kColumns;
        float sum[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
            float runs[4];
#pragma unroll
            for (int r = 0; r < 4; r++) runs[r] = tile.sums[4 * half + r][within + c];
            sum[c] = halving_sum(runs);
        }
        const int block_row = first_row + half * kBlockRows;
        if (block_row < rows && first_col + within < cols)
            store(partial + block_row / kBlockRows * width + first_col + within, sum, evict_last());
    }
}

// A tile of a source [rows, cols], for one block of threads.
template <bool kSums, class Source>
__device__ __forceinline__ void cast_tile(const Source& source, unsigned char* q, unsigned char* q_t, float* partial,
                                          int rows, int cols, int tile_row, int tile_col, float scale, float& amax) {
    __shared__ Tile<kSums> tile;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int run = warp / 2 * 4 + lane / 8, group = warp % 2 * 8 + lane % 8;
    const int first_row = tile_row * kTileRows, first_col = tile_col * kTileCols;
    const int row = first_row + run * kRunRows, col = first_col + group * kLanes;
    // Unsigned first: the upper halves are known to be zero, and need no registers.
    const size_t width = static_cast<unsigned>(cols), offset = static_cast<size_t>(row) * width + col;
    const auto in = source.rows(offset, width, row, col);
    if (first_row + kTileRows <= rows && first_col + kTileCols <= cols && in.whole()) {
        cast_run<true, kLanes>(in, q + offset, width, tile, run, group, 0, kRunRows, scale, amax);
    } else {
        const int left = col < cols ? rows - row : 0;
#pragma unroll 1  // it would take more registers
        for (int first = 0; first < kLanes; first += 4)
            cast_run<false, 4>(in, q + offset, width, tile, run, group, first, left, scale, amax);
    }
    __syncthreads();
    store_tile(tile, q_t, partial, rows, cols, first_row, first_col);
}

// A whole source, a tile to each block of threads of a grid of (tile columns, tile rows in y and z).
template <bool kSums, class Source>
__device__ __forceinline__ void cast_matrix(const Source& source, const float* scale_slot, float* amax_slot,
                                            unsigned char* q, unsigned char* q_t, float* scale_inv, float* partial,
                                            int rows, int cols) {
    const float scale = *scale_slot;
    float amax = 0.0f;
    // Rows in two dimensions: a division would keep the loads waiting.
    const int tile_row = blockIdx.z * gridDim.y + blockIdx.y, tile_col = blockIdx.x;
    cast_tile<kSums>(source, q, q_t, partial, rows, cols, tile_row, tile_col, scale, amax);
    if (tile_row == 0 && tile_col == 0 && threadIdx.x == 0) *scale_inv = 1.0f / scale;
    if (amax_slot != nullptr) commit_amax<kWarps>(amax, amax_slot);
}

}  // namespace twin
