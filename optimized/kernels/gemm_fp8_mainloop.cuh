// The main loops of the FP8 GEMMs: copies, the chain of fast accumulation, the chains of split accumulation.
//
// Shared by gemm_fp8.cu and gemm_fp8_fused.cu, whose heads say what is computed and what the defines mean.
//
// Rows of B arrive permuted. wgmma gives lane q = lane % 4 the columns 8 j + 2 q + e of B's tile; the tensor map
// of B (optimized/ops/gemm_fp8.py) is 5-D, (k, e, q, j, g), and puts row  4 RUN g + RUN q + 2 j + e  of B there, so
// a thread's results are RUN consecutive columns of the output.
//
// ACROSS 1: the blocks of a cluster compute tiles side by side and share A, instead of B.
// STAGE_BLOCKS: k-blocks that share a stage and its barriers, of the STAGES in the ring.
// B_HALVES 2: half of a tile's columns are of the first half of B's rows, and the others the same of the second, so
// that a thread holds x1 and x2 of a gated activation.
#pragma once

#include "gemm_mainloop.cuh"

#ifndef B_HALVES
#define B_HALVES 1
#endif
#ifndef ACROSS
#define ACROSS 0
#endif
#ifndef ALTERNATING_N
#define ALTERNATING_N 128
#endif
#ifndef NARROW
#define NARROW BLOCK_N
#endif
#ifndef STAGE_BLOCKS
#define STAGE_BLOCKS 1
#endif

