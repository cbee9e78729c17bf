// FP8 GEMM.   out[M, N] = round(fp32(acc * fp32(a_scale_inv * b_scale_inv)) + bias),   acc = A[M, K] B[N, K]^T
//
// A, B row-major FP8 (E4M3 or E5M2 each), K and N multiples of 16, M any. out bf16, fp16 or fp32.
// acc follows the tensor core (docs/numerics.md): steps of k = 32, in order of K, from +0;
//   fast  (SPLIT 0): one chain over all of K;
//   split (SPLIT 1): chains of K = 128, each partial added to an fp32 accumulator by one rounded addition.
// K beyond the end arrives as zeros from the copy engine; a step of zero products leaves its C as it is.
// The order over K does not depend on the tile, so every configuration of this file gives the same bits.
//
// One persistent block per multiprocessor walks over output tiles of 64*WARPGROUPS x BLOCK_N, a producer
// warpgroup copying and WARPGROUPS consumers computing (gemm_tile.cuh: shared memory, gemm_mainloop.cuh: fast).
// Registers of a consumer thread: BLOCK_N/2 accumulators; fast with 16-bit output, BLOCK_N/4 words of the tile
// before; split, a temporary of at most 64, promoted while the tensor cores work for the other warpgroup.
//
// Rows of B arrive permuted. wgmma gives lane q = lane % 4 the columns 8 j + 2 q + e of B's tile; the tensor map
// of B (optimized/ops/gemm_fp8.py) is 5-D, (k, e, q, j, g), and puts row  4 RUN g + RUN q + 2 j + e  of B there, so
// a thread's results are RUN consecutive columns of the output.
//
// Defines: A_FORMAT, B_FORMAT (E4M3 | E5M2), OUT (BF16 | FP16 | FP32), SPLIT (0 | 1), WARPGROUPS (1 | 2),
// BLOCK_N, STAGES, CLUSTER (1, or 2 blocks that share B), RUN (8, or 4 where N is not a multiple of 32).
#include "gemm_mainloop.cuh"

namespace twin {

constexpr int kBlockM = 64 * WARPGROUPS;
constexpr int kBlockN = BLOCK_N;
constexpr int kBlockK = 128;
constexpr int kStages = STAGES;
constexpr int kRun = RUN;
constexpr int kAcc = kBlockN / 2;                     // accumulators of a thread
constexpr int kPartN = kBlockN < 128 ? kBlockN : 128;  // split: columns of one temporary
constexpr bool kFP32 = same_type<OUT, FP32>;
constexpr bool kDeferred = !kFP32 && !SPLIT;
using Map = SharedMap<WARPGROUPS, kBlockN, kStages>;
using Position = Stage<kStages>;
using Tiles = Schedule<kBlockM, kBlockN, CLUSTER>;

__device__ __forceinline__ void produce(const CUtensorMap* a_map, const CUtensorMap* b_map, unsigned shared,
                                        const Tiles& tiles, int k_blocks) {
    Position stage;
    for (int index = tiles.first(); index < tiles.count(); index += tiles.step()) {
        const Tile tile = tiles[index];
        for (int kb = 0; kb < k_blocks; kb++, stage.advance()) {
            const unsigned full = shared + Map::kFull + 8 * stage.index;
            const unsigned a = shared + Map::kA + stage.index * Map::kABytes;
            const unsigned b = shared + Map::kB + stage.index * Map::kBBytes;
            mbarrier_wait(shared + Map::kEmpty + 8 * stage.index, stage.parity ^ 1);
            mbarrier_arrive_expect_tx(full, Map::kABytes + Map::kBBytes);
            tma_load_2d(a, a_map, full, kb * kBlockK, tile.row);
            if constexpr (CLUSTER == 1) {
                tma_load_5d(b, b_map, full, kb * kBlockK, 0, 0, 0, tile.column / (4 * kRun));
            } else {
                const int row = tiles.rank * (kBlockN / CLUSTER);  // this block's part of B, for all of them
                tma_load_5d_multicast(b + row * kStageRowBytes, b_map, full, (1 << CLUSTER) - 1, kb * kBlockK, 0, 0, 0,
                                      (tile.column + row) / (4 * kRun));
            }
        }
    }
}

// The four wgmma of a k-block of the fast chain.
struct Issue {
    unsigned a_base, b_base;  // this warpgroup's rows of A, and B, in stage 0

