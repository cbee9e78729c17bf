// kernels/ptx/stmatrix.cuh on a CPU.
#pragma once

namespace twin {

inline void stmatrix_x4(unsigned row, const unsigned (&words)[4]) {
    const uint64_t* rows = simulator::exchange(0xFFFFFFFF, row);
    const unsigned lane = simulator::self->lane;
    for (int matrix = 0; matrix < 4; matrix++) {
        const unsigned at = static_cast<unsigned>(rows[8 * matrix + lane / 4]);
        if (at % 16) simulator::fail("stmatrix to %#x, which is not a multiple of 16", at);
        memcpy(simulator::from_shared(at, 16) + 4 * (lane % 4), &words[matrix], 4);
    }
}

}  // namespace twin
