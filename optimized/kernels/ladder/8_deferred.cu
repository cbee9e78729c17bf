// Rung 8: a tile is stored while the next one is computed.
//
//   D[M, N] = bf16(A[M, K] B[N, K]^T)     A, B E4M3, row-major; M % 256 = N % 256 = K % 1024 = 0; grid: multiprocessors
//
// In the rungs before, the tensor core stands still while a tile is rounded and stored. Rounded to bf16, the 128
// accumulators of a thread fill 64 registers, and there is room for those beside the next tile's accumulators. So the
// consumers pack a tile, start the next one at once, and store a run of 8 columns in both rows after each of its first
// 8 k-blocks, while wgmma runs.
//
// This is the design of the production kernel, ../gemm_fp8.cu, which adds scales, bias, other formats, ragged edges,
// split accumulation and smaller tiles.
#include "ptx/cluster.cuh"
#include "ptx/cvt.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace twin;

constexpr int kBlockM = 128, kBlockN = 256, kBlockK = 128, kStages = 4, kCluster = 2;
constexpr int kBand = 8 / kCluster;
constexpr int kABytes = kBlockM * kBlockK, kBBytes = kBlockN * kBlockK;
constexpr int kB = kStages * kABytes, kFull = kB + kStages * kBBytes, kEmpty = kFull + 8 * kStages;
constexpr int kGroups = kBlockN / 32;  // runs of 8 columns that a thread owns in each of its two rows

struct Tile {
    int row, column;
};

__device__ __forceinline__ Tile tile_at(int index, int tiles_m, int tiles_n, int rank) {
    const int top = index / (kBand * tiles_n) * kBand;
    const int rows = min(kBand, tiles_m - top), rest = index - top * tiles_n;
    return {((top + rest % rows) * kCluster + rank) * kBlockM, rest / rows * kBlockN};
}

__device__ __forceinline__ void release(unsigned shared, unsigned stage) {
    const unsigned lane = threadIdx.x % 32;
    if (lane < kCluster) mbarrier_arrive_cluster(map_to_rank(shared + kEmpty + 8 * stage, lane));
}

// Wait for the stage, issue its four wgmma, and hand back the stage before it.
__device__ __forceinline__ void multiply(float (&acc)[kBlockN / 2], unsigned shared, int warpgroup, unsigned step,
                                         bool first) {
    const unsigned stage = step % kStages, parity = step / kStages % 2;
    mbarrier_wait(shared + kFull + 8 * stage, parity);
    const auto a = wgmma_descriptor(shared + stage * kABytes + warpgroup * (kABytes / 2), 0, 1024);
    const auto b = wgmma_descriptor(shared + kB + stage * kBBytes, 0, 1024);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_k32<E4M3, E4M3>(acc, a + 2 * i, b + 2 * i, !first || i > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (!first) release(shared, (step - 1) % kStages);
}

// Run g of a packed tile, in both rows. `to` is the thread's first column in its first row.
__device__ __forceinline__ void store_run(const unsigned (&words)[kBlockN / 4], int g, uint4* to, int n) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const unsigned* w = words + 8 * g + 4 * h;
        to[static_cast<long long>(8 * h) * n / 8 + 4 * g] = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    rung(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, uint4* out, int m, int n,
         int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const int tiles_m = m / (kBlockM * kCluster), tiles_n = n / kBlockN, k_blocks = k / kBlockK;
    const int rank = cluster_rank(), cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; s++) {
            mbarrier_init(shared + kFull + 8 * s, 1);
            mbarrier_init(shared + kEmpty + 8 * s, 8 * kCluster);
        }
        fence_mbarrier_init();
    }
    cluster_arrive();
    cluster_wait();

    unsigned step = 0;
    if (threadIdx.x >= 256) {
        setmaxnreg_dec<40>();
        const int half = kBlockN / kCluster * rank;
        for (int index = cluster; threadIdx.x == 256 && index < tiles_m * tiles_n; index += clusters) {
            const Tile tile = tile_at(index, tiles_m, tiles_n, rank);
            for (int kb = 0; kb < k_blocks; kb++, step++) {
                const unsigned stage = step % kStages, parity = step / kStages % 2, full = shared + kFull + 8 * stage;
                const unsigned b = shared + kB + stage * kBBytes + half * kBlockK;
                mbarrier_wait(shared + kEmpty + 8 * stage, parity ^ 1);
                mbarrier_arrive_expect_tx(full, kABytes + kBBytes);
                tma_load_2d(shared + stage * kABytes, &a_map, full, kb * kBlockK, tile.row);
                tma_load_5d_multicast(b, &b_map, full, 0b11, kb * kBlockK, 0, 0, 0, (tile.column + half) / 32);
            }
        }
    } else {
        setmaxnreg_inc<232>();
        const int lane = threadIdx.x % 32;
        const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
        unsigned words[kBlockN / 4];  // the tile before, packed; stored while `to` says where
        uint4* to = nullptr;
        for (int index = cluster; index < tiles_m * tiles_n; index += clusters) {
            float acc[kBlockN / 2];
#pragma unroll
            for (int kb = 0; kb < kGroups; kb++, step++) {
                multiply(acc, shared, warpgroup, step, kb == 0);
                if (to != nullptr) store_run(words, kb, to, n);
            }
            for (int kb = kGroups; kb < k_blocks; kb++, step++) multiply(acc, shared, warpgroup, step, false);
            wgmma_wait<0>();
            wgmma_hold(acc);
            release(shared, (step - 1) % kStages);

#pragma unroll
            for (int i = 0; i < kBlockN / 4; i++) {  // word i of run g = i / 8, row h, columns 2 j and 2 j + 1
                const int g = i / 8, h = i / 4 % 2, j = i % 4;
                words[i] = cvt_bf16x2(acc[16 * g + 4 * j + 2 * h], acc[16 * g + 4 * j + 2 * h + 1]);
            }
            const Tile tile = tile_at(index, tiles_m, tiles_n, rank);
            const int row = tile.row + threadIdx.x / 32 * 16 + lane / 4, column = tile.column + 8 * (lane % 4);
            to = out + (static_cast<long long>(row) * n + column) / 8;
        }
        if (to != nullptr) {
#pragma unroll
            for (int g = 0; g < kGroups; g++) store_run(words, g, to, n);
        }
    }
    cluster_arrive_relaxed();
    cluster_wait();
}
