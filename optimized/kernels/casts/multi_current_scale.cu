// multi_current_scale: the largest magnitudes of up to CAPACITY matrices in one launch.
//
//     partial[i, b] = max |x[i][j]| of what block (b, i) reads       NaN ignored, infinity counts
//
// x[i] [count] fp32, bf16 or fp16 (WIDE), any count, 16-byte aligned; partial [matrices, blocks] fp32. The kernel `total`
// of current_scale.cu, launched early, makes a scale of each row of partial, or one of all. The table is a kernel
// argument by value: there is nothing to copy to the device, and a CUDA graph captures the launch.
#include "common/current_scale.cuh"
#include "amax_share.cuh"
#include "ptx/grid.cuh"

using namespace twin;

struct Entry {
    const wide_t* x;
    long long count;
};

struct Table {
    Entry matrices[CAPACITY];
};

extern "C" __global__ void __launch_bounds__(kThreads)
    multi_current_scale(const __grid_constant__ Table table, float* __restrict__ partial) {
    let_next_grid_start();
    const Entry& m = table.matrices[blockIdx.y];
    const float most = largest_of_block<kThreads / 32>(largest_of_share(m.x, m.count));
    if (threadIdx.x == 0) partial[blockIdx.y * gridDim.x + blockIdx.x] = most;
}
