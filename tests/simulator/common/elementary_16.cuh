// kernels/common/elementary_16.cuh on a CPU: the words that were recorded, because ex2.approx between those of its grid is
// Hopper's own.
#pragma once

#include "ptx/cvt.cuh"

namespace twin {

constexpr float kLog2e = 1.44269502162933349609375f;
// tanh-GELU is x sigmoid(z), z = 2 sqrt(2/pi) (x + 0.044715 x^3) = x (kGelu1 + kGelu3 x^2).
constexpr float kGelu1 = 1.5957691216057308f;
constexpr float kGeluSlope = 0.21406444881780075f;  // z' = kGelu1 + kGeluSlope x^2
constexpr float kGelu1Log2e = 2.302208198144325f;  // kGelu1 log2(e)
constexpr float kGelu3Log2e = 0.1029432395800235f;  // kGelu3 log2(e)

// A function's value and its derivative, at one x. The clamp of x^2 in gelu's changes no bit of the value: where x^2 is
// greater, its sigmoid is 0 or 1.
struct Evaluated {
    float value, slope;
};

// Of the functions gelu, dgelu, silu and dsilu (0 .. 3), by the word of a bf16 or fp16 value.
inline float recorded(int function, float x) {
    const unsigned word = __float_as_uint(x);
    const bool is_bf16 = (word & 0xFFFF) == 0;
    return simulator::activations[2 * function + !is_bf16][is_bf16 ? word >> 16 : cvt_f16_f32(x)];
}
inline float gelu(float x) { return recorded(0, x); }
inline float dgelu(float x) { return recorded(1, x); }
inline float silu(float x) { return recorded(2, x); }
inline float dsilu(float x) { return recorded(3, x); }
inline Evaluated gelu_and_slope(float x) { return {gelu(x), dgelu(x)}; }

}  // namespace twin
