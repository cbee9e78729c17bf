// How the sum of a chain joins the accumulators where both operands have a scale for each block of 128 along K
// (reference/ops/gemms/gemm_fp8_blocks.py):
//
//     a row's and a square's scale     acc = fma(p, a * b, acc)      the product of the scales rounded to fp32
//     a row's and a row's              acc = fma(p * a, b, acc)      p * a rounded to fp32
//
// Scales are those of cast_blocks.cu: of blocks of a row [blocks of K, ceil4(rows)], of square blocks
// [blocks of rows, ceil4(blocks of K)]. They come with the operands of a stage: of A, then of B, a float for each row of
// the tile, or for each 128 rows the floats of four blocks of K, since the engine copies 16 bytes at least.
#pragma once

#include "gemm_fp8_mainloop.cuh"
#include "ptx/bulk.cuh"

namespace twin {

// The scales of one operand, and how many floats there are from row to row of them.
struct BlockScales {
    const float* scales;
    int stride;
};

// Of one operand, whose tile has kRows rows.
template <int kRows, bool kSquare>
struct StageScales {
    static constexpr int kSquares = (kRows + 127) / 128;
    static constexpr int kBytes = kSquare ? 16 * kSquares : 4 * kRows;

    // How many bytes of the rows from `first` on exist.
    static __device__ __forceinline__ int bytes(int first, int end) {
        return kSquare ? 16 * min((end - first + 127) / 128, kSquares) : min(4 * ((end - first + 3) / 4 * 4), kBytes);
    }
    static __device__ __forceinline__ void copy(unsigned to, const BlockScales& of, int first, int end, int kb,
                                                unsigned full) {
        if constexpr (kSquare) {
#pragma unroll
            for (int i = 0; i < kSquares; i++)
                if (i == 0 || first + 128 * i < end)
                    bulk_load(to + 16 * i, of.scales + static_cast<size_t>(first / 128 + i) * of.stride + kb / 4 * 4,
                              16, full);
        } else {
            bulk_load(to, of.scales + static_cast<size_t>(kb) * of.stride + first, bytes(first, end), full);
        }
    }
};

// What the producer copies beside the operands of a tile of kRows x kColumns.
template <int kRows, int kColumns, bool kSquareA, bool kSquareB>
struct ScaleCopies {
    using A = StageScales<kRows, kSquareA>;
    using B = StageScales<kColumns, kSquareB>;
    static constexpr int kBytes = A::kBytes + B::kBytes;

    unsigned shared;  // of the first stage
    BlockScales a, b;
    int m, n;

    __device__ __forceinline__ int bytes(const Tile& tile) const {
        return A::bytes(tile.row, m) + B::bytes(tile.column, n);
    }
    __device__ __forceinline__ void operator()(const Tile& tile, int kb, int stage, unsigned full) const {
        A::copy(shared + stage * kBytes, a, tile.row, m, kb, full);
        B::copy(shared + stage * kBytes + A::kBytes, b, tile.column, n, kb, full);
    }
};

// A policy of a configuration, as `Added`. Square blocks of B need tiles that lie within a block, or begin with one.
template <int kRows, int kRun, bool kSquareA, bool kSquareB>
struct Scaled {
    static constexpr bool kPromotes = true, kLoadsStage = true;
    static constexpr bool kReadsStage = !kSquareB;  // while it promotes
    template <class Gemm>
    using Mainloop = SplitMainloop<Gemm>;

    // A scale for each column takes registers. Three warpgroups have one temporary.
    template <int kColumns>
    static constexpr int kParts = kColumns > (kSquareB || kRows == 192 ? 128 : 96) ? 2 : 1;

    int k;                                    // the block of K to load next
    float loaded_rows[2], loaded_squares[2];  // of the thread's rows; of the tile's first 128 columns and of the next
    float rows[2], factors[2][2];  // of the chain that runs; factors [row][128 columns], where B's blocks are square

    template <int kColumns>
    __device__ __forceinline__ void begin() {
        static_assert(!kSquareB || kColumns % 128 == 0 || 128 % kColumns == 0, "one scale for 128 columns");
        k = 0;
    }

    // `scales`: those of a stage.
    template <int kColumns>
    __device__ __forceinline__ void load(unsigned scales) {
        const unsigned row = scales + (kSquareA ? k % 4 * 4 : threadIdx.x / 32 * 64 + threadIdx.x % 32 / 4 * 4);
        loaded_rows[0] = shared_float(row), loaded_rows[1] = kSquareA ? loaded_rows[0] : shared_float(row + 32);
        if constexpr (kSquareB) {
#pragma unroll
            for (int i = 0; i < (kColumns + 127) / 128; i++)
                loaded_squares[i] = shared_float(scales + StageScales<kRows, kSquareA>::kBytes + 16 * i + k % 4 * 4);
        }
        k++;
    }

    __device__ __forceinline__ void take_loaded() {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            rows[row] = loaded_rows[row];
#pragma unroll
            for (int i = 0; i < 2; i++) factors[row][i] = __fmul_rn(loaded_rows[row], loaded_squares[i]);
        }
    }

    template <int kAcc, int kCount>
    __device__ __forceinline__ void operator()(float (&acc)[kAcc], int first, const float (&sums)[kCount],
                                               unsigned scales) const {
        if constexpr (kSquareB) {
#pragma unroll
            for (int i = 0; i < kCount; i++)
                acc[first + i] = __fmaf_rn(sums[i], factors[i / 2 % 2][first / 64], acc[first + i]);
        } else {
            const unsigned from = scales + StageScales<kRows, kSquareA>::kBytes + threadIdx.x % 4 * (4 * kRun);
#pragma unroll
            for (int i = 0; i < kCount; i += 8) {
                // Four columns of both rows: (row, column), (row, column + 1), (row + 8, column), ...
                const int within = (first + i) % (2 * kRun), group = (first + i) / (2 * kRun);
                const float4 found = shared_float4(from + 4 * (4 * kRun * group + within / 2));
                const float columns[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const float its_row = rows[j / 2 % 2], its_column = columns[j / 4 * 2 + j % 2];
                    float& sum = acc[first + i + j];
                    sum = kSquareA ? __fmaf_rn(sums[i + j], __fmul_rn(its_row, its_column), sum)
                                   : __fmaf_rn(__fmul_rn(sums[i + j], its_row), its_column, sum);
                }
            }
        }
    }

private:
    static __device__ __forceinline__ float shared_float(unsigned address) {
        return *static_cast<const float*>(__cvta_shared_to_generic(address));
    }
    static __device__ __forceinline__ float4 shared_float4(unsigned address) {
        return *static_cast<const float4*>(__cvta_shared_to_generic(address));
    }
};

}  // namespace twin
