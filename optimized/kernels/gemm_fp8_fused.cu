// FP8 GEMM with what follows it in one kernel. A [M, K], B [N, K] FP8; acc = A B^T, s = fp32(a_scale_inv b_scale_inv)
//
//   EPILOGUE 1   T(acc * s + bias), its activation to FP8, transposed copy, amax             gemm_activation.cuh
//            2   T(acc * s) times an activation's derivative, to FP8 likewise, column sums   gemm_activation.cuh
//            3   T(acc * s) + bias, dropout, + residual                                      gemm_dropout.cuh
//
// Each gives the bits of gemm_fp8.cu followed by the kernel that it takes the place of: T, 16 bits, is where they part.
// acc is fast (1, 3: SPLIT 0) or split (2: SPLIT 1), as in gemm_fp8.cu, by the same main loops (gemm_fp8_mainloop.cuh).
// What follows runs beside the tensor cores' work on the next tile: 1 and 3 in the consumers, a step behind each of its
// first k-blocks ("deferred", gemm_mainloop.cuh), of which the host sees that there are as many; 2, where split
// accumulation has no registers for that, in seven other warps (gemm_handoff.cuh), for which shared memory holds a tile
// in 16 bits. The bias (gemm_bias.cuh) and dropout's mask (gemm_mask.cuh) come from warps that have nothing to copy.
//
// Defines: EPILOGUE (and that header's), STEPS (k-blocks over which it is spread), WIDE (1 bf16, 2 fp16: T),
// OUT (BF16 | FP16, the same), and those of gemm_fp8.cu; B_HALVES 2 where EPILOGUE 1 is gated.
#if EPILOGUE == 2
#define ALTERNATING_N 64  // the other warps need the registers
#else
#define RASTER_ROWS 16
#endif
#include "gemm_fp8_mainloop.cuh"
#if EPILOGUE == 3
#include "gemm_dropout.cuh"
#else
#include "gemm_activation.cuh"
#endif

using namespace twin;

#if EPILOGUE == 2
constexpr int kBehind = 2, kConsumer = 160, kOthers = 96;  // warpgroups behind the consumers; registers of a thread
#else
constexpr int kBehind = 1;
constexpr int kConsumer = EPILOGUE == 1 ? 232 : BLOCK_N == 256 ? 224 : 208, kOthers = 504 - 2 * kConsumer;
#endif

extern "C" __global__ void TWIN_CLUSTER __launch_bounds__(128 * (WARPGROUPS + kBehind), 1)
    gemm_fp8_fused(const __grid_constant__ Operands operands,
                   const __grid_constant__ Epilogue epilogue, const float* a_scale_inv, const float* b_scale_inv, int m,
                   int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const Tiles tiles(m, n / kHalves);
    const int k_blocks = (k + kBlockK - 1) / kBlockK;
    const Issue issue{shared + Map::kA + warpgroup_index() * 64 * kStageRowBytes, shared + Map::kB};
    const auto producing = [&] {
        produce(operands, shared, tiles, 0, k_blocks, m, n, [&](const Tile& tile, int kb) {
#if EPILOGUE == 2
            for (int half = 0; half < HALVES; half++)
                prefetch_part<2>(epilogue.h + half * n, tile, kb, k_blocks, m, static_cast<size_t>(HALVES) * n);
#endif
        });
    };
#if EPILOGUE == 2
    if (threadIdx.x == 0) init_handoff(shared);
    const auto consuming = [&] {
        Position stage;
        unsigned parity = 0;
        int blocks = k_blocks;
        asm volatile("" : "+r"(blocks));  // or ptxas, for want of registers, computes it from k between two wgmma
        bool last;
        do {
            last = wait_for_tile<Map>(shared, stage).last;
            float acc[kAcc];
            split_tile(acc, shared, issue, stage, blocks, !last);
            const float scale = __fmul_rn(*a_scale_inv, *b_scale_inv);  // here, for want of a register
            scale_tile(acc, scale);
            unsigned words[kAcc / 2];
            pack_tile<OUT, kRun>(words, acc);
            hand_over(words, memory, parity);
            parity ^= 1;
        } while (!last);
    };
    const auto finishing = [&] { finish_tiles(epilogue, memory, tiles, m, n); };
#else
    const auto consuming = [&] {
        const float scale = __fmul_rn(*a_scale_inv, *b_scale_inv);
        Deferred after(epilogue, memory, m, n);
        const int every = EPILOGUE == 3 ? k_blocks / kSteps : 1;  // k-blocks from step to step; for 1 a loop costs more
        Position stage;
        unsigned words[kAcc / 2];
        bool pending = false;
        Tile tile;
        do {
            tile = wait_for_tile<Map>(shared, stage);
            float acc[kAcc];
            int kb = 0, previous = 0;
            if (pending) {
#pragma unroll
                for (int s = 0; s < kSteps; s++) {
#pragma unroll 1
                    for (int end = kb + every; kb < end; kb++)
                        chain_block<Map, CLUSTER>(acc, shared, stage, previous, kb == 0, issue);
                    after.step(words, s);
                }
            } else {
                chain_block<Map, CLUSTER>(acc, shared, stage, previous, kb++ == 0, issue);
            }
            finish_chain<Map, CLUSTER>(acc, shared, stage, k_blocks, issue, kb, previous);
            scale_tile(acc, scale);
            after.add(acc);
            pack_tile<OUT, kRun>(words, acc);
            after.begin(tile);
            pending = true;
        } while (!tile.last);
        park(memory, words);
        after.finish();
        after.end();
    };
    if (threadIdx.x == 0) init_given(shared);
    const auto finishing = [&] { give(epilogue, memory, tiles, n); };
#endif
    run_block<Map, kStages, CLUSTER, WARPGROUPS, kConsumer, kOthers>(shared, operands.a, operands.b, producing, consuming,
                                                                     finishing);
}
