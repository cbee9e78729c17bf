// An epilogue whose 16-bit tiles leave through shared memory: out = round(fp32(acc + bias)), without a scale.
//
// Each consumer warp writes its 16 rows there in boxes of kColumns columns, and the copy engine stores them while the
// warp goes on with the next tile. It waits only before it writes a buffer again.
//
// Boxes of 64 columns have the 128-byte swizzle. A quarter of a warp writes 64 bytes of two rows, which lie in the same
// half of the banks; so lanes of odd rows write the other half of a box first.
#pragma once

#include "gemm_fp8_mainloop.cuh"
#include "ptx/bulk.cuh"
#include "ptx/elect.cuh"
#include "ptx/fence.cuh"
#include "ptx/tma_store.cuh"

namespace twin {

// kBuffers: of a warp. kRest: boxes for which a tile has no buffer of their own are stored from registers; else their
// buffers are written twice.
template <class Gemm, int kBuffers, int kColumns, bool kRest>
struct StagedStore {
    using Out = typename Gemm::Out;
    static constexpr int kRun = Gemm::kRun, kAcc = Gemm::kAcc, kBlockN = Gemm::kBlockN;
    static constexpr int kBoxes = kBlockN / kColumns, kStaged = kRest ? kBuffers : kBoxes;
    static constexpr int kRowBytes = 2 * kColumns, kBoxBytes = 16 * kRowBytes;
    static constexpr int kGroups = kColumns / (4 * kRun);  // of a box: a lane's runs in a row
    static constexpr int kFirst = (Gemm::Map::kBytes + 1023) / 1024 * 1024;
    static constexpr int kSharedBytes = kFirst + 4 * Gemm::kWarpgroups * kBuffers * kBoxBytes;
    static_assert(kColumns == 64 || kColumns == 32, "boxes of 128 or 64 bytes a row");
    static_assert(kBlockN % kColumns == 0 && Gemm::kNarrow % kColumns == 0, "tiles begin and end with a box");
    static_assert(kBoxes % kBuffers == 0, "a box has the same buffer in each tile");
    static_assert(kSharedBytes <= 232448, "a block has at most 227 KB of shared memory");

    using Loaded = Bias<kRun, kAcc>;

    const CUtensorMap& map;
    void* out;
    const void* bias;
    int bias_type, m, n;
    unsigned buffers;  // of this warp
    unsigned within;   // a box: where the lane's first run lies

    __device__ __forceinline__ StagedStore(const CUtensorMap& map, unsigned shared, void* out, const void* bias,
                                           int bias_type, int m, int n)
        : map(map), out(out), bias(bias), bias_type(bias_type), m(m), n(n) {
        const unsigned lane = threadIdx.x % 32, row = lane / 4;
        buffers = shared + kFirst + threadIdx.x / 32 * (kBuffers * kBoxBytes);
        within = row * kRowBytes + lane % 4 * (2 * kRun);
        if constexpr (kColumns == 64) within ^= row << 4;
    }

    __device__ __forceinline__ void load_ahead(Loaded&, const Tile&) const {}

    __device__ __forceinline__ void take(float (&acc)[kAcc], Loaded& loaded, const Tile& tile) {
        const int lane = threadIdx.x % 32, column = tile.column + lane % 4 * kRun;
        loaded.load(bias, bias_type, column, n);
        loaded.add(acc);
        unsigned words[kAcc / 2];
        pack_tile<Out, kRun>(words, acc);
#pragma unroll
        for (int box = 0; box < kStaged; box++) stage(words, box, tile);
        if constexpr (kStaged < kBoxes) {
            const int row = tile.row + threadIdx.x / 32 * 16 + lane / 4;
            const Destination to = destination<2>(out, row, column, m, n, tile.end);
#pragma unroll
            for (int g = kStaged * kGroups; g < kBoxes * kGroups; g++) store_packed<kRun>(words, g, to);
        }
    }

    // Shared memory must last until the copy engine has read it.
    __device__ __forceinline__ void finish() const { bulk_wait_read<0>(); }

private:
    __device__ __forceinline__ void stage(const unsigned (&words)[kAcc / 2], int box, const Tile& tile) const {
        const unsigned to = buffers + box % kBuffers * kBoxBytes;
        const int x = tile.column + box * kColumns;
        if (x < tile.end) {
            bulk_wait_read<kBuffers - 1>();  // by the lane that stores; the others have no groups
            __syncwarp();
            write(words, box, to);
            fence_proxy_async();
            __syncwarp();
            if (elect_one()) tma_store_2d(&map, to, x, tile.row + threadIdx.x / 32 * 16);
        }
        if (elect_one()) bulk_commit();  // a group for each box, so that their number says which buffers have been read
    }

    __device__ __forceinline__ void write(const unsigned (&words)[kAcc / 2], int box, unsigned to) const {
        const bool odd = kRun == 8 && kColumns == 64 && threadIdx.x / 4 % 2;
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int g = 0; g < kGroups; g++) {
                const unsigned* one = words + kRun * (box * kGroups + g) + kRun / 2 * h;
                unsigned at = to + 8 * h * kRowBytes + (within ^ g * 8 * kRun);
                if constexpr (kRun == 8) {
                    const unsigned* other = kColumns == 64 ? words + 8 * (box * 2 + (g ^ 1)) + 4 * h : one;
                    if (odd) at ^= 64;
                    store_shared(at, odd ? other[0] : one[0], odd ? other[1] : one[1], odd ? other[2] : one[2],
                                 odd ? other[3] : one[3]);
                } else {
                    *static_cast<uint2*>(__cvta_shared_to_generic(at)) = make_uint2(one[0], one[1]);
                }
            }
    }
    static __device__ __forceinline__ void store_shared(unsigned address, unsigned a, unsigned b, unsigned c,
                                                        unsigned d) {
        *static_cast<uint4*>(__cvta_shared_to_generic(address)) = make_uint4(a, b, c, d);
    }
};

}  // namespace twin
