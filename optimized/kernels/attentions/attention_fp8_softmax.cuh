// The softmax of attention in FP8: 64 queries and 128 keys, in registers of a warpgroup.
//
// The scores' accumulators have two neighbouring columns in a lane, the weights' operand wants four neighbouring keys in
// one. So the copy engine brings the keys 16 a + 4 q + 2 h + e of a block (q, h, e: 2, 1 and 1 bits) as row
// 64 h + 8 a + 2 q + e, and a lane, number q of four, holds the scores s[32 h + 4 a + 2 r + e] of its queries row + 8 r.
//
// Arithmetic: reference/ops/attentions/attention_fp8.py.
#pragma once

#include "attention_softmax.cuh"
#include "ptx/cvt_four.cuh"
#include "ptx/wgmma_ones.cuh"

namespace twin {

constexpr int kHeadroom = 8;  // m lies so far below: weights reach up to 2^8

// The key of a thread's score i, from its first one, which is 4 (lane % 4) in a block.
__device__ __forceinline__ constexpr int key_of(int i) { return i / 4 % 8 * 16 + i / 32 * 2 + i % 2; }

// Whether an entry of the batch has fewer queries; only then somebody reads the rows of those that do not exist.
template <class Limits>
__device__ __forceinline__ bool ends_before(const Limits& a, int queries) {
    return Limits::Config::kLengths && queries > a.sq;
}

// Blocks of keys of which a warp's 16 queries see every key, as far as the limits tell: [from, from + count).
struct ClearBlocks {
    int from;
    unsigned count;

    template <class Limits>
    __device__ __forceinline__ ClearBlocks(const Limits& a, int first, bool has_mask) {
        from = (key_from(a, first + 15) + kTileRows - 1) >> 7;
        const int to = max(key_limit(a, first), 0) / kTileRows;
        count = has_mask || ends_before(a, first + 16) ? 0 : max(to - from, 0);
    }

    __device__ __forceinline__ bool has(int block) const { return static_cast<unsigned>(block - from) < count; }
};

// Scores of hidden pairs become -inf. `row`: the thread's first query; `key`: its first key. Here those of keys beyond
// a query's last one, which are all keys if there is no such query, ...
template <class Limits>
__device__ __forceinline__ void hide_fours_after(float (&s)[64], const Limits& a, int row, int key) {
    int limits[2] = {key_limit(a, row) - key, key_limit(a, row + 8) - key};
    if constexpr (Limits::Config::kLengths) {
        if (row >= a.sq) limits[0] = 0;
        if (row + 8 >= a.sq) limits[1] = 0;
    }
#pragma unroll
    for (int i = 0; i < 64; i++)
        if (key_of(i) >= limits[i / 2 % 2]) s[i] = TWIN_HIDDEN;
}

// ... here those of keys before a query's first one ...
template <class Limits>
__device__ __forceinline__ void hide_fours_before(float (&s)[64], const Limits& a, int row, int key) {
    const int limits[2] = {key_from(a, row) - key, key_from(a, row + 8) - key};
#pragma unroll
    for (int i = 0; i < 64; i++)
        if (key_of(i) < limits[i / 2 % 2]) s[i] = TWIN_HIDDEN;
}

// ... and here those that the mask hides.
__device__ __forceinline__ void hide_fours_masked(float (&s)[64], const CommonArguments& a, const unsigned char* mask,
                                                  int row, int key) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        unsigned hidden = 0;  // in a loop, which takes few registers
#pragma unroll 1
        for (int n = 0; n < 32; n++) {
            const int query = row + n / 2 % 2 * 8, column = key + key_of(32 * half + n);
            if (query < a.sq && column < a.skv) hidden |= static_cast<unsigned>(masked(a, mask, query, column)) << n;
        }
#pragma unroll
        for (int n = 0; n < 32; n++)
            if (hidden >> n & 1) s[32 * half + n] = TWIN_HIDDEN;
    }
}

// Each row's largest score; NaN only if all are.
__device__ __forceinline__ void largest_number(float (&top)[2], const float (&s)[64]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float one = s[2 * r], other = s[2 * r + 1];
#pragma unroll
        for (int i = 4 + 2 * r; i < 64; i += 4) one = fmaxf(one, s[i]), other = fmaxf(other, s[i + 1]);
        one = fmaxf(one, other);
        one = fmaxf(one, __shfl_xor_sync(0xFFFFFFFF, one, 1));
        top[r] = fmaxf(one, __shfl_xor_sync(0xFFFFFFFF, one, 2));
    }
}

