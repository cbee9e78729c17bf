// amax: the largest magnitude, and nothing else.
//
//     amax[0] = max(amax[0], max |x[i]|)      x widened to fp32, NaN ignored, infinity counts
//
// x [count] fp32, bf16 or fp16 (WIDE), any count, 16-byte aligned. The maximum is one of integers, so the
// order in which blocks arrive does not matter.
#define FP8 0
#include "wide.cuh"
#include "quantize.cuh"

constexpr int THREADS = 256;
constexpr int UNROLL = 4;

extern "C" __global__ __launch_bounds__(THREADS) void amax(
    const wide_t* __restrict__ x, float* amax_slot, long long count) {
    const long long vectors = count / LANES;
    const long long stride = static_cast<long long>(gridDim.x) * THREADS * UNROLL;
    float most = 0.0f;
    for (long long first = static_cast<long long>(blockIdx.x) * THREADS * UNROLL + threadIdx.x; first < vectors;
         first += stride) {
        Vector<LANES> v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const long long i = first + u * THREADS;
            v[u] = i < vectors ? load_once<LANES>(x + i * LANES) : Vector<LANES>{};
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
#pragma unroll
            for (int i = 0; i < LANES; ++i) most = amax_of(most, widen(v[u], i));
    }
    // The last elements, short of a vector.
    const long long rest = vectors * LANES + threadIdx.x;
    if (blockIdx.x == 0 && rest < count) most = amax_of(most, widen(x[rest]));
    commit_amax<THREADS / 32>(most, amax_slot);
}
