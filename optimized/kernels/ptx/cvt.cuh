// Conversions: cvt to FP8, and the 16-bit formats to fp32. One function per instruction.
#pragma once

namespace twin {

// Two E4M3 codes, low in bits 0-7: nearest even, saturating to ±448, every NaN to 0x7F.
__device__ __forceinline__ unsigned cvt_e4m3x2(float low, float high) {
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

// Two E5M2 codes, low in bits 0-7: nearest even, saturating to ±57344, every NaN to 0x7F.
__device__ __forceinline__ unsigned cvt_e5m2x2(float low, float high) {
    unsigned short codes;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

// fp16 to fp32, exact (subnormals too).
__device__ __forceinline__ float cvt_f32_f16(unsigned short word) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(word));
    return value;
}

// fp32 to fp16, nearest even, overflow to infinity.
__device__ __forceinline__ unsigned short cvt_f16_f32(float value) {
    unsigned short word;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(word) : "f"(value));
    return word;
}

// fp32 to bf16, nearest even, overflow to infinity.
__device__ __forceinline__ unsigned short cvt_bf16_f32(float value) {
    unsigned short word;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(word) : "f"(value));
    return word;
}

// Two fp32 as bf16, low in bits 0-15: nearest even, overflow to infinity.
__device__ __forceinline__ unsigned cvt_bf16x2(float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// Two fp32 as fp16, low in bits 0-15: nearest even, overflow to infinity.
__device__ __forceinline__ unsigned cvt_f16x2(float low, float high) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

}  // namespace twin
