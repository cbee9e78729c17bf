// norm_backward: gradients of LayerNorm or RMSNorm.
//
//     xhat = (x - mean) * rstd          rmsnorm: x * rstd
//     g    = grad * gamma,  c1 = rowsum(g) / n (layernorm only),  c2 = rowsum(g * xhat) / n
//     dx   = rstd * ((g - c1) - xhat * c2)        one rounding to WIDE
//     dx   = dx + residual                        where there is one: rounded again
//     partial[0, b] = sum of grad * xhat, partial[1, b] = sum of grad (layernorm only) over the rows of block b
//
// grad, x, residual, dx [rows, hidden] of type WIDE; weight [hidden] of type `parameters`; mean, rstd fp32 [rows];
// partial fp32 [2 (rmsnorm: 1), blocks, hidden], which norm_total.cu adds up. rowsum: norm_row.cuh. Column sums: block
// b has rows b * count .. + count - 1; chain k of CHAINS adds rows k, k + CHAINS, ... in order, from +0; then the
// chains are added in pairs.
//
// Defines: WIDE, KIND (norm_row.cuh). For hidden a multiple of 8 up to 16384 (fp32: 8192): ROW_WARPS, VECTORS (1 | 2 | 4)
// and WHOLE (0 | 1) (norm_backward.cuh), CHAINS (1 | 2 | 4), STAGES, BLOCKS (of a multiprocessor), KEPT (what a thread
// keeps of a row in registers until its sums are there: 2 xhat and g, 1 gamma, 0 nothing). Any other row takes the form
// without them.
#include "norm_row.cuh"
#ifdef ROW_WARPS
#include "norm_backward_twice.cuh"
#endif

using namespace twin;

#ifdef ROW_WARPS

struct Config {
    static constexpr bool kLayerNorm = KIND == 0, kWhole = WHOLE;
    static constexpr int kRowWarps = ROW_WARPS, kVectors = VECTORS, kChains = CHAINS;
    static constexpr int kStages = STAGES, kBlocks = BLOCKS, kKept = KEPT;
};
using Norm = NormBackward<Config>;

extern __shared__ uint4 arriving[];

extern "C" __global__ void __launch_bounds__(Norm::kThreads, Config::kBlocks)
    norm_backward(const wide_t* __restrict__ grad, const wide_t* __restrict__ x, const void* __restrict__ weight,
                  const float* __restrict__ mean, const float* __restrict__ rstd, const wide_t* __restrict__ residual,
                  wide_t* __restrict__ dx, float* __restrict__ partial, int rows, int length, int count,
                  int zero_centered, int parameters) {
    const int hidden = Config::kWhole ? Norm::kWidth : length;
    const int chain = threadIdx.x / Norm::kRowThreads;
    const int column = threadIdx.x / 32 % Config::kRowWarps * kStripe * Config::kVectors + threadIdx.x % 32 * 8;
    if constexpr (Config::kKept < 2) ReadTwice<Config>::init();
    const int begin = blockIdx.x * count + chain, end = min((blockIdx.x + 1) * count, rows);
    const Norm::Part part = {arriving,   grad,   x,     weight, mean,  rstd, residual,       dx, partial, zero_centered,
                             parameters, hidden, chain, column, begin, end,  hidden - column};
    if constexpr (Config::kKept == 2)
        Norm::read_once(part);
    else
        ReadTwice<Config>::run(part);
}

#else

// Any hidden up to 2^21 and any alignment, at a fraction of the speed.
//
// `rows` computes dx, a block of threads to a row; `columns` computes partial, a thread to a column of a block of rows;
// CHAINS is an argument.

constexpr bool kLayerNorm = KIND == 0;

extern "C" __global__ void __launch_bounds__(kBlockThreads)
    rows(const wide_t* __restrict__ grad, const wide_t* __restrict__ x, const void* __restrict__ weight,
         const float* __restrict__ mean, const float* __restrict__ rstd, const wide_t* __restrict__ residual,
         wide_t* __restrict__ dx, int hidden, int zero_centered, int parameters) {
    const size_t first = static_cast<size_t>(blockIdx.x) * hidden;
    const float n = static_cast<float>(hidden);
    const float center = kLayerNorm ? mean[blockIdx.x] : 0.0f, inverse = rstd[blockIdx.x];
    const auto xhat = [&](int at) { return centered<kLayerNorm>(widen(x[first + at]), center) * inverse; };
    const auto scaled = [&](int at) {
        const float gamma = parameter(weight, parameters, at);
        return widen(grad[first + at]) * (zero_centered ? gamma + 1.0f : gamma);
    };
    float c1 = 0.0f;
    if (kLayerNorm) c1 = block_row_sum(hidden, scaled) / n;
    const float c2 = block_row_sum(hidden, [&](int at) { return scaled(at) * xhat(at); }) / n;
    for (int at = threadIdx.x; at < hidden; at += kBlockThreads) {
        float g = scaled(at);
        if (kLayerNorm) g = g - c1;
        float v = inverse * (g - xhat(at) * c2);
        if (residual != nullptr) v = widen(narrow(v)) + widen(residual[first + at]);
        dx[first + at] = narrow(v);
    }
}

extern "C" __global__ void __launch_bounds__(kBlockThreads)
    columns(const wide_t* __restrict__ grad, const wide_t* __restrict__ x, const float* __restrict__ mean,
            const float* __restrict__ rstd, float* __restrict__ partial, int rows, int hidden, int count, int chains) {
    const int blocks = (rows + count - 1) / count;
    const int block = blockIdx.x % blocks;
    const int column = blockIdx.x / blocks * kBlockThreads + threadIdx.x;
    if (column >= hidden) return;
    const int end = min((block + 1) * count, rows);
    float weight[4] = {}, bias[4] = {};
#pragma unroll
    for (int chain = 0; chain < 4; chain++) {
        if (chain >= chains) break;
        for (int row = block * count + chain; row < end; row += chains) {
            const size_t at = static_cast<size_t>(row) * hidden + column;
            const float incoming = widen(grad[at]);
            const float xhat = centered<kLayerNorm>(widen(x[at]), kLayerNorm ? mean[row] : 0.0f) * rstd[row];
            weight[chain] = weight[chain] + incoming * xhat;
            bias[chain] = bias[chain] + incoming;
        }
    }
    float* const to = partial + static_cast<size_t>(block) * hidden + column;
    // Chains that do not exist add +0 to sums that are never -0.
    *to = (weight[0] + weight[1]) + (weight[2] + weight[3]);
    if (kLayerNorm) to[static_cast<size_t>(blocks) * hidden] = (bias[0] + bias[1]) + (bias[2] + bias[3]);
}

#endif
