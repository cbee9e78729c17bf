// What the GEMM kernels share: the order of output tiles and the ring of shared-memory stages.
//
// A block has one producer warpgroup, whose first thread issues every bulk copy, and kWarpgroups consumer
// warpgroups, each owning 64 rows of the output tile. Stages go round:
//   producer: wait empty[s] -> expect the bytes on full[s] -> copy A and B into stage s
//   consumer: wait full[s] -> wgmma -> (when those are done) arrive on empty[s], one arrival a warp
//
// In a cluster of two, the blocks compute tiles one below the other. Each copies its own A, and half of the B that
// both need into both: so a stage is empty when the consumers of both blocks say so.
//
// Shared memory, from the start (1024-byte aligned, as the 128-byte swizzle needs):
//   A   [kStages][64 * kWarpgroups rows][128 bytes of K]
//   B   [kStages][kBlockN rows][128 bytes of K]
//   full [kStages], empty [kStages]   mbarriers of 8 bytes
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

// Only where there is one: blocks launched as clusters of one block are placed on the chip in another order.
#if CLUSTER > 1
#define TWIN_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define TWIN_CLUSTER
#endif

namespace twin {

constexpr int kStageRowBytes = 128;  // one swizzle atom of K: 128 FP8 values or 64 of 16 bits
constexpr int kRasterRows = 8;       // tile rows that are walked together, so that L2 keeps their A and B

struct Tile {
    int row, column;  // of the output's first element
};

// The tiles of a cluster's blocks lie one below the other. Clusters walk in bands of kRasterRows tile rows; inside a
// band, column after column.
template <int kBlockM, int kBlockN, int kCluster>
struct Schedule {
    int tiles_m, tiles_n;  // in clusters' tiles
    int rank;              // this block's place in its cluster

    __device__ __forceinline__ Schedule(int m, int n)
        : tiles_m((m + kBlockM * kCluster - 1) / (kBlockM * kCluster)),
          tiles_n((n + kBlockN - 1) / kBlockN),
          rank(kCluster == 1 ? 0 : cluster_rank()) {}

    __device__ __forceinline__ int first() const { return blockIdx.x / kCluster; }
    __device__ __forceinline__ int step() const { return gridDim.x / kCluster; }
    __device__ __forceinline__ int count() const { return tiles_m * tiles_n; }

    __device__ __forceinline__ Tile operator[](int index) const {
        constexpr int kRows = kRasterRows / kCluster;
        const int top = index / (kRows * tiles_n) * kRows;
        const int rows = min(kRows, tiles_m - top);
        const int rest = index - top * tiles_n;
        return {((top + rest % rows) * kCluster + rank) * kBlockM, rest / rows * kBlockN};
    }
};

template <int kWarpgroups, int kBlockN, int kStages>
struct SharedMap {
    static constexpr int kABytes = 64 * kWarpgroups * kStageRowBytes;
    static constexpr int kBBytes = kBlockN * kStageRowBytes;
    static constexpr int kA = 0;
    static constexpr int kB = kA + kStages * kABytes;
    static constexpr int kFull = kB + kStages * kBBytes;
    static constexpr int kEmpty = kFull + kStages * 8;
    static constexpr int kBytes = kEmpty + kStages * 8;
    static_assert(kBytes <= 232448, "a block has at most 227 KB of shared memory");
};

// A position in the ring of stages. Its parity is that of the use of the stage which is being waited for.
template <int kStages>
struct Stage {
    int index = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance() {
        if (++index == kStages) {
            index = 0;
            parity ^= 1;
        }
    }
};

// One thread initialises the barriers; nobody uses one, of any block of the cluster, before this returns.
template <class Map, int kStages, int kCluster, int kConsumerWarps>
__device__ __forceinline__ void init_barriers(unsigned shared) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; s++) {
            mbarrier_init(shared + Map::kFull + 8 * s, 1);
            mbarrier_init(shared + Map::kEmpty + 8 * s, kConsumerWarps * kCluster);
        }
        fence_mbarrier_init();
    }
    if constexpr (kCluster == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }
}

// A block of a cluster must not end while the other may still write to its shared memory.
template <int kCluster>
__device__ __forceinline__ void end_together() {
    if constexpr (kCluster > 1) {
        cluster_arrive_relaxed();
        cluster_wait();
    }
}

// This warp will not read the stage of `empty` any more: say so to every block that copies into it.
template <int kCluster>
__device__ __forceinline__ void release(unsigned empty) {
    const unsigned lane = threadIdx.x % 32;
    if constexpr (kCluster == 1) {
        if (lane == 0) mbarrier_arrive(empty);
    } else {
        if (lane < kCluster) mbarrier_arrive_cluster(map_to_rank(empty, lane));
    }
}

}  // namespace twin
