// norm_cast_blocks: a norm whose rows' statistics are known, rounded to the type of x and cast in blocks of 128 columns of
// a row with a transposed copy (casts/cast_blocks.cu).
//
//     v = round(((x - mean) * rstd) * gamma + beta)     as in norm.cu; rmsnorm without mean and beta
//     q, q_t, scale_inv, scale_inv_t                    of v
//
// x [rows, cols] of type WIDE, cols a multiple of 16; mean, rstd and affine from norm_statistics.cu, after which this is
// launched early. v is never in memory.
#include "casts/cast_blocks.cuh"
#include "common/wide_store.cuh"
#include "ptx/grid.cuh"

using namespace twin;

struct Normed {
    const wide_t* x;
    const float *mean, *rstd, *affine;

    __device__ __forceinline__ void load(Vector<kLanes> (&v)[kThreadRows], int row, int col, int left,
                                         size_t width) const {
        Matrix{x}.load(v, row, col, left, width);  // which does not depend on the grid before
        wait_for_grid_before();
        if (left <= 0) return;
        alignas(16) float gamma[kLanes], beta[kLanes];
#pragma unroll
        for (int c = 0; c < kLanes; c += 4) {
            *reinterpret_cast<float4*>(gamma + c) = *reinterpret_cast<const float4*>(affine + col + c);
            if (KIND == 0)
                *reinterpret_cast<float4*>(beta + c) = *reinterpret_cast<const float4*>(affine + width + col + c);
        }
#pragma unroll
        for (int r = 0; r < kThreadRows; r++) {
            if (r >= left) continue;
            const float center = KIND == 0 ? mean[row + r] : 0.0f, inverse = rstd[row + r];
            float y[kLanes];
#pragma unroll
            for (int c = 0; c < kLanes; c++) {
                y[c] = KIND == 0 ? widen(v[r], c) - center : widen(v[r], c);
                y[c] = (y[c] * inverse) * gamma[c];
                if (KIND == 0) y[c] = y[c] + beta[c];
            }
#pragma unroll
            for (int w = 0; w < 4; w++) v[r].words[w] = word_of(y + w * (kLanes / 4));
        }
    }
};

// A multiprocessor's. RMSNorm of bf16 would spill with three.
constexpr int kBlocks = kLanes == 8 && !(KIND == 1 && WIDE == 1) ? 3 : 2;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    norm_cast_blocks(const wide_t* __restrict__ x, const float* __restrict__ mean, const float* __restrict__ rstd,
                     const float* __restrict__ affine, unsigned char* __restrict__ q, unsigned char* __restrict__ q_t,
                     float* __restrict__ scale_inv, float* __restrict__ scale_inv_t, float epsilon, int dialect,
                     int rows, int cols) {
    cast_tile_in_blocks<false, true, false>(Normed{x, mean, rstd, affine}, q, q_t, scale_inv, scale_inv_t, nullptr,
                                            epsilon, dialect, rows, cols);
}
