// A part along K of an FP8 GEMM whose operands have a scale for each block of 128.
// out[M, N] = acc, from start[M, N] or +0; for each block of K in order acc is promoted as gemm_fp8_blocks.cuh says; fp32
//
// A, B and their scales as in gemm_fp8_blocks.cu, whose tiles and roles these are. So parts of a K that is cut at
// multiples of 128 have the words of the whole. out may be start: a thread stores what it has loaded.
//
// Defines: A_FORMAT, B_FORMAT (E4M3 | E5M2), SQUARE_A, SQUARE_B, WARPGROUPS, BLOCK_N, NARROW, STAGES as there.
#include "gemm_fp8_blocks.cuh"
#include "gemm_accumulate.cuh"

using namespace twin;

struct Config : GemmDefaults {
    using A = A_FORMAT;
    using B = B_FORMAT;
    using Out = FP32;
    using Promotion = Scaled<64 * WARPGROUPS, 4, SQUARE_A, SQUARE_B>;
    using Copies = ScaleCopies<64 * WARPGROUPS, BLOCK_N, SQUARE_A, SQUARE_B>;
    static constexpr int kBesideBytes = Copies::kBytes;
    static constexpr bool kContinues = true;
    static constexpr int kWarpgroups = WARPGROUPS, kBlockN = BLOCK_N, kNarrow = NARROW;
    static constexpr int kStages = STAGES, kCluster = 1, kRun = 4;
    static constexpr int kProducers = kWarpgroups == 1 ? 4 : 1;
};
using Gemm = GemmFP8<Config>;
using Loop = Continued<SplitMainloop<Gemm>>;

extern "C" __global__ void __launch_bounds__(128 * (Config::kWarpgroups + 1), 1)
    gemm_fp8_blocks_part(const __grid_constant__ OperandMaps maps, float* out, const float* start,
                         const float* a_scale_inv, int a_stride, const float* b_scale_inv, int b_stride, int m, int n,
                         int k, int tile_count) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const Gemm::Tiles tiles(m, n, tile_count);
    const int k_blocks = (k + Gemm::kBlockK - 1) / Gemm::kBlockK;
    const Config::Copies scales{shared + Gemm::Map::kBeside, {a_scale_inv, a_stride}, {b_scale_inv, b_stride}, m, n};
    const auto producing = [&] {
        Gemm::produce<Config::kProducers>(maps, shared, tiles, 0, k_blocks, m, n, Nothing{}, scales);
    };
    const auto consuming = [&] {
        SumStore<Config::kRun, Gemm::kAcc> epilogue(out, start, m, n);
        Loop mainloop(shared, k_blocks);
        consume<Gemm::kAcc>(mainloop, epilogue);
    };
    constexpr bool kThree = Config::kWarpgroups == 3;
    run_block<Gemm::Map, kThree ? 160 : 232, kThree ? 32 : 40>(shared, maps.a, maps.b, producing, consuming, [&] {
        if (Config::kProducers > 1 && threadIdx.x / 32 % 4 < Config::kProducers && elect_one()) producing();
    });
}
