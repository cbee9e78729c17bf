// stmatrix: a warp stores four 8 x 8 matrices of 16-bit values, as accumulators lie once they are packed in pairs.
#pragma once

namespace twin {

// Lane l names row l % 8 of matrix l / 8: 16 bytes of shared memory.
__device__ __forceinline__ void stmatrix_x4(unsigned row, const unsigned (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

}  // namespace twin
