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
// filled up with zeros. The work of a tile is that of cast_blocks.cuh.
#include "cast_blocks.cuh"

using namespace twin;

extern "C" __global__ void __launch_bounds__(kThreads, kLanes == 8 ? 3 : 2)
    cast_blocks(const wide_t* __restrict__ x, unsigned char* __restrict__ q, unsigned char* __restrict__ q_t,
                float* __restrict__ scale_inv, float* __restrict__ scale_inv_t, float epsilon, int dialect, int rows,
                int cols) {
    cast_tile_in_blocks<SQUARE, TRANSPOSE, false>(Matrix{x}, q, q_t, scale_inv, scale_inv_t, nullptr, epsilon, dialect,
                                                  rows, cols);
}
