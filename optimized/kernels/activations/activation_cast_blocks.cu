// activation_cast_blocks: an activation (BACKWARD 0) or its backward (BACKWARD 1), rounded to the type of x and cast in
// blocks of 128 columns of a row with a transposed copy (casts/cast_blocks.cu).
//
//     v         = round(y) [rows, m] of x [rows, n]; BACKWARD: round(dx) [rows, n] of grad [rows, m] and x
//     q, q_t, scale_inv, scale_inv_t    of v
//     partial   [ceil(rows / 64), n] fp32, BACKWARD in 16 bits: the sums of 64 rows of v in the order of row_sum.cuh
//
// The arithmetic of an element is that of activation.cuh. n = 2 m where gated, else m; v has a multiple of 16 columns,
// and m is a multiple of 8. x and grad fp32, bf16 or fp16 (WIDE).
//
// v is never in memory: 2 bytes written and 2 read less for each of its elements.
#include "activation.cuh"
#include "casts/cast_blocks.cuh"
#include "common/wide_store.cuh"
#include "ptx/grid.cuh"

using namespace twin;

constexpr bool kSums = BACKWARD && WIDE != 0;
constexpr int kAtOnce = 2;  // rows whose loads are in flight together
// A multiprocessor's. The forwards of reglu and sreglu would spill with three.
constexpr int kBlocks = kLanes == 4 ? 1 : !BACKWARD && (KIND == 5 || KIND == 7) ? 2 : 3;

struct Activated {
    const wide_t *grad, *x;
    int m;

    __device__ __forceinline__ void load(Vector<kLanes> (&v)[kThreadRows], int row, int col, int left, size_t) const {
        const int half = BACKWARD && kGated && col >= m, within = col - half * m;
        const size_t width = static_cast<unsigned>(m);
        const wide_t* from = x + row * kHalves * width + within;
        const wide_t* from_grad = grad + row * width + within;
#pragma unroll
        for (int first = 0; first < kThreadRows; first += kAtOnce) {
            Vector<kLanes> x1[kAtOnce] = {}, x2[kAtOnce] = {};
            [[maybe_unused]] Vector<kLanes> g[kAtOnce] = {};
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                const int r = first + i;
                if (r >= left) continue;
                x1[i] = load_once<kLanes>(from + r * kHalves * width);
                if constexpr (kGated) x2[i] = load_once<kLanes>(from + (r * kHalves + 1) * width);
                if constexpr (BACKWARD) g[i] = load_once<kLanes>(from_grad + r * width);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                float out[kLanes];
#pragma unroll
                for (int c = 0; c < kLanes; c++) {
#if BACKWARD
                    float d[kHalves];
                    backward(widen(g[i], c), widen(x1[i], c), widen(x2[i], c), d);
                    out[c] = half ? d[kHalves - 1] : d[0];
#else
                    out[c] = forward(widen(x1[i], c), widen(x2[i], c));
#endif
                }
                const bool there = first + i < left;
#pragma unroll
                for (int w = 0; w < 4; w++) v[first + i].words[w] = there ? word_of(out + w * (kLanes / 4)) : 0;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    activation_cast_blocks(const wide_t* __restrict__ grad, const wide_t* __restrict__ x, unsigned char* __restrict__ q,
                           unsigned char* __restrict__ q_t, float* __restrict__ scale_inv,
                           float* __restrict__ scale_inv_t, float* __restrict__ partial, float epsilon, int dialect,
                           int rows, int m) {
    if (kSums) let_next_grid_start();  // `total` of casts/dbias.cu
    const int cols = (BACKWARD ? kHalves : 1) * m;
    cast_tile_in_blocks<false, true, kSums>(Activated{grad, x, m}, q, q_t, scale_inv, scale_inv_t, partial, epsilon,
                                            dialect, rows, cols);
}
