// The scale of a block from its amax; each quotient is one IEEE division (reference/ops/casts/cast_blocks.py).
//
// dialect 0 power_of_two, 1 fp32: scale = fp8_max / amax, in 0 with its mantissa cleared; scale_inv = 1 / scale
//         2 deep_gemm, 3 deep_gemm_ue8m0: scale_inv = amax / fp8_max, in 3 up to a power of two; scale = 1 / scale_inv
#pragma once

namespace twin {

struct BlockScale {
    float scale, scale_inv;
};

// The power of two at or below a number of 0 or more; subnormals give 0.
__device__ __forceinline__ float power_below(float x) { return __uint_as_float(__float_as_uint(x) & 0x7F800000); }

__device__ __forceinline__ BlockScale block_scale(float amax, float epsilon, int dialect) {
    constexpr float kMost = FP8 == 0 ? 448.0f : 57344.0f;
    constexpr unsigned kLargest = WIDE == 0 ? 0x7F7FFFFF : WIDE == 1 ? 0x7F7F0000 : 0x477FE000;  // of x's type
    constexpr unsigned kInfinity = 0x7F800000;
    amax = fmaxf(amax, epsilon);
    if (amax == 0.0f || __float_as_uint(amax) == kInfinity) return {1.0f, 1.0f};
    if (dialect < 2) {
        float scale = __fdiv_rn(kMost, amax);
        if (__float_as_uint(scale) == kInfinity) scale = __uint_as_float(kLargest);
        if (dialect == 0) scale = power_below(scale);
        return {scale, __fdiv_rn(1.0f, scale)};
    } else {
        float scale_inv = fmaxf(__fdiv_rn(amax, kMost), 0x1p-126f);
        if (dialect == 3) {
            const float below = power_below(scale_inv);
            scale_inv = below == scale_inv ? below : 2.0f * below;
        }
        return {__fdiv_rn(1.0f, scale_inv), scale_inv};
    }
}

}  // namespace twin
