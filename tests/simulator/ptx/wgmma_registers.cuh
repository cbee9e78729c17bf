// kernels/ptx/wgmma_registers.cuh on a CPU.
#pragma once

#include "wgmma.cuh"

namespace twin {

template <class T, int kTransposeB, int kCount>
inline void wgmma_k16(float (&d)[kCount], const unsigned (&a)[4], unsigned long long b, int scale_d) {
    simulator::multiply({T::kFormat, T::kFormat, 2 * kCount, false, kTransposeB != 0, scale_d != 0, 0, b}, d, a);
}

}  // namespace twin
