// kernels/ptx/approx.cuh on a CPU.
#pragma once

namespace twin {

// Off the grid whose words are recorded, results are off by an ulp, up or down: what depends on such a word differs from
// the definition.
inline float off_by_an_ulp(float y) {
    const unsigned word = __float_as_uint(y);
    if (!std::isfinite(y) || (word & 0x7FFFFFFF) < 0x00800002) return y;
    return __uint_as_float(word % 3 == 0 ? word - 1 : word % 3 == 1 ? word + 1 : word);
}
inline float flushed(float y) { return std::fabs(y) < 0x1p-126f ? std::copysign(0.0f, y) : y; }
inline float ex2_approx(float x) {
    if (x != x) return x;
    if (x >= 128.0f) return INFINITY;
    if (x < -126.0f) return 0.0f;
    const float steps = x * 32768.0f;
    if (steps != std::rint(steps)) return off_by_an_ulp(exp2f(x));
    const int k = static_cast<int>(steps);
    return __int_as_float(simulator::powers[(k < 0 ? 32768 : 0) + (k & 32767)] + (k >> 15) * (1 << 23));
}
// Correctly rounded, as the kernels' refinement makes Hopper's words.
inline float rcp_approx(float x) { return flushed(1.0f / flushed(x)); }
// Correctly rounded; after adam_update.cuh's refinement, the root is an IEEE root in every bit, as Hopper's is.
inline float rsqrt_approx(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(flushed(x)))); }
inline float max_nan(float x, float y) { return x != x ? x : y != y ? y : fmaxf(x, y); }

}  // namespace twin
