// activation_amax: the largest magnitude of an activation that is not gated, where the largest pre-activation is known.
//
//     partial[b] = act(most)                              where most = max maxima[i] is KNOWN_FROM or more
//                  max |act(x[i])| of what block b reads  where it is less                  NaN ignored, infinity counts
//
// x [count] bf16 or fp16 (WIDE), any count, 16-byte aligned; maxima [maximum_count] fp32: what wrote x leaves there the
// largest numbers of its parts, none below +0, NaN passed over. partial [blocks] fp32.
//
// |act| does not fall from x to a larger x of 16 bits, if that is KNOWN_FROM or more: below, where it is negative too,
// act stays smaller than at KNOWN_FROM (optimized/ops/gemms/gemm_activation_scale.py; a test compares all 16-bit words).
// So x itself is not read unless all of it is small. The launch is the same in either case.
#include "activation.cuh"
#include "casts/amax_share.cuh"
#include "common/current_scale.cuh"
#include "ptx/grid.cuh"

using namespace twin;

static_assert(!kGated, "a gated activation follows from two numbers");

extern "C" __global__ void __launch_bounds__(kThreads)
    activation_amax(const wide_t* __restrict__ x, const float* __restrict__ maxima, float* __restrict__ partial,
                    long long count, int maximum_count) {
    __shared__ float known;
    let_next_grid_start();  // `total` of casts/current_scale.cu
    float most = 0.0f;
    for (int i = threadIdx.x; i < maximum_count; i += kThreads) most = fmaxf(most, maxima[i]);
    most = largest_of_block<kThreads / 32>(most);
    if (threadIdx.x == 0) known = most;
    __syncthreads();
    most = known;
    if (most >= KNOWN_FROM)
        most = act(most);
    else
        most = largest_of_block<kThreads / 32>(largest_of_share(x, count, [](float one) { return act(one); }));
    if (threadIdx.x == 0) partial[blockIdx.x] = most;
}
