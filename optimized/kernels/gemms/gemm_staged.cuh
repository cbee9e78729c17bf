// An epilogue whose 16-bit tiles leave through shared memory: out = round(fp32(acc + bias)), without a scale.
//
// Each consumer warp writes its 16 rows there in boxes of kColumns columns, and the copy engine stores them while the
// warp goes on with the next tile. It waits only before it writes a buffer again.
//
// Boxes of 64 columns have the 128-byte swizzle. A quarter of a warp writes 64 bytes of two rows, which lie in the same
// half of the banks; so lanes of odd rows write the other half of a box first.
#pragma once

#include "gemm_bias.cuh"
#include "ptx/bulk.cuh"
#include "ptx/elect.cuh"
#include "ptx/fence.cuh"
#include "ptx/tma_store.cuh"

namespace twin {

// Boxes of a tile, written and stored. kBuffers: of a warp. They begin at the first multiple of 1024 bytes after kAfter.
template <class Gemm, int kBuffers, int kColumns, int kAfter>
struct StagedBoxes {
    using Out = typename Gemm::Out;
    static constexpr int kRun = Gemm::kRun, kAcc = Gemm::kAcc, kBoxes = Gemm::kBlockN / kColumns;
    static constexpr int kRowBytes = 2 * kColumns, kBoxBytes = 16 * kRowBytes;
    static constexpr int kGroups = kColumns / (4 * kRun);  // of a box: a lane's runs in a row
    static constexpr int kFirst = (kAfter + 1023) / 1024 * 1024;
    static_assert(kColumns == 64 || kColumns == 32, "boxes of 128 or 64 bytes a row");
    static_assert(Gemm::kBlockN % kColumns == 0 && Gemm::kNarrow % kColumns == 0, "tiles begin and end with a box");
    static_assert(kBoxes % kBuffers == 0, "a box has the same buffer in each tile");
    static_assert(kFirst + 4 * Gemm::kWarpgroups * kBuffers * kBoxBytes <= 232448,
                  "a block has at most 227 KB of shared memory");

    const CUtensorMap& map;
    unsigned buffers;  // of this warp
    unsigned within;   // a box: where the lane's first run lies

    __device__ __forceinline__ StagedBoxes(const CUtensorMap& map, unsigned shared) : map(map) {
        const unsigned lane = threadIdx.x % 32, row = lane / 4;
        buffers = shared + kFirst + threadIdx.x / 32 * (kBuffers * kBoxBytes);
        within = row * kRowBytes + lane % 4 * (2 * kRun);
        if constexpr (kColumns == 64) within ^= row << 4;
    }

    // Round box `box` of a tile and have it stored; nothing but the count where the tile has no such box.
    __device__ __forceinline__ void store(const float (&acc)[kAcc], int box, const Tile& tile) const {
        const unsigned to = buffers + box % kBuffers * kBoxBytes;
        const int x = tile.column + box * kColumns;
        if (x < tile.end) {
            bulk_wait_read<kBuffers - 1>();  // by the lane that stores; the others have no groups
            __syncwarp();
            write(acc, box, to);
            fence_proxy_async();
            __syncwarp();
            if (elect_one()) tma_store_2d(&map, to, x, tile.row + threadIdx.x / 32 * 16);
        }
        if (elect_one()) bulk_commit();  // a group for each box, so that their number says which buffers have been read
    }

private:
    __device__ __forceinline__ void write(const float (&acc)[kAcc], int box, unsigned to) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            unsigned words[kGroups][kRun / 2];
#pragma unroll
            for (int g = 0; g < kGroups; g++)
#pragma unroll
                for (int j = 0; j < kRun / 2; j++) {
                    const int i = 2 * kRun * (box * kGroups + g) + 4 * j + 2 * h;
                    words[g][j] = pack<Out>(acc[i], acc[i + 1]);
                }
            if (kRun == 8 && kColumns == 64 && threadIdx.x / 4 % 2)
#pragma unroll
                for (int j = 0; j < kRun / 2; j++) swap(words[0][j], words[kGroups - 1][j]);
            const unsigned first = kRun == 8 && kColumns == 64 ? within ^ threadIdx.x / 4 % 2 * 64 : within;
#pragma unroll
            for (int g = 0; g < kGroups; g++) {
                void* at = __cvta_shared_to_generic(to + 8 * h * kRowBytes + (first ^ g * 8 * kRun));
                if constexpr (kRun == 8)
                    *static_cast<uint4*>(at) = make_uint4(words[g][0], words[g][1], words[g][2], words[g][3]);
                else
                    *static_cast<uint2*>(at) = make_uint2(words[g][0], words[g][1]);
            }
        }
    }
    static __device__ __forceinline__ void swap(unsigned& a, unsigned& b) {
        const unsigned c = a;
        a = b, b = c;
    }
};

