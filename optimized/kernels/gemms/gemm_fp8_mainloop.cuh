// The types of the FP8 GEMMs: what follows from a configuration, the producer's copies, and the main loop of split
// accumulation (both accumulations are defined in gemm_fp8.cu).
//
// Rows of B arrive permuted. wgmma gives lane q = lane % 4 the columns 8 j + 2 q + e of B's tile. The 5-D tensor map of
// B, (k, e, q, j, g), puts row 4 kRun g + kRun q + 2 j + e there (optimized/ops/gemms/gemm_operands.py), so that a thread's
// results are kRun consecutive columns of the output.
#pragma once

#include "gemm_mainloop.cuh"
#include "ptx/grid.cuh"

namespace twin {

// A configuration is a struct with these names and, without a default, those that gemm_fp8.cu says.
struct GemmDefaults {
    static constexpr bool kAcross = false;     // the blocks of a cluster compute tiles side by side and share A, not B
    static constexpr int kStageBlocks = 1;     // how many of the kStages k-blocks in the ring share a stage's barriers
    static constexpr int kBHalves = 1;         // 2: a tile has the same columns of both halves of B's rows (x1 and x2)
    static constexpr int kRasterRows = 8;      // gemm_tile.cuh
    static constexpr int kBesideBytes = 0;     // of a k-block in shared memory that the configuration copies itself
    static constexpr bool kContinues = false;  // a tile's accumulators hold what its first k-block adds to
    static constexpr bool kEarly = false;      // the first stages' B is copied before the grid before has ended
};

// How the copy engine reads A and B: in boxes of a part's rows and, at the matrix's edge, in boxes of the remaining
// rows. Rows that do not exist are not copied: to fill one with zeros takes the engine three times as long as to fetch
// one, and what shared memory holds in their place reaches only outputs that do not exist.
struct OperandMaps {
    CUtensorMap a, b, a_edge, b_edge;
};

// How many rows to copy from `first` on: a full box of `rows`, or an edge box, which has the rows that remain after
// full ones. Where two widths of tiles are mixed, the last may begin elsewhere; it takes a full box.
__device__ __forceinline__ int box_rows(int first, int end, int rows) {
    const int left = end - first;
    return left <= 0 ? 0 : left >= rows || first % rows != 0 ? rows : left;
}

// A producer that copies nothing beside the operands.
struct OperandsOnly {
    __device__ __forceinline__ int bytes(const Tile&) const { return 0; }
    __device__ __forceinline__ void operator()(const Tile&, int, int, unsigned) const {}
};

// What follows from a configuration: tiles, stages, and what the producer does.
template <class Config_>
struct GemmFP8 {
    using Config = Config_;
    using Out = typename Config::Out;
    static constexpr int kWarpgroups = Config::kWarpgroups, kCluster = Config::kCluster;
    static constexpr int kBlockM = 64 * kWarpgroups;
    static constexpr int kBlockN = Config::kBlockN;
    static constexpr int kBlockK = 128;
    static constexpr int kStageBlocks = Config::kStageBlocks;
    static constexpr int kStages = Config::kStages / kStageBlocks;
    static constexpr int kRun = Config::kRun;
    static constexpr int kBHalves = Config::kBHalves;
    static constexpr int kTileN = kBlockN / kBHalves;  // columns from one tile to the next
    static constexpr int kNarrow = Config::kNarrow;
    static constexpr int kAcc = kBlockN / 2;  // accumulators of a thread
    using Map = SharedMap<kWarpgroups, kBlockN, kStages, kCluster, kStageBlocks, Config::kBesideBytes>;
    using Tiles = Schedule<kBlockM, kTileN, kCluster, kNarrow == kBlockN ? kTileN : kNarrow, Config::kAcross,
                           Config::kRasterRows>;
    // The parts in which an operand's stage is copied: one; or one by each block of the cluster that shares it, into
    // all of them; or one for each half of B.
    static constexpr int kSharingA = Config::kAcross ? kCluster : 1, kSharingB = Config::kAcross ? 1 : kCluster;
    static constexpr int kParts = kBHalves > kSharingB ? kBHalves : kSharingB;
    static constexpr int kPartRows = kBlockN / kParts;
    static constexpr int kPartRowsA = kBlockM / kSharingA;

