// Softmax of rows of scores, scaled and masked, and its backward. Definition: reference/ops/attentions/softmax.py.
//
// x, y, grad, dx [rows, cols] of one type, rows = b h sq, cols = skv. A warp takes a row; its lane l owns elements
// 8 (32 i + l) + j.
//
// Bound by memory: 4 bytes an element in bf16, 6 backward. A row of up to 256 GROUPS elements stays in registers, and
// all of its loads are in flight at once. A longer row (GROUPS 0) is read three times: for the maximum, the sum, the
// result. VECTOR 1: cols a multiple of 8, rows at multiples of 16 bytes; VECTOR 0: element by element.
//
// Defines: WIDE (0 fp32, 1 bf16, 2 fp16), GROUPS, VECTOR, MASKED (1: with a mask beside the causal rule).
#include "common/elementary.cuh"
#include "common/row_sum.cuh"
#include "common/wide.cuh"
#include "common/wide_store.cuh"

using namespace twin;

constexpr int kElements = 8;
constexpr int kWarps = 4;
constexpr int kBlocks = GROUPS < 8 ? 5 : WIDE == 0 ? 3 : 4;  // on a multiprocessor, at least
constexpr int kStride = 32 * kElements;

struct Mask {
    const unsigned char* pointer;
    long long b, h, i, j;  // strides, 0 where broadcast
};

// Eight elements from x on, of which `left` exist; the others are zeros. VECTOR 1: all of them or none.
__device__ __forceinline__ Eight load(const wide_t* x, int left) {
#if VECTOR
    return left > 0 ? load8(x) : Eight{};
#else
    return load_elements<kElements>(x, left);
#endif
}

__device__ __forceinline__ void store(wide_t* y, const float (&v)[kElements], int left) {
#if VECTOR
    if (left > 0) store_eight(y, v);
#else
    store_elements(y, v, left);
#endif
}

// What is subtracted from a row's scores: their maximum, or 0 if all are hidden (-inf), so that exp(-inf - it) is 0.
__device__ __forceinline__ float start_of(float top) {
#pragma unroll
    for (int h = 16; h > 0; h /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, h));
    return top == __int_as_float(static_cast<int>(0xFF800000u)) ? 0.0f : top;
}

__device__ __forceinline__ float inverse_of(float total) { return total == 0.0f ? 0.0f : __fdiv_rn(1.0f, total); }

// Scores of eight elements: -inf where masked, and from the `visible`-th on, which the causal rule hides.
__device__ __forceinline__ void scores(float (&v)[kElements], const Eight& x, int visible, float scale,
                                       const unsigned char* mask, long long mask_step) {
#pragma unroll
    for (int i = 0; i < kElements; i++) v[i] = __fmul_rn(widen(x, i), scale);
    if (MASKED || visible < kElements) {
#pragma unroll
        for (int i = 0; i < kElements; i++) {
            bool hidden = i >= visible;
            if (MASKED && !hidden) hidden = __ldg(mask + i * mask_step) != 0;
            if (hidden) v[i] = __int_as_float(static_cast<int>(0xFF800000u));
        }
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
    for (int h = 16; h > 0; h /= 2) total = total + __shfl_xor_sync(kAllLanes, total, h);
    return total;
}

// shift: query i sees key j if j <= i + shift; 2^30 where there is no causal rule.
extern "C" __global__ void __launch_bounds__(32 * kWarps, kBlocks)
    softmax(const wide_t* x, wide_t* y, long long rows, int cols, int sq, int heads, int shift, float scale,
            const __grid_constant__ Mask m) {
    const long long row = static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (row >= rows) return;
    const int query = static_cast<int>(row % sq), first = threadIdx.x % 32 * kElements;
    // Elements from the lane's first to the row's end, and to the last that the causal rule shows; the rest is not
    // read.
    const int shown = min(cols, query + shift + 1), left = cols - first, visible = shown - first;
    x += row * cols + first;
    y += row * cols + first;
#if GROUPS > 0
    Eight loaded[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) loaded[g] = load(x + kStride * g, visible - kStride * g);
#endif
    const long long matrix = row / sq;
    const unsigned char* const mask =
        m.pointer + matrix / heads * m.b + matrix % heads * m.h + query * m.i + first * m.j;
    // Eight scores from kStride * g on.
    const auto scores_of = [&](float (&v)[kElements], const Eight& eight, int g) {
        scores(v, eight, visible - kStride * g, scale, mask + kStride * g * m.j, m.j);
    };
    float sums[kElements] = {};
    float top = __int_as_float(static_cast<int>(0xFF800000u));
#if GROUPS > 0
    float v[GROUPS][kElements];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        if (kStride * g >= shown) break;
        scores_of(v[g], loaded[g], g);
#pragma unroll
        for (int i = 0; i < kElements; i++) top = fmaxf(top, v[g][i]);
    }
    const float from = start_of(top);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int i = 0; i < kElements; i++) {
            v[g][i] = kStride * g < shown ? twin::exp(v[g][i] - from) : 0.0f;  // the same for the whole warp
            sums[i] = sums[i] + v[g][i];
        }
    }
    const float inverse = inverse_of(tree(sums));
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int i = 0; i < kElements; i++) v[g][i] = __fmul_rn(v[g][i], inverse);
        store(y + kStride * g, v[g], left - kStride * g);
    }
