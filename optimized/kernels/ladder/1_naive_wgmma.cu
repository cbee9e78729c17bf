// Rung 1: ordinary loads into shared memory, and the tensor core.
//
//   D[M, N] = bf16(A[M, K] B[N, K]^T)     A, B E4M3, row-major; M % 64 = N % 128 = K % 128 = 0; grid (N / 128, M / 64)
//
// One block, one warpgroup (128 threads), one tile of 64 x 128. For each k-block of 128: every thread copies its share
// of A and B to shared memory, 16 bytes at a time; then four wgmma (k = 32 each) add the products to the 64
// accumulators of each thread. Copies and wgmma take turns, and only other blocks on the multiprocessor fill the
// gaps.
//
// wgmma reads rows of 128 bytes whose eight 16-byte chunks are swizzled: chunk c of row r lies at place c ^ (r % 8), so
// that neither the copy nor the tensor core meets a bank conflict.
#include "ptx/cvt.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

using namespace twin;

constexpr int kBlockM = 64, kBlockN = 128, kBlockK = 128;

// `rows` rows of 128 bytes, `stride` bytes apart in global memory, to shared memory, swizzled.
__device__ __forceinline__ void copy_rows(unsigned char* to, const unsigned char* from, int rows, int stride) {
#pragma unroll
    for (int i = threadIdx.x; i < 8 * rows; i += 128) {
        const int row = i / 8, chunk = i % 8;
        const unsigned char* source = from + static_cast<long long>(row) * stride + 16 * chunk;
        *reinterpret_cast<uint4*>(to + 128 * row + 16 * (chunk ^ row % 8)) = *reinterpret_cast<const uint4*>(source);
    }
}

extern "C" __global__ void __launch_bounds__(128)
    rung(const unsigned char* a, const unsigned char* b, unsigned* out, int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    unsigned char *shared_a = memory, *shared_b = memory + kBlockM * kBlockK;
    const int row = blockIdx.y * kBlockM, column = blockIdx.x * kBlockN;
    a += static_cast<long long>(row) * k;
    b += static_cast<long long>(column) * k;

    float acc[kBlockN / 2];
    for (int kb = 0; kb < k / kBlockK; kb++) {
        copy_rows(shared_a, a + kb * kBlockK, kBlockM, k);
        copy_rows(shared_b, b + kb * kBlockK, kBlockN, k);
        fence_proxy_async();  // the tensor core sees ordinary stores only after this
        __syncthreads();
        const auto a_rows = wgmma_descriptor(shared_address(shared_a), 0, 1024);
        const auto b_rows = wgmma_descriptor(shared_address(shared_b), 0, 1024);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++)  // descriptors count 16 bytes: k = 32 is 2 of them
            wgmma_k32<E4M3, E4M3>(acc, a_rows + 2 * i, b_rows + 2 * i, kb > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();  // nobody overwrites what another warp still multiplies
    }

    wgmma_hold(acc);
    // wgmma gives warp w, lane l: rows 16 w + l / 4 and 8 below, columns 8 j + 2 (l % 4) and the next.
    const int lane = threadIdx.x % 32;
    const int first = row + threadIdx.x / 32 * 16 + lane / 4, pair = column + 2 * (lane % 4);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        unsigned* line = out + (static_cast<long long>(first + 8 * h) * n + pair) / 2;
#pragma unroll
        for (int j = 0; j < kBlockN / 8; j++) line[4 * j] = cvt_bf16x2(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
    }
}
