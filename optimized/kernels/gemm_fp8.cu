// FP8 GEMM.   out[M, N] = round(fp32(acc * fp32(a_scale_inv * b_scale_inv)) + bias),   acc = A[M, K] B[N, K]^T
//
// A, B row-major FP8 (E4M3 or E5M2 each), K and N multiples of 16, M any. out bf16, fp16 or fp32.
// acc follows the tensor core (docs/numerics.md): steps of k = 32, in order of K, from +0;
//   fast  (SPLIT 0): one chain over all of K                                              (gemm_mainloop.cuh)
//   split (SPLIT 1): chains of K = 128, each added to an fp32 accumulator, rounded once   (gemm_fp8_mainloop.cuh)
// What lies after the end of K arrives as zeros, and a step of zero products leaves its C unchanged. The order over K
// does not depend on the tile, so every configuration of this file gives the same bits. ACCUMULATE: out =
// round(fp32(out) + fp32(acc * scale)), without a bias.
//
// One persistent block per multiprocessor walks over output tiles of 64 * WARPGROUPS x BLOCK_N (gemm_tile.cuh); one
// warpgroup copies, WARPGROUPS compute. A computing thread holds BLOCK_N / 2 accumulators and, fast with 16-bit output,
// BLOCK_N / 4 words of the previous tile; split, temporaries of at most 64 floats, which it adds while the tensor cores
// work for the other warpgroup.
//
// Defines: A_FORMAT, B_FORMAT (E4M3 | E5M2), OUT (BF16 | FP16 | FP32), SPLIT (0 | 1), ACCUMULATE (0 | 1), WARPGROUPS (1
// | 2), BLOCK_N, NARROW (of some tiles: gemm_tile.cuh), STAGES, CLUSTER (1, or 2 blocks that share B, or A with
// ACROSS), RUN (columns of a thread: 8, or 4 where N or BLOCK_N is not a multiple of 32).

// Split with few columns: two k-blocks share a stage, which halves its cost beside the wgmma.
#define STAGE_BLOCKS (SPLIT && WARPGROUPS == 1 && BLOCK_N <= 64 ? 2 : 1)
#include "gemm_fp8_mainloop.cuh"

using namespace twin;

template <bool kSplit>
struct Choice {
    using Mainloop = FastMainloop<Map, Issue, kNarrow>;
};
template <>
struct Choice<true> {
    using Mainloop = SplitMainloop;
};
using Loop = Choice<SPLIT>::Mainloop;
using Epilogue = ScaleBiasStore<OUT, kRun, kAcc, !SPLIT, ACCUMULATE>;

// Small tiles have short k-blocks: four warps copy in turns.
constexpr int kProducers = WARPGROUPS == 1 ? 4 : 1;

extern "C" __global__ void TWIN_CLUSTER __launch_bounds__(128 * (WARPGROUPS + 1), 1)
    gemm_fp8(const __grid_constant__ OperandMaps maps, void* out, const void* bias, int bias_type,
             const float* a_scale_inv, const float* b_scale_inv, int m, int n, int k, int tile_count) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const Tiles tiles(m, n, tile_count);
    const int k_blocks = (k + kBlockK - 1) / kBlockK;
    const auto producing = [&] {
        produce<kProducers>(maps, shared, tiles, 0, k_blocks, m, n, [&](const Tile& tile, int kb) {
            if constexpr (ACCUMULATE) prefetch_part<Epilogue::kFP32 ? 4 : 2>(out, tile, kb, k_blocks, m, n);
        });
    };
    const auto consuming = [&] {
        Epilogue epilogue(out, bias, bias_type, m, n);
        Loop mainloop(shared, k_blocks);
        epilogue.scale = __fmul_rn(*a_scale_inv, *b_scale_inv);
        consume<kAcc>(mainloop, epilogue);
    };
    run_block<Map, 232, 40>(shared, maps.a, maps.b, producing, consuming, [&] {
        if (kProducers > 1 && threadIdx.x / 32 % 4 < kProducers && elect_one()) producing();
    });
}
