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

#if KIND < 0 || KIND > 4
#error "KIND is 0 (gelu), 1 (geglu), 2 (relu), 3 (silu) or 4 (swiglu)"
#endif

constexpr bool GATED = KIND == 1 || KIND == 4;
constexpr int HALVES = GATED ? 2 : 1;  // of a row of x and dx

__device__ __forceinline__ float act(float x) {
#if KIND <= 1
    return WIDE == 0 ? twin::gelu_f32(x) : twin::gelu(x);
#elif KIND == 2
    return x <= 0.0f ? 0.0f : x;  // NaN stays
#else
    return WIDE == 0 ? twin::silu_f32(x) : twin::silu(x);
#endif
}

__device__ __forceinline__ float derivative(float x) {
#if KIND <= 1
    return WIDE == 0 ? twin::dgelu_f32(x) : twin::dgelu(x);
#elif KIND == 2
    return x > 0.0f ? 1.0f : act(x);
#else
    return WIDE == 0 ? twin::dsilu_f32(x) : twin::dsilu(x);
#endif
}

// act and act' together: in both directions of a gated kind. silu and dsilu share sigmoid as they are written; gelu and
// dgelu do but for the clamp of x^2 in the latter, which changes no bit of the sigmoid (from x^2 = 128 on, it is 0 or 1).
__device__ __forceinline__ void act_and_derivative(float x, float& y, float& slope) {
#if KIND == 1 && WIDE == 0
    const float square = fminf(x * x, 128.0f);
    const float e = twin::exp2_nonpositive(
        fmaxf(-fabsf(x) * __fmaf_rn(square, twin::kGelu3Log2e, twin::kGelu1Log2e), -127.0f));
    const float r = twin::reciprocal_1_2(1.0f + e), h = e * r;
    y = (x * (x < 0.0f ? e : 1.0f)) * r;
    slope = __fmaf_rn((r * h) * __fmaf_rn(square, twin::kGeluSlope, twin::kGelu1), x, x < 0.0f ? h : r);
#elif KIND == 1
    const float square = fminf(x * x, 128.0f);
    const float w = x * __fmaf_rn(square, -twin::kGelu3Log2e, -twin::kGelu1Log2e);
    const float s = twin::rcp_approx(1.0f + twin::ex2_approx(w));
    y = x * s;
    slope = __fmaf_rn(__fmaf_rn(-s, s, s) * __fmaf_rn(square, twin::kGeluSlope, twin::kGelu1), x, s);
#else
    y = act(x);
    slope = derivative(x);
#endif
}

// The second argument is x2, which only the gated kinds read.
__device__ __forceinline__ float forward(float x1, float x2) { return GATED ? act(x1) * x2 : act(x1); }

__device__ __forceinline__ void backward(float grad, float x1, float x2, float (&dx)[HALVES]) {
    if constexpr (GATED) {
        float y, slope;
        act_and_derivative(x1, y, slope);
        dx[0] = (grad * x2) * slope;
        dx[1] = grad * y;
    } else {
        dx[0] = grad * derivative(x1);
    }
}
