// Sums of two 16-bit values, each rounded once: nearest even, subnormals kept. One function per instruction.
#pragma once

namespace twin {

__device__ __forceinline__ unsigned add_bf16x2(unsigned a, unsigned b) {
    unsigned sum;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

__device__ __forceinline__ unsigned add_f16x2(unsigned a, unsigned b) {
    unsigned sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

}  // namespace twin
