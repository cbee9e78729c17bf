// kernels/ptx/prmt.cuh on a CPU.
#pragma once

namespace twin {

template <int kLow, int kHigh>
inline unsigned repeat_sign(unsigned word) {
    return (word >> (8 * kLow + 7) & 1 ? 0xFFFFu : 0) | (word >> (8 * kHigh + 7) & 1 ? 0xFFFF0000u : 0);
}

}  // namespace twin
