// The main loop of a GEMM whose accumulators are one chain over K, with the epilogue's stores hidden behind it.
//
// `issue(acc, stage, first)` issues the four wgmma of one k-block from stage `stage` of shared memory; in the
// first k-block of a tile the first of them starts from zero.
//
// While the tensor cores work on a k-block, the stage of the k-block before is handed back to the producer. A
// finished 16-bit tile stays in registers, packed, and goes to memory a step after each of the first
// k-blocks of the next tile ("deferred"), so that the tensor cores do not wait for stores.
#pragma once

#include "gemm_epilogue.cuh"
#include "gemm_tile.cuh"
#include "ptx/elect.cuh"

namespace twin {

// The accumulators of a tile's first kColumns columns.
template <int kColumns, int kAcc>
__device__ __forceinline__ float (&columns(float (&acc)[kAcc]))[kColumns / 2] {
    static_assert(kColumns <= 2 * kAcc, "a narrower tile");
    return reinterpret_cast<float(&)[kColumns / 2]>(acc);
}

template <class Map, int kCluster, int kStages, int kAcc, class Issue>
__device__ __forceinline__ void chain_block(float (&acc)[kAcc], unsigned shared, Stage<kStages>& stage, int& previous,
                                            bool first, const Issue& issue) {
    mbarrier_wait(shared + Map::kFull + 8 * stage.index, stage.parity);
    wgmma_fence();
    issue(acc, stage.index, first);
    wgmma_commit();
    wgmma_wait<1>();
    if (!first) release<kCluster>(shared + Map::kEmpty + 8 * previous);
    previous = stage.index;
    stage.advance();
}

struct Nothing {
    __device__ __forceinline__ void operator()() const {}
};

// The k-blocks of a tile from `kb` on, of which there was one at least, the last in stage `previous`. last() is called while
// the tensor cores work on the last of them.
template <class Map, int kCluster, int kStages, int kAcc, class Issue, class Last = Nothing>
__device__ __forceinline__ void finish_chain(float (&acc)[kAcc], unsigned shared, Stage<kStages>& stage, int k_blocks,
                                             const Issue& issue, int kb, int previous, const Last& last = {}) {
    for (; kb < k_blocks; kb++) chain_block<Map, kCluster>(acc, shared, stage, previous, false, issue);
    last();
    wgmma_wait<0>();
    wgmma_hold(acc);
    release<kCluster>(shared + Map::kEmpty + 8 * previous);
}

// The k-blocks of a tile behind its first, and the rest of the stores.
template <class Map, int kCluster, int kSteps, int kStages, int kAcc, class Issue, class Store, class Last>
__device__ __forceinline__ void continue_chain(float (&acc)[kAcc], unsigned shared, Stage<kStages>& stage, int k_blocks,
                                               const Issue& issue, int previous, bool pending, const Store& store,
                                               const Last& last) {
    int kb = 1;
    if (pending && k_blocks >= kSteps) {
#pragma unroll
        for (; kb < kSteps; kb++) {
            chain_block<Map, kCluster>(acc, shared, stage, previous, false, issue);
            store(kb);
        }
    } else if (pending) {
#pragma unroll
        for (int s = 1; s < kSteps; s++) store(s);
    }
    finish_chain<Map, kCluster>(acc, shared, stage, k_blocks, issue, kb, previous, last);
}

// All k-blocks of a tile. If `narrow`, of kNarrow columns; its first k-block is multiplied as wide as any tile's, since
// ptxas serialises the wgmma of both if the widths have no common beginning. If `pending`, store(s) is called on the way
// for s = 0 .. kSteps - 1, one behind each of the first k-blocks; and last() beside the last.
template <class Map, int kCluster, int kSteps, int kNarrow, int kStages, int kAcc, class Issue, class Store, class Last>
__device__ __forceinline__ void chain_tile(float (&acc)[kAcc], unsigned shared, Stage<kStages>& stage, int k_blocks,
                                           const Issue& issue, bool narrow, bool pending, const Store& store,
                                           const Last& last) {
    int previous = 0;
    chain_block<Map, kCluster>(acc, shared, stage, previous, true, issue);
    if (pending) store(0);
    if (narrow)
        continue_chain<Map, kCluster, kSteps>(columns<kNarrow>(acc), shared, stage, k_blocks, issue, previous, pending,
                                              store, last);
    else
        continue_chain<Map, kCluster, kSteps>(acc, shared, stage, k_blocks, issue, previous, pending, store, last);
}

// A persistent block: barriers, the roles, the end. `consume` runs in the first warpgroups, `produce` in one thread of the
// one after them, `assist` in every warp after that thread's.
template <class Map, int kStages, int kCluster, int kWarpgroups, int kConsumer, int kOthers, bool kElect = true,
          class Produce, class Consume, class Assist>
__device__ __forceinline__ void run_block(unsigned shared, const CUtensorMap& a_map, const CUtensorMap& b_map,
                                          const Produce& produce, const Consume& consume, const Assist& assist) {
    init_barriers<Map, kStages, kCluster, 4 * kWarpgroups>(shared);
    if (threadIdx.x >= 128 * kWarpgroups) {
        if constexpr (kWarpgroups == 2) setmaxnreg_dec<kOthers>();
        if (threadIdx.x >= 128 * kWarpgroups + 32) {
            assist();
        } else if (kElect ? elect_one() : threadIdx.x == 128 * kWarpgroups) {
            prefetch_tensor_map(&a_map);
            prefetch_tensor_map(&b_map);
            produce();
        }
    } else {
        if constexpr (kWarpgroups == 2) setmaxnreg_inc<kConsumer>();
        consume();
    }
    end_together<kCluster>();
}

// What is the same in all threads of a warp, in a form of which the compiler knows it.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xFFFFFFFF, value, 0); }

__device__ __forceinline__ int warpgroup_index() { return uniform(threadIdx.x / 128); }

}  // namespace twin
