// The codes of q, k and v as 16-bit numbers, for attention's backward.   x = round(fp32(code) * scale_inv)
//
// Codes are E4M3, 16 to a thread; block (.., n) has some of the n-th tensor's. Definition:
// reference/ops/attentions/attention_fp8_backward.py.
//
// Defines: FORMAT (BF16 | FP16).
#include "ptx/cvt.cuh"
#include "ptx/cvt_fp8.cuh"
#include "ptx/wgmma.cuh"

using namespace twin;

constexpr int kThreads = 256;

// Two codes as two 16-bit numbers, the first in the low half.
__device__ __forceinline__ unsigned dequantized(unsigned codes, float scale_inv) {
    const unsigned halves = cvt_f16x2_e4m3x2(static_cast<unsigned short>(codes));
    const float low = __fmul_rn(cvt_f32_f16(static_cast<unsigned short>(halves)), scale_inv);
    const float high = __fmul_rn(cvt_f32_f16(static_cast<unsigned short>(halves >> 16)), scale_inv);
    if constexpr (same_type<FORMAT, BF16>) return cvt_bf16x2(low, high);
    return cvt_f16x2(low, high);
}

__device__ __forceinline__ uint4 dequantized8(unsigned low, unsigned high, float scale_inv) {
    return make_uint4(dequantized(low, scale_inv), dequantized(low >> 16, scale_inv), dequantized(high, scale_inv),
                      dequantized(high >> 16, scale_inv));
}

// One of three arguments.
template <class T>
__device__ __forceinline__ T chosen(int n, T q, T k, T v) {
    return n == 0 ? q : n == 1 ? k : v;
}

// q_count, kv_count: how many times 16 codes.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_dequantize(const uint4* q, const uint4* k, const uint4* v, const float* q_scale_inv,
                         const float* k_scale_inv, const float* v_scale_inv, uint4* q_out, uint4* k_out, uint4* v_out,
                         long long q_count, long long kv_count) {
    const long long at = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
    const int n = blockIdx.y;
    if (at >= chosen(n, q_count, kv_count, kv_count)) return;
    const uint4 codes = __ldg(chosen(n, q, k, v) + at);
    const float scale_inv = __ldg(chosen(n, q_scale_inv, k_scale_inv, v_scale_inv));
    uint4* out = chosen(n, q_out, k_out, v_out) + 2 * at;
    out[0] = dequantized8(codes.x, codes.y, scale_inv);
    out[1] = dequantized8(codes.z, codes.w, scale_inv);
}
