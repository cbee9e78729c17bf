// 16-bit GEMM.   out[M, N] = round(fp32(acc + bias)),   acc = A[M, K] B[N, K]^T
//
// A, B bf16 or fp16 (both the same), each K-major (row-major) or MN-major (a transposed view); the tensor core reads
// both from shared memory, so a transposed view costs no copy. Any M, N, K. out bf16, fp16 or fp32. acc is one chain
// over K in steps of k = 16 from +0, in order (docs/numerics.md); What lies after the end of K arrives as zeros, and a
// step of zero products leaves its C unchanged. No tile shape changes a bit of the result. ACCUMULATE: out =
// round(fp32(out) + acc), without a bias.
//
// One persistent block per multiprocessor, as in gemm_fp8.cu. An MN-major operand lies in shared memory as chunks of 64
// rows of M (or N): [64 k][64 m], 8 KB, swizzled by 128 bytes.
//
// Defines: FORMAT (BF16 | FP16), OUT (BF16 | FP16 | FP32), TRANSPOSE_A, TRANSPOSE_B (1: MN-major), ACCUMULATE (0 | 1),
// WARPGROUPS (1 | 2), BLOCK_N, NARROW (of some tiles: gemm_tile.cuh), STAGES, CLUSTER (1, or 2 blocks that share B),
// EARLY (0 | 1: at most one tile of rows, neither transposed; the kernel may be launched early if nobody writes B).
#include "gemm_16.cuh"
#ifndef EARLY
#define EARLY 0
#endif

using namespace twin;

struct Config {
    using Format = FORMAT;
    using Out = OUT;
    static constexpr bool kTransposeA = TRANSPOSE_A, kTransposeB = TRANSPOSE_B, kAccumulate = ACCUMULATE;
    static constexpr int kWarpgroups = WARPGROUPS, kBlockN = BLOCK_N, kNarrow = NARROW;
    static constexpr int kStages = STAGES, kCluster = CLUSTER;
    static constexpr bool kEarly = EARLY;
};

extern "C" __global__ void TWIN_CLUSTER(CLUSTER) __launch_bounds__(128 * (Config::kWarpgroups + 1), 1)
    gemm(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, void* out,
         const void* bias, int bias_type, int m, int n, int k, int tile_count) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Gemm16<Config>::run(shared_address(memory), a_map, b_map, out, bias, bias_type, m, n, k, tile_count);
}
