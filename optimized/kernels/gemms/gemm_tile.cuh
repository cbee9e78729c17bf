// What the GEMM kernels share: the order of output tiles and the ring of shared-memory stages.
//
// A block has one producer warpgroup, of which one thread (in gemm_fp8.cu's small tiles up to four) issues the copies,
// and kWarpgroups consumer warpgroups with 64 rows of the output tile each. Stages go round:
//   producer: wait empty[s] -> expect the bytes on full[s] -> copy A and B into stage s
//   consumer: wait full[s] -> wgmma -> (when those are done) arrive on empty[s], one arrival a warp
//
// The two blocks of a cluster compute tiles one below the other. Each copies its own A, and half of their common B into
// both blocks, so a stage is empty when the consumers of both blocks have arrived. Or the tiles lie side by side, and
// the blocks share A.
//
// Shared memory, from the start (1024-byte aligned, as the 128-byte swizzle needs):
//   A   [kStages][kStageBlocks][64 * kWarpgroups rows][128 bytes of K]
//   B   [kStages][kStageBlocks][kBlockN rows][128 bytes of K]
//   beside [kStages][kStageBlocks][bytes that the configuration copies itself]
//   full [kStages], empty [kStages]   mbarriers of 8 bytes
//   tiles [kStages]   the tile that begins with this stage, if one does
#pragma once

#include "common/nothing.cuh"
#include "common/ring.cuh"
#include "ptx/fence.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

// Of a kernel in clusters of `count` blocks. Clusters of one block are not launched as clusters: that places blocks on
// the chip in another order.
#define TWIN_CLUSTER(count) TWIN_CLUSTER_OF(count)
#define TWIN_CLUSTER_OF(count) TWIN_CLUSTER_##count
#define TWIN_CLUSTER_1
#define TWIN_CLUSTER_2 __cluster_dims__(2, 1, 1)

namespace twin {

constexpr int kStageRowBytes = 128;  // one swizzle atom of K: 128 FP8 values or 64 of 16 bits

struct alignas(16) Tile {
    int row, column;  // of the output's first element
    int end;          // the column after the last one
    int last;         // whether this block has no further tile
};

// Which tiles there are, and which of them a block computes. A cluster's tiles lie one below the other, so that a row
// of tiles is kBlockM * kCluster rows of the output; with kAcross they lie side by side and count as one tile of
// kBlockN * kCluster columns. The host gives the number of tiles (optimized/ops/gemms/gemm_tile.py). The last rows of tiles
// may have one tile more than the others. If a row's tiles would hold more columns than n, some of them, spread evenly,
// have kNarrow columns instead of kBlockN.
//
// Clusters walk in bands of kRasterRows tile rows, so that L2 keeps their A and B; within a band column after column.
// From one wave of tiles to the next a cluster moves back by half a band: if rows of tiles repeated with the waves, it
// might otherwise get wide tiles only.
template <int kBlockM, int kBlockN, int kCluster, int kNarrow = kBlockN, bool kAcross = false, int kRasterRows = 8>
struct Schedule {
    static_assert(!kAcross || kNarrow == kBlockN, "tiles side by side have one width");
    static constexpr int kBelow = kAcross ? 1 : kCluster;  // of a cluster's tiles
    static constexpr int kRows = kRasterRows / kBelow;
    static constexpr int kLess = kBlockN - kNarrow;
    int n;
    int tiles;    // all, counted in clusters' tiles like everything here
    int tiles_m;  // rows of tiles
    int tiles_n;  // tiles of a row, except the last rows
    int rank;     // this block's place in its cluster

    __device__ __forceinline__ Schedule(int m, int n, int tiles)
        : n(n),
          tiles(tiles),
          tiles_m((m + kBlockM * kBelow - 1) / (kBlockM * kBelow)),
          tiles_n(tiles / tiles_m),
          rank(kCluster == 1 ? 0 : cluster_rank()) {}

