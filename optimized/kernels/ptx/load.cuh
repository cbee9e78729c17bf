// Loads of 8 and 16 bytes from global memory, at multiples of their size. One function per instruction.
#pragma once

namespace twin {

// What no thread writes while the kernel runs. `volatile` keeps the loads of an unrolled loop together and ahead of their
// uses.
__device__ __forceinline__ void load_read_only(unsigned (&words)[4], const void* pointer) {
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(pointer));
}

__device__ __forceinline__ void load_read_only(unsigned (&words)[2], const void* pointer) {
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(pointer));
}

// Zeros where the words do not exist. By a predicate, since loads after a branch wait for each other.
__device__ __forceinline__ void load_if(unsigned (&words)[4], const void* pointer, bool exists) {
    for (unsigned& word : words) word = 0;
    asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %5, 0;\n @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
                 : "l"(pointer), "r"(static_cast<int>(exists))
                 : "memory");
}

__device__ __forceinline__ void load_if(unsigned (&words)[2], const void* pointer, bool exists) {
    for (unsigned& word : words) word = 0;
    asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %3, 0;\n @p ld.global.v2.u32 {%0, %1}, [%2];\n}"
                 : "+r"(words[0]), "+r"(words[1])
                 : "l"(pointer), "r"(static_cast<int>(exists))
                 : "memory");
}

}  // namespace twin
