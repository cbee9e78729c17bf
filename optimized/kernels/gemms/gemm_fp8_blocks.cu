// FP8 GEMM of operands with a scale for each block of 128 along K.   out[M, N] = round(acc + bias)
//
//     acc = +0; for each block of K in order: p = one chain from zero (four wgmma), promoted as gemm_fp8_blocks.cuh says
//
// A, B row-major FP8 (E4M3 or E5M2 each), K and N multiples of 16, M any; their scales as gemm_fp8_blocks.cuh says. out
// bf16, fp16 or fp32. ACCUMULATE: out = round(fp32(out) + acc), without a bias. The order over K does not depend on the
// tile. Blocks, warpgroups and stages are those of gemm_fp8.cu with split accumulation.
//
// Defines: A_FORMAT, B_FORMAT (E4M3 | E5M2), OUT (BF16 | FP16 | FP32), SQUARE_A, SQUARE_B, ACCUMULATE (0 | 1),
// WARPGROUPS (1 | 2 | 3), BLOCK_N, NARROW, STAGES, RUN: as in gemm_fp8.cu; three warpgroups where A has no square blocks;
// STAGED where 16-bit tiles leave through shared memory (gemm_staged.cuh).
#include "gemm_fp8_blocks.cuh"
#ifdef STAGED
#include "gemm_staged.cuh"
#endif

using namespace twin;

struct Config : GemmDefaults {
    using A = A_FORMAT;
    using B = B_FORMAT;
    using Out = OUT;
    using Promotion = Scaled<64 * WARPGROUPS, RUN, SQUARE_A, SQUARE_B>;
    using Copies = ScaleCopies<64 * WARPGROUPS, BLOCK_N, SQUARE_A, SQUARE_B>;
    static constexpr int kBesideBytes = Copies::kBytes;
    static constexpr bool kAccumulate = ACCUMULATE;
    static constexpr int kWarpgroups = WARPGROUPS, kBlockN = BLOCK_N, kNarrow = NARROW;
    static constexpr int kStages = STAGES, kCluster = 1, kRun = RUN;
    static constexpr int kProducers = kWarpgroups == 1 ? 4 : 1;  // small tiles have short k-blocks: warps copy in turns
};
using Gemm = GemmFP8<Config>;
using Loop = SplitMainloop<Gemm>;
#ifdef STAGED
using Epilogue = StagedStore<Gemm>;
#else
using Epilogue = ScaleBiasStore<OUT, Gemm::kRun, Gemm::kAcc, false, Config::kAccumulate>;
#endif

extern "C" __global__ void __launch_bounds__(128 * (Config::kWarpgroups + 1), 1)
    gemm_fp8_blocks(const __grid_constant__ OperandMaps maps, void* out, const void* bias, int bias_type,
#ifdef STAGED
                    const __grid_constant__ CUtensorMap out_map,
#endif
                    const float* a_scale_inv, int a_stride, const float* b_scale_inv, int b_stride, int m, int n, int k,
                    int tile_count) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const Gemm::Tiles tiles(m, n, tile_count);
    const int k_blocks = (k + Gemm::kBlockK - 1) / Gemm::kBlockK;
    const Config::Copies scales{shared + Gemm::Map::kBeside, {a_scale_inv, a_stride}, {b_scale_inv, b_stride}, m, n};
    const auto producing = [&] {
        Gemm::produce<Config::kProducers>(
            maps, shared, tiles, 0, k_blocks, m, n,
            [&](const Tile& tile, int kb) {
                if constexpr (Config::kAccumulate)
                    Gemm::prefetch_part<same_type<OUT, FP32> ? 4 : 2>(out, tile, kb, k_blocks, m, n);
            },
            scales);
    };
    const auto consuming = [&] {
#ifdef STAGED
        Epilogue epilogue(out_map, shared, bias, bias_type, n);
#else
        Epilogue epilogue(out, bias, bias_type, m, n);
        epilogue.scale = 1.0f;
#endif
        Loop mainloop(shared, k_blocks);
        consume<Gemm::kAcc>(mainloop, epilogue);
    };
    constexpr bool kThree = Config::kWarpgroups == 3;
    run_block<Gemm::Map, kThree ? 160 : 232, kThree ? 32 : 40>(shared, maps.a, maps.b, producing, consuming, [&] {
        if (Config::kProducers > 1 && threadIdx.x / 32 % 4 < Config::kProducers && elect_one()) producing();
    });
}
