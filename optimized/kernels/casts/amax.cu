// amax: the largest magnitude, and nothing else.
//
//     amax[0] = max(amax[0], max |x[i]|)      x widened to fp32, NaN ignored, infinity counts
//
// x [count] fp32, bf16 or fp16 (WIDE), any count, 16-byte aligned.
#define FP8 0
#include "common/wide.cuh"
#include "common/quantize.cuh"

using namespace twin;

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

extern "C" __global__ void __launch_bounds__(kThreads)
    amax(const wide_t* __restrict__ x, float* amax_slot, long long count) {
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
            for (int i = 0; i < kLanes; i++) most = amax_of(most, widen(v[u], i));
    }
    // The last elements, short of a vector.
    const long long rest = vectors * kLanes + threadIdx.x;
    if (blockIdx.x == 0 && rest < count) most = amax_of(most, widen(x[rest]));
    commit_amax<kThreads / 32>(most, amax_slot);
}