namespace twin {

constexpr int kBlockM = 64 * WARPGROUPS;
constexpr int kBlockN = BLOCK_N;
constexpr int kBlockK = 128;
constexpr int kStageBlocks = STAGE_BLOCKS;
constexpr int kStages = STAGES / kStageBlocks;
constexpr int kRun = RUN;
constexpr int kHalves = B_HALVES;
constexpr int kTileN = kBlockN / kHalves;  // columns from one tile to the next
constexpr int kNarrow = NARROW;
constexpr int kAcc = kBlockN / 2;                   // accumulators of a thread
constexpr int kSplitParts = kBlockN > 128 ? 2 : 1;  // split: of a tile's columns, each through one temporary
constexpr bool kAlternating = kBlockN <= ALTERNATING_N;  // split: a thread has registers for two temporaries
using Map = SharedMap<WARPGROUPS, kBlockN, kStages, kStageBlocks>;
using Position = Stage<kStages>;
using Tiles = Schedule<kBlockM, kTileN, CLUSTER, kNarrow == kBlockN ? kTileN : kNarrow, ACROSS>;
// A stage of an operand is one copy, or several: a part for each block of the cluster that shares it, which all receive, or
// each half of the weight.
constexpr int kSharingA = ACROSS ? CLUSTER : 1, kSharingB = ACROSS ? 1 : CLUSTER;
constexpr int kParts = kHalves > kSharingB ? kHalves : kSharingB;
constexpr int kPartRows = kBlockN / kParts;
constexpr int kPartRowsA = kBlockM / kSharingA;

// How the copy engine reads A and B: in boxes of a tile's rows (of one of B's parts), and at the matrix's edge in boxes
// of the rows that remain there. Rows that do not exist are not asked for: to fill one with zeros takes three times as
// long as to fetch one, and what stands in shared memory instead reaches only outputs that do not exist.
struct Operands {
    CUtensorMap a, b, a_edge, b_edge;
};

// How many rows are copied from `first` on, of `rows` in a full box: where fewer are left, only those. But the edge boxes have
// as many as are left behind full ones, and where tiles of two widths are mixed the last may begin elsewhere.
__device__ __forceinline__ int box_rows(int first, int end, int rows) {
    const int left = end - first;
    return left <= 0 ? 0 : left >= rows || first % rows != 0 ? rows : left;
}

// A is [m, ...], B [n, ...]; k-blocks from `begin` to before `end`. also(tile, kb) is called behind the copies of each. What a
// stage has beyond the last k-block is not copied.
// kProducers warps of the producer's warpgroup take turns: one alone issues a k-block's copies in some 210 cycles. Turns go on from
// tile to tile: who skipped more stages than the ring has would take the phase before for the one that it waits for.
template <int kProducers = 1, class Also>
__device__ __forceinline__ void produce(const Operands& operands, unsigned shared, const Tiles& tiles, int begin, int end,
                                        int m, int n, const Also& also) {
    constexpr int kMine = kParts / kSharingB;  // parts of B that this block copies
    const int mine = kProducers == 1 ? 0 : threadIdx.x / 32 % 4;
    static_assert(kProducers <= kStages, "a producer's turn comes in each round of the ring");
    Position stage;
    int turn = 0;
    for (int index = tiles.first(); index < tiles.count(); index = tiles.next(index)) {
        const Tile tile = tiles[index];
        const int a_part = kSharingA == 1 ? 0 : tiles.rank, a_row = tile.row + a_part * kPartRowsA;
        const int a_rows = box_rows(a_row, m, kPartRowsA);
        int b_rows[kMine], all_rows = 0;
#pragma unroll
        for (int part = 0; part < kSharingA; part++) all_rows += box_rows(tile.row + part * kPartRowsA, m, kPartRowsA);
#pragma unroll
        for (int part = 0; part < kParts; part++) {
            const int rows = box_rows(tile.column + (kHalves == 1 ? part * kPartRows : 0), n / kHalves, kPartRows);
            all_rows += rows;
            if (kSharingB == 1 || part == tiles.rank) b_rows[part % kMine] = rows;
        }
        for (int kb = begin; kb < end; kb += kStageBlocks, stage.advance(), turn++) {
            if (turn % kProducers != mine) continue;
            const unsigned full = shared + Map::kFull + 8 * stage.index;
            const int blocks = kStageBlocks == 1 ? 1 : min(kStageBlocks, end - kb);
            mbarrier_wait(shared + Map::kEmpty + 8 * stage.index, stage.parity ^ 1);
            if (kb == begin) said<Map>(shared, stage.index) = tile;
            mbarrier_arrive_expect_tx(full, blocks * all_rows * kStageRowBytes);
#pragma unroll
            for (int block = 0; block < kStageBlocks; block++) {
                if (block >= blocks) break;
                const int k = (kb + block) * kBlockK;
                const unsigned a = shared + Map::kA + stage.index * Map::kABytes + block * kBlockM * kStageRowBytes;
                const unsigned b = shared + Map::kB + stage.index * Map::kBBytes + block * kBlockN * kStageRowBytes;
                if (a_rows > 0) {
                    const CUtensorMap* map = a_rows == kPartRowsA ? &operands.a : &operands.a_edge;
                    const unsigned to = a + a_part * kPartRowsA * kStageRowBytes;
                    if constexpr (kSharingA == 1)
                        tma_load_2d(to, map, full, k, a_row);
                    else
                        tma_load_2d_multicast(to, map, full, (1 << CLUSTER) - 1, k, a_row);
                }
#pragma unroll
                for (int i = 0; i < kMine; i++) {
                    if (b_rows[i] == 0) continue;
                    const CUtensorMap* map = b_rows[i] == kPartRows ? &operands.b : &operands.b_edge;
                    const int part = kSharingB == 1 ? i : tiles.rank;
                    const int group = (tile.column + part * (kHalves == 1 ? kPartRows : n / 2)) / (4 * kRun);
                    const unsigned to = b + part * kPartRows * kStageRowBytes;
                    if constexpr (kSharingB == 1)
                        tma_load_5d(to, map, full, k, 0, 0, 0, group);
                    else
                        tma_load_5d_multicast(to, map, full, (1 << CLUSTER) - 1, k, 0, 0, 0, group);
                }
                also(tile, kb + block);
            }
        }
    }
}

// A part for each k-block of: L2 fetches the tile's part of `matrix`, [m, n] of kBytes bytes an element, `stride` of them
// from row to row. What is read or added to behind the product is there when it is needed.
template <int kBytes>
__device__ __forceinline__ void prefetch_part(const void* matrix, const Tile& tile, int kb, int k_blocks, int m,
                                              size_t stride) {
    for (int row = tile.row + kb; row < min(tile.row + kBlockM, m); row += k_blocks)
        prefetch_l2(static_cast<const char*>(matrix) + (row * stride + tile.column) * kBytes,
                    (tile.end - tile.column) * kBytes);
}

// The four wgmma of a k-block of the fast chain.
struct Issue {
    unsigned a_base, b_base;  // this warpgroup's rows of A, and B, in stage 0

