// Rung 6: rows of B permuted by the copy engine, so that a thread's results are neighbours.
//
//   D[M, N] = bf16(A[M, K] B[N, K]^T)     A, B E4M3, row-major; M % 128 = N % 256 = K % 128 = 0; grid: multiprocessors
//
// wgmma gives lane q = lane % 4 the columns 8 j + 2 q + e (e = 0, 1) of its B: stores of 4 bytes, a quarter of a
// 32-byte sector each. But which row of B is "column c" is our choice. The tensor map of B has five dimensions,
// (k, e, q, j, g), and puts row 32 g + 8 q + 2 j + e there: the same GEMM, and each thread owns 8 consecutive
// columns, 16 bytes, of every 32. The engine fetches rows of 128 bytes either way, so this costs nothing.
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
    int row, column;
};

__device__ __forceinline__ Tile tile_at(int index, int tiles_m, int tiles_n) {
    const int top = index / (kBand * tiles_n) * kBand;
    const int rows = min(kBand, tiles_m - top), rest = index - top * tiles_n;
    return {(top + rest % rows) * kBlockM, rest / rows * kBlockN};
}

extern "C" __global__ void __launch_bounds__(384, 1)
    rung(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, uint4* out, int m, int n,
         int k) {
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

    unsigned step = 0;
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
                tma_load_5d(shared + kB + stage * kBBytes, &b_map, full, kb * kBlockK, 0, 0, 0, tile.column / 32);
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
        if (lane == 0) mbarrier_arrive(shared + kEmpty + 8 * ((step - 1) % kStages));

        const Tile tile = tile_at(index, tiles_m, tiles_n);
        const int row = tile.row + threadIdx.x / 32 * 16 + lane / 4, column = tile.column + 8 * (lane % 4);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint4* line = out + (static_cast<long long>(row + 8 * h) * n + column) / 8;
#pragma unroll
            for (int g = 0; g < kBlockN / 32; g++) {
                const float* run = acc + 16 * g + 2 * h;  // its pairs lie 4 apart
                line[4 * g] = make_uint4(cvt_bf16x2(run[0], run[1]), cvt_bf16x2(run[4], run[5]),
                                         cvt_bf16x2(run[8], run[9]), cvt_bf16x2(run[12], run[13]));
            }
        }
    }
}
