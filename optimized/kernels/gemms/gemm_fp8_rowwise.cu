// FP8 GEMM of operands with a scale for each row.   out[M, N] = round(fp32(fp32(acc * t) * s) + bias)
//
// acc = A[M, K] B[N, K]^T, fast or split, tiles and stages are those of gemm_fp8.cu; t and s, the scale_inv of B's row and
// of A's, are fp32 [N] and [M], or one number where their step is 0 (gemm_rowwise.cuh). ACCUMULATE: out = round(fp32(out)
// + fp32(fp32(acc * t) * s)), without a bias.
//
// Defines: A_FORMAT, B_FORMAT, OUT, PROMOTION, ACCUMULATE, WARPGROUPS, BLOCK_N, NARROW, STAGES, CLUSTER, RUN: as in
// gemm_fp8.cu.
#include "gemm_fp8_mainloop.cuh"
#include "gemm_rowwise.cuh"

using namespace twin;

struct Config : GemmDefaults {
    using A = A_FORMAT;
    using B = B_FORMAT;
    using Out = OUT;
    using Promotion = PROMOTION;
    static constexpr bool kAccumulate = ACCUMULATE;
    static constexpr int kWarpgroups = WARPGROUPS, kBlockN = BLOCK_N, kNarrow = NARROW;
    static constexpr int kStages = STAGES, kCluster = CLUSTER, kRun = RUN;
    static constexpr int kStageBlocks = Promotion::kPromotes && kWarpgroups == 1 && kBlockN <= 64 ? 2 : 1;
    static constexpr int kProducers = kWarpgroups == 1 ? 4 : 1;  // small tiles have short k-blocks: warps copy in turns
};
using Gemm = GemmFP8<Config>;
using Loop = Config::Promotion::Mainloop<Gemm>;
using Epilogue = RowwiseStore<OUT, Gemm::kRun, Gemm::kAcc, !Config::Promotion::kPromotes, Config::kAccumulate>;

extern "C" __global__ void TWIN_CLUSTER(CLUSTER) __launch_bounds__(128 * (Config::kWarpgroups + 1), 1)
    gemm_fp8_rowwise(const __grid_constant__ OperandMaps maps, void* out, const void* bias, int bias_type,
                     const float* a_scale_inv, int a_step, const float* b_scale_inv, int b_step, int m, int n, int k,
                     int tile_count) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const Gemm::Tiles tiles(m, n, tile_count);
    const int k_blocks = (k + Gemm::kBlockK - 1) / Gemm::kBlockK;
    const auto producing = [&] {
        Gemm::produce<Config::kProducers>(maps, shared, tiles, 0, k_blocks, m, n, [&](const Tile& tile, int kb) {
            if constexpr (Config::kAccumulate)
                Gemm::prefetch_part<Epilogue::kFP32 ? 4 : 2>(out, tile, kb, k_blocks, m, n);
        });
    };
    const auto consuming = [&] {
        Epilogue epilogue(out, bias, bias_type, m, n, {a_scale_inv, a_step}, {b_scale_inv, b_step});
        Loop mainloop(shared, k_blocks);
        consume<Gemm::kAcc>(mainloop, epilogue);
    };
    run_block<Gemm::Map, 232, 40>(shared, maps.a, maps.b, producing, consuming, [&] {
        if (Config::kProducers > 1 && threadIdx.x / 32 % 4 < Config::kProducers && elect_one()) producing();
    });
}
