// What every cast kernel does with a number: scale, convert, note the amax.
//
//     q = satfinite_rne(fp32(x) * scale)      FP8: 0 E4M3, 1 E5M2; NaN and infinite x become 0x7F
//     amax[0] = max(amax[0], max |x|)         of x not scaled, NaN ignored, infinity counts
#pragma once
#include "ptx/cvt.cuh"

namespace twin {

// x * scale, one fp32 rounding; NaN where x is infinite. Of a finite x the fma adds +-0, which changes no word.
__device__ __forceinline__ float scaled(float x, float scale) { return __fmaf_rn(x, 0.0f, __fmul_rn(x, scale)); }

// Codes of two values, each multiplied by `scale`; the first in the low byte.
__device__ __forceinline__ unsigned quantize2(float first, float second, float scale) {
    static_assert(FP8 == 0 || FP8 == 1, "FP8 is 0 (E4M3) or 1 (E5M2)");
    const float low = scaled(first, scale), high = scaled(second, scale);
    return FP8 == 0 ? cvt_e4m3x2(low, high) : cvt_e5m2x2(low, high);
}

// Codes of four values, the first in the low byte.
__device__ __forceinline__ unsigned quantize4(const float* v, float scale) {
    return quantize2(v[0], v[1], scale) | quantize2(v[2], v[3], scale) << 16;
}

// fmaxf gives the other operand where one is NaN, so NaN never gets in.
__device__ __forceinline__ float amax_of(float so_far, float x) { return fmaxf(so_far, fabsf(x)); }

// *slot = max(*slot, the block's amax). As integers: the words of floats that are not negative have the order of their
// values, and an integer maximum does not depend on which block comes first.
template <int kWarps>
__device__ __forceinline__ void commit_amax(float amax, float* slot) {
    __shared__ unsigned words[kWarps];
    const unsigned word = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(amax));
    if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = word;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned most = words[0];
#pragma unroll
        for (int warp = 1; warp < kWarps; warp++) most = max(most, words[warp]);
        if (most != 0) atomicMax(reinterpret_cast<int*>(slot), static_cast<int>(most));
    }
}

}  // namespace twin
