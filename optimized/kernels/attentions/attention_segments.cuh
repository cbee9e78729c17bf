// Keys in segments: what a row has of the segments so far, and of the next one, added.
//
// Arithmetic: reference/ops/attentions/attention_segments.py.
#pragma once

#include "attention_softmax.cuh"

namespace twin {

// What m and the sums so far, and those of the next segment, are multiplied by; m becomes that of both.
struct Factors {
    float before, own;
};
__device__ __forceinline__ Factors join_largest(float& m, float own) {
    const float largest = fmaxf(m, own);
    const Factors factors = {exp2_grid(m - largest), exp2_grid(own - largest)};
    m = largest;
    return factors;
}

__device__ __forceinline__ float join_sums(float l, float own, const Factors& by) {
    return __fmaf_rn(l, by.before, __fmul_rn(own, by.own));
}

__device__ __forceinline__ float join_outputs(float o, float own, const Factors& by) {
    return __fmaf_rn(o, by.before, __fmul_rn(own, by.own)) + 0.0f;
}

// Floats of a thread in `totals`, which are in memory, as registers are few: O of its two rows, their m and their sums.
template <int kCount>
constexpr int kTotals = kCount + 4;

// At the end of a segment. Unless it is the `first` one of a tile, what is in `totals` [blocks][kTotals][kThreads] is added;
// unless it is the `last` one, the result goes there, and the next segment begins.
template <int kThreads, int kCount>
__device__ __forceinline__ void end_segment(float (&o)[kCount], Rows& rows, float* totals, bool first, bool last) {
    constexpr int stride = kThreads;
    int place = blockIdx.x * (kTotals<kCount> * kThreads) + threadIdx.x;
    asm volatile("" : "+r"(place));  // so that it is not kept from block to block
    totals += place;
    float* const of_rows = totals + kCount * stride;
    if (!first) {
        Factors by[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float m = of_rows[r * stride];
            by[r] = join_largest(m, rows.m[r]);
            rows.m[r] = m;
            rows.sum[r] = join_sums(of_rows[(2 + r) * stride], rows.sum[r], by[r]);
        }
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            if (i % 8 == 0) asm volatile("" ::: "memory");  // so that few loads are ahead
            o[i] = join_outputs(totals[i * stride], o[i], by[i / 2 % 2]);
        }
    }
    if (last) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        of_rows[r * stride] = rows.m[r], of_rows[(2 + r) * stride] = rows.sum[r];
        rows.m[r] = kLowest, rows.sum[r] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kCount; i++) totals[i * stride] = o[i], o[i] = 0.0f;
}

// Calls `walk` with the blocks of keys `blocks`: all of them, or those of one segment after the other.
template <int kSegmentBlocks, int kThreads, class Walk, int kCount>
__device__ __forceinline__ void walk_segments(const Walk& walk, const Range& blocks, float (&o)[kCount], Rows& rows,
                                              float* totals) {
    if constexpr (kSegmentBlocks == 0) {
        walk(blocks.from, blocks.to);
    } else {
#pragma unroll 1
        for (int from = blocks.from, to; from < blocks.to; from = to) {
            to = min(from / kSegmentBlocks * kSegmentBlocks + kSegmentBlocks, blocks.to);
            walk(from, to);
            end_segment<kThreads>(o, rows, totals, from == blocks.from, to == blocks.to);
        }
    }
}

}  // namespace twin
