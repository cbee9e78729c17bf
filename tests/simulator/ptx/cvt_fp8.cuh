// kernels/ptx/cvt_fp8.cuh on a CPU.
#pragma once

#include "cvt.cuh"

namespace twin {

inline unsigned cvt_f16x2_e4m3x2(unsigned short codes) {
    const auto wide = [](unsigned code) -> unsigned {
        if ((code & 0x7F) == 0x7F) return 0x7FFF;
        const int field = code >> 3 & 15, fraction = code & 7;
        const double value = std::ldexp((field ? 8 : 0) + fraction, std::max(field, 1) - 10);
        return to_16(code & 0x80 ? -value : value, 5, 10);
    };
    return wide(codes & 0xFF) | wide(codes >> 8) << 16;
}

}  // namespace twin
