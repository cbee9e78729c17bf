// The amax of what a kernel stores, where it is wanted: its warps or blocks raise a fp32 word that is +0 at first. An fp32
// number of 0 or more has the order of its word. NaN is passed over.
#pragma once
#include "attention_tile.cuh"
#include "common/current_scale.cuh"
#include "common/largest_pair.cuh"

namespace twin {

template <class Format, bool kWanted>
struct Amax {
    LargestPair<same_type<Format, BF16> ? 1 : 2> largest;

    // For `store_rows`.
    __device__ __forceinline__ auto also() {
        return [this](unsigned pair) { largest.take_magnitudes(pair); };
    }
    __device__ __forceinline__ void leave_of_warp(unsigned* word) const {
        const float most = largest.of_warp();
        if (threadIdx.x % 32 == 0) atomicMax(word, __float_as_uint(most));
    }
    template <int kWarps>
    __device__ __forceinline__ void leave_of_block(unsigned* word) const {
        const float most = largest_of_block<kWarps>(__uint_as_float(largest.word()));
        if (threadIdx.x == 0) atomicMax(word, __float_as_uint(most));
    }
};

template <class Format>
struct Amax<Format, false> {
    __device__ __forceinline__ Nothing also() const { return {}; }
    __device__ __forceinline__ void leave_of_warp(unsigned*) const {}
    template <int kWarps>
    __device__ __forceinline__ void leave_of_block(unsigned*) const {}
};

}  // namespace twin
