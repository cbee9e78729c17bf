// Softmax of rows of scores, scaled and masked, and its backward. Definition: reference/ops/softmax.py.
//
// x, y, grad, dx [rows, cols] of one type, rows = b h sq, cols = skv. One warp a row; lane l owns elements
// 8 (32 i + l) + j. A row of up to 256 GROUPS elements stays in registers; a longer one (GROUPS 0) is read again for
// each of maximum, sum and result.
//
// Defines: WIDE (0 fp32, 1 bf16, 2 fp16), GROUPS.
#include "elementary.cuh"
#include "row_sum.cuh"
#include "wide.cuh"
#include "wide_store.cuh"

using namespace twin;

constexpr int kElements = 8;
constexpr int kWarps = 4;
constexpr int kStride = 32 * kElements;

struct Mask {
    const unsigned char* pointer;
    long long b, h, i, j;  // strides, 0 where broadcast
};

// Eight elements of a row from `at` on; those from `end` on are zeros. `aligned`: 16-byte loads will do.
__device__ __forceinline__ void load(float (&v)[kElements], const wide_t* x, int at, int end, bool aligned) {
    if (aligned && at + kElements <= end) {
#pragma unroll
        for (int part = 0; part < kElements / LANES; part++) {
            const uint4 words = reinterpret_cast<const uint4*>(x + at)[part];
            const Vector<LANES> vector{{words.x, words.y, words.z, words.w}};
#pragma unroll
            for (int i = 0; i < LANES; i++) v[part * LANES + i] = widen(vector, i);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kElements; i++) v[i] = at + i < end ? widen(x[at + i]) : 0.0f;
    }
}

__device__ __forceinline__ void store(wide_t* y, const float (&v)[kElements], int at, int end, bool aligned) {
    if (aligned && at + kElements <= end) {
        store_eight(y + at, v);
    } else {
#pragma unroll
        for (int i = 0; i < kElements; i++)
            if (at + i < end) y[at + i] = narrow(v[i]);
    }
}

// What a row's scores are taken from. A hidden score is -inf, and exp(-inf - top) is 0 if top is a number.
__device__ __forceinline__ float start_of(float top) {
#pragma unroll
    for (int h = 16; h > 0; h /= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, h));
    return top == __int_as_float(static_cast<int>(0xFF800000u)) ? 0.0f : top;
}

__device__ __forceinline__ float inverse_of(float total) { return total == 0.0f ? 0.0f : __fdiv_rn(1.0f, total); }

// Scores of eight elements; -inf beyond `limit` (the end of what the causal rule shows) and where masked.
__device__ __forceinline__ void scores(float (&v)[kElements], const wide_t* x, int at, int cols, int limit, float scale,
                                       const unsigned char* mask, long long mask_step, bool aligned) {
    load(v, x, at, limit > at ? cols : 0, aligned);  // what the causal rule hides is not read
#pragma unroll
    for (int i = 0; i < kElements; i++) {
        bool hidden = at + i >= limit;
        if (mask != nullptr && !hidden) hidden = __ldg(mask + (at + i) * mask_step) != 0;
        v[i] = hidden ? __int_as_float(static_cast<int>(0xFF800000u)) : __fmul_rn(v[i], scale);
    }
}

// The sum of a warp's accumulators, in every lane.
__device__ __forceinline__ float tree(float (&sums)[kElements]) {
#pragma unroll
    for (int h = kElements / 2; h > 0; h /= 2)
#pragma unroll
        for (int j = 0; j < h; j++) sums[j] = sums[j] + sums[j + h];
    float total = sums[0];
#pragma unroll
    for (int h = 16; h > 0; h /= 2) total = total + __shfl_xor_sync(ALL, total, h);
    return total;
}

