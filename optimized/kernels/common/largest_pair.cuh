// The largest of a thread's 16-bit numbers, which it has two at a time, in a register.
//
// NaN is passed over, and nothing is below +0. So the result's fp32 word has the order of its value.
#pragma once
#include "ptx/cvt.cuh"
#include "ptx/max.cuh"

namespace twin {

// kWide: 1 bf16, 2 fp16, as WIDE (wide.cuh).
template <int kWide>
struct LargestPair {
    unsigned pair = 0;

    __device__ __forceinline__ void take(unsigned other) { pair = max_pairs<kWide>(pair, other); }
    __device__ __forceinline__ void take_magnitudes(unsigned other) { take(other & 0x7FFF7FFF); }

    // The larger half, in fp32.
    __device__ __forceinline__ unsigned word() const {
        return max(wide(static_cast<unsigned short>(pair)), wide(static_cast<unsigned short>(pair >> 16)));
    }
    // The largest of a warp's numbers.
    __device__ __forceinline__ float of_warp() const { return __uint_as_float(__reduce_max_sync(0xFFFFFFFF, word())); }

private:
    static __device__ __forceinline__ unsigned wide(unsigned short half) {
        if constexpr (kWide == 1) return static_cast<unsigned>(half) << 16;
        return __float_as_uint(cvt_f32_f16(half));
    }
};

}  // namespace twin
