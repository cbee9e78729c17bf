// Elementary functions with the bits of reference/numbers/elementary.py (docs/elementary.md has the derivation, the
// error of each and its price).
//
//   exp(x)          e^x, x <= 0                      fp32 -> fp32
//   exp2_grid(y)    2^(y rounded to 2^-15)           fp32 -> fp32   for attention's inner loop
//   rsqrt(x)        1 / sqrt(x), two IEEE roundings  fp32 -> fp32   once a row
//   gelu, dgelu, silu, dsilu                         a 16-bit value -> fp32, the recorded fast forms: elementary_16.cuh
//   gelu_f32, dgelu_f32, silu_f32, dsilu_f32         fp32 -> fp32
//   sigmoid, dsigmoid, qgelu, dqgelu                 fp32 -> fp32; a 16-bit value is widened, exactly
//
// Two kinds of arithmetic. The forms of a 16-bit value use the special function unit freely: the reference
// replays all 65,536 words recorded on an H200. Everything that reads fp32 uses correctly rounded operations
// and two special functions where their result is known:
//   * ex2.approx on a grid: 2^(n + j 2^-15) is 2^n times one of 2 * 32,768 recorded words (a negative
//     argument has its own: the unit rounds it differently), for every n;
//   * rcp.approx refined by one Newton step of two fma: 1/d correctly rounded for d in [1, 2].
// Both were compared on the whole of those domains.
#pragma once

#include "elementary_16.cuh"
#include "ptx/approx.cuh"

namespace twin {

constexpr float kLn2 = 0.693147182464599609375f;
constexpr float kLn2Low = -1.90465429995776788e-9f;  // ln 2 - kLn2
constexpr float kGrid11 = 6144.0f;                   // 1.5 2^12: adding it rounds to a multiple of 2^-11
constexpr float kGrid15 = 384.0f;                    // 1.5 2^8: to a multiple of 2^-15
constexpr float kQGelu = 1.702f;                     // qgelu is x sigmoid(kQGelu x)
constexpr float kQGeluLog2e = 2.4554669595930155f;   // the same times log2(e)

// e^x for x <= 0, NaN where x is; 0 where e^x < 2^-126. At most 2.7 ulp above that (docs/elementary.md).
__device__ __forceinline__ float exp(float x) {
    x = max_nan(x, -88.0f);  // e^-88 < 2^-126; -inf would give inf - inf below
    const float t = __fmaf_rn(x, kLog2e, kGrid11);
    const float n = t - kGrid11;  // x / ln 2 to a multiple of 2^-11
    const float power = ex2_approx(n);
    float f = __fmaf_rn(n, -kLn2, x);
    f = __fmaf_rn(n, -kLn2Low, f);      // x - n ln 2, |f| <= 1.7e-4
    return __fmaf_rn(power, f, power);  // 2^n (1 + f): f^2 / 2 <= 1.5e-8 is left out
}

// 2^y to a relative 1.06e-5, any y: 0 below 2^-126, inf from 2^128, NaN where y is.
__device__ __forceinline__ float exp2_grid(float y) { return ex2_approx((y + kGrid15) - kGrid15); }

__device__ __forceinline__ float rsqrt(float x) { return __frcp_rn(__fsqrt_rn(x)); }

// 1/d, correctly rounded, d in [1, 2].
__device__ __forceinline__ float reciprocal_1_2(float d) {
    const float r = rcp_approx(d);
    return __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
}

// 2^y for y in [-127, 0], as exp above.
__device__ __forceinline__ float exp2_nonpositive(float y) {
    const float n = (y + kGrid11) - kGrid11;
    const float power = ex2_approx(n);
    return __fmaf_rn(power, (y - n) * kLn2, power);
}

// ---- functions of an fp32 value ----
// With e = 2^-|y| in [0, 1] and r = 1 / (1 + e): sigmoid is r on the positive side and e r on the negative.

__device__ __forceinline__ float gelu_f32(float x) {
    const float e = exp2_nonpositive(fmaxf(-fabsf(x) * __fmaf_rn(x * x, kGelu3Log2e, kGelu1Log2e), -127.0f));
    const float r = reciprocal_1_2(1.0f + e);
    return (x * (x < 0.0f ? e : 1.0f)) * r;
}

__device__ __forceinline__ Evaluated gelu_and_slope_f32(float x) {
    const float square = fminf(x * x, 128.0f);
    const float e = exp2_nonpositive(fmaxf(-fabsf(x) * __fmaf_rn(square, kGelu3Log2e, kGelu1Log2e), -127.0f));
    const float r = reciprocal_1_2(1.0f + e), h = e * r;
    const float slope = __fmaf_rn(square, kGeluSlope, kGelu1);
    return {(x * (x < 0.0f ? e : 1.0f)) * r, __fmaf_rn((r * h) * slope, x, x < 0.0f ? h : r)};
}

__device__ __forceinline__ float dgelu_f32(float x) { return gelu_and_slope_f32(x).slope; }

__device__ __forceinline__ float silu_f32(float x) {
    const float e = exp2_nonpositive(fmaxf(fabsf(x) * -kLog2e, -127.0f));
    const float r = reciprocal_1_2(1.0f + e);
    return (x * (x < 0.0f ? e : 1.0f)) * r;
}

__device__ __forceinline__ float dsilu_f32(float x) {
    const float e = exp2_nonpositive(fmaxf(fabsf(x) * -kLog2e, -127.0f));
    const float r = reciprocal_1_2(1.0f + e), h = e * r;
    return __fmaf_rn(r * h, x, x < 0.0f ? h : r);
}

__device__ __forceinline__ float qgelu(float x) {
    const float e = exp2_nonpositive(fmaxf(fabsf(x) * -kQGeluLog2e, -127.0f));
    const float r = reciprocal_1_2(1.0f + e);
    return (x * (x < 0.0f ? e : 1.0f)) * r;
}

__device__ __forceinline__ float dqgelu(float x) {
    const float e = exp2_nonpositive(fmaxf(fabsf(x) * -kQGeluLog2e, -127.0f));
    const float r = reciprocal_1_2(1.0f + e), h = e * r;
    return __fmaf_rn((r * h) * kQGelu, x, x < 0.0f ? h : r);
}

// NaN where x is: no factor x brings it back here.
__device__ __forceinline__ float sigmoid(float x) {
    const float e = exp2_nonpositive(fmaxf(fabsf(x) * -kLog2e, -127.0f));
    const float r = reciprocal_1_2(1.0f + e);
    return x != x ? x : x < 0.0f ? e * r : r;
}

__device__ __forceinline__ float dsigmoid(float x) {
    const float e = exp2_nonpositive(fmaxf(fabsf(x) * -kLog2e, -127.0f));
    const float r = reciprocal_1_2(1.0f + e), h = e * r;
    return x != x ? x : r * h;
}

}  // namespace twin
