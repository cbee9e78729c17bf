// How an optimizer keeps numbers in fewer bits than fp32; formulas: reference/ops/optimizers/adam_states.py.
//
//     kFp32       x
//     kBf16       x, rounded
//     kFp16Scaled x = fp32(code) scale, code = round_fp16(x (1 / scale))
//     kE4m3Scaled the same with E4M3 codes, saturating
//
//     scale = max(min(amax, FLT_MAX) / range, 2^-100), amax of the whole tensor, NaN ignored
#pragma once
#include "common/multi_tensor.cuh"
#include "ptx/cvt_fp8.cuh"

namespace twin {

constexpr int kFp32 = 0, kBf16 = 1, kFp16Scaled = 2, kE4m3Scaled = 3;

__device__ constexpr bool is_scaled(int kind) { return kind >= kFp16Scaled; }

template <int kKind>
__device__ __forceinline__ float scale_of(float amax) {
    constexpr float range = kKind == kE4m3Scaled ? 448.0f : 32752.0f;
    return fmaxf(fminf(amax, 3.402823466e38f) / range, 7.888609052210118e-31f);
}

// Bytes of one number.
__device__ constexpr int size_of(int kind) { return kind == kFp32 ? 4 : kind == kE4m3Scaled ? 1 : 2; }

// Eight codes as they lie in memory: kWords words of 32 bits.
template <int kKind>
struct Codes {
    static constexpr int kWords = kElements * size_of(kKind) / 4;
    static constexpr int kPerWord = 4 / size_of(kKind);
    static constexpr int kBits = 8 * size_of(kKind);
    static constexpr unsigned kMask = kBits == 32 ? 0xFFFFFFFFu : (1u << kBits % 32) - 1;
    unsigned words[kWords];

    __device__ __forceinline__ unsigned code(int i) const {
        return words[i / kPerWord] >> i % kPerWord * kBits & kMask;
    }
    __device__ __forceinline__ void put(int i, unsigned code) { words[i / kPerWord] |= code << i % kPerWord * kBits; }
};

// Codes from `at` on; those from `count` on are zero. `whole`: all eight exist, at an aligned address.
template <int kKind>
__device__ __forceinline__ Codes<kKind> load_codes(const void* x, long long at, long long count, bool whole) {
    Codes<kKind> found = {};
    const char* address = static_cast<const char*>(x) + at * size_of(kKind);
    if (whole) {
        if constexpr (kKind == kE4m3Scaled) {
            const uint2 part = *reinterpret_cast<const uint2*>(address);
            found.words[0] = part.x, found.words[1] = part.y;
        } else {
#pragma unroll
            for (int i = 0; i < found.kWords; i += 4) {
                const uint4 part = *reinterpret_cast<const uint4*>(address + 4 * i);
                found.words[i] = part.x, found.words[i + 1] = part.y;
                found.words[i + 2] = part.z, found.words[i + 3] = part.w;
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < kElements; i++) {
            if (at + i >= count) continue;
            if constexpr (size_of(kKind) == 4) found.put(i, reinterpret_cast<const unsigned*>(address)[i]);
            if constexpr (size_of(kKind) == 2) found.put(i, reinterpret_cast<const unsigned short*>(address)[i]);
            if constexpr (size_of(kKind) == 1) found.put(i, reinterpret_cast<const unsigned char*>(address)[i]);
        }
    }
    return found;
}

template <int kKind>
__device__ __forceinline__ void store_codes(void* x, const Codes<kKind>& codes, long long at, long long count,
                                            bool whole) {
    char* address = static_cast<char*>(x) + at * size_of(kKind);
    if (whole) {
        if constexpr (kKind == kE4m3Scaled) {
            *reinterpret_cast<uint2*>(address) = make_uint2(codes.words[0], codes.words[1]);
        } else {
#pragma unroll
            for (int i = 0; i < codes.kWords; i += 4)
                *reinterpret_cast<uint4*>(address + 4 * i) =
                    make_uint4(codes.words[i], codes.words[i + 1], codes.words[i + 2], codes.words[i + 3]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kElements; i++) {
            if (at + i >= count) continue;
            const unsigned code = codes.code(i);
            if constexpr (size_of(kKind) == 4) reinterpret_cast<unsigned*>(address)[i] = code;
            if constexpr (size_of(kKind) == 2) reinterpret_cast<unsigned short*>(address)[i] = code;
            if constexpr (size_of(kKind) == 1) reinterpret_cast<unsigned char*>(address)[i] = code;
        }
    }
}

// The numbers of codes without their scale, two at a time.
template <int kKind>
__device__ __forceinline__ void decode(float (&value)[kElements], const Codes<kKind>& codes) {
#pragma unroll
    for (int i = 0; i < kElements; i += 2) {
        if constexpr (kKind == kFp32) {
            value[i] = __uint_as_float(codes.words[i]), value[i + 1] = __uint_as_float(codes.words[i + 1]);
        } else if constexpr (kKind == kBf16) {
            value[i] = __uint_as_float(codes.words[i / 2] << 16);
            value[i + 1] = __uint_as_float(codes.words[i / 2] & 0xFFFF0000);
        } else {
            unsigned halves = codes.words[i / codes.kPerWord];
            if constexpr (kKind == kE4m3Scaled)
                halves = cvt_f16x2_e4m3x2(static_cast<unsigned short>(halves >> i % 4 * 8));
            value[i] = cvt_f32_f16(static_cast<unsigned short>(halves));
            value[i + 1] = cvt_f32_f16(static_cast<unsigned short>(halves >> 16));
        }
    }
}

// Codes of numbers that are divided by their scale.
template <int kKind>
__device__ __forceinline__ Codes<kKind> encode(const float (&value)[kElements]) {
    Codes<kKind> codes = {};
#pragma unroll
    for (int i = 0; i < kElements; i += 2) {
        const float low = value[i], high = value[i + 1];
        if constexpr (kKind == kFp32) codes.put(i, __float_as_uint(low)), codes.put(i + 1, __float_as_uint(high));
        if constexpr (kKind == kBf16) codes.words[i / 2] = cvt_bf16x2(low, high);
        if constexpr (kKind == kFp16Scaled) codes.words[i / 2] = cvt_f16x2(low, high);
        if constexpr (kKind == kE4m3Scaled) codes.words[i / 4] |= cvt_e4m3x2(low, high) << i % 4 * 8;
    }
    return codes;
}

// Numbers that are kept as kKind, from their codes, and back: with the tensor's scale, or the inverse of the new one.
template <int kKind>
__device__ __forceinline__ void decode(float (&value)[kElements], const Codes<kKind>& codes, float scale) {
    decode<kKind>(value, codes);
    if constexpr (is_scaled(kKind)) {
#pragma unroll
        for (int i = 0; i < kElements; i++) value[i] = value[i] * scale;
    }
}

template <int kKind>
__device__ __forceinline__ Codes<kKind> encode(const float (&value)[kElements], float inverse) {
    if constexpr (is_scaled(kKind)) {
        float kept[kElements];
#pragma unroll
        for (int i = 0; i < kElements; i++) kept[i] = value[i] * inverse;
        return encode<kKind>(kept);
    } else {
        return encode<kKind>(value);
    }
}

}  // namespace twin
