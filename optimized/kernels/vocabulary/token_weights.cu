// Weights of tokens, as integers.     w = floor(2^30 exp((x - m) / T))     of a row x of logits, m = max x
//
// With T = 0, or where no logit is above -inf, 2^30 at the first place of m (or place 0) and 0 elsewhere. Definition:
// reference/ops/vocabulary/token_weights.py. A block takes a row and reads it twice, the second time from L2.
//
// Defines: WIDE (0 fp32, 1 bf16, 2 fp16).
#include "common/elementary.cuh"
#include "common/row_sum.cuh"
#include "common/wide.cuh"
#include "vocabulary/row_lanes.cuh"

using namespace twin;

constexpr int kThreads = 1024, kWarps = kThreads / 32;

// logits [rows, cols], temperature [rows], weights [rows, cols].
extern "C" __global__ void __launch_bounds__(kThreads)
    token_weights(const wide_t* logits, const float* temperature, int* weights, int cols) {
    __shared__ float values[kWarps];
    __shared__ int places[kWarps];
    const long long row = blockIdx.x;
    const wide_t* const x = logits + row * cols;
    int* const w = weights + row * cols;
    const float t = temperature[row];

    Top top{lowest(), 0};
    for (int i = threadIdx.x; i < cols; i += kThreads) {
        const float value = widen(x[i]);
        if (value > top.value) top = {value, i};
    }
    join_lanes(top);
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = top.value, places[threadIdx.x / 32] = top.place;
    __syncthreads();
    top = {values[threadIdx.x % kWarps], places[threadIdx.x % kWarps]};
    join_lanes(top);

    const bool greedy = !(t > 0.0f) || top.value == lowest();
    for (int i = threadIdx.x; i < cols; i += kThreads) {
        const float value = widen(x[i]);
        const float e = value == top.value ? 1.0f : twin::exp(__fdiv_rn(value - top.value, t));
        const int drawn = e == e ? static_cast<int>(e * 1073741824.0f) : 0;
        w[i] = greedy ? (i == top.place ? 1 << 30 : 0) : drawn;
    }
}