// Each row's largest or smallest word, as a signed integer; one instruction compares three.
template <class Pick>
__device__ __forceinline__ void picked_word(int (&word)[2], const float (&s)[64], Pick pick) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int found[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float* half = s + 32 * h + 2 * r;
            found[h] = pick(__float_as_int(half[0]), __float_as_int(half[1]));
#pragma unroll
            for (int i = 4; i < 32; i += 4)
                found[h] = pick(pick(found[h], __float_as_int(half[i])), __float_as_int(half[i + 1]));
        }
        int one = pick(found[0], found[1]);
        one = pick(one, __shfl_xor_sync(0xFFFFFFFF, one, 1));
        word[r] = pick(one, __shfl_xor_sync(0xFFFFFFFF, one, 2));
    }
}

// `largest_number` by integers. The words of numbers from +0 on are in their order, those of others in the opposite one.
__device__ __forceinline__ void largest(float (&top)[2], const float (&s)[64]) {
    int most[2];
    picked_word(most, s, [](int a, int b) { return max(a, b); });
    if (__any_sync(0xFFFFFFFF, most[0] < 0 || most[1] < 0)) {
        int least[2];
        picked_word(least, s, [](int a, int b) { return min(a, b); });
        if (most[0] < 0) most[0] = least[0];
        if (most[1] < 0) most[1] = least[1];
    }
    top[0] = __int_as_float(most[0]), top[1] = __int_as_float(most[1]);
    if (__any_sync(0xFFFFFFFF, top[0] != top[0] || top[1] != top[1])) largest_number(top, s);
}

// Scores to weights, in place; raises the rows' m, and returns alpha.
__device__ __forceinline__ void weigh_codes(float (&s)[64], float (&m)[2], float (&alpha)[2], float c) {
    float top[2];
    largest(top, s);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        alpha[r] = raise<kHeadroom>(m[r], top[r], c);
        const float base = kGrid15 - m[r];
#pragma unroll
        for (int i = 2 * r; i < 64; i += 4) {
            s[i] = weight(s[i], c, base);
            s[i + 1] = weight(s[i + 1], c, base);
        }
    }
}

// Weights of 128 keys as four A operands of 32.
__device__ __forceinline__ void pack_codes(unsigned (&p)[4][4], const float (&s)[64]) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {  // 2 a' + r, of keys 16 a' .. 16 a' + 15 of the 32
            const int i = 8 * step + 2 * n;
            p[step][n] = cvt_e4m3x4(s[i], s[i + 1], s[32 + i], s[32 + i + 1]);
        }
    }
}

// Which of a block's weights are kept: bit i of keep[h] is of the code of s[32 h + i]. `counter`: the Philox index of the
// first of the warp's eight 16 x 16 tiles. Four lanes trade the bits 4 tile + 2 r + e of columns 8 c + 2 q + e of a tile
// for those of columns 4 q + 2 h + e.
__device__ __forceinline__ void draw(unsigned (&keep)[2], const Generator& generator, unsigned long long counter,
                                     unsigned threshold) {
    unsigned drawn[2] = {0, 0};  // of c
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
        unsigned words[4];
        philox(words, generator, counter + 32 * tile + threadIdx.x % 32);
#pragma unroll
        for (int i = 0; i < 8; i++)  // i = 4 c + 2 r + e
            drawn[i / 4] |= static_cast<unsigned>(kept(words[i % 2 * 2 + i / 4], i / 2 % 2, threshold))
                            << (4 * tile + i % 4);
    }
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const unsigned low = __shfl_sync(0xFFFFFFFF, drawn[0], q % 2 * 2 + h, 4);
        const unsigned high = __shfl_sync(0xFFFFFFFF, drawn[1], q % 2 * 2 + h, 4);
        keep[h] = q < 2 ? low : high;
    }
}

// Dropped codes become zeros.
__device__ __forceinline__ void drop_codes(unsigned (&p)[4][4], const unsigned (&keep)[2]) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int i = 8 * step + 2 * n;
            const unsigned four = (keep[0] >> i & 3) | (keep[1] >> i & 3) << 2;
            p[step][n] &= (four * 0x00204081 & 0x01010101) * 0xFF;  // a byte of ones for each bit
        }
    }
}

// The factors of the thread's two rows of O, whose sums are l. m and 1 / l go to memory if `writes`.
__device__ __forceinline__ void finish_codes(float (&last)[2], const Rows& rows, const CommonArguments& a, float* m,
                                             float* inv, int batch, int head, int row, bool writes) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float inverse = rows.sum[r] == 0.0f ? 0.0f : __fdiv_rn(1.0f, rows.sum[r]);
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
