// Rows of a norm: parameters, and the written order of a row's sum.
//
// Which kernel runs when (optimized/ops/norms/norm.py, norm_backward.py, norm_cast.py, norm_cast_transpose.py and
// norm_cast_blocks.py choose):
//
//   file                    form                                rows
//   norm.cu                 in registers (norm_registers.cuh)   hidden <= 16384, a multiple of 8
//                           VECTOR 1: three times from L1       longer ones, a multiple of 8
//                           VECTOR 0: element by element        any other hidden
//   norm_cast.cu            in registers (norm_registers.cuh)   hidden <= 16384, a multiple of 16
//   norm_cast_transpose.cu  a row to a warp of norm_registers   hidden <= 1024, a multiple of 16
//                           CLUSTER: blocks share a row         hidden <= 16384, a multiple of 16
//   norm_statistics.cu      in registers (norm_registers.cuh)   before norm_cast_blocks.cu, which reads x again
//   norm_cast_blocks.cu     a tile of 128 x 128 (cast_blocks)   hidden a multiple of 16
//   norm_backward.cu        in registers                        hidden <= 8192, a multiple of 8
//                           KEPT: twice from shared memory      hidden <= 16384; layernorm of 5120 in 16 bits
//                           a block to a row, slowly            any other hidden, and fp32 beyond 8192
//   norm_total.cu           after each norm_backward            its columns' sums over blocks of rows
//
// The order (`reference/ops/norms/norm.py`): the complete binary tree over neighbours of the row, padded with +0.0 to a power
// of two, 1024 at least. A lane adds its 8 neighbours; shuffles over 1, 2, 4, 8, 16 lanes give sums of 256, which are
// added in pairs again. (Addition commutes, so a butterfly gives every lane the same bits.)
//
// A norm's file makes one `Config` of its macros, among them KIND: 0 layernorm, 1 rmsnorm. Types take it as their
// argument. WIDE is the element type (wide.cuh). A parameter's type is a run-time argument with WIDE's numbers: 0 fp32,
// 1 bf16, 2 fp16.
#pragma once
#include "common/wide.cuh"
#include "common/wide_store.cuh"

namespace twin {

constexpr unsigned kAllLanes = 0xFFFFFFFF;
constexpr int kStripe = 256;  // elements of a row that a warp holds at a time, 8 a lane

// 8 neighbouring parameters of type kType, widened; kept in L1, since every row reads them.
template <int kType>
__device__ __forceinline__ void parameters8(const void* parameters, int at, float (&out)[8]) {
    if constexpr (kType == 0) {
        const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(parameters) + at);
        const float4 low = __ldg(from), high = __ldg(from + 1);
        out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
        out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
    } else {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(parameters) + at));
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const unsigned word = words[i / 2];
            if constexpr (kType == 1)
                out[i] = __uint_as_float(i & 1 ? word & 0xFFFF0000u : word << 16);
            else
                out[i] = cvt_f32_f16(static_cast<unsigned short>(i & 1 ? word >> 16 : word & 0xFFFFu));
        }
    }
}

// 8 neighbours of gamma (weight, or weight + 1) or of beta, whose type is known at run time. Without a bias beta is
// -0.0, since y + -0.0 is y.
__device__ __forceinline__ void affine8(bool gamma, const void* parameters, int type, bool zero_centered, int at,
                                        float (&out)[8]) {
    if (parameters == nullptr) {
#pragma unroll
        for (int j = 0; j < 8; j++) out[j] = -0.0f;
    } else if (type == 0) {
        parameters8<0>(parameters, at, out);
    } else if (type == 1) {
        parameters8<1>(parameters, at, out);
    } else {
        parameters8<2>(parameters, at, out);
    }
    if (gamma && zero_centered)
#pragma unroll
        for (int j = 0; j < 8; j++) out[j] = out[j] + 1.0f;
}

