// dbias: the gradient of a bias, the sum of the rows of the output's gradient, in a written order.
//
//     dbias[c] = round(sum over r of fp32(grad[r, c]))     fp32 additions, one rounding at the end
//
// `dbias` sums blocks of 64 rows in the order of row_sum.cuh and adds those sums in order of block, starting from block
// 0's; no rows give +0. `total` only adds: the sums of blocks that a cast has left in partial [ceil(rows / 64), cols]
// fp32.
//
// grad [rows, cols] fp32, bf16 or fp16 (WIDE). VECTOR 1: a thread reads 16 bytes of a row, for which rows are
// 16-byte aligned; VECTOR 0: one element, for any number of columns, at a fraction of the speed.
//
// Bound by memory: 2 bytes an element in bf16. A cluster of 8 blocks of threads takes a strip of columns; its warps
// take 64 rows each in turn. Each block adds up an eighth of the columns: the others send their sums to its shared
// memory, where a barrier counts the bytes. So one launch suffices.
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/grid.cuh"
#include "ptx/l2_policy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/store_async.cuh"
#include "common/row_sum.cuh"
#include "common/wide.cuh"

using namespace twin;

constexpr int kCluster = 8;
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
#if VECTOR
constexpr int kColumns = kLanes;
#else
constexpr int kColumns = 1;
#endif
constexpr int kStrip = 8 * kColumns;
constexpr int kShare = kStrip / kCluster;  // columns that a block adds up
constexpr int kSums = (kColumns + 3) / 4;  // of 64 rows that a lane ends with
constexpr int kAtOnce = 256;               // blocks of 64 rows whose sums are in shared memory at a time

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 5)
    dbias(const wide_t* __restrict__ grad, wide_t* __restrict__ out, int rows, int cols) {
    __shared__ float sums[kAtOnce][kShare];
    __shared__ unsigned long long barrier;
    const unsigned arrived = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(arrived, 1);
        fence_mbarrier_init();
    }
    cluster_arrive_relaxed();
    bool running = false;  // all blocks of the cluster, with their barriers
    const auto wait_for_blocks = [&] {
        if (!running) cluster_wait();
        running = true;
    };
    const int lane = threadIdx.x % 32, rank = blockIdx.x % kCluster;
    const int strip = blockIdx.x / kCluster * kStrip;
    const int within = lane % 8 * kColumns;
    const int blocks = (rows + kBlockRows - 1) / kBlockRows;
    const size_t stride = cols;
    float total = 0.0f;
    for (int first = 0; first < blocks; first += kAtOnce) {
        const int here = min(kAtOnce, blocks - first);
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(arrived, here * kShare * sizeof(float));
        for (int b = rank * kWarps + threadIdx.x / 32; b < here; b += kCluster * kWarps) {
            const int row = (first + b) * kBlockRows + lane / 8 * kRunRows;
            const int left = strip + within < cols ? max(min(rows - row, kRunRows), 0) : 0;
            const wide_t* from = grad + (left > 0 ? static_cast<size_t>(row) * stride + strip + within : 0);
            float run[kColumns], sum[kSums];
#if VECTOR
            Vector<kLanes> v[kRunRows];
#pragma unroll
            for (int r = 0; r < kRunRows; r++)
                v[r] = r < left ? load_once<kLanes>(from + r * stride) : Vector<kLanes>{};
#pragma unroll
            for (int c = 0; c < kColumns; c++) {
                float column[kRunRows];
#pragma unroll
                for (int r = 0; r < kRunRows; r++) column[r] = widen(v[r], c);
                run[c] = halving_sum(column);
            }
#else
            float column[kRunRows];
#pragma unroll
            for (int r = 0; r < kRunRows; r++) column[r] = r < left ? widen(from[r * stride]) : 0.0f;
            run[0] = halving_sum(column);
#endif
            const int at = within + block_sum<kColumns>(run, sum);
            wait_for_blocks();
#pragma unroll
            for (int c = 0; c < kSums; c++) {
                // With one column to a lane, all four runs hold the sum: only the first sends it.
                const int owner = (at + c) / kShare;
                if (kColumns > 1 || lane < 8)
                    store_async(map_to_rank(shared_address(&sums[b][(at + c) % kShare]), owner), sum[c],
                                map_to_rank(arrived, owner));
            }
        }
        wait_for_blocks();
        mbarrier_wait(arrived, first / kAtOnce & 1);
        if (threadIdx.x < kShare) {
            // Not 0 + block 0's sum, which would turn -0 into +0.
            if (first == 0) total = sums[0][threadIdx.x];
#pragma unroll 16
            for (int b = first == 0 ? 1 : 0; b < here; b++) total = total + sums[b][threadIdx.x];
        }
        if (first + kAtOnce < blocks) {  // all blocks have added before the next sums come
            cluster_arrive();
            cluster_wait();
        }
    }
    wait_for_blocks();
    const int column = strip + rank * kShare + threadIdx.x;
    if (threadIdx.x < kShare && column < cols) out[column] = narrow(total);
}

constexpr int kTotalCols = 32;
constexpr int kTotalThreads = 256;
constexpr int kChunk = 128;              // blocks staged at a time: 8192 rows
constexpr int kAhead = 32;               // sums on their way from shared memory to a register
constexpr int kPieces = kTotalCols / 4;  // of 16 bytes

// A column's additions form a chain, but its loads need not wait for each other: all threads fetch a chunk of sums into
// shared memory, and one warp adds them. cols is a multiple of 4. Launched early.
extern "C" __global__ void __launch_bounds__(kTotalThreads)
    total(const float* __restrict__ partial, wide_t* __restrict__ dbias, int blocks, int cols) {
    __shared__ __align__(16) float chunk[kChunk][kTotalCols];
    const int first_col = blockIdx.x * kTotalCols, piece = threadIdx.x % kPieces * 4;
    const unsigned long long policy = evict_first();
    wait_for_grid_before();
    float sum = blocks > 0 ? -0.0f : 0.0f;  // adding to -0 changes no number, not even -0
    for (int first = 0; first < blocks; first += kChunk) {
        const int here = min(kChunk, blocks - first);
#pragma unroll
        for (int i = 0; i < kChunk / (kTotalThreads / kPieces); i++) {
            const int b = i * (kTotalThreads / kPieces) + threadIdx.x / kPieces;
            if (b < here && first_col + piece < cols)
                cp_async_16(&chunk[b][piece], partial + static_cast<size_t>(first + b) * cols + first_col + piece,
                            policy);
        }
        cp_async_commit_group();
        cp_async_wait_group<0>();
        __syncthreads();
        if (threadIdx.x < kTotalCols) {
#pragma unroll kAhead
            for (int b = 0; b < here; b++) sum = sum + chunk[b][threadIdx.x];
        }
        __syncthreads();  // it has been added
    }
    if (threadIdx.x < kTotalCols && first_col + threadIdx.x < cols) dbias[first_col + threadIdx.x] = narrow(sum);
}
