// The bias of a tile behind a product: one warp of the producer's warpgroup, which has nothing to copy, gives it to the
// consumers.
//
// They would wait for memory at a tile's end, have no registers to read it ahead of that, and widen it in every lane.
// The warp that gives it has time: it reads a tile's bias while the consumers still have that of the tile before, and
// writes it when they have taken that. It lies behind the stages:
//
//   bias    [kBlockN] of Given; behind the last column the last one's again: nobody stores what comes of it
//   given   mbarrier: it is there, by the giving warp
//   taken   mbarrier: it will not be read any more, by each consumer warp
//
// Defines: EPILOGUE. Given is float where the bias, of any type, is added in fp32 (1), 16 bits where it has T (3).
#pragma once

#include "gemm_fp8_mainloop.cuh"

namespace twin {

#if EPILOGUE == 3
using Given = unsigned short;
#else
using Given = float;
#endif

struct BiasMap {
    static constexpr int kBias = Map::kBytes;
    static constexpr int kGiven = kBias + static_cast<int>(sizeof(Given)) * kBlockN;
    static constexpr int kTaken = kGiven + 8;
    static constexpr int kBytes = kTaken + 8;
    static_assert(kBias % 16 == 0, "it is read in vectors of 16 bytes");
    static_assert(kBytes <= 232448, "a block has at most 227 KB of shared memory");
};

// By one thread, before the block's first barrier.
__device__ __forceinline__ void init_bias(unsigned shared) {
    mbarrier_init(shared + BiasMap::kGiven, 1);
    mbarrier_init(shared + BiasMap::kTaken, 4 * WARPGROUPS);
}

// By one warp; the second of kHalves of a tile's columns is n / 2 further. `parity` alternates from tile to tile, starting
// at 0, here and below.
__device__ __forceinline__ void give_bias(unsigned char* memory, const Tile& tile, const void* bias, int type, int n,
                                          unsigned parity) {
    if (type == kNoBias) return;
    constexpr int kHeld = kBlockN / 32;
    const unsigned shared = shared_address(memory);
    const int lane = threadIdx.x % 32, width = n / kHalves;
    Given* to = reinterpret_cast<Given*>(memory + BiasMap::kBias);
    const auto place = [&](int c) { return min(tile.column + c % kTileN, width - 1) + c / kTileN * width; };
    unsigned words[kHeld];  // as stored; all are on their way before one is waited for
    if (type == kBiasFP32)
#pragma unroll
        for (int i = 0; i < kHeld; i++) words[i] = __ldg(static_cast<const unsigned*>(bias) + place(lane + 32 * i));
    else
#pragma unroll
        for (int i = 0; i < kHeld; i++)
            words[i] = __ldg(static_cast<const unsigned short*>(bias) + place(lane + 32 * i));
    mbarrier_wait(shared + BiasMap::kTaken, parity ^ 1);
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
        if constexpr (sizeof(Given) == 2)
            to[lane + 32 * i] = words[i];
        else
            to[lane + 32 * i] = type == kBiasFP32 ? __uint_as_float(words[i]) : widen_bias(words[i], type);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared + BiasMap::kGiven);
}

// By each consumer warp, around what it reads of a tile's bias.
__device__ __forceinline__ void wait_for_bias(unsigned char* memory, unsigned parity) {
    mbarrier_wait(shared_address(memory) + BiasMap::kGiven, parity);
}
__device__ __forceinline__ void release_bias(unsigned char* memory) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(memory) + BiasMap::kTaken);
}

// That of four neighbouring columns of the tile, the first a multiple of four.
struct alignas(4 * sizeof(Given)) Four {
    Given of[4];
};
__device__ __forceinline__ Four given_four(const unsigned char* memory, int column) {
    return reinterpret_cast<const Four*>(memory + BiasMap::kBias)[column / 4];
}

#if EPILOGUE == 1
// In place: acc -> fp32(acc + bias).
__device__ __forceinline__ void add_bias(float (&acc)[kAcc], unsigned char* memory, unsigned parity) {
    wait_for_bias(memory, parity);
#pragma unroll
    for (int i = 0; i < kAcc; i += 8) {  // four columns of both rows
        const Four four = given_four(memory, 4 * kRun * (i / 2 / kRun) + threadIdx.x % 4 * kRun + i / 2 % kRun);
#pragma unroll
        for (int c = 0; c < 8; c++) acc[i + c] = __fadd_rn(acc[i + c], four.of[c / 4 * 2 + c % 2]);
    }
    release_bias(memory);
}
#endif

}  // namespace twin