#else
    float v[kElements];
    const auto again = [&](int g) { scores_of(v, load(x + kStride * g, visible - kStride * g), g); };
    for (int g = 0; kStride * g < left; g++) {
        again(g);
#pragma unroll
        for (int i = 0; i < kElements; i++) top = fmaxf(top, v[i]);
    }
    const float from = start_of(top);
    for (int g = 0; kStride * g < left; g++) {
        again(g);
#pragma unroll
        for (int i = 0; i < kElements; i++) sums[i] = sums[i] + twin::exp(v[i] - from);
    }
    const float inverse = inverse_of(tree(sums));
    for (int g = 0; kStride * g < left; g++) {
        again(g);
#pragma unroll
        for (int i = 0; i < kElements; i++) v[i] = __fmul_rn(twin::exp(v[i] - from), inverse);
        store(y + kStride * g, v, left - kStride * g);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    softmax_backward(const wide_t* grad, const wide_t* y, wide_t* dx, long long rows, int cols, float scale) {
    const long long row = static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (row >= rows) return;
    const int first = threadIdx.x % 32 * kElements, left = cols - first;
    grad += row * cols + first, y += row * cols + first, dx += row * cols + first;
    float sums[kElements] = {}, v[kElements];
    const auto add = [&](const Eight& g, const Eight& p) {
#pragma unroll
        for (int i = 0; i < kElements; i++) sums[i] = __fmaf_rn(widen(p, i), widen(g, i), sums[i]);
    };
    const auto finish = [&](const Eight& g, const Eight& p, float total, int at) {
#pragma unroll
        for (int i = 0; i < kElements; i++) v[i] = __fmul_rn(scale, __fmul_rn(widen(p, i), widen(g, i) - total));
        store(dx + at, v, left - at);
    };
#if GROUPS > 0
    Eight g[GROUPS], p[GROUPS];
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
        g[n] = load(grad + kStride * n, left - kStride * n);
        p[n] = load(y + kStride * n, left - kStride * n);
    }
#pragma unroll
    for (int n = 0; n < GROUPS; n++) add(g[n], p[n]);
    const float total = tree(sums);
#pragma unroll
    for (int n = 0; n < GROUPS; n++) finish(g[n], p[n], total, kStride * n);
#else
    for (int at = 0; at < left; at += kStride) add(load(grad + at, left - at), load(y + at, left - at));
    const float total = tree(sums);
    for (int at = 0; at < left; at += kStride) finish(load(grad + at, left - at), load(y + at, left - at), total, at);
#endif
}
