// What a cast to FP8 lost: a piece of 4096 elements, and the tree that adds (cast_stats.cu, cast_stats_blocks.cu).
#pragma once
#include "common/wide.cuh"

namespace twin {

constexpr int kThreads = 256;  // chains
constexpr int kLinks = 16;     // elements of a chain
constexpr int kPiece = kLinks * kThreads;
constexpr int kCounts = 4;
constexpr int kSums = 3;
constexpr bool kCast = FP8 != 2;
constexpr double kLimit = FP8 == 0 ? 464.0 : 61440.0;  // the largest value and half of its spacing

// The value of a code. A code of E5M2 is the upper byte of an fp16 word; one of E4M3 has the bias 7 in place of 15.
__device__ __forceinline__ float value_of(unsigned char code) {
    if constexpr (FP8 == 1) return cvt_f32_f16(static_cast<unsigned short>(code << 8));
    if ((code & 0x7F) == 0x7F) return __uint_as_float(0x7FFFFFFF);
    return cvt_f32_f16(static_cast<unsigned short>((code & 0x80) << 8 | (code & 0x7F) << 7)) * 256.0f;
}

// What a thread has found: counts, then sums, the last of which is a maximum.
struct Found {
    long long counts[kCounts];
    double sums[kSums];

    __device__ __forceinline__ void add(const Found& other) {
#pragma unroll
        for (int i = 0; i < kCounts; i++) counts[i] += other.counts[i];
#pragma unroll
        for (int i = 0; i < kSums - 1; i++) sums[i] += other.sums[i];
        sums[kSums - 1] = fmax(sums[kSums - 1], other.sums[kSums - 1]);
    }
};

// Adds the threads' counts and sums by the halving tree; thread 0 writes them.
__device__ __forceinline__ void add_threads(Found& mine, long long* counts, double* sums) {
    __shared__ Found all[kThreads];
    all[threadIdx.x] = mine;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            mine.add(all[threadIdx.x + half]);
            all[threadIdx.x] = mine;
        }
    }
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < kCounts; i++) counts[i] = mine.counts[i];
#pragma unroll
        for (int i = 0; i < kSums; i++) sums[i] = mine.sums[i];
    }
}

// A piece; factor_of(i): scale_inv of element i.
template <class FactorOf>
__device__ __forceinline__ void measure(const wide_t* __restrict__ x, const unsigned char* __restrict__ q,
                                        const FactorOf& factor_of, long long* piece_counts, double* piece_sums,
                                        long long count) {
    const long long first = static_cast<long long>(blockIdx.x) * kPiece + threadIdx.x;
    wide_t element[kLinks];
    unsigned char code[kLinks];
#pragma unroll
    for (int k = 0; k < kLinks; k++) {
        const long long i = first + k * kThreads;
        element[k] = i < count ? x[i] : wide_t(0);
        code[k] = kCast && i < count ? q[i] : 0;
    }
    Found mine = {};
    float most = 0.0f;
#pragma unroll
    for (int k = 0; k < kLinks; k++) {
        const float v = widen(element[k]);
        const bool nan = isnan(v), inf = isinf(v);
        const bool finite = !nan && !inf && first + k * kThreads < count;  // what does not exist adds +0
        most = fmaxf(most, fabsf(v));                                      // the other operand where one is NaN
        mine.counts[2] += nan;
        mine.counts[3] += inf;
        const double wide = v;
        mine.sums[0] += finite ? wide * wide : 0.0;
        if constexpr (kCast) {
            const double factor = factor_of(min(first + k * kThreads, count - 1));
            const double error = wide - static_cast<double>(value_of(code[k])) * factor;
            mine.sums[1] += finite ? error * error : 0.0;
            mine.counts[0] += finite && fabs(wide) > kLimit * factor;
            mine.counts[1] += finite && v != 0.0f && (code[k] & 0x7F) == 0;
        }
    }
    mine.sums[2] = most;
    add_threads(mine, piece_counts + kCounts * static_cast<long long>(blockIdx.x),
                piece_sums + kSums * static_cast<long long>(blockIdx.x));
}

}  // namespace twin
