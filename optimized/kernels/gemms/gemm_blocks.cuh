// How the sum of a chain joins the accumulators where both operands have a scale for each block of 128 along K
// (reference/ops/gemms/gemm_fp8_blocks.py):
//
//     acc = fma(p * first, second, acc)      the product rounded to fp32; first: of A's row, second: of B's;
//                                            where A's blocks are square, of B's and of A's
//
// Scales are those of cast_blocks.cu: of blocks of a row [blocks of K, ceil4(rows)], of square blocks
// [blocks of rows, ceil4(blocks of K)]. A policy of a configuration, as `Added`.
#pragma once

#include "gemm_fp8_mainloop.cuh"

namespace twin {

// The scales of one operand, and how many floats there are from row to row of them.
struct BlockScales {
    const float* scales;
    int stride;
};

template <int kRun, bool kSquareA, bool kSquareB>
struct Scaled {
    static constexpr bool kPromotes = true;
    template <class Gemm>
    using Mainloop = SplitMainloop<Gemm>;

    // A scale for each column takes registers.
    template <int kColumns>
    static constexpr int kParts = kColumns > 64 ? 2 : 1;

    BlockScales a, b;
    int m, n;
    int row, column, k;  // the thread's first ones in this tile; the chain's block of K

    __device__ __forceinline__ Scaled(BlockScales a, BlockScales b, int m, int n) : a(a), b(b), m(m), n(n) {}

    __device__ __forceinline__ void begin(const Tile& tile) {
        const int lane = threadIdx.x % 32;
        row = tile.row + threadIdx.x / 32 * 16 + lane / 4;
        column = tile.column + lane % 4 * kRun;
        k = 0;
    }

    // Of a row, or of a column, that exists or not: what reaches no output may have any scale.
    template <bool kSquare>
    static __device__ __forceinline__ const float* scale_of(const BlockScales& of, int index, int k) {
        return of.scales + (kSquare ? static_cast<size_t>(index / 128) * of.stride + k
                                    : static_cast<size_t>(k) * of.stride + index);
    }

    template <int kAcc, int kCount>
    __device__ __forceinline__ void operator()(float (&acc)[kAcc], int first, const float (&sums)[kCount]) {
        float of_row[2];
#pragma unroll
        for (int half = 0; half < 2; half++) of_row[half] = *scale_of<kSquareA>(a, min(row + 8 * half, m - 1), k);
        // A run of kRun columns is 2 kRun accumulators, four for two columns of both rows; the next run is 4 kRun on.
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            const int within = (first + i) % (2 * kRun), run = (first + i) / (2 * kRun);
            const int at = min(column + 4 * kRun * run + within / 2, n - 2);
            float2 of_column;
            if constexpr (kSquareB)
                of_column.x = of_column.y = *scale_of<true>(b, at, k);
            else
                of_column = *reinterpret_cast<const float2*>(scale_of<false>(b, at, k));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float its_row = of_row[j / 2], its_column = j % 2 ? of_column.y : of_column.x;
                const float product = __fmul_rn(sums[i + j], kSquareA ? its_column : its_row);
                acc[first + i + j] = __fmaf_rn(product, kSquareA ? its_row : its_column, acc[first + i + j]);
            }
        }
        if (first + kCount == kAcc) k++;
    }
};

}  // namespace twin
