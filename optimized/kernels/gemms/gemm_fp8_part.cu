// A part of an FP8 GEMM along K.   acc[M, N] = the accumulators after A[M, K] B[N, K]^T, from start[M, N] or +0; fp32
//
//   without OUT   out = acc
//   with it       out = round(fp32(fp32(acc * fp32(a_scale_inv * b_scale_inv)) + bias))       the last part: end_gemm.cu
//
// A, B row-major FP8 (E4M3 or E5M2 each), K and N multiples of 16, M any. The additions are those of gemm_fp8.cu:
//   fast  (OneChain): one chain over K, whose first C is start
//   split (Added): chains of K = 128, each added to what begins as start, rounded once
// So parts of a K that is cut at multiples of 32 (fast) or 128 (split) have the words of the whole. What lies after the
// end of K arrives as zeros; a step of zero products leaves the C of an earlier step unchanged.
//
// Tiles, roles and registers are those of gemm_fp8.cu. A tile's accumulators are loaded before its first k-block, and
// stored as they are, or with what ends a GEMM: at once, since the words of a tile that waits would take registers from
// the next one's start. Without OUT out may be start: a thread stores what it has loaded.
//
// Defines: OUT (none | BF16 | FP16 | FP32); A_FORMAT, B_FORMAT (E4M3 | E5M2), PROMOTION (OneChain | Added), WARPGROUPS,
// BLOCK_N, NARROW, STAGES, CLUSTER, ACROSS as in gemm_fp8.cu.
#include "gemm_fp8_mainloop.cuh"
#include "gemm_accumulate.cuh"

using namespace twin;

struct Config : GemmDefaults {
    using A = A_FORMAT;
    using B = B_FORMAT;
#ifdef OUT
    using Out = OUT;
#else
    using Out = FP32;
#endif
    using Promotion = PROMOTION;
    static constexpr bool kContinues = true, kAcross = ACROSS;
    static constexpr int kWarpgroups = WARPGROUPS, kBlockN = BLOCK_N, kNarrow = NARROW;
    static constexpr int kStages = STAGES, kCluster = CLUSTER, kRun = 4;
    static constexpr int kStageBlocks = Promotion::kPromotes && kWarpgroups == 1 && kBlockN <= 64 ? 2 : 1;
    static constexpr int kProducers = kWarpgroups == 1 ? 4 : 1;
};
using Gemm = GemmFP8<Config>;
using Loop = Continued<Config::Promotion::Mainloop<Gemm>>;

// The epilogue of the last part: tiles begin as those of SumStore, and end as those of a whole GEMM.
template <class Out, int kRun, int kAcc>
struct EndStore : ScaleBiasStore<Out, kRun, kAcc, false, false> {
    using Whole = ScaleBiasStore<Out, kRun, kAcc, false, false>;

    const float* start;

    __device__ __forceinline__ EndStore(void* out, const float* start, const void* bias, int bias_type, int m, int n)
        : Whole(out, bias, bias_type, m, n), start(start) {}
    __device__ __forceinline__ void begin(float (&acc)[kAcc], const Tile& tile) const {
        load_sums<kRun>(acc, start, tile.row + this->row, tile.column + this->column, this->m, this->n, tile.end);
    }
};

extern "C" __global__ void TWIN_CLUSTER(CLUSTER) __launch_bounds__(128 * (Config::kWarpgroups + 1), 1)
    gemm_fp8_part(const __grid_constant__ OperandMaps maps,
#ifdef OUT
                  void* out, const float* start, const void* bias, int bias_type, const float* a_scale_inv,
                  const float* b_scale_inv,
#else
                  float* out, const float* start,
#endif
                  int m, int n, int k, int tile_count) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const Gemm::Tiles tiles(m, n, tile_count);
    const int k_blocks = (k + Gemm::kBlockK - 1) / Gemm::kBlockK;
    const auto producing = [&] { Gemm::produce<Config::kProducers>(maps, shared, tiles, 0, k_blocks, m, n); };
    const auto consuming = [&] {
#ifdef OUT
        EndStore<Config::Out, Config::kRun, Gemm::kAcc> epilogue(out, start, bias, bias_type, m, n);
        epilogue.scale = __fmul_rn(*a_scale_inv, *b_scale_inv);
#else
        SumStore<Config::kRun, Gemm::kAcc> epilogue(out, start, m, n);
#endif
        Loop mainloop(shared, k_blocks);
        consume<Gemm::kAcc>(mainloop, epilogue);
    };
    run_block<Gemm::Map, 232, 40>(shared, maps.a, maps.b, producing, consuming, [&] {
        if (Config::kProducers > 1 && threadIdx.x / 32 % 4 < Config::kProducers && elect_one()) producing();
    });
}
