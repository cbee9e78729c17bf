// kernels/ptx/store_async.cuh on a CPU.
#pragma once

namespace twin {

inline void store_async(unsigned address, float value, unsigned barrier) {
    const unsigned word = __float_as_uint(value);
    simulator::store_async(address, &word, 1, barrier);
}
inline void store_async(unsigned address, uint2 words, unsigned barrier) {
    const unsigned both[2] = {words.x, words.y};
    simulator::store_async(address, both, 2, barrier);
}

}  // namespace twin
