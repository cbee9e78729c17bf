// prmt: selects bytes of a word. Byte 0 is the lowest.
#pragma once

namespace twin {

// The sign bit of byte kLow, repeated over the low half, and that of byte kHigh, over the high half.
template <int kLow, int kHigh>
__device__ __forceinline__ unsigned repeat_sign(unsigned word) {
    unsigned signs;
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(signs) : "r"(word), "n"((8 | kLow) * 0x11 | (8 | kHigh) * 0x1100));
    return signs;
}

}  // namespace twin
