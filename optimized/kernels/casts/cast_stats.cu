// cast_stats: what a cast to FP8 lost; formulas and the order of the sums: reference/ops/casts/cast_stats.py.
//
//     x' = q · scale_inv                 exact in float64
//     counts = saturated, underflowed, nan, inf       of x
//     sums   = total(x^2), total((x - x')^2), max |x|
//
// x [count] fp32, bf16 or fp16 (WIDE); q [count] FP8 (0 E4M3, 1 E5M2), or none (2): then only x is read, and saturated,
// underflowed and total((x - x')^2) are 0. Any alignment.
//
// Bound by memory. `cast_stats`: a block takes a piece of 4096 elements, thread j its chain j, so neighbours read
// neighbours; the chains meet in shared memory. It leaves a piece's counts and sums in `piece_counts` [pieces, 4] and
// `piece_sums` [pieces, 3]. `total`: one block adds them.
#include "cast_stats.cuh"

using namespace twin;

extern "C" __global__ void __launch_bounds__(kThreads)
    cast_stats(const wide_t* __restrict__ x, const unsigned char* __restrict__ q, const float* __restrict__ scale_inv,
               long long* piece_counts, double* piece_sums, long long count) {
    const double factor = kCast ? static_cast<double>(*scale_inv) : 0.0;
    measure(x, q, [&](long long) { return factor; }, piece_counts, piece_sums, count);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    total(const long long* __restrict__ piece_counts, const double* __restrict__ piece_sums, long long* counts,
          double* sums, long long pieces) {
    Found mine = {};
    for (long long piece = threadIdx.x; piece < pieces; piece += kThreads) {
        Found one;
#pragma unroll
        for (int i = 0; i < kCounts; i++) one.counts[i] = piece_counts[kCounts * piece + i];
#pragma unroll
        for (int i = 0; i < kSums; i++) one.sums[i] = piece_sums[kSums * piece + i];
        mine.add(one);
    }
    add_threads(mine, counts, sums);
}
