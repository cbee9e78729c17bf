// Rung 7: two blocks share B.
//
//   D[M, N] = bf16(A[M, K] B[N, K]^T)     A, B E4M3, row-major; M % 256 = N % 256 = K % 128 = 0; grid: multiprocessors
//
// A cluster is two blocks on neighbouring multiprocessors. They compute tiles one below the other, which need the same
// rows of B: each copies half of them, into both (multicast). B leaves L2 once for two tiles. The price: a stage is
// empty only when the consumers of both blocks have read it, so the two run in step.
#include "ptx/cluster.cuh"
#include "ptx/cvt.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace twin;

constexpr int kBlockM = 128, kBlockN = 256, kBlockK = 128, kStages = 4, kCluster = 2;
constexpr int kBand = 8 / kCluster;  // in rows of clusters
constexpr int kABytes = kBlockM * kBlockK, kBBytes = kBlockN * kBlockK;
constexpr int kB = kStages * kABytes, kFull = kB + kStages * kBBytes, kEmpty = kFull + 8 * kStages;

struct Tile {
    int row, column;
};

// `rank` is the block's place in its cluster, tiles_m the rows of clusters.
__device__ __forceinline__ Tile tile_at(int index, int tiles_m, int tiles_n, int rank) {
    const int top = index / (kBand * tiles_n) * kBand;
    const int rows = min(kBand, tiles_m - top), rest = index - top * tiles_n;
    return {((top + rest % rows) * kCluster + rank) * kBlockM, rest / rows * kBlockN};
}

// This warp has read stage `stage`: tell both blocks, since both copy into it.
__device__ __forceinline__ void release(unsigned shared, unsigned stage) {
    const unsigned lane = threadIdx.x % 32;
    if (lane < kCluster) mbarrier_arrive_cluster(map_to_rank(shared + kEmpty + 8 * stage, lane));
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
    cluster_arrive();  // nobody copies into a block whose barriers are not there yet
    cluster_wait();

    unsigned step = 0;
    if (threadIdx.x >= 256) {
        setmaxnreg_dec<40>();
        const int half = kBlockN / kCluster * rank;  // the first row of B that this block copies
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
        for (int index = cluster; index < tiles_m * tiles_n; index += clusters) {
            float acc[kBlockN / 2];
            for (int kb = 0; kb < k_blocks; kb++, step++) {
                const unsigned stage = step % kStages, parity = step / kStages % 2;
                mbarrier_wait(shared + kFull + 8 * stage, parity);
                const auto a = wgmma_descriptor(shared + stage * kABytes + warpgroup * (kABytes / 2), 0, 1024);
                const auto b = wgmma_descriptor(shared + kB + stage * kBBytes, 0, 1024);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; i++) wgmma_k32<E4M3, E4M3>(acc, a + 2 * i, b + 2 * i, kb > 0 || i > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (kb > 0) release(shared, (step - 1) % kStages);
            }
            wgmma_wait<0>();
            wgmma_hold(acc);
            release(shared, (step - 1) % kStages);

            const Tile tile = tile_at(index, tiles_m, tiles_n, rank);
            const int row = tile.row + threadIdx.x / 32 * 16 + lane / 4, column = tile.column + 8 * (lane % 4);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint4* line = out + (static_cast<long long>(row + 8 * h) * n + column) / 8;
#pragma unroll
                for (int g = 0; g < kBlockN / 32; g++) {
                    const float* run = acc + 16 * g + 2 * h;
                    line[4 * g] = make_uint4(cvt_bf16x2(run[0], run[1]), cvt_bf16x2(run[4], run[5]),
                                             cvt_bf16x2(run[8], run[9]), cvt_bf16x2(run[12], run[13]));
                }
            }
        }
    }
    cluster_arrive_relaxed();  // a block must not end while the other may still write to its shared memory
    cluster_wait();
}
