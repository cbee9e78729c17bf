// adafactor: one step of Adafactor for one tensor [batch, rows, cols]; formulas and orders: reference/ops/optimizers/adafactor.py.
//
//     adafactor_rows      row_var = lerp(row_var, mean of g^2 along a row, w); a block a row
//     adafactor_columns   sums[block of 64 rows, column] of g^2 in float64; a thread a column
//     adafactor_col_var   col_var = lerp(col_var, mean of those sums, w); a thread a column
//     adafactor_factor    factor[batch] = max(mean of row_var, eps1); a block a batch
//     adafactor_variance  variance = lerp(variance, g g, w), of a vector
//     adafactor_squares   chunk_sums of u^2 in float64, in grad_norm's order; a block a chunk of 32,768 neighbours
//     adafactor_rate      rate = max(eps2, rms(p)) rho / max(1, rms(u) / d); one block
//     adafactor_step      p = p decay - rate u
//
// g is WIDE, p fp32 (MASTER 1) or WIDE (MASTER 0). The chunk sums of p are grad_norm's kernel's. u is computed twice.
#include "common/multi_tensor.cuh"

using namespace twin;

#if MASTER
using param_t = float;
#else
using param_t = wide_t;
#endif

constexpr int kRowsOfBlock = 64;
constexpr int kColumns = kThreads * kElements;
constexpr int kRowsOfChunk = 16;
constexpr int kTotalThreads = 1024;

// NaN where either is NaN, as NumPy's maximum.
__device__ __forceinline__ float largest(float a, float b) { return isnan(a) || isnan(b) ? a + b : fmaxf(a, b); }

__device__ __forceinline__ float lerp(float x, float y, float w) {
    return w < 0.5f ? x + w * (y - x) : y - (y - x) * (1.0f - w);
}

// Thread 0's result: the block's values in halves of neighbours, 32 at a time and then the warps'. All threads call it.
template <int kBlock>
__device__ __forceinline__ double block_sum(double value, double* warps) {
#pragma unroll
    for (int half = 16; half > 0; half /= 2) value += __shfl_down_sync(0xFFFFFFFF, value, half);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int half = kBlock / 64; half > 0; half /= 2)
