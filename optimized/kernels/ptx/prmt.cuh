// Bytes of a word, by place: byte 0 is the low one.
#pragma once

namespace twin {

// The signs of bytes kLow and kHigh, each in all sixteen bits of the low and the high half.
template <int kLow, int kHigh>
__device__ __forceinline__ unsigned repeat_sign(unsigned word) {
    unsigned signs;
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(signs) : "r"(word), "n"((8 | kLow) * 0x11 | (8 | kHigh) * 0x1100));
    return signs;
}

}  // namespace twin
