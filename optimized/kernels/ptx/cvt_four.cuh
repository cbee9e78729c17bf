// cvt of four values to FP8 codes of one word.
#pragma once

namespace twin {

// E4M3 codes, the first in bits 0-7: nearest even, saturating to ±448, every NaN to 0x7F. Two instructions, the second of
// which keeps the first one's codes; shifted and joined, words would take a third.
__device__ __forceinline__ unsigned cvt_e4m3x4(float first, float second, float third, float fourth) {
    unsigned codes;
    asm("{\n .reg .b16 low, high;\n cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n mov.b32 %0, {low, high};\n}"
        : "=r"(codes)
        : "f"(first), "f"(second), "f"(third), "f"(fourth));
    return codes;
}

}  // namespace twin
