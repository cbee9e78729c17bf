// norm_total: the column sums of norm_backward from those of its blocks of rows.
//
//     out_s[c] = round(sum over b of partial[s, b, c])     fp32 additions from +0, one rounding at the end
//
// partial fp32 [sums, blocks, hidden], sums 1 or 2, blocks <= 256; out0, out1 [hidden] of type WIDE (the weight's).
// KEEPS: 1 where partial may be read again; else its lines are discarded if hidden is a multiple of 32. Launched early,
// at norm_backward's end.
//
// Blocks are added in order within runs of 16, then the runs in order. A warp takes a run, so that all loads are in
// flight at once.
#include "ptx/discard.cuh"
#include "ptx/grid.cuh"
#include "common/wide.cuh"

using namespace twin;

constexpr int kRunRows = 16;
constexpr int kRuns = 16;
constexpr int kColumns = 32;
constexpr int kThreads = kColumns * kRuns;

extern "C" __global__ void __launch_bounds__(kThreads)
    norm_total(const float* __restrict__ partial, wide_t* __restrict__ out0, wide_t* __restrict__ out1, int blocks,
               int hidden) {
    __shared__ float runs[kRuns][kColumns];
    const int lane = threadIdx.x % 32, run = threadIdx.x / 32;
    const int column = blockIdx.x * kColumns + lane;
    const float* from = partial + static_cast<size_t>(blockIdx.y) * blocks * hidden + column;
    wait_for_grid_before();
    float v[kRunRows];
#pragma unroll
    for (int i = 0; i < kRunRows; i++) {
        const int block = run * kRunRows + i;
        v[i] = block < blocks && column < hidden ? from[static_cast<size_t>(block) * hidden] : 0.0f;
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kRunRows; i++) sum = sum + v[i];
    runs[run][lane] = sum;
    __syncthreads();
#if !KEEPS
    // These lines have been read for the last time; otherwise L2 would write them to memory. Only lines that no other
    // warp reads.
    if (hidden % kColumns == 0 && lane < kRunRows && run * kRunRows + lane < blocks)
        discard_line(from - lane + static_cast<size_t>(run * kRunRows + lane) * hidden);
#endif
    if (run == 0 && column < hidden) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kRuns; i++) total = total + runs[i][lane];
        (blockIdx.y == 0 ? out0 : out1)[column] = narrow(total);
    }
}