// kRest: boxes for which a tile has no buffer of their own are stored from registers; else their buffers are written
// twice.
template <class Gemm, int kBuffers, int kColumns, bool kRest>
struct StagedStore {
    using Boxes = StagedBoxes<Gemm, kBuffers, kColumns, Gemm::Map::kBytes>;
    using Out = typename Gemm::Out;
    using Mainloop = SplitMainloop<Gemm>;
    static constexpr int kRun = Gemm::kRun, kAcc = Gemm::kAcc;
    static constexpr int kStaged = kRest ? kBuffers : Boxes::kBoxes;

    using Loaded = Bias<kRun, kAcc>;

    Boxes boxes;
    void* out;
    const void* bias;
    int bias_type, m, n;

    __device__ __forceinline__ StagedStore(const CUtensorMap& map, unsigned shared, void* out, const void* bias,
                                           int bias_type, int m, int n)
        : boxes(map, shared), out(out), bias(bias), bias_type(bias_type), m(m), n(n) {}

    __device__ __forceinline__ static void init(unsigned) {}
    __device__ __forceinline__ static void assist(unsigned, const typename Gemm::Tiles&, const void*, int, int) {}
    __device__ __forceinline__ void load_ahead(Loaded&, const Tile&) const {}

    __device__ __forceinline__ void take(float (&acc)[kAcc], Loaded& loaded, const Tile& tile) {
        const int lane = threadIdx.x % 32, column = tile.column + lane % 4 * kRun;
        loaded.load(bias, bias_type, column, n);
        loaded.add(acc);
#pragma unroll
        for (int box = 0; box < kStaged; box++) boxes.store(acc, box, tile);
        if constexpr (kStaged < Boxes::kBoxes) {
            unsigned words[kAcc / 2];
            pack_tile<Out, kRun>(words, acc);
            const int row = tile.row + threadIdx.x / 32 * 16 + lane / 4;
            const Destination to = destination<2>(out, row, column, m, n, tile.end);
#pragma unroll
            for (int g = kStaged * Boxes::kGroups; g < Boxes::kBoxes * Boxes::kGroups; g++)
                store_packed<kRun>(words, g, to);
        }
    }

    // Shared memory must last until the copy engine has read it.
    __device__ __forceinline__ void finish() const { bulk_wait_read<0>(); }
};

template <class Gemm, int kBuffers, int kColumns>
using StagedAll = StagedStore<Gemm, kBuffers, kColumns, false>;
template <class Gemm, int kBuffers, int kColumns>
using StagedPart = StagedStore<Gemm, kBuffers, kColumns, true>;

// The main loop of split accumulation in two parts, which has the epilogue take a tile's first half while the tensor
// cores compute the second half's last chain.
template <class Gemm>
struct EarlyMainloop : SplitMainloop<Gemm> {
    using Split = SplitMainloop<Gemm>;
    using Split::k_blocks;
    using Split::operands;
    using Split::promote;
    using Split::ring;
    using Split::Split;
    static constexpr int kAcc = Gemm::kAcc, kNarrow = Gemm::kNarrow;
    static_assert(Split::kSplitParts == 2, "two halves");

    template <class Epilogue, class Last>
    __device__ __forceinline__ void operator()(float (&acc)[kAcc], const Tile& tile, Epilogue& epilogue, const Last&) {
        promote.template begin<Gemm::kBlockN>();
        if (kNarrow < Gemm::kBlockN && tile.end - tile.column <= kNarrow)
            sum(columns<kNarrow>(acc), !tile.last, [&] { epilogue.template half<kNarrow / 2, 0>(acc, tile); });
        else
            sum(acc, !tile.last, [&] { epilogue.template half<kAcc, 0>(acc, tile); });
    }

private:
    template <int kCount, class Under>
    __device__ __forceinline__ void sum(float (&acc)[kCount], bool more, const Under& under) {
#pragma unroll
        for (int i = 0; i < kCount; i++) acc[i] = 0.0f;
        promote.template load<Gemm::kBlockN>(this->beside(ring.stage.index));
        for (int kb = 1; kb < k_blocks; kb++) block(acc, true, Nothing{});
        block(acc, more, under);
    }

