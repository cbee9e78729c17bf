// What the launches of attention's backward share in global memory.
#pragma once

#include "attention_backward.cuh"

namespace twin {

// A configuration of the backward has also kQueries (64 | 128), of a tile, and kChannels.
struct BackwardDefaults : AttentionDefaults {
    static constexpr bool kHeadsApart = false;  // some works have a part of a group (attention_backward_scheduler.cuh)
};

constexpr int kPiece = 64 * 64;  // half of a tile's dq, in floats

// What follows from a configuration.
template <class Config>
struct BackwardTile {
    static constexpr int kWords = Config::kQueries / 64;             // of 32 pairs each that a thread has in a tile
    static constexpr int kScores = Config::kQueries / 2;             // accumulators of a tile of 64 keys
    static constexpr int kHalves = Config::kChannels > 128 ? 2 : 1;  // of a tile's channels; each has a turn
    static_assert(Config::kQueries * Config::kChannels == kHalves * 2 * kPiece, "dq of a half is two pieces");
};

// `padded` is sq up to a multiple of 128.
struct CommonScratch {
    float *base, *inv, *dots;  // [b h, padded]: 384 - m, 1 / l and D of a query; zeros beyond sq
    float* dq;                 // [b h, padded / kQueries, halves, 2 pieces, 8, 128 threads, 4]
    unsigned* turns;           // [b h, padded / kQueries, halves]: key blocks that have been added to a tile
    unsigned* ticket;          // the next work to be taken
    unsigned* keep;            // [heads, padded / 64, keys / 16, 32 lanes]: pairs that dropout keeps, of the heads ...
    int first_head;            // ... from this one on, of queries
    int works;                 // where this launch ends
};

struct ApartScratch {
    float* handed;     // [apart, key blocks, dv and dk, kChannels / 8, 256 threads, 4]: sums that works go on from
    unsigned* summed;  // [b, heads of keys, key blocks, 8 warps]: heads of the group in them
    int apart_from;    // heads of keys from this one on, batch and head, ...
    int apart;         // ... as many as these, have works ...
    int each;          // ... of this many heads of the group
};

// The fields of optimized/ops/attentions/attention_backward.py's structured array, in its order.
template <class Config>
struct BackwardScratch : CommonScratch, Optional<ApartScratch, Config::kHeadsApart> {};

__device__ __forceinline__ int padded_queries(const CommonArguments& a) {
    return (a.sq + kTileRows - 1) / kTileRows * kTileRows;
}

// The words of `keep` for 64 queries and 16 keys, of which these are the first ones; one for each lane.
__device__ __forceinline__ unsigned* kept_words(const CommonArguments& a, const CommonScratch& scratch, int head,
                                                int query, int key) {
    const int strips = (a.skv + kTileRows - 1) / kTileRows * (kTileRows / 16);
    const long long rows = static_cast<long long>(head - scratch.first_head) * (padded_queries(a) / 64) + query / 64;
    return scratch.keep + (rows * strips + key / 16) * 32;
}

}  // namespace twin