// shift: query i sees key j if j <= i + shift; 2^30 where there is no causal rule.
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    softmax(const wide_t* x, wide_t* y, long long rows, int cols, int sq, int heads, int shift, float scale,
            const __grid_constant__ Mask m, int aligned) {
    const long long row = static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (row >= rows) return;
    const int query = static_cast<int>(row % sq), first = threadIdx.x % 32 * kElements;
    const long long matrix = row / sq;
    const unsigned char* mask =
        m.pointer == nullptr ? nullptr : m.pointer + matrix / heads * m.b + matrix % heads * m.h + query * m.i;
    const int limit = min(cols, query + shift + 1);
    x += row * cols;
    y += row * cols;
    float sums[kElements] = {};
    float top = __int_as_float(static_cast<int>(0xFF800000u));
#if GROUPS > 0
    float v[GROUPS][kElements];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        scores(v[g], x, first + kStride * g, cols, limit, scale, mask, m.j, aligned);
#pragma unroll
        for (int i = 0; i < kElements; i++) top = fmaxf(top, v[g][i]);
    }
    const float from = start_of(top);
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int i = 0; i < kElements; i++) {
            v[g][i] = twin::exp(v[g][i] - from);
            sums[i] = sums[i] + v[g][i];
        }
    const float inverse = inverse_of(tree(sums));
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int i = 0; i < kElements; i++) v[g][i] = __fmul_rn(v[g][i], inverse);
        store(y, v[g], first + kStride * g, cols, aligned);
    }
#else
    float v[kElements];
    for (int at = first; at < cols; at += kStride) {
        scores(v, x, at, cols, limit, scale, mask, m.j, aligned);
#pragma unroll
        for (int i = 0; i < kElements; i++) top = fmaxf(top, v[i]);
    }
    const float from = start_of(top);
    for (int at = first; at < cols; at += kStride) {
        scores(v, x, at, cols, limit, scale, mask, m.j, aligned);
#pragma unroll
        for (int i = 0; i < kElements; i++) sums[i] = sums[i] + twin::exp(v[i] - from);
    }
    const float inverse = inverse_of(tree(sums));
    for (int at = first; at < cols; at += kStride) {
        scores(v, x, at, cols, limit, scale, mask, m.j, aligned);
#pragma unroll
        for (int i = 0; i < kElements; i++) v[i] = __fmul_rn(twin::exp(v[i] - from), inverse);
        store(y, v, at, cols, aligned);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    softmax_backward(const wide_t* grad, const wide_t* y, wide_t* dx, long long rows, int cols, float scale,
                     int aligned) {
    const long long row = static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (row >= rows) return;
    const int first = threadIdx.x % 32 * kElements;
    grad += row * cols, y += row * cols, dx += row * cols;
    float sums[kElements] = {};
#if GROUPS > 0
    float g[GROUPS][kElements], v[GROUPS][kElements];
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
        load(g[n], grad, first + kStride * n, cols, aligned);
        load(v[n], y, first + kStride * n, cols, aligned);
    }
#pragma unroll
    for (int n = 0; n < GROUPS; n++)
#pragma unroll
        for (int i = 0; i < kElements; i++) sums[i] = __fmaf_rn(v[n][i], g[n][i], sums[i]);
    const float total = tree(sums);
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
#pragma unroll
        for (int i = 0; i < kElements; i++) v[n][i] = __fmul_rn(scale, __fmul_rn(v[n][i], g[n][i] - total));
        store(dx, v[n], first + kStride * n, cols, aligned);
    }
#else
    float g[kElements], v[kElements];
    for (int at = first; at < cols; at += kStride) {
        load(g, grad, at, cols, aligned);
        load(v, y, at, cols, aligned);
#pragma unroll
        for (int i = 0; i < kElements; i++) sums[i] = __fmaf_rn(v[i], g[i], sums[i]);
    }
    const float total = tree(sums);
    for (int at = first; at < cols; at += kStride) {
        load(g, grad, at, cols, aligned);
        load(v, y, at, cols, aligned);
#pragma unroll
        for (int i = 0; i < kElements; i++) v[i] = __fmul_rn(scale, __fmul_rn(v[i], g[i] - total));
        store(dx, v, at, cols, aligned);
    }
#endif
}
