// A row's sum in its written order (norm_row.cuh), by a block of threads, for a row of any length.
#pragma once
#include "norm_row.cuh"

namespace twin {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxStripes = 8192;  // hidden up to 2^21

// The sum over the row, for every thread. each(at, v) fills v with elements at .. at + 7, +0.0 beyond the end.
template <class Each>
__device__ __forceinline__ float block_row_sum8(int hidden, Each each) {
    __shared__ float sums[kMaxStripes], next[kMaxStripes / 2];
    int stripes = 4;
    while (stripes * kStripe < hidden) stripes *= 2;
    __syncthreads();  // the sum before has been read
    for (int i = threadIdx.x / 32; i < stripes; i += kWarps) {
        float v[8];
        each(kStripe * i + static_cast<int>(threadIdx.x) % 32 * 8, v);
        const float lane[1] = {tree8(v)};
        const float sum = lane_sum(lane);
        if (threadIdx.x % 32 == 0) sums[i] = sum;
    }
    float *from = sums, *to = next;
    for (int n = stripes / 2; n > 0; n /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += kThreads) to[i] = from[2 * i] + from[2 * i + 1];
        float* const swapped = from;
        from = to, to = swapped;
    }
    __syncthreads();
    return from[0];
}

// The same, element by element: value(at).
template <class Value>
__device__ __forceinline__ float block_row_sum(int hidden, Value value) {
    return block_row_sum8(hidden, [&](int at, float(&v)[8]) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = at + j < hidden ? value(at + j) : 0.0f;
    });
}

}  // namespace twin
