// GEMMs that go on from accumulators, and leave accumulators: no scale, no bias, no rounding
// (reference/ops/gemms/gemm_part.py). A configuration says kContinues, so that its main loop adds to what a tile's
// accumulators hold.
#pragma once

#include "gemm_epilogue.cuh"

namespace twin {

// A tile's accumulators from fp32 `start` [m, n], where the tile's sums will be stored, too; +0 where that is null and
// where nothing exists. The loads of a tile are issued together, before its first k-block.
template <int kRun, int kCount>
__device__ __forceinline__ void load_sums(float (&acc)[kCount], const float* start, int row, int column, int m, int n,
                                          int end) {
#pragma unroll
    for (int g = 0; g < kCount / (2 * kRun); g++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int v = 0; v < kRun / 4; v++) {
                const int i = 2 * kRun * g + 8 * v + 2 * h, its_row = row + 8 * h, its_column = column + 4 * kRun * g;
                const bool exists = start != nullptr && its_row < m && its_column < end;
                unsigned words[4];
                load_if(words, start + static_cast<long long>(its_row) * n + its_column + 4 * v, exists);
                acc[i] = __uint_as_float(words[0]), acc[i + 1] = __uint_as_float(words[1]);
                acc[i + 4] = __uint_as_float(words[2]), acc[i + 5] = __uint_as_float(words[3]);
            }
}

// The epilogue: sums as they are.
template <int kRun, int kAcc>
struct SumStore {
    static constexpr int kSteps = 1;
    static constexpr bool pending = false;
    struct Loaded {};

    float* out;
    const float* start;
    int m, n, row, column;  // of a tile, the thread's first

    __device__ __forceinline__ SumStore(float* out, const float* start, int m, int n)
        : out(out), start(start), m(m), n(n) {
        const int lane = threadIdx.x % 32;
        row = threadIdx.x / 32 * 16 + lane / 4;
        column = lane % 4 * kRun;
    }
    __device__ __forceinline__ void load_ahead(Loaded&, const Tile&) const {}
    __device__ __forceinline__ void step(int) const {}
    __device__ __forceinline__ void begin(float (&acc)[kAcc], const Tile& tile) const {
        load_sums<kRun>(acc, start, tile.row + row, tile.column + column, m, n, tile.end);
    }
    __device__ __forceinline__ void take(float (&acc)[kAcc], Loaded&, const Tile& tile) const {
        store_fp32<kRun>(acc, destination<4>(out, tile.row + row, tile.column + column, m, n, tile.end));
    }
    __device__ __forceinline__ void finish() const {}
};

// A main loop whose tiles begin with the epilogue's accumulators.
template <class Loop>
struct Continued : Loop {
    using Loop::Loop;

    template <int kAcc, class Epilogue, class Last>
    __device__ __forceinline__ void operator()(float (&acc)[kAcc], const Tile& tile, Epilogue& epilogue,
                                               const Last& last) {
        epilogue.begin(acc, tile);
        wgmma_hold(acc);  // nothing moves them after the fence before the first wgmma
        Loop::operator()(acc, tile, epilogue, last);
    }
};

}  // namespace twin
