// The forward's softmax of 64 queries and 128 keys, in registers of a warpgroup: hidden pairs, weights, dropout.
//
// Arithmetic: reference/ops/attentions/attention.py.
#pragma once

#include "attention_bias.cuh"

namespace twin {

// The running softmax of a thread's two rows (l / 4 and l / 4 + 8 of its warp's 16).
struct Rows {
    float m[2], sum[2];
};

// Scores of hidden pairs become -inf. `row`: the thread's first query; `key`: its first key. Here those of keys beyond
// a query's last one, which are all keys if there is no such query, ...
template <class Limits>
__device__ __forceinline__ void hide_after(float (&s)[64], const Limits& a, int row, int key) {
    int limits[2] = {key_limit(a, row), key_limit(a, row + 8)};
    if constexpr (Limits::Config::kLengths) {
        if (row >= a.sq) limits[0] = 0;
        if (row + 8 >= a.sq) limits[1] = 0;
    }
#pragma unroll
    for (int i = 0; i < 64; i++)
        if (key + i / 4 * 8 + i % 2 >= limits[i / 2 % 2]) s[i] = TWIN_HIDDEN;
}

// ... here those of keys before a query's first one ...
template <class Limits>
__device__ __forceinline__ void hide_before(float (&s)[64], const Limits& a, int row, int key) {
    const int limits[2] = {key_from(a, row), key_from(a, row + 8)};
#pragma unroll
    for (int i = 0; i < 64; i++)
        if (key + i / 4 * 8 + i % 2 < limits[i / 2 % 2]) s[i] = TWIN_HIDDEN;
}

// ... and here those that the mask hides.
__device__ __forceinline__ void hide_masked(float (&s)[64], const CommonArguments& a, const unsigned char* mask,
                                            int row, int key) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        unsigned hidden = 0;  // in a loop, which takes few registers
#pragma unroll 1
        for (int n = 0; n < 32; n++) {
            const int query = row + n / 2 % 2 * 8, column = key + 64 * half + n / 4 * 8 + n % 2;
            if (query < a.sq && column < a.skv) hidden |= static_cast<unsigned>(masked(a, mask, query, column)) << n;
        }
#pragma unroll
        for (int n = 0; n < 32; n++)
            if (hidden >> n & 1) s[32 * half + n] = TWIN_HIDDEN;
    }
}

// Whether the mask hides no pair of a block of keys, as far as one load tells: if all queries share a mask's row.
__device__ __forceinline__ bool hides_nothing(const CommonArguments& a, const unsigned char* mask, int key) {
    const unsigned char* entries = mask + key;
    const bool one_row = a.mask_i == 0 || a.sq == 1;  // torch's stride of a dimension of one element means nothing
    if (!one_row || a.mask_j != 1 || key + kTileRows > a.skv || reinterpret_cast<size_t>(entries) % 4 != 0)
        return false;
    const unsigned four = __ldg(reinterpret_cast<const unsigned*>(entries) + threadIdx.x % 32);
    return __all_sync(0xFFFFFFFF, four == 0);
}

// Raises m of a row whose largest score is `top`; returns alpha. The largest weight is 2^kHeadroom.
template <int kHeadroom>
__device__ __forceinline__ float raise(float& m, float top, float c) {
    const float before = m;
    m = fmaxf(before, kGrid15 - __fmaf_rn(-top, c, kGrid15 + kHeadroom));
    return exp2_grid(before - m);
}

// Scores to weights, in place; returns alpha of the two rows.
__device__ __forceinline__ void weigh(float (&s)[64], Rows& rows, float (&alpha)[2], float c) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = TWIN_HIDDEN;
#pragma unroll
        for (int i = 2 * r; i < 64; i += 4) top = fmaxf(fmaxf(top, s[i]), s[i + 1]);
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 2));
        alpha[r] = raise<0>(rows.m[r], top, c);
        const float base = kGrid15 - rows.m[r];
        float even = 0.0f, odd = 0.0f;
#pragma unroll
        for (int i = 2 * r; i < 64; i += 4) {
            s[i] = weight(s[i], c, base);
            s[i + 1] = weight(s[i + 1], c, base);
            even = even + s[i], odd = odd + s[i + 1];
        }
        rows.sum[r] = __fmaf_rn(rows.sum[r], alpha[r], even + odd);
    }
}

// Dropped weights become zeros. `counter`: the Philox index of the first of the warp's eight 16 x 16 tiles.
__device__ __forceinline__ void drop(float (&s)[64], const Generator& generator, unsigned long long counter,
                                     unsigned threshold) {
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
        unsigned words[4];
        philox(words, generator, counter + 32 * tile + threadIdx.x % 32);
#pragma unroll
        for (int i = 0; i < 8; i++) {  // i = 4 c + 2 r + e
            if (!kept(words[i % 2 * 2 + i / 4], i / 2 % 2, threshold)) s[8 * tile + i] = 0.0f;
        }
    }
}

// The factors of the thread's two rows of O. m and 1 / l go to memory if `writes`.
template <class Config>
__device__ __forceinline__ void finish(float (&last)[2], const Rows& rows, const AttentionArguments<Config>& a,
                                       float* m, float* inv, int batch, int head, int row, bool writes) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = rows.sum[r];
        sum = sum + __shfl_xor_sync(0xFFFFFFFF, sum, 1);
        sum = sum + __shfl_xor_sync(0xFFFFFFFF, sum, 2);
        if constexpr (Config::kSink) sum = sum + exp2_grid(__fmul_rn(__ldg(a.sinks + head), kLog2e) - rows.m[r]);
        const float inverse = sum == 0.0f ? 0.0f : __fdiv_rn(1.0f, sum);
        last[r] = __fmul_rn(inverse, a.kept);
        const int query = row + 8 * r;
        if (query < a.sq && threadIdx.x % 4 == 0 && writes) {
            const long long at = static_cast<long long>(batch * a.heads + head) * a.sq + query;
            m[at] = rows.m[r];
            inv[at] = inverse;
        }
    }
}

}  // namespace twin
