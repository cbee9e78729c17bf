// Eight neighbouring results of a row, rounded to the element type of wide.cuh and stored 16 bytes at a time.
#pragma once

#include "wide.cuh"

__device__ __forceinline__ unsigned word_of(const float* values) {
#if WIDE == 0
    return __float_as_uint(values[0]);
#else
    return narrow(values[0]) | static_cast<unsigned>(narrow(values[1])) << 16;
#endif
}

// `address` is a multiple of 16.
__device__ __forceinline__ void store_eight(wide_t* address, const float (&values)[8]) {
    constexpr int kStep = LANES / 4;  // values in a word
#pragma unroll
    for (int i = 0; i < 8; i += LANES)
        *reinterpret_cast<uint4*>(address + i) = make_uint4(word_of(values + i), word_of(values + i + kStep),
                                                            word_of(values + i + 2 * kStep),
                                                            word_of(values + i + 3 * kStep));
}
