// The residual in shared memory: for each consumer warp, the copy engine fetches pieces two ahead of their use.
//
// This takes less time than loads to registers, however early, and needs no prefetches into L2, which delay the
// producer (docs/log/gemm.md).
#pragma once

#include "gemm_epilogue_tile.cuh"
#include "ptx/elect.cuh"
#include "ptx/tma.cuh"

namespace twin {

constexpr int kBoxes = 2, kBoxBytes = 16 * 32 * 2;  // boxes of a warp; a box holds a piece of 16-bit values

// At a multiple of 128 bytes.
template <class Gemm>
struct SharedBoxes {
    unsigned char boxes[4 * Gemm::kWarpgroups][kBoxes][kBoxBytes];
    unsigned long long full[4 * Gemm::kWarpgroups][kBoxes];  // mbarriers; a warp itself knows when its boxes are empty

    // By one thread, before the block's first barrier.
    __device__ __forceinline__ void init() {
        for (int box = 0; box < 4 * Gemm::kWarpgroups * kBoxes; box++) mbarrier_init(shared_address(full[0] + box), 1);
    }

    // Fetch a piece of consumer warp `warp`, at (row, column). What lies outside the matrix arrives as zeros.
    __device__ __forceinline__ void fetch(int warp, const CUtensorMap* map, int piece, int row, int column) {
        if (!elect_one()) return;
        const unsigned barrier = shared_address(&full[warp][piece % kBoxes]);
        mbarrier_arrive_expect_tx(barrier, kBoxBytes);
        tma_load_2d(shared_address(boxes[warp][piece % kBoxes]), map, barrier, column, row);
    }

    // `tile`: how many tiles the block has finished, modulo 2.
    __device__ __forceinline__ void wait_full(int warp, int piece, unsigned tile) {
        constexpr int kPieces = Pieces<Gemm>::kPieces;
        static_assert(kPieces == 1 || kPieces % kBoxes == 0, "in a tile every box that is used is filled as often");
        mbarrier_wait(shared_address(&full[warp][piece % kBoxes]),
                      (piece / kBoxes + tile * ((kPieces + kBoxes - 1) / kBoxes)) % 2);
    }

    // Row half r of a piece, a lane's eight columns.
    __device__ __forceinline__ Packed row(int warp, int piece, int r) const {
        const int lane = threadIdx.x % 32;
        const unsigned char* from = boxes[warp][piece % kBoxes] + (lane / 4 + 8 * r) * 64 + lane % 4 * Gemm::kRun * 2;
        Packed v;
        if constexpr (Gemm::kRun == 8) {
            reinterpret_cast<uint4*>(v.words)[0] = *reinterpret_cast<const uint4*>(from);
        } else {
            reinterpret_cast<uint2*>(v.words)[0] = *reinterpret_cast<const uint2*>(from);
            reinterpret_cast<uint2*>(v.words)[1] = *reinterpret_cast<const uint2*>(from + 2 * Pieces<Gemm>::kSecond);
        }
        return v;
    }
};

}  // namespace twin
