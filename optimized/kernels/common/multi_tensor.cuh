// One launch for many tensors: a block's tensor, and eight neighbours that a thread loads and stores.
//
// Blocks are numbered through all tensors, those of tensor i from first_block on. The table of tensors is a kernel
// argument by value. T is float or WIDE's type.
#pragma once
#include "wide.cuh"

namespace twin {

constexpr int kThreads = 256;
constexpr int kElements = 8;

// The last tensor whose first block is not beyond this block. kCapacity is a power of two.
template <int kCapacity, class Entry>
__device__ __forceinline__ const Entry& tensor_of_block(const Entry* tensors, int count) {
    int at = 0;
    for (int step = kCapacity / 2; step > 0; step /= 2)
        if (at + step < count && tensors[at + step].first_block <= static_cast<int>(blockIdx.x)) at += step;
    return tensors[at];
}

template <class T>
struct alignas(16) Sixteen {
    T element[16 / sizeof(T)];
};

template <class T>
__device__ __forceinline__ float wide_of(T x) {
    if constexpr (sizeof(T) == 4)
        return x;
    else
        return widen(static_cast<wide_t>(x));
}

template <class T>
__device__ __forceinline__ T narrow_to(float x) {
    if constexpr (sizeof(T) == 4)
        return x;
    else
        return narrow(x);
}

// Elements from `at` on; those from `count` on read as zero. `whole`: all eight exist, at an aligned address.
template <class T>
__device__ __forceinline__ void load(float (&value)[kElements], const T* x, long long at, long long count, bool whole) {
    constexpr int lanes = 16 / sizeof(T);
    if (whole) {
#pragma unroll
        for (int i = 0; i < kElements; i += lanes) {
            const Sixteen<T> part = *reinterpret_cast<const Sixteen<T>*>(x + at + i);
#pragma unroll
            for (int j = 0; j < lanes; j++) value[i + j] = wide_of(part.element[j]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kElements; i++) value[i] = at + i < count ? wide_of(x[at + i]) : 0.0f;
    }
}

template <class T>
__device__ __forceinline__ void store(T* x, const float (&value)[kElements], long long at, long long count,
                                      bool whole) {
    constexpr int lanes = 16 / sizeof(T);
    if (whole) {
#pragma unroll
        for (int i = 0; i < kElements; i += lanes) {
            Sixteen<T> part;
#pragma unroll
            for (int j = 0; j < lanes; j++) part.element[j] = narrow_to<T>(value[i + j]);
            *reinterpret_cast<Sixteen<T>*>(x + at + i) = part;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kElements; i++)
            if (at + i < count) x[at + i] = narrow_to<T>(value[i]);
    }
}

}  // namespace twin
