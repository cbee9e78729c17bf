// FP8 GEMM.   out[M, N] = round(fp32(acc * fp32(a_scale_inv * b_scale_inv)) + bias),   acc = A[M, K] B[N, K]^T
//
// A, B row-major FP8 (E4M3 or E5M2 each), K and N multiples of 16, M any. out bf16, fp16 or fp32.
// acc follows the tensor core (docs/numerics.md): steps of k = 32, in order of K, from +0;
//   fast  (OneChain): one chain over all of K                                             (gemm_mainloop.cuh)
//   split (Added): chains of K = 128, each added to an fp32 accumulator, rounded once     (gemm_fp8_mainloop.cuh)
// What lies after the end of K arrives as zeros, and a step of zero products leaves its C unchanged. The order over K
// does not depend on the tile, so every configuration of this file gives the same bits. ACCUMULATE: out =
// round(fp32(out) + fp32(acc * scale)), without a bias.
//
// One persistent block per multiprocessor walks over output tiles of 64 * WARPGROUPS x BLOCK_N (gemm_tile.cuh); one
// warpgroup copies, WARPGROUPS compute. A computing thread holds BLOCK_N / 2 accumulators and, fast with 16-bit output,
// BLOCK_N / 4 words of the previous tile; split, temporaries of at most 64 floats, which it adds while the tensor cores
// work for the other warpgroup.
//
// Defines: A_FORMAT, B_FORMAT (E4M3 | E5M2), OUT (BF16 | FP16 | FP32), PROMOTION (OneChain | Added), ACCUMULATE (0 | 1),
// WARPGROUPS (1 | 2), BLOCK_N, NARROW (of some tiles: gemm_tile.cuh), STAGES, CLUSTER (1, or 2 blocks that share B, or A
// with ACROSS), RUN (columns of a thread: 8, or 4 where N or BLOCK_N is not a multiple of 32), EARLY (0 | 1: the kernel may
// be launched early if nobody writes B), MAXIMA (0 | 1, fast to 16 bits: maxima[warp] = the largest number of out that the
// warp has stored, at least +0, NaN passed over, in fp32; a block has 4 * WARPGROUPS warps).
#include "gemm_fp8_mainloop.cuh"
#ifndef EARLY
#define EARLY 0
#endif
#ifdef MAXIMA
#define TWIN_MAXIMA , float* maxima
#else
#define MAXIMA 0
#define TWIN_MAXIMA
#endif

using namespace twin;

struct Config : GemmDefaults {
    using A = A_FORMAT;
    using B = B_FORMAT;
    using Out = OUT;
    using Promotion = PROMOTION;
    static constexpr bool kAccumulate = ACCUMULATE, kAcross = ACROSS, kEarly = EARLY;
    static constexpr int kWarpgroups = WARPGROUPS, kBlockN = BLOCK_N, kNarrow = NARROW;
    static constexpr int kStages = STAGES, kCluster = CLUSTER, kRun = RUN;
    // Split with few columns: two k-blocks share a stage, which halves its cost beside the wgmma.
    static constexpr int kStageBlocks = Promotion::kPromotes && kWarpgroups == 1 && kBlockN <= 64 ? 2 : 1;
    static constexpr int kProducers = kWarpgroups == 1 ? 4 : 1;  // small tiles have short k-blocks: warps copy in turns
};
using Gemm = GemmFP8<Config>;
using Loop = Config::Promotion::Mainloop<Gemm>;
using Store = ScaleBiasStore<OUT, Gemm::kRun, Gemm::kAcc, !Config::Promotion::kPromotes, Config::kAccumulate>;
#if MAXIMA
using Epilogue = KeepingLargest<Store, OUT, Gemm::kRun>;
#else
using Epilogue = Store;
#endif

extern "C" __global__ void TWIN_CLUSTER(CLUSTER) __launch_bounds__(128 * (Config::kWarpgroups + 1), 1)
    gemm_fp8(const __grid_constant__ OperandMaps maps, void* out, const void* bias, int bias_type,
             const float* a_scale_inv, const float* b_scale_inv TWIN_MAXIMA, int m, int n, int k, int tile_count) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const Gemm::Tiles tiles(m, n, tile_count);
    const int k_blocks = (k + Gemm::kBlockK - 1) / Gemm::kBlockK;
    if constexpr (Config::kEarly) let_next_grid_start();
    const auto producing = [&] {
        Gemm::produce<Config::kProducers>(maps, shared, tiles, 0, k_blocks, m, n, [&](const Tile& tile, int kb) {
            if constexpr (Config::kAccumulate)
                Gemm::prefetch_part<Epilogue::kFP32 ? 4 : 2>(out, tile, kb, k_blocks, m, n);
        });
    };
    const auto consuming = [&] {
        if constexpr (Config::kEarly) wait_for_grid_before();
        Epilogue epilogue(out, bias, bias_type, m, n);
        Loop mainloop(shared, k_blocks);
        epilogue.scale = __fmul_rn(*a_scale_inv, *b_scale_inv);
        consume<Gemm::kAcc>(mainloop, epilogue);
#if MAXIMA
        const float largest = epilogue.largest.of_warp();
        if (threadIdx.x % 32 == 0) maxima[blockIdx.x * (4 * Config::kWarpgroups) + threadIdx.x / 32] = largest;
#endif
    };
    run_block<Gemm::Map, 232, 40>(shared, maps.a, maps.b, producing, consuming, [&] {
        if (Config::kProducers > 1 && threadIdx.x / 32 % 4 < Config::kProducers && elect_one()) producing();
    });
}
