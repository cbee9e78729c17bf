// The mask of dropout behind a product: the three warps of the producer's warpgroup that have nothing to copy draw it.
//
// They have a whole tile's time: a tile's mask is drawn while its product is computed, as soon as the consumers have
// taken that of the tile before. A word holds the bits of 32 elements, those of a consumer's lane in two pieces, as it
// takes them: columns 2 j and 2 j + 1 of its row half i are bits 15 and 31 of word i / 4, 4 (i % 4) + j lower.
// Behind the bias lie
//
//   mask    [kMaskWords][128 * WARPGROUPS]
//   drawn   mbarrier: it is there, by each of the three warps
//   read    mbarrier: it will not be read any more, by each consumer warp
#pragma once

#include "gemm_bias.cuh"
#include "gemm_piece.cuh"
#include "philox.cuh"
#include "ptx/lop3.cuh"
#include "ptx/prmt.cuh"
#include "ptx/sub.cuh"

namespace twin {

constexpr int kMaskWords = kPieces / 2;
constexpr int kDrawing = 3;  // warps

struct MaskMap {
    static constexpr int kMask = BiasMap::kBytes;
    static constexpr int kDrawn = kMask + 4 * kMaskWords * 128 * WARPGROUPS;
    static constexpr int kRead = kDrawn + 8;
    static constexpr int kBytes = kRead + 8;
};

// By one thread, before the block's first barrier.
__device__ __forceinline__ void init_mask(unsigned shared) {
    mbarrier_init(shared + MaskMap::kDrawn, kDrawing);
    mbarrier_init(shared + MaskMap::kRead, 4 * WARPGROUPS);
}

__device__ __forceinline__ unsigned& mask_word(unsigned char* memory, int word, int thread) {
    return reinterpret_cast<unsigned*>(memory + MaskMap::kMask)[word * (128 * WARPGROUPS) + thread];
}

// The high word of kConstant * value, by products of halves: an instruction that multiplies to 64 bits waits for the
// tensor cores, and they for it; these do not (docs/gemm.md).
template <unsigned kConstant>
__device__ __forceinline__ unsigned high_word(unsigned value) {
    constexpr unsigned kLow = kConstant & 0xFFFF, kHigh = kConstant >> 16;
    static_assert(kLow + kHigh <= 0xFFFF, "what stands between the words fits 32 bits");
    const unsigned low = value & 0xFFFF, high = value >> 16;
    const unsigned between = high * kLow + (low * kHigh + (low * kLow >> 16));
    return high * kHigh + (between >> 16);
}

// Several of Philox's counters (philox.cuh) side by side, so that none waits for itself; the indices' high words are 0.
template <int kCounters>
__device__ __forceinline__ void philox_beside(unsigned (&words)[kCounters][4], const Generator& generator,
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

// By the three warps. A half of a word keeps its element if it is at least `threshold`, which is not 0.
__device__ __forceinline__ void draw_mask(unsigned char* memory, const Tile& tile, const Generator& generator,
                                          unsigned threshold, int n, unsigned parity) {
    const unsigned shared = shared_address(memory), limits = (threshold - 1) * 0x10001;
    const int lane = threadIdx.x % 32;
    mbarrier_wait(shared + MaskMap::kRead, parity ^ 1);
#pragma unroll 1
    for (int i = threadIdx.x / 32 % 4 - 1; i < 4 * WARPGROUPS * kMaskWords; i += kDrawing) {
        const int warp = i / kMaskWords, word = i % kMaskWords;
        const unsigned row = tile.row + warp * 16 + lane / 4, column = tile.column + 64 * word + 8 * (lane % 4);
        const unsigned first = row * (static_cast<unsigned>(n) / 8) + column / 8;  // counter
        unsigned bits = 0;
#pragma unroll
        for (int piece = 1; piece >= 0; piece--) {
            unsigned words[2][4];  // of row halves
            philox_beside<2>(words, generator, {first + piece * 4, first + n + piece * 4});
#pragma unroll
            for (int j = 7; j >= 0; j--) bits = bits >> 1 | (greater_halves(words[j / 4][j % 4], limits) & 0x80008000);
        }
        if constexpr (kRun == 4) {  // a lane's first four columns are half of one counter's, the others of another's
            const unsigned one = __shfl_sync(0xFFFFFFFF, bits, lane / 4 * 4 + lane % 4 / 2);
            const unsigned other = __shfl_sync(0xFFFFFFFF, bits, lane / 4 * 4 + 2 + lane % 4 / 2);
            bits = ((lane % 2 ? one << 2 : one) & 0xCCCCCCCC) | ((lane % 2 ? other : other >> 2) & 0x33333333);
        }
        mask_word(memory, word, warp * 32 + lane) = bits;
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared + MaskMap::kDrawn);
}

// By each consumer warp, around what it reads; `parity` alternates from tile to tile, starting at 0.
__device__ __forceinline__ void wait_for_mask(unsigned char* memory, unsigned parity) {
    mbarrier_wait(shared_address(memory) + MaskMap::kDrawn, parity);
}
__device__ __forceinline__ void release_mask(unsigned char* memory) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(memory) + MaskMap::kRead);
}

// Ones in the halves of two neighbours that are kept; `bits` are a row half's, shifted to the top.
__device__ __forceinline__ unsigned kept_two(unsigned bits, int j) { return repeat_sign<1, 3>(bits << j); }

}  // namespace twin
