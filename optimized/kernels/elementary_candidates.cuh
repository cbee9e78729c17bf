// The candidates that elementary.cuh was chosen from (docs/elementary.md: error, instructions, time of each).
// Only the bench compiles this file.
//
//   *_fast    ex2.approx and rcp.approx, in fp32: reproducible for a 16-bit input only (elementary.cuh has
//             gelu, dgelu, silu and dsilu in this form)
//   *_tanh    tanh.approx, likewise
//   *_poly    correctly rounded operations only, polynomial and Newton: about 1 ulp a step
//   *_lean    the same with shorter polynomials, about 1e-4
//   *_ieee    the same with an IEEE division instead of Newton
//   *_grid15  ex2.approx on the grid of 2^-15, refined rcp.approx: about 1e-5
#pragma once

#include "elementary.cuh"

namespace twin {

constexpr float kRound = 12582912.0f;  // 1.5 2^23: adding it rounds to an integer

__device__ __forceinline__ float identity(float x) { return x; }

// ---- exp ----

__device__ __forceinline__ float exp_fast(float x) { return ex2_approx(x * kLog2e); }

// x <= 0. e^f = 1 + f (c1 + f (c2 + ...)), |f| <= ln(2)/2: 0.77 ulp of 1 before rounding.
__device__ __forceinline__ float exp_poly(float x) {
    x = max_nan(x, -88.0f);
    const float t = __fmaf_rn(x, kLog2e, kRound);
    const float n = t - kRound;
    float f = __fmaf_rn(n, -kLn2, x);
    f = __fmaf_rn(n, -kLn2Low, f);
    float p = __fmaf_rn(f, 0.00829031f, 0.04189798f);
    p = __fmaf_rn(p, f, 0.16667637f);
    p = __fmaf_rn(p, f, 0.49999149f);
    p = __fmaf_rn(p, f, 0.99999971f);
    p = __fmaf_rn(p, f, 1.0f);
    // 2^n by its exponent bits, as a factor: a NaN stays one, and n = -127 gives 0.
    return p * __int_as_float((__float_as_int(t) + 127) << 23);
}

__device__ __forceinline__ float exp_poly6(float x) {
    x = max_nan(x, -88.0f);
    const float t = __fmaf_rn(x, kLog2e, kRound);
    const float n = t - kRound;
    float f = __fmaf_rn(n, -kLn2, x);
    f = __fmaf_rn(n, -kLn2Low, f);
    float p = __fmaf_rn(f, 0.00138146f, 0.00836872f);
    p = __fmaf_rn(p, f, 0.04166839f);
    p = __fmaf_rn(p, f, 0.16666521f);
    p = __fmaf_rn(p, f, 0.49999993f);
    p = __fmaf_rn(p, f, 1.0f);
    p = __fmaf_rn(p, f, 1.0f);
    return p * __int_as_float((__float_as_int(t) + 127) << 23);
}

// CUDA's own, for the price.
__device__ __forceinline__ float exp_cuda(float x) { return ::expf(x); }

// e^x through exp2_grid: the multiplication rides in the rounding to the grid.
__device__ __forceinline__ float exp_grid15(float x) {
    return ex2_approx(__fmaf_rn(x, kLog2e, kGrid15) - kGrid15);
}

// ---- rsqrt ----

__device__ __forceinline__ float rsqrt_fast(float x) { return rsqrt_approx(x); }

// Integer seed (12 %), three Newton steps.
__device__ __forceinline__ float rsqrt_newton(float x) {
    float r = __int_as_float(0x5F375A86 - (__float_as_int(x) >> 1));
    const float half = -0.5f * x;
#pragma unroll
    for (int i = 0; i < 3; i++) r = r * __fmaf_rn(half * r, r, 1.5f);
    return r;
}

// rsqrt.approx and one Newton step in which x r^2 is exact.
__device__ __forceinline__ float rsqrt_refined(float x) {
    const float r = rsqrt_approx(x);
    const float s = x * r;
    float e = __fmaf_rn(-s, r, 1.0f);
    e = __fmaf_rn(-__fmaf_rn(x, r, -s), r, e);
    return __fmaf_rn(0.5f * r, e, r);
}

// The words of 1 / sqrt(x) with two IEEE roundings, without their range tests: x normal.
__device__ __forceinline__ float rsqrt_normal(float x) {
    const float r = rsqrt_approx(x);
    const float s = x * r;
    const float root = __fmaf_rn(__fmaf_rn(-s, s, x), 0.5f * r, s);
    const float q = rcp_approx(root);
    return __fmaf_rn(q, __fmaf_rn(-root, q, 1.0f), q);
}

// ---- building blocks of the activations ----

// 2^y, -127 <= y <= 0; what lies below 2^-126 fades linearly to 0 at -127. A NaN is lost (x brings it back).
__device__ __forceinline__ float exp2_poly(float y) {
    const float t = y + kRound;
    const float f = y - (t - kRound);
    float p = __fmaf_rn(f, 0.00132647f, 0.00967151f);
    p = __fmaf_rn(p, f, 0.05550734f);
    p = __fmaf_rn(p, f, 0.24022242f);
    p = __fmaf_rn(p, f, 0.69314698f);
    p = __fmaf_rn(p, f, 1.0f);
    return __int_as_float((__float_as_int(t) << 23) + __float_as_int(p));
}

__device__ __forceinline__ float exp2_lean(float y) {
    const float t = y + kRound;
    const float f = y - (t - kRound);
    float p = __fmaf_rn(f, 0.05500893f, 0.24221096f);
    p = __fmaf_rn(p, f, 0.69328293f);
    p = __fmaf_rn(p, f, 1.0f);
    return __int_as_float((__float_as_int(t) << 23) + __float_as_int(p));
}

// 1 / (1 + e), 0 <= e <= 1: a quadratic (1 %), then kSteps Newton steps.
template <int kSteps>
__device__ __forceinline__ float reciprocal_newton(float e) {
    const float d = 1.0f + e;
    float r = __fmaf_rn(e, 0.32323232f, -0.80808081f);
    r = __fmaf_rn(r, e, 0.98989899f);
#pragma unroll
    for (int i = 0; i < kSteps; i++) r = __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
    return r;
}

struct Poly {
    static __device__ __forceinline__ float exp2(float y) { return exp2_poly(fmaxf(y, -127.0f)); }
    static __device__ __forceinline__ float reciprocal(float e) { return reciprocal_newton<2>(e); }
};

struct Lean {
    static __device__ __forceinline__ float exp2(float y) { return exp2_lean(fmaxf(y, -127.0f)); }
    static __device__ __forceinline__ float reciprocal(float e) { return reciprocal_newton<1>(e); }
};

struct Ieee {
    static __device__ __forceinline__ float exp2(float y) { return exp2_poly(fmaxf(y, -127.0f)); }
    static __device__ __forceinline__ float reciprocal(float e) { return __frcp_rn(1.0f + e); }
};

struct Grid15 {
    static __device__ __forceinline__ float exp2(float y) { return exp2_grid(y); }
    static __device__ __forceinline__ float reciprocal(float e) { return reciprocal_1_2(1.0f + e); }
};

// x sigmoid(-y ln 2 sign(x)) and its derivative, given y = -|z| log2(e).
template <class Form>
__device__ __forceinline__ float product(float x, float y) {
    const float e = Form::exp2(y);
    return (x * (x < 0.0f ? e : 1.0f)) * Form::reciprocal(e);
}

template <class Form>
__device__ __forceinline__ float product_derivative(float x, float y, float slope) {
    const float e = Form::exp2(y);
    const float r = Form::reciprocal(e);
    const float h = e * r;
    return __fmaf_rn((r * h) * slope, x, x < 0.0f ? h : r);
}

template <class Form>
__device__ __forceinline__ float gelu_by(float x) {
    return product<Form>(x, -fabsf(x) * __fmaf_rn(x * x, kGelu3Log2e, kGelu1Log2e));
}

template <class Form>
__device__ __forceinline__ float dgelu_by(float x) {
    const float square = fminf(x * x, 128.0f);
    const float y = -fabsf(x) * __fmaf_rn(square, kGelu3Log2e, kGelu1Log2e);
    return product_derivative<Form>(x, y, __fmaf_rn(square, kGeluSlope, kGelu1));
}

template <class Form>
__device__ __forceinline__ float silu_by(float x) {
    return product<Form>(x, fabsf(x) * -kLog2e);
}

template <class Form>
__device__ __forceinline__ float dsilu_by(float x) {
    return product_derivative<Form>(x, fabsf(x) * -kLog2e, 1.0f);
}

#define TWIN_FORM(NAME, FORM)                                                                    \
    __device__ __forceinline__ float gelu_##NAME(float x) { return gelu_by<FORM>(x); }           \
    __device__ __forceinline__ float dgelu_##NAME(float x) { return dgelu_by<FORM>(x); }         \
    __device__ __forceinline__ float silu_##NAME(float x) { return silu_by<FORM>(x); }           \
    __device__ __forceinline__ float dsilu_##NAME(float x) { return dsilu_by<FORM>(x); }
TWIN_FORM(poly, Poly)
TWIN_FORM(lean, Lean)
TWIN_FORM(ieee, Ieee)
TWIN_FORM(grid15, Grid15)
#undef TWIN_FORM

// ---- tanh.approx ----

__device__ __forceinline__ float gelu_tanh(float x) {
    const float t = tanh_approx(x * __fmaf_rn(x * x, 0.5f * 0.07135481627260025f, 0.5f * kGelu1));
    const float half = 0.5f * x;
    return __fmaf_rn(half, t, half);
}

// 0.5 (1 + t) + 0.5 x (1 - t^2) z'/2
__device__ __forceinline__ float dgelu_tanh(float x) {
    const float square = fminf(x * x, 128.0f);
    const float t = tanh_approx(x * __fmaf_rn(square, 0.5f * 0.07135481627260025f, 0.5f * kGelu1));
    const float slope = __fmaf_rn(square, 0.25f * kGeluSlope, 0.25f * kGelu1);
    return __fmaf_rn(__fmaf_rn(-t, t, 1.0f) * slope, x, __fmaf_rn(0.5f, t, 0.5f));
}

__device__ __forceinline__ float silu_tanh(float x) {
    const float half = 0.5f * x;
    return __fmaf_rn(half, tanh_approx(half), half);
}

}  // namespace twin
