// The works of attention_backward.cu: which there are, and how one goes on where another has ended.
//
// A group of heads shares its keys, and dk and dv are one chain over all of its heads. A work of all of them is long, so
// at the end multiprocessors wait for the last works, most where the mask is causal: there these are the longest. So with
// kHeadsApart the last heads of keys of a launch are taken in parts. A part has `each` of the group's heads. First
// come the first parts of all these heads of keys, then the second ones, and so on.
//
// A part takes over the fp32 sums of the part before it. So the chain, and with it every bit, is that of a work of all
// heads. Each warp hands over its own rows; it needs no others.
#pragma once

#include "attention_backward_workspace.cuh"
#include "ptx/turn.cuh"

namespace twin {

// What a block does at a time: keys from `first`; of each head of a group, or of a range of them, the queries of a range.
// Without a head: it is done.
struct WorkPlace {
    int batch, key_head, first;
    Range queries;
};

struct WorkHeads {
    Range heads;
};

template <class Config_>
struct BackwardWork : WorkPlace, Optional<WorkHeads, Config_::kHeadsApart>, OwnLimits<Config_> {
    using Config = Config_;
};

// Of a group's heads a work has those from this one, ...
template <class Work>
__device__ __forceinline__ int head_from(const Work& work) {
    if constexpr (Work::Config::kHeadsApart) return work.heads.from;
    return 0;
}

// ... up to this one, not included.
template <class Work>
__device__ __forceinline__ int head_to(const Work& work, int group) {
    if constexpr (Work::Config::kHeadsApart) return work.heads.to;
    return group;
}

// The work of a rank. Heads are taken `together` at a time, their last keys first.
template <class Config>
__device__ __forceinline__ BackwardWork<Config> work_of(const AttentionArguments<Config>& a,
                                                        const BackwardScratch<Config>& scratch, int rank) {
    const int key_blocks = (a.skv + kTileRows - 1) / kTileRows, key_heads = a.heads / a.group;
    if (rank >= scratch.works) return {{0, -1, 0, {0, 0}}};
    int all_heads = a.batches * key_heads;
    if constexpr (Config::kHeadsApart) all_heads = scratch.apart_from;
    int before = rank / (a.together * key_blocks) * a.together;
    int heads = min(a.together, all_heads - before), place = rank - before * key_blocks;
    Range of_group{0, a.group};
    if constexpr (Config::kHeadsApart) {
        if (rank >= all_heads * key_blocks) {
            before = all_heads, heads = scratch.apart, place = rank - before * key_blocks;
            of_group.from = place / (heads * key_blocks) * scratch.each;
            of_group.to = min(of_group.from + scratch.each, a.group);
            place %= heads * key_blocks;
        }
    }
    const int head = before + place % heads;
    const int first = (key_blocks - 1 - place / heads) * kTileRows;
    const AttentionLimits<Config>& limits = limits_of(a, head / key_heads);
    BackwardWork<Config> work{{head / key_heads, head % key_heads, first, visitors(limits, first)}};
    if constexpr (Config::kHeadsApart) work.heads = of_group;
    work.carry(limits);
    return work;
}

// A consumer thread's place among a work's sums, and the word that says of how many heads of the group its warp's are.
struct Handed {
    float4* sums;
    unsigned* heads;

    template <class Config>
    __device__ __forceinline__ Handed(const AttentionArguments<Config>& a, const BackwardScratch<Config>& scratch,
                                      const BackwardWork<Config>& work) {
        const int key_blocks = (a.skv + kTileRows - 1) / kTileRows, block = work.first / kTileRows;
        const int head = work.batch * (a.heads / a.group) + work.key_head;
        const long long place = static_cast<long long>(head - scratch.apart_from) * key_blocks + block;
        sums = reinterpret_cast<float4*>(scratch.handed + place * (2 * kTileRows * Config::kChannels)) + threadIdx.x;
        heads = scratch.summed + (head * key_blocks + block) * (4 * kWarpgroups) + threadIdx.x / 32;
    }
};

// Wait for the sums over the heads of the group before this work's.
template <int kCount, class Config>
__device__ __forceinline__ void take_over(float (&dv)[kCount], float (&dk)[kCount], const AttentionArguments<Config>& a,
                                          const BackwardScratch<Config>& scratch, const BackwardWork<Config>& work) {
    if constexpr (Config::kHeadsApart) {
        const Handed handed(a, scratch, work);
        wait_for_turn_together(handed.heads, work.heads.from);
#pragma unroll
        for (int j = 0; j < kCount / 2; j++) {
            float* acc = j < kCount / 4 ? dv + 4 * j : dk + (4 * j - kCount);
            const float4 four = handed.sums[j * (128 * kWarpgroups)];
            acc[0] = four.x, acc[1] = four.y, acc[2] = four.z, acc[3] = four.w;
        }
    }
}

template <int kCount, class Config>
__device__ __forceinline__ void hand_over(const float (&dv)[kCount], const float (&dk)[kCount],
                                          const AttentionArguments<Config>& a, const BackwardScratch<Config>& scratch,
                                          const BackwardWork<Config>& work) {
    if constexpr (Config::kHeadsApart) {
        const Handed handed(a, scratch, work);
#pragma unroll
        for (int j = 0; j < kCount / 2; j++) {
            const float* acc = j < kCount / 4 ? dv + 4 * j : dk + (4 * j - kCount);
            handed.sums[j * (128 * kWarpgroups)] = make_float4(acc[0], acc[1], acc[2], acc[3]);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) pass_turn(handed.heads, work.heads.to);
    }
}

// No work has handed anything over: by all threads of a grid of blocks of 256.
template <class Config>
__device__ __forceinline__ void clear_handed(const AttentionArguments<Config>& a,
                                             const BackwardScratch<Config>& scratch) {
    if constexpr (Config::kHeadsApart) {
        const int words = a.batches * (a.heads / a.group) * ((a.skv + kTileRows - 1) / kTileRows) * (4 * kWarpgroups);
        for (int at = (blockIdx.y * gridDim.x + blockIdx.x) * 256 + threadIdx.x; at < words;
             at += gridDim.x * gridDim.y * 256)
            scratch.summed[at] = 0;
    }
}

}  // namespace twin