    // The parts of B of one k-block, from `k` on, that no other block of the cluster copies.
    template <int kMine>
    static __device__ __forceinline__ void load_b(const OperandMaps& maps, unsigned shared, const Tile& tile,
                                                  const int (&rows)[kMine], int stage, unsigned full, int k, int n) {
#pragma unroll
        for (int i = 0; i < kMine; i++) {
            if (rows[i] == 0) continue;
            const CUtensorMap* map = rows[i] == kPartRows ? &maps.b : &maps.b_edge;
            const int group = (tile.column + i * (kBHalves == 1 ? kPartRows : n / 2)) / (4 * kRun);
            tma_load_5d(shared + Map::kB + stage * Map::kBBytes + i * kPartRows * kStageRowBytes, map, full, k, 0, 0, 0,
                        group);
        }
    }

    // For each tile, copy k-blocks `begin` to end - 1 of A [m, ...] and B [n, ...], calling also(tile, kb) after each.
    // beside(tile, kb, stage, barrier) copies beside.bytes(tile) bytes more.
    // kProducers warps take turns, since one alone needs some 210 cycles to issue a k-block's copies. Turns go on from
    // tile to tile: a warp that skipped more stages than the ring has would mistake a barrier's phase.
    template <int kProducers = 1, class Also = Nothing, class Beside = OperandsOnly>
    static __device__ __forceinline__ void produce(const OperandMaps& maps, unsigned shared, const Tiles& tiles,
                                                   int begin, int end, int m, int n, const Also& also = {},
                                                   const Beside& beside = {}) {
        constexpr int kMine = kParts / kSharingB;  // parts of B that this block copies
        const int mine = kProducers == 1 ? 0 : threadIdx.x / 32 % 4;
        static_assert(kProducers <= kStages, "a producer's turn comes in each round of the ring");
        typename Map::Ring ring(shared + Map::kBarriers);
        int turn = 0, ahead = 0;  // turns from 0 on whose B is on its way
        for (int index = tiles.first(); index < tiles.count(); index = tiles.next(index)) {
            const Tile tile = tiles[index];
            const int a_part = kSharingA == 1 ? 0 : tiles.rank, a_row = tile.row + a_part * kPartRowsA;
            const int a_rows = box_rows(a_row, m, kPartRowsA);
            int b_rows[kMine], all_rows = 0;
#pragma unroll
            for (int part = 0; part < kSharingA; part++)
                all_rows += box_rows(tile.row + part * kPartRowsA, m, kPartRowsA);
#pragma unroll
            for (int part = 0; part < kParts; part++) {
                const int rows =
                    box_rows(tile.column + (kBHalves == 1 ? part * kPartRows : 0), n / kBHalves, kPartRows);
                all_rows += rows;
                if (kSharingB == 1 || part == tiles.rank) b_rows[part % kMine] = rows;
            }
            const int bytes = all_rows * kStageRowBytes + beside.bytes(tile);
            if constexpr (Config::kEarly) {
                static_assert(kSharingB == 1 && kStageBlocks == 1 && same_type<Beside, OperandsOnly>, "B alone");
                if (turn == 0) {
                    if (mine == 0) tile_of_stage<Map>(shared, 0) = tile;
                    ahead = min(kStages, end - begin);
                    for (int stage = mine; stage < ahead; stage += kProducers) {
                        mbarrier_arrive_expect_tx(ring.full(stage), bytes);
                        load_b(maps, shared, tile, b_rows, stage, ring.full(stage), (begin + stage) * kBlockK, n);
                    }
                    wait_for_grid_before();
                }
            }
            for (int kb = begin; kb < end; kb += kStageBlocks, ring.advance(), turn++) {
                if (turn % kProducers != mine) continue;
                const int stage = ring.stage.index;
                const unsigned full = ring.full();
                const int blocks = kStageBlocks == 1 ? 1 : min(kStageBlocks, end - kb);
                const bool has_b = Config::kEarly && turn < ahead;
                if (!has_b) ring.wait_empty();
                if (!has_b && kb == begin) tile_of_stage<Map>(shared, stage) = tile;
                // Where there are only operands, their sum is made here: kept, it would take a register.
                if (!has_b) ring.expect(blocks * (same_type<Beside, OperandsOnly> ? all_rows * kStageRowBytes : bytes));
#pragma unroll
                for (int block = 0; block < kStageBlocks; block++) {
                    if (block >= blocks) break;
                    const int k = (kb + block) * kBlockK;
                    const unsigned a = shared + Map::kA + stage * Map::kABytes + block * kBlockM * kStageRowBytes;
                    const unsigned b = shared + Map::kB + stage * Map::kBBytes + block * kBlockN * kStageRowBytes;
                    if (a_rows > 0) {
                        const CUtensorMap* map = a_rows == kPartRowsA ? &maps.a : &maps.a_edge;
                        const unsigned to = a + a_part * kPartRowsA * kStageRowBytes;
                        if constexpr (kSharingA == 1)
                            tma_load_2d(to, map, full, k, a_row);
                        else
                            tma_load_2d_multicast(to, map, full, (1 << kCluster) - 1, k, a_row);
                    }
#pragma unroll
                    for (int i = 0; i < kMine; i++) {
                        if (has_b || b_rows[i] == 0) continue;
                        const CUtensorMap* map = b_rows[i] == kPartRows ? &maps.b : &maps.b_edge;
                        const int part = kSharingB == 1 ? i : tiles.rank;
                        const int group = (tile.column + part * (kBHalves == 1 ? kPartRows : n / 2)) / (4 * kRun);
                        const unsigned to = b + part * kPartRows * kStageRowBytes;
                        if constexpr (kSharingB == 1)
                            tma_load_5d(to, map, full, k, 0, 0, 0, group);
                        else
                            tma_load_5d_multicast(to, map, full, (1 << kCluster) - 1, k, 0, 0, 0, group);
                    }
                    beside(tile, kb + block, stage, full);
                    also(tile, kb + block);
                }
            }
        }
    }

