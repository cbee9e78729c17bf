// From the scores of 128 rows and 64 columns to weights, in registers: a warp has 16 rows. Rows are queries and columns
// are keys (DQ = 1), or the other way round (DQ = 0).
//
// Defines: as attention.cu, and DQ.
#pragma once

#include "attention_backward.cuh"
#include "attention_bias.cuh"

namespace twin {

constexpr int kStreamRows = 64;  // columns of a tile

// Which of a 16 x 16 tile's pairs are kept, for the eight a thread has, as the accumulators lie.
__device__ __forceinline__ unsigned kept_of(const Generator& generator, unsigned long long tile, unsigned threshold) {
    if constexpr (!DQ) return kept_bits(generator, tile, threshold);
    unsigned words[4], bits = 0;
    philox(words, generator, tile + threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < 8; i++) bits |= kept(words[i % 2 * 2 + i / 4], i / 2 % 2, threshold) << i;
    return bits;
}

// Where a warp's accumulators lie in the pairs of queries and keys, and what a thread keeps of its 32 pairs.
struct Pairs {
    int head;               // batch h + head, of the queries
    int row, column;        // of the warp's first accumulator, in the sequences
    unsigned hidden, keep;  // bit n: of accumulator n

    __device__ __forceinline__ int thread_row() const { return row + threadIdx.x % 32 / 4; }
    __device__ __forceinline__ int thread_column() const { return column + threadIdx.x % 4 * 2; }
};

__device__ __forceinline__ bool is_hidden(const Arguments& a, const Limits& limits, const unsigned char* mask, int row,
                                          int column) {
    const int query = DQ ? row : column, key = DQ ? column : row;
    bool hidden = query >= limits.sq || unseen(limits, query, key);
    if (mask != nullptr && !hidden) hidden = masked(a, mask, query, key);
    return hidden;
}

// Fill at.hidden and at.keep, ahead of the GEMMs, whose accumulators will need the registers.
__device__ __forceinline__ void prepare(Pairs& at, const Arguments& a, const Limits& limits) {
    const int first_query = DQ ? at.row : at.column, first_key = DQ ? at.column : at.row;
    const int last_query = first_query + (DQ ? 15 : kStreamRows - 1);
    const int last_key = first_key + (DQ ? kStreamRows - 1 : 15);
    at.hidden = 0, at.keep = ~0u;
    if (a.mask != nullptr || last_query >= limits.sq || last_key >= key_limit(limits, first_query) ||
        first_key < key_from(limits, last_query)) {
        const unsigned char* mask = head_mask(a, at.head / a.heads, at.head % a.heads);
#pragma unroll 1
        for (int n = 0; n < 32; n++) {
            const bool hidden = is_hidden(a, limits, mask, at.thread_row() + n / 2 % 2 * 8,
                                          at.thread_column() + n / 4 * 8 + n % 2);
            at.hidden |= static_cast<unsigned>(hidden) << n;
        }
    }
    if constexpr (DROPOUT) {
        const Generator generator = read_state_once(a.rng_state);
        at.keep = 0;
#pragma unroll 1
        for (int step = 0; step < 4; step++) {
            const int row = at.row / 16, column = at.column / 16 + step;
            const auto tile = tile_counter(a, at.head, DQ ? row : column, DQ ? column : row);
            at.keep |= kept_of(generator, tile, a.threshold) << (8 * step);
        }
    }
}

// What the tiles need of a query: 384 - m and inv; and D, apart, because it is needed later.
struct Stats {
    const float2* softmax;
    const float* dots;
};

// The scores s become the weights, in place; +0 where a pair is hidden.
__device__ __forceinline__ void weigh(float (&s)[32], const Arguments& a, const Limits& limits, const Pairs& at,
                                      const float2 (&own)[2], const float2* of_column) {
#if BIAS
    add_bias<!DQ>(s, a, limits, at.head / a.heads, at.head % a.heads, at.thread_row(), at.thread_column());
#endif
#pragma unroll
    for (int pair = 0; pair < 16; pair++) {  // the two rows of a column
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int n = pair / 2 * 4 + 2 * r + pair % 2;
            const float2 stats = DQ ? own[r] : of_column[pair / 2 * 8 + pair % 2];
            const float weighed = __fmul_rn(weight(s[n], factor(a), stats.x), stats.y);
            s[n] = at.hidden >> n & 1 ? 0.0f : weighed;
        }
    }
}

}  // namespace twin
