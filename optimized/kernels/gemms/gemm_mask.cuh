// Dropout's mask in shared memory, drawn by the three idle warps of the producer's warpgroup.
//
// They draw a tile's mask while the tile is computed, once the consumers have read the previous one. A word holds the
// bits of 32 elements, those of a consumer's lane in two pieces, in the order of use: columns 2 j and 2 j + 1 of row
// half i are bits 15 - s and 31 - s of word i / 4, where s = 4 (i % 4) + j.
#pragma once

#include "gemm_epilogue_tile.cuh"
#include "common/mailbox.cuh"
#include "common/philox.cuh"
#include "ptx/lop3.cuh"
#include "ptx/prmt.cuh"
#include "ptx/sub.cuh"

namespace twin {

// The high word of kConstant * value, from products of halves: an instruction with a 64-bit product waits for the
// tensor cores, and they for it (docs/log/gemm.md).
template <unsigned kConstant>
__device__ __forceinline__ unsigned high_word(unsigned value) {
    constexpr unsigned kLow = kConstant & 0xFFFF, kHigh = kConstant >> 16;
    static_assert(kLow + kHigh <= 0xFFFF, "the part between the words fits 32 bits");
    const unsigned low = value & 0xFFFF, high = value >> 16;
    const unsigned between = high * kLow + (low * kHigh + (low * kLow >> 16));
    return high * kHigh + (between >> 16);
}

// Philox (philox.cuh) for several counters side by side, so that none waits for its own last step. The high words of
// the indices are 0.
template <int kCounters>
__device__ __forceinline__ void philox_together(unsigned (&words)[kCounters][4], const Generator& generator,
                                                const unsigned (&counters)[kCounters]) {
    unsigned k0 = generator.key[0], k1 = generator.key[1];
    asm volatile("" : "+r"(k0), "+r"(k1));  // else the compiler keeps the keys of all rounds, in registers needed here
#pragma unroll
    for (int i = 0; i < kCounters; i++) {
        words[i][0] = counters[i], words[i][1] = 0;
        words[i][2] = generator.offset[0], words[i][3] = generator.offset[1];
    }
#pragma unroll
    for (int round = 0; round < 10; round++) {
#pragma unroll
        for (int i = 0; i < kCounters; i++) {
            unsigned (&c)[4] = words[i];
            constexpr unsigned kFirst = 0xD2511F53, kSecond = 0xCD9E8D57;
            const unsigned high0 = high_word<kFirst>(c[0]), low0 = kFirst * c[0], low1 = kSecond * c[2];
            // kSecond's halves are too large for high_word. Those of 2^32 - kSecond are not, and kSecond v is 2^32 v
            // less that times v, which borrows unless v is 0.
            const unsigned high1 = subtract_nonzero(c[2] - high_word<0u - kSecond>(c[2]), c[2]);
            c[0] = high1 ^ c[1] ^ k0;
            c[1] = low1;
            c[2] = high0 ^ c[3] ^ k1;
            c[3] = low0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

// The highest bit of each half says whether the word's half is greater than that of `limits`; other bits mean nothing.
__device__ __forceinline__ unsigned greater_halves(unsigned word, unsigned limits) {
    constexpr unsigned kHighest = 0x80008000;
    const unsigned rest = (limits | kHighest) - (word & ~kHighest);  // its top bit stays unless the others are greater
    return lop3<0x71>(word, limits, rest);                           // (word & ~limits) | (~(word ^ limits) & ~rest)
}

template <class Gemm>
struct SharedMask {
    static constexpr int kWords = (Pieces<Gemm>::kPieces + 1) / 2;
    static constexpr int kDrawingWarps = 3;
    unsigned words[kWords][128 * Gemm::kWarpgroups];  // by consumer thread
    Mailbox mailbox;

    __device__ __forceinline__ void init() { mailbox.init(kDrawingWarps, 4 * Gemm::kWarpgroups); }

    // By the three warps. An element is kept if its half of a word is at least `threshold`, which is not 0.
    __device__ __forceinline__ void draw(const Tile& tile, const Generator& generator, unsigned threshold, int n,
                                         unsigned parity) {
        const unsigned limits = (threshold - 1) * 0x10001;
        const int lane = threadIdx.x % 32;
        mailbox.wait_empty(parity);
#pragma unroll 1
        for (int i = threadIdx.x / 32 % 4 - 1; i < 4 * Gemm::kWarpgroups * kWords; i += kDrawingWarps) {
            const int warp = i / kWords, word = i % kWords;
            const unsigned row = tile.row + warp * 16 + lane / 4, column = tile.column + 64 * word + 8 * (lane % 4);
            const unsigned first = row * (static_cast<unsigned>(n) / 8) + column / 8;  // counter
            unsigned bits = 0;
#pragma unroll
            for (int piece = 1; piece >= 0; piece--) {
                unsigned drawn[2][4];  // of row halves
                philox_together<2>(drawn, generator, {first + piece * 4, first + n + piece * 4});
#pragma unroll
                for (int j = 7; j >= 0; j--)
                    bits = bits >> 1 | (greater_halves(drawn[j / 4][j % 4], limits) & 0x80008000);
            }
            // A lane's first four columns are half of a counter's, the others of another's.
            if constexpr (Gemm::kRun == 4) {
                const unsigned one = __shfl_sync(0xFFFFFFFF, bits, lane / 4 * 4 + lane % 4 / 2);
                const unsigned other = __shfl_sync(0xFFFFFFFF, bits, lane / 4 * 4 + 2 + lane % 4 / 2);
                bits = ((lane % 2 ? one << 2 : one) & 0xCCCCCCCC) | ((lane % 2 ? other : other >> 2) & 0x33333333);
            }
            words[word][warp * 32 + lane] = bits;
        }
        mailbox.arrive_full();
    }
};

// Ones in each half of a word whose element is kept. `bits` are those of a row half, shifted to the top.
__device__ __forceinline__ unsigned kept_two(unsigned bits, int j) { return repeat_sign<1, 3>(bits << j); }

}  // namespace twin
