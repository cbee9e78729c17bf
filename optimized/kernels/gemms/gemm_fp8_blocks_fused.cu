// FP8 GEMM of operands with a scale for each block of 128 along K (gemm_fp8_blocks.cu), and its layer's next operations.
//
//   x = T(acc),   out = T( T( dropout( T( x + bias ) ) ) + residual )          T: 16 bits; gemm_dropout.cuh
//
// It gives the bits of gemm_fp8_blocks.cu without a bias, followed by kernels/random/dropout.cu.
//
// Split accumulation leaves no registers for a tile that waits, so the consumers finish it before the next one
// (gemm_dropout_at_once.cuh). The producer's three idle warps draw the mask and fetch the bias, so one warp copies in
// small tiles, too.
//
// Defines: those of gemm_fp8_blocks.cu without ACCUMULATE, and DROP (0: nothing is dropped).
#include "gemm_dropout_at_once.cuh"
#include "gemm_fp8_blocks.cuh"

using namespace twin;

struct Config : GemmDefaults {
    using A = A_FORMAT;
    using B = B_FORMAT;
    using Out = OUT;
    using Promotion = Scaled<64 * WARPGROUPS, RUN, SQUARE_A, SQUARE_B>;
    using Copies = ScaleCopies<64 * WARPGROUPS, BLOCK_N, SQUARE_A, SQUARE_B>;
    static constexpr int kBesideBytes = Copies::kBytes;
    static constexpr int kWarpgroups = WARPGROUPS, kBlockN = BLOCK_N, kNarrow = NARROW;
    static constexpr int kStages = STAGES, kCluster = 1, kRun = RUN;
    static constexpr bool kDrop = DROP;
};
using Gemm = GemmFP8<Config>;
using Loop = SplitMainloop<Gemm>;
using Epilogue = BiasDropoutAddAtOnce<Gemm>;
static_assert(Gemm::Map::kBytes + sizeof(Epilogue::Shared) <= 232448, "a block has at most 227 KB of shared memory");

extern "C" __global__ void __launch_bounds__(128 * (Config::kWarpgroups + 1), 1)
    gemm_fp8_blocks_fused(const __grid_constant__ OperandMaps maps, unsigned short* out, const unsigned short* bias,
                          int bias_type, const unsigned short* residual, const unsigned long long* rng_state,
                          unsigned threshold, float keep_scale, const float* a_scale_inv, int a_stride,
                          const float* b_scale_inv, int b_stride, int m, int n, int k, int tile_count) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    auto& epilogue_shared = *reinterpret_cast<Epilogue::Shared*>(memory + Gemm::Map::kBytes);
    const Epilogue::Arguments arguments{out, bias, residual, rng_state, threshold, keep_scale};
    const Gemm::Tiles tiles(m, n, tile_count);
    const int k_blocks = (k + Gemm::kBlockK - 1) / Gemm::kBlockK;
    const Config::Copies scales{shared + Gemm::Map::kBeside, {a_scale_inv, a_stride}, {b_scale_inv, b_stride}, m, n};
    const auto producing = [&] {
        Gemm::produce(
            maps, shared, tiles, 0, k_blocks, m, n,
            [&](const Tile& tile, int kb) {
                if (residual != nullptr) Gemm::prefetch_part<2>(residual, tile, kb, k_blocks, m, n);
            },
            scales);
    };
    const auto consuming = [&] {
        Epilogue epilogue(arguments, epilogue_shared, m, n);
        Loop mainloop(shared, k_blocks);
        consume<Gemm::kAcc>(mainloop, epilogue);
    };
    if (threadIdx.x == 0) Epilogue::init(epilogue_shared);
    run_block<Gemm::Map, Epilogue::kConsumerRegisters, 504 - 2 * Epilogue::kConsumerRegisters>(
        shared, maps.a, maps.b, producing, consuming, [&] { Epilogue::assist(arguments, epilogue_shared, tiles, n); });
}
