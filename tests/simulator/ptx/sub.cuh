// kernels/ptx/sub.cuh on a CPU.
#pragma once

namespace twin {

inline unsigned subtract_nonzero(unsigned a, unsigned b) { return a - (b != 0); }

}  // namespace twin
