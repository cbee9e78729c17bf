// What the kernels that look for a tensor's largest magnitude have in common: a block's share of the tensor.
#pragma once
#include "common/wide.cuh"

namespace twin {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

struct Itself {
    __device__ __forceinline__ float operator()(float x) const { return x; }
};

// max |of(x[i])| of what this thread reads of x [count], NaN ignored. All blocks of kThreads together read each element
// once. of(0) is 0.
template <class Of = Itself>
__device__ __forceinline__ float largest_of_share(const wide_t* __restrict__ x, long long count, const Of& of = {}) {
    const long long vectors = count / kLanes;
    const long long stride = static_cast<long long>(gridDim.x) * kThreads * kUnroll;
    float most = 0.0f;
    for (long long first = static_cast<long long>(blockIdx.x) * kThreads * kUnroll + threadIdx.x; first < vectors;
         first += stride) {
        Vector<kLanes> v[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            const long long i = first + u * kThreads;
            v[u] = i < vectors ? load_once<kLanes>(x + i * kLanes) : Vector<kLanes>{};
        }
#pragma unroll
        for (int u = 0; u < kUnroll; u++)
#pragma unroll
            for (int i = 0; i < kLanes; i++) most = fmaxf(most, fabsf(of(widen(v[u], i))));
    }
    // The last elements, short of a vector.
    const long long rest = vectors * kLanes + threadIdx.x;
    if (blockIdx.x == 0 && rest < count) most = fmaxf(most, fabsf(of(widen(x[rest]))));
    return most;
}

}  // namespace twin
