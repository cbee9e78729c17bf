// dbias: the gradient of a bias, the sum of the rows of the output's gradient, in a written order.
//
//     dbias[c] = round(sum over r of fp32(grad[r, c]))     fp32 additions, one rounding at the end
//
// Two kernels. `blocks` sums blocks of 64 rows in the order of row_sum.cuh: partial [ceil(rows / 64), cols] fp32.
// `total` adds those in order of block, starting from block 0's, and rounds; no blocks give +0. (The kernel
// cast_transpose makes the same partial sums on its way.)
//
// grad [rows, cols] fp32, bf16 or fp16 (WIDE). VECTOR 1: a thread reads 16 bytes of a row, for which rows are
// 16-byte aligned; VECTOR 0: one element, for any number of columns, at a fraction of the speed.
#include "wide.cuh"
#include "row_sum.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
#if VECTOR
constexpr int COLUMNS = LANES;
#else
constexpr int COLUMNS = 1;
#endif
constexpr int WARP_COLS = 8 * COLUMNS;

extern "C" __global__ __launch_bounds__(THREADS) void blocks(
    const wide_t* __restrict__ grad, float* __restrict__ partial, int rows, int cols) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column_tiles = max(1, (cols + WARP_COLS * WARPS - 1) / (WARP_COLS * WARPS));
    const int block_row = blockIdx.x / column_tiles * BLOCK_ROWS;
    const int row = block_row + lane / 8 * RUN;
    const int col = (blockIdx.x % column_tiles * WARPS + warp) * WARP_COLS + lane % 8 * COLUMNS;
    const size_t stride = cols;
    const int left = col < cols ? max(min(rows - row, RUN), 0) : 0;
    const wide_t* from = grad + (left > 0 ? static_cast<size_t>(row) * stride + col : 0);

    float run[COLUMNS], sum[(COLUMNS + 3) / 4];
#if VECTOR
    Vector<LANES> v[RUN];
#pragma unroll
    for (int r = 0; r < RUN; ++r) v[r] = r < left ? load_once<LANES>(from + r * stride) : Vector<LANES>{};
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        float column[RUN];
#pragma unroll
        for (int r = 0; r < RUN; ++r) column[r] = widen(v[r], c);
        run[c] = run_sum(column);
    }
#else
    float column[RUN];
#pragma unroll
    for (int r = 0; r < RUN; ++r) column[r] = r < left ? widen(from[r * stride]) : 0.0f;
    run[0] = run_sum(column);
#endif
    const int first = block_sum<COLUMNS>(run, sum);
    if (block_row < rows && col < cols) {
        float* target = partial + static_cast<size_t>(block_row / BLOCK_ROWS) * stride + col + first;
        // With one column to a lane all four runs hold the sum; they write the same word.
#pragma unroll
        for (int c = 0; c < (COLUMNS + 3) / 4; ++c) target[c] = sum[c];
    }
}

constexpr int TOTAL_COLS = 32;
constexpr int TOTAL_THREADS = 256;
constexpr int CHUNK = 128;  // blocks staged at a time: 8192 rows

// The additions of a column form a chain; what must not wait for one another are the loads. So all threads fetch
// a chunk of partial sums, and one warp adds it from shared memory.
extern "C" __global__ __launch_bounds__(TOTAL_THREADS) void total(
    const float* __restrict__ partial, wide_t* __restrict__ dbias, int blocks, int cols) {
    __shared__ float chunk[CHUNK][TOTAL_COLS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int col = blockIdx.x * TOTAL_COLS + lane;
    float sum = 0.0f;
    for (int first = 0; first < blocks; first += CHUNK) {
        const int here = min(CHUNK, blocks - first);
        float v[CHUNK / (TOTAL_THREADS / 32)];
#pragma unroll
        for (int i = 0; i < CHUNK / (TOTAL_THREADS / 32); ++i) {
            const int b = i * (TOTAL_THREADS / 32) + warp;
            v[i] = b < here && col < cols ? partial[static_cast<size_t>(first + b) * cols + col] : 0.0f;
        }
        __syncthreads();  // the chunk before has been added
#pragma unroll
        for (int i = 0; i < CHUNK / (TOTAL_THREADS / 32); ++i) chunk[i * (TOTAL_THREADS / 32) + warp][lane] = v[i];
        __syncthreads();
        if (warp == 0) {
            // Not 0 + block 0's sum: that would turn -0 into +0.
            if (first == 0) sum = chunk[0][lane];
#pragma unroll 8
            for (int b = first == 0 ? 1 : 0; b < here; ++b) sum = sum + chunk[b][lane];
        }
    }
    if (warp == 0 && col < cols) dbias[col] = narrow(sum);
}
