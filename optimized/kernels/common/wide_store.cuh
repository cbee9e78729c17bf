// Neighbouring results of a row, rounded to the element type of wide.cuh and stored 16 bytes at a time.
#pragma once

#include "wide.cuh"

namespace twin {

__device__ __forceinline__ unsigned word_of(const float* values) {
    if constexpr (WIDE == 0) return __float_as_uint(values[0]);
    return WIDE == 1 ? cvt_bf16x2(values[0], values[1]) : cvt_f16x2(values[0], values[1]);
}

// 16 bytes: kLanes values. `address` is a multiple of 16.
__device__ __forceinline__ void store_vector(wide_t* address, const float* values) {
    constexpr int kStep = kLanes / 4;  // values in a word
    *reinterpret_cast<uint4*>(address) =
        make_uint4(word_of(values), word_of(values + kStep), word_of(values + 2 * kStep), word_of(values + 3 * kStep));
}

// `address` is a multiple of 16.
__device__ __forceinline__ void store_eight(wide_t* address, const float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += kLanes) store_vector(address + i, values + i);
}

// The first `count` of kCount values, at any address.
template <int kCount>
__device__ __forceinline__ void store_elements(wide_t* address, const float (&values)[kCount], long long count) {
#pragma unroll
    for (int i = 0; i < kCount; i++)
        if (i < count) address[i] = narrow(values[i]);
}

}  // namespace twin
