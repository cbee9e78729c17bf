// The residual behind a product: each consumer warp has the copy engine bring its part into shared memory.
//
// That takes less of a tile's time than loads into registers, however far ahead these are, and needs no prefetches into
// L2, which delay the producer (docs/gemm.md). It comes in boxes, a piece of the warp each, into two places in
// turn. Behind the bias and the mask lie
//
//   boxes     [4 * WARPGROUPS][2][16][32] of T
//   arrived   [4 * WARPGROUPS][2] mbarriers, on which the copy engine counts its bytes
#pragma once

#include "gemm_mask.cuh"
#include "ptx/elect.cuh"

namespace twin {

constexpr int kBoxes = 2, kBoxBytes = 16 * 32 * 2;

struct ResidualMap {
    static constexpr int kBox = (MaskMap::kBytes + 127) / 128 * 128;
    static constexpr int kArrived = kBox + 4 * WARPGROUPS * kBoxes * kBoxBytes;
    static constexpr int kBytes = kArrived + 4 * WARPGROUPS * kBoxes * 8;
    static_assert(kBytes <= 232448, "a block has at most 227 KB of shared memory");
};

// By one thread, before the block's first barrier.
__device__ __forceinline__ void init_residual(unsigned shared) {
    for (int box = 0; box < 4 * WARPGROUPS * kBoxes; box++) mbarrier_init(shared + ResidualMap::kArrived + 8 * box, 1);
}

// That of a consumer warp.
struct Residual {
    unsigned shared;
    int warp;

    __device__ __forceinline__ int box(int piece) const { return warp * kBoxes + piece % kBoxes; }

    // Its piece at (row, column) is on its way. What of it lies outside the matrix arrives as zeros.
    __device__ __forceinline__ void fetch(const CUtensorMap* map, int piece, int row, int column) const {
        if (!elect_one()) return;
        const unsigned arrived = shared + ResidualMap::kArrived + 8 * box(piece);
        mbarrier_arrive_expect_tx(arrived, kBoxBytes);
        tma_load_2d(shared + ResidualMap::kBox + box(piece) * kBoxBytes, map, arrived, column, row);
    }

    // `tile`: how many tiles the block has finished, modulo 2.
    __device__ __forceinline__ void wait(int piece, unsigned tile) const {
        mbarrier_wait(shared + ResidualMap::kArrived + 8 * box(piece),
                      (piece / kBoxes + tile * (kPieces / kBoxes)) % 2);
    }

    // Row half r of the piece, a lane's eight columns.
    __device__ __forceinline__ Vector<8> row(const unsigned char* memory, int piece, int r) const {
        const int lane = threadIdx.x % 32;
        const unsigned char* from =
            memory + ResidualMap::kBox + box(piece) * kBoxBytes + (lane / 4 + 8 * r) * 64 + lane % 4 * kRun * 2;
        Vector<8> v;
        if constexpr (kRun == 8) {
            const uint4 eight = *reinterpret_cast<const uint4*>(from);
            v = {eight.x, eight.y, eight.z, eight.w};
        } else {
            const uint2 four = *reinterpret_cast<const uint2*>(from);
            const uint2 other = *reinterpret_cast<const uint2*>(from + 2 * kSecond);
            v = {four.x, four.y, other.x, other.y};
        }
        return v;
    }
};

}  // namespace twin
