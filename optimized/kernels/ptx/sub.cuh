// A subtraction that borrows.
#pragma once

namespace twin {

// a - 1 where b is not 0, else a.
__device__ __forceinline__ unsigned subtract_nonzero(unsigned a, unsigned b) {
    asm("{\n .reg .u32 ignored;\n sub.cc.u32 ignored, 0, %1;\n subc.u32 %0, %0, 0;\n}" : "+r"(a) : "r"(b));
    return a;
}

}  // namespace twin