    // As many tiles as needed, with kBlockN columns each.
    __device__ __forceinline__ Schedule(int m, int n)
        : Schedule(m, n, (m + kBlockM * kCluster - 1) / (kBlockM * kCluster) * ((n + kBlockN - 1) / kBlockN)) {}

    __device__ __forceinline__ int first() const { return blockIdx.x / kCluster; }
    __device__ __forceinline__ int step() const { return gridDim.x / kCluster; }
    __device__ __forceinline__ int count() const { return tiles; }

    // The index of this block's next tile.
    __device__ __forceinline__ int next(int index) const {
        if constexpr (kLess == 0) return index + step();
        const int back = min(kRows / 2, step());
        return index - back + step() * (index % step() < back ? 2 : 1);
    }

    __device__ __forceinline__ Tile operator[](int index) const {
        const bool last = next(index) >= count();
        const int upper = tiles_m * (tiles_n + 1) - tiles;  // rows of tiles_n tiles
        const bool below = index >= upper * tiles_n;
        const int first = below ? upper : 0, end = below ? tiles_m : upper, in_row = tiles_n + below;
        index -= first * tiles_n;
        const int top = first + index / (kRows * in_row) * kRows;
        const int high = min(kRows, end - top);
        const int rest = index - (top - first) * in_row;
        const int row = top + rest % high, i = rest / high;
        if constexpr (kAcross) {
            const int column = (i * kCluster + rank) * kBlockN;
            return {row * kBlockM, column, min(column + kBlockN, n), last};
        } else {
            return {(row * kCluster + rank) * kBlockM, start(i, in_row), min(start(i + 1, in_row), n), last};
        }
    }

    // The first column of tile i of a row of `count` tiles. The last tile is wide if any is.
    __device__ __forceinline__ int start(int i, int count) const {
        if constexpr (kLess == 0) {
            return i * kBlockN;
        } else {
            const int narrow = min(count, (count * kBlockN - n) / kLess);
            return i * kBlockN - (i * narrow + count - 1) / count * kLess;
        }
    }
};

template <int kWarpgroups_, int kBlockN, int kStages_, int kCluster_, int kStageBlocks = 1, int kBeside_ = 0>
struct SharedMap {
    static constexpr int kWarpgroups = kWarpgroups_, kStages = kStages_, kCluster = kCluster_;
    using Ring = twin::Ring<kStages>;
    static constexpr int kABytes = kStageBlocks * 64 * kWarpgroups * kStageRowBytes;
    static constexpr int kBBytes = kStageBlocks * kBlockN * kStageRowBytes;
    static constexpr int kA = 0;
    static constexpr int kB = kA + kStages * kABytes;
    static constexpr int kBesideBytes = kStageBlocks * kBeside_;
    static constexpr int kBeside = kB + kStages * kBBytes;
    static constexpr int kBarriers = kBeside + kStages * kBesideBytes;
    static constexpr int kTiles = kBarriers + Ring::kBytes;
    static constexpr int kBytes = kTiles + kStages * 16;
    static_assert(kBytes <= 232448, "a block has at most 227 KB of shared memory");
};

// The tile that begins with a stage. The producer writes it: the divisions that find it would cost the consumers some
// hundred cycles between two tiles.
template <class Map>
__device__ __forceinline__ Tile& tile_of_stage(unsigned shared, int stage) {
    return *static_cast<Tile*>(__cvta_shared_to_generic(shared + Map::kTiles + 16 * stage));
}

// One thread initialises the barriers; no block of the cluster uses one before this returns.
template <class Map>
__device__ __forceinline__ void init_barriers(unsigned shared) {
    if (threadIdx.x == 0) {
        typename Map::Ring(shared + Map::kBarriers).init(4 * Map::kWarpgroups * Map::kCluster);
        fence_mbarrier_init();
    }
    if constexpr (Map::kCluster == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }
}

// A block of a cluster must not end while the other may still copy into its shared memory or arrive on a barrier there.
template <int kCluster>
__device__ __forceinline__ void end_together() {
    if constexpr (kCluster > 1) {
        cluster_arrive();
        cluster_wait();
    }
}

}  // namespace twin