#pragma unroll
            for (int i = 0; i < half; i++) warps[i] += warps[i + half];
    }
    __syncthreads();
    const double all = warps[0];
    __syncthreads();
    return all;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    adafactor_rows(const wide_t* __restrict__ grad, float* row_var, long long cols, float w) {
    __shared__ double warps[kThreads / 32];
    const wide_t* row = grad + blockIdx.x * cols;
    double sum = 0.0;
    for (long long c = threadIdx.x; c < cols; c += kThreads) {
        const double x = widen(row[c]);
        sum = fma(x, x, sum);
    }
    const double all = block_sum<kThreads>(sum, warps);
    if (threadIdx.x == 0)
        row_var[blockIdx.x] = lerp(row_var[blockIdx.x], static_cast<float>(all / static_cast<double>(cols)), w);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    adafactor_columns(const wide_t* __restrict__ grad, double* __restrict__ sums, long long rows, long long cols,
                      long long blocks) {
    const long long c = static_cast<long long>(blockIdx.y) * kThreads + threadIdx.x;
    if (c >= cols) return;
    const long long batch = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const long long first = block * kRowsOfBlock, last = min(first + kRowsOfBlock, rows);
    double sum = 0.0;
    for (long long r = first; r < last; r++) {
        const double x = widen(grad[(batch * rows + r) * cols + c]);
        sum = fma(x, x, sum);
    }
    sums[blockIdx.x * cols + c] = sum;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    adafactor_col_var(const double* __restrict__ sums, float* col_var, long long rows, long long cols, long long blocks,
                      float w) {
    const long long c = static_cast<long long>(blockIdx.y) * kThreads + threadIdx.x;
    if (c >= cols) return;
    double sum = 0.0;
    for (long long block = 0; block < blocks; block++) sum += sums[(blockIdx.x * blocks + block) * cols + c];
    float* at = col_var + blockIdx.x * cols + c;
    *at = lerp(*at, static_cast<float>(sum / static_cast<double>(rows)), w);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    adafactor_factor(const float* __restrict__ row_var, float* factor, long long rows, float eps1) {
    __shared__ double warps[kThreads / 32];
    double sum = 0.0;
    for (long long r = threadIdx.x; r < rows; r += kThreads) sum += row_var[blockIdx.x * rows + r];
    const double all = block_sum<kThreads>(sum, warps);
    if (threadIdx.x == 0) factor[blockIdx.x] = largest(static_cast<float>(all / static_cast<double>(rows)), eps1);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    adafactor_variance(const wide_t* __restrict__ grad, float* variance, long long count, float w) {
    const long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= count) return;
    const float g = widen(grad[i]);
    variance[i] = lerp(variance[i], g * g, w);
}

// What u needs; factor is null for a vector, whose variance is row_var.
struct State {
    const wide_t* grad;
    const float* row_var;
    const float* col_var;
    const float* factor;
    long long rows, cols, count;
    float eps1_squared;
    int unused;
};

// u of the eight neighbours from `first` on, +0 behind the end. One division of long integers for all eight.
__device__ __forceinline__ void update_of(float (&u)[kElements], const State& s, long long first) {
    long long row = 0, col = first, batch = 0, left = 0;  // left: rows of the batch behind this one
    if (s.factor != nullptr && first < s.count) {
        row = first / s.cols, batch = row / s.rows;
        col = first - row * s.cols, left = s.rows - 1 - (row - batch * s.rows);
    }
#pragma unroll
    for (int i = 0; i < kElements; i++) {
        u[i] = 0.0f;
        if (first + i >= s.count) continue;
        float v;
        if (s.factor == nullptr) {
            v = s.row_var[first + i];
        } else {
            if (col == s.cols) {
                col = 0, row++;
                if (left-- == 0) batch++, left = s.rows - 1;
            }
            v = (s.row_var[row] * s.col_var[batch * s.cols + col]) / s.factor[batch];
            col++;
        }
        u[i] = (1.0f / sqrtf(largest(v, s.eps1_squared))) * widen(s.grad[first + i]);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    adafactor_squares(const __grid_constant__ State state, double* chunk_sums) {
    __shared__ double warps[kThreads / 32];
    const long long start = static_cast<long long>(blockIdx.x) * kColumns * kRowsOfChunk + threadIdx.x * kElements;
    double sum[kElements] = {};
    for (int row = 0; row < kRowsOfChunk; row++) {
        float u[kElements];
        update_of(u, state, start + row * kColumns);
#pragma unroll
        for (int i = 0; i < kElements; i++) sum[i] = fma(static_cast<double>(u[i]), static_cast<double>(u[i]), sum[i]);
    }
#pragma unroll
    for (int half = kElements / 2; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    const double all = block_sum<kThreads>(sum[0], warps);
    if (threadIdx.x == 0) chunk_sums[blockIdx.x] = all;
}

extern "C" __global__ void __launch_bounds__(kTotalThreads)
    adafactor_rate(const double* __restrict__ of_param, const double* __restrict__ of_update, long long chunks,
                   long long count, float rho, float eps2, float d, float* rate) {
    __shared__ double warps[kTotalThreads / 32];
    double param = 0.0, update = 0.0;
    for (long long k = threadIdx.x; k < chunks; k += kTotalThreads) param += of_param[k], update += of_update[k];
    const double all_param = block_sum<kTotalThreads>(param, warps),
                 all_update = block_sum<kTotalThreads>(update, warps);
    if (threadIdx.x == 0) {
        const double numbers = static_cast<double>(count);
        const float a = largest(eps2, static_cast<float>(sqrt(all_param / numbers))) * rho;
        *rate = a / largest(1.0f, static_cast<float>(sqrt(all_update / numbers)) / d);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    adafactor_step(const __grid_constant__ State state, param_t* param, const float* rate, float decay, int maximize) {
    const long long first = (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) * kElements;
    const float c = *rate;
    float u[kElements];
    update_of(u, state, first);
#pragma unroll
    for (int i = 0; i < kElements; i++) {
        if (first + i >= state.count) continue;
        float p = wide_of(param[first + i]);
        if (decay != 1.0f) p = p * decay;
        const float moved = c * u[i];
        param[first + i] = narrow_to<param_t>(maximize ? p + moved : p - moved);
    }
}
