// current_scale: the scale of a tensor's own amax.
//
//     current_scale   partial[b] = max |x[i]| of what block b reads       NaN ignored, infinity counts
//     total           scale[s] = fp8_max / max(partial[s, 0], partial[s, 1], ..., epsilon)    exceptions: current_scale.cuh
//
// x [count] fp32, bf16 or fp16 (WIDE), any count, 16-byte aligned; partial [scales, blocks] fp32, its rows 16-byte
// aligned. `total` is launched early, a block for each scale. An activation leaves tens of thousands of maxima: four are
// read at a time.
#include "common/current_scale.cuh"
#include "amax_share.cuh"
#include "ptx/grid.cuh"

using namespace twin;

constexpr int kTotalThreads = 512;

extern "C" __global__ void __launch_bounds__(kThreads)
    current_scale(const wide_t* __restrict__ x, float* __restrict__ partial, long long count) {
    let_next_grid_start();
    const float most = largest_of_block<kThreads / 32>(largest_of_share(x, count));
    if (threadIdx.x == 0) partial[blockIdx.x] = most;
}

extern "C" __global__ void __launch_bounds__(kTotalThreads)
    total(const float* __restrict__ partial, float* __restrict__ scale, int blocks, float fp8_max, float epsilon,
          int power_of_two) {
    wait_for_grid_before();
    partial += static_cast<size_t>(blockIdx.x) * static_cast<unsigned>(blocks);
    float most = 0.0f;
#pragma unroll 8
    for (int b = threadIdx.x; b < blocks / 4; b += kTotalThreads) {
        const float4 four = reinterpret_cast<const float4*>(partial)[b];
        most = larger(larger(larger(larger(most, four.x), four.y), four.z), four.w);
    }
    const int rest = blocks / 4 * 4 + static_cast<int>(threadIdx.x);
    if (rest < blocks) most = larger(most, partial[rest]);
    most = largest_of_block<kTotalThreads / 32>(most);
    if (threadIdx.x == 0) scale[blockIdx.x] = current_scale_of(most, fp8_max, epsilon, power_of_two);
}
