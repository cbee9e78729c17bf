// Reading activations and gradients: 16 bytes at a time, widened to fp32 exactly.
//
// WIDE selects the element type: 0 fp32, 1 bf16, 2 fp16. A vector is 16 bytes, LANES elements.
#pragma once
#include "ptx/cvt.cuh"

#if WIDE == 0
typedef float wide_t;
#elif WIDE == 1 || WIDE == 2
typedef unsigned short wide_t;
#else
#error "WIDE is 0 (fp32), 1 (bf16) or 2 (fp16)"
#endif

constexpr int LANES = 16 / sizeof(wide_t);

// N neighbouring elements of a row, as loaded.
template <int N>
struct Vector {
    unsigned words[N * sizeof(wide_t) / 4];
};

// Element i (a constant after unrolling) of a vector.
template <int N>
__device__ __forceinline__ float widen(const Vector<N>& vector, int i) {
#if WIDE == 0
    return __uint_as_float(vector.words[i]);
#elif WIDE == 1
    return __uint_as_float(i & 1 ? vector.words[i / 2] & 0xFFFF0000u : vector.words[i / 2] << 16);
#else
    return cvt_f32_f16(static_cast<unsigned short>(i & 1 ? vector.words[i / 2] >> 16 : vector.words[i / 2] & 0xFFFFu));
#endif
}

// One element in memory, widened.
__device__ __forceinline__ float widen(wide_t element) {
#if WIDE == 0
    return element;
#elif WIDE == 1
    return __uint_as_float(static_cast<unsigned>(element) << 16);
#else
    return cvt_f32_f16(element);
#endif
}

// The one rounding back: nearest even.
__device__ __forceinline__ wide_t narrow(float value) {
#if WIDE == 0
    return value;
#elif WIDE == 1
    return cvt_bf16_f32(value);
#else
    return cvt_f16_f32(value);
#endif
}

// A vector that is read once: 8 or 16 bytes, aligned to its size. The load is a plain one, because the hints made
// for such data (L1::no_allocate, .cs, L1::evict_first) cost 4 to 10 % here (docs/kernels.md). `volatile` keeps the
// loads of an unrolled loop together and ahead of their uses.
template <int N>
__device__ __forceinline__ Vector<N> load_once(const wide_t* address) {
    Vector<N> v;
    if constexpr (sizeof(v) == 16)
        asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                     : "l"(address));
    else
        asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.words[0]), "=r"(v.words[1]) : "l"(address));
    return v;
}

// Eight neighbours, read once, at a multiple of 16 bytes.
typedef Vector<8> Eight;

__device__ __forceinline__ Eight load8(const wide_t* address) {
#if WIDE == 0
    const Vector<4> low = load_once<4>(address), high = load_once<4>(address + 4);
    return {low.words[0], low.words[1], low.words[2], low.words[3],
            high.words[0], high.words[1], high.words[2], high.words[3]};
#else
    return load_once<8>(address);
#endif
}

// The first `count` of N neighbours, at any address, and zeros.
template <int N>
__device__ __forceinline__ Vector<N> load_elements(const wide_t* address, int count) {
    Vector<N> v = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
#if WIDE == 0
        if (i < count) v.words[i] = __float_as_uint(address[i]);
#else
        if (i < count) v.words[i / 2] |= static_cast<unsigned>(address[i]) << i % 2 * 16;
#endif
    }
    return v;
}
