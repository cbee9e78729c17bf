// The fast main loop of a GEMM, one chain over K, and the roles of a block's warps.
//
// While the tensor cores compute a k-block, the consumers release the previous stage to the producer. A finished 16-bit
// tile stays packed in their registers, and they store it in steps beside the first k-blocks of the next tile
// ("deferred"), so that the tensor cores do not wait.
#pragma once

#include "gemm_epilogue.cuh"
#include "gemm_tile.cuh"
#include "ptx/elect.cuh"
#include "ptx/fence_block.cuh"

namespace twin {

// A value that is the same in all threads of a warp: afterwards the compiler knows it.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xFFFFFFFF, value, 0); }

__device__ __forceinline__ int warpgroup_index() { return uniform(threadIdx.x / 128); }

// The accumulators of a tile's first kColumns columns.
template <int kColumns, int kAcc>
__device__ __forceinline__ float (&columns(float (&acc)[kAcc])) [kColumns / 2] {
    static_assert(kColumns <= 2 * kAcc, "a narrower tile");
    return reinterpret_cast<float (&)[kColumns / 2]>(acc);
}

// What main loops have in common: the ring of stages and the number of k-blocks.
template <class Map_>
struct Mainloop {
    using Map = Map_;
    unsigned shared;
    int k_blocks;
    typename Map::Ring ring;

    __device__ __forceinline__ Mainloop(unsigned shared, int k_blocks)
        : shared(shared), k_blocks(k_blocks), ring(shared + Map::kBarriers) {}
    __device__ __forceinline__ Tile wait_for_tile() const {
        ring.wait_full();
        return tile_of_stage<Map>(shared, ring.stage.index);
    }
    __device__ __forceinline__ void release(unsigned empty) const { ring.template release<Map::kCluster>(empty); }
    // Of a stage that this warp's lanes have read themselves. An arrival does not wait for their loads, which may stand in a
    // queue behind the stores of an epilogue, while the copy engine writes the stage again: the fence waits.
    __device__ __forceinline__ void release_read(unsigned empty) const {
        fence_block();
        __syncwarp();
        release(empty);
    }
};

// One chain over K. issue(acc, stage, first) issues the four wgmma of a k-block; a tile's first k-block starts from
// zero.
template <class Map, class Issue>
struct Chain : Mainloop<Map> {
    Issue issue;
    int previous = 0;  // stage of the previous k-block

    __device__ __forceinline__ Chain(unsigned shared, int k_blocks) : Mainloop<Map>(shared, k_blocks), issue(shared) {}

    template <int kAcc>
    __device__ __forceinline__ void block(float (&acc)[kAcc], bool first) {
        this->ring.wait_full();
        wgmma_fence();
        issue(acc, this->ring.stage.index, first);
        wgmma_commit();
        wgmma_wait<1>();
        if (!first) this->release(this->ring.empty(previous));
        previous = this->ring.stage.index;
        this->ring.advance();
    }

    // The k-blocks from kb >= 1 on; last() is called while the tensor cores compute the last of them.
    template <int kAcc, class Last = Nothing>
    __device__ __forceinline__ void finish(float (&acc)[kAcc], int kb, const Last& last = {}) {
        for (; kb < this->k_blocks; kb++) block(acc, false);
        last();
        wgmma_wait<0>();
        wgmma_hold(acc);
        this->release(this->ring.empty(previous));
    }
};

// The main loop of fast accumulation. Beside each of a tile's first Epilogue::kSteps k-blocks runs a step of the
// previous tile's epilogue.
template <class Map, class Issue, int kNarrow>
struct FastMainloop : Chain<Map, Issue> {
    using Chain<Map, Issue>::Chain;

    template <int kAcc, class Epilogue, class Last>
    __device__ __forceinline__ void operator()(float (&acc)[kAcc], const Tile& tile, Epilogue& epilogue,
                                               const Last& last) {
        compute(acc, kNarrow < 2 * kAcc && tile.end - tile.column <= kNarrow, epilogue, last);
    }

    // The first k-block of a narrow tile is as wide as any: ptxas serialises the wgmma of both widths unless they begin
    // alike.
    template <int kAcc, class Epilogue, class Last>
    __device__ __forceinline__ void compute(float (&acc)[kAcc], bool narrow, Epilogue& epilogue, const Last& last) {
        this->block(acc, true);
        if (epilogue.pending) epilogue.step(0);
        if (narrow)
            rest(columns<kNarrow>(acc), epilogue, last);
        else
            rest(acc, epilogue, last);
    }

    template <int kAcc, class Epilogue, class Last>
    __device__ __forceinline__ void rest(float (&acc)[kAcc], Epilogue& epilogue, const Last& last) {
        constexpr int kSteps = Epilogue::kSteps;
        int kb = 1;
        if (epilogue.pending && this->k_blocks >= kSteps) {
#pragma unroll
            for (; kb < kSteps; kb++) {
                this->block(acc, false);
                epilogue.step(kb);
            }
        } else if (epilogue.pending) {
#pragma unroll
            for (int s = 1; s < kSteps; s++) epilogue.step(s);
        }
        this->finish(acc, kb, last);
    }
};

// The consumers' work: the main loop computes a tile, and the epilogue takes it.
template <int kAcc, class Mainloop, class Epilogue>
__device__ __forceinline__ void consume(Mainloop& mainloop, Epilogue& epilogue) {
    Tile tile;
    do {
        tile = mainloop.wait_for_tile();
        float acc[kAcc];
        typename Epilogue::Loaded loaded;
        mainloop(acc, tile, epilogue, [&] { epilogue.load_ahead(loaded, tile); });
        epilogue.take(acc, loaded, tile);
    } while (!tile.last);
    epilogue.finish();
}

// A persistent block: barriers, roles, end. `consume` runs in the consumer warpgroups, `produce` in one thread of the
// producer's warpgroup, `assist` in its three other warps.
template <class Map, int kConsumerRegisters, int kProducerRegisters, bool kElect = true, class Produce, class Consume,
          class Assist = Nothing>
__device__ __forceinline__ void run_block(unsigned shared, const CUtensorMap& a_map, const CUtensorMap& b_map,
                                          const Produce& produce, const Consume& consume, const Assist& assist = {}) {
    constexpr int kConsumers = 128 * Map::kWarpgroups;
    init_barriers<Map>(shared);
    if (threadIdx.x >= kConsumers) {
        if constexpr (Map::kWarpgroups >= 2) setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x >= kConsumers + 32) {
            assist();
        } else if (kElect ? elect_one() : threadIdx.x == kConsumers) {
            prefetch_tensor_map(&a_map);
            prefetch_tensor_map(&b_map);
            produce();
        }
    } else {
        if constexpr (Map::kWarpgroups >= 2) setmaxnreg_inc<kConsumerRegisters>();
        consume();
    }
    end_together<Map::kCluster>();
}

}  // namespace twin
