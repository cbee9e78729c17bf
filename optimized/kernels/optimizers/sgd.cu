// sgd: one step of SGD for up to CAPACITY tensors in one launch; formulas and order: reference/ops/optimizers/sgd.py.
//
//     g = grad [+ decay p]                                        [ ]: decay before the momentum, if it is not 0
//     b = momentum b + rest g, or g in the first run              only where there is a buffer; rest = 1 - dampening
//     g = b, or g + momentum b with Nesterov's                    the same
//     p = p - lr (g [+ decay p])                                  [ ]: decay after the momentum
//
// grad is WIDE, p and b fp32 (MASTER 1) or WIDE (MASTER 0). Bound by memory: a thread takes eight neighbours.
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
    param_t* buffer;  // null without momentum
    long long count;
    int first_block, aligned;
};

struct Table {
    Entry tensors[CAPACITY];
};

extern "C" __global__ void __launch_bounds__(kThreads)
    sgd(const __grid_constant__ Table table, int tensors, float lr, float momentum, float rest, float decay,
        int nesterov, int first_run, int decay_last) {
    const Entry& t = tensor_of_block<CAPACITY>(table.tensors, tensors);
    const long long first = (static_cast<long long>(blockIdx.x - t.first_block) * kThreads + threadIdx.x) * kElements;
    if (first >= t.count) return;
    const bool whole = t.aligned && first + kElements <= t.count;
    const bool has_buffer = t.buffer != nullptr;
    float g[kElements], p[kElements], b[kElements] = {};
    load(g, t.grad, first, t.count, whole);
    load(p, t.param, first, t.count, whole);
    if (has_buffer && !first_run) load(b, t.buffer, first, t.count, whole);
#pragma unroll
    for (int i = 0; i < kElements; i++) {
        if (decay != 0.0f && !decay_last) g[i] = g[i] + decay * p[i];
        if (has_buffer) {
            b[i] = first_run ? g[i] : b[i] * momentum + rest * g[i];
            g[i] = nesterov ? g[i] + momentum * b[i] : b[i];
        }
        if (decay != 0.0f && decay_last) g[i] = g[i] + decay * p[i];
        p[i] = p[i] - lr * g[i];
    }
    if (has_buffer) store(t.buffer, b, first, t.count, whole);
    store(t.param, p, first, t.count, whole);
}
