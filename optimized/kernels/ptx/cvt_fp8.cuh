// Conversions from FP8: cvt to fp16, exact. One function per instruction.
#pragma once

namespace twin {

// Two E4M3 codes, low in bits 0-7, as fp16, low in bits 0-15: exact (fp16 holds every E4M3 number), NaN stays NaN.
__device__ __forceinline__ unsigned cvt_f16x2_e4m3x2(unsigned short codes) {
    unsigned word;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(word) : "h"(codes));
    return word;
}

}  // namespace twin
