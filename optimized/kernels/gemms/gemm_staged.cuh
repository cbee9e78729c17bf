// An epilogue whose 16-bit tiles leave through shared memory: out = round(fp32(acc + bias)), without a scale.
//
// Each consumer warp writes its 16 rows there in boxes of 32 columns, and the copy engine stores them while the warp
// goes on with the next tile. It waits only before it writes a buffer again.
#pragma once

#include "gemm_epilogue.cuh"
#include "ptx/bulk.cuh"
#include "ptx/elect.cuh"
#include "ptx/fence.cuh"
#include "ptx/tma_store.cuh"

namespace twin {

template <class Gemm>
struct StagedStore {
    using Out = typename Gemm::Out;
    using Loaded = Bias<Gemm::kRun, Gemm::kAcc>;
    static constexpr int kRun = Gemm::kRun, kAcc = Gemm::kAcc;
    static constexpr int kColumns = 32, kBoxes = Gemm::kBlockN / kColumns, kBuffers = 4;  // of a warp
    static constexpr int kRowBytes = 2 * kColumns, kBoxBytes = 16 * kRowBytes;
    static constexpr int kGroups = kColumns / (4 * kRun);  // of a box: a lane's runs in a row
    static constexpr int kFirst = (Gemm::Map::kBytes + 127) / 128 * 128;
    static_assert(Gemm::kBlockN % kColumns == 0 && Gemm::kNarrow % kColumns == 0, "tiles begin and end with a box");
    static_assert(kBoxes % kBuffers == 0, "a box has the same buffer in each tile");
    static_assert(kFirst + 4 * Gemm::kWarpgroups * kBuffers * kBoxBytes <= 232448,
                  "a block has at most 227 KB of shared memory");

    const CUtensorMap& map;  // of out
    unsigned buffers;        // of this warp
    const void* bias;
    int bias_type, n;

    __device__ __forceinline__ StagedStore(const CUtensorMap& map, unsigned shared, const void* bias, int bias_type,
                                           int n)
        : map(map),
          buffers(shared + kFirst + threadIdx.x / 32 * (kBuffers * kBoxBytes)),
          bias(bias),
          bias_type(bias_type),
          n(n) {}

    __device__ __forceinline__ void load_ahead(Loaded&, const Tile&) const {}

    __device__ __forceinline__ void take(float (&acc)[kAcc], Loaded& loaded, const Tile& tile) const {
        loaded.load(bias, bias_type, tile.column + threadIdx.x % 4 * kRun, n);
        loaded.add(acc);
#pragma unroll
        for (int box = 0; box < kBoxes; box++) {
            const unsigned to = buffers + box % kBuffers * kBoxBytes;
            const int column = tile.column + box * kColumns;
            if (column < tile.end) {
                bulk_wait_read<kBuffers - 1>();  // by the lane that stores; the others have no groups
                __syncwarp();
                write(acc, box, to);
                fence_proxy_async();
                __syncwarp();
                if (elect_one()) tma_store_2d(&map, to, column, tile.row + threadIdx.x / 32 * 16);
            }
            // A group for each box, also for one that does not exist, so that their number says which buffers were read.
            if (elect_one()) bulk_commit();
        }
    }

    // Shared memory must last until the copy engine has read it.
    __device__ __forceinline__ void finish() const { bulk_wait_read<0>(); }

private:
    // Box `box` of the tile, rounded: row r and r + 8 of this lane.
    __device__ __forceinline__ void write(const float (&acc)[kAcc], int box, unsigned to) const {
        const unsigned first = to + threadIdx.x % 32 / 4 * kRowBytes + threadIdx.x % 4 * (2 * kRun);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int g = 0; g < kGroups; g++) {
                unsigned words[kRun / 2];
#pragma unroll
                for (int j = 0; j < kRun / 2; j++) {
                    const int i = 2 * kRun * (box * kGroups + g) + 4 * j + 2 * h;
                    words[j] = pack<Out>(acc[i], acc[i + 1]);
                }
                void* at = __cvta_shared_to_generic(first + 8 * h * kRowBytes + g * 8 * kRun);
                if constexpr (kRun == 8)
                    *static_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
                else
                    *static_cast<uint2*>(at) = make_uint2(words[0], words[1]);
            }
    }
};

}  // namespace twin