    // Have L2 fetch the tile's part of `matrix` [m, n] (kBytes bytes an element, `stride` elements from row to row), a
    // share beside each k-block, so that it is there when the epilogue reads it.
    template <int kBytes>
    static __device__ __forceinline__ void prefetch_part(const void* matrix, const Tile& tile, int kb, int k_blocks,
                                                         int m, size_t stride) {
        for (int row = tile.row + kb; row < min(tile.row + kBlockM, m); row += k_blocks)
            prefetch_l2(static_cast<const char*>(matrix) + (row * stride + tile.column) * kBytes,
                        (tile.end - tile.column) * kBytes);
    }

    // The four wgmma of a k-block of the fast chain.
    struct Issue {
        unsigned a_base, b_base;  // this warpgroup's rows of A, and B, in stage 0

        __device__ __forceinline__ explicit Issue(unsigned shared)
            : a_base(shared + Map::kA + warpgroup_index() * 64 * kStageRowBytes), b_base(shared + Map::kB) {}

        __device__ __forceinline__ unsigned long long a(int stage) const {
            return wgmma_descriptor(a_base + stage * Map::kABytes, 0, 1024);
        }
        __device__ __forceinline__ unsigned long long b(int stage) const {
            return wgmma_descriptor(b_base + stage * Map::kBBytes, 0, 1024);
        }

        template <int kCount>
        __device__ __forceinline__ void operator()(float (&acc)[kCount], int stage, bool first) const {
            const auto a = this->a(stage), b = this->b(stage);
#pragma unroll
            for (int k = 0; k < 4; k++)
                wgmma_k32<typename Config::A, typename Config::B>(acc, a + 2 * k, b + 2 * k,
                                                                  Config::kContinues || !first || k > 0);
        }
    };
};

// The main loop of split accumulation: chains of four wgmma from zero, each promoted to the accumulators.
template <class Gemm>
struct SplitMainloop : Mainloop<typename Gemm::Map> {
    using Config = typename Gemm::Config;
    using A = typename Config::A;
    using B = typename Config::B;
    static constexpr int kAcc = Gemm::kAcc, kBlockM = Gemm::kBlockM, kBlockN = Gemm::kBlockN;
    static constexpr int kNarrow = Gemm::kNarrow, kStageBlocks = Gemm::kStageBlocks;
    static constexpr int kSplitParts =
        Config::Promotion::template kParts<kBlockN>;  // of a tile's columns share one temporary
    // A thread has registers for two temporaries; each of three warpgroups has fewer.
    static constexpr bool kAlternating = kSplitParts == 1 && Gemm::kWarpgroups < 3;
    using Mainloop<typename Gemm::Map>::ring;
    using Mainloop<typename Gemm::Map>::k_blocks;
    typename Gemm::Issue operands;
    typename Config::Promotion promote;

