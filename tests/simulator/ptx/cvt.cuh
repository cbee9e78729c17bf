// kernels/ptx/cvt.cuh on a CPU.
#pragma once

namespace twin {

// The code of |value| in a small format, nearest even; `limit` is the first code that is not a finite number.
inline unsigned to_small(double value, int exponent_bits, int fraction_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const double magnitude = std::fabs(value);
    const int exponent = magnitude == 0 ? 1 - bias : std::max(std::ilogb(magnitude), 1 - bias);
    const double units = std::rint(std::ldexp(magnitude, fraction_bits - exponent));  // the sum carries into the exponent
    return (static_cast<unsigned>(exponent + bias - 1) << fraction_bits) + static_cast<unsigned>(units);
}
inline unsigned to_fp8(float value, int exponent_bits, int fraction_bits, unsigned largest) {
    if (value != value) return 0x7F;
    const unsigned sign = std::signbit(value) ? 0x80 : 0;
    if (std::isinf(value) || std::fabs(value) > 1e6f) return sign | largest;
    return sign | std::min(to_small(value, exponent_bits, fraction_bits), largest);
}
inline unsigned to_16(double value, int exponent_bits, int fraction_bits) {
    const unsigned infinity = ((1u << exponent_bits) - 1) << fraction_bits, sign = std::signbit(value) ? 0x8000 : 0;
    if (value != value) return 0x7FFF;
    if (std::isinf(value)) return sign | infinity;
    return sign | std::min(to_small(value, exponent_bits, fraction_bits), infinity);
}
inline unsigned to_bf16(double value) { return to_16(value, 8, 7); }
inline unsigned cvt_e4m3x2(float low, float high) { return to_fp8(low, 4, 3, 0x7E) | to_fp8(high, 4, 3, 0x7E) << 8; }
inline unsigned cvt_e5m2x2(float low, float high) { return to_fp8(low, 5, 2, 0x7B) | to_fp8(high, 5, 2, 0x7B) << 8; }
inline float cvt_f32_f16(unsigned short word) {
    const int field = word >> 10 & 31, fraction = word & 1023;
    const float magnitude = field == 31 ? (fraction ? NAN : INFINITY) : std::ldexp(float((field ? 1024 : 0) + fraction), std::max(field, 1) - 25);
    return word & 0x8000 ? -magnitude : magnitude;
}
inline unsigned short cvt_f16_f32(float value) { return to_16(value, 5, 10); }
inline unsigned short cvt_bf16_f32(float value) { return to_bf16(value); }
inline unsigned cvt_bf16x2(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline unsigned cvt_f16x2(float low, float high) { return to_16(low, 5, 10) | to_16(high, 5, 10) << 16; }

}  // namespace twin