// One parameter, whose type is known at run time, widened.
__device__ __forceinline__ float parameter(const void* parameters, int type, int at) {
    if (type == 0) return __ldg(static_cast<const float*>(parameters) + at);
    const unsigned short word = __ldg(static_cast<const unsigned short*>(parameters) + at);
    return type == 1 ? __uint_as_float(static_cast<unsigned>(word) << 16) : cvt_f32_f16(word);
}

__device__ __forceinline__ float tree8(const float (&v)[8]) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

__device__ constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

// Each v[i] summed over the warp's lanes: lane l gets the sum of v[l % kCount]. Lanes trade halves, so that kCount sums
// cost about kCount shuffles instead of 5 kCount: after the level of `kBit`, lanes with that bit hold the odd ones.
template <int kCount, int kBit = 1>
__device__ __forceinline__ float lane_sum(const float (&v)[kCount]) {
    if constexpr (kCount == 1) {
        float sum = v[0];
#pragma unroll
        for (int bit = kBit; bit < 32; bit *= 2) sum = sum + __shfl_xor_sync(kAllLanes, sum, bit);
        return sum;
    } else {
        float half[kCount / 2];
        const bool odd = threadIdx.x & kBit;
#pragma unroll
        for (int i = 0; i < kCount / 2; i++) {
            const float keep = odd ? v[2 * i + 1] : v[2 * i], give = odd ? v[2 * i] : v[2 * i + 1];
            half[i] = keep + __shfl_xor_sync(kAllLanes, give, kBit);
        }
        return lane_sum<kCount / 2, 2 * kBit>(half);
    }
}

// The tree over kCount neighbours, +0.0 beyond them.
template <int kCount, int kSpan = power_of_two(kCount)>
__device__ __forceinline__ float tree(const float* from) {
    if constexpr (kCount <= 0)
        return 0.0f;
    else if constexpr (kSpan == 1)
        return from[0];
    else
        return tree<(kCount < kSpan / 2 ? kCount : kSpan / 2), kSpan / 2>(from) +
               tree<kCount - kSpan / 2, kSpan / 2>(from + kSpan / 2);
}

// x - mean; rmsnorm: x.
template <bool kLayerNorm>
__device__ __forceinline__ float centered(float x, float mean) {
    return kLayerNorm ? x - mean : x;
}

// The sums of kCount warps, aligned so that their tree reads whole vectors.
template <int kCount>
struct alignas(16) Leaves {
    float sum[kCount < 4 ? 4 : power_of_two(kCount)];
};

// By a block of threads, for a row of any length.

constexpr int kBlockWarps = 8;
constexpr int kBlockThreads = 32 * kBlockWarps;
constexpr int kMaxStripes = 8192;  // hidden up to 2^21

// The sum over the row, for every thread. each(at, v) fills v with elements at .. at + 7, +0.0 beyond the end.
template <class Each>
__device__ __forceinline__ float block_row_sum8(int hidden, Each each) {
    __shared__ float sums[kMaxStripes], next[kMaxStripes / 2];
    int stripes = 4;
    while (stripes * kStripe < hidden) stripes *= 2;
    __syncthreads();  // the sum before has been read
    for (int i = threadIdx.x / 32; i < stripes; i += kBlockWarps) {
        float v[8];
        each(kStripe * i + static_cast<int>(threadIdx.x) % 32 * 8, v);
        const float lane[1] = {tree8(v)};
        const float sum = lane_sum(lane);
        if (threadIdx.x % 32 == 0) sums[i] = sum;
    }
    float *from = sums, *to = next;
    for (int n = stripes / 2; n > 0; n /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += kBlockThreads) to[i] = from[2 * i] + from[2 * i + 1];
        float* const swapped = from;
        from = to, to = swapped;
    }
    __syncthreads();
    return from[0];
}

// The same, element by element: value(at).
template <class Value>
__device__ __forceinline__ float block_row_sum(int hidden, Value value) {
    return block_row_sum8(hidden, [&](int at, float (&v)[8]) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = at + j < hidden ? value(at + j) : 0.0f;
    });
}

}  // namespace twin
