// The epilogue of FP8 GEMMs whose operands have a scale for each row (reference/ops/gemms/gemm_fp8_rowwise.py):
//
//   out = round(fp32(fp32(fp32(acc * t) * s) + bias))        t of B's row, the output's column; s of A's row
#pragma once

#include "gemm_epilogue.cuh"

namespace twin {

// The scales of an operand: `step` 1, a number for each of its rows, or 0, one for all.
struct RowScales {
    const float* scales;
    int step;
};

// A tile's scales of columns, held as a bias is: a lane has a part of what it and seven others need.
template <int kRun, int kCount>
struct ColumnScales : Bias<kRun, kCount> {
    using Bias<kRun, kCount>::words;
    using Bias<kRun, kCount>::kRuns;
    using Bias<kRun, kCount>::kHeld;

    __device__ __forceinline__ void load(const RowScales& of, int column, int n) {
        if (of.step) {
            Bias<kRun, kCount>::load(of.scales, kBiasFP32, column, n);
        } else {
            const unsigned word = __float_as_uint(__ldg(of.scales));
#pragma unroll
            for (int i = 0; i < kHeld * kRun; i++) words[i / kRun][i % kRun] = word;
        }
    }

    // In place: acc -> fp32(fp32(acc * column's) * row's), of rows r and r + 8.
    __device__ __forceinline__ void multiply(float (&acc)[kCount], const float (&rows)[2]) const {
#pragma unroll
        for (int run = 0; run < kRuns; run++)
#pragma unroll
            for (int c = 0; c < kRun; c++) {
                const float held = __uint_as_float(words[run / 8][c]);
                const float its_column = __shfl_sync(0xFFFFFFFF, held, run % 8 * 4 + threadIdx.x % 4);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float& x = acc[2 * kRun * run + c / 2 * 4 + 2 * h + c % 2];
                    x = __fmul_rn(__fmul_rn(x, its_column), rows[h]);
                }
            }
    }
};

// `ScaleBiasStore`, whose scale is 1, after the rows' scales: a multiplication by 1 changes no word.
template <class Out, int kRun, int kAcc, bool kMayDefer, bool kAccumulate>
struct RowwiseStore : ScaleBiasStore<Out, kRun, kAcc, kMayDefer, kAccumulate> {
    using Base = ScaleBiasStore<Out, kRun, kAcc, kMayDefer, kAccumulate>;
    using typename Base::Loaded;
    RowScales of_a, of_b;

    __device__ __forceinline__ RowwiseStore(void* out, const void* bias, int bias_type, int m, int n, RowScales of_a,
                                            RowScales of_b)
        : Base(out, bias, bias_type, m, n), of_a(of_a), of_b(of_b) {
        this->scale = 1.0f;
    }

    __device__ __forceinline__ void take(float (&acc)[kAcc], Loaded& loaded, const Tile& tile) {
        ColumnScales<kRun, kAcc> columns;
        columns.load(of_b, tile.column + this->column, this->n);
        float rows[2];
#pragma unroll
        for (int h = 0; h < 2; h++)  // a row that does not exist is not stored
            rows[h] = __ldg(of_a.scales + min(tile.row + this->row + 8 * h, this->m - 1) * of_a.step);
        columns.multiply(acc, rows);
        Base::take(acc, loaded, tile);
    }
};

}  // namespace twin
