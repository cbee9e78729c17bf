// Tiles handed on: the consumers of a GEMM leave a finished tile, in 16 bits, to seven other warps of the block.
//
// For split accumulation, whose consumers have no registers to keep a tile while they compute the next. Behind them are
// two more warpgroups: the producer's, with three warps that have nothing to copy, and another. These seven do what
// follows the product. A consumer puts 16 bytes at a time where the same lane of another warp finds them, so no layout
// changes on the way:
//
//   tile     [WARPGROUPS][4 runs of 16 rows][pieces][2 halves][32 lanes] 16 bytes, behind the stages
//   handed   WARPGROUPS mbarriers: the four consumer warps of a warpgroup have written their rows
//   taken    WARPGROUPS mbarriers: the workers will not read them any more
#pragma once

#include "gemm_piece.cuh"

namespace twin {

constexpr int kWorkers = 7;
constexpr int kPieceBytes = 16 * 32 * 2;
constexpr int kRunBytes = kPieces * kPieceBytes;

struct HandoffMap {
    static constexpr int kHanded = Map::kBytes;
    static constexpr int kTaken = kHanded + 8 * WARPGROUPS;
    static constexpr int kTile = kTaken + 8 * WARPGROUPS;
    static constexpr int kBytes = kTile + WARPGROUPS * 4 * kRunBytes;
    static_assert(kTile % 16 == 0, "the tile is read and written in vectors of 16 bytes");
    static_assert(kBytes <= 232448, "a block has at most 227 KB of shared memory");
};

// By one thread, before the block's first barrier.
__device__ __forceinline__ void init_handoff(unsigned shared) {
    for (int w = 0; w < WARPGROUPS; w++) {
        mbarrier_init(shared + HandoffMap::kHanded + 8 * w, 4);
        mbarrier_init(shared + HandoffMap::kTaken + 8 * w, kWorkers);
    }
}

// A consumer warp leaves its 16 rows, packed by pack_tile; `parity` alternates from tile to tile, starting at 0.
__device__ __forceinline__ void hand_over(const unsigned (&words)[kAcc / 2], unsigned char* memory, unsigned parity) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned shared = shared_address(memory);
    mbarrier_wait(shared + HandoffMap::kTaken + 8 * (warp / 4), parity ^ 1);
    uint4* to = reinterpret_cast<uint4*>(memory + HandoffMap::kTile + warp * kRunBytes) + lane;
#pragma unroll
    for (int i = 0; i < kAcc / 8; i++)
        to[32 * i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared + HandoffMap::kHanded + 8 * (warp / 4));
}

// Four columns of row half r of a piece that was handed over, the first or (f 1) the other four; zeros where nothing
// exists. `from` is the piece's first byte.
__device__ __forceinline__ Vector<4> handed_four(const unsigned char* from, int r, int f, const Place& at) {
    const int half = kRun == 8 ? r : f, second = kRun == 8 ? f : r;
    const uint2 v = reinterpret_cast<const uint2*>(from)[2 * (32 * half + threadIdx.x % 32) + second];
    if (!at.rows[r] || (f == 1 && !at.second)) return {};
    return {v.x, v.y};
}

// What the workers do: finish(tile, warpgroup, piece, from) for every piece of 64 rows, whose 16-row parts lie kRunBytes
// apart from `from` on. Pieces go round among the workers, on from tile to tile.
template <class Finish>
__device__ __forceinline__ void work(const unsigned char* memory, const Tiles& tiles, const Finish& finish) {
    const unsigned shared = shared_address(memory);
    int next = threadIdx.x / 32 - 4 * WARPGROUPS - 1;  // pieces until this worker's turn
    unsigned parity = 0;
    for (int index = tiles.first(); index < tiles.count(); index += tiles.step(), parity ^= 1) {
        const Tile tile = tiles[index];
#pragma unroll 1
        for (int w = 0; w < WARPGROUPS; w++) {
            mbarrier_wait(shared + HandoffMap::kHanded + 8 * w, parity);
#pragma unroll 1
            for (; next < kPieces; next += kWorkers)
                finish(tile, w, next, memory + HandoffMap::kTile + w * 4 * kRunBytes + next * kPieceBytes);
            next -= kPieces;
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(shared + HandoffMap::kTaken + 8 * w);
        }
    }
}

}  // namespace twin
