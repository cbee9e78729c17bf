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
//
// With PACKED a row of x that is in no sequence has codes 0 and no part in the amax.
//
// Defines: WIDE, FP8, DBIAS (0 | 1), PACKED (0 | 1, 0 where it is not defined; then DBIAS is 0).
#include "cast_transpose.cuh"
#include "ptx/grid.cuh"
#ifndef PACKED
#define PACKED 0
#endif
#if PACKED
#include "sequences.cuh"
#endif

using namespace twin;

#if PACKED

// A run of 16 rows of which some are in no sequence.
struct SomeRows {
    static constexpr bool kSome = true;
    const wide_t* x;
    size_t stride;
    unsigned seen;    // a bit for each row of the run
    bool whole_tile;  // whether all rows of the tile are in sequences
    __device__ __forceinline__ bool has(int r) const { return seen >> r & 1; }
    __device__ __forceinline__ bool whole() const { return whole_tile; }
};

// A contiguous x [rows, cols] of packed sequences.
struct Packed {
    const wide_t* x;
    Sequences sequences;
    int count;  // rows
    __device__ __forceinline__ SomeRows rows(size_t at, size_t cols, int row, int) const {
        __shared__ unsigned seen[kTileRows / 32];
        sequences.mark(seen, row / kTileRows * kTileRows, count);
        bool whole = true;
        for (int n = 0; n < kTileRows / 32; n++) whole = whole && seen[n] == 0xFFFFFFFF;
        return {x + at, cols, seen[row % kTileRows / 32] >> row % 32, whole};
    }
};

#endif

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    cast_transpose(const wide_t* __restrict__ x, const float* __restrict__ scale_slot, float* amax_slot,
                   unsigned char* __restrict__ q, unsigned char* __restrict__ q_t, float* __restrict__ scale_inv,
                   float* __restrict__ partial, int rows, int cols
#if PACKED
                   ,
                   const int* lengths, const int* starts, int sequences
#endif
    ) {
    if (DBIAS) let_next_grid_start();  // `total`
#if PACKED
    const Packed source{x, {lengths, starts, sequences}, rows};
#else
    const Matrix source{x};
#endif
    cast_matrix<DBIAS>(source, scale_slot, amax_slot, q, q_t, scale_inv, partial, rows, cols);
}
