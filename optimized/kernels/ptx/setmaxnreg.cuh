// setmaxnreg: a warpgroup hands registers back, or takes them. Every warp of the warpgroup executes it.
// It needs a register cap at entry (__launch_bounds__(threads, 1)), or ptxas ignores it (warning C7508).
#pragma once

namespace twin {

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace twin
