// kernels/ptx/setmaxnreg.cuh on a CPU.
#pragma once

namespace twin {

template <int kRegisters>
inline void setmaxnreg_dec() {}
template <int kRegisters>
inline void setmaxnreg_inc() {}

}  // namespace twin
