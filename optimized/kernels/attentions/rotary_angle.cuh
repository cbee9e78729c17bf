// Sine and cosine of an angle, and an element that they rotate (reference/ops/attentions/rotary.py).
#pragma once

namespace twin {

struct SineCosine {
    float sine, cosine;
};

// Taylor polynomials on [-pi/4, pi/4]. Every operation is one of float64, rounded once, as the reference has them.
__device__ __forceinline__ SineCosine sine_cosine(float angle) {
    const double x = angle;
    if (!(fabs(x) < 2147483648.0)) return {__int_as_float(0x7FFFFFFF), __int_as_float(0x7FFFFFFF)};
    const double n = rint(x * 0.63661977236758134308);
    const double r = (x - n * 1.57079632673412561417e00) - n * 6.07710050650619224932e-11;
    const double z = r * r;
    double sine = 1.0 / 6227020800.0;
    sine = sine * z + -1.0 / 39916800.0;
    sine = sine * z + 1.0 / 362880.0;
    sine = sine * z + -1.0 / 5040.0;
    sine = sine * z + 1.0 / 120.0;
    sine = sine * z + -1.0 / 6.0;
    sine = (sine * z) * r + r;
    double cosine = -1.0 / 87178291200.0;
    cosine = cosine * z + 1.0 / 479001600.0;
    cosine = cosine * z + -1.0 / 3628800.0;
    cosine = cosine * z + 1.0 / 40320.0;
    cosine = cosine * z + -1.0 / 720.0;
    cosine = cosine * z + 1.0 / 24.0;
    cosine = cosine * z + -0.5;
    cosine = cosine * z + 1.0;
    const int quarter = static_cast<int>(static_cast<long long>(n) & 3);
    const double s = quarter % 2 ? cosine : sine, c = quarter % 2 ? sine : cosine;
    return {static_cast<float>(quarter >= 2 ? -s : s), static_cast<float>(quarter == 1 || quarter == 2 ? -c : c)};
}

// A rotated element. The sine carries the sign: x - y is x + (-y), bit for bit.
__device__ __forceinline__ float turned(float own, float other, float cosine, float sine) {
    return __fmul_rn(own, cosine) + __fmul_rn(other, sine);
}

}  // namespace twin
