// kernels/ptx/add.cuh on a CPU.
#pragma once

#include "cvt.cuh"

namespace twin {

// bf16 has fp32's exponents and fp16 sums are exact in fp32, so one rounding of the fp32 or double sum is the sum's.
inline unsigned add_bf16x2(unsigned a, unsigned b) {
    const auto sum = [](unsigned x, unsigned y) {
        return to_bf16(static_cast<double>(__uint_as_float(x << 16)) + __uint_as_float(y << 16));
    };
    return sum(a & 0xFFFF, b & 0xFFFF) | sum(a >> 16, b >> 16) << 16;
}
inline unsigned add_f16x2(unsigned a, unsigned b) {
    const auto sum = [](unsigned x, unsigned y) { return cvt_f16_f32(cvt_f32_f16(x) + cvt_f32_f16(y)); };
    return sum(a & 0xFFFF, b & 0xFFFF) | sum(a >> 16, b >> 16) << 16;
}

}  // namespace twin
