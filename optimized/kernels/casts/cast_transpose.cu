// cast_transpose: to FP8, with a transposed copy and the amax; with DBIAS also the sums of blocks of rows.
//
//     q[r, c]   = satfinite_rne(fp32(x[r, c]) * scale[0])   one fp32 rounding, then one to FP8; NaN -> 0x7F
//     q_t[c, r] = q[r, c]; 0x00 for rows <= r < ceil16(rows)
//     scale_inv = 1 / scale[0]                              IEEE division
//     amax[0]   = max(amax[0], max |x|)                     x not scaled, NaN ignored; skipped if amax is null
//     partial[b, c] = sum of x[64 b .. 64 b + 63, c]        DBIAS: fp32, in the order of row_sum.cuh
//
// x [rows, cols] fp32, bf16 or fp16 (WIDE); q [rows, cols], q_t [cols, ceil16(rows)] FP8 (FP8); cols a multiple of
// 16; partial fp32 [ceil(rows / 64), cols], which the kernel `total` of dbias.cu adds up.
#include "cast_transpose.cuh"
#include "ptx/grid.cuh"

using namespace twin;

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    cast_transpose(const wide_t* __restrict__ x, const float* __restrict__ scale_slot, float* amax_slot,
                   unsigned char* __restrict__ q, unsigned char* __restrict__ q_t, float* __restrict__ scale_inv,
                   float* __restrict__ partial, int rows, int cols) {
    if (DBIAS) let_next_grid_start();  // `total`
    cast_matrix<DBIAS>(Matrix{x}, scale_slot, amax_slot, q, q_t, scale_inv, partial, rows, cols);
}
