// Philox4x32-10 (reference/numbers/philox.py) and dropout's mask (reference/ops/random/dropout.py, reference/ops/attentions/attention.py).
//
// A generator's state is two 64-bit words in global memory, (seed, offset). A counter is (index, offset), the key is
// the seed; of the four words' eight halves of 16 bits, each decides about one element: it is kept if its half is >=
// threshold.
#pragma once

namespace twin {

struct Generator {
    unsigned key[2], offset[2];
};

__device__ __forceinline__ Generator read_state(const unsigned long long* state) {
    const unsigned long long seed = state[0], offset = state[1];
    return {{static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32)},
            {static_cast<unsigned>(offset), static_cast<unsigned>(offset >> 32)}};
}

// The same, by a whole warp, whose lanes have it in common: the keys of a round are computed once for all.
__device__ __forceinline__ Generator read_state_once(const unsigned long long* state) {
    Generator g = read_state(state);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        g.key[i] = __shfl_sync(0xFFFFFFFF, g.key[i], 0);
        g.offset[i] = __shfl_sync(0xFFFFFFFF, g.offset[i], 0);
    }
    return g;
}

__device__ __forceinline__ void philox(unsigned (&words)[4], const Generator& generator, unsigned long long index) {
    unsigned c0 = static_cast<unsigned>(index), c1 = static_cast<unsigned>(index >> 32);
    unsigned c2 = generator.offset[0], c3 = generator.offset[1];
    unsigned k0 = generator.key[0], k1 = generator.key[1];
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const unsigned long long p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        c0 = static_cast<unsigned>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<unsigned>(p1);
        c2 = static_cast<unsigned>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<unsigned>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// Half `half` (0 low, 1 high) of a word, against the threshold.
__device__ __forceinline__ bool kept(unsigned word, int half, unsigned threshold) {
    return (half ? word >> 16 : word & 0xFFFFu) >= threshold;
}

}  // namespace twin