    template <int kCount>
    __device__ __forceinline__ void operator()(float (&acc)[kCount], int stage, bool first) const {
        const auto a = wgmma_descriptor(a_base + stage * Map::kABytes, 0, 1024);
        const auto b = wgmma_descriptor(b_base + stage * Map::kBBytes, 0, 1024);
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma_k32<A_FORMAT, B_FORMAT>(acc, a + 2 * k, b + 2 * k, !first || k > 0);
    }
};

// `k_blocks` chains of four wgmma, each from zero: take(partial) is called with each in order, while those of the next stage
// are running. The chains of a stage run side by side, wgmma by wgmma: where there are few columns, one waits longer for the
// one before it in its chain than it takes. Two temporaries for each: for tiles that leave room for them.
template <class Take>
__device__ __forceinline__ void alternate_chains(unsigned shared, const Issue& base, Position& stage, int k_blocks,
                                                 const Take& take) {
    static_assert(kStages >= 2, "a stage is waited for while the one before it is still held");
    float even[kStageBlocks][kAcc], odd[kStageBlocks][kAcc];
    int previous;
    const auto start = [&](float(&partials)[kStageBlocks][kAcc]) {
        // Then descriptors stay in uniform registers and are not moved there for each wgmma.
        if constexpr (kStageBlocks > 1) stage.index = uniform(stage.index);
        mbarrier_wait(shared + Map::kFull + 8 * stage.index, stage.parity);
        wgmma_fence();
        const auto a = wgmma_descriptor(base.a_base + stage.index * Map::kABytes, 0, 1024);
        const auto b = wgmma_descriptor(base.b_base + stage.index * Map::kBBytes, 0, 1024);
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int c = 0; c < kStageBlocks; c++)
                wgmma_k32<A_FORMAT, B_FORMAT>(partials[c], a + c * (kBlockM * kStageRowBytes >> 4) + 2 * k,
                                              b + c * (kBlockN * kStageRowBytes >> 4) + 2 * k, k > 0);
        wgmma_commit();
    };
    // Of the last stage, the chains of what was copied are taken.
    const auto finish = [&](float(&partials)[kStageBlocks][kAcc], int count = kStageBlocks) {
#pragma unroll
        for (int c = 0; c < kStageBlocks; c++) wgmma_hold(partials[c]);
        release<CLUSTER>(shared + Map::kEmpty + 8 * previous);
#pragma unroll
        for (int c = 0; c < kStageBlocks; c++)
            if (c < count) take(partials[c]);
    };
    const auto next = [&] { previous = stage.index, stage.advance(); };
    int stages = (k_blocks + kStageBlocks - 1) / kStageBlocks;
    const int last = k_blocks - (stages - 1) * kStageBlocks;
    start(even);
    for (; stages > 2; stages -= 2) {
        next(), start(odd), wgmma_wait<1>(), finish(even);
        next(), start(even), wgmma_wait<1>(), finish(odd);
    }
    next();
    if (stages == 2) {
        start(odd), wgmma_wait<1>(), finish(even);
        next(), wgmma_wait<0>(), finish(odd, last);
    } else {
        wgmma_wait<0>(), finish(even, last);
    }
}

// All k-blocks of a tile with split accumulation. Where there is no room for two temporaries: for each part of the columns
// a chain of four wgmma from zero, then its promotion. The stage has been waited for already, and at the end the next
// tile's (if there is one: `more`) has too: the wait runs under a part's wgmma, so that nothing but the additions stands
// between that part and the next.
template <int kCount>
__device__ __forceinline__ void split_tile(float (&acc)[kCount], unsigned shared, const Issue& base, Position& stage,
                                           int k_blocks, bool more) {
#pragma unroll
    for (int i = 0; i < kCount; i++) acc[i] = 0.0f;
    if constexpr (kAlternating) {
        alternate_chains(shared, base, stage, k_blocks, [&](const float(&partial)[kCount]) {
#pragma unroll
            for (int i = 0; i < kCount; i++) acc[i] = __fadd_rn(acc[i], partial[i]);
        });
    } else {
        constexpr int kPart = kCount / kSplitParts;
        const int followed = k_blocks - !more;  // stages of this tile behind which another comes
        for (int kb = 0; kb < k_blocks; kb++) {
            const auto a = wgmma_descriptor(base.a_base + stage.index * Map::kABytes, 0, 1024);
            const auto b = wgmma_descriptor(base.b_base + stage.index * Map::kBBytes, 0, 1024);
#pragma unroll
            for (int part = 0; part < kSplitParts; part++) {
                float partial[kPart];
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; k++)
                    wgmma_k32<A_FORMAT, B_FORMAT>(partial, a + 2 * k, b + part * (2 * kPart * kStageRowBytes >> 4) + 2 * k,
                                                  k > 0);
                wgmma_commit();
                if (part == kSplitParts - 1) {
                    const unsigned empty = shared + Map::kEmpty + 8 * stage.index;
                    stage.advance();
                    if (kb < followed) mbarrier_wait(shared + Map::kFull + 8 * stage.index, stage.parity);
                    wgmma_wait<0>();
                    release<CLUSTER>(empty);
                } else {
                    wgmma_wait<0>();
                }
                wgmma_hold(partial);
#pragma unroll
                for (int i = 0; i < kPart; i++) acc[part * kPart + i] = __fadd_rn(acc[part * kPart + i], partial[i]);
            }
        }
    }
}

}  // namespace twin
