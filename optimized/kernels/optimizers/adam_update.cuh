// The arithmetic of a step of Adam, correctly rounded without a branch for each division.
//
//     u = (m / c1) / (sqrt(v / c2) + eps) [+ decay p],  p = p - lr u        each operation rounded once
//
// The compiler's division and root test their operands, and branch to a subroutine for the rare ones. Three of them a
// number keep eight neighbours from being computed side by side, and take more instructions than memory leaves time for.
// Here one test serves eight numbers. What it lets through:
//
//     m and v are 0 or at least 2^-100, v is at most 2^24,  2^-24 <= c1, c2 <= 1,  2^-60 <= eps <= 1,  u is finite
//
// Then no remainder below is subnormal, nothing overflows, and results are those of the IEEE operations:
//
//   * x / c, c known before x: q = x z, z = 1 / c rounded; then q + (x - q c) z (Brisebarre, Muller and Raina,
//     "Accelerating correctly rounded floating-point division when the divisor is known in advance", 2004)
//   * sqrt(x), a / b: the compiler's own sequences behind its tests.
//
// Remainders are computed with the other sign, so that a quotient of -0 stays -0.
#pragma once
#include "ptx/approx.cuh"
#include "stored_state.cuh"

namespace twin {

constexpr unsigned kLeast = 0x1B000000 - 1;  // of 2^-100: its word, the sign shifted out, less one unit
constexpr float kMost = 16777216.0f;         // 2^24

struct Scalars {
    float lr, beta1, rest1, beta2, rest2, eps, decay, c1, c2;
    int decoupled;
};

// What of a step may lie on the device, and what follows from it.
struct Rates {
    float lr, c1, c2, inverse1, inverse2;
    bool usual;  // whether the fast path may be taken at all

    __device__ __forceinline__ Rates(float lr, float c1, float c2, float eps)
        : lr(lr), c1(c1), c2(c2), inverse1(1.0f / c1), inverse2(1.0f / c2) {
        constexpr float least = 5.9604644775390625e-8f;  // 2^-24
        usual = c1 >= least && c1 <= 1.0f && c2 >= least && c2 <= 1.0f && eps >= 8.673617379884035e-19f && eps <= 1.0f;
    }
};

struct Numbers {
    float g[kElements], p[kElements], m[kElements], v[kElements];
};

__device__ __forceinline__ float divided(float x, float c, float inverse) {
    const float q = x * inverse;
    return __fmaf_rn(-__fmaf_rn(q, c, -x), inverse, q);
}

__device__ __forceinline__ float root(float x) {
    const float y = rsqrt_approx(x + 7.52316384526264e-37f);  // 2^-120: x itself unless x is 0
    const float s = x * y, h = 0.5f * y;
    return __fmaf_rn(__fmaf_rn(-s, s, x), h, s);
}

__device__ __forceinline__ float quotient(float a, float b) {
    float y = rcp_approx(b);
    y = __fmaf_rn(__fmaf_rn(-b, y, 1.0f), y, y);
    float q = a * y;
    q = __fmaf_rn(-__fmaf_rn(b, q, -a), y, q);
    return __fmaf_rn(-__fmaf_rn(b, q, -a), y, q);
}

// The new moments.
__device__ __forceinline__ void update_moments(Numbers& x, const Scalars& s) {
    if (!s.decoupled) {
#pragma unroll
        for (int i = 0; i < kElements; i++) x.g[i] = x.g[i] + s.decay * x.p[i];
    }
#pragma unroll
    for (int i = 0; i < kElements; i++) {
        x.m[i] = s.beta1 * x.m[i] + s.rest1 * x.g[i];
        x.v[i] = s.beta2 * x.v[i] + (s.rest2 * x.g[i]) * x.g[i];
    }
}

__device__ __forceinline__ void descend(Numbers& x, const float (&u)[kElements], const Scalars& s, float lr) {
    if (s.decoupled) {
#pragma unroll
        for (int i = 0; i < kElements; i++) x.p[i] = x.p[i] - lr * (u[i] + s.decay * x.p[i]);
    } else {
#pragma unroll
        for (int i = 0; i < kElements; i++) x.p[i] = x.p[i] - lr * u[i];
    }
}

// The new parameters, from the new moments: any numbers.
__device__ __forceinline__ void update_any(Numbers& x, const Scalars& s, const Rates& r) {
    float u[kElements];
#pragma unroll
    for (int i = 0; i < kElements; i++) u[i] = (x.m[i] / r.c1) / (sqrtf(x.v[i] / r.c2) + s.eps);
    descend(x, u, s, r.lr);
}

// The same, or false and nothing done.
__device__ __forceinline__ bool update_usual(Numbers& x, const Scalars& s, const Rates& r) {
    float u[kElements], most = 0.0f;
    unsigned least = 0xFFFFFFFF;
#pragma unroll
    for (int i = 0; i < kElements; i++) {
        u[i] = quotient(divided(x.m[i], r.c1, r.inverse1), root(divided(x.v[i], r.c2, r.inverse2)) + s.eps);
        // Magnitudes less one unit: zero becomes the largest.
        least = min(least, min(__float_as_uint(x.m[i]) * 2 - 1, __float_as_uint(x.v[i]) * 2 - 1));
        most = __fmaf_rn(u[i], 0.0f, most + x.v[i]);  // NaN where u is not finite
    }
    if (!(r.usual && least >= kLeast && most <= kMost)) return false;
    descend(x, u, s, r.lr);
    return true;
}

}  // namespace twin
