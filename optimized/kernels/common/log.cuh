// The natural logarithm with the bits of reference/numbers/elementary.py, of any fp32 value; for once a row.
//
// ln(2^k m), sqrt(1/2) <= m < sqrt(2), by fdlibm's polynomial in s = (m - 1) / (m + 1): below 0.9 ulp. Each operation
// rounds once, and none is an fma. It stands apart from elementary.cuh, whose other users it does not concern.
#pragma once

namespace twin {

// -inf of a zero, NaN below it.
__device__ __forceinline__ float log(float x) {
    if (!(x > 0.0f)) return x == 0.0f ? __int_as_float(static_cast<int>(0xFF800000u)) : __int_as_float(0x7FC00000);
    if (x == __int_as_float(0x7F800000)) return x;
    int below = 127;
    if (x < 0x1p-126f) x = x * 0x1p25f, below = 152;
    const int word = __float_as_int(x) + (0x3F800000 - 0x3F3504F3);
    const float k = static_cast<float>((word >> 23) - below);
    const float f = __int_as_float((word & 0x007FFFFF) + 0x3F3504F3) - 1.0f;
    const float s = __fdiv_rn(f, 2.0f + f), z = s * s, w = z * z;
    const float r = z * (0.66666662693f + w * 0.28498786688f) + w * (0.40000972152f + w * 0.24279078841f);
    const float h = (0.5f * f) * f;
    return (((s * (h + r) + k * 9.0580006145e-06f) - h) + f) + k * 6.9313812256e-01f;
}

}  // namespace twin
