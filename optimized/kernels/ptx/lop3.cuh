// A logical operation of three words: bit 4 a + 2 b + c of the table is what bits a, b and c give.
#pragma once

namespace twin {

template <int kTable>
__device__ __forceinline__ unsigned lop3(unsigned a, unsigned b, unsigned c) {
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(kTable));
    return result;
}

}  // namespace twin
