// FP8 GEMM with its layer's next operations fused into the epilogue. A [M, K], B [N, K] FP8; acc = A B^T, fast;
// s = fp32(a_scale_inv b_scale_inv)
//
//   EPILOGUE   BiasActivation   T(acc * s + bias), its activation to FP8, transposed copy, amax   gemm_activation.cuh
//              BiasDropoutAdd   T(acc * s) + bias, dropout, + residual                            gemm_dropout.cuh
//
// Each gives the bits of gemm_fp8.cu, which rounds to T (16 bits), followed by the kernel that it replaces.
//
// The consumers run the epilogue in steps beside the k-blocks of the next tile. The producer's three idle warps put
// what it reads into shared memory, after the stages (mailbox.cuh).
//
// Defines: EPILOGUE, STEPS (k-blocks over which it is spread), DROP (0: nothing is dropped), OUT (BF16 | FP16: T), of
// gemm_fp8.cu A_FORMAT, B_FORMAT, WARPGROUPS, BLOCK_N, STAGES, CLUSTER and RUN, and B_HALVES (2 where BiasActivation is
// gated, else 1), EARLY as there. BiasActivation: WIDE (1 bf16, 2 fp16: T), KIND (activation.cuh) and FP8 (quantize.cuh).
#include "gemm_dropout.cuh"
#ifndef EARLY
#define EARLY 0
#endif
#ifdef KIND  // BiasActivation: what it includes is compiled for one KIND
#include "gemm_activation.cuh"
#endif

using namespace twin;

struct Config : GemmDefaults {
    using A = A_FORMAT;
    using B = B_FORMAT;
    using Out = OUT;
    using Promotion = OneChain;
    static constexpr int kWarpgroups = WARPGROUPS, kBlockN = BLOCK_N, kNarrow = BLOCK_N;
    static constexpr int kStages = STAGES, kCluster = CLUSTER, kRun = RUN, kBHalves = B_HALVES, kRasterRows = 16;
    static constexpr int kSteps = STEPS;
    static constexpr bool kDrop = DROP, kEarly = EARLY;
};
using Gemm = GemmFP8<Config>;
using Epilogue = EPILOGUE<Gemm>;
constexpr int kSharedBytes = Gemm::Map::kBytes + sizeof(Epilogue::Shared);
static_assert(kSharedBytes <= 232448, "a block has at most 227 KB of shared memory");

extern "C" __global__ void TWIN_CLUSTER(CLUSTER) __launch_bounds__(128 * (Config::kWarpgroups + 1), 1)
    gemm_fp8_fused(const __grid_constant__ OperandMaps maps, const __grid_constant__ Epilogue::Arguments arguments,
                   const float* a_scale_inv, const float* b_scale_inv, int m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    auto& epilogue_shared = *reinterpret_cast<Epilogue::Shared*>(memory + Gemm::Map::kBytes);
    const Gemm::Tiles tiles(m, n / Gemm::kBHalves);
    const int k_blocks = (k + Gemm::kBlockK - 1) / Gemm::kBlockK;
    if constexpr (Config::kEarly) let_next_grid_start();
    SteppedMainloop<Gemm> mainloop(shared, k_blocks);
    const auto producing = [&] { Gemm::produce(maps, shared, tiles, 0, k_blocks, m, n); };
    const auto consuming = [&] {
        if constexpr (Config::kEarly) wait_for_grid_before();
        const float scale = __fmul_rn(*a_scale_inv, *b_scale_inv);
        Epilogue epilogue(arguments, epilogue_shared, memory, scale, m, n, k_blocks);
        consume<Gemm::kAcc>(mainloop, epilogue);
    };
    if (threadIdx.x == 0) Epilogue::init(epilogue_shared);
    run_block<Gemm::Map, Epilogue::kConsumerRegisters, 504 - 2 * Epilogue::kConsumerRegisters>(
        shared, maps.a, maps.b, producing, consuming, [&] {
            if constexpr (Config::kEarly) wait_for_grid_before();
            Epilogue::assist(arguments, epilogue_shared, tiles, n);
        });
}
