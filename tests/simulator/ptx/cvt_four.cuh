// kernels/ptx/cvt_four.cuh on a CPU.
#pragma once

#include "cvt.cuh"

namespace twin {

inline unsigned cvt_e4m3x4(float first, float second, float third, float fourth) {
    return cvt_e4m3x2(first, second) | cvt_e4m3x2(third, fourth) << 16;
}

}  // namespace twin