    // As in promote_parts; under() is called while the second half's chain runs.
    template <int kCount, class Under>
    __device__ __forceinline__ void block(float (&acc)[kCount], bool followed, const Under& under) {
        constexpr int kPart = kCount / 2;
        const auto a = operands.a(ring.stage.index), b = operands.b(ring.stage.index);
        const unsigned empty = ring.empty(), scales = this->beside(ring.stage.index);
#pragma unroll
        for (int part = 0; part < 2; part++) {
            float partial[kPart];
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++)
                wgmma_k32<typename Split::A, typename Split::B>(
                    partial, a + 2 * k, b + part * (2 * kPart * kStageRowBytes >> 4) + 2 * k, k > 0);
            wgmma_commit();
            if (part == 0) {
                promote.take_loaded();
            } else {
                under();
                ring.advance();
                if (followed) ring.wait_full();
                promote.template load<Gemm::kBlockN>(this->beside(ring.stage.index));
            }
            wgmma_wait<0>();
            if (part == 1 && !Gemm::Config::Promotion::kReadsStage) this->release(empty);
            wgmma_hold(partial);
            promote(acc, part * kPart, partial, scales);
            if (part == 1 && Gemm::Config::Promotion::kReadsStage) this->release(empty);
        }
    }
};

// The epilogue of that main loop. The bias, of the output's type, comes through shared memory: there are no registers to
// hold it.
template <class Gemm, int kBuffers, int kColumns>
struct StagedEarly {
    using SharedBias = twin::SharedBias<Gemm, unsigned short>;
    using Boxes = StagedBoxes<Gemm, kBuffers, kColumns, Gemm::Map::kBytes + sizeof(SharedBias)>;
    using Out = typename Gemm::Out;
    using Mainloop = EarlyMainloop<Gemm>;
    static constexpr int kRun = Gemm::kRun, kAcc = Gemm::kAcc, kNarrow = Gemm::kNarrow;
    struct Loaded {};

    Boxes boxes;
    SharedBias& shared_bias;
    bool has_bias;
    unsigned parity = 0;  // of the bias

    __device__ __forceinline__ StagedEarly(const CUtensorMap& map, unsigned shared, void*, const void*, int bias_type,
                                           int, int)
        : boxes(map, shared), shared_bias(bias_in(shared)), has_bias(bias_type != kNoBias) {}

    // By one thread, before the block's first barrier.
    __device__ __forceinline__ static void init(unsigned shared) { bias_in(shared).init(); }
    // By the producer's three idle warps.
    __device__ __forceinline__ static void assist(unsigned shared, const typename Gemm::Tiles& tiles, const void* bias,
                                                  int bias_type, int n) {
        if (bias_type == kNoBias || threadIdx.x / 32 % 4 != 3) return;
        unsigned parity = 0;
        for (int index = tiles.first(); index < tiles.count(); index = tiles.next(index), parity ^= 1)
            bias_in(shared).fill(tiles[index], bias, bias_type, n, parity);
    }
    __device__ __forceinline__ void load_ahead(Loaded&, const Tile&) const {}

    // Half kHalf of a tile that has kCount accumulators.
    template <int kCount, int kHalf>
    __device__ __forceinline__ void half(float (&acc)[kAcc], const Tile& tile) {
        constexpr int kFirst = kHalf * (kCount / 2), kPerBox = kColumns / 2;
        if (has_bias) {
            if (kHalf == 0) shared_bias.mailbox.wait_full(parity);
#pragma unroll
            for (int i = kFirst; i < kFirst + kCount / 2; i += 8) {  // four columns of both rows
                const auto four = shared_bias.four(4 * kRun * (i / 2 / kRun) + threadIdx.x % 4 * kRun + i / 2 % kRun);
#pragma unroll
                for (int c = 0; c < 8; c++)
                    acc[i + c] = __fadd_rn(acc[i + c], widen_bias(four.of[c / 4 * 2 + c % 2], kBiasOf<Out>));
            }
            if (kHalf == 1) {
                shared_bias.mailbox.arrive_empty();
                parity ^= 1;
            }
        }
#pragma unroll
        for (int box = kFirst / kPerBox; box < (kHalf == 0 ? kCount / 2 / kPerBox : Boxes::kBoxes); box++)
            boxes.store(acc, box, tile);
    }

    __device__ __forceinline__ void take(float (&acc)[kAcc], Loaded&, const Tile& tile) {
        if (kNarrow < Gemm::kBlockN && tile.end - tile.column <= kNarrow)
            half<kNarrow / 2, 1>(acc, tile);
        else
            half<kAcc, 1>(acc, tile);
    }
    __device__ __forceinline__ void finish() const { bulk_wait_read<0>(); }

private:
    static __device__ __forceinline__ SharedBias& bias_in(unsigned shared) {
        return *static_cast<SharedBias*>(__cvta_shared_to_generic(shared + Gemm::Map::kBytes));
    }
};

}  // namespace twin
