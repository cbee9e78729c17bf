// amax: the largest magnitude, and nothing else.
//
//     amax[0] = max(amax[0], max |x[i]|)      x widened to fp32, NaN ignored, infinity counts
//
// x [count] fp32, bf16 or fp16 (WIDE), any count, 16-byte aligned.
#define FP8 0
#include "amax_share.cuh"
#include "common/quantize.cuh"

using namespace twin;

extern "C" __global__ void __launch_bounds__(kThreads)
    amax(const wide_t* __restrict__ x, float* amax_slot, long long count) {
    commit_amax<kThreads / 32>(largest_of_share(x, count), amax_slot);
}
