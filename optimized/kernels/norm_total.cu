// norm_total: the column sums of norm_backward from those of its blocks of rows.
//
//     out_s[c] = round(sum over b of partial[s, b, c])     fp32 additions from +0, one rounding at the end
//
// partial fp32 [sums, blocks, hidden], sums 1 or 2, blocks <= 256; out0, out1 [hidden] of type WIDE (the weight's).
// Blocks are added in order within runs of 16, then the runs in order: a warp to a run, so that all loads are in flight
// at once.
#include "wide.cuh"

constexpr int RUN = 16;
constexpr int RUNS = 16;
constexpr int COLUMNS = 32;

extern "C" __global__ __launch_bounds__(COLUMNS * RUNS) void norm_total(
    const float* __restrict__ partial, wide_t* __restrict__ out0, wide_t* __restrict__ out1, int blocks, int hidden) {
    __shared__ float runs[RUNS][COLUMNS];
    const int lane = threadIdx.x % 32, run = threadIdx.x / 32;
    const int column = blockIdx.x * COLUMNS + lane;
    const float* from = partial + static_cast<size_t>(blockIdx.y) * blocks * hidden + column;
    float v[RUN];
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
        const int block = run * RUN + i;
        v[i] = block < blocks && column < hidden ? from[static_cast<size_t>(block) * hidden] : 0.0f;
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < RUN; ++i) sum = sum + v[i];
    runs[run][lane] = sum;
    __syncthreads();
    if (run == 0 && column < hidden) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < RUNS; ++i) total = total + runs[i][lane];
        (blockIdx.y == 0 ? out0 : out1)[column] = narrow(total);
    }
}
