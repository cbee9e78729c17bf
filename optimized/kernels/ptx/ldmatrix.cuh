// ldmatrix: a warp reads four 8 x 8 matrices of 16-bit values, as the operands of a tensor core lie in registers.
#pragma once

namespace twin {

// Lane l names row l % 8 of matrix l / 8: 16 bytes of shared memory.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&words)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(row)
                 : "memory");
}

}  // namespace twin
