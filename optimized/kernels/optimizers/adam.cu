// adam: one step of Adam for up to CAPACITY tensors in one launch; formulas and order: reference/ops/optimizers/adam.py.
//
//     g = grad [+ decay p]                         [ ]: decay as part of the gradient, not decoupled
//     m = beta1 m + rest1 g                        rest = 1 - beta, rounded to fp32
//     v = beta2 v + (rest2 g) g
//     u = (m / c1) / (sqrt(v / c2) + eps) [+ decay p]
//     p = p - lr u
//
// grad and rounded (which may be null) are WIDE, m and v fp32, p fp32 (MASTER 1) or WIDE (MASTER 0). Bound by memory: a
// thread takes eight neighbours, 16 bytes a load. Blocks are numbered through all tensors, those of tensor i from
// first_block on. The table is a kernel argument by value.
#include "common/multi_tensor.cuh"

using namespace twin;

#if MASTER
using param_t = float;
#else
using param_t = wide_t;
#endif

struct Entry {
    const wide_t* grad;
    param_t* param;
    float* exp_avg;
    float* exp_avg_sq;
    wide_t* rounded;
    long long count;
    int first_block, aligned;  // aligned: every pointer is at a multiple of 16 bytes
};

struct Table {
    Entry tensors[CAPACITY];
};

extern "C" __global__ void __launch_bounds__(kThreads)
    adam(const __grid_constant__ Table table, int tensors, float lr, float beta1, float rest1, float beta2, float rest2,
         float eps, float decay, float c1, float c2, int decoupled) {
    const Entry& t = tensor_of_block<CAPACITY>(table.tensors, tensors);
    const long long first = (static_cast<long long>(blockIdx.x - t.first_block) * kThreads + threadIdx.x) * kElements;
    if (first >= t.count) return;
    const bool whole = t.aligned && first + kElements <= t.count;
    float g[kElements], p[kElements], m[kElements], v[kElements];
    load(g, t.grad, first, t.count, whole);
    load(p, t.param, first, t.count, whole);
    load(m, t.exp_avg, first, t.count, whole);
    load(v, t.exp_avg_sq, first, t.count, whole);
#pragma unroll
    for (int i = 0; i < kElements; i++) {
        if (!decoupled) g[i] = g[i] + decay * p[i];
        m[i] = beta1 * m[i] + rest1 * g[i];
        v[i] = beta2 * v[i] + (rest2 * g[i]) * g[i];
        float u = (m[i] / c1) / (sqrtf(v[i] / c2) + eps);
        if (decoupled) u = u + decay * p[i];
        p[i] = p[i] - lr * u;
    }
    store(t.exp_avg, m, first, t.count, whole);
    store(t.exp_avg_sq, v, first, t.count, whole);
    store(t.param, p, first, t.count, whole);
    if (t.rounded != nullptr) store(t.rounded, p, first, t.count, whole);
}
