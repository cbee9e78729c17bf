// The gradient of attention's sinks.   dsink[head] = -Σ a D, a the sink's weight, over the queries of all batches
//
// Definition and order: reference/ops/attentions/attention_sink.py. A block takes a head. m, inv: fp32 [b, h, sq]; dots: D, fp32
// [b h, padded].
#include "common/elementary.cuh"

using namespace twin;

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_sink(const float* m, const float* inv, const float* dots, const float* sinks, float* dsinks, int batches,
                   int heads, int sq, int padded) {
    __shared__ float sums[kThreads];
    const int head = blockIdx.x;
    const float z = __fmul_rn(sinks[head], kLog2e);
    const long long count = static_cast<long long>(batches) * sq;
    float sum = 0.0f;
    for (long long n = threadIdx.x; n < count; n += kThreads) {
        const long long of = n / sq * heads + head, query = n % sq;
        const float inverse = inv[of * sq + query];
        const float weight = inverse == 0.0f ? 0.0f : __fmul_rn(exp2_grid(z - m[of * sq + query]), inverse);
        sum = __fmaf_rn(weight, dots[of * padded + query], sum);
    }
    sums[threadIdx.x] = sum;
    for (int h = kThreads / 2; h > 0; h /= 2) {
        __syncthreads();
        if (threadIdx.x < h) sums[threadIdx.x] = sums[threadIdx.x] + sums[threadIdx.x + h];
    }
    if (threadIdx.x == 0) dsinks[head] = -sums[0];
}
