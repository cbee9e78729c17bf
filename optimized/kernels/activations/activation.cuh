// One element of an activation and of its backward, in fp32 with the roundings of reference/ops/activations/activation.py.
//
//     y   = act(x1), or act(x1) * x2 where gated
//     dx1 = grad * act'(x1), or (grad * x2) * act'(x1) where gated, with dx2 = grad * act(x1)
//
// KIND: 0 gelu, 1 geglu, 2 relu, 3 silu, 4 swiglu, 5 reglu, 6 srelu, 7 sreglu, 8 qgelu, 9 qgeglu, 10 glu, 11
// clamped_swiglu. WIDE says whether x is a 16-bit value, for which gelu's and silu's act and act' are the recorded fast
// forms, or an fp32 one (elementary.cuh).
//
// clamped_swiglu limits x1 and x2 first and adds OFFSET to x2; act(x) = x sigmoid(ALPHA x). Its fp32 parameters are
// macros: LIMIT, ALPHA, ALPHA_LOG2E = ALPHA log2(e), OFFSET.
#pragma once
#include "common/wide.cuh"
#include "common/elementary.cuh"

namespace twin {

#if KIND < 0 || KIND > 11
#error "KIND is a number from 0 (gelu) to 11 (clamped_swiglu)"
#endif

constexpr bool kGated = KIND == 1 || KIND == 4 || KIND == 5 || KIND == 7 || KIND >= 9;
constexpr int kHalves = kGated ? 2 : 1;  // of a row of x and dx

__device__ __forceinline__ float relu(float x) { return x <= 0.0f ? 0.0f : x; }  // NaN stays

#if KIND == 11
constexpr float kLimit = LIMIT, kAlpha = ALPHA, kAlphaLog2e = ALPHA_LOG2E, kOffset = OFFSET;
constexpr bool kZerosGiveMinusZeros = kOffset < 0.0f;  // dx of +0, +0 and +0

__device__ __forceinline__ Evaluated swish(float x) {
    const float e = exp2_nonpositive(fmaxf(fabsf(x) * -kAlphaLog2e, -127.0f));
    const float r = reciprocal_1_2(1.0f + e), h = e * r;
    return {(x * (x < 0.0f ? e : 1.0f)) * r, __fmaf_rn((r * h) * kAlpha, x, x < 0.0f ? h : r)};
}
#else
constexpr bool kZerosGiveMinusZeros = false;
#endif

__device__ __forceinline__ float act(float x) {
#if KIND <= 1
    return WIDE == 0 ? gelu_f32(x) : gelu(x);
#elif KIND == 2 || KIND == 5
    return relu(x);
#elif KIND <= 4
    return WIDE == 0 ? silu_f32(x) : silu(x);
#elif KIND <= 7
    return relu(x) * relu(x);
#elif KIND <= 9
    return qgelu(x);
#elif KIND == 10
    return sigmoid(x);
#else
    return swish(x > kLimit ? kLimit : x).value;
#endif
}

__device__ __forceinline__ float derivative(float x) {
#if KIND <= 1
    return WIDE == 0 ? dgelu_f32(x) : dgelu(x);
#elif KIND == 2 || KIND == 5
    return x > 0.0f ? 1.0f : act(x);
#elif KIND <= 4
    return WIDE == 0 ? dsilu_f32(x) : dsilu(x);
#elif KIND <= 7
    return relu(x) * 2.0f;
#elif KIND <= 9
    return dqgelu(x);
#elif KIND == 10
    return dsigmoid(x);
#else
    return x > kLimit ? 0.0f : swish(x).slope;
#endif
}

// What act(x1) is multiplied by.
__device__ __forceinline__ float gate(float x2) {
#if KIND == 11
    return (x2 > kLimit ? kLimit : x2 < -kLimit ? -kLimit : x2) + kOffset;  // NaN stays
#else
    return x2;
#endif
}

// What grad is multiplied by for dx2, given act(x1).
__device__ __forceinline__ float gate_slope(float x2, float act) {
#if KIND == 11
    return fabsf(x2) > kLimit ? 0.0f : act;
#else
    return act;
#endif
}

// act and act' of a gated kind, which its backward needs both. The compiler sees that silu and dsilu share a sigmoid.
__device__ __forceinline__ Evaluated act_and_derivative(float x) {
    if constexpr (KIND == 1) return WIDE == 0 ? gelu_and_slope_f32(x) : gelu_and_slope(x);
    return {act(x), derivative(x)};
}

// The second argument is x2, which only the gated kinds read.
__device__ __forceinline__ float forward(float x1, float x2) { return kGated ? act(x1) * gate(x2) : act(x1); }

__device__ __forceinline__ void backward(float grad, float x1, float x2, float (&dx)[kHalves]) {
    if constexpr (kGated) {
        const Evaluated at = act_and_derivative(x1);
        dx[0] = (grad * gate(x2)) * at.slope;
        dx[1] = grad * gate_slope(x2, at.value);
    } else {
        dx[0] = grad * derivative(x1);
    }
}

}  // namespace twin
