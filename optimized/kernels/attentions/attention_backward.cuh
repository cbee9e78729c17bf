// What the kernels of attention's backward share.
#pragma once

#include "attention_tile.cuh"

namespace twin {

// Which pairs of four 16 x 16 tiles of queries x keys are kept. A thread has eight pairs of each tile: bit
// 8 n + 4 r + 2 c + e is of tile n, as the accumulators lie, keys x queries. Tiles are `apart` counters from each other.
// The mask is laid out for tiles of queries x keys. In a tile of keys x queries a thread needs halves of two counters,
// and the thread four lanes away needs the others of the same two: each compares the words of one, and they trade bits.
__device__ __forceinline__ unsigned kept_bits(const Generator& generator, unsigned long long tile,
                                              unsigned long long apart, unsigned threshold) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, odd = g % 2;
    // A half is kept if a word that begins with it is greater, whatever follows in the word.
    const unsigned limit = threshold * 0x10000 - 1;
    unsigned own = 0;
    tile += 4 * (2 * q + odd) + g / 2;
#pragma unroll
    for (int n = 0; n < 4; n++, tile += apart) {
        unsigned words[4], bits = 0;
        philox(words, generator, tile);
#pragma unroll
        for (int i = 0; i < 8; i++) {  // i = 4 r + 2 c + x: half r of word 2 x + c, of query 8 r + 2 q + odd
            const unsigned word = words[i % 2 * 2 + i / 2 % 2];
            bits |= static_cast<unsigned>((i / 4 ? word : word << 16) > limit) << i;
        }
        own |= bits << (8 * n);
    }
    // Key 8 c + g is in word 2 odd + c of both: bits x = odd. This thread's query has e = odd, the other one's has not.
    const unsigned other = __shfl_xor_sync(0xFFFFFFFF, own, 4), mine = odd ? 0xAAAAAAAA : 0x55555555;
    const unsigned turned = odd ? other >> 1 : other << 1;
    return (own & mine) | (turned & ~mine);
}

// Element i of 8 in a 16-byte vector, widened.
template <class T>
__device__ __forceinline__ float element(const uint4& v, int i) {
    const unsigned word = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
    if constexpr (same_type<T, BF16>) return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
    return cvt_f32_f16(static_cast<unsigned short>(i % 2 ? word >> 16 : word & 0xFFFFu));
}

}  // namespace twin
