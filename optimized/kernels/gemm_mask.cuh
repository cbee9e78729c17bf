// The mask of dropout in shared memory, where the three warps of the producer's warpgroup that copy nothing draw it.
//
// They have the time of a whole tile: they draw a tile's mask while it is computed, as soon as the consumers have read
// the one before. A word holds the bits of 32 elements, those of a consumer's lane in two pieces, in the order of use:
// columns 2 j and 2 j + 1 of its row half i are bits 15 and 31 of word i / 4, 4 (i % 4) + j lower.
#pragma once

#include "gemm_piece.cuh"
#include "mailbox.cuh"
#include "philox.cuh"
#include "ptx/lop3.cuh"
#include "ptx/prmt.cuh"
#include "ptx/sub.cuh"

namespace twin {

// The high word of kConstant * value, by products of halves: an instruction that multiplies to 64 bits waits for the
// tensor cores, and they for it; these do not (docs/gemm.md).
template <unsigned kConstant>
__device__ __forceinline__ unsigned high_word(unsigned value) {
    constexpr unsigned kLow = kConstant & 0xFFFF, kHigh = kConstant >> 16;
    static_assert(kLow + kHigh <= 0xFFFF, "the part between the words fits 32 bits");
    const unsigned low = value & 0xFFFF, high = value >> 16;
    const unsigned between = high * kLow + (low * kHigh + (low * kLow >> 16));
    return high * kHigh + (between >> 16);
}

// Several of Philox's counters (philox.cuh) side by side, so that none waits for itself; the indices' high words are 0.
template <int kCounters>
__device__ __forceinline__ void philox_together(unsigned (&words)[kCounters][4], const Generator& generator,
                                              const unsigned (&counters)[kCounters]) {
    unsigned k0 = generator.key[0], k1 = generator.key[1];
    asm volatile("" : "+r"(k0), "+r"(k1));  // or the keys of all rounds would be kept, in registers needed here
#pragma unroll
    for (int i = 0; i < kCounters; i++) {
        words[i][0] = counters[i], words[i][1] = 0;
        words[i][2] = generator.offset[0], words[i][3] = generator.offset[1];
    }
#pragma unroll
    for (int round = 0; round < 10; round++) {
#pragma unroll
        for (int i = 0; i < kCounters; i++) {
            unsigned(&c)[4] = words[i];
            constexpr unsigned kFirst = 0xD2511F53, kSecond = 0xCD9E8D57;
            const unsigned high0 = high_word<kFirst>(c[0]), low0 = kFirst * c[0], low1 = kSecond * c[2];
            // kSecond's halves are too large, those of 2^32 - kSecond are not: v times that, taken from 2^32 v, borrows
            // unless v is 0.
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

// Of each half of a word, in its highest bit, whether it is greater than that of `limits`; the other bits mean nothing.
__device__ __forceinline__ unsigned greater_halves(unsigned word, unsigned limits) {
    constexpr unsigned kHighest = 0x80008000;
    const unsigned rest = (limits | kHighest) - (word & ~kHighest);  // that bit stays unless those below are greater
    return lop3<0x71>(word, limits, rest);                           // (word & ~limits) | (~(word ^ limits) & ~rest)
}

struct SharedMask {
    static constexpr int kWords = kPieces / 2;
    static constexpr int kDrawingWarps = 3;
    unsigned words[kWords][128 * WARPGROUPS];  // by consumer thread
    Mailbox mailbox;

    __device__ __forceinline__ void init() { mailbox.init(kDrawingWarps, 4 * WARPGROUPS); }

    // By the three warps. An element is kept if its half of a word is at least `threshold`, which is not 0.
    __device__ __forceinline__ void draw(const Tile& tile, const Generator& generator, unsigned threshold, int n,
                                         unsigned parity) {
        const unsigned limits = (threshold - 1) * 0x10001;
        const int lane = threadIdx.x % 32;
        mailbox.wait_empty(parity);
#pragma unroll 1
        for (int i = threadIdx.x / 32 % 4 - 1; i < 4 * WARPGROUPS * kWords; i += kDrawingWarps) {
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
            if constexpr (kRun == 4) {  // a lane's first four columns are half of a counter's, the others of another's
                const unsigned one = __shfl_sync(0xFFFFFFFF, bits, lane / 4 * 4 + lane % 4 / 2);
                const unsigned other = __shfl_sync(0xFFFFFFFF, bits, lane / 4 * 4 + 2 + lane % 4 / 2);
                bits = ((lane % 2 ? one << 2 : one) & 0xCCCCCCCC) | ((lane % 2 ? other : other >> 2) & 0x33333333);
            }
            words[word][warp * 32 + lane] = bits;
        }
        mailbox.arrive_full();
    }
};

// Ones in the halves of two neighbours that are kept; `bits` are a row half's, shifted to the top.
__device__ __forceinline__ unsigned kept_two(unsigned bits, int j) { return repeat_sign<1, 3>(bits << j); }

}  // namespace twin
