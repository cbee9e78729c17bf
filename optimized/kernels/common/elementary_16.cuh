// gelu, silu and their derivatives of a 16-bit value: the fast forms of elementary.cuh, on the special function unit. x
// holds a bf16 or fp16 value; other x give Hopper's own words. reference/numbers/elementary.py replays all 65,536 words.
#pragma once

#include "ptx/approx.cuh"

namespace twin {

constexpr float kLog2e = 1.44269502162933349609375f;
// tanh-GELU is x sigmoid(z), z = 2 sqrt(2/pi) (x + 0.044715 x^3) = x (kGelu1 + kGelu3 x^2).
constexpr float kGelu1 = 1.5957691216057308f;
constexpr float kGeluSlope = 0.21406444881780075f;  // z' = kGelu1 + kGeluSlope x^2
constexpr float kGelu1Log2e = 2.302208198144325f;   // kGelu1 log2(e)
constexpr float kGelu3Log2e = 0.1029432395800235f;  // kGelu3 log2(e)

// A function's value and its derivative, at one x. The clamp of x^2 in gelu's changes no bit of the value: where x^2 is
// greater, its sigmoid is 0 or 1.
struct Evaluated {
    float value, slope;
};

__device__ __forceinline__ float gelu(float x) {
    const float w = x * __fmaf_rn(x * x, -kGelu3Log2e, -kGelu1Log2e);
    return x * rcp_approx(1.0f + ex2_approx(w));
}

// gelu and its derivative s + x s (1 - s) z'(x), s = sigmoid(z).
__device__ __forceinline__ Evaluated gelu_and_slope(float x) {
    const float square = fminf(x * x, 128.0f);  // keeps z' finite: 0 times it must be 0
    const float w = x * __fmaf_rn(square, -kGelu3Log2e, -kGelu1Log2e);
    const float s = rcp_approx(1.0f + ex2_approx(w));
    const float slope = __fmaf_rn(square, kGeluSlope, kGelu1);
    return {x * s, __fmaf_rn(__fmaf_rn(-s, s, s) * slope, x, s)};  // s (1 - s) as s - s^2
}

__device__ __forceinline__ float dgelu(float x) { return gelu_and_slope(x).slope; }

__device__ __forceinline__ float silu(float x) { return x * rcp_approx(1.0f + ex2_approx(x * -kLog2e)); }

__device__ __forceinline__ float dsilu(float x) {
    const float s = rcp_approx(1.0f + ex2_approx(x * -kLog2e));
    return __fmaf_rn(__fmaf_rn(-s, s, s), x, s);
}

}  // namespace twin
