// norm_total: the column sums of norm_backward from those of its blocks of rows.
//
//     out_s[c] = round(sum over b of partial[s, b, c])     fp32 additions from +0, one rounding at the end
//
// partial fp32 [sums, blocks, hidden], sums 1 or 2, blocks <= 256; out0, out1 [hidden] of type WIDE (the weight's).
// partial is of no use afterwards: its lines are discarded, where hidden is a multiple of 32. Launched early, at
// norm_backward's end.
//
// Blocks are added in order within runs of 16, then the runs in order: a warp to a run, so that all loads are in flight
// at once.
#include "ptx/discard.cuh"
#include "ptx/grid.cuh"
#include "wide.cuh"

using namespace twin;

constexpr int RUN = 16;
constexpr int RUNS = 16;
constexpr int COLUMNS = 32;

extern "C" __global__ __launch_bounds__(COLUMNS * RUNS) void norm_total(
    const float* __restrict__ partial, wide_t* __restrict__ out0, wide_t* __restrict__ out1, int blocks, int hidden) {
    __shared__ float runs[RUNS][COLUMNS];
    const int lane = threadIdx.x % 32, run = threadIdx.x / 32;
    const int column = blockIdx.x * COLUMNS + lane;
    const float* from = partial + static_cast<size_t>(blockIdx.y) * blocks * hidden + column;
    wait_for_grid_before();
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
    // Read for the last time: without this, L2 would write them to memory. Only lines of this warp's alone.
    if (hidden % COLUMNS == 0 && lane < RUN && run * RUN + lane < blocks)
        discard_line(from - lane + static_cast<size_t>(run * RUN + lane) * hidden);
    if (run == 0 && column < hidden) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < RUNS; ++i) total = total + runs[i][lane];
        (blockIdx.y == 0 ? out0 : out1)[column] = narrow(total);
    }
}
