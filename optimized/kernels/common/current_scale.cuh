// The scale of a tensor's own amax, for whatever computes it in passing (reference/ops/casts/current_scale.py).
//
// Each block of a grid leaves the largest magnitude that it has seen, and the kernel `total` of casts/current_scale.cu,
// launched early, makes the scale of all of them. A counter by which the last block could know that it is the last would
// have to be cleared by a launch of its own.
#pragma once

namespace twin {

// NaN is passed over: fmaxf gives the other operand.
__device__ __forceinline__ float larger(float so_far, float x) { return fmaxf(so_far, fabsf(x)); }

// The largest of all threads' numbers of 0 or more, in thread 0. Their words have the order of their values.
template <int kWarps>
__device__ __forceinline__ float largest_of_block(float amax) {
    __shared__ unsigned words[kWarps];
    const unsigned word = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(amax));
    if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = word;
    __syncthreads();
    unsigned most = words[0];
    if (threadIdx.x == 0) {
#pragma unroll
        for (int warp = 1; warp < kWarps; warp++) most = max(most, words[warp]);
    }
    return __uint_as_float(most);
}

// fp8_max / max(amax, epsilon): 1 where that amax is 0 or infinite, at most the largest fp32 number.
__device__ __forceinline__ float current_scale_of(float amax, float fp8_max, float epsilon, bool power_of_two) {
    constexpr unsigned kInfinity = 0x7F800000, kLargest = 0x7F7FFFFF;
    amax = fmaxf(amax, epsilon);
    if (amax == 0.0f || __float_as_uint(amax) == kInfinity) return 1.0f;
    unsigned word = __float_as_uint(__fdiv_rn(fp8_max, amax));
    if (word == kInfinity) word = kLargest;
    return __uint_as_float(power_of_two ? word & kInfinity : word);
}

}  // namespace twin
