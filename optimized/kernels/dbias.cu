// dbias: the gradient of a bias, the sum of the rows of the output's gradient, in a written order.
//
//     dbias[c] = round(sum over r of fp32(grad[r, c]))     fp32 additions, one rounding at the end
//
// `dbias`: the sums over blocks of 64 rows in the order of row_sum.cuh, added in order of block, starting from block
// 0's; no rows give +0. `total` only adds, from partial [ceil(rows / 64), cols] fp32: the sums that the kernels of the
// casts make on their way.
//
// grad [rows, cols] fp32, bf16 or fp16 (WIDE). VECTOR 1: a thread reads 16 bytes of a row, for which rows are
// 16-byte aligned; VECTOR 0: one element, for any number of columns, at a fraction of the speed.
//
// Bound by memory: 2 bytes an element in bf16. A cluster of 8 blocks of threads takes all rows of a strip of columns, a
// warp 64 rows at a time, in turn. Every block of the cluster adds an eighth of the columns: sums go to its shared
// memory, where a barrier counts their bytes. So one launch does it all.
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/grid.cuh"
#include "ptx/l2_policy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/store_async.cuh"
#include "row_sum.cuh"
#include "wide.cuh"

using namespace twin;

constexpr int CLUSTER = 8;
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
#if VECTOR
constexpr int COLUMNS = LANES;
#else
constexpr int COLUMNS = 1;
#endif
constexpr int STRIP = 8 * COLUMNS;
constexpr int SHARE = STRIP / CLUSTER;  // columns that a block adds up
constexpr int SUMS = (COLUMNS + 3) / 4;  // of 64 rows that a lane ends with
constexpr int AT_ONCE = 256;               // blocks of 64 rows whose sums are in shared memory at a time

extern "C" __global__ __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 5) void dbias(
    const wide_t* __restrict__ grad, wide_t* __restrict__ out, int rows, int cols) {
    __shared__ float sums[AT_ONCE][SHARE];
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
    const int lane = threadIdx.x % 32, rank = blockIdx.x % CLUSTER;
    const int strip = blockIdx.x / CLUSTER * STRIP;
    const int within = lane % 8 * COLUMNS;
    const int blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const size_t stride = cols;
    float total = 0.0f;
    for (int first = 0; first < blocks; first += AT_ONCE) {
        const int here = min(AT_ONCE, blocks - first);
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(arrived, here * SHARE * sizeof(float));
        for (int b = rank * WARPS + threadIdx.x / 32; b < here; b += CLUSTER * WARPS) {
            const int row = (first + b) * BLOCK_ROWS + lane / 8 * RUN;
            const int left = strip + within < cols ? max(min(rows - row, RUN), 0) : 0;
            const wide_t* from = grad + (left > 0 ? static_cast<size_t>(row) * stride + strip + within : 0);
            float run[COLUMNS], sum[SUMS];
#if VECTOR
            Vector<LANES> v[RUN];
#pragma unroll
            for (int r = 0; r < RUN; ++r) v[r] = r < left ? load_once<LANES>(from + r * stride) : Vector<LANES>{};
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                float column[RUN];
#pragma unroll
                for (int r = 0; r < RUN; ++r) column[r] = widen(v[r], c);
                run[c] = halving_sum(column);
            }
#else
            float column[RUN];
#pragma unroll
            for (int r = 0; r < RUN; ++r) column[r] = r < left ? widen(from[r * stride]) : 0.0f;
            run[0] = halving_sum(column);
#endif
            const int at = within + block_sum<COLUMNS>(run, sum);
            wait_for_blocks();
#pragma unroll
            for (int c = 0; c < SUMS; ++c) {
                // With one column to a lane all four runs hold the sum.
                const int owner = (at + c) / SHARE;
                if (COLUMNS > 1 || lane < 8)
                    store_async(map_to_rank(shared_address(&sums[b][(at + c) % SHARE]), owner), sum[c],
                                map_to_rank(arrived, owner));
            }
        }
        wait_for_blocks();
        mbarrier_wait(arrived, first / AT_ONCE & 1);
        if (threadIdx.x < SHARE) {
            // Not 0 + block 0's sum: that would turn -0 into +0.
            if (first == 0) total = sums[0][threadIdx.x];
#pragma unroll 16
            for (int b = first == 0 ? 1 : 0; b < here; ++b) total = total + sums[b][threadIdx.x];
        }
        if (first + AT_ONCE < blocks) {  // added everywhere, before the next sums come
            cluster_arrive();
            cluster_wait();
        }
    }
    wait_for_blocks();
    const int column = strip + rank * SHARE + threadIdx.x;
    if (threadIdx.x < SHARE && column < cols) out[column] = narrow(total);
}

constexpr int TOTAL_COLS = 32;
constexpr int TOTAL_THREADS = 256;
constexpr int CHUNK = 128;  // blocks staged at a time: 8192 rows
constexpr int AHEAD = 32;   // of them whose sums are on the way to registers at once
constexpr int PIECES = TOTAL_COLS / 4;  // of 16 bytes

// The additions of a column form a chain; what must not wait for one another are the loads. So all threads fetch
// a chunk of partial sums, and one warp adds it from shared memory. cols is a multiple of 4. Launched early.
extern "C" __global__ __launch_bounds__(TOTAL_THREADS) void total(
    const float* __restrict__ partial, wide_t* __restrict__ dbias, int blocks, int cols) {
    __shared__ __align__(16) float chunk[CHUNK][TOTAL_COLS];
    const int first_col = blockIdx.x * TOTAL_COLS, piece = threadIdx.x % PIECES * 4;
    const unsigned long long policy = evict_first();
    wait_for_grid_before();
    float sum = blocks > 0 ? -0.0f : 0.0f;  // adding to -0 changes no number, not even -0
    for (int first = 0; first < blocks; first += CHUNK) {
        const int here = min(CHUNK, blocks - first);
#pragma unroll
        for (int i = 0; i < CHUNK / (TOTAL_THREADS / PIECES); ++i) {
            const int b = i * (TOTAL_THREADS / PIECES) + threadIdx.x / PIECES;
            if (b < here && first_col + piece < cols)
                cp_async_16(
                    &chunk[b][piece], partial + static_cast<size_t>(first + b) * cols + first_col + piece, policy);
        }
        cp_async_commit_group();
        cp_async_wait_group<0>();
        __syncthreads();
        if (threadIdx.x < TOTAL_COLS) {
#pragma unroll AHEAD
            for (int b = 0; b < here; ++b) sum = sum + chunk[b][threadIdx.x];
        }
        __syncthreads();  // it has been added
    }
    if (threadIdx.x < TOTAL_COLS && first_col + threadIdx.x < cols) dbias[first_col + threadIdx.x] = narrow(sum);
}
