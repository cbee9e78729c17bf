// What the GEMM kernels share: the order of output tiles and the ring of shared-memory stages.
//
// A block has one producer warpgroup, whose first thread issues every bulk copy, and kWarpgroups consumer
// warpgroups, each owning 64 rows of the output tile. Stages go round:
//   producer: wait empty[s] -> expect the bytes on full[s] -> copy A and B into stage s
//   consumer: wait full[s] -> wgmma -> (when those are done) arrive on empty[s], one arrival a warp
//
// Shared memory, from the start (1024-byte aligned, as the 128-byte swizzle needs):
//   A   [kStages][64 * kWarpgroups rows][128 bytes of K]
//   B   [kStages][kBlockN rows][128 bytes of K]
//   full [kStages], empty [kStages]   mbarriers of 8 bytes
#pragma once

#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace twin {

constexpr int kStageRowBytes = 128;  // one swizzle atom of K: 128 FP8 values or 64 of 16 bits
constexpr int kRasterRows = 8;       // tile rows that are walked together, so that L2 keeps their A and B

struct Tile {
    int row, column;  // of the output's first element
};

// The tiles in bands of kRasterRows tile rows; inside a band, column after column.
__device__ __forceinline__ Tile tile_at(int index, int tiles_m, int tiles_n, int block_m, int block_n) {
    const int band = index / (kRasterRows * tiles_n);
    const int first = band * kRasterRows;
    const int rows = min(kRasterRows, tiles_m - first);
    const int rest = index - first * tiles_n;
    return {(first + rest % rows) * block_m, (rest / rows) * block_n};
}

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

// One thread initialises the barriers; nobody uses one before this returns.
template <class Map, int kStages, int kConsumerWarps>
__device__ __forceinline__ void init_barriers(unsigned shared) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; s++) {
            mbarrier_init(shared + Map::kFull + 8 * s, 1);
            mbarrier_init(shared + Map::kEmpty + 8 * s, kConsumerWarps);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
}

}  // namespace twin
