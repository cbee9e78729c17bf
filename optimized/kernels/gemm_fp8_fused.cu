// FP8 GEMM with what follows it in one kernel.   A [M, K], B [N, K] FP8;   acc = A B^T, s = fp32(a_scale_inv * b_scale_inv)
//
//   EPILOGUE 1   T(acc * s + bias), its activation to FP8, transposed copy, amax             gemm_activation.cuh
//            2   T(acc * s) times an activation's derivative, to FP8 likewise, column sums   gemm_activation.cuh
//            3   T(acc * s) + bias, dropout, + residual                                      gemm_dropout.cuh
//
// Each gives the bits of gemm_fp8.cu followed by the kernel that it takes the place of: T, 16 bits, is where they part.
// acc is fast (1, 3: SPLIT 0) or split (2: SPLIT 1), as in gemm_fp8.cu, by the same main loops (gemm_fp8_mainloop.cuh).
// The consumers hand their tiles to three warps of the producer's warpgroup (gemm_handoff.cuh), which do what follows
// while the tensor cores work on the next tile; for that, shared memory holds a tile in 16 bits and a stage less.
//
// Defines: EPILOGUE (and that header's), WIDE (1 bf16, 2 fp16: T), OUT (BF16 | FP16, the same), and those of gemm_fp8.cu;
// B_HALVES 2 where EPILOGUE 1 is gated.
#include "gemm_fp8_mainloop.cuh"
#if EPILOGUE == 3
#include "gemm_dropout.cuh"
#else
#include "gemm_activation.cuh"
#endif

using namespace twin;

// Registers of a thread: all that the consumers' accumulators need, and the rest of 504 for the three warps.
constexpr int kConsumer = SPLIT ? 200 : 176;

extern "C" __global__ void TWIN_CLUSTER __launch_bounds__(128 * (WARPGROUPS + 1), 1)
    gemm_fp8_fused(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                   const __grid_constant__ Epilogue epilogue, const float* a_scale_inv, const float* b_scale_inv, int m,
                   int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const Tiles tiles(m, n / kHalves);
    const int k_blocks = (k + kBlockK - 1) / kBlockK;
    if (threadIdx.x == 0) init_handoff(shared);
    const auto producing = [&] { produce(&a_map, &b_map, shared, tiles, k_blocks, n / 2); };
    const auto finishing = [&] { finish_tiles(epilogue, memory, tiles, m, n); };
    const auto consuming = [&] {
        const int column = threadIdx.x % 4 * kRun;
        const Issue issue{shared + Map::kA + warpgroup_index() * 64 * kStageRowBytes, shared + Map::kB};
        Position stage;
        unsigned parity = 0;
        if (SPLIT) mbarrier_wait(shared + Map::kFull, 0);  // every block has a tile
        for (int index = tiles.first(); index < tiles.count(); index += tiles.step(), parity ^= 1) {
            float acc[kAcc];
            if constexpr (SPLIT)
                split_tile(acc, shared, issue, stage, k_blocks, index + tiles.step() < tiles.count());
            else
                chain_tile<Map, CLUSTER>(acc, shared, stage, k_blocks, issue);
            const float scale = __fmul_rn(*a_scale_inv, *b_scale_inv);  // here, for want of a register
#if EPILOGUE == 1
            scale_and_bias<kRun, kHalves>(acc, scale, epilogue.bias, static_cast<int>(epilogue.bias_type),
                                          tiles[index].column + column, n);
#else
            scale_and_bias<kRun, kHalves>(acc, scale, nullptr, kNoBias, column, n);
#endif
            unsigned words[kAcc / 2];
            pack_tile<OUT, kRun>(words, acc);
            hand_over(words, memory, parity);
        }
    };
    run_block<Map, kStages, CLUSTER, WARPGROUPS, kConsumer, 504 - 2 * kConsumer>(shared, a_map, b_map, producing,
                                                                                 consuming, finishing);
}
