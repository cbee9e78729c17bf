// kernels/ptx/lop3.cuh on a CPU.
#pragma once

namespace twin {

template <int kTable>
inline unsigned lop3(unsigned a, unsigned b, unsigned c) {
    unsigned result = 0;
    for (int i = 0; i < 8; i++)
        if (kTable >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return result;
}

}  // namespace twin
