// A part of a 16-bit GEMM along K.   out[M, N] = the accumulators after A[M, K] B[N, K]^T, from start[M, N] or +0; fp32
//
// A, B as in gemm.cu, whose tiles, roles and chain these are; the chain's first C is start. So parts of a K that is cut at
// multiples of 16 have the words of the whole. out may be start: a thread stores what it has loaded.
//
// Defines: FORMAT (BF16 | FP16), TRANSPOSE_A, TRANSPOSE_B, WARPGROUPS, BLOCK_N, NARROW, STAGES, CLUSTER as there.
#include "gemm_16.cuh"
#include "gemm_accumulate.cuh"

using namespace twin;

struct Config {
    using Format = FORMAT;
    using Out = FP32;
    static constexpr bool kTransposeA = TRANSPOSE_A, kTransposeB = TRANSPOSE_B, kAccumulate = false, kEarly = false;
    static constexpr int kWarpgroups = WARPGROUPS, kBlockN = BLOCK_N, kNarrow = NARROW;
    static constexpr int kStages = STAGES, kCluster = CLUSTER;
};
using Gemm = Gemm16<Config>;

// A tile's first k-block adds to its accumulators, too.
struct Issue : Gemm::Issue {
    using Gemm::Issue::Issue;

    template <int kCount>
    __device__ __forceinline__ void operator()(float (&acc)[kCount], int stage, bool) const {
        Gemm::Issue::operator()(acc, stage, false);
    }
};
using Loop = Continued<FastMainloop<Gemm::Map, Issue, Gemm::kNarrow>>;

// The epilogue: sums as they are. A thread has pairs of columns.
struct PairStore {
    static constexpr int kAcc = Gemm::kAcc, kSteps = 1;
    static constexpr bool pending = false;
    struct Loaded {};

    float* out;
    const float* start;
    int m, n, row, column;  // of a tile, the thread's first

    __device__ __forceinline__ PairStore(float* out, const float* start, int m, int n)
        : out(out), start(start), m(m), n(n) {
        const int lane = threadIdx.x % 32;
        row = threadIdx.x / 32 * 16 + lane / 4;
        column = 2 * (lane % 4);
    }
    __device__ __forceinline__ void load_ahead(Loaded&, const Tile&) const {}
    __device__ __forceinline__ void step(int) const {}
    __device__ __forceinline__ void finish() const {}

    __device__ __forceinline__ void begin(float (&acc)[kAcc], const Tile& tile) const {
#pragma unroll
        for (int i = 0; i < kAcc; i += 2) {
            const int its_row = tile.row + row + 8 * (i / 2 % 2), its_column = tile.column + column + i / 4 * 8;
            const bool exists = start != nullptr && its_row < m && its_column < tile.end;
            const float* from = start + static_cast<long long>(its_row) * n + its_column;
            if (n % 2 == 0) {
                unsigned words[2];
                load_if(words, from, exists);
                acc[i] = __uint_as_float(words[0]), acc[i + 1] = __uint_as_float(words[1]);
            } else {  // rows begin in the middle of a pair
                acc[i] = exists ? from[0] : 0.0f;
                acc[i + 1] = exists && its_column + 1 < tile.end ? from[1] : 0.0f;
            }
        }
    }
    __device__ __forceinline__ void take(float (&acc)[kAcc], Loaded&, const Tile& tile) const {
        Gemm::store_fp32_pairs(acc, destination<4>(out, tile.row + row, tile.column + column, m, n, tile.end));
    }
};

extern "C" __global__ void TWIN_CLUSTER(CLUSTER) __launch_bounds__(128 * (Config::kWarpgroups + 1), 1)
    gemm_part(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, float* out,
              const float* start, int m, int n, int k, int tile_count) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const Gemm::Tiles tiles(m, n, tile_count);
    const int k_blocks = (k + Gemm::kBlockK - 1) / Gemm::kBlockK;
    const auto producing = [&] { Gemm::produce(&a_map, &b_map, shared, tiles, k_blocks); };
    const auto consuming = [&] {
        PairStore epilogue(out, start, m, n);
        Loop mainloop(shared, k_blocks);
        consume<Gemm::kAcc>(mainloop, epilogue);
    };
    run_block<Gemm::Map, 232, 40>(shared, a_map, b_map, producing, consuming);
}
