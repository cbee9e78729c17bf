// Rung 4: a tile of 128 x 256, by two consumer warpgroups.
//
//   D[M, N] = bf16(A[M, K] B[N, K]^T)     A, B E4M3, row-major; M % 128 = N % 256 = K % 128 = 0; grid (N / 256, M / 128)
//
// A k-block of a 64 x 128 tile brings 24 KB for 256 cycles of the tensor core; a k-block of this tile brings 48 KB for
// 1024: half the traffic from L2 for the same GEMM. Each consumer owns 64 rows: 128 accumulators a thread, which fit
// because the producer's warpgroup gives registers back (setmaxnreg). Shared memory is full: one block a
// multiprocessor.
#include "ptx/cvt.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace twin;

constexpr int kBlockM = 128, kBlockN = 256, kBlockK = 128, kStages = 4;
constexpr int kABytes = kBlockM * kBlockK, kBBytes = kBlockN * kBlockK;
constexpr int kB = kStages * kABytes, kFull = kB + kStages * kBBytes, kEmpty = kFull + 8 * kStages;

extern "C" __global__ void __launch_bounds__(384, 1)
    rung(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, unsigned* out, int n,
         int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const int row = blockIdx.y * kBlockM, column = blockIdx.x * kBlockN, k_blocks = k / kBlockK;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; s++) {
            mbarrier_init(shared + kFull + 8 * s, 1);
            mbarrier_init(shared + kEmpty + 8 * s, 8);  // one arrival a consumer warp
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    if (threadIdx.x >= 256) {  // the producer's warpgroup
        setmaxnreg_dec<40>();
        if (threadIdx.x > 256) return;
        for (int kb = 0; kb < k_blocks; kb++) {
            const int stage = kb % kStages, parity = kb / kStages % 2;
            const unsigned full = shared + kFull + 8 * stage;
            mbarrier_wait(shared + kEmpty + 8 * stage, parity ^ 1);
            mbarrier_arrive_expect_tx(full, kABytes + kBBytes);
            tma_load_2d(shared + stage * kABytes, &a_map, full, kb * kBlockK, row);
            tma_load_2d(shared + kB + stage * kBBytes, &b_map, full, kb * kBlockK, column);
        }
        return;
    }

    setmaxnreg_inc<232>();
    float acc[kBlockN / 2];
    const int lane = threadIdx.x % 32;
    const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);  // the compiler now knows: one for all lanes
    for (int kb = 0; kb < k_blocks; kb++) {
        const int stage = kb % kStages, parity = kb / kStages % 2;
        mbarrier_wait(shared + kFull + 8 * stage, parity);
        const auto a = wgmma_descriptor(shared + stage * kABytes + warpgroup * (kABytes / 2), 0, 1024);
        const auto b = wgmma_descriptor(shared + kB + stage * kBBytes, 0, 1024);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_k32<E4M3, E4M3>(acc, a + 2 * i, b + 2 * i, kb > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (kb > 0 && lane == 0) mbarrier_arrive(shared + kEmpty + 8 * ((kb - 1) % kStages));
    }
    wgmma_wait<0>();

    wgmma_hold(acc);
    const int first = row + threadIdx.x / 32 * 16 + lane / 4, pair = column + 2 * (lane % 4);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        unsigned* line = out + (static_cast<long long>(first + 8 * h) * n + pair) / 2;
#pragma unroll
        for (int j = 0; j < kBlockN / 8; j++) line[4 * j] = cvt_bf16x2(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
    }
}