    __device__ __forceinline__ SplitMainloop(unsigned shared, int k_blocks)
        : Mainloop<typename Gemm::Map>(shared, k_blocks), operands(shared) {}

    template <class Epilogue, class Last>
    __device__ __forceinline__ void operator()(float (&acc)[kAcc], const Tile& tile, Epilogue&, const Last&) {
        promote.template begin<kBlockN>();
        if (kNarrow < kBlockN && tile.end - tile.column <= kNarrow)
            sum(columns<kNarrow>(acc), !tile.last);
        else
            sum(acc, !tile.last);
    }

    // What the configuration has in a stage beside the operands.
    __device__ __forceinline__ unsigned beside(int stage) const {
        return this->shared + Gemm::Map::kBeside + stage * Gemm::Map::kBesideBytes;
    }

    template <int kCount>
    __device__ __forceinline__ void sum(float (&acc)[kCount], bool more) {
        if constexpr (!Config::kContinues) {
#pragma unroll
            for (int i = 0; i < kCount; i++) acc[i] = 0.0f;
        }
        if constexpr (kAlternating) {
            alternate([&](const float (&partial)[kCount], int stage) { promote(acc, 0, partial, beside(stage)); },
                      [&](int stage) { promote.template load<kBlockN>(beside(stage)), promote.take_loaded(); });
        } else {
            promote_parts(acc, more);
        }
    }

    // Calls take(partial, stage) with each k-block's chain, in order, while the chains of the next stage run, and before
    // it waits for those of a stage, ahead(stage). The chains of a stage run side by side, since with few columns a wgmma
    // waits for the one before it longer than it takes. A thread has two temporaries for each chain of a stage.
    template <class Take, class Ahead = Nothing>
    __device__ __forceinline__ void alternate(const Take& take, const Ahead& ahead = {}) {
        static_assert(Gemm::kStages >= 2, "a stage is waited for while the one before it is still held");
        float even[kStageBlocks][kAcc], odd[kStageBlocks][kAcc];
        int previous;
        const auto start = [&](float (&partials)[kStageBlocks][kAcc]) {
            // Keeps descriptors in uniform registers; they would be moved there for each wgmma.
            if constexpr (kStageBlocks > 1) ring.stage.index = uniform(ring.stage.index);
            ring.wait_full();
            wgmma_fence();
            const auto a = operands.a(ring.stage.index), b = operands.b(ring.stage.index);
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int c = 0; c < kStageBlocks; c++)
                    wgmma_k32<A, B>(partials[c], a + c * (kBlockM * kStageRowBytes >> 4) + 2 * k,
                                    b + c * (kBlockN * kStageRowBytes >> 4) + 2 * k, k > 0);
            wgmma_commit();
        };
        // The last stage may hold fewer chains.
        const auto finish = [&](float (&partials)[kStageBlocks][kAcc], int count = kStageBlocks) {
#pragma unroll
            for (int c = 0; c < kStageBlocks; c++) wgmma_hold(partials[c]);
            const auto give_back = [&] {
                if constexpr (Config::Promotion::kLoadsStage)
                    this->release_read(ring.empty(previous));
                else
                    this->release(ring.empty(previous));
            };
            if constexpr (!Config::Promotion::kReadsStage) give_back();
#pragma unroll
            for (int c = 0; c < kStageBlocks; c++)
                if (c < count) take(partials[c], previous);
            if constexpr (Config::Promotion::kReadsStage) give_back();
        };
        const auto next = [&] { previous = ring.stage.index, ring.advance(); };
        int stages = (k_blocks + kStageBlocks - 1) / kStageBlocks;
        const int last = k_blocks - (stages - 1) * kStageBlocks;
        start(even);
        for (; stages > 2; stages -= 2) {
            next(), start(odd), ahead(previous), wgmma_wait<1>(), finish(even);
            next(), start(even), ahead(previous), wgmma_wait<1>(), finish(odd);
        }
        next();
        if (stages == 2) {
            start(odd), ahead(previous), wgmma_wait<1>(), finish(even);
            next(), ahead(previous), wgmma_wait<0>(), finish(odd, last);
        } else {
            ahead(previous), wgmma_wait<0>(), finish(even, last);
        }
    }

