// What the kernels of attention's backward share.
#pragma once

#include "attention_tile.cuh"

namespace twin {

// Which of a 16 x 16 tile's pairs are kept, for the eight a thread has: bit 4 c + 2 r + e as the accumulators lie.
// The mask is laid out for tiles of queries x keys. In a tile of keys x queries a thread needs halves of two counters,
// and the thread four lanes away needs the others of the same two: each computes one and they trade.
__device__ __forceinline__ unsigned kept_bits(const Generator& generator, unsigned long long tile, unsigned threshold) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, odd = g % 2;
    unsigned words[4], bits = 0;
    philox(words, generator, tile + 4 * (2 * q + odd) + g / 2);
    const unsigned own[2] = {odd ? words[2] : words[0], odd ? words[3] : words[1]};
    const unsigned give[2] = {odd ? words[0] : words[2], odd ? words[1] : words[3]};
    unsigned other[2];
#pragma unroll
    for (int c = 0; c < 2; c++) other[c] = __shfl_xor_sync(0xFFFFFFFF, give[c], 4);
#pragma unroll
    for (int i = 0; i < 8; i++) {  // i = 4 r + 2 c + e: query 8 r + 2 q + e, key 8 c + g
        const int r = i / 4, c = i / 2 % 2, e = i % 2;
        bits |= kept(e == odd ? own[c] : other[c], r, threshold) << i;
    }
    return bits;
}

// Element i of 8 in a 16-byte vector, widened.
__device__ __forceinline__ float element(const uint4& v, int i) {
    const unsigned word = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
    if constexpr (same_type<FORMAT, BF16>) return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
    return cvt_f32_f16(static_cast<unsigned short>(i % 2 ? word >> 16 : word & 0xFFFFu));
}

}  // namespace twin
