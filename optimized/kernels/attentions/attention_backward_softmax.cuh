// From a tile's scores to its weights and gradients, in registers: keys are rows and queries are columns.
#pragma once

#include "attention_bias.cuh"
#include "attention_backward_workspace.cuh"

namespace twin {

// What a thread hides and keeps of its pairs, and where they lie: accumulator 4 t + 2 r + e is of the key
// `key` + 8 r and of the query `query` + 8 t + e.
template <class Config_>
struct BackwardPairs {
    using Config = Config_;
    static constexpr int kWords = BackwardTile<Config>::kWords;
    int head, key, query;                   // head: batch h + head, of the queries
    unsigned hidden[kWords], keep[kWords];  // bit n % 32 of word n / 32: of accumulator n
};

// Fill `hidden`, for a tile in which some pair is hidden.
template <class Config>
__device__ __forceinline__ void hide(BackwardPairs<Config>& at, const AttentionArguments<Config>& a,
                                     const AttentionLimits<Config>& limits) {
    const unsigned char* mask = head_mask(a, at.head / a.heads, at.head % a.heads);
#pragma unroll
    for (int word = 0; word < at.kWords; word++) {
        unsigned bits = 0;
#pragma unroll 1
        for (int n = 0; n < 32; n++) {
            const int key = at.key + n / 2 % 2 * 8, query = at.query + 64 * word + n / 4 * 8 + n % 2;
            bool hidden = query >= limits.sq || unseen(limits, query, key);
            if (mask != nullptr && !hidden) hidden = masked(a, mask, query, key);
            bits |= static_cast<unsigned>(hidden) << n;
        }
        at.hidden[word] = bits;
    }
}

// Fill `keep` with what attention_keep has drawn.
template <class Config>
__device__ __forceinline__ void read_kept(BackwardPairs<Config>& at, const CommonArguments& a,
                                          const CommonScratch& scratch) {
#pragma unroll
    for (int word = 0; word < at.kWords; word++)
        at.keep[word] = kept_words(a, scratch, at.head, at.query + 64 * word, at.key)[threadIdx.x % 32];
}

template <int kWords>
__device__ __forceinline__ bool is_set(const unsigned (&bits)[kWords], int n) {
    return bits[n / 32] >> n % 32 & 1;
}

// The scores s become the weights, in place: +0 where a pair is hidden.
template <int kScores, class Config>
__device__ __forceinline__ void weigh(float (&s)[kScores], const AttentionArguments<Config>& a,
                                      const AttentionLimits<Config>& limits, const BackwardPairs<Config>& at,
                                      bool some_hidden, const float* base, const float* inv) {
    add_bias<true>(s, a, limits, at.head / a.heads, at.head % a.heads, at.key, at.query);
#pragma unroll
    for (int t = 0; t < kScores / 4; t++) {
        const float2 bases = *reinterpret_cast<const float2*>(base + 8 * t);
        const float2 inverses = *reinterpret_cast<const float2*>(inv + 8 * t);
#pragma unroll
        for (int n = 4 * t; n < 4 * t + 4; n++)
            s[n] = __fmul_rn(weight(s[n], factor(a), n % 2 ? bases.y : bases.x), n % 2 ? inverses.y : inverses.x);
    }
    if (some_hidden) {
#pragma unroll
        for (int n = 0; n < kScores; n++) s[n] = is_set(at.hidden, n) ? 0.0f : s[n];
    }
}

// The weights of 16 queries that dropout keeps, as an operand.
template <int kScores, class Config>
__device__ __forceinline__ void pack_kept(unsigned (&weights)[4], const float (&s)[kScores],
                                          const BackwardPairs<Config>& at, int step) {
    float kept[8];
#pragma unroll
    for (int i = 0; i < 8; i++) kept[i] = !Config::kDropout || is_set(at.keep, 8 * step + i) ? s[8 * step + i] : 0.0f;
    pack_operand<typename Config::Format>(weights, kept, 0);
}

// The gradients of the scores, in place of dp.
template <int kScores, class Config>
__device__ __forceinline__ void differentiate(float (&dp)[kScores], const float (&s)[kScores], const CommonArguments& a,
                                              const BackwardPairs<Config>& at, bool some_hidden, const float* dots) {
#pragma unroll
    for (int n = 0; n < kScores; n++) {
        const float2 dot = *reinterpret_cast<const float2*>(dots + n / 4 * 8);
        const float passed = !Config::kDropout || is_set(at.keep, n) ? dp[n] : 0.0f;
        dp[n] = __fmul_rn(s[n], __fmaf_rn(passed, a.kept, -(n % 2 ? dot.y : dot.x)));
    }
    if (some_hidden) {
#pragma unroll
        for (int n = 0; n < kScores; n++) dp[n] = is_set(at.hidden, n) ? 0.0f : dp[n];
    }
}

}  // namespace twin
