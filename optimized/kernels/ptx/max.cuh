// The larger of two 16-bit values, in each half of a word: the other one where one is NaN.
#pragma once

namespace twin {

// kWide: 1 bf16, 2 fp16, as WIDE (wide.cuh).
template <int kWide>
__device__ __forceinline__ unsigned max_pairs(unsigned x, unsigned y) {
    unsigned z;
    if constexpr (kWide == 1)
        asm("max.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    else
        asm("max.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

}  // namespace twin
