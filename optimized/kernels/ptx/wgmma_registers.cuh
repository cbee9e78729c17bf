// wgmma whose A operand, 64 x 16 values of 16 bits, comes from registers; B from shared memory as in wgmma.cuh.
//
// A of the thread with warp w, lane l: four words of two neighbouring k,
//   a[0] row 16 w + l / 4, k = 2 (l % 4) + {0, 1}     a[1] the same of row + 8
//   a[2] that row, k + 8                              a[3] row + 8, k + 8
// which is how accumulators d[8 k16 .. 8 k16 + 7] of a product lie, packed in pairs: a result becomes the next
// product's operand without leaving its thread.
#pragma once

#include "wgmma.cuh"

namespace twin {

#define TWIN_A_REGISTERS_32 "%32, %33, %34, %35"
#define TWIN_B_DESCRIPTOR_32 "%36"
#define TWIN_ACCUMULATE_32 "%37"
#define TWIN_TRANSPOSE_B_32 "%38"
#define TWIN_A_REGISTERS_64 "%64, %65, %66, %67"
#define TWIN_B_DESCRIPTOR_64 "%68"
#define TWIN_ACCUMULATE_64 "%69"
#define TWIN_TRANSPOSE_B_64 "%70"

// D = A B^T + (scale_d ? D : 0), K = 16. kTransposeB: B is MN-major in shared memory.
#define TWIN_WGMMA_REGISTERS_CASE(COUNT, N, TYPE, NAMES)                                                       \
    if constexpr (same_type<T, TYPE>)                                                                          \
        asm volatile("{\n .reg .pred accumulate;\n setp.ne.b32 accumulate, " TWIN_ACCUMULATE_##COUNT ", 0;\n"  \
                     " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAMES " {" TWIN_REGISTERS_##COUNT      \
                     "}, {" TWIN_A_REGISTERS_##COUNT "}, " TWIN_B_DESCRIPTOR_##COUNT                           \
                     ", accumulate, 1, 1, " TWIN_TRANSPOSE_B_##COUNT ";\n}"                                    \
                     : TWIN_ACCUMULATORS_##COUNT                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(kTransposeB)      \
                     : "memory");
#define TWIN_WGMMA_REGISTERS(COUNT, N)                                                                         \
    template <class T, int kTransposeB>                                                                        \
    __device__ __forceinline__ void wgmma_k16(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b, \
                                              int scale_d) {                                                   \
        TWIN_WGMMA_REGISTERS_CASE(COUNT, N, BF16, "bf16.bf16")                                                 \
        TWIN_WGMMA_REGISTERS_CASE(COUNT, N, FP16, "f16.f16")                                                   \
    }
TWIN_WGMMA_REGISTERS(32, 64)
TWIN_WGMMA_REGISTERS(64, 128)

}  // namespace twin
