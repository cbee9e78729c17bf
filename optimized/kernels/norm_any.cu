// norm_any: norm.cu's result for rows of any length; a block of threads takes a row.
//
// For hidden beyond 16384 (VECTOR 1: a multiple of 8, 16-byte aligned rows) and for every other hidden (VECTOR 0:
// element by element, at a fraction of the speed). The row is read three times, from L1 or L2 after the first.
#include "norm_block.cuh"

using namespace twin;

// The sum over the row of f(x); every thread gets it.
template <class F>
__device__ __forceinline__ float sum_of(const wide_t* row, int hidden, F f) {
#if VECTOR
    return block_row_sum8(hidden, [&](int at, float(&v)[8]) {
        const Eight loaded = at < hidden ? load8(row + at) : Eight{};
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = at < hidden ? f(widen(loaded, j)) : 0.0f;
    });
#else
    return block_row_sum(hidden, [&](int at) { return f(widen(row[at])); });
#endif
}

__device__ __forceinline__ void store_one(void* y, int out, size_t at, float value) {
    if (out == 0)
        static_cast<float*>(y)[at] = value;
    else
        static_cast<unsigned short*>(y)[at] = out == 1 ? cvt_bf16_f32(value) : cvt_f16_f32(value);
}

extern "C" __global__ void __launch_bounds__(kThreads) norm_any(
    const wide_t* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
    void* __restrict__ y, float* __restrict__ mean, float* __restrict__ rstd, int rows, int hidden, float eps,
    int zero_centered, int parameters, int out) {
    const float n = static_cast<float>(hidden);
    const size_t first = static_cast<size_t>(blockIdx.x) * hidden;
    const wide_t* row = x + first;
    float center = 0.0f;
#if KIND == 0
    center = sum_of(row, hidden, [](float v) { return v; }) / n;
#endif
    const float squares = sum_of(row, hidden, [&](float v) {
        const float xc = centered(v, center);
        return xc * xc;
    });
    const float inverse = 1.0f / sqrtf(squares / n + eps);
    if (threadIdx.x == 0) {
        if (KIND == 0) mean[blockIdx.x] = center;
        rstd[blockIdx.x] = inverse;
    }
    for (int at = threadIdx.x; at < hidden; at += kThreads) {
        const float gamma = parameter(weight, parameters, at);
        float v = centered(widen(row[at]), center) * inverse;
        v = v * (zero_centered ? gamma + 1.0f : gamma);
        if (bias != nullptr) v = v + parameter(bias, parameters, at);
        store_one(y, out, first + at, v);
    }
}