    // One temporary, where there are no registers for two: for each part of the columns a chain, then its promotion. On
    // entry the stage is full, and on return the next tile's, if there is `more`: the wait for a stage runs under a
    // part's wgmma, so that only the additions stand between two parts.
    template <int kCount>
    __device__ __forceinline__ void promote_parts(float (&acc)[kCount], bool more) {
        constexpr int kPart = kCount / kSplitParts;
        const int followed = k_blocks - !more;  // stages of this tile that another follows
        promote.template load<kBlockN>(beside(ring.stage.index));
        for (int kb = 0; kb < k_blocks; kb++) {
            const auto a = operands.a(ring.stage.index), b = operands.b(ring.stage.index);
            const unsigned empty = ring.empty(), scales = beside(ring.stage.index);
#pragma unroll
            for (int part = 0; part < kSplitParts; part++) {
                constexpr int kLast = kSplitParts - 1;
                float partial[kPart];
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; k++)
                    wgmma_k32<A, B>(partial, a + 2 * k, b + part * (2 * kPart * kStageRowBytes >> 4) + 2 * k, k > 0);
                wgmma_commit();
                if (part == 0) promote.take_loaded();
                if (part == kLast) {
                    ring.advance();
                    if (kb < followed) ring.wait_full();
                    promote.template load<kBlockN>(beside(ring.stage.index));  // unread where nothing follows
                }
                wgmma_wait<0>();
                if (part == kLast && !Config::Promotion::kReadsStage) this->release(empty);
                wgmma_hold(partial);
                promote(acc, part * kPart, partial, scales);
                if (part == kLast && Config::Promotion::kReadsStage) this->release_read(empty);
            }
        }
    }
};

// How the sum of a chain joins the accumulators: added to them, each sum rounded once. A policy of a configuration: the
// main loop asks into how many parts a tile's columns are cut, and says when a tile begins. Of each k-block it calls load
// as early as it can, take_loaded when the chain has begun, and then the policy itself for each part of the columns;
// `first` is the accumulator of the part's first sum. It gives what the configuration has in the stage (kBesideBytes);
// with kLoadsStage its threads load from there, and with kReadsStage that is still there when the policy runs.
struct Added {
    static constexpr bool kPromotes = true, kLoadsStage = false, kReadsStage = false;
    template <class Gemm>
    using Mainloop = SplitMainloop<Gemm>;

    template <int kColumns>
    static constexpr int kParts = kColumns > 128 ? 2 : 1;

    template <int kColumns>
    __device__ __forceinline__ void begin() const {}
    template <int kColumns>
    __device__ __forceinline__ void load(unsigned) const {}
    __device__ __forceinline__ void take_loaded() const {}

    template <int kAcc, int kCount>
    __device__ __forceinline__ void operator()(float (&acc)[kAcc], int first, const float (&sums)[kCount],
                                               unsigned) const {
#pragma unroll
        for (int i = 0; i < kCount; i++) acc[first + i] = __fadd_rn(acc[first + i], sums[i]);
    }
};

// There is one chain: it accumulates by itself.
struct OneChain {
    static constexpr bool kPromotes = false;
    template <class Gemm>
    using Mainloop = FastMainloop<typename Gemm::Map, typename Gemm::Issue, Gemm::kNarrow>;
};

}  // namespace twin
