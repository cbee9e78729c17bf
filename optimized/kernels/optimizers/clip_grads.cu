// clip_grads: scale many tensors by a coefficient of a norm on the device; formulas: reference/ops/optimizers/clip_grads.py.
//
//     c = (1 / (norm + 1e-6)) max_norm, 1 where that is more; NaN stays
//     x = round(fp32(x) c)                       x is WIDE
//
// Where c is 1 nothing is read or written.
#include "common/multi_tensor.cuh"

using namespace twin;

struct Entry {
    wide_t* x;
    long long count;
    int first_block, aligned;
};

struct Table {
    Entry tensors[CAPACITY];
};

extern "C" __global__ void __launch_bounds__(kThreads)
    clip_grads(const __grid_constant__ Table table, int tensors, const float* norm, float max_norm) {
    const float c = (1.0f / (*norm + 1e-6f)) * max_norm;
    if (c >= 1.0f) return;
    const Entry& t = tensor_of_block<CAPACITY>(table.tensors, tensors);
    const long long first = (static_cast<long long>(blockIdx.x - t.first_block) * kThreads + threadIdx.x) * kElements;
    if (first >= t.count) return;
    const bool whole = t.aligned && first + kElements <= t.count;
    float x[kElements];
    load(x, t.x, first, t.count, whole);
#pragma unroll
    for (int i = 0; i < kElements; i++) x[i] = x[i] * c;
    store(t.x, x, first, t.count, whole);
}
