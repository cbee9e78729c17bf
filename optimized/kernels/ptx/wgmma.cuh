// wgmma: one warpgroup (128 threads) multiplies a 64 x K tile of A by an N x K tile of B, both in shared memory,
// into fp32 accumulators in registers, asynchronously. K is 32 for FP8 and 16 for bf16 and fp16.
//
// Accumulators: d[4 j + i] of the thread with warp w, lane l is the element
//   row 16 w + l / 4 + 8 (i / 2), column 8 j + 2 (l % 4) + i % 2      (j = 0 .. N/8 - 1, i = 0 .. 3)
// An array of N/2 floats therefore says what N is, and the overloads below are told apart by its length.
//
// ptxas serialises the instructions, without an error, if it has to move an accumulator while one is in flight
// (warnings C7508 to C7517): the build treats such a warning as a failure.
#pragma once

namespace twin {

struct E4M3 {};
struct E5M2 {};
struct BF16 {};
struct FP16 {};

template <class A, class B>
constexpr bool same_type = false;
template <class A>
constexpr bool same_type<A, A> = true;

// Orders ordinary reads and writes of accumulators before the next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when at most kPending committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Emits nothing. Keeps the compiler from reading accumulators before the wait that precedes this call.
template <int kCount>
__device__ __forceinline__ void wgmma_hold(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Shared-memory matrix descriptor, 128-byte swizzle. Addresses and strides count 16-byte units.
// K-major (rows of 128 bytes of K): `stride` is the distance of 8-row groups, 1024; `leading` is unused.
// MN-major (rows of 64 16-bit values of M or N): `stride` is the distance of groups of 8 k, 1024; `leading` the
// distance of the chunks of 64 values of M or N.
__device__ __forceinline__ unsigned long long wgmma_descriptor(unsigned address, unsigned leading, unsigned stride) {
    return static_cast<unsigned long long>((address & 0x3FFFF) >> 4) |
           static_cast<unsigned long long>(leading >> 4) << 16 | static_cast<unsigned long long>(stride >> 4) << 32 |
           1ull << 62;
}

// Lists of accumulators, since wgmma names every register. The operands after them are the two descriptors, scale_d
// and, in the 16-bit forms, the transpositions; the last arguments below are their numbers.
#define TWIN_ACC_8(i)                                                                                           \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define TWIN_ACC_16(i) TWIN_ACC_8(i), TWIN_ACC_8(i + 8)
#define TWIN_ACCUMULATORS_8 TWIN_ACC_8(0)
#define TWIN_ACCUMULATORS_16 TWIN_ACC_16(0)
#define TWIN_ACCUMULATORS_32 TWIN_ACC_16(0), TWIN_ACC_16(16)
#define TWIN_ACCUMULATORS_40 TWIN_ACCUMULATORS_32, TWIN_ACC_8(32)
#define TWIN_ACCUMULATORS_48 TWIN_ACCUMULATORS_40, TWIN_ACC_8(40)
#define TWIN_ACCUMULATORS_56 TWIN_ACCUMULATORS_48, TWIN_ACC_8(48)
#define TWIN_ACCUMULATORS_64 TWIN_ACCUMULATORS_56, TWIN_ACC_8(56)
#define TWIN_ACCUMULATORS_80 TWIN_ACCUMULATORS_64, TWIN_ACC_16(64)
#define TWIN_ACCUMULATORS_96 TWIN_ACCUMULATORS_80, TWIN_ACC_16(80)
#define TWIN_ACCUMULATORS_112 TWIN_ACCUMULATORS_96, TWIN_ACC_16(96)
#define TWIN_ACCUMULATORS_128 TWIN_ACCUMULATORS_112, TWIN_ACC_16(112)
#define TWIN_REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TWIN_REGISTERS_16 TWIN_REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TWIN_REGISTERS_32 \
    TWIN_REGISTERS_16     \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TWIN_REGISTERS_40 TWIN_REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TWIN_REGISTERS_48 TWIN_REGISTERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TWIN_REGISTERS_56 TWIN_REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TWIN_REGISTERS_64 TWIN_REGISTERS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TWIN_REGISTERS_80 \
    TWIN_REGISTERS_64     \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define TWIN_REGISTERS_96 \
    TWIN_REGISTERS_80     \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TWIN_REGISTERS_112 \
    TWIN_REGISTERS_96      \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define TWIN_REGISTERS_128 \
    TWIN_REGISTERS_112     \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// D = A B^T + (scale_d ? D : 0), K = 32, FP8.
#define TWIN_WGMMA_FP8_CASE(COUNT, N, A_TYPE, B_TYPE, NAMES, DESCRIPTORS, SCALE_D)                        \
    if constexpr (same_type<A, A_TYPE> && same_type<B, B_TYPE>)                                           \
        asm volatile("{\n .reg .pred accumulate;\n setp.ne.b32 accumulate, " SCALE_D                      \
                     ", 0;\n"                                                                             \
                     " wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." NAMES " {" TWIN_REGISTERS_##COUNT \
                     "}, " DESCRIPTORS ", accumulate, 1, 1;\n}"                                           \
                     : TWIN_ACCUMULATORS_##COUNT                                                          \
                     : "l"(a), "l"(b), "r"(scale_d)                                                       \
                     : "memory");
#define TWIN_WGMMA_FP8(COUNT, N, DESCRIPTORS, SCALE_D)                                                       \
    template <class A, class B>                                                                              \
    __device__ __forceinline__ void wgmma_k32(float (&d)[COUNT], unsigned long long a, unsigned long long b, \
                                              int scale_d) {                                                 \
        TWIN_WGMMA_FP8_CASE(COUNT, N, E4M3, E4M3, "e4m3.e4m3", DESCRIPTORS, SCALE_D)                         \
        TWIN_WGMMA_FP8_CASE(COUNT, N, E4M3, E5M2, "e4m3.e5m2", DESCRIPTORS, SCALE_D)                         \
        TWIN_WGMMA_FP8_CASE(COUNT, N, E5M2, E4M3, "e5m2.e4m3", DESCRIPTORS, SCALE_D)                         \
        TWIN_WGMMA_FP8_CASE(COUNT, N, E5M2, E5M2, "e5m2.e5m2", DESCRIPTORS, SCALE_D)                         \
    }
TWIN_WGMMA_FP8(8, 16, "%8, %9", "%10")
TWIN_WGMMA_FP8(16, 32, "%16, %17", "%18")
TWIN_WGMMA_FP8(32, 64, "%32, %33", "%34")
TWIN_WGMMA_FP8(40, 80, "%40, %41", "%42")
TWIN_WGMMA_FP8(48, 96, "%48, %49", "%50")
TWIN_WGMMA_FP8(56, 112, "%56, %57", "%58")
TWIN_WGMMA_FP8(64, 128, "%64, %65", "%66")
TWIN_WGMMA_FP8(80, 160, "%80, %81", "%82")
TWIN_WGMMA_FP8(96, 192, "%96, %97", "%98")
TWIN_WGMMA_FP8(112, 224, "%112, %113", "%114")
TWIN_WGMMA_FP8(128, 256, "%128, %129", "%130")

// The same for 16-bit operands, K = 16. kTransposeA, kTransposeB: the operand is MN-major in shared memory.
#define TWIN_WGMMA_16_CASE(COUNT, N, TYPE, NAMES, DESCRIPTORS, SCALE_D, TRANSPOSE)                        \
    if constexpr (same_type<T, TYPE>)                                                                     \
        asm volatile("{\n .reg .pred accumulate;\n setp.ne.b32 accumulate, " SCALE_D                      \
                     ", 0;\n"                                                                             \
                     " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAMES " {" TWIN_REGISTERS_##COUNT \
                     "}, " DESCRIPTORS ", accumulate, 1, 1, " TRANSPOSE ";\n}"                            \
                     : TWIN_ACCUMULATORS_##COUNT                                                          \
                     : "l"(a), "l"(b), "r"(scale_d), "n"(kTransposeA), "n"(kTransposeB)                   \
                     : "memory");
#define TWIN_WGMMA_16(COUNT, N, DESCRIPTORS, SCALE_D, TRANSPOSE)                                             \
    template <class T, int kTransposeA, int kTransposeB>                                                     \
    __device__ __forceinline__ void wgmma_k16(float (&d)[COUNT], unsigned long long a, unsigned long long b, \
                                              int scale_d) {                                                 \
        TWIN_WGMMA_16_CASE(COUNT, N, BF16, "bf16.bf16", DESCRIPTORS, SCALE_D, TRANSPOSE)                     \
        TWIN_WGMMA_16_CASE(COUNT, N, FP16, "f16.f16", DESCRIPTORS, SCALE_D, TRANSPOSE)                       \
    }
TWIN_WGMMA_16(32, 64, "%32, %33", "%34", "%35, %36")
TWIN_WGMMA_16(64, 128, "%64, %65", "%66", "%67, %68")
TWIN_WGMMA_16(112, 224, "%112, %113", "%114", "%115, %116")
TWIN_WGMMA_16(128, 256, "%128, %129", "%130", "%131, %132")

}  // namespace twin
