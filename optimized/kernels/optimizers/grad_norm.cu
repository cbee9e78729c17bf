// grad_norm: the norm of all numbers of many tensors; order of the sums: reference/ops/optimizers/grad_norm.py.
//
//     grad_squares     chunk_sum[k] = sum of x^2 of a chunk, float64; a block a chunk of 32,768 neighbours
//     grad_norm_total  norm = fp32(sqrt(sum of the chunk sums)); one block
//     grad_max         norm = max |x|, NaN above all; as integers: a maximum does not depend on which block comes first
//
// x is WIDE. A square of an fp32 number is exact in float64, so fma(x, x, sum) rounds as x * x + sum does. Bound by
// memory; float64 additions keep up with 16-bit gradients on Hopper alone.
#include "common/multi_tensor.cuh"

using namespace twin;

constexpr int kColumns = kThreads * kElements;
constexpr int kRows = 16;
constexpr int kTotalThreads = 1024;

struct Entry {
    const wide_t* x;
    long long count;
    int first_block, first_sum, aligned, unused;  // first_sum: where the tensor's first chunk stands among the sums
};

struct Table {
    Entry tensors[CAPACITY];
};

// Lane 0's result: the 32 lanes' sum in halves.
__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
    for (int half = 16; half > 0; half /= 2) value += __shfl_down_sync(0xFFFFFFFF, value, half);
    return value;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    grad_squares(const __grid_constant__ Table table, int tensors, double* chunk_sums) {
    const Entry& t = tensor_of_block<CAPACITY>(table.tensors, tensors);
    const int chunk = static_cast<int>(blockIdx.x) - t.first_block;
    const long long start = static_cast<long long>(chunk) * kColumns * kRows + threadIdx.x * kElements;
    double sum[kElements] = {};
#pragma unroll 4
    for (int row = 0; row < kRows; row++) {
        const long long at = start + row * kColumns;
        float x[kElements];
        load(x, t.x, at, t.count, t.aligned && at + kElements <= t.count);
#pragma unroll
        for (int i = 0; i < kElements; i++) sum[i] = fma(static_cast<double>(x[i]), static_cast<double>(x[i]), sum[i]);
    }
#pragma unroll
    for (int half = kElements / 2; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    __shared__ double warps[kThreads / 32];
    const double of_warp = warp_sum(sum[0]);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = of_warp;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int half = kThreads / 64; half > 0; half /= 2)
#pragma unroll
            for (int i = 0; i < half; i++) warps[i] += warps[i + half];
        chunk_sums[t.first_sum + chunk] = warps[0];
    }
}

extern "C" __global__ void __launch_bounds__(kTotalThreads)
    grad_norm_total(const double* __restrict__ chunk_sums, long long count, float* norm) {
    double sum = 0.0;
#pragma unroll 4
    for (long long k = threadIdx.x; k < count; k += kTotalThreads) sum += chunk_sums[k];
    __shared__ double warps[kTotalThreads / 32];
    const double of_warp = warp_sum(sum);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = of_warp;
    __syncthreads();
    if (threadIdx.x < 32) {
        const double all = warp_sum(warps[threadIdx.x]);
        if (threadIdx.x == 0) *norm = static_cast<float>(sqrt(all));
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    grad_max(const __grid_constant__ Table table, int tensors, unsigned* norm) {
    const Entry& t = tensor_of_block<CAPACITY>(table.tensors, tensors);
    const int chunk = static_cast<int>(blockIdx.x) - t.first_block;
    const long long start = static_cast<long long>(chunk) * kColumns * kRows + threadIdx.x * kElements;
    unsigned most = 0;
#pragma unroll 4
    for (int row = 0; row < kRows; row++) {
        const long long at = start + row * kColumns;
        float x[kElements];
        load(x, t.x, at, t.count, t.aligned && at + kElements <= t.count);
#pragma unroll
        for (int i = 0; i < kElements; i++) most = max(most, __float_as_uint(x[i]) & 0x7FFFFFFF);
    }
    __shared__ unsigned warps[kThreads / 32];
    const unsigned of_warp = __reduce_max_sync(0xFFFFFFFF, most);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = of_warp;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int warp = 1; warp < kThreads / 32; warp++) most = max(most, warps[warp]);
        most = max(most, warps[0]);
        if (most != 0) atomicMax(norm, most);
    }
}
