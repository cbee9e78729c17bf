// The 64-bit product of two 32-bit numbers.
#pragma once

namespace twin {

__device__ __forceinline__ unsigned long long mul_wide(unsigned a, unsigned b) {
    unsigned long long product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}

}  // namespace twin
