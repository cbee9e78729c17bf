// norm: LayerNorm or RMSNorm.
//
//     layernorm: mean = rowsum(x) / n, xc = x - mean         rmsnorm: xc = x, no mean, no bias
//     rstd = 1 / sqrt(rowsum(xc * xc) / n + eps)             IEEE division and square root
//     y = ((xc * rstd) * gamma) + beta                       fp32, each operation rounded; one rounding to `out`
//     partial[b] = max |y| of block b                        AMAX: of the rounded numbers, NaN ignored
//
// AMAX_ALONE: y is not written, and the last rows come first: who reads x next, from its first rows on, finds these in L2.
//
// x, y [rows, hidden], x of type WIDE, y of type `out`; hidden a multiple of 8; rows 16-byte aligned. weight, bias
// [hidden] of type `parameters`; gamma is weight, or weight + 1. mean, rstd fp32 [rows]. rowsum: norm_row.cuh.
//
// Bound by memory: 4 bytes an element in bf16. ROW_WARPS warps hold a row in registers, 1024 elements each, so that
// nothing is read, widened or centered twice. Blocks are persistent: gamma and beta stay in shared memory as fp32, and
// a group of warps loads its next row while it works on one.
//
// Defines: WIDE, KIND (norm_row.cuh). For rows of up to 16384 elements, a multiple of 8: ROW_WARPS, ROWS (of a block at
// a time), BLOCKS (of a multiprocessor), WHOLE (0 | 1: norm_registers.cuh), AMAX (if defined, y's amax is found as
// well), LEADS (if defined, the next kernel may begin early). Any other row takes the form without them: VECTOR (0 | 1).
#include "norm_row.cuh"
#ifdef ROW_WARPS
#include "norm_registers.cuh"
#endif
#include "ptx/grid.cuh"
#ifdef AMAX
#include "common/current_scale.cuh"
#endif

using namespace twin;

#ifdef AMAX_ALONE
#define TWIN_ROW(index) (rows - 1 - (index))
#else
#define TWIN_ROW(index) index
#endif

#ifdef ROW_WARPS

struct Config {
    static constexpr bool kLayerNorm = KIND == 0, kWhole = WHOLE;
    static constexpr int kRowWarps = ROW_WARPS;
    static constexpr int kRows = ROWS, kBlocks = BLOCKS;  // rows of a block at a time, blocks of a multiprocessor
};
using Rows = RegisterRows<Config>;
using Row = Rows::Row;
using Held = Rows::Held;
using Packed = Rows::Packed;

constexpr int kRowThreads = 32 * Config::kRowWarps, kRows = Config::kRows, kThreads = kRowThreads * kRows;

// One rounding to `out`: 0 fp32, 1 bf16, 2 fp16.
__device__ __forceinline__ void store_output(void* y, int out, size_t at, const float (&v)[8]) {
    if (out == 0) {
        float4* to = reinterpret_cast<float4*>(static_cast<float*>(y) + at);
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        uint4* to = reinterpret_cast<uint4*>(static_cast<unsigned short*>(y) + at);
        if (out == 1)
            *to = make_uint4(cvt_bf16x2(v[0], v[1]), cvt_bf16x2(v[2], v[3]), cvt_bf16x2(v[4], v[5]),
                             cvt_bf16x2(v[6], v[7]));
        else
            *to =
                make_uint4(cvt_f16x2(v[0], v[1]), cvt_f16x2(v[2], v[3]), cvt_f16x2(v[4], v[5]), cvt_f16x2(v[6], v[7]));
    }
}

#ifdef AMAX
__device__ __forceinline__ float rounded(float v, int out) {
    if (out == 0) return v;
    return out == 1 ? __uint_as_float(static_cast<unsigned>(cvt_bf16_f32(v)) << 16) : cvt_f32_f16(cvt_f16_f32(v));
}
#endif

extern __shared__ float affine[];  // gamma and beta

