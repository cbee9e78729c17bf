// A bias on attention's scores: t = fma(S, c, b log2e), of which the softmax takes powers of two.
//
// b is an element of `values`, or -slope |query + shift - key| (ALiBi). Definition: reference/ops/attentions/attention_bias.py.
#pragma once

#include "attention_tile.cuh"

namespace twin {

// Scores become t: `score` is of one pair, whose bias is b.
__device__ __forceinline__ float biased(float score, float c, float b) {
    return __fmaf_rn(score, c, __fmul_rn(b, kLog2e));
}

template <class T, bool kWide>
__device__ __forceinline__ float bias_value(const void* values, long long at) {
    if constexpr (kWide) return __ldg(static_cast<const float*>(values) + at);
    const unsigned short word = __ldg(static_cast<const unsigned short*>(values) + at);
    if constexpr (same_type<T, BF16>) return __uint_as_float(static_cast<unsigned>(word) << 16);
    return cvt_f32_f16(word);
}

// Calls `each` with every accumulator's number, 8 at a time, as far as there are columns. The branch keeps the compiler
// from having more values at once than there are registers for.
template <int kCount, class Each>
__device__ __forceinline__ void in_columns(int columns, const Each& each) {
#pragma unroll
    for (int first = 0; first < kCount; first += 8) {
        if (first * 2 >= columns) return;
#pragma unroll
        for (int n = first; n < first + 8; n++) each(n);
    }
}

// What lies beyond the last query or key, whose pairs are hidden, gets a neighbour's bias.
template <bool kKeysAreRows, bool kWide, int kCount, class Config>
__device__ __forceinline__ void add_bias_values(float (&s)[kCount], const AttentionArguments<Config>& a, long long head,
                                                int row, int column) {
    const int rows = kKeysAreRows ? a.skv : a.sq, columns = kKeysAreRows ? a.sq : a.skv;
    const long long along_row = kKeysAreRows ? 1 : a.bias_i, along_column = kKeysAreRows ? a.bias_i : 1;
    const long long at[2] = {head + min(row, rows - 1) * along_row, head + min(row + 8, rows - 1) * along_row};
    in_columns<kCount>(columns - (column & -8), [&](int n) {
        const long long place = at[n / 2 % 2] + min(column + n / 4 * 8 + n % 2, columns - 1) * along_column;
        s[n] = biased(s[n], a.c, bias_value<typename Config::Format, kWide>(a.bias, place));
    });
}

// Accumulator 4 t + 2 r + e is of row `row` + 8 r and column `column` + 8 t + e; rows are queries, or keys. Nothing where
// scores have no bias.
template <bool kKeysAreRows, int kCount, class Config>
__device__ __forceinline__ void add_bias(float (&s)[kCount], const AttentionArguments<Config>& a,
                                         const AttentionLimits<Config>& limits, int batch, int head, int row,
                                         int column) {
    if constexpr (Config::kBias) {
        // So that the forward keeps no address from tile to tile, for which it has no registers.
        if constexpr (!kKeysAreRows) asm volatile("" : "+r"(row), "+r"(column), "+r"(head));
        if (a.bias == nullptr) {
            const float slope = __ldg(a.slopes + batch * a.slope_b + head);
            const int apart = kKeysAreRows ? column + limits.diagonal - row : row + limits.diagonal - column;
            in_columns<kCount>((kKeysAreRows ? a.sq : a.skv) - (column & -8), [&](int n) {
                const int down = n / 2 % 2 * 8, across = n / 4 * 8 + n % 2;
                const int distance = apart + (kKeysAreRows ? across - down : down - across);
                s[n] = biased(s[n], a.c, __fmul_rn(slope, static_cast<float>(-abs(distance))));
            });
        } else if (a.bias_is_fp32) {
            add_bias_values<kKeysAreRows, true>(s, a, batch * a.bias_b + head * a.bias_h, row, column);
        } else {
            add_bias_values<kKeysAreRows, false>(s, a, batch * a.bias_b + head * a.bias_h, row, column);
        }
    }
}

}  // namespace twin
