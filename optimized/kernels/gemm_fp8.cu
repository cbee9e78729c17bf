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
// warpgroup copying and WARPGROUPS consumers computing (gemm_tile.cuh: shared memory, gemm_mainloop.cuh: fast,
// gemm_fp8_mainloop.cuh: split, and how B arrives).
// Registers of a consumer thread: BLOCK_N/2 accumulators; fast with 16-bit output, BLOCK_N/4 words of the tile
// before; split, a temporary of at most 64, promoted while the tensor cores work for the other warpgroup.
//
// ACCUMULATE: the product, without a bias, is added to what out holds:  out = round(fp32(out) + fp32(acc * scale)).
//
// Defines: A_FORMAT, B_FORMAT (E4M3 | E5M2), OUT (BF16 | FP16 | FP32), SPLIT (0 | 1), ACCUMULATE (0 | 1),
// WARPGROUPS (1 | 2), BLOCK_N, NARROW (of some tiles: gemm_tile.cuh), STAGES, CLUSTER (1, or 2 blocks that share B), RUN
// (8, or 4 where N or BLOCK_N is not a multiple of 32).

// Split, few columns: what a stage costs beside its products, two k-blocks share.
#define STAGE_BLOCKS (SPLIT && WARPGROUPS == 1 && BLOCK_N <= 64 ? 2 : 1)
#include "gemm_fp8_mainloop.cuh"

using namespace twin;

constexpr bool kFP32 = same_type<OUT, FP32>;
constexpr bool kDeferred = !kFP32 && !SPLIT;
constexpr bool kBiasAhead = kDeferred && kRun == 8;  // of the last k-block; else there are no registers for it
// Where k-blocks are short: producers in turns.
constexpr int kProducers = WARPGROUPS == 1 ? 4 : 1;

extern "C" __global__ void TWIN_CLUSTER __launch_bounds__(128 * (WARPGROUPS + 1), 1)
    gemm_fp8(const __grid_constant__ Operands operands, void* out, const void* bias, int bias_type,
             const float* a_scale_inv, const float* b_scale_inv, int m, int n, int k, int tile_count) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const Tiles tiles(m, n, tile_count);
    const int k_blocks = (k + kBlockK - 1) / kBlockK;
    const auto producing = [&] {
        produce<kProducers>(operands, shared, tiles, 0, k_blocks, m, n, [&](const Tile& tile, int kb) {
            if constexpr (ACCUMULATE) prefetch_part<kFP32 ? 4 : 2>(out, tile, kb, k_blocks, m, n);
        });
    };
    const auto consuming = [&] {
        const int lane = threadIdx.x % 32;
        const int row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * kRun;
        const Issue issue{shared + Map::kA + warpgroup_index() * 64 * kStageRowBytes, shared + Map::kB};
        const float scale = __fmul_rn(*a_scale_inv, *b_scale_inv);
        Position stage;
        Destination to;
        unsigned words[kAcc / 2];
        bool pending = false;
        Tile tile;
        do {
            tile = wait_for_tile<Map>(shared, stage);
            const bool narrow = kNarrow < kBlockN && tile.end - tile.column <= kNarrow;
            float acc[kAcc];
            Bias<kRun, kAcc> added;
            const auto load_bias = [&] {
                if constexpr (!ACCUMULATE) added.load(bias, bias_type, tile.column + column, n);
            };
            if constexpr (SPLIT) {
                if (narrow)
                    split_tile(columns<kNarrow>(acc), shared, issue, stage, k_blocks, !tile.last);
                else
                    split_tile(acc, shared, issue, stage, k_blocks, !tile.last);
            } else {
                constexpr int kSteps = kStoreSteps<kRun, kAcc>;
                const auto store = [&](int s) { store_step<kRun>(words, s, to); };
                chain_tile<Map, CLUSTER, kSteps, kNarrow>(acc, shared, stage, k_blocks, issue, narrow, pending, store,
                                                          [&] { if constexpr (kBiasAhead) load_bias(); });
            }
            if constexpr (!kBiasAhead) load_bias();
            scale_tile(acc, scale);
            to = destination<kFP32 ? 4 : 2>(out, tile.row + row, tile.column + column, m, n, tile.end);
            if constexpr (ACCUMULATE)
                add_stored<OUT, kRun>(acc, to);
            else
                added.add(acc);
            if constexpr (kFP32) {
                store_fp32<kRun>(acc, to);
            } else {
                pack_tile<OUT, kRun>(words, acc);
                pending = kDeferred;
                if constexpr (!kDeferred) store_packed_tile<kRun>(words, to);
            }
        } while (!tile.last);
        if (pending) store_packed_tile<kRun>(words, to);
    };
    run_block<Map, kStages, CLUSTER, WARPGROUPS, 232, 40>(shared, operands.a, operands.b, producing, consuming, [&] {
        if (kProducers > 1 && threadIdx.x / 32 % 4 < kProducers && elect_one()) producing();
    });
}