extern "C" __global__ void __launch_bounds__(kThreads, Config::kBlocks)
#ifdef AMAX
    norm_rows(const wide_t* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
              void* __restrict__ y, float* __restrict__ mean, float* __restrict__ rstd, int rows, int hidden, float eps,
              int zero_centered, int parameters, int out, float* __restrict__ partial) {
    let_next_grid_start();  // `total` of casts/current_scale.cu
    float amax = 0.0f;
#else
    norm_rows(const wide_t* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
              void* __restrict__ y, float* __restrict__ mean, float* __restrict__ rstd, int rows, int hidden, float eps,
              int zero_centered, int parameters, int out) {
#endif
#ifdef LEADS
    let_next_grid_start();  // a product, which loads its weights meanwhile (optimized/cuda/launch.py, `leading`)
#endif
    __shared__ Rows::Slots slots[kRows];
    const int group = threadIdx.x / kRowThreads;
    const int step = gridDim.x * kRows;
    const Held held(hidden);
    int index = blockIdx.x * kRows + group, turn = 0;
    Packed packed, next;
    if (index < rows) packed = held.load(x, TWIN_ROW(index));
    if (kRows >= 4)  // enough threads for all parameters, or nearly
        Rows::stage_parameters(affine, weight, bias, parameters, zero_centered != 0, held.hidden);
    else if (parameters == 0)
        Rows::stage_at_once<0>(affine, weight, bias, zero_centered != 0, held.hidden);
    else if (parameters == 1)
        Rows::stage_at_once<1>(affine, weight, bias, zero_centered != 0, held.hidden);
    else
        Rows::stage_at_once<2>(affine, weight, bias, zero_centered != 0, held.hidden);
#pragma unroll 1
    for (; index < rows; index += step) {
        if (index + step < rows) next = held.load(x, TWIN_ROW(index + step));
        const Row row(packed, held, eps, slots[group], turn, group + 1);
        turn ^= 1;
        row.store_statistics(mean, rstd, TWIN_ROW(index), held);
#ifndef AMAX_ALONE
        const size_t start = static_cast<size_t>(index) * held.hidden + held.first;
#endif
        row.for_each_output(affine, held, [&](int i, const float (&v)[8]) {
#ifndef AMAX_ALONE
            store_output(y, out, start + kStripe * i, v);
#endif
#ifdef AMAX
#pragma unroll
            for (int j = 0; j < 8; j++) amax = larger(amax, v[j]);
#endif
        });
        packed = next;
    }
#ifdef AMAX
    // Rounding keeps the order of numbers: the amax of rounded ones is the amax, rounded.
    amax = largest_of_block<kThreads / 32>(rounded(amax, out));
    if (threadIdx.x == 0) partial[blockIdx.x] = amax;
#endif
}

#else

// A block of threads takes a row: of more than 16384 elements (VECTOR 1: a multiple of 8, 16-byte aligned rows) or of
// any other number (VECTOR 0: element by element, at a fraction of the speed). The row is read three times, from L1 or
// L2 after the first.

struct Config {
    static constexpr bool kLayerNorm = KIND == 0, kVector = VECTOR;
};

// The sum over the row of f(x); every thread gets it.
template <class F>
__device__ __forceinline__ float sum_of(const wide_t* row, int hidden, F f) {
    if constexpr (Config::kVector)
        return block_row_sum8(hidden, [&](int at, float (&v)[8]) {
            const Eight loaded = at < hidden ? load8(row + at) : Eight{};
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = at < hidden ? f(widen(loaded, j)) : 0.0f;
        });
    else
        return block_row_sum(hidden, [&](int at) { return f(widen(row[at])); });
}

__device__ __forceinline__ void store_one(void* y, int out, size_t at, float value) {
    if (out == 0)
        static_cast<float*>(y)[at] = value;
    else
        static_cast<unsigned short*>(y)[at] = out == 1 ? cvt_bf16_f32(value) : cvt_f16_f32(value);
}

extern "C" __global__ void __launch_bounds__(kBlockThreads)
    norm_any(const wide_t* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
             void* __restrict__ y, float* __restrict__ mean, float* __restrict__ rstd, int rows, int hidden, float eps,
             int zero_centered, int parameters, int out) {
    const float n = static_cast<float>(hidden);
    const size_t first = static_cast<size_t>(blockIdx.x) * hidden;
    const wide_t* row = x + first;
    float center = 0.0f;
    if constexpr (Config::kLayerNorm) center = sum_of(row, hidden, [](float v) { return v; }) / n;
    const float squares = sum_of(row, hidden, [&](float v) {
        const float xc = centered<Config::kLayerNorm>(v, center);
        return xc * xc;
    });
    const float inverse = 1.0f / sqrtf(squares / n + eps);
    if (threadIdx.x == 0) {
        if (Config::kLayerNorm) mean[blockIdx.x] = center;
        rstd[blockIdx.x] = inverse;
    }
    for (int at = threadIdx.x; at < hidden; at += kBlockThreads) {
        const float gamma = parameter(weight, parameters, at);
        float v = centered<Config::kLayerNorm>(widen(row[at]), center) * inverse;
        v = v * (zero_centered ? gamma + 1.0f : gamma);
        if (bias != nullptr) v = v + parameter(bias, parameters, at);
        store_one(y, out, first + at, v);
    }
}

#endif
