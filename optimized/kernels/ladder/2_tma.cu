// Rung 2: the copy engine (TMA) instead of the threads.
//
//   D[M, N] = bf16(A[M, K] B[N, K]^T)     A, B E4M3, row-major; M % 64 = N % 128 = K % 128 = 0; grid (N / 128, M / 64)
//
// One thread asks for a box of 128 bytes x rows; the engine computes the addresses, swizzles, and reports the bytes on
// an mbarrier, on which everybody waits. No thread computes an address or holds data on its way to shared memory.
// Copies and wgmma of one block still take turns.
#include "ptx/cvt.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace twin;

constexpr int kBlockM = 64, kBlockN = 128, kBlockK = 128;
constexpr int kABytes = kBlockM * kBlockK, kBBytes = kBlockN * kBlockK;

extern "C" __global__ void __launch_bounds__(128)
    rung(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, unsigned* out, int n,
         int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared_a = shared_address(memory), shared_b = shared_a + kABytes, full = shared_b + kBBytes;
    const int row = blockIdx.y * kBlockM, column = blockIdx.x * kBlockN;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init();
    }
    __syncthreads();

    float acc[kBlockN / 2];
    for (int kb = 0; kb < k / kBlockK; kb++) {
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(full, kABytes + kBBytes);
            tma_load_2d(shared_a, &a_map, full, kb * kBlockK, row);
            tma_load_2d(shared_b, &b_map, full, kb * kBlockK, column);
        }
        mbarrier_wait(full, kb % 2);  // each use of a barrier is a phase, and phases alternate in parity
        const auto a = wgmma_descriptor(shared_a, 0, 1024), b = wgmma_descriptor(shared_b, 0, 1024);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_k32<E4M3, E4M3>(acc, a + 2 * i, b + 2 * i, kb > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();
    }

    wgmma_hold(acc);
    const int lane = threadIdx.x % 32;
    const int first = row + threadIdx.x / 32 * 16 + lane / 4, pair = column + 2 * (lane % 4);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        unsigned* line = out + (static_cast<long long>(first + 8 * h) * n + pair) / 2;
#pragma unroll
        for (int j = 0; j < kBlockN / 8; j++) line[4 * j] = cvt_bf16x2(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
    }
}
