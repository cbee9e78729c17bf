// activation: y = act(x) or act(x1) * x2, and its backward, each rounded once to the type of x.
//
//     forward    x [rows, n] -> y [rows, m]
//     backward   grad [rows, m], x [rows, n] -> dx [rows, n]
//     partial[b] = max |y| or max |dx| of block b    AMAX: 1 before the rounding, 2 of the rounded numbers
//
// With AMAX there is one of the two kernels, with BACKWARD the second. AMAX_ALONE: y is not written.
//
// n = 2 m where gated (x1 = x[:, :m], x2 = x[:, m:]), else n = m; the arithmetic is that of activation.cuh. x is
// fp32, bf16 or fp16 (WIDE). VECTOR 1: a thread takes 16 bytes of a row, for which m * sizeof(x) is a multiple of 16
// and the pointers are aligned; VECTOR 0: one element, for any m, at a fraction of the speed.
//
// Bound by memory. A block takes kRows rows of kThreads vectors; a thread has all of its loads in flight at once.
#include "activation.cuh"
#include "common/wide_store.cuh"
#ifdef AMAX
#include "common/current_scale.cuh"
#include "ptx/grid.cuh"
#endif

using namespace twin;

constexpr int kThreads = 128;
constexpr int kRows = 4;
constexpr int kColumns = VECTOR ? kLanes : 1;

// kColumns neighbouring elements, as loaded.
struct Loaded {
    Vector<kLanes> vector;
    wide_t one;
};

__device__ __forceinline__ Loaded load(const wide_t* address) {
    if constexpr (VECTOR) return {load_once<kLanes>(address), {}};
    return {{}, *address};
}

__device__ __forceinline__ float element(const Loaded& loaded, int i) {
    return VECTOR ? widen(loaded.vector, i) : widen(loaded.one);
}

__device__ __forceinline__ void store(wide_t* address, const float (&f)[kColumns]) {
    if constexpr (VECTOR)
        store_vector(address, f);
    else
        *address = narrow(f[0]);
}

// What a thread works on: rows `row` to row + kRows - 1, kColumns columns of y from `col`.
struct Place {
    long long row;
    int col;
};

__device__ __forceinline__ Place place(int cols) {
    const int column_tiles = (cols + kThreads * kColumns - 1) / (kThreads * kColumns);
    const int tile_col = blockIdx.x % column_tiles;
    return {static_cast<long long>(blockIdx.x / column_tiles) * kRows,
            (tile_col * kThreads + static_cast<int>(threadIdx.x)) * kColumns};
}

#ifdef AMAX
// A block's part of the amax. Rounding keeps the order of numbers: the amax of rounded ones is the amax, rounded.
__device__ __forceinline__ void leave_amax(float amax, float* partial) {
    amax = largest_of_block<kThreads / 32>(AMAX == 2 ? widen(narrow(amax)) : amax);
    if (threadIdx.x == 0) partial[blockIdx.x] = amax;
}
#endif

#if !BACKWARD
extern "C" __global__ void __launch_bounds__(kThreads)
#ifdef AMAX
    forward_kernel(const wide_t* __restrict__ x, wide_t* __restrict__ y, int rows, int cols,
                   float* __restrict__ partial) {
    let_next_grid_start();  // `total` of casts/current_scale.cu
    const Place at = place(cols);
    if (at.col >= cols) rows = 0;
    float amax = 0.0f;
#else
    forward_kernel(const wide_t* __restrict__ x, wide_t* __restrict__ y, int rows, int cols) {
    const Place at = place(cols);
    if (at.col >= cols) return;
#endif
    const size_t m = cols, n = kHalves * m;
    const wide_t* from = x + at.row * n + at.col;
    Loaded x1[kRows] = {}, x2[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        if (at.row + r < rows) {
            x1[r] = load(from + r * n);
            if constexpr (kGated) x2[r] = load(from + r * n + m);
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        if (at.row + r < rows) {
            float out[kColumns];
#pragma unroll
            for (int i = 0; i < kColumns; i++) {
                out[i] = forward(element(x1[r], i), element(x2[r], i));
#ifdef AMAX
                amax = larger(amax, out[i]);
#endif
            }
#ifndef AMAX_ALONE
            store(y + (at.row + r) * m + at.col, out);
#endif
        }
    }
#ifdef AMAX
    leave_amax(amax, partial);
#endif
}
#endif

#if BACKWARD || !defined(AMAX)
extern "C" __global__ void __launch_bounds__(kThreads)
#ifdef AMAX
    backward_kernel(const wide_t* __restrict__ grad, const wide_t* __restrict__ x, wide_t* __restrict__ dx, int rows,
                    int cols, float* __restrict__ partial) {
    let_next_grid_start();  // `total` of casts/current_scale.cu
    const Place at = place(cols);
    if (at.col >= cols) rows = 0;
    float amax = 0.0f;
#else
    backward_kernel(const wide_t* __restrict__ grad, const wide_t* __restrict__ x, wide_t* __restrict__ dx, int rows,
                    int cols) {
    const Place at = place(cols);
    if (at.col >= cols) return;
#endif
    const size_t m = cols, n = kHalves * m, first = at.row * n + at.col;
    Loaded g[kRows] = {}, x1[kRows] = {}, x2[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        if (at.row + r < rows) {
            g[r] = load(grad + (at.row + r) * m + at.col);
            x1[r] = load(x + first + r * n);
            if constexpr (kGated) x2[r] = load(x + first + r * n + m);
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        if (at.row + r < rows) {
            float out[kHalves][kColumns];
#pragma unroll
            for (int i = 0; i < kColumns; i++) {
                float d[kHalves];
                backward(element(g[r], i), element(x1[r], i), element(x2[r], i), d);
#pragma unroll
                for (int h = 0; h < kHalves; h++) {
                    out[h][i] = d[h];
#ifdef AMAX
                    amax = larger(amax, d[h]);
#endif
                }
            }
#pragma unroll
            for (int h = 0; h < kHalves; h++) store(dx + first + r * n + h * m, out[h]);
        }
    }
#ifdef AMAX
    leave_amax(amax, partial);
#endif
}
#endif
