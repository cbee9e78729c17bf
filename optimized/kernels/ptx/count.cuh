// A word of global memory that counts which blocks have come.
#pragma once

namespace twin {

// How many came before. What the others wrote before they came can be read by the one that comes after them.
__device__ __forceinline__ unsigned count_arrival(unsigned* word) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(word) : "memory");
    return before;
}

}  // namespace twin
