// FP8 GEMM with split accumulation for few output tiles and a long K, spread over K without changing a bit.
//
//   partial[i] = A[:, 128 i .. 128 i + 127] B[:, same]^T     chains of four wgmma from +0 (docs/numerics.md)
//   acc = ((+0 + partial[0]) + partial[1]) + ...              fp32, one rounding each, in order of K
//   out = round(fp32(fp32(acc * fp32(a_scale_inv * b_scale_inv)) + bias))
//
// A [M, K], B [N, K] FP8 row-major, K and N multiples of 16, M any; out [M, N] bf16, fp16 or fp32. The bits are those
// of gemm_fp8.cu with PROMOTION Added: the chains are independent of each other; only their additions have an order.
//   partials       computes chains on all multiprocessors and writes them to a workspace [slab][M][N] fp32: slab 0 is
//                  acc after the first `count` k-blocks, each further slab the partial of one more k-block,
//   add_in_order   adds the slabs and finishes the epilogue. It is launched early.
// It pays while the workspace, written and read, is small beside L2 (optimized/ops/gemms/gemm_fp8_split_k.py).
//
// Defines: A_FORMAT, B_FORMAT (E4M3 | E5M2), OUT (BF16 | FP16 | FP32), STAGES.
#include "gemm_fp8_mainloop.cuh"
#include "ptx/grid.cuh"

using namespace twin;

struct Config : GemmDefaults {
    using A = A_FORMAT;
    using B = B_FORMAT;
    using Out = OUT;
    using Promotion = Added;
    static constexpr int kWarpgroups = 1, kBlockN = 64, kNarrow = 64, kStages = STAGES, kCluster = 1, kRun = 4;
};
using Gemm = GemmFP8<Config>;

constexpr int kWarps = 8, kBatch = 32;  // add_in_order: warps of a block; slabs that a warp loads together

// Block (tile, part) of a grid of tiles x parts: k-blocks [part * count, (part + 1) * count) of a tile.
extern "C" __global__ void __launch_bounds__(256, 2)
    partials(const __grid_constant__ OperandMaps maps, float* workspace, int m, int n, int k_blocks, int count) {
    let_next_grid_start();
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const Gemm::Tiles tiles(m, n);
    const int begin = blockIdx.y * count, end = min(begin + count, k_blocks);
    const auto producing = [&] { Gemm::produce(maps, shared, tiles, begin, end, m, n); };
    const auto consuming = [&] {
        const int lane = threadIdx.x % 32;
        const Tile tile = tiles[tiles.first()];
        SplitMainloop<Gemm> mainloop(shared, end - begin);
        Destination to = destination<4>(workspace, tile.row + threadIdx.x / 32 * 16 + lane / 4,
                                        tile.column + lane % 4 * Gemm::kRun, m, n, tile.end);
        const auto next_slab = [&](long long slabs) {
            for (char*& pointer : to.pointer) pointer += slabs * m * n * 4;
        };
        if (begin == 0) {
            float acc[Gemm::kAcc];
            mainloop.sum(acc, false);
            store_fp32<Gemm::kRun>(acc, to);
        } else {
            next_slab(begin - count);
            mainloop.alternate([&](const float (&partial)[Gemm::kAcc], int) {
                next_slab(1);
                store_fp32<Gemm::kRun>(partial, to);
            });
        }
    };
    run_block<Gemm::Map, 0, 0>(shared, maps.a, maps.b, producing, consuming);
}

// A block takes 32 outputs. Each of its warps loads kBatch slabs, all in flight at once; then the sum goes from warp to
// warp in order of K.
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    add_in_order(const float* workspace, void* out, const void* bias, int bias_type, const float* a_scale_inv,
                 const float* b_scale_inv, int m, int n, int slabs) {
    __shared__ float sums[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long outputs = static_cast<long long>(m) * n;
    const long long index = static_cast<long long>(blockIdx.x) * 32 + lane;
    if (warp == 0) sums[lane] = 0.0f;
    wait_for_grid_before();
    for (int first = 0; first < slabs; first += kWarps * kBatch) {
        const int mine = first + warp * kBatch, count = slabs - mine;
        const float* source = workspace + mine * outputs + min(index, outputs - 1);
        float partial[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; i++, source += outputs) partial[i] = i < count ? *source : -0.0f;  // x + -0 is x
        const int turns = min(kWarps, (slabs - first + kBatch - 1) / kBatch);
        for (int turn = 0; turn < turns; turn++) {
            __syncthreads();
            if (turn != warp) continue;
            float acc = sums[lane];
#pragma unroll
            for (int i = 0; i < kBatch; i++) acc = __fadd_rn(acc, partial[i]);
            sums[lane] = acc;
        }
    }
    __syncthreads();
    if (warp > 0 || index >= outputs) return;
    float acc = __fmul_rn(sums[lane], __fmul_rn(*a_scale_inv, *b_scale_inv));
    const int column = index % n;
    if (bias_type == kBiasFP32)
        acc = __fadd_rn(acc, static_cast<const float*>(bias)[column]);
    else if (bias_type != kNoBias)
        acc = __fadd_rn(acc, widen_bias(static_cast<const unsigned short*>(bias)[column], bias_type));
    if constexpr (same_type<Config::Out, FP32>)
        static_cast<float*>(out)[index] = acc;
    else
        static_cast<unsigned short*>(out)[index] = same_type<Config::Out, BF16> ? cvt_bf16_f32(acc) : cvt_f16_f32(acc);
}
