// wgmma whose A operand, 64 x 16 values of 16 bits or 64 x 32 of FP8, comes from registers; B from shared memory as in
// wgmma.cuh.
//
// A of the thread with warp w, lane l: four words of two neighbouring k,
//   a[0] row 16 w + l / 4, k = 2 (l % 4) + {0, 1}     a[1] the same of row + 8
//   a[2] that row, k + 8                              a[3] row + 8, k + 8
// Accumulators d[8 k16 .. 8 k16 + 7] of a GEMM, packed in pairs, have this layout, so a result becomes the next GEMM's
// operand without leaving its thread. Of FP8, a word holds four neighbouring k, and a warp's lanes trade for it:
//   a[0] row 16 w + l / 4, k = 4 (l % 4) + {0, 1, 2, 3}     a[1] the same of row + 8
//   a[2] that row, k + 16                                   a[3] row + 8, k + 16
#pragma once

#include "wgmma.cuh"

namespace twin {

// D = A B^T + (scale_d ? D : 0), K = 16. kTransposeB: B is MN-major in shared memory.
#define TWIN_WGMMA_REGISTERS_CASE(COUNT, N, TYPE, NAMES, A_REGISTERS, B_DESCRIPTOR, SCALE_D, TRANSPOSE_B) \
    if constexpr (same_type<T, TYPE>)                                                                     \
        asm volatile("{\n .reg .pred accumulate;\n setp.ne.b32 accumulate, " SCALE_D                      \
                     ", 0;\n"                                                                             \
                     " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAMES " {" TWIN_REGISTERS_##COUNT \
                     "}, {" A_REGISTERS "}, " B_DESCRIPTOR ", accumulate, 1, 1, " TRANSPOSE_B ";\n}"      \
                     : TWIN_ACCUMULATORS_##COUNT                                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(kTransposeB) \
                     : "memory");
#define TWIN_WGMMA_REGISTERS(COUNT, N, A_REGISTERS, B_DESCRIPTOR, SCALE_D, TRANSPOSE_B)                         \
    template <class T, int kTransposeB>                                                                         \
    __device__ __forceinline__ void wgmma_k16(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b,  \
                                              int scale_d) {                                                    \
        TWIN_WGMMA_REGISTERS_CASE(COUNT, N, BF16, "bf16.bf16", A_REGISTERS, B_DESCRIPTOR, SCALE_D, TRANSPOSE_B) \
        TWIN_WGMMA_REGISTERS_CASE(COUNT, N, FP16, "f16.f16", A_REGISTERS, B_DESCRIPTOR, SCALE_D, TRANSPOSE_B)   \
    }
TWIN_WGMMA_REGISTERS(32, 64, "%32, %33, %34, %35", "%36", "%37", "%38")
TWIN_WGMMA_REGISTERS(64, 128, "%64, %65, %66, %67", "%68", "%69", "%70")
TWIN_WGMMA_REGISTERS(128, 256, "%128, %129, %130, %131", "%132", "%133", "%134")

// The same for E4M3 operands, K = 32; B is K-major.
#define TWIN_WGMMA_REGISTERS_FP8(COUNT, N, A_REGISTERS, B_DESCRIPTOR, SCALE_D)                                 \
    __device__ __forceinline__ void wgmma_k32(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b, \
                                              int scale_d) {                                                   \
        asm volatile("{\n .reg .pred accumulate;\n setp.ne.b32 accumulate, " SCALE_D                           \
                     ", 0;\n"                                                                                  \
                     " wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" TWIN_REGISTERS_##COUNT      \
                     "}, {" A_REGISTERS "}, " B_DESCRIPTOR ", accumulate, 1, 1;\n}"                            \
                     : TWIN_ACCUMULATORS_##COUNT                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d)                        \
                     : "memory");                                                                              \
    }
TWIN_WGMMA_REGISTERS_FP8(32, 64, "%32, %33, %34, %35", "%36", "%37")

}  // namespace twin
