// What follows a GEMM whose accumulators are in memory.   out = round(fp32(fp32(acc * scale) + bias))
//
// acc fp32 and out (WIDE), contiguous [m, n]. scale = fp32(a_scale_inv * b_scale_inv); without scales (null) acc is not
// multiplied. bias [n], of a type of its own, or none. Every step is one fp32 rounding, then one to the type of out.
//
// Bound by memory. A thread has eight neighbours; at the end, or where an address is no multiple of 16 bytes (`vector`),
// one by one.
#include "common/wide_store.cuh"
#include "gemm_epilogue.cuh"

using namespace twin;

constexpr int kThreads = 256;
constexpr int kCount = 8;

extern "C" __global__ void __launch_bounds__(kThreads)
    end_gemm(const float* __restrict__ acc, wide_t* __restrict__ out, const void* __restrict__ bias, int bias_type,
             const float* __restrict__ a_scale_inv, const float* __restrict__ b_scale_inv, long long count, int n,
             int vector) {
    const long long at = (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
    if (at >= count) return;
    const bool whole = vector != 0 && at + kCount <= count;
    float values[kCount];
    if (whole) {
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(acc + at + i);
            values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kCount; i++) values[i] = at + i < count ? acc[at + i] : 0.0f;
    }
    if (a_scale_inv != nullptr) scale_tile(values, __fmul_rn(*a_scale_inv, *b_scale_inv));
    if (bias_type != kNoBias) {
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const int column = static_cast<int>((at + i) % n);
            const float value = bias_type == kBiasFP32
                                    ? static_cast<const float*>(bias)[column]
                                    : widen_bias(static_cast<const unsigned short*>(bias)[column], bias_type);
            values[i] = __fadd_rn(values[i], value);
        }
    }
    if (whole)
        store_eight(out + at, values);
    else
        store_elements(out + at, values, count - at);
}
