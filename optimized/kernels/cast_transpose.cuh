// A tile of the cast with the transposed copy: q, q_t, the amax, and with SUMS the sums of blocks of 64 rows. Formulas:
// cast_transpose.cu.
//
// Bound by memory: 4 bytes an element in bf16. The transposition happens in registers: a thread owns 16 rows of
// one 16-byte column group, so a column of its codes is 16 bytes that are adjacent in q_t. A warp is 4 runs of
// 16 rows by 8 column groups: it reads 128 bytes of a row, writes 64 (fp32: 32) of q and 64 of q_t, whole
// sectors all. Two by two warps make a tile whose rows of q_t (and, in 16 bits, of q) are full 128-byte lines.
// Shared memory is not used, so there are neither bank conflicts nor barriers between loads and stores; all 16
// loads of a thread are in flight at once.
#pragma once
#include "quantize.cuh"
#include "row_sum.cuh"
#include "transpose.cuh"
#include "wide.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int WARP_COLS = 8 * LANES;
constexpr int TILE_ROWS = 2 * BLOCK_ROWS, TILE_COLS = 2 * WARP_COLS;
constexpr int WORDS = LANES / 4;  // words of codes a row of a thread

// Where a thread's results go; `partial` is null for a lane beyond the last column.
struct Output {
    unsigned char* q;
    unsigned char* q_t;
    float* partial;
};

// Where a thread's first row begins, and how far apart its rows are.
template <typename Stride>
struct Rows {
    const wide_t* x;
    Stride stride;
};

// x [rows, cols] as it lies: at the offsets of q.
struct Matrix {
    const wide_t* x;
    __device__ __forceinline__ Rows<size_t> rows(size_t at, size_t cols, int, int) const { return {x + at, cols}; }
};

// One thread's 16 rows. `left` is how many of them there are (WHOLE: all).
template <bool WHOLE, bool SUMS, typename Stride>
__device__ __forceinline__ void cast_run(
    const Rows<Stride>& in, const Output& out, size_t cols, size_t q_t_stride, int left, float scale, float& amax) {
    Vector<LANES> v[RUN];
#pragma unroll
    for (int r = 0; r < RUN; ++r)
        v[r] = WHOLE || r < left ? load_once<LANES>(in.x + static_cast<size_t>(r) * in.stride) : Vector<LANES>{};

    // Four columns at a time, from the loads to the transposed store, so that registers free up on the way.
    unsigned codes[RUN][WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
#pragma unroll
        for (int r = 0; r < RUN; ++r) {
            float f[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                f[i] = widen(v[r], 4 * w + i);
                amax = amax_of(amax, f[i]);
            }
            codes[r][w] = quantize2(f[0], f[1], scale) | quantize2(f[2], f[3], scale) << 16;
            // Not left to 0 * scale, which is NaN if scale is infinite.
            if (!WHOLE && r >= left) codes[r][w] = 0;
        }
        if constexpr (SUMS) {
            float run[4], sum[1];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float column[RUN];
#pragma unroll
                for (int r = 0; r < RUN; ++r) column[r] = widen(v[r], 4 * w + i);
                run[i] = halving_sum(column);
            }
            const int first = 4 * w + block_sum<4>(run, sum);
            if (WHOLE || out.partial != nullptr) out.partial[first] = sum[0];
        }
        unsigned columns[4][4];  // [group of four rows][column]
#pragma unroll
        for (int g = 0; g < 4; ++g)
            transpose4(codes[4 * g][w], codes[4 * g + 1][w], codes[4 * g + 2][w], codes[4 * g + 3][w], columns[g]);
        if (WHOLE || left > 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                *reinterpret_cast<uint4*>(out.q_t + (4 * w + i) * q_t_stride) =
                    make_uint4(columns[0][i], columns[1][i], columns[2][i], columns[3][i]);
        }
    }
#pragma unroll
    for (int r = 0; r < RUN; ++r) {
        if (WHOLE || r < left) {
            if constexpr (WORDS == 2)
                *reinterpret_cast<uint2*>(out.q + r * cols) = make_uint2(codes[r][0], codes[r][1]);
            else
                *reinterpret_cast<unsigned*>(out.q + r * cols) = codes[r][0];
        }
    }
}

// Tile `tile` of a source [rows, cols], counted along rows of tiles, for one block of threads.
template <bool SUMS, typename Source>
__device__ __forceinline__ void cast_tile(
    const Source& source, unsigned char* q, unsigned char* q_t, float* partial, int rows, int cols, int tile,
    float scale, float& amax) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column_tiles = max(1, (cols + TILE_COLS - 1) / TILE_COLS);
    const int tile_row = tile / column_tiles, tile_col = tile % column_tiles;
    const int block_row = tile_row * TILE_ROWS + warp / 2 * BLOCK_ROWS;
    const int row = block_row + lane / 8 * RUN;
    const int col = tile_col * TILE_COLS + warp % 2 * WARP_COLS + lane % 8 * LANES;
    if (block_row >= rows) return;
    // A lane beyond the last column takes part in the shuffles with no rows, at an address that exists.
    const bool inside = col < cols;
    // Unsigned first: the upper halves are known to be zero, and need no registers.
    const size_t width = static_cast<unsigned>(cols), q_t_stride = (static_cast<unsigned>(rows) + 15u) / 16 * 16;
    const size_t at = inside ? static_cast<size_t>(row) * width + col : 0;
    const size_t at_t = inside ? static_cast<size_t>(col) * q_t_stride + row : 0;
    float* sums = inside ? partial + static_cast<size_t>(block_row / BLOCK_ROWS) * width + col : nullptr;
    const Output out = {q + at, q_t + at_t, sums};
    const auto in = source.rows(at, width, inside ? row : 0, inside ? col : 0);
    if (block_row + BLOCK_ROWS <= rows && (tile_col + 1) * TILE_COLS <= cols) {
        cast_run<true, SUMS>(in, out, width, q_t_stride, RUN, scale, amax);
    } else {
        const int left = inside ? max(min(rows - row, RUN), 0) : 0;
        cast_run<false, SUMS>(in, out, width, q_t_stride, left, scale, amax);
    }
}