    __device__ __forceinline__ void operator()(float (&acc)[kAcc], int stage, bool first) const {
        const auto a = wgmma_descriptor(a_base + stage * Map::kABytes, 0, 1024);
        const auto b = wgmma_descriptor(b_base + stage * Map::kBBytes, 0, 1024);
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma_k32<A_FORMAT, B_FORMAT>(acc, a + 2 * k, b + 2 * k, !first || k > 0);
    }
};

// All k-blocks of a tile with split accumulation: for each part of the columns a chain of four wgmma from zero, then its
// promotion. The stage has been waited for already, and at the end the next tile's (if there is one: `more`) has too:
// the wait runs under a part's wgmma, so that nothing but the additions stands between that part and the next.
__device__ __forceinline__ void split_tile(float (&acc)[kAcc], unsigned shared, const Issue& base, Position& stage,
                                           int k_blocks, bool more) {
    for (int kb = 0; kb < k_blocks; kb++) {
        const auto a = wgmma_descriptor(base.a_base + stage.index * Map::kABytes, 0, 1024);
        const auto b = wgmma_descriptor(base.b_base + stage.index * Map::kBBytes, 0, 1024);
#pragma unroll
        for (int part = 0; part < kBlockN / kPartN; part++) {
            float partial[kPartN / 2];
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++)
                wgmma_k32<A_FORMAT, B_FORMAT>(partial, a + 2 * k, b + part * (kPartN * kStageRowBytes >> 4) + 2 * k,
                                              k > 0);
            wgmma_commit();
            if (part == kBlockN / kPartN - 1) {
                const unsigned empty = shared + Map::kEmpty + 8 * stage.index;
                stage.advance();
                if (kb + 1 < k_blocks || more) mbarrier_wait(shared + Map::kFull + 8 * stage.index, stage.parity);
                wgmma_wait<0>();
                release<CLUSTER>(empty);
            } else {
                wgmma_wait<0>();
            }
            wgmma_hold(partial);
#pragma unroll
            for (int i = 0; i < kPartN / 2; i++)
                acc[part * kPartN / 2 + i] = __fadd_rn(acc[part * kPartN / 2 + i], partial[i]);
        }
    }
}

}  // namespace twin

using namespace twin;

extern "C" __global__ void TWIN_CLUSTER __launch_bounds__(128 * (WARPGROUPS + 1), 1)
    gemm_fp8(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, void* out,
             const void* bias, int bias_type, const float* a_scale_inv, const float* b_scale_inv, int m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const Tiles tiles(m, n);
    const int k_blocks = (k + kBlockK - 1) / kBlockK;
    init_barriers<Map, kStages, CLUSTER, 4 * WARPGROUPS>(shared);

    if (threadIdx.x >= 128 * WARPGROUPS) {  // the producer is the last warpgroup
        if constexpr (WARPGROUPS == 2) setmaxnreg_dec<40>();
        if (threadIdx.x == 128 * WARPGROUPS) {
            prefetch_tensor_map(&a_map);
            prefetch_tensor_map(&b_map);
            produce(&a_map, &b_map, shared, tiles, k_blocks);
        }
    } else {
        if constexpr (WARPGROUPS == 2) setmaxnreg_inc<232>();
        const int lane = threadIdx.x % 32;
        const int row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * kRun;
        const Issue issue{shared + Map::kA + warpgroup_index() * 64 * kStageRowBytes, shared + Map::kB};
        const float scale = __fmul_rn(*a_scale_inv, *b_scale_inv);
        Position stage;
        Destination to;
        unsigned words[kAcc / 2];
        bool pending = false;
        if (SPLIT) mbarrier_wait(shared + Map::kFull, 0);  // every block has a tile
        for (int index = tiles.first(); index < tiles.count(); index += tiles.step()) {
            const Tile tile = tiles[index];
            float acc[kAcc];
            if constexpr (SPLIT) {
#pragma unroll
                for (int i = 0; i < kAcc; i++) acc[i] = 0.0f;
                split_tile(acc, shared, issue, stage, k_blocks, index + tiles.step() < tiles.count());
            } else {
                chain_tile<Map, CLUSTER, kDeferred, kRun>(acc, shared, stage, k_blocks, pending, words, to, issue);
            }
            scale_and_bias<kRun>(acc, scale, bias, bias_type, tile.column + column, n);
            to = destination<kFP32 ? 4 : 2>(out, tile.row + row, tile.column + column, m, n);
            if constexpr (kFP32) {
                store_fp32<kRun>(acc, to);
            } else {
                pack_tile<OUT, kRun>(words, acc);
                pending = kDeferred;
                if constexpr (!kDeferred) store_packed_tile<kRun>(words, to);
            }
        }
        if (pending) store_packed_tile<kRun>(words, to);
    }
    end_together<CLUSTER>();
}
