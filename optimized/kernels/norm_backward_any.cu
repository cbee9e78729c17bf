// norm_backward_any: norm_backward.cu's results for any hidden up to 2^21 and any alignment, at a fraction of the
// speed.
//
// `rows` computes dx, a block of threads to a row; `columns` computes partial, a thread to a column of a block of rows.
// Formulas and orders: norm_backward.cu and norm_row.cuh; CHAINS is an argument.
#include "norm_row.cuh"
#include "norm_block.cuh"

using namespace twin;

extern "C" __global__ void __launch_bounds__(kThreads) rows(
    const wide_t* __restrict__ grad, const wide_t* __restrict__ x, const void* __restrict__ weight,
    const float* __restrict__ mean, const float* __restrict__ rstd, const wide_t* __restrict__ residual,
    wide_t* __restrict__ dx, int hidden, int zero_centered, int parameters) {
    const size_t first = static_cast<size_t>(blockIdx.x) * hidden;
    const float n = static_cast<float>(hidden);
    const float center = KIND == 0 ? mean[blockIdx.x] : 0.0f, inverse = rstd[blockIdx.x];
    const auto xhat = [&](int at) { return centered(widen(x[first + at]), center) * inverse; };
    const auto scaled = [&](int at) {
        const float gamma = parameter(weight, parameters, at);
        return widen(grad[first + at]) * (zero_centered ? gamma + 1.0f : gamma);
    };
    float c1 = 0.0f;
    if (KIND == 0) c1 = block_row_sum(hidden, scaled) / n;
    const float c2 = block_row_sum(hidden, [&](int at) { return scaled(at) * xhat(at); }) / n;
    for (int at = threadIdx.x; at < hidden; at += kThreads) {
        float g = scaled(at);
        if (KIND == 0) g = g - c1;
        float v = inverse * (g - xhat(at) * c2);
        if (residual != nullptr) v = widen(narrow(v)) + widen(residual[first + at]);
        dx[first + at] = narrow(v);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) columns(
    const wide_t* __restrict__ grad, const wide_t* __restrict__ x, const float* __restrict__ mean,
    const float* __restrict__ rstd, float* __restrict__ partial, int rows, int hidden, int count, int chains) {
    const int blocks = (rows + count - 1) / count;
    const int block = blockIdx.x % blocks;
    const int column = blockIdx.x / blocks * kThreads + threadIdx.x;
    if (column >= hidden) return;
    const int end = min((block + 1) * count, rows);
    float weight[4] = {}, bias[4] = {};
#pragma unroll
    for (int chain = 0; chain < 4; chain++) {
        if (chain >= chains) break;
        for (int row = block * count + chain; row < end; row += chains) {
            const size_t at = static_cast<size_t>(row) * hidden + column;
            const float incoming = widen(grad[at]);
            const float xhat = centered(widen(x[at]), KIND == 0 ? mean[row] : 0.0f) * rstd[row];
            weight[chain] = weight[chain] + incoming * xhat;
            bias[chain] = bias[chain] + incoming;
        }
    }
    float* const to = partial + static_cast<size_t>(block) * hidden + column;
    // Chains that do not exist add +0 to sums that are never -0.
    *to = (weight[0] + weight[1]) + (weight[2] + weight[3]);
    if (KIND == 0)
        to[static_cast<size_t>(blocks) * hidden] = (bias[0] + bias[1]) + (bias[2] + bias[3]);
}
