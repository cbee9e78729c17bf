// cat_cast_blocks_transpose_dbias: cast_blocks.cu with a transposed copy, of a matrix whose columns lie in up to three
// tensors (side_by_side.cuh), and the sums of its rows.
//
//     partial   [ceil(rows / 64), cols] fp32, of 16-bit numbers: the sums of 64 rows in the order of row_sum.cuh
//
// Blocks of 128 columns of a row alone.
#include "cast_blocks.cuh"
#include "side_by_side.cuh"
#include "ptx/grid.cuh"

using namespace twin;

constexpr bool kSums = WIDE != 0;

// A thread's columns lie in one part.
struct SideBySide {
    const Parts& parts;
    __device__ __forceinline__ void load(Vector<kLanes> (&v)[kThreadRows], int row, int col, int left, size_t) const {
        auto [from, stride] = parts.at(row, col);
#pragma unroll
        for (int r = 0; r < kThreadRows; r++) {
            v[r] = r < left ? load_once<kLanes>(from) : Vector<kLanes>{};
            from += stride;
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    cat_cast_blocks(const __grid_constant__ Parts parts, unsigned char* __restrict__ q, unsigned char* __restrict__ q_t,
                    float* __restrict__ scale_inv, float* __restrict__ scale_inv_t, float* __restrict__ partial,
                    float epsilon, int dialect, int rows, int cols) {
    if (kSums) let_next_grid_start();  // `total` of dbias.cu
    cast_tile_in_blocks<false, true, kSums>(SideBySide{parts}, q, q_t, scale_inv, scale_inv_t, partial, epsilon,
                                            dialect, rows, cols);
}
