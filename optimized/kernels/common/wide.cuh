// Reading activations and gradients: 16 bytes at a time, widened to fp32 exactly.
//
// WIDE selects the element type: 0 fp32, 1 bf16, 2 fp16. A vector is 16 bytes, kLanes elements.
#pragma once
#include "ptx/cvt.cuh"
#include "ptx/load.cuh"

namespace twin {

#if WIDE == 0
using wide_t = float;
#elif WIDE == 1 || WIDE == 2
using wide_t = unsigned short;
#else
#error "WIDE is 0 (fp32), 1 (bf16) or 2 (fp16)"
#endif

constexpr int kLanes = 16 / sizeof(wide_t);

// kCount neighbouring elements of a row, as loaded.
template <int kCount>
struct Vector {
    unsigned words[kCount * sizeof(wide_t) / 4];
};

// A value of WIDE's type in fp32, exact, and back: one rounding, nearest even.
__device__ __forceinline__ float widen(wide_t element) {
    if constexpr (WIDE == 0) return element;
    if constexpr (WIDE == 1) return __uint_as_float(static_cast<unsigned>(element) << 16);
    return cvt_f32_f16(element);
}
__device__ __forceinline__ wide_t narrow(float value) {
    if constexpr (WIDE == 0) return value;
    return WIDE == 1 ? cvt_bf16_f32(value) : cvt_f16_f32(value);
}

// Element i (a constant after unrolling) of a vector.
template <int kCount>
__device__ __forceinline__ float widen(const Vector<kCount>& vector, int i) {
    const unsigned word = vector.words[WIDE == 0 ? i : i / 2];
    if constexpr (WIDE == 0) return __uint_as_float(word);
    if constexpr (WIDE == 1) return __uint_as_float(i & 1 ? word & 0xFFFF0000 : word << 16);
    return cvt_f32_f16(static_cast<unsigned short>(i & 1 ? word >> 16 : word & 0xFFFF));
}

// A vector that is read once: 8 or 16 bytes, aligned to its size. No cache hint: those made for such data
// (L1::no_allocate, .cs, L1::evict_first) cost 4 to 10 % here (docs/log/cast.md).
template <int kCount>
__device__ __forceinline__ Vector<kCount> load_once(const wide_t* address) {
    Vector<kCount> v;
    if constexpr (sizeof(v) == 16)
        load_read_only(v.words[0], v.words[1], v.words[2], v.words[3], address);
    else
        load_read_only(v.words[0], v.words[1], address);
    return v;
}

// Eight neighbours that are read once, at a multiple of 16 bytes.
using Eight = Vector<8>;

__device__ __forceinline__ Eight load8(const wide_t* address) {
#if WIDE == 0
    const Vector<4> low = load_once<4>(address), high = load_once<4>(address + 4);
    return {low.words[0],  low.words[1],  low.words[2],  low.words[3],
            high.words[0], high.words[1], high.words[2], high.words[3]};
#else
    return load_once<8>(address);
#endif
}

// The first `count` of kCount neighbours, at any address; the others are zeros.
template <int kCount>
__device__ __forceinline__ Vector<kCount> load_elements(const wide_t* address, long long count) {
    Vector<kCount> v = {};
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        if (i >= count) continue;
        if constexpr (WIDE == 0)
            v.words[i] = __float_as_uint(address[i]);
        else
            v.words[i / 2] |= static_cast<unsigned>(address[i]) << i % 2 * 16;
    }
    return v;
}

}  // namespace twin
