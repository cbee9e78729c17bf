// Rung 5: one block a multiprocessor, which walks over tiles in an order that suits L2.
//
//   D[M, N] = bf16(A[M, K] B[N, K]^T)     A, B E4M3, row-major; M % 128 = N % 256 = K % 128 = 0; grid: multiprocessors
//
// Barriers and pipeline are set up once; while the consumers store a tile, the producer already fills the ring for the
// next. The blocks walk in bands of 8 tile rows, column after column, so that the 132 tiles in flight form a block of
// about 8 x 17 tiles. Those need 25 tile rows of A and B together; 132 tiles of a matrix 64 tiles wide, row by row,
// need 3 + 64.
#include "ptx/cvt.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace twin;

constexpr int kBlockM = 128, kBlockN = 256, kBlockK = 128, kStages = 4, kBand = 8;
constexpr int kABytes = kBlockM * kBlockK, kBBytes = kBlockN * kBlockK;
constexpr int kB = kStages * kABytes, kFull = kB + kStages * kBBytes, kEmpty = kFull + 8 * kStages;

struct Tile {
    int row, column;  // of the output's first element
};

__device__ __forceinline__ Tile tile_at(int index, int tiles_m, int tiles_n) {
    const int top = index / (kBand * tiles_n) * kBand;
    const int rows = min(kBand, tiles_m - top), rest = index - top * tiles_n;
    return {(top + rest % rows) * kBlockM, rest / rows * kBlockN};
}

extern "C" __global__ void __launch_bounds__(384, 1)
    rung(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, unsigned* out, int m,
         int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const int tiles_m = m / kBlockM, tiles_n = n / kBlockN, k_blocks = k / kBlockK;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; s++) {
            mbarrier_init(shared + kFull + 8 * s, 1);
            mbarrier_init(shared + kEmpty + 8 * s, 8);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    unsigned step = 0;  // k-blocks so far, over all tiles: both sides count them alike
    if (threadIdx.x >= 256) {
        setmaxnreg_dec<40>();
        if (threadIdx.x > 256) return;
        for (int index = blockIdx.x; index < tiles_m * tiles_n; index += gridDim.x) {
            const Tile tile = tile_at(index, tiles_m, tiles_n);
            for (int kb = 0; kb < k_blocks; kb++, step++) {
                const unsigned stage = step % kStages, parity = step / kStages % 2, full = shared + kFull + 8 * stage;
                mbarrier_wait(shared + kEmpty + 8 * stage, parity ^ 1);
                mbarrier_arrive_expect_tx(full, kABytes + kBBytes);
                tma_load_2d(shared + stage * kABytes, &a_map, full, kb * kBlockK, tile.row);
                tma_load_2d(shared + kB + stage * kBBytes, &b_map, full, kb * kBlockK, tile.column);
            }
        }
        return;
    }

    setmaxnreg_inc<232>();
    const int lane = threadIdx.x % 32;
    const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    for (int index = blockIdx.x; index < tiles_m * tiles_n; index += gridDim.x) {
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
            if (kb > 0 && lane == 0) mbarrier_arrive(shared + kEmpty + 8 * ((step - 1) % kStages));
        }
        wgmma_wait<0>();
        wgmma_hold(acc);
        if (lane == 0) mbarrier_arrive(shared + kEmpty + 8 * ((step - 1) % kStages));  // the producer goes on

        const Tile tile = tile_at(index, tiles_m, tiles_n);
        const int row = tile.row + threadIdx.x / 32 * 16 + lane / 4, pair = tile.column + 2 * (lane % 4);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            unsigned* line = out + (static_cast<long long>(row + 8 * h) * n + pair) / 2;
#pragma unroll
            for (int j = 0; j < kBlockN / 8; j++) line[4 * j] = cvt_bf16x2(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
        }
    }
}
