// kernels/ptx/max.cuh on a CPU.
#pragma once

#include "cvt.cuh"

namespace twin {

template <int kWide>
inline unsigned max_pairs(unsigned x, unsigned y) {
    const auto number = [](unsigned word) { return kWide == 1 ? __uint_as_float(word << 16) : cvt_f32_f16(word); };
    const auto larger = [&](unsigned a, unsigned b) -> unsigned {
        const float first = number(a), second = number(b);
        if (first != first) return second != second ? 0x7FFF : b;
        if (second != second) return a;
        if (first == second) return first == 0 ? a & b : a;
        return first > second ? a : b;
    };
    return larger(x & 0xFFFF, y & 0xFFFF) | larger(x >> 16, y >> 16) << 16;
}

}  // namespace twin
