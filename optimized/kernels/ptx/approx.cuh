// The special function unit: one instruction each, 16 results per clock and SM, accurate to a few ulp.
// `.ftz` everywhere: without it ptxas adds a range test and two multiplications for subnormal results.
// Their words are Hopper's own. Only docs/elementary.md's proven uses of them may reach a result.
#pragma once

namespace twin {

// 2^x; 0 where 2^x < 2^-126, inf where x >= 128.
__device__ __forceinline__ float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x; 0 where |x| > 2^126.
__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / sqrt(x); inf where x < 2^-126, NaN where x is below 0.
__device__ __forceinline__ float rsqrt_approx(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// max(x, y), NaN where either is NaN (fmaxf would drop it).
__device__ __forceinline__ float max_nan(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

}  // namespace twin
