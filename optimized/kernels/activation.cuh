// One element of an activation and of its backward, in fp32 with the roundings of reference/ops/activation.py.
//
//     y   = act(x1), or act(x1) * x2 where gated
//     dx1 = grad * act'(x1), or (grad * x2) * act'(x1) where gated, with dx2 = grad * act(x1)
//
// KIND: 0 gelu, 1 geglu, 2 relu, 3 silu, 4 swiglu. WIDE says whether x is a 16-bit value, for which act and act'
// are the recorded fast forms, or an fp32 one (elementary.cuh).
#pragma once
#include "wide.cuh"
#include "elementary.cuh"

namespace twin {

#if KIND < 0 || KIND > 4
#error "KIND is 0 (gelu), 1 (geglu), 2 (relu), 3 (silu) or 4 (swiglu)"
#endif

constexpr bool kGated = KIND == 1 || KIND == 4;
constexpr int kHalves = kGated ? 2 : 1;  // of a row of x and dx

__device__ __forceinline__ float act(float x) {
#if KIND <= 1
    return WIDE == 0 ? gelu_f32(x) : gelu(x);
#elif KIND == 2
    return x <= 0.0f ? 0.0f : x;  // NaN stays
#else
    return WIDE == 0 ? silu_f32(x) : silu(x);
#endif
}

__device__ __forceinline__ float derivative(float x) {
#if KIND <= 1
    return WIDE == 0 ? dgelu_f32(x) : dgelu(x);
#elif KIND == 2
    return x > 0.0f ? 1.0f : act(x);
#else
    return WIDE == 0 ? dsilu_f32(x) : dsilu(x);
#endif
}

// act and act' together: in both directions of a gated kind. silu and dsilu share sigmoid as they are written; gelu and
// dgelu do but for the clamp of x^2 in the latter, which changes no bit of the sigmoid (from x^2 = 128 on, it is 0 or
// 1).
__device__ __forceinline__ void act_and_derivative(float x, float& y, float& slope) {
#if KIND == 1 && WIDE == 0
    const float square = fminf(x * x, 128.0f);
    const float e = exp2_nonpositive(
        fmaxf(-fabsf(x) * __fmaf_rn(square, kGelu3Log2e, kGelu1Log2e), -127.0f));
    const float r = reciprocal_1_2(1.0f + e), h = e * r;
    y = (x * (x < 0.0f ? e : 1.0f)) * r;
    slope = __fmaf_rn((r * h) * __fmaf_rn(square, kGeluSlope, kGelu1), x, x < 0.0f ? h : r);
#elif KIND == 1
    const float square = fminf(x * x, 128.0f);
    const float w = x * __fmaf_rn(square, -kGelu3Log2e, -kGelu1Log2e);
    const float s = rcp_approx(1.0f + ex2_approx(w));
    y = x * s;
    slope = __fmaf_rn(__fmaf_rn(-s, s, s) * __fmaf_rn(square, kGeluSlope, kGelu1), x, s);
#else
    y = act(x);
    slope = derivative(x);
#endif
}

// The second argument is x2, which only the gated kinds read.
__device__ __forceinline__ float forward(float x1, float x2) { return kGated ? act(x1) * x2 : act(x1); }

__device__ __forceinline__ void backward(float grad, float x1, float x2, float (&dx)[kHalves]) {
    if constexpr (kGated) {
        float y, slope;
        act_and_derivative(x1, y, slope);
        dx[0] = (grad * x2) * slope;
        dx[1] = grad * y;
    } else {
        dx[0] = grad * derivative(x1);
    }
}

}  // namespace twin
